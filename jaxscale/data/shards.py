"""Token shards on disk: ids in a raw little-endian .bin, where documents begin, and a JSON header beside them.

NAME.bin              ids: uint16 if the vocabulary's largest is at most 65535, else uint32
NAME.idx              int64[documents + 1]: where each document begins, and the end
NAME.src              uint16[documents]: the source of each document
NAME.token_bytes.npy  int32[vocabulary]: bytes of text per id; absent where no tokenizer is known
NAME.json             the header, written last; its "bin" says where the .bin lies
"""

import array
import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.packing import DocumentTable

FORMAT, VERSION = "jaxscale-tokens", 1
HEADER = {  # what a header holds, and as what
    "bin": str, "dtype": str, "num_tokens": int, "num_documents": int, "max_id": int, "text_bytes": int,
    "sources": list, "files": list, "skipped": dict, "sha256": dict, "tokenizer": dict,
}  # fmt: skip
INNER = {"sha256": ("bin", "idx", "src"), "tokenizer": ("name", "eos_token", "fingerprint")}
WAY_OUT = "delete the folder to have it made again, or bring the file back"


class Shard(NamedTuple):
    """An open shard. Nothing of the .bin is in memory."""

    header: dict[str, Any]
    bin_path: str
    offsets: np.ndarray  # int64[documents + 1]
    source_ids: np.ndarray  # uint16[documents], into header["sources"]
    token_bytes: np.ndarray | None

    @property
    def fingerprint(self) -> str:
        """Of ids, documents and tokenizer; neither of names and folders nor of dates."""
        sums = self.header["sha256"]
        parts = [
            sums["bin"],
            sums["idx"],
            sums["src"],
            self.header["tokenizer"]["fingerprint"],
            *self.header["sources"],
        ]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    def table(self, source_names: Sequence[str]) -> DocumentTable:
        """Its documents, with sources numbered by their place in `source_names`."""
        renumber = np.array([source_names.index(name) for name in self.header["sources"]], np.uint16)
        return DocumentTable(
            paths=(self.bin_path,),
            dtypes=(np.dtype(self.header["dtype"]).newbyteorder("<").str,),
            starts=self.offsets[:-1],
            lengths=np.diff(self.offsets),
            file_ids=np.zeros(len(self.source_ids), np.uint32),
            source_ids=renumber[self.source_ids],
        )


def dtype_for(largest_id: int) -> np.dtype:
    """uint16 if every id up to `largest_id` fits, else uint32, little-endian."""
    return np.dtype("<u2") if largest_id <= np.iinfo(np.uint16).max else np.dtype("<u4")


class ShardWriter:
    """Writes NAME.bin as documents come, and the rest at the end; memory grows only with the number of documents."""

    def __init__(self, folder: Path, name: str, *, vocab_size: int, eos_id: int, sources: Sequence[str]):
        self._base, self._dtype = Path(folder) / name, dtype_for(vocab_size - 1)
        self._eos = np.array([eos_id], self._dtype).tobytes()
        self._sources = list(sources)
        self._bin = open(f"{self._base}.bin", "wb")  # noqa: SIM115 - closed by finish
        self._sha256 = hashlib.sha256()
        self._ends, self._document_sources = array.array("q", [0]), array.array("H")
        self._max_id = eos_id

    def add(self, ids: np.ndarray, source: str) -> None:
        """Appends one document and its end token."""
        content = ids.astype(self._dtype).tobytes() + self._eos
        self._bin.write(content)
        self._sha256.update(content)
        self._max_id = max(self._max_id, int(ids.max(initial=0)))
        self._ends.append(self._ends[-1] + len(ids) + 1)
        self._document_sources.append(self._sources.index(source))

    def finish(self, token_bytes: np.ndarray | None, header: dict[str, Any]) -> None:
        """Writes index and header, all of it safe against a power cut. header: what the caller knows of the text."""
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        sums = {"bin": self._sha256.hexdigest()}
        about = {"dtype": self._dtype.name, "num_tokens": self._ends[-1], "max_id": self._max_id}
        offsets, source_ids = np.array(self._ends, "<i8"), np.array(self._document_sources, "<u2")
        write_index(self._base, offsets, source_ids, token_bytes, sums, self._sources, {**about, **header})

    def abandon(self) -> None:
        """Closes the file."""
        self._bin.close()


