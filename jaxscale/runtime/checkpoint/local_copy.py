"""Local copies of the train state on the hosts: a file FOLDER/RUN/OWNER/STEP-TOKEN for each process's part of a step.

A file contains the pieces of the arrays on the process's devices, and a description with a checksum. Files are not
synced to the disk, because a copy must survive the end of the process but not of the machine. An incomplete file has no
end mark. Every piece is compared with its fingerprint before it is used.

Every few seconds of training, a thread copies the state to a folder of the local host and of a neighbour host. All
processes copy the same steps, which the first process selects after the previous copy is complete in all processes. A
copy is valid if the metrics of its step passed the checks. A failed copy is logged and does not affect training.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale.runtime.checkpoint.config import LocalConfig
from jaxscale.runtime.checkpoint.fingerprint import host_fingerprint, take_snapshot
from jaxscale.runtime.checkpoint.lock_stores import BOOT_ID, first_line
from jaxscale.runtime.checkpoint.record import digest, is_sealed, named_leaves, seal
from jaxscale.runtime.checkpoint.saver import SaveJob, make_record
from jaxscale.runtime.checkpoint.storage_errors import clip, short_reason
from jaxscale.runtime.checkpoint.verify import DamagedCheckpoint
from jaxscale.runtime.checkpoint.write import NoRoom, check_room
from jaxscale.runtime.hosts import exchange
from jaxscale.runtime.hosts.agree import agreed, forget, gathered, next_key
from jaxscale.runtime.monitor.events import Note
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.faults import crash_point
from jaxscale.system.foreign import parse_json

END_MARK = b"jaxscale local 1"  # last bytes of a complete file, preceded by the length of the description (8 bytes)
ALIGNMENT_BYTES = 64  # XLA:CPU uses a buffer with this alignment without a copy
READ_THREADS = min(8, os.cpu_count() or 1)  # threads that read and verify pieces; numpy releases the GIL
UNFINISHED_SUFFIX = ".growing"
COPY_NAME = re.compile(r"(\d+)-([0-9a-f]{16})")
WRITE_SECONDS = 600.0  # timeout for the slowest process to write its part
JOIN_SECONDS = 10.0  # timeout of a copy in progress when the run ends
KEYS_IN_USE = 6  # number of newest keys that a process one step behind may still read
MAX_SHOWN = 3  # largest number of processes whose failures are listed

PieceKey = tuple[tuple[int, ...], tuple[int, ...]]  # (start of a piece in its array, shape of the piece)


def write_copy(path: pathlib.Path, leaves: Mapping[str, jax.Array], description: Mapping[str, Any]) -> None:
    """Atomically writes this process's pieces of the arrays and their description to a file. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")
    try:
        with open(unfinished, "xb", opener=paths.open_private) as file:
            pieces = []
            for name, leaf in leaves.items():
                for (start, shape), data in local_pieces(leaf).items():
                    file.write(bytes(-file.tell() % ALIGNMENT_BYTES))
                    piece = np.ascontiguousarray(np.asarray(data))
                    # None for a fully addressable array: the sum over its pieces is compared with the record
                    whole = leaf.is_fully_addressable
                    fingerprint = None if whole else host_fingerprint(piece, start=start, shape=leaf.shape)
                    pieces.append([name, list(start), list(shape), str(leaf.dtype), file.tell(), fingerprint])
                    file.write(piece.reshape(-1).view(np.uint8).data)
            crash_point("local/pieces")
            footer = json.dumps(seal({**description, "pieces": pieces})).encode()
            file.write(footer + len(footer).to_bytes(8, "little") + END_MARK)
        crash_point("local/written")
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    crash_point("local/renamed")


def local_pieces(leaf: jax.Array) -> dict[PieceKey, jax.Array]:
    """Returns the distinct pieces of an array on this process's devices."""
    return {piece_key(shard.index, leaf.shape): shard.data for shard in reversed(leaf.addressable_shards)}


def piece_key(index: tuple[slice, ...], shape: tuple[int, ...]) -> PieceKey:
    """Returns (start, shape) of a shard from its index in an array of the given shape."""
    ends = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(start for start, *_ in ends), tuple(stop - start for start, stop, _ in ends)


def read_description(path: pathlib.Path) -> dict[str, Any]:
    """Returns the description of a copy without reading its pieces. Raises DamagedCheckpoint or OSError."""
    with path.open("rb") as file:
        size, tail = file.seek(0, os.SEEK_END), 8 + len(END_MARK)
        file.seek(max(0, size - tail))
        ending = file.read(tail)
        length = int.from_bytes(ending[:8], "little")
        if ending[8:] != END_MARK or length > size - tail:
            raise DamagedCheckpoint(f"{path} has no end mark")
        file.seek(size - tail - length)
        text = file.read(length)
    description: Any = None
    with contextlib.suppress(BadInput):
        description = parse_json(text)
    if not is_sealed(description):
        raise DamagedCheckpoint(f"{path}: the sha256 of its description does not match")
    return description


