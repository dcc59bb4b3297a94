"""The safetensors format: 8 bytes with the length of the header, a JSON header, and the tensors without gaps.

Described at github.com/huggingface/safetensors (README, "Format"). Files are untrusted, so all dtypes, shapes and
offsets are validated against each other and the file size before a tensor is read from a disk or a bucket.
"""

import collections
import concurrent.futures
import dataclasses
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxscale.system import foreign, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json, short
from jaxscale.system.storage import objects_under, open_bucket

LENGTH_BYTES = 8
LONGEST_HEADER = 32 << 20  # bytes, about 300,000 tensors; parsing needs up to 30 times as much memory
ALIGNMENT = 8  # the header is padded with spaces so that tensors are aligned
MOST_AXES = 16
BLOCK_BYTES = 32 << 20  # block size for comparing two tensors
DTYPES = {  # dtypes that are converted
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
ELEMENT_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {  # all known dtypes
    "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PART_BYTES = 16 << 20  # bytes per request to a bucket
REQUESTS = 8  # concurrent requests, since one connection to a bucket reaches at most about 100 MB/s


@dataclasses.dataclass(frozen=True)
class File:
    """Path, size and version of a file. The version changes when the file is replaced."""

    path: Any
    size: int
    version: str

    @property
    def name(self) -> str:
        """The file name."""
        return self.path.name

    def read_into(self, start: int, out: Any) -> None:
        """Fills a buffer from offset `start`. Raises BadInput if the file is too short or was replaced."""
        view = memoryview(out).cast("B")
        if start + len(view) > self.size:
            raise BadInput(f"{self.path} ends at byte {self.size}, before byte {start + len(view)}; download it again")
        if not paths.is_remote(self.path):
            raw: Any = foreign.open_file(self.path)  # unbuffered, may return fewer bytes than requested
            with io.BufferedReader(raw) as file:
                file.seek(start)
                if file.readinto(view) != len(view):
                    raise BadInput(f"{self.path} became shorter while it was read; run again when the file is complete")
            return
        parts = [(begin, view[begin : begin + PART_BYTES]) for begin in range(0, len(view), PART_BYTES)]
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            for _ in pool.map(lambda part: self.read_object(start + part[0], part[1]), parts):
                pass

    def read(self, start: int, stop: int) -> bytearray:
        """Returns the bytes [start, stop). Raises the same errors as read_into()."""
        content = bytearray(stop - start)
        self.read_into(start, content)
        return content

    def read_object(self, start: int, view: memoryview) -> None:
        """Fills a buffer from an object in a bucket. Reconnects after a broken connection."""
        url, bucket = os.fspath(self.path), open_bucket()
        done = 0
        try:
            for piece in bucket.pieces(url, start, self.size, stop=start + len(view), generation=self.version):
                view[done : done + len(piece)] = piece
                done += len(piece)
        except FileNotFoundError:
            raise BadInput(f"{url} was replaced or removed during the read; run the command again") from None


def stat_file(path: Any) -> File:
    """Returns the size and version of a file. Raises FileNotFoundError, or BadInput if access is denied."""
    if paths.is_remote(path):
        metadata = open_bucket().metadata(os.fspath(path))
        if metadata is None:
            raise FileNotFoundError(2, "no such object", os.fspath(path))
        return File(path, int(metadata["size"]), str(metadata["generation"]))
    stat = foreign.resolve_file(path).stat()
    return File(path, stat.st_size, str(stat.st_mtime_ns))


def list_files(folder: Any) -> dict[str, int]:
    """Returns {name: bytes} of the files in a folder, sorted, or {} if the folder does not exist."""
    if paths.is_remote(folder):
        found = {name: size for name, size in objects_under(os.fspath(folder)) if "/" not in name}
    elif folder.is_dir():
        found = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    else:
        found = {}
    return dict(sorted(found.items()))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file."""

    name: str
    file: File
    dtype_name: str  # dtype as in the header
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    stop: int

    def read(self) -> np.ndarray:
        """Returns the values. Raises BadInput for an unsupported dtype or a damaged file."""
        if self.dtype_name not in DTYPES:
            raise BadInput(f"{self.file.path}: {self.name} is {self.dtype_name}; {conversion_hint(self.dtype_name)}")
        values = np.empty(self.shape, DTYPES[self.dtype_name])
        if values.size:
            self.file.read_into(self.start, values.reshape(-1).view(np.uint8))
        return values


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors are bitwise equal."""
    if (one.dtype_name, one.shape) != (other.dtype_name, other.shape):
        return False
    size = one.stop - one.start
    for begin in range(0, size, BLOCK_BYTES):
        end = min(begin + BLOCK_BYTES, size)
        if one.file.read(one.start + begin, one.start + end) != other.file.read(other.start + begin, other.start + end):
            return False
    return True


def conversion_hint(dtype_name: str) -> str:
    """Returns how to fix an unsupported dtype."""
    known = f"only {', '.join(DTYPES)} are supported: "
    if dtype_name.startswith("F8") or dtype_name in ("I8", "U8"):
        return f"{known}use the unquantized model"
    return f"{known}load it with transformers, call .to(torch.float32) and save_pretrained"


def read_header(file: File) -> dict[str, Tensor]:
    """Returns {name: tensor} of a file. Raises BadInput for any violation of the format."""
    if file.size < LENGTH_BYTES + 2:
        raise invalid_file(file, f"it has {file.size} bytes, too small for a header")
    length = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
    if length > LONGEST_HEADER:
        raise invalid_file(file, f"the header length is {length} bytes, more than the limit of {LONGEST_HEADER}")
    if LENGTH_BYTES + length > file.size:
        raise invalid_file(file, f"the header length is {length} bytes, but the file has {file.size} bytes")
    try:
        header = parse_json(file.read(LENGTH_BYTES, LENGTH_BYTES + length), object_pairs_hook=reject_duplicates)
    except BadInput as error:
        raise invalid_file(file, f"its header is not a JSON object ({' '.join(str(error).split())})") from None
    if not isinstance(header, dict):
        raise invalid_file(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    begin = LENGTH_BYTES + length
    tensors = {name: parse_entry(file, name, described, begin) for name, described in header.items()}
    check_covered(file, tensors.values(), begin)
    return tensors


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as a dict. Raises BadInput for a duplicate name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise BadInput(f"{clip(counts.most_common(1)[0][0])!r} appears more than once")
    return found


def parse_entry(file: File, name: str, described: Any, begin: int) -> Tensor:
    """Parses a tensor's header entry. begin: byte offset of the data."""
    where = f"{clip(name)!r}"
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise invalid_file(file, f"{where} must have exactly dtype, shape and data_offsets")
    dtype_name, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if dtype_name not in tuple(ELEMENT_BYTES):  # a tuple, because an untrusted value may not be hashable
        raise invalid_file(file, f"{where} has dtype {short(dtype_name)}, not one of {', '.join(ELEMENT_BYTES)}")
    if not is_size_list(shape) or len(shape) > MOST_AXES:
        raise invalid_file(file, f"{where} has shape {short(shape)}, which is not a list of at most {MOST_AXES} sizes")
    if not is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise invalid_file(file, f"{where} has data_offsets {short(offsets)}, which are not [begin, end]")
    size, (start, stop) = math.prod(shape) * ELEMENT_BYTES[dtype_name], (begin + offset for offset in offsets)
    if stop - start != size:
        raise invalid_file(file, f"{where}, {dtype_name}{short(shape)}, needs {size} bytes but has {stop - start}")
    if stop > file.size:
        raise invalid_file(file, f"{where} ends at byte {stop} but the file has {file.size} bytes: it is truncated")
    return Tensor(name, file, dtype_name, tuple(shape), start, stop)


def is_size_list(value: Any) -> bool:
    """Returns True for a list of non-negative integers."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


def check_covered(file: File, tensors: Iterable[Tensor], begin: int) -> None:
    """Raises BadInput unless the tensors cover the file from the header to the end without gaps."""
    end, before = begin, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end:
            what = "overlap" if tensor.start < end else f"have a gap of {tensor.start - end} bytes"
            raise invalid_file(file, f"{clip(before)} and {clip(tensor.name)!r} {what}")
        end, before = tensor.stop, repr(tensor.name)
    if end != file.size:
        raise invalid_file(file, f"{file.size - end} bytes after {clip(before)} belong to no tensor")


def invalid_file(file: File, cause: str) -> BadInput:
    """Returns the error for an invalid file."""
    return BadInput(f"{file.path} is not a valid safetensors file: {cause}; download it again")


def clip(text: str) -> str:
    """Returns a name of at most 120 characters, since an untrusted name may be long."""
    return text if len(text) <= 120 else text[:117] + "..."


def encode_header(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """Returns the header of a file that contains these tensors in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
