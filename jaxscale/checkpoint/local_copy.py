"""A host's part of a state in one file: the pieces that its devices hold, and behind them what they are, sealed.

Nothing is synced: the file is to outlive a process, and in memory nothing outlives a machine anyway. What a crash left
half-written has no end, and every piece is compared with its fingerprint before it is used.
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

from jaxscale.checkpoint.fingerprint import host_fingerprint
from jaxscale.checkpoint.read_back import Damaged
from jaxscale.checkpoint.record import is_sealed, seal
from jaxscale.system.exits import BadInput
from jaxscale.system.faults import crash_point
from jaxscale.system.foreign import parse_json

ENDING = b"jaxscale local 1"  # the last bytes of a whole file, after eight that hold the length of the description
ALIGNED = 64  # bytes: what XLA:CPU wants of a buffer that it takes as it is
READERS = min(8, os.cpu_count() or 1)  # threads that read and compare; numpy lets them compute at a time
GROWING = ".growing"

Place = tuple[tuple[int, ...], tuple[int, ...]]  # where a piece begins in its array, and its shape


def write_copy(path: pathlib.Path, leaves: Mapping[str, jax.Array], about: Mapping[str, Any]) -> int:
    """Writes the pieces of this process, whole or not at all; the bytes of the file. Raises OSError as the disk does.

    Args: about: plain data that JSON can hold; `record` has the fingerprints of the whole arrays.
    """
    growing = path.with_name(f"{path.name}.{secrets.token_hex(4)}{GROWING}")
    try:
        with open(growing, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            pieces = [entry for name, leaf in leaves.items() for entry in write_leaf(file, name, leaf)]
            crash_point("local/pieces")
            described = json.dumps(seal({**about, "pieces": pieces})).encode()
            file.write(described + len(described).to_bytes(8, "little") + ENDING)
            size = file.tell()
        crash_point("local/written")
        growing.rename(path)
    finally:
        growing.unlink(missing_ok=True)
    crash_point("local/renamed")
    return size


def write_leaf(file: BinaryIO, name: str, leaf: jax.Array) -> Iterator[list]:
    """Writes each distinct piece of an array that is here; yields [name, start, shape, dtype, offset, fingerprint].

    The fingerprint is None where all of the array is here: then its own, taken on the devices, tells of the pieces too.
    """
    for (start, shape), data in pieces_of(leaf).items():
        file.write(bytes(-file.tell() % ALIGNED))
        piece = np.ascontiguousarray(np.asarray(data))
        mark = None if leaf.is_fully_addressable else host_fingerprint(piece, start=start, shape=leaf.shape)
        yield [name, list(start), list(shape), str(leaf.dtype), file.tell(), mark]
        file.write(piece.reshape(-1).view(np.uint8).data)


def pieces_of(leaf: jax.Array) -> dict[Place, jax.Array]:
    """The pieces of an array on this process's devices, those that several hold once."""
    return {place_of(shard.index, leaf.shape): shard.data for shard in reversed(leaf.addressable_shards)}


def place_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Place:
    """The place that a shard's index means."""
    ends = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(start for start, *_ in ends), tuple(stop - start for start, stop, _ in ends)


def read_about(path: pathlib.Path) -> dict[str, Any]:
    """What a copy says of itself; reads no piece. Raises Damaged where it is not whole, OSError as the disk does."""
    with path.open("rb") as file:
        size, tail = file.seek(0, os.SEEK_END), 8 + len(ENDING)
        file.seek(max(0, size - tail))
        ending = file.read(tail)
        length = int.from_bytes(ending[:8], "little")
        if ending[8:] != ENDING or length > size - tail:
            raise Damaged(f"{path} has no end")
        file.seek(size - tail - length)
        text = file.read(length)
    try:
        about = parse_json(text)
    except BadInput:
        about = None
    if about is None or not is_sealed(about):
        raise Damaged(f"{path}: the sha256 of what it says of itself does not match")
    return about


def read_pieces(path: pathlib.Path, about: Mapping[str, Any]) -> dict[str, dict[Place, np.ndarray]]:
    """{leaf: its pieces}, each bit as it was saved. Raises Damaged naming the first leaf that differs, or OSError."""

    def read(entry: list) -> tuple[np.ndarray, int]:
        name, start, shape, dtype, offset, _ = entry
        piece = np.empty(shape, np.dtype(dtype))
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            left = piece.reshape(-1).view(np.uint8).data
            while left and (count := file.readinto(left)):
                left = left[count:]
        return piece, host_fingerprint(piece, start=start, shape=leaves[name][0])

    leaves, found, sums = about["record"]["leaves"], {}, {}
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for (name, start, shape, _, _, mark), (piece, mixed) in zip(about["pieces"], pool.map(read, about["pieces"])):
            found.setdefault(name, {})[tuple(start), tuple(shape)] = piece
            if mark is None:
                sums[name] = (sums.get(name, 0) + mixed) % 2**32
            elif mark != mixed:
                raise Damaged(f"{path}: the bits of {name} are not those that were saved")
    for name, total in sums.items():
        if total != leaves[name][2]:
            raise Damaged(f"{path}: the bits of {name} are not those that were saved")
    return found


def on_devices(pieces: Mapping[Place, np.ndarray], wanted: Any) -> jax.Array:
    """The array of a shape, dtype and sharding, of pieces that were cut alike. Raises KeyError where one is missing."""

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "jax passes the index of each shard"
        return pieces[place_of(index, wanted.shape)]

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, piece, dtype=wanted.dtype)