def read_pieces(path: pathlib.Path, description: Mapping[str, Any]) -> dict[str, dict[PieceKey, np.ndarray]]:
    """Returns the verified pieces of each leaf. Raises OSError, or DamagedCheckpoint naming the first damaged leaf."""

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
    """Returns an array with the shape, dtype and sharding of `wanted`. Raises KeyError if a shard was not saved."""

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "JAX passes the index of each shard"
        return pieces[piece_key(index, wanted.shape)]

    return jax.make_array_from_callback(wanted.shape, wanted.sharding, piece, dtype=wanted.dtype)


@dataclasses.dataclass(frozen=True, order=True)
class LocalCopy:
    """Facts from the description of a complete copy of one process's part."""

    step: int
    token: str  # token of the start that made the copy
    state_digest: str  # digest of the step and of the name, shape, dtype and fingerprint of all arrays
    base: int  # newest step of the work folder when the copy was made; -1: none
    owner: int  # index of the process whose part was copied
    parts: int  # number of processes


class LocalStore:
    """Local copies of one run in a folder of the host. The constructor raises BadInput if the folder cannot be used."""

    def __init__(self, folder: str, checkpoints: Any):
        """folder: checkpoint.local.folder. checkpoints: folder of the run's checkpoints, which identifies the run."""
        given = pathlib.Path(os.path.expandvars(os.path.expanduser(folder)))
        self.folder = given.absolute() / digest(os.fspath(checkpoints))[:16]
        self.neighbour: Sequence | None = None  # address of the process that stores second copies
        try:
            paths.make_private(self.folder)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError("this user cannot write there")
        except OSError as error:
            cause = error.strerror or error
            raise BadInput(
                f"checkpoint.local.folder={folder} cannot be used on this host: {given}: {cause}; choose a folder "
                "that this user can write on every host"
            ) from None

    @property
    def identity(self) -> str:
        """Identifier of the folder, equal in all processes that share the folder."""
        found = self.folder.stat()
        return f"{first_line(BOOT_ID) or os.uname().nodename}:{found.st_dev}:{found.st_ino}"

    def files(self) -> Iterator[tuple[int, int, str, pathlib.Path]]:
        """Yields (owner, step, token, path) for every complete or incomplete copy."""
        for owner in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            for path in sorted(owner.iterdir()) if owner.name.isdecimal() and owner.is_dir() else ():
                if found := COPY_NAME.fullmatch(path.name):
                    yield int(owner.name), int(found[1]), found[2], path

    def copies(self) -> tuple[list[LocalCopy], list[str]]:
        """Returns (readable copies, errors of unreadable copies). Reads only the descriptions."""
        found, unreadable = [], []
        for owner, step, token, path in self.files():
            try:
                copy = read_description(path)
                if (copy["owner"], copy["record"]["step"], copy["token"]) != (owner, step, token):
                    raise DamagedCheckpoint(f"{path} was renamed or moved after it was written")
                state = digest([step, copy["record"]["leaves"]])
                found.append(LocalCopy(step, token, state, copy["base"], owner, copy["parts"]))
            except (DamagedCheckpoint, OSError, KeyError, TypeError) as error:
                is_damaged = isinstance(error, DamagedCheckpoint)
                unreadable.append(str(error) if is_damaged else f"{path}: {short_reason(error)}")
        return found, unreadable

    def keep_only(self, names: Collection[str], owner: int | None = None) -> None:
        """Removes all files except the named copies. owner: clean only the folder of this process."""
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
    """Returns the path of a copy relative to the folder of the run."""
    return f"{owner}/{step}-{token}"


class PendingCopy(NamedTuple):
    """A copy in progress."""

    job: SaveJob
    base: int
    confirmed: concurrent.futures.Future[bool]  # whether the step's metrics passed the checks; set when they are read


