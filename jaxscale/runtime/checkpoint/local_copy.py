"""One process's part of a state in one file: the pieces on its devices, followed by a sealed description.

Nothing is synced: the file must outlive the process, not the machine. A file that a crash left incomplete has no end
mark, and every piece is compared with its fingerprint before it is used.
"""

import concurrent.futures
import json
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import jax
import numpy as np

from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint
from jaxscale.runtime.checkpoint.read_back import DamagedCheckpoint
from jaxscale.runtime.checkpoint.record import is_sealed, seal
from jaxscale.system.exits import BadInput
from jaxscale.system.faults import crash_point
from jaxscale.system.foreign import parse_json

END_MARK = b"jaxscale local 1"  # last bytes of a complete file, preceded by the description's length in eight bytes
ALIGNMENT_BYTES = 64  # bytes: alignment with which XLA:CPU uses a buffer without a copy
READ_THREADS = min(8, os.cpu_count() or 1)  # threads that read and compare; numpy releases the GIL
UNFINISHED_SUFFIX = ".growing"

PieceKey = tuple[tuple[int, ...], tuple[int, ...]]  # (start of a piece in its array, shape of the piece)


def write_copy(path: pathlib.Path, leaves: Mapping[str, jax.Array], description: Mapping[str, Any]) -> int:
    """Writes this process's pieces atomically; returns the bytes of the file. Raises OSError.

    Args: about: JSON data; its `record` has the fingerprints of the whole arrays.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")
    try:
        with open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            pieces = [entry for name, leaf in leaves.items() for entry in write_leaf(file, name, leaf)]
            crash_point("local/pieces")
            footer = json.dumps(seal({**description, "pieces": pieces})).encode()
            file.write(footer + len(footer).to_bytes(8, "little") + END_MARK)
            size = file.tell()
        crash_point("local/written")
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    crash_point("local/renamed")
    return size


def write_leaf(file: BinaryIO, name: str, leaf: jax.Array) -> Iterator[list]:
    """Writes each distinct local piece of an array; yields [name, start, shape, dtype, offset, fingerprint].

    The fingerprint is None if the whole array is local: the sum of its pieces is then compared with the record.
    """
    for (start, shape), data in local_pieces(leaf).items():
        file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
        piece = np.ascontiguousarray(np.asarray(data))
        fingerprint = None if leaf.is_fully_addressable else host_fingerprint(piece, start=start, shape=leaf.shape)
        yield [name, list(start), list(shape), str(leaf.dtype), file.tell(), fingerprint]
        file.write(piece.reshape(-1).view(np.uint8).data)


def local_pieces(leaf: jax.Array) -> dict[PieceKey, jax.Array]:
    """Returns the distinct pieces of an array on this process's devices."""
    return {piece_key(shard.index, leaf.shape): shard.data for shard in reversed(leaf.addressable_shards)}


def piece_key(index: tuple[slice, ...], shape: tuple[int, ...]) -> PieceKey:
    """Returns (start, shape) of a shard's index."""
    ends = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(start for start, *_ in ends), tuple(stop - start for start, stop, _ in ends)


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """Returns the description of a copy; reads no piece. Raises DamagedCheckpoint or OSError."""
    with path.open("rb") as file:
        size, tail = file.seek(0, os.SEEK_END), 8 + len(END_MARK)
        file.seek(max(0, size - tail))
        ending = file.read(tail)
        length = int.from_bytes(ending[:8], "little")
        if ending[8:] != END_MARK or length > size - tail:
            raise DamagedCheckpoint(f"{path} has no end mark")
        file.seek(size - tail - length)
        text = file.read(length)
    try:
        description = parse_json(text)
    except BadInput:
        description = None
    if description is None or not is_sealed(description):
        raise DamagedCheckpoint(f"{path}: the sha256 of its description does not match")
    return description


def read_pieces(path: pathlib.Path, description: Mapping[str, Any]) -> dict[str, dict[PieceKey, np.ndarray]]:
    """Returns {leaf: its pieces}, verified. Raises DamagedCheckpoint naming the first leaf that differs, or OSError."""

    def read(entry: list) -> tuple[np.ndarray, int]:
        name, start, shape, dtype, offset, _ = entry
        piece = np.empty(shape, np.dtype(dtype))
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            left = piece.reshape(-1).view(np.uint8).data
            while left and (count := file.readinto(left)):
                left = left[count:]
        return piece, host_fingerprint(piece, start=start, shape=leaves[name][0])

    leaves, entries, found, sums = description["record"]["leaves"], description["pieces"], {}, {}
    with concurrent.futures.ThreadPoolExecutor(READ_THREADS) as pool:
        for (name, start, shape, _, _, fingerprint), (piece, mixed) in zip(entries, pool.map(read, entries)):
            found.setdefault(name, {})[tuple(start), tuple(shape)] = piece
            if fingerprint is None:
                sums[name] = (sums.get(name, 0) + mixed) % 2**32
            elif fingerprint != mixed:
                raise DamagedCheckpoint(f"{path}: the bits of {name} are not those that were saved")
    for name, total in sums.items():
        if total != leaves[name][2]:
            raise DamagedCheckpoint(f"{path}: the bits of {name} are not those that were saved")
    return found


def array_from_pieces(pieces: Mapping[PieceKey, np.ndarray], wanted: Any) -> jax.Array:
    """Returns an array of a shape, dtype and sharding. Raises KeyError if its shards were not saved as pieces."""

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "jax passes the index of each shard"
        return pieces[piece_key(index, wanted.shape)]

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, piece, dtype=wanted.dtype)
