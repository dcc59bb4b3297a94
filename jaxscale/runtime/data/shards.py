"""Token shards on disk: ids in a raw little-endian .bin, document offsets, and a JSON header.

NAME.bin              ids: uint16 if the vocabulary's largest is at most 65535, else uint32
NAME.idx              int64[documents + 1]: document starts, and the end
NAME.src              uint16[documents]: source of each document
NAME.token_bytes.npy  int32[vocabulary]: bytes of text per id; absent without a tokenizer
NAME.trained          uint8[tokens]: loss mask; absent if all 1
NAME.docs.parquet     lineage, see shard_writer.py; absent if unknown
NAME.json             the header, written last: "bin" is the path of the .bin, "sha256" has the hash of
                      each file, including the header
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.verified import HASHED, Expected, find_damaged, read_verified, snapshot_files
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.tokenizer.base import Tokenizer, begin_names
from jaxscale.system.digest import json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import Unreadable, cannot_read, check_regular, open_regular, parse_json
from jaxscale.system.paths import read_bytes

if TYPE_CHECKING:
    import pyarrow.parquet

FORMAT, VERSION = "jaxscale-tokens", 2
OLD_VERSION = 1  # without the header's own sha256
HEADER_TYPES = {
    "bin": str, "dtype": str, "num_tokens": int, "num_documents": int, "max_id": int, "text_bytes": int,
    "sources": list, "files": list, "skipped": dict, "sha256": dict, "tokenizer": dict,
}  # fmt: skip
REQUIRED_KEYS = {"sha256": ("bin", "idx", "src"), "tokenizer": ("name", "eos_token", "fingerprint")}
FILE_TYPES = {"name": str, "source": str, "documents": int}
SUFFIXES = {
    "bin": ".bin",
    "idx": ".idx",
    "src": ".src",
    "token_bytes": ".token_bytes.npy",
    "docs": ".docs.parquet",
    "trained": ".trained",
}
HEADER_SUM = "json"  # key in "sha256": the hash of the header without this entry
SHA256 = re.compile(r"[0-9a-f]{64}")
FIX = "delete the folder to recreate it, or restore the file"
DTYPES = ("uint8", "uint16", "uint32", "int64")  # ours are uint16 or uint32; imported files may have any


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """Offsets and sources of the documents of a shard, read on demand."""

    header: Mapping[str, Any]
    header_path: str
    paths: Mapping[str, str | Callable[[], str]]  # of "idx" and "src", or functions that fetch them
    one_source: bool = False  # all documents have source 0

    def fetch(self) -> tuple[str, str]:
        """Returns the paths of both files, downloaded from their bucket if needed."""
        idx, src = (path() if callable(path) else path for path in (self.paths["idx"], self.paths["src"]))
        return idx, src

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Reads (offsets int64[documents + 1], sources uint16[documents] into header["sources"]), not cached."""
        header, (idx, src) = self.header, self.fetch()
        documents = header["num_documents"]
        offsets, source_ids = read_array(idx, "<i8", documents + 1), read_array(src, "<u2", documents)
        if offsets[0] != 0 or offsets[-1] != header["num_tokens"] or (np.diff(offsets) < 0).any():
            raise BadInput(f"{idx} does not match {self.header_path}; {FIX}")
        if documents and source_ids.max() >= len(header["sources"]):
            raise BadInput(f"{src} does not match {self.header_path}; {FIX}")
        return offsets, np.zeros_like(source_ids) if self.one_source else source_ids

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
        what = "truncated" if actual < size else "too long"
        raise BadInput(f"{path} has {actual:,} bytes instead of the {size:,} in {size_source}: it is {what}; {fix}")


def changed_line(path: str) -> str:
    """Returns the message for a file whose hash does not match."""
    return f"{path} was changed after it was written: its sha256 does not match; {FIX}"


