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

import array
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
from numpy.typing import ArrayLike

from jaxscale.data.config import DataConfig
from jaxscale.data.header import ENDINGS, FORMAT, VERSION, WAY_OUT, read_header, sealed
from jaxscale.data.lineage import lineage_bytes, parse_lineage
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
    index: ShardIndex
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
        return self.index.kept[0]

    @property
    def source_ids(self) -> np.ndarray:
        """uint16[documents], into header["sources"]; from here on in memory."""
        return self.index.kept[1]


def fetch_indexes(shards: Sequence[Shard]) -> None:
    """Brings the indexes of shards in a bucket, several at a time."""
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
        list(pool.map(lambda shard: shard.index.fetch(), shards))


def dtype_for(largest_id: int) -> np.dtype:
    """uint16 if every id up to `largest_id` fits, else uint32, little-endian."""
    return np.dtype("<u2") if largest_id <= np.iinfo(np.uint16).max else np.dtype("<u4")


class ShardWriter:
    """Writes NAME.bin as documents come, and the rest at the end; memory grows only with the number of documents.

    A document or block that is refused leaves the shard as it was before.
    """

    def __init__(
        self, folder: Path, name: str, *, vocab_size: int, eos_id: int, sources: Sequence[str], trained: bool = False
    ):
        """trained: whether each document comes with marks of the tokens that are learned."""
        if not 0 <= eos_id < vocab_size:
            raise BadInput(f"the end token {eos_id} is not among the {vocab_size:,} ids of the vocabulary")
        self._base, self._dtype, self._vocab_size = Path(folder) / name, dtype_for(vocab_size - 1), vocab_size
        self._eos_id, self._sources = eos_id, list(sources)
        self._bin = open(f"{self._base}.bin", "wb")  # noqa: SIM115 - closed by finish
        self._marks = open(f"{self._base}.trained", "wb") if trained else None  # noqa: SIM115
        self._sha256, self._marks_sha256 = hashlib.sha256(), hashlib.sha256()
        self._ends, self._document_sources = array.array("q", [0]), array.array("H")
        self._max_id = eos_id

    @property
    def num_tokens(self) -> int:
        """Tokens so far, the end tokens among them."""
        return self._ends[-1]

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._document_sources)

    def add(self, ids: np.ndarray, source: str, trained: np.ndarray | None = None) -> None:
        """Appends one document and its end token. Raises BadInput as add_block does, or for an unknown source.

        trained: bool[ids + 1], for the end token too, where the writer keeps marks.
        """
        if source not in self._sources:
            raise BadInput(f"{self._base}: source {source!r} is none of {self._sources}")
        self.add_block(np.append(ids, self._eos_id), [len(ids) + 1], [self._sources.index(source)], trained)

    def add_block(
        self, ids: np.ndarray, lengths: ArrayLike, sources: ArrayLike, trained: np.ndarray | None = None
    ) -> None:
        """Appends many documents with one write, each with the end token as its last id.

        Args: ids: of all documents, one after the other. lengths: ids of each. sources: number of the source of each.
        trained: bool[ids], where the writer keeps marks.
        Raises: BadInput for an id that the vocabulary does not have, for lengths and sources that do not fit.
        """
        assert (trained is None) == (self._marks is None), "marks are for every document of a shard or for none"
        ids, lengths, sources = np.asarray(ids), np.asarray(lengths, np.int64), np.asarray(sources, np.int64)
        if ids.ndim != 1 or lengths.ndim != 1 or (lengths < 1).any() or int(lengths.sum()) != len(ids):
            raise BadInput(f"{self._base}: {len(ids):,} ids are not the {len(lengths):,} documents that lengths tells")
        if len(sources) != len(lengths) or (sources >= len(self._sources)).any() or (sources < 0).any():
            raise BadInput(
                f"{self._base}: {len(sources):,} source numbers for {len(lengths):,} documents, sources {self._sources}"
            )
        if not len(lengths):
            return
        ends, largest = np.cumsum(lengths), int(ids.max())
        if largest >= self._vocab_size or (ids.dtype.kind != "u" and int(ids.min()) < 0):
            place = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
            document = self.num_documents + int(ends.searchsorted(place, side="right"))
            raise BadInput(
                f"token id {int(ids[place])} in document {document:,} of {self._base}.bin is not among the "
                f"{self._vocab_size:,} ids of the vocabulary; the text was encoded with another tokenizer"
            )
        if not (ids[ends - 1] == self._eos_id).all():
            raise BadInput(f"{self._base}: a document does not end with the end token {self._eos_id}")
        content = np.ascontiguousarray(ids, self._dtype)
        self._bin.write(content.data)
        self._sha256.update(content)
        if trained is not None:
            marks = np.asarray(trained, np.uint8).tobytes()
            self._marks.write(marks)
            self._marks_sha256.update(marks)
        self._max_id = max(self._max_id, largest)
        self._ends.frombytes((ends + self._ends[-1]).tobytes())
        self._document_sources.frombytes(sources.astype(np.uint16).tobytes())

    def finish(
        self, token_bytes: np.ndarray | None, header: dict[str, Any], lineage: "pyarrow.Table | None" = None
    ) -> None:
        """Writes index and header, all of it safe against a power cut.

        Args: header: what the caller knows of the text. lineage: a row for each document, as lineage.py says.
        """
        sums = {"bin": self._sha256.hexdigest()}
        if self._marks:
            sums["trained"] = self._marks_sha256.hexdigest()
        for file in filter(None, (self._bin, self._marks)):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        about = {"dtype": self._dtype.name, "num_tokens": self._ends[-1], "max_id": self._max_id}
        offsets, source_ids = np.array(self._ends, "<i8"), np.array(self._document_sources, "<u2")
        write_index(self._base, offsets, source_ids, token_bytes, sums, self._sources, {**about, **header}, lineage)

    def abandon(self) -> None:
        """Closes its files."""
        for file in filter(None, (self._bin, self._marks)):
            file.close()


def write_index(
    base: Path,
    offsets: np.ndarray,
    source_ids: np.ndarray,
    token_bytes: np.ndarray | None,
    sums: dict[str, str],
    sources: Sequence[str],
    header: dict[str, Any],
    lineage: "pyarrow.Table | None" = None,
) -> None:
    """Everything of a shard but its .bin, whose sha256 is sums['bin']; the header last."""
    contents = {"idx": offsets.tobytes(), "src": source_ids.tobytes()}
    if token_bytes is not None:
        buffer = io.BytesIO()
        np.save(buffer, token_bytes.astype("<i4"), allow_pickle=False)
        contents["token_bytes"] = buffer.getvalue()
    if lineage is not None:
        contents["docs"] = lineage_bytes(lineage, len(source_ids))
    for name, content in contents.items():
        sums = {**sums, name: hashlib.sha256(content).hexdigest()}
        write_synced(Path(f"{base}{ENDINGS[name]}"), content)
    whole = {
        "format": FORMAT,
        "version": VERSION,
        "bin": f"{base.name}.bin",
        "num_documents": len(source_ids),
        "sources": list(sources),
        "sha256": sums,
        **header,
    }
    write_synced(Path(f"{base}.json"), sealed(whole))


def write_synced(path: Path, content: bytes) -> None:
    """Writes the file and waits until the disk has it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
