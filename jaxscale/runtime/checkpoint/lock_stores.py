"""Storage of a run's lock: FileLock uses a file with an flock, ObjectLock a bucket object with generation checks.

Both classes have the methods read_state, create, replace, renew, is_owned_by and remove. The version of a FileLock is
(inode, content), and the version of an ObjectLock is the object's generation.
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

SETTLE_SECONDS = 0.2  # wait after a takeover: if two processes take over at once without flock, the later rename wins
LOOK_SECONDS = 0.01
DELETING_SECONDS = 2.0  # longest time between the deletion of the lock file and of its folder
REMOVE_TRIES = 6  # waits at most 16 s; a lock that is not removed delays the next run by up to three leases
SILENCE_SECONDS = 20.0  # timeout of a request to the bucket
QUICK_SECONDS = 5.0  # timeout of a request that blocks a training step
LOCK_BYTES = 512  # fixed length, so that one write call replaces the previous content
DEAD_STATES, STOPPED_STATES = "ZXx", "Tt"  # process states in /proc/PID/stat
BOOT_ID = "/proc/sys/kernel/random/boot_id"  # proc(5): differs between machines and boots


@dataclasses.dataclass(frozen=True)
class LockOwner:
    """The process that owns a lock. Times are for display only, because clocks of machines differ."""

    token: str
    host: str
    pid: int
    ticks: int | None  # start time of the process in kernel ticks; distinguishes processes with a reused pid
    kernel: str  # boot id, which differs between machines and boots; '' if the system has none
    namespace: str  # pid namespace: containers on one machine have separate pids
    started: str
    beats: int = 0  # number of renewals
    lease_seconds: float | int | None = None  # seconds between renewals; None: written by an older version

    def renewed(self) -> "LockOwner":
        """Returns a copy with the renewal count increased by one."""
        return dataclasses.replace(self, beats=self.beats + 1)

    def content(self) -> bytes:
        """Returns the content of a lock file or object with this owner."""
        return json.dumps(dataclasses.asdict(self)).ljust(LOCK_BYTES - 1).encode() + b"\n"

    def is_same(self, found: "LockOwner | None") -> bool:
        """Returns True if the owner found in a lock is this owner."""
        return found is not None and found.token == self.token

    def same_kernel(self, other: "LockOwner") -> bool:
        """Returns True if both processes run under the same kernel."""
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
    """Returns the owner from the content of a lock; None for invalid content, such as a partially written lock."""
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
    """Returns True if the owner's process runs, False if it has ended, None if it is stopped or not visible."""
    if not owner.same_kernel(me) or owner.namespace != me.namespace:
        return None
    state = (state_of or process_state)(owner.pid)
    if state is None or state[0] in DEAD_STATES or state[1] != owner.ticks:
        return False
    return None if state[0] in STOPPED_STATES else True


