"""Stores of a run's lock: a file that is also flocked, or an object replaced only at a known generation.

Both have read_state, create, replace, renew, is_owned_by and remove. The version of a file is its inode and content,
that of an object its generation.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import pathlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxscale.system import paths
from jaxscale.system.bucket import Bucket
from jaxscale.system.bucket_errors import Changed, Unreachable
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json
from jaxscale.system.storage import open_bucket

SETTLE_SECONDS = 0.2  # if two processes take over at once without flock, the later rename wins
LOOK_SECONDS = 0.01
DELETING_SECONDS = 2.0  # between the deletion of the lock and of its folder, when both are being removed
REMOVE_TRIES = 6  # waits 16 s at most: a lock that is not removed delays the next run by up to three leases
SILENCE_SECONDS = 20.0  # timeout of a request to the service
QUICK_SECONDS = 5.0  # the same for a request that a step waits for
LOCK_BYTES = 512  # bytes: a renewal overwrites the last one in one call, so all have the same length
DEAD_STATES, STOPPED_STATES = "ZXx", "Tt"  # states of a process in /proc
BOOT_ID = "/proc/sys/kernel/random/boot_id"  # proc(5): differs between machines and boots


@dataclasses.dataclass(frozen=True)
class LockOwner:
    """A process at one start. Times are for display: clocks of two machines are never compared."""

    token: str
    host: str
    pid: int
    ticks: int | None  # start time of the process in kernel ticks, because pids are reused
    kernel: str  # boot id, which differs between machines and boots; '' if the system has none
    namespace: str  # of pids: containers on one machine have separate pids
    started: str
    beats: int = 0  # renewals so far
    lease_seconds: float | int | None = None  # between two renewals; None: written by an older version

    def renewed(self) -> "LockOwner":
        """Returns the owner after one more renewal."""
        return dataclasses.replace(self, beats=self.beats + 1)

    def content(self) -> bytes:
        """Returns the content of the lock."""
        return json.dumps(dataclasses.asdict(self)).ljust(LOCK_BYTES - 1).encode() + b"\n"

    def is_same(self, found: "LockOwner | None") -> bool:
        """True if a lock's owner is this one."""
        return found is not None and found.token == self.token

    def same_kernel(self, other: "LockOwner") -> bool:
        """True if both run under one kernel, which then knows both."""
        return bool(self.kernel) and self.kernel == other.kernel

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


def this_process() -> LockOwner:
    """Returns this process as an owner with a new token."""
    state = process_state(os.getpid())
    return LockOwner(
        token=secrets.token_hex(16),
        host=socket.gethostname(),
        pid=os.getpid(),
        ticks=state[1] if state else None,
        kernel=first_line(BOOT_ID),
        namespace=read_link("/proc/self/ns/pid"),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def read_owner(content: bytes) -> LockOwner | None:
    """Returns the owner named in a lock; None for other content, such as a lock that is being written."""
    try:
        values = parse_json(content)
        kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(LockOwner)}
        values = {"lease_seconds": None} | values
        if set(values) != set(kinds) or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            return None
        return LockOwner(**values)
    except (BadInput, TypeError):
        return None


def is_alive(
    owner: LockOwner, me: LockOwner, state_of: Callable[[int], tuple[str, int] | None] | None = None
) -> bool | None:
    """True if the owner's process can run, False if it is gone, None if stopped (SIGSTOP) or not visible here."""
    if not owner.same_kernel(me) or owner.namespace != me.namespace:
        return None
    state = (state_of or process_state)(owner.pid)
    if state is None or state[0] in DEAD_STATES or state[1] != owner.ticks:
        return False
    return None if state[0] in STOPPED_STATES else True


