"""The safetensors format: the header's length in 8 bytes, a JSON header, and the tensors' bytes without gaps.

Described at github.com/huggingface/safetensors (README, "Format"). Nothing in a file is run or trusted: every dtype,
shape and offset is compared with all others and with the file's size before a tensor is read.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxscale.interop.ranges import File
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json, short

LENGTH_BYTES = 8
LONGEST_HEADER = 32 << 20  # bytes: about 300,000 tensors. Python needs up to thirty times as many to hold what it says
ALIGNMENT = 8  # of the tensors' bytes, by spaces behind the header
MOST_AXES = 16
BLOCK_BYTES = 32 << 20  # of two tensors that are compared, in memory at one time
DTYPES = {  # those that parameters come in
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
OTHERS = {  # bytes of an element of those that are known and not converted
    "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file."""

    name: str
    file: File
    kind: str  # dtype in the header's words
    shape: tuple[int, ...]
    start: int  # byte of the file
    stop: int

    def read(self) -> np.ndarray:
        """Its values. Raises BadInput for a dtype that is not converted, and as File.read_into does."""
        if self.kind not in DTYPES:
            raise BadInput(f"{self.file.path}: {self.name} is {self.kind}; {how_to_widen(self.kind)}")
        values = np.empty(self.shape, DTYPES[self.kind])
        if values.size:
            self.file.read_into(self.start, values.reshape(-1).view(np.uint8))
        return values


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal bit for bit; a few MB of each are in memory."""
    if (one.kind, one.shape) != (other.kind, other.shape):
        return False
    size = one.stop - one.start
    for begin in range(0, size, BLOCK_BYTES):
        end = min(begin + BLOCK_BYTES, size)
        if one.file.read(one.start + begin, one.start + end) != other.file.read(other.start + begin, other.start + end):
            return False
    return True


def how_to_widen(kind: str) -> str:
    """Returns the way out for a dtype that is not converted."""
    known = f"only {', '.join(DTYPES)} are converted: "
    if kind.startswith("F8") or kind in ("I8", "U8"):
        return f"{known}take the unquantized weights of that model"
    return f"{known}load it with transformers, call .to(torch.float32) and save_pretrained"


def read_header(file: File) -> dict[str, Tensor]:
    """{name: tensor} of a file. Raises BadInput, one line, for whatever breaks the format's rules."""
    if file.size < LENGTH_BYTES + 2:
        raise broken(file, f"it has {file.size} bytes, which no header fits in")
    length = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
    if length > LONGEST_HEADER or LENGTH_BYTES + length > file.size:
        too_long = length > LONGEST_HEADER
        limit = f"and at most {LONGEST_HEADER} may be" if too_long else f"of a file of {file.size} bytes"
        raise broken(file, f"its header is said to have {length} bytes, {limit}")
    try:
        header = parse_json(file.read(LENGTH_BYTES, LENGTH_BYTES + length), object_pairs_hook=without_doubles)
    except BadInput as error:
        raise broken(file, f"its header is no JSON object ({' '.join(str(error).split())})") from None
    if not isinstance(header, dict):
        raise broken(file, "its header is no JSON object")
    header.pop("__metadata__", None)
    begin = LENGTH_BYTES + length
    tensors = {name: entry(file, name, told, begin) for name, told in header.items()}
    check_covered(file, tensors.values(), begin)
    return tensors


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object. Raises BadInput for a name that is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise BadInput(f"{clip(counts.most_common(1)[0][0])!r} stands there twice")
    return found


def entry(file: File, name: str, described: Any, begin: int) -> Tensor:
    """A tensor as the header tells of it. begin: where the tensors' bytes begin."""
    where = f"{clip(name)!r}"
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise broken(file, f"{where} is not described by dtype, shape and data_offsets alone")
    kind, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if kind not in (*DTYPES, *OTHERS):  # a tuple: a list has no hash
        raise broken(file, f"{where} has dtype {short(kind)}, which is none of {', '.join([*DTYPES, *OTHERS])}")
    if not is_sizes(shape) or len(shape) > MOST_AXES:
        raise broken(file, f"{where} has shape {short(shape)}, which is no list of at most {MOST_AXES} sizes")
    if not is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken(file, f"{where} has data_offsets {short(offsets)}, which are no begin and end")
    size = math.prod(shape) * (DTYPES[kind].itemsize if kind in DTYPES else OTHERS[kind])
    if offsets[1] - offsets[0] != size:
        raise broken(file, f"{where}, {kind}{short(shape)}, needs {size} bytes and has {offsets[1] - offsets[0]}")
    if begin + offsets[1] > file.size:
        raise broken(file, f"{where} ends at byte {begin + offsets[1]} of a file of {file.size}: it was cut short")
    return Tensor(name, file, kind, tuple(shape), begin + offsets[0], begin + offsets[1])


def is_sizes(value: Any) -> bool:
    """True for a list of whole numbers from 0 on."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


def check_covered(file: File, tensors: Iterable[Tensor], begin: int) -> None:
    """Raises BadInput unless the tensors lie one behind the other, from the header to the end of the file."""
    end, before = begin, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != end:
            what = "overlap" if tensor.start < end else f"leave {tensor.start - end} bytes between them"
            raise broken(file, f"{clip(before)} and {clip(tensor.name)!r} {what}")
        end, before = tensor.stop, repr(tensor.name)
    if end != file.size:
        raise broken(file, f"{file.size - end} bytes behind {clip(before)} belong to no tensor")


def broken(file: File, cause: str) -> BadInput:
    """The error for a file that is no good safetensors file."""
    return BadInput(f"{file.path} is no good safetensors file: {cause}; fetch it again")


def clip(text: str) -> str:
    """The text, shortened: a hostile name may be long."""
    return text if len(text) <= 120 else text[:117] + "..."


def encode_header(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """Everything before the tensors' bytes, of a file that holds these one behind the other, in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers reads no file without it
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
