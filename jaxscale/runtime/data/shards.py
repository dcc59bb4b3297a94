"""Opens and verifies token shards, which consist of a raw little-endian .bin of ids, an index, and a JSON header.

NAME.bin              ids, as uint16 if the vocabulary's largest id is at most 65535, else uint32
NAME.idx              int64[documents + 1]: start of each document, and the end
NAME.src              uint16[documents]: source of each document
NAME.token_bytes.npy  int32[vocabulary]: number of text bytes per id; missing without a tokenizer
NAME.trained          uint8[tokens]: loss mask; missing if all values are 1
NAME.docs.parquet     lineage, see shard_writer.py; missing if unknown
NAME.json             header, written last, with the path of the .bin in "bin", and the sha256 of each file,
                      including the header, in "sha256"
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
OLD_VERSION = 1  # version without the sha256 of the header
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
HEADER_SUM = "json"  # key in "sha256" of the hash of the header, which excludes this entry
SHA256 = re.compile(r"[0-9a-f]{64}")
FIX = "delete the folder to recreate it, or restore the file"
DTYPES = ("uint8", "uint16", "uint32", "int64")  # imported files may have any dtype; shards have uint16 or uint32


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """Offsets and sources of a shard's documents, read on demand."""

    header: Mapping[str, Any]
    header_path: str
    paths: Mapping[str, str | Callable[[], str]]  # paths of "idx" and "src", or functions that download the files
    one_source: bool = False  # True: all documents have source 0

    def fetch(self) -> tuple[str, str]:
        """Returns the paths of the .idx and .src, downloaded from a bucket if needed."""
        idx, src = (path() if callable(path) else path for path in (self.paths["idx"], self.paths["src"]))
        return idx, src

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (offsets int64[documents + 1], indices uint16[documents] into header["sources"]) without caching."""
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
        """Returns the result of read(), cached in memory."""
        return self.read()


class Shard(NamedTuple):
    """An open shard, whose .bin and index are read on demand."""

    header: dict[str, Any]
    bin_path: str
    doc_index: ShardIndex
    token_bytes: np.ndarray | None
    docs_path: str | Callable[[], str] = ""  # path of the lineage, or a function that downloads the lineage
    loss_mask_path: str = ""  # '' if the loss mask is all 1
    expected: Mapping[str, Expected] = MappingProxyType({})  # expected state of mapped local files

    @property
    def fingerprint(self) -> str:
        """Returns the hash of ids, documents, loss mask and tokenizer, which does not depend on names or dates."""
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
        """Returns the path or URL of the .bin, for messages."""
        return self.bin_path.partition("#")[0] if "://" in self.bin_path else self.bin_path

    @property
    def lineage_path(self) -> str:
        """Returns the path of the lineage, downloaded from a bucket if needed."""
        return str(self.docs_path() if callable(self.docs_path) else self.docs_path)

    @property
    def offsets(self) -> np.ndarray:
        """Returns int64[documents + 1], the start of each document and the end; cached in memory."""
        return self.doc_index.cached[0]

    @property
    def source_ids(self) -> np.ndarray:
        """Returns uint16[documents], indices into header["sources"]; cached in memory."""
        return self.doc_index.cached[1]


def open_shard(
    path: Path, *, with_token_bytes: bool = True, parts: Mapping[str, Any] | None = None, outside: bool = False
) -> Shard:
    """Opens a shard, given its .bin or .json. Raises BadInput naming the file if the sizes do not match.

    parts: {part: path} for files that are not next to the header. For "idx", "src" and "docs", the value can also be a
    function that downloads the file and returns its path. The size of a .bin in a bucket is not checked.
    outside: True to allow a .bin in another folder, as in the cached index of a raw .bin.
    """
    header, base = read_header(path), path.with_suffix("")
    if header is None:
        raise BadInput(f"{base}.json is not the header of a token shard; {FIX}")
    path_of: dict[str, Any] = {name: f"{base}{ending}" for name, ending in SUFFIXES.items()}
    if not outside and (header["bin"] != os.path.basename(header["bin"]) or header["bin"] in ("", ".", "..")):
        raise BadInput(
            f"{base}.json names {header['bin']!r} as its .bin, which must be in the same folder; {FIX}"
        )  # a header may be from an untrusted source
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
    """Yields (part, path, sha256) for each file of a shard except the header. path: path of the header."""
    header, base = read_header(path), path.with_suffix("")
    if header is None:
        raise BadInput(f"{base}.json is not the header of a token shard; {FIX}")
    for name, sha256 in header["sha256"].items():
        yield name, str(base.parent / header["bin"]) if name == "bin" else f"{base}{SUFFIXES[name]}", sha256


def verify_shards(paths: Iterable[Path], cfg: DataConfig, cache: Path, say: Callable[[str], None]) -> None:
    """Verifies the hashes of shards, unless data.verify='size'. Raises BadInput for changed files.

    A missing lineage file is not an error.
    """
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
    """Opens a lineage file without checking its hash. Raises BadInput if the file cannot be read.

    Use read_row_group(..., use_threads=False), because an Arrow thread that holds a Python object at exit aborts the
    process (github.com/apache/arrow/issues/34314).
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}; {FIX}") from None


