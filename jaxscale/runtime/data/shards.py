"""Token shards on disk: ids in a raw little-endian .bin, document offsets, and a JSON header.

NAME.bin              ids: uint16 if the vocabulary's largest is at most 65535, else uint32
NAME.idx              int64[documents + 1]: document starts, and the end
NAME.src              uint16[documents]: source of each document
NAME.token_bytes.npy  int32[vocabulary]: bytes of text per id; absent without a tokenizer
NAME.trained          uint8[tokens]: loss mask; absent if all 1
NAME.docs.parquet     lineage, see shard_writer.py; absent if unknown
NAME.json             the header, written last, see header.py: "bin" is the path of the .bin, "sha256" has the hash of
                      each file, including the header
"""

import contextlib
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

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.header import FIX, SUFFIXES, read_header
from jaxscale.runtime.data.verified import HASHED, Expected, find_damaged, read_verified, snapshot_files
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import cannot_read, check_regular, open_regular

if TYPE_CHECKING:
    import pyarrow.parquet

FETCHED_AT_ONCE = 8  # indexes of a bucket, one round trip each


class ShardIndex:
    """Offsets and sources of the documents of a shard, read on demand."""

    def __init__(self, header: Mapping[str, Any], header_path: str, paths: Mapping[str, str | Callable[[], str]]):
        """paths: of "idx" and "src", or functions that fetch them."""
        self._header, self._header_path, self._paths, self._one_source = header, header_path, paths, False

    def with_one_source(self) -> "ShardIndex":
        """Returns the same documents, all with source 0."""
        other = ShardIndex(self._header, self._header_path, self._paths)
        other._one_source = True
        return other

    def fetch(self) -> tuple[str, str]:
        """Returns the paths of both files, downloaded from their bucket if needed."""
        idx, src = (path() if callable(path) else path for path in (self._paths["idx"], self._paths["src"]))
        return idx, src

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Reads (offsets int64[documents + 1], sources uint16[documents] into header["sources"]), not cached."""
        header, (idx, src) = self._header, self.fetch()
        documents = header["num_documents"]
        offsets, source_ids = read_array(idx, "<i8", documents + 1), read_array(src, "<u2", documents)
        if offsets[0] != 0 or offsets[-1] != header["num_tokens"] or (np.diff(offsets) < 0).any():
            raise BadInput(f"{idx} does not match {self._header_path}; {FIX}")
        if documents and source_ids.max() >= len(header["sources"]):
            raise BadInput(f"{src} does not match {self._header_path}; {FIX}")
        return offsets, np.zeros_like(source_ids) if self._one_source else source_ids

    @functools.cached_property
    def cached(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same, cached in memory."""
        return self.read()


class Shard(NamedTuple):
    """An open shard; its .bin and index are read on demand."""

    header: dict[str, Any]
    bin_path: str
    doc_index: ShardIndex
    token_bytes: np.ndarray | None
    docs_path: str | Callable[[], str] = ""  # path of the lineage, or a function that fetches it
    loss_mask_path: str = ""  # '': all 1
    expected: Mapping[str, Expected] = MappingProxyType({})  # expected state of mapped local files

    @property
    def fingerprint(self) -> str:
        """Returns the hash of ids, documents, loss mask and tokenizer; independent of names, folders and dates."""
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
        """Returns the location of its ids, for messages."""
        return self.bin_path.partition("#")[0] if "://" in self.bin_path else self.bin_path

    @property
    def lineage_path(self) -> str:
        """Returns the path of its lineage, downloaded from its bucket if needed."""
        return str(self.docs_path() if callable(self.docs_path) else self.docs_path)

    @property
    def offsets(self) -> np.ndarray:
        """Returns int64[documents + 1]: document starts, and the end; cached in memory."""
        return self.doc_index.cached[0]

    @property
    def source_ids(self) -> np.ndarray:
        """Returns uint16[documents], indices into header["sources"]; cached in memory."""
        return self.doc_index.cached[1]


def fetch_indexes(shards: Sequence[Shard]) -> None:
    """Downloads the indexes of shards in a bucket concurrently."""
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as pool:
        list(pool.map(lambda shard: shard.doc_index.fetch(), shards))