def process_state(pid: int) -> tuple[str, int] | None:
    """Returns (state letter, start time in kernel ticks) of a local process; None if unknown."""
    text = first_line(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split()  # the name in parentheses may contain any characters
    return (fields[0], int(fields[19])) if len(fields) > 19 else None


def first_line(path: str) -> str:
    """Returns the first line of a system file, or '' if the file cannot be read."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().strip()
    return ""


def read_link(path: str) -> str:
    """Returns the target of a symbolic link, or '' if the link cannot be read."""
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


class Moved(Exception):
    """The folder was moved or deleted. The message has the form 'moved to PATH' or 'deleted'."""


class LockState(NamedTuple):
    """Owner, version and age of a lock when it was read."""

    owner: LockOwner | None  # None: the content is invalid or incomplete
    version: Any
    is_flocked: bool | None  # True: a process of this kernel holds the file's flock; None: unknown
    age: float  # seconds since the last renewal by the bucket's clock; 0 for a FileLock


class FileLock:
    """Lock stored as a file named `lock`. The owner keeps the file open and holds its flock."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / "lock"
        self.handle: int | None = None  # the open file; None if this process does not have the lock
        self.folder_id: tuple[int, int] | None = None  # device and inode of the folder; None as for `handle`

    def read_state(self) -> LockState | None:
        """Returns the state of the lock, or None if no lock exists. Raises BadInput for a symbolic link."""
        if self.path.is_symlink():
            raise BadInput(f"{self.path} must be a regular file, but is a symbolic link; remove the link")
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
        """Creates the lock; returns False if a lock already exists."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        self.flock_and_write(handle, owner)
        paths.sync_folder(self.path.parent)
        return True

    def replace(self, owner: LockOwner, state: LockState, *, steal: bool) -> bool:
        """Replaces the lock if it has not changed since `state`, or if `steal`. Returns True on success.

        Creates a new file, so that late writes by the old owner have no effect.
        """
        temporary = self.path.with_name(f".lock.{owner.token}")
        self.flock_and_write(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), owner)
        handle = None
        with contextlib.suppress(FileNotFoundError):
            handle = paths.open_to_write(self.path, os.O_RDWR)
        try:
            if handle is not None and flock(handle) is False:  # serializes concurrent takeovers
                time.sleep(SETTLE_SECONDS)  # held by a different takeover, or by a child process of the old owner
            if not steal and self.read_version() != state.version:
                self.release()
                return False
            os.replace(temporary, self.path)
        except FileNotFoundError:  # a different process has taken over and removed `temporary`
            self.release()
            return False
        finally:
            if handle is not None:
                os.close(handle)
            temporary.unlink(missing_ok=True)
        for left in self.path.parent.glob(".lock.*"):  # files of killed processes or of concurrent takeovers
            left.unlink(missing_ok=True)
        paths.sync_folder(self.path.parent)
        time.sleep(SETTLE_SECONDS)
        return self.is_owned_by(owner)

    def read_version(self) -> tuple[int, bytes] | None:
        """Returns the current version of the lock without taking an flock, or None if no lock exists."""
        try:
            with paths.open_binary(self.path) as file:
                return os.fstat(file.fileno()).st_ino, file.read(LOCK_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def renew(self, owner: LockOwner) -> None:
        """Renews the lock. Raises Changed if the lock belongs to a different owner."""
        if not self.is_owned_by(owner) or self.handle is None:
            raise Changed(str(self.path))
        os.pwrite(self.handle, owner.content(), 0)
        os.fsync(self.handle)

    def is_owned_by(self, owner: LockOwner, *, quick: bool = False) -> bool:
        """Returns True if the lock belongs to this owner. Raises Moved if the folder was moved or deleted."""
        now = self.read_version()
        if now and owner.is_same(read_owner(now[1])):
            return True
        if self.folder_id is not None:
            self.check_folder(until=time.monotonic() + (DELETING_SECONDS if now is None else 0.0))
        return False

    def check_folder(self, until: float) -> None:
        """Waits until the given time. Raises Moved if the folder is moved or deleted, possibly after its files."""
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
        """Takes the flock of an open file and writes the owner into the file."""
        self.handle, self.folder_id = handle, folder_id(self.path.parent)
        while flock(handle) is False:  # read_state() of a different process holds the flock for a moment
            time.sleep(LOOK_SECONDS)
        os.pwrite(handle, owner.content(), 0)
        os.fsync(handle)

    def release(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
        self.handle = self.folder_id = None


class ObjectLock:
    """Lock stored as an object named `lock` in a bucket."""

    def __init__(self, url: str):
        self.url = f"{url.rstrip('/')}/lock"
        self.bucket = open_bucket(writing=True, silence=SILENCE_SECONDS)
        self.single_try = dataclasses.replace(self.bucket, attempts=1)
        self.generation = 0

    def read_state(self, bucket: Bucket | None = None) -> LockState | None:
        """Returns the state of the lock, or None if no lock exists. The age is measured by the bucket's clock."""
        found = (bucket or self.bucket).look(self.url)
        return None if found is None else LockState(read_owner(found.content), found.generation, None, found.age)

    def create(self, owner: LockOwner) -> bool:
        """Creates the lock; returns False if a lock already exists."""
        return self.write(owner, 0)

    def replace(self, owner: LockOwner, state: LockState, *, steal: bool) -> bool:
        """Replaces the lock; returns False if the lock has changed since `state` was read."""
        return self.write(owner, state.version)

    def renew(self, owner: LockOwner) -> None:
        """Renews the lock without retries. Raises Changed if the lock belongs to a different owner."""
        if not self.write(owner, self.generation, self.single_try):
            raise Changed(self.url)

    def is_owned_by(self, owner: LockOwner, *, quick: bool = False) -> bool:
        """Returns True if the lock belongs to this owner. quick: use one request with a short timeout."""
        bucket = dataclasses.replace(self.single_try, silence=QUICK_SECONDS) if quick else self.bucket
        found = self.read_state(bucket)
        return found is not None and owner.is_same(found.owner)

    def write(self, owner: LockOwner, generation: int, bucket: Bucket | None = None) -> bool:
        """Replaces the object if it has this generation (0: creates it). Returns False if the generation differs."""
        bucket = bucket or self.bucket

        def attempt() -> bool:
            try:
                self.generation = bucket.put(self.url, owner.content(), generation)
                return True
            except Changed:
                found = self.read_state(bucket)  # an earlier try may have succeeded with a lost response
                if found is None or not owner.is_same(found.owner):
                    return False
                self.generation = found.version
                return True

        return bucket.patiently(attempt, self.url)

    def remove(self, owner: LockOwner) -> None:
        """Removes the lock, with a limited number of retries. If all of them fail, the lock expires."""
        bucket = dataclasses.replace(self.bucket, attempts=REMOVE_TRIES)
        with contextlib.suppress(Changed, Unreachable, FileNotFoundError):  # FileNotFoundError: a response was lost
            bucket.patiently(lambda: bucket.delete(self.url, self.generation), self.url)


def folder_id(folder: pathlib.Path) -> tuple[int, int] | None:
    """Returns (device, inode) of a folder, which a rename does not change; None if the folder does not exist."""
    try:
        found = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def folder_lock(folder: Any, doing: str) -> Iterator[None]:
    """Locks a local folder until the block ends. Raises BadInput if it is locked. doing: activity in the message."""
    if paths.is_remote(folder):
        yield
        return
    handle = os.open(folder, os.O_RDONLY)  # locks the folder itself, so that no lock file remains
    try:
        if flock(handle) is False:
            raise BadInput(f"another process is {doing} {folder}; wait until it ends, or choose a different folder")
        yield
    finally:
        os.close(handle)


def flock(handle: int) -> bool | None:
    """Takes the flock of an open file; returns False if it is held elsewhere, None if flock is not supported."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None