def tokenizer_header(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """Returns the header's "tokenizer" entry."""
    return {
        "name": name,
        "eos_token": tokenizer.eos_token,
        "begin_tokens": begin_names(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
    }


def file_entry(file: SourceFile, documents: int) -> dict[str, Any]:
    """Returns an entry of the header's "files"."""
    return {"name": file.name, "source": file.source, "documents": documents}


def unknown_tokenizer_header(file: dict[str, Any], eos_id: int | None, vocab_size: int = 0) -> dict[str, Any]:
    """Returns header entries for token ids of an unknown tokenizer. file: its entry in "files"."""
    tokenizer = {"name": "", "eos_token": "", "vocab_size": vocab_size, "fingerprint": ""}
    return {"tokenizer": tokenizer, "eos_id": eos_id, "text_bytes": 0, "skipped": {}, "files": [file]}


def encode_header(header: dict[str, Any]) -> bytes:
    """Returns the header as JSON, including its own sha256."""
    plain = json.loads(json.dumps(header))
    return json.dumps({**plain, "sha256": {**plain["sha256"], HEADER_SUM: json_sha256(plain)}}, indent=1).encode()


def read_header(path: Path) -> dict[str, Any] | None:
    """Returns the header next to a .bin, or at `path`; None if there is none of ours. Raises BadInput if invalid."""
    path = path.with_suffix(".json")
    try:
        header = parse_json(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        header, reason = None, error.strerror
    except OSError as error:
        raise cannot_read(path, error) from None
    except Unreadable:
        raise
    except BadInput as error:
        header, reason = None, str(error)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        if path.with_suffix(".src").exists():
            reason = reason if header is None else f"its 'format' is not {FORMAT!r}"
            raise BadInput(f"{path} is not a valid header, although its .src exists ({reason}); {FIX}")
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} is a folder, a pipe or a device, not a file")
        return None
    if header.get("version") not in (OLD_VERSION, VERSION):
        raise BadInput(f"{path} has format version {header.get('version')}; this program reads version {VERSION}")
    check_header(path, header)
    sums = {name: sum_ for name, sum_ in header["sha256"].items() if name != HEADER_SUM}
    if unknown := sorted(sums.keys() - SUFFIXES.keys()):
        raise BadInput(f"{path} has a sha256 of {unknown[0]!r}, which is not a file of a shard; {FIX}")
    expected = json_sha256({**header, "sha256": sums}) if header["version"] == VERSION else None  # OLD_VERSION has none
    if header["sha256"].get(HEADER_SUM) != expected:
        raise BadInput(f"{path} was changed after it was written: its own sha256 does not match; {FIX}")
    return {**header, "sha256": sums}


def check_header(path: Path, header: dict[str, Any]) -> None:
    """Raises BadInput for a missing entry or one of the wrong type."""
    for key, kind in HEADER_TYPES.items():
        value = header.get(key)
        if value is None or type(value) is not kind or not all(name in value for name in REQUIRED_KEYS.get(key, ())):
            raise BadInput(f"{path} has an invalid {key!r}; {FIX}")
        if kind is int and value < 0:
            raise BadInput(f"{path} has an invalid {key!r}: it is {value}; {FIX}")
    checks = {
        "bin": "\0" not in header["bin"],
        "dtype": header["dtype"] in DTYPES,
        "sources": all(isinstance(name, str) for name in header["sources"]),
        "files": all(
            isinstance(file, dict) and all(has_type(file.get(key), kind) for key, kind in FILE_TYPES.items())
            for file in header["files"]
        ),
        "skipped": all(type(number) is int for number in header["skipped"].values()),
        "tokenizer": all(isinstance(header["tokenizer"][name], str) for name in REQUIRED_KEYS["tokenizer"]),
        "sha256": all(isinstance(sum_, str) and SHA256.fullmatch(sum_) for sum_ in header["sha256"].values()),
        "eos_id": header.get("eos_id") is None or type(header["eos_id"]) is int,
    }
    if bad := [key for key, value in checks.items() if not value]:
        raise BadInput(f"{path} has an invalid {bad[0]!r}; {FIX}")


def has_type(value: Any, kind: type) -> bool:
    """Returns True for a value of this type; an int must be at least 0."""
    return type(value) is kind and (kind is not int or value >= 0)