def open_shard(
    path: Path, *, with_token_bytes: bool = True, parts: Mapping[str, Any] | None = None, outside: bool = False
) -> Shard:
    """Opens the shard with this .bin or .json. Raises BadInput naming the file if sizes do not match.

    Args: parts: paths of "bin", "idx", "src", "token_bytes" and "docs" that are not next to the header; "idx", "src"
    and "docs" may be functions that fetch them. A .bin in a bucket is not checked. outside: the .bin may be in any
    folder, as for the cached index of a raw .bin.
    """
    header, base = read_header(path), path.with_suffix("")
    if header is None:
        raise BadInput(f"{base}.json is not the header of a token shard; {FIX}")
    path_of: dict[str, Any] = {name: f"{base}{ending}" for name, ending in SUFFIXES.items()}
    if not outside and (header["bin"] != os.path.basename(header["bin"]) or header["bin"] in ("", ".", "..")):
        raise BadInput(
            f"{base}.json names {header['bin']!r} as its .bin, which must be in the same folder; {FIX}"
        )  # a header may be untrusted
    path_of |= {"bin": str(base.parent / header["bin"]), **(parts or {})}
    documents, itemsize = header["num_documents"], np.dtype(header["dtype"]).itemsize
    if "://" not in path_of["bin"]:
        expect_size(path_of["bin"], header["num_tokens"] * itemsize)
    for name, size in (("idx", 8 * (documents + 1)), ("src", 2 * documents)):
        if not callable(path_of[name]):
            expect_size(path_of[name], size)
    token_bytes = read_token_bytes(path_of["token_bytes"]) if with_token_bytes else None
    mask_path = path_of["trained"] if "trained" in header["sha256"] else ""
    if mask_path:
        expect_size(mask_path, header["num_tokens"])
    mapped = {path_of[name]: header["sha256"][name] for name in ("bin", *(["trained"] if mask_path else []))}
    watched = snapshot_files({path: sha256 for path, sha256 in mapped.items() if "://" not in path})
    index = ShardIndex(header, f"{base}.json", path_of)
    return Shard(header, path_of["bin"], index, token_bytes, path_of["docs"], mask_path, watched)


def shard_files(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (part, path, sha256) for each file of a shard except its header at `path`."""
    header, base = read_header(path), path.with_suffix("")
    if header is None:
        raise BadInput(f"{base}.json is not the header of a token shard; {FIX}")
    for name, sha256 in header["sha256"].items():
        yield name, str(base.parent / header["bin"]) if name == "bin" else f"{base}{SUFFIXES[name]}", sha256


def verify_shards(paths: Iterable[Path], cfg: DataConfig, cache: Path, say: Callable[[str], None]) -> None:
    """Hashes shards as data.verify requires. Raises BadInput for a mismatch; a lineage may be missing."""
    folders: dict[Path, dict[str, str]] = {}
    for path in paths if cfg.verify != "size" else ():
        files = {file: sha256 for name, file, sha256 in shard_files(path) if name != "docs" or os.path.lexists(file)}
        folders.setdefault(path.parent, {}).update(files)
    for folder, files in folders.items():
        known = read_verified(folder / HASHED)
        found = find_damaged(files, cache, str(folder), say, remember=cfg.verify == "hash", known=known)
        for file, problem in found.items():
            raise BadInput(f"{problem}; {FIX}" if problem else changed_line(file))


@contextlib.contextmanager
def open_lineage(path: str) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Opens a lineage, to be read by row group; its hash is not checked. Raises BadInput if it cannot be read.

    Read it with use_threads=False: an Arrow thread that holds Python's bytes at exit aborts the process
    (github.com/apache/arrow/issues/34314).
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}; {FIX}") from None


def read_token_bytes(path: str) -> np.ndarray | None:
    """Reads int32[vocabulary], or returns None if the file does not exist. Raises BadInput if it is damaged."""
    if not os.path.lexists(path):
        return None
    content = io.BytesIO(read_whole(path))
    try:
        table = np.load(content, allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise BadInput(f"{path} cannot be read: {error}; {FIX}") from None
    if not isinstance(table, np.ndarray) or table.ndim != 1 or table.dtype != np.int32:
        raise BadInput(f"{path} is not a table of bytes per id; {FIX}")
    return table


def read_whole(path: str) -> bytes:
    """Reads a regular file. Raises BadInput naming it on failure."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise cannot_read(path, error, f"; {FIX}") from None


def read_array(path: str, dtype: str, count: int) -> np.ndarray:
    """Reads a raw file as an array of `count` elements."""
    expect_size(path, count * np.dtype(dtype).itemsize)
    return np.frombuffer(read_whole(path), dtype)


def expect_size(path: str, size: int, size_source: str = "its header", fix: str = FIX) -> None:
    """Raises BadInput unless the file exists and has this size. size_source: origin of the size, for the message."""
    try:
        status = os.stat(path)
        check_regular(status.st_mode, path)
    except FileNotFoundError:
        raise BadInput(f"{path} is missing; {fix}") from None
    except OSError as error:
        raise cannot_read(path, error, f"; {fix}") from None
    except BadInput as error:
        raise BadInput(f"{error}; {fix}") from None
    if (actual := status.st_size) != size:
        what = "cut short" if actual < size else "too long"
        raise BadInput(f"{path} has {actual:,} bytes where {size_source} says {size:,}: it is {what}; {fix}")


def changed_line(path: str) -> str:
    """Returns the message for a file whose hash does not match."""
    return f"{path} was changed after it was written: its sha256 does not match; {FIX}"