@dataclasses.dataclass(eq=False)
class LocalSaver:
    """Writes local copies of the state until the process ends. Construct it at the same step in all processes."""

    cfg: LocalConfig
    store: LocalStore
    token: str  # token of this process
    _: dataclasses.KW_ONLY
    newest: str | None  # name of the newest copy; initially the copy from which this process resumed
    base: Callable[[], int]  # returns the newest step in the work folder, -1 for none
    note: Note
    prepared: Callable[[], bool] = lambda: True  # returns True when the copy program is compiled
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.owner, self.root, self.next_step = jax.process_index(), next_key("local"), 0
        self.published_keys: list[str] = []  # keys of the first process; all processes read them before the next copy
        self.last_copy_time, self.last_copy_step = self.clock(), None
        self.pending: PendingCopy | None = None
        self.cause = ""  # cause of the last failure
        self.jobs: queue.Queue[PendingCopy | None] = queue.Queue()
        self.thread = threading.Thread(target=self.work, name="local-copies", daemon=True)
        self.thread.start()

    def offer(self, step: int, state: Any, run: Callable[[int], Mapping[str, Any]], health: str) -> bool:
        """Dispatches a copy of the state if one is due; returns True if it was dispatched. Call in all processes."""
        if step < self.next_step:
            return False
        key = f"{self.root}/at/{step}"
        due, wait, base = agreed(lambda: self.decide(step), key=key)
        self.next_step = step + wait
        if self.owner == 0:
            self.published_keys.append(key)
        if not due:
            return False
        key = f"{self.root}/whole/{step}"
        job = SaveJob(key, step, take_snapshot(named_leaves(state)), json.dumps(run(step)), health, {})
        self.pending = PendingCopy(job, base, concurrent.futures.Future())
        self.jobs.put(self.pending)
        return True

    def decide(self, step: int) -> tuple[bool, int, int]:
        """Returns (whether to copy now, steps until the next decision, LocalCopy.base). Call in the first process."""
        now, cfg = self.clock(), self.cfg
        if self.last_copy_step is None:
            self.last_copy_time, self.last_copy_step = now, step  # the time before includes compilation
            return False, cfg.every_steps or 1, -1
        since, passed = now - self.last_copy_time, step - self.last_copy_step
        pace = max(since / passed, 1e-9)
        due = passed >= cfg.every_steps if cfg.every_steps else since + pace / 2 >= cfg.every_seconds
        if due and (self.jobs.unfinished_tasks or not self.prepared()):
            return False, 1, -1
        if due:
            self.last_copy_time, self.last_copy_step = now, step
            for key in self.published_keys[:-KEYS_IN_USE]:  # read by all processes, since they wrote the last copy
                forget(key)
            self.published_keys = self.published_keys[-KEYS_IN_USE:]
            return True, cfg.every_steps or 1, self.base()
        # the first steps are dispatched ahead of the devices, so their times do not predict the time of later steps
        left = cfg.every_steps - passed if cfg.every_steps else min((cfg.every_seconds - since) / pace, passed)
        return False, max(1, int(left)), -1

    def confirm(self, step: int, good: bool) -> None:
        """Accepts the copy in progress if `good`, else rejects it. Call after the metrics of a step are read."""
        if self.pending is not None and self.pending.job.step <= step:
            self.pending.confirmed.set_result(good)
            self.pending = None

    def close(self) -> None:
        """Ends the thread after the copy in progress. Discards a copy that is not confirmed yet."""
        self.confirm(2**62, False)
        self.jobs.put(None)
        self.thread.join(JOIN_SECONDS)

    def work(self) -> None:
        """Makes the queued copies in order."""
        while (pending := self.jobs.get()) is not None:
            try:
                if pending.confirmed.result():
                    self.make(pending)
            finally:
                pending = None  # frees the buffers before waiting for the next copy
                self.jobs.task_done()

    def make(self, pending: PendingCopy) -> None:
        """Writes a copy and exchanges the result with all processes. Never raises."""
        job, cause = pending.job, None
        name = copy_name(self.owner, job.step, self.token)
        try:
            self.write(pending, name)
        except (NoRoom, exchange.Refused) as error:
            cause = clip(str(error))
        except Exception as error:  # a failed copy must not stop training
            cause = short_reason(error)
        crash_point("local/here")
        try:
            failed = gathered(job.key, cause, WRITE_SECONDS, join_causes)
        except Exception as error:  # a different process has died, and this process will be stopped
            failed = short_reason(error)
        if not failed:
            self.newest = name
        elif failed != self.cause:
            self.note("alarm", job.step, cause=f"no local copy: {failed}")
        self.cause = failed
        if self.owner == 0:
            self.published_keys.append(job.key)
        crash_point("local/everywhere")

    def write(self, pending: PendingCopy, name: str) -> None:
        """Writes this process's part to the local folder and sends it to the neighbour host."""
        job, protected = pending.job, [self.newest] if self.newest else []
        record = make_record(job)
        self.store.keep_only(protected, self.owner)
        pieces = [local_pieces(leaf).values() for leaf in job.snapshot.leaves.values()]
        check_room(self.store.folder, sum(piece.nbytes for leaf in pieces for piece in leaf))
        description = {"record": record, "owner": self.owner, "parts": jax.process_count(), "token": self.token}
        write_copy(self.store.folder / name, job.snapshot.leaves, description | {"base": pending.base})
        if self.store.neighbour is not None:
            exchange.put(self.store.neighbour, self.store.folder, name, [one.rpartition("/")[2] for one in protected])


def join_causes(found: list[str | None]) -> str:
    """Returns one line with the failures of all processes, or ''. found: cause of failure or None for each process."""
    failed = [(process, cause) for process, cause in enumerate(found) if cause]
    shown = [f"process {process}: {cause}" if len(found) > 1 else cause for process, cause in failed[:MAX_SHOWN]]
    return "; ".join(shown) + (f"; and {len(failed) - MAX_SHOWN} more" if len(failed) > MAX_SHOWN else "")
