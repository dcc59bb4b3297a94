"""Copies of the state on the hosts: FOLDER/RUN/OWNER/STEP-TOKEN, one file for each process's part of a step.

A file has the pieces of the arrays on the process's devices, followed by a sealed description. Nothing is synced: it
must outlive the process, not the machine. A file that a crash left incomplete has no end mark, and every piece is
compared with its fingerprint before it is used.
"""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import jax
import numpy as np

from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint
from jaxscale.runtime.checkpoint.lock_stores import BOOT_ID, first_line
from jaxscale.runtime.checkpoint.record import digest, is_sealed, seal
from jaxscale.runtime.checkpoint.storage_errors import short_reason
from jaxscale.runtime.checkpoint.verify import DamagedCheckpoint
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.faults import crash_point
from jaxscale.system.foreign import parse_json

END_MARK = b"jaxscale local 1"  # last bytes of a complete file, preceded by the description's length in eight bytes
ALIGNMENT_BYTES = 64  # bytes: alignment with which XLA:CPU uses a buffer without a copy
READ_THREADS = min(8, os.cpu_count() or 1)  # threads that read and compare; numpy releases the GIL
UNFINISHED_SUFFIX = ".growing"
COPY_NAME = re.compile(r"(\d+)-([0-9a-f]{16})")

PieceKey = tuple[tuple[int, ...], tuple[int, ...]]  # (start of a piece in its array, shape of the piece)


def write_copy(path: pathlib.Path, leaves: Mapping[str, jax.Array], description: Mapping[str, Any]) -> None:
    """Writes this process's pieces and the description atomically. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")
    try:
        with open(unfinished, "xb", opener=paths.open_private) as file:
            pieces = [entry for name, leaf in leaves.items() for entry in write_leaf(file, name, leaf)]
            crash_point("local/pieces")
            footer = json.dumps(seal({**description, "pieces": pieces})).encode()
            file.write(footer + len(footer).to_bytes(8, "little") + END_MARK)
        crash_point("local/written")
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    crash_point("local/renamed")


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


@dataclasses.dataclass(frozen=True, order=True)
class LocalCopy:
    """A complete copy of one process's part, from its description."""

    step: int
    token: str  # of the start that made it
    state_digest: str  # equal in all parts of one state
    base: int  # the newest step of the work folder when the copy was made, -1: none
    owner: int
    parts: int  # number of processes


class LocalStore:
    """The copies of one run in a host's folder. Raises BadInput if the folder cannot be used."""

    def __init__(self, folder: str, checkpoints: Any):
        """checkpoints: the folder of the run's checkpoints, which identifies the run."""
        given = pathlib.Path(os.path.expandvars(os.path.expanduser(folder)))
        self.folder = given.absolute() / digest(os.fspath(checkpoints))[:16]
        self.neighbour: Sequence | None = None  # address of the process that stores second copies
        try:
            paths.make_private(self.folder)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError("this user may not write there")
        except OSError as error:
            cause = error.strerror or error
            raise BadInput(
                f"checkpoint.local.folder={folder} cannot be used on this host: {given}: {cause}; name one that every "
                "host has and this user may write"
            ) from None

    @property
    def identity(self) -> str:
        """A value equal for processes that share this folder, and so lose it together."""
        found = self.folder.stat()
        return f"{first_line(BOOT_ID) or os.uname().nodename}:{found.st_dev}:{found.st_ino}"

    def files(self) -> Iterator[tuple[int, int, str, pathlib.Path]]:
        """Yields (owner, step, token, path) of every copy, complete or not."""
        for owner in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            for path in sorted(owner.iterdir()) if owner.name.isdecimal() and owner.is_dir() else ():
                if found := COPY_NAME.fullmatch(path.name):
                    yield int(owner.name), int(found[1]), found[2], path

    def copies(self) -> tuple[list[LocalCopy], list[str]]:
        """Returns (the readable copies, the errors of the others). Reads descriptions, no pieces."""
        found, unreadable = [], []
        for owner, step, token, path in self.files():
            try:
                copy = read_description(path)
                if (copy["owner"], copy["record"]["step"], copy["token"]) != (owner, step, token):
                    raise DamagedCheckpoint(f"{path} was written under another name")
                found.append(LocalCopy(step, token, state_digest(copy["record"]), copy["base"], owner, copy["parts"]))
            except (DamagedCheckpoint, OSError, KeyError, TypeError) as error:
                is_damaged = isinstance(error, DamagedCheckpoint)
                unreadable.append(str(error) if is_damaged else f"{path}: {short_reason(error)}")
        return found, unreadable

    def keep_only(self, names: Collection[str], owner: int | None = None) -> None:
        """Removes other copies, and incomplete files of killed processes: of one owner, new or not, or of all."""
        if owner is not None:
            (self.folder / str(owner)).mkdir(mode=0o700, parents=True, exist_ok=True)
        folders = self.folder.iterdir() if owner is None else [self.folder / str(owner)]
        for inner in [one for one in folders if one.is_dir()]:
            for path in inner.iterdir():
                if f"{inner.name}/{path.name}" not in names:
                    path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes all copies of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)


def copy_name(owner: int, step: int, token: str) -> str:
    """Returns the path of a copy below the folder of the run."""
    return f"{owner}/{step}-{token}"


def state_digest(record: Any) -> str:
    """Returns a digest of a state: of its step, and of name, shape, dtype and fingerprint of all arrays."""
    return digest([record["step"], record["leaves"]])
