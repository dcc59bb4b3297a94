"""Token shards on disk: ids in a raw little-endian .bin, where documents begin, and a JSON header beside them.

NAME.bin              ids: uint16 if the vocabulary's largest is at most 65535, else uint32
NAME.idx              int64[documents + 1]: where each document begins, and the end
NAME.src              uint16[documents]: the source of each document
NAME.token_bytes.npy  int32[vocabulary]: bytes of text per id; absent where no tokenizer is known
NAME.trained          uint8[tokens]: 1 for a token that is learned; absent where every one is
NAME.docs.parquet     where each document came from, see lineage.py; absent where that is not known
NAME.json             the header, written last, see header.py; its "bin" says where the .bin lies, its "sha256" what
                      each file holds, itself among them
"""

import functools
import hashlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxscale.data.config import DataConfig
from jaxscale.data.header import ENDINGS, WAY_OUT, read_header
from jaxscale.data.lineage import parse_lineage
from jaxscale.data.verified import HASHED, Expected, damaged, expected, remembered
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import cannot_read, check_regular, open_regular

if TYPE_CHECKING:
    import pyarrow


FETCHED_AT_ONCE = 8  # indexes in a bucket: each is one round trip


class ShardIndex:
    """Where the documents of a shard begin and their sources, read when they are asked for."""

    def __init__(self, header: Mapping[str, Any], header_path: str, places: Mapping[str, str | Callable[[], str]]):
        """places: of "idx" and "src", or what fetches them."""
        self._header, self._header_path, self._places, self._one_source = header, header_path, places, False

    def of_one_source(self) -> "ShardIndex":
        """The same documents, all of source 0."""
        other = ShardIndex(self._header, self._header_path, self._places)
        other._one_source = True
        return other

    def fetch(self) -> tuple[str, str]:
        """The paths of both files, brought from their bucket first if they lie there."""
        idx, src = (place() if callable(place) else place for place in (self._places["idx"], self._places["src"]))
        return idx, src

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64[documents + 1], uint16[documents] into header["sources"]), not kept.

        Raises: BadInput naming the file that does not fit the header.
        """
        header, (idx, src) = self._header, self.fetch()
        documents = header["num_documents"]
        offsets, source_ids = read_array(idx, "<i8", documents + 1), read_array(src, "<u2", documents)
        if offsets[0] != 0 or offsets[-1] != header["num_tokens"] or (np.diff(offsets) < 0).any():
            raise BadInput(f"{idx} does not fit {self._header_path}; {WAY_OUT}")
        if documents and source_ids.max() >= len(header["sources"]):
            raise BadInput(f"{src} does not fit {self._header_path}; {WAY_OUT}")
        return offsets, np.zeros_like(source_ids) if self._one_source else source_ids

    @functools.cached_property
    def kept(self) -> tuple[np.ndarray, np.ndarray]:
        """The same, kept in memory."""
        return self.read()


class Shard(NamedTuple):
    """An open shard. Neither its .bin nor its index is in memory."""

    header: dict[str, Any]
    bin_path: str
    doc_index: ShardIndex
    token_bytes: np.ndarray | None
    docs_path: str | Callable[[], str] = ""  # of the lineage, or what fetches it
    trained_path: str = ""  # of the marks of tokens that are learned; empty: all are
    expected: Mapping[str, Expected] = MappingProxyType({})  # what local files that are mapped must stay

    @property
    def fingerprint(self) -> str:
        """Of ids, documents, marks and tokenizer; neither of names and folders nor of dates."""
        sums = self.header["sha256"]
        parts = [
            *(sums[name] for name in ("bin", "idx", "src")),
            self.header["tokenizer"]["fingerprint"],
            *self.header["sources"],
            *([sums["trained"]] if "trained" in sums else []),
        ]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    @property
    def place(self) -> str:
        """Where its ids are, for messages."""
        return self.bin_path.partition("#")[0] if "://" in self.bin_path else self.bin_path

    @property
    def lineage_path(self) -> str:
        """Where its lineage is, brought from its bucket first if it lies there."""
        return str(self.docs_path() if callable(self.docs_path) else self.docs_path)

    @property
    def offsets(self) -> np.ndarray:
        """int64[documents + 1]: where each document begins, and the end; from here on in memory."""
        return self.doc_index.kept[0]

    @property
    def source_ids(self) -> np.ndarray:
        """uint16[documents], into header["sources"]; from here on in memory."""
        return self.doc_index.kept[1]


def fetch_indexes(shards: Sequence[Shard]) -> None:
    """Brings the indexes of shards in a bucket, several at a time."""
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
        list(pool.map(lambda shard: shard.doc_index.fetch(), shards))


def open_shard(
    path: Path, *, with_token_bytes: bool = True, parts: Mapping[str, Any] | None = None, outside: bool = False
) -> Shard:
    """The shard of which `path` is the .bin or the .json. Raises BadInput naming the file if sizes do not fit.

    Args: parts: where "bin", "idx", "src", "token_bytes" and "docs" are, if not beside the header; all but the first
    and "token_bytes" may be what fetches them. A .bin in a bucket is not looked at. outside: its .bin may lie anywhere,
    as it does where our cache holds the index of a raw one.
    """
    header, base = read_header(path), path.with_suffix("")
    if header is None:
        raise BadInput(f"{base}.json is not the header of a token shard; {WAY_OUT}")
    place: dict[str, Any] = {name: f"{base}{ending}" for name, ending in ENDINGS.items()}
    if not outside and (header["bin"] != os.path.basename(header["bin"]) or header["bin"] in ("", ".", "..")):
        raise BadInput(
            f"{base}.json names {header['bin']!r} as its .bin, which must lie beside it; {WAY_OUT}"
        )  # it may come from anywhere
    place |= {"bin": str(base.parent / header["bin"]), **(parts or {})}
    documents, itemsize = header["num_documents"], np.dtype(header["dtype"]).itemsize
    if "://" not in place["bin"]:
        expect_size(place["bin"], header["num_tokens"] * itemsize)
    for name, size in (("idx", 8 * (documents + 1)), ("src", 2 * documents)):
        if not callable(place[name]):
            expect_size(place[name], size)
    token_bytes = read_token_bytes(place["token_bytes"]) if with_token_bytes else None
    trained = place["trained"] if "trained" in header["sha256"] else ""
    if trained:
        expect_size(trained, header["num_tokens"])
    mapped = {place[name]: header["sha256"][name] for name in ("bin", *(["trained"] if trained else []))}
    watched = expected({path: sha256 for path, sha256 in mapped.items() if "://" not in path})
    index = ShardIndex(header, f"{base}.json", place)
    return Shard(header, place["bin"], index, token_bytes, place["docs"], trained, watched)


def shard_files(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (name of the part, its path, its sha256) for each file of a shard but the header, which `path` is."""
    header, base = read_header(path), path.with_suffix("")
    if header is None:
        raise BadInput(f"{base}.json is not the header of a token shard; {WAY_OUT}")
    for name, sha256 in header["sha256"].items():
        yield name, str(base.parent / header["bin"]) if name == "bin" else f"{base}{ENDINGS[name]}", sha256