def read_token_bytes(path: str) -> np.ndarray | None:
    """Returns int32[vocabulary], the bytes per id, or None for a missing file. Raises BadInput for a damaged file."""
    if not os.path.lexists(path):
        return None
    content = io.BytesIO(read_whole(path))
    try:
        table = np.load(content, allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise BadInput(f"{path} cannot be read: {error}; {FIX}") from None
    if not isinstance(table, np.ndarray) or table.ndim != 1 or table.dtype != np.int32:
        raise BadInput(f"{path} is not an int32 array of bytes per id; {FIX}")
    return table


def read_whole(path: str) -> bytes:
    """Returns the content of a regular file. Raises BadInput naming the file if reading fails."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise cannot_read(path, error, f"; {FIX}") from None


def read_array(path: str, dtype: str, count: int) -> np.ndarray:
    """Returns the content of a raw file as an array of `count` elements."""
    expect_size(path, count * np.dtype(dtype).itemsize)
    return np.frombuffer(read_whole(path), dtype)


def expect_size(path: str, size: int, size_source: str = "its header", fix: str = FIX) -> None:
    """Raises BadInput if a file is missing or has a different size. size_source: origin of the size in messages."""
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
    """Returns the "tokenizer" entry of a header."""
    return {
        "name": name,
        "eos_token": tokenizer.eos_token,
        "begin_tokens": begin_names(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
    }


def file_entry(file: SourceFile, documents: int) -> dict[str, Any]:
    """Returns an entry of the list "files" of a header."""
    return {"name": file.name, "source": file.source, "documents": documents}


def unknown_tokenizer_header(file: dict[str, Any], eos_id: int | None, vocab_size: int = 0) -> dict[str, Any]:
    """Returns the header entries for token ids of an unknown tokenizer. file: result of file_entry()."""
    tokenizer = {"name": "", "eos_token": "", "vocab_size": vocab_size, "fingerprint": ""}
    return {"tokenizer": tokenizer, "eos_id": eos_id, "text_bytes": 0, "skipped": {}, "files": [file]}


def encode_header(header: dict[str, Any]) -> bytes:
    """Returns the header as JSON, with an added sha256 of the header."""
    plain = json.loads(json.dumps(header))
    return json.dumps({**plain, "sha256": {**plain["sha256"], HEADER_SUM: json_sha256(plain)}}, indent=1).encode()


def read_header(path: Path) -> dict[str, Any] | None:
    """Returns the header of a shard, given its .bin or .json, or None for other files. Raises BadInput if invalid."""
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
            raise BadInput(f"{path} is missing or invalid, but its .src exists ({reason}); {FIX}")
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} is a folder, a pipe or a device, not a file")
        return None
    if header.get("version") not in (OLD_VERSION, VERSION):
        raise BadInput(f"{path} has format version {header.get('version')}; this jaxscale supports version {VERSION}")
    check_header(path, header)
    sums = {name: sum_ for name, sum_ in header["sha256"].items() if name != HEADER_SUM}
    if unknown := sorted(sums.keys() - SUFFIXES.keys()):
        raise BadInput(f"{path} has a sha256 for {unknown[0]!r}, which is not part of a shard; {FIX}")
    expected = json_sha256({**header, "sha256": sums}) if header["version"] == VERSION else None  # not in OLD_VERSION
    if header["sha256"].get(HEADER_SUM) != expected:
        raise BadInput(f"{path} was changed after it was written: its contents do not match its sha256; {FIX}")
    return {**header, "sha256": sums}


def check_header(path: Path, header: dict[str, Any]) -> None:
    """Raises BadInput if a header entry is missing or invalid."""
    for key, kind in HEADER_TYPES.items():
        value = header.get(key)
        if value is None or type(value) is not kind or not all(name in value for name in REQUIRED_KEYS.get(key, ())):
            raise BadInput(f"{path} has an invalid {key!r}; {FIX}")
        if kind is int and value < 0:
            raise BadInput(f"{path} has an invalid {key!r}: {value} is negative; {FIX}")
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
    """Returns True if the value has exactly this type. An int must also be at least 0."""
    return type(value) is kind and (kind is not int or value >= 0)