def write_index(
    base: Path,
    offsets: np.ndarray,
    source_ids: np.ndarray,
    token_bytes: np.ndarray | None,
    sums: dict[str, str],
    sources: Sequence[str],
    header: dict[str, Any],
) -> None:
    """Everything of a shard but its .bin, whose sha256 is sums['bin']; the header last."""
    if token_bytes is not None:
        buffer = io.BytesIO()
        np.save(buffer, token_bytes.astype("<i4"), allow_pickle=False)
        write_synced(Path(f"{base}.token_bytes.npy"), buffer.getvalue())
    for ending, values in (("idx", offsets), ("src", source_ids)):
        content = values.tobytes()
        sums = {**sums, ending: hashlib.sha256(content).hexdigest()}
        write_synced(Path(f"{base}.{ending}"), content)
    whole = {
        "format": FORMAT,
        "version": VERSION,
        "bin": f"{base.name}.bin",
        "num_documents": len(source_ids),
        "sources": list(sources),
        "sha256": sums,
        **header,
    }
    write_synced(Path(f"{base}.json"), json.dumps(whole, indent=1).encode())


def write_synced(path: Path, content: bytes) -> None:
    """Writes the file and waits until the disk has it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read_header(path: Path) -> dict[str, Any] | None:
    """The header that lies beside a .bin (or is `path` itself), or None if there is none of ours.

    Raises: ValueError naming the file if it is ours but of another version, or lacks something.
    """
    path = path.with_suffix(".json")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        return None
    if header.get("version") != VERSION:
        raise ValueError(f"{path} has version {header.get('version')} of the format, this program reads {VERSION}")
    for key, kind in HEADER.items():
        value = header.get(key)
        if not isinstance(value, kind) or not all(name in value for name in INNER.get(key, ())):
            raise ValueError(f"{path} has no good {key!r}; {WAY_OUT}")
    if header["dtype"] not in ("uint16", "uint32"):
        raise ValueError(f"{path} has no good 'dtype'; {WAY_OUT}")
    return header


def open_shard(path: Path) -> Shard:
    """The shard of which `path` is the .bin or the .json. Raises ValueError naming the file if sizes do not fit."""
    header, base = read_header(path), path.with_suffix("")
    if header is None:
        raise ValueError(f"{base}.json is not the header of a token shard; {WAY_OUT}")
    bin_path = str(base.parent / header["bin"])
    documents, itemsize = header["num_documents"], np.dtype(header["dtype"]).itemsize
    expect_size(bin_path, header["num_tokens"] * itemsize)
    offsets = read_array(f"{base}.idx", "<i8", documents + 1)
    source_ids = read_array(f"{base}.src", "<u2", documents)
    if offsets[0] != 0 or offsets[-1] != header["num_tokens"] or (np.diff(offsets) < 0).any():
        raise ValueError(f"{base}.idx does not fit {base}.json; {WAY_OUT}")
    return Shard(header, bin_path, offsets, source_ids, read_token_bytes(f"{base}.token_bytes.npy"))


def read_token_bytes(path: str) -> np.ndarray | None:
    """int32[vocabulary], or None if there is no such file. Raises ValueError naming it if it is damaged."""
    if not os.path.exists(path):
        return None
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; {WAY_OUT}") from None


def read_array(path: str, dtype: str, count: int) -> np.ndarray:
    """The whole of a raw file as an array of `count` elements."""
    expect_size(path, count * np.dtype(dtype).itemsize)
    return np.fromfile(path, dtype)


def expect_size(path: str, size: int) -> None:
    """Raises ValueError unless the file is there with exactly this many bytes."""
    if not os.path.exists(path):
        raise ValueError(f"{path} is missing; {WAY_OUT}")
    if (actual := os.path.getsize(path)) != size:
        what = "cut short" if actual < size else "too long"
        raise ValueError(f"{path} has {actual:,} bytes where its header says {size:,}: it is {what}; {WAY_OUT}")