def process_state(pid: int) -> tuple[str, int] | None:
    """Returns (state letter, start in kernel ticks) of a local process; None if there is none, or no /proc."""
    text = first_line(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split()  # the name in parentheses may contain anything
    return (fields[0], int(fields[19])) if len(fields) > 19 else None


def first_line(path: str) -> str:
    """Returns the first line of a system file, '' if it cannot be read."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().strip()
    return ""


def read_link(path: str) -> str:
    """Returns the target of a system link, '' if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


class Moved(Exception):
    """The folder was moved or deleted, as the message says."""


class LockState(NamedTuple):
    """State of a lock at one moment."""

    owner: LockOwner | None  # None: the content is not a lock, or not yet
    version: Any
    is_flocked: bool | None  # True: a process of this kernel has flocked the file; None: unknown
    age: float  # seconds since it was written, if one clock has measured both times; else 0


class FileLock:
    """A file `lock` that its owner has open and flocked."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / "lock"
        self.handle: int | None = None  # the open file, while this process has the lock
        self.folder_id: tuple[int, int] | None = None  # identity of the folder, while this process has the lock

    def read_state(self) -> LockState | None:
        """Returns the lock's state, None if it does not exist. Raises BadInput for anything but a regular file."""
        if self.path.is_symlink():
            raise BadInput(f"{self.path} is a link, but the lock of a run must be a file; move it away")
        try:
            handle = paths.open_to_write(self.path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            content = os.pread(handle, LOCK_BYTES, 0)
            version = (os.fstat(handle).st_ino, content)
            is_free = flock(handle)
            return LockState(read_owner(content), version, None if is_free is None else not is_free, 0.0)
        finally:
            os.close(handle)  # releases the flock

    def create(self, owner: LockOwner) -> bool:
        """True if the owner has the lock now, False if there was one."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        self.flock_and_write(handle, owner)
        paths.sync_folder(self.path.parent)
        return True

    def replace(self, owner: LockOwner, state: LockState, *, steal: bool) -> bool:
        """Replaces the lock's file if it is as in `state`, or in any case to `steal`; True if owned now.

        A new file, so that late writes of the old owner have no effect.
        """
        temporary = self.path.with_name(f".lock.{owner.token}")
        self.flock_and_write(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), owner)
        handle = None
        with contextlib.suppress(FileNotFoundError):
            handle = paths.open_to_write(self.path, os.O_RDWR)
        try:
            if handle is not None and flock(handle) is False:  # serializes processes that take over at once
                time.sleep(SETTLE_SECONDS)  # another one, or a child process that outlived its trainer
            if not steal and self.read_version() != state.version:
                self.release()
                return False
            os.replace(temporary, self.path)
        except FileNotFoundError:  # another process has taken over and removed it
            self.release()
            return False
        finally:
            if handle is not None:
                os.close(handle)
            temporary.unlink(missing_ok=True)
        for left in self.path.parent.glob(".lock.*"):  # of processes that were killed here, or come too late
            left.unlink(missing_ok=True)
        paths.sync_folder(self.path.parent)
        time.sleep(SETTLE_SECONDS)
        return self.is_owned_by(owner)

    def read_version(self) -> tuple[int, bytes] | None:
        """Returns the lock's version now, without an flock; None if it does not exist."""
        try:
            with paths.open_binary(self.path) as file:
                return os.fstat(file.fileno()).st_ino, file.read(LOCK_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def renew(self, owner: LockOwner) -> None:
        """Writes a renewal. Raises Changed if the lock belongs to another owner."""
        if not self.is_owned_by(owner) or self.handle is None:
            raise Changed(str(self.path))
        os.pwrite(self.handle, owner.content(), 0)
        os.fsync(self.handle)

    def is_owned_by(self, owner: LockOwner, *, quick: bool = False) -> bool:
        """True if the lock names this owner. Raises Moved if its folder was moved or deleted."""
        now = self.read_version()
        if now and owner.is_same(read_owner(now[1])):
            return True
        if self.folder_id is not None:
            self.check_folder(until=time.monotonic() + (DELETING_SECONDS if now is None else 0.0))
        return False

    def check_folder(self, until: float) -> None:
        """Waits until that time. Raises Moved once the folder is gone: its files may be deleted before it."""
        while self.folder_id == folder_id(self.path.parent):
            if time.monotonic() >= until:
                return
            time.sleep(LOOK_SECONDS)
        lock = read_link(f"/proc/self/fd/{self.handle}")
        if not lock or lock.endswith("(deleted)"):
            raise Moved("deleted")
        raise Moved(f"moved to {os.path.dirname(lock)}")

    def remove(self, owner: LockOwner) -> None:
        """Removes the owner's lock."""
        try:
            if self.is_owned_by(owner):
                self.path.unlink()
        finally:
            self.release()

    def flock_and_write(self, handle: int, owner: LockOwner) -> None:
        """Flocks the open file and writes the owner into it."""
        self.handle, self.folder_id = handle, folder_id(self.path.parent)
        while flock(handle) is False:  # other processes flock it for a moment when they read it
            time.sleep(LOOK_SECONDS)
        os.pwrite(handle, owner.content(), 0)
        os.fsync(handle)

    def release(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
        self.handle = self.folder_id = None


class ObjectLock:
    """An object `lock` in a bucket."""

    def __init__(self, url: str):
        self.url = f"{url.rstrip('/')}/lock"
        self.bucket = open_bucket(writing=True, silence=SILENCE_SECONDS)
        self.single_try = dataclasses.replace(self.bucket, attempts=1)
        self.generation = 0

    def read_state(self, bucket: Bucket | None = None) -> LockState | None:
        """Returns the lock's state, None if it does not exist. The age is measured by the service's clock alone."""
        found = (bucket or self.bucket).look(self.url)
        return None if found is None else LockState(read_owner(found.content), found.generation, None, found.age)

    def create(self, owner: LockOwner) -> bool:
        """True if the owner has the lock now, False if there was one."""
        return self.write(owner, 0)

    def replace(self, owner: LockOwner, state: LockState, *, steal: bool) -> bool:
        """True if the owner has the lock now, False if it has changed since the state was read."""
        return self.write(owner, state.version)

    def renew(self, owner: LockOwner) -> None:
        """Writes a renewal, in one try. Raises Changed if the lock belongs to another owner."""
        if not self.write(owner, self.generation, self.single_try):
            raise Changed(self.url)

    def is_owned_by(self, owner: LockOwner, *, quick: bool = False) -> bool:
        """True if the lock names this owner. quick: one request with a short timeout."""
        bucket = dataclasses.replace(self.single_try, silence=QUICK_SECONDS) if quick else self.bucket
        found = self.read_state(bucket)
        return found is not None and owner.is_same(found.owner)

    def write(self, owner: LockOwner, generation: int, bucket: Bucket | None = None) -> bool:
        """True if the object of this generation (0: none) was replaced."""
        bucket = bucket or self.bucket

        def attempt() -> bool:
            try:
                self.generation = bucket.put(self.url, owner.content(), generation)
                return True
            except Changed:
                found = self.read_state(bucket)  # an earlier try may have succeeded, and its answer was lost
                if found is None or not owner.is_same(found.owner):
                    return False
                self.generation = found.version
                return True

        return bucket.patiently(attempt, self.url)

    def remove(self, owner: LockOwner) -> None:
        """Removes the lock in a few tries; otherwise it expires."""
        bucket = dataclasses.replace(self.bucket, attempts=REMOVE_TRIES)
        with contextlib.suppress(Changed, Unreachable, FileNotFoundError):  # FileNotFoundError: an answer was lost
            bucket.patiently(lambda: bucket.delete(self.url, self.generation), self.url)


def folder_id(folder: pathlib.Path) -> tuple[int, int] | None:
    """Returns an identity of the folder that a rename does not change; None if there is none."""
    try:
        found = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def folder_lock(folder: Any, doing: str) -> Iterator[None]:
    """Locks a local folder with flock until the block ends. Raises BadInput (another process is `doing` it)."""
    if paths.is_remote(folder):
        yield
        return
    handle = os.open(folder, os.O_RDONLY)  # the folder itself, so that no lock file remains
    try:
        if flock(handle) is False:
            raise BadInput(f"another process is {doing} {folder} now; wait for it, or choose a new folder")
        yield
    finally:
        os.close(handle)


def flock(handle: int) -> bool | None:
    """True if this handle has the flock now, False if another has; None if the file system has no flock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None