def expect_whole(paths: Iterable[Path], cfg: DataConfig, cache: Path, say: Callable[[str], None]) -> None:
    """Raises BadInput naming the first file that its shard's header does not describe, as far as data.verify asks for
    it; a shard's lineage may be missing.
    """
    folders: dict[Path, dict[str, str]] = {}
    for path in paths if cfg.verify != "size" else ():
        files = {file: sha256 for name, file, sha256 in shard_files(path) if name != "docs" or os.path.lexists(file)}
        folders.setdefault(path.parent, {}).update(files)
    for folder, files in folders.items():
        known = remembered(folder / HASHED)
        found = damaged(files, cache, str(folder), say, remember=cfg.verify == "hash", known=known)
        for file, problem in found.items():
            raise BadInput(f"{problem}; {WAY_OUT}" if problem else changed(file))


def read_lineage(shard: Shard, columns: Sequence[str] | None = None) -> "pyarrow.Table | None":
    """Where its documents came from, a row for each as lineage.py says, or None if that was not kept.

    Raises: BadInput naming the file if it is missing or not the one that was written.
    """
    if "docs" not in shard.header["sha256"]:
        return None
    path = shard.lineage_path
    content = read_whole(path)
    if hashlib.sha256(content).hexdigest() != shard.header["sha256"]["docs"]:
        raise BadInput(changed(path))
    try:
        return parse_lineage(content, columns)
    except BadInput as error:
        raise BadInput(f"{path} cannot be read: {error}; {WAY_OUT}") from None


def read_token_bytes(path: str) -> np.ndarray | None:
    """int32[vocabulary], or None if there is no such file. Raises BadInput naming it if it is damaged."""
    if not os.path.lexists(path):
        return None
    content = io.BytesIO(read_whole(path))
    try:
        table = np.load(content, allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise BadInput(f"{path} cannot be read: {error}; {WAY_OUT}") from None
    if not isinstance(table, np.ndarray) or table.ndim != 1 or table.dtype != np.int32:
        raise BadInput(f"{path} is no list of the bytes of each id; {WAY_OUT}")
    return table


def read_whole(path: str) -> bytes:
    """The content of a regular file. Raises BadInput naming it if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise cannot_read(path, error, f"; {WAY_OUT}") from None


def read_array(path: str, dtype: str, count: int) -> np.ndarray:
    """The whole of a raw file as an array of `count` elements."""
    expect_size(path, count * np.dtype(dtype).itemsize)
    return np.frombuffer(read_whole(path), dtype)


def expect_size(path: str, size: int, told_by: str = "its header", way_out: str = WAY_OUT) -> None:
    """Raises BadInput unless the file is there with exactly as many bytes as what is named tells."""
    try:
        status = os.stat(path)
        check_regular(status.st_mode, path)
    except FileNotFoundError:
        raise BadInput(f"{path} is missing; {way_out}") from None
    except OSError as error:
        raise cannot_read(path, error, f"; {way_out}") from None
    except BadInput as error:
        raise BadInput(f"{error}; {way_out}") from None
    if (actual := status.st_size) != size:
        what = "cut short" if actual < size else "too long"
        raise BadInput(f"{path} has {actual:,} bytes where {told_by} says {size:,}: it is {what}; {way_out}")


def changed(path: str) -> str:
    """The line for a file that holds something else than was written into it."""
    return f"{path} was changed after it was written: its sha256 is another; {WAY_OUT}"
