"""Where a lock is kept: a file that the kernel guards too, or an object that is replaced only in a known generation.

Both have look, create, replace, renew, is_own and remove. The version of a file is its inode and content, that of an
object its generation.
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

SETTLE_SECONDS = 0.2  # where two take over at once and the file system has no flock, the later rename wins
LOOK_SECONDS = 0.01
DELETING_SECONDS = 2.0  # between the lock and the folder, where somebody removes it with all that is in it
REMOVE_TRIES = 6  # 16 s of waiting at the most: a lock that stays costs the next run up to three leases
SILENCE_SECONDS = 20.0  # without a byte from the service, after which a try is given up
QUICK_SECONDS = 5.0  # the same where a step waits for the answer
PADDED = 512  # bytes: a renewal writes over the last one in one call, and is never longer or shorter
GONE, STOPPED = "ZXx", "Tt"  # states of a process in /proc


@dataclasses.dataclass(frozen=True)
class LockOwner:
    """A process at one start. Times are for people: nothing is decided by comparing clocks of two machines."""

    token: str
    host: str
    pid: int
    ticks: int | None  # when the process began, in the kernel's own count: pids are used again
    kernel: str  # differs for each boot of each machine; '' where the system has no such thing
    namespace: str  # of pids: containers on one machine number their processes by themselves
    started: str
    beats: int = 0  # renewals so far
    lease_seconds: float | int | None = None  # between two renewals; None: of an older version, which did not say

    def renewed(self) -> "LockOwner":
        """The same, one beat later."""
        return dataclasses.replace(self, beats=self.beats + 1)

    def content(self) -> bytes:
        """The text of the lock."""
        return json.dumps(dataclasses.asdict(self)).ljust(PADDED - 1).encode() + b"\n"

    def is_in(self, found: "Look | None") -> bool:
        """True if the lock that was found names this owner."""
        return found is not None and found.owner is not None and found.owner.token == self.token

    def same_kernel(self, other: "LockOwner") -> bool:
        """True if both run under one kernel, which then knows of both."""
        return bool(self.kernel) and self.kernel == other.kernel

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


def this_process() -> LockOwner:
    """The process that asks, with a new token."""
    state = process_state(os.getpid())
    return LockOwner(
        token=secrets.token_hex(16),
        host=socket.gethostname(),
        pid=os.getpid(),
        ticks=state[1] if state else None,
        kernel=first_line("/proc/sys/kernel/random/boot_id"),
        namespace=link("/proc/self/ns/pid"),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def read_owner(content: bytes) -> LockOwner | None:
    """The owner that a lock names; None for anything else, such as a lock that is just being written."""
    try:
        values = parse_json(content)
        kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(LockOwner)}
        values = {"lease_seconds": None} | values
        if set(values) != set(kinds) or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            return None
        return LockOwner(**values)
    except (BadInput, TypeError):
        return None


def lives(
    owner: LockOwner, me: LockOwner, state_of: Callable[[int], tuple[str, int] | None] | None = None
) -> bool | None:
    """True if the owner's process is there and may run, False if it is gone, None if that cannot be told from here.

    A stopped process (SIGSTOP) is neither: whether it will ever go on nobody knows.
    """
    if not owner.same_kernel(me) or owner.namespace != me.namespace:
        return None
    state = (state_of or process_state)(owner.pid)
    if state is None or state[0] in GONE or state[1] != owner.ticks:
        return False
    return None if state[0] in STOPPED else True


def process_state(pid: int) -> tuple[str, int] | None:
    """(state letter, start in kernel ticks) of a process of this machine; None if there is none, or no /proc."""
    text = first_line(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return (fields[0], int(fields[19])) if len(fields) > 19 else None


def first_line(path: str) -> str:
    """The first line of a file of the system, '' if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def link(path: str) -> str:
    """What a link of the system says, '' if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


class Moved(Exception):
    """The folder is not where it was; the message says what is known of it."""


class Look(NamedTuple):
    """A lock at one moment."""

    owner: LockOwner | None  # None: what is there is no lock of ours, or not yet
    version: Any
    guarded: bool | None  # True: a process of this kernel has the file flocked; None: nobody can tell
    age: float  # seconds since it was written, where one clock has measured both ends; else 0


class FileLock:
    """A file `lock`, held open and flocked by its owner."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / "lock"
        self.handle: int | None = None  # the open file, while the lock is held
        self.folder_id: tuple[int, int] | None = None  # the folder itself, whatever its name, while the lock is held

    def look(self) -> Look | None:
        """What is there, None if nothing is. Raises BadInput for what is no file, a link among them."""
        if self.path.is_symlink():
            raise BadInput(f"{self.path} is a link, and the lock of a run is a file; move it away")
        try:
            handle = paths.open_to_write(self.path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            content = os.pread(handle, PADDED, 0)
            version = (os.fstat(handle).st_ino, content)
            taken = flock(handle)
            return Look(read_owner(content), version, None if taken is None else not taken, 0.0)
        finally:
            os.close(handle)  # gives a flock back

    def create(self, owner: LockOwner) -> bool:
        """True if the lock is the owner's now, False if there was one."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        self.hold(handle, owner)
        paths.sync_folder(self.path.parent)
        return True

    def replace(self, owner: LockOwner, look: Look, *, steal: bool) -> bool:
        """True if the lock is the owner's now, False if it was no longer what the look had seen (unless it is stolen).

        It becomes another file, so that nothing its old owner still writes can be seen.
        """
        own = self.path.with_name(f".lock.{owner.token}")
        self.hold(os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), owner)
        try:
            handle = paths.open_to_write(self.path, os.O_RDWR)
        except FileNotFoundError:
            handle = None
        try:
            if handle is not None and flock(handle) is False:  # of several that take over, one at a time
                time.sleep(SETTLE_SECONDS)  # perhaps one of them; perhaps a child that its trainer left behind
            if steal or self.look_again() == look.version:
                os.replace(own, self.path)
            else:
                self.release()
                return False
        except FileNotFoundError:  # who has taken over meanwhile has removed it
            self.release()
            return False
        finally:
            if handle is not None:
                os.close(handle)
            own.unlink(missing_ok=True)
        for left in self.path.parent.glob(".lock.*"):  # of one that was killed here, or comes too late
            left.unlink(missing_ok=True)
        paths.sync_folder(self.path.parent)
        time.sleep(SETTLE_SECONDS)
        return self.is_own(owner)

    def look_again(self) -> tuple[int, bytes] | None:
        """The version now, without a flock; None if there is no lock."""
        try:
            with paths.open_binary(self.path) as file:
                return os.fstat(file.fileno()).st_ino, file.read(PADDED)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def renew(self, owner: LockOwner) -> None:
        """Writes the owner's new beat. Raises Changed if the lock is another's."""
        if not self.is_own(owner) or self.handle is None:
            raise Changed(str(self.path))
        os.pwrite(self.handle, owner.content(), 0)
        os.fsync(self.handle)

    def is_own(self, owner: LockOwner, *, quick: bool = False) -> bool:
        """True if the lock names this owner. Raises Moved if its folder is not where it was."""
        now = self.look_again()
        if now and owner.is_in(Look(read_owner(now[1]), now, None, 0.0)):
            return True
        if self.folder_id is not None:
            self.check_folder(until=time.monotonic() + (DELETING_SECONDS if now is None else 0.0))
        return False

    def check_folder(self, until: float) -> None:
        """Returns if the folder is still there at that time. Raises Moved once it is not: its files may go first."""
        while self.folder_id == folder_id(self.path.parent):
            if time.monotonic() >= until:
                return
            time.sleep(LOOK_SECONDS)
        lock = link(f"/proc/self/fd/{self.handle}")
        if not lock or lock.endswith("(deleted)"):
            raise Moved("deleted")
        raise Moved(f"moved to {os.path.dirname(lock)}")

    def remove(self, owner: LockOwner) -> None:
        """Gives the lock back."""
        try:
            if self.is_own(owner):
                self.path.unlink()
        finally:
            self.release()

    def hold(self, handle: int, owner: LockOwner) -> None:
        """Flocks the open file and writes the owner into it."""
        self.handle, self.folder_id = handle, folder_id(self.path.parent)
        while flock(handle) is False:  # whoever looks at the lock has it for a moment
            time.sleep(LOOK_SECONDS)
        os.pwrite(handle, owner.content(), 0)
        os.fsync(handle)

    def release(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
        self.handle = self.folder_id = None


class ObjectLock:
    """An object `lock` in a bucket."""

    def __init__(self, url: str, door: Bucket | None = None):
        self.url = f"{url.rstrip('/')}/lock"
        self.door = door or open_bucket(writing=True, silence=SILENCE_SECONDS)
        self.once = dataclasses.replace(self.door, attempts=1)
        self.generation = 0

    def look(self, door: Bucket | None = None) -> Look | None:
        """What is there, None if nothing is. The age is measured by the service alone. door: another than its own."""
        found = (door or self.door).look(self.url)
        return None if found is None else Look(read_owner(found.content), found.generation, None, found.age)

    def create(self, owner: LockOwner) -> bool:
        """True if the lock is the owner's now, False if there was one."""
        return self.write(owner, 0)

    def replace(self, owner: LockOwner, look: Look, *, steal: bool) -> bool:
        """True if the lock is the owner's now, False if it was no longer what the look had seen: look again."""
        return self.write(owner, look.version)

    def renew(self, owner: LockOwner) -> None:
        """Writes the owner's new beat, in one try. Raises Changed if the lock is another's."""
        if not self.write(owner, self.generation, self.once):
            raise Changed(self.url)

    def is_own(self, owner: LockOwner, *, quick: bool = False) -> bool:
        """True if the lock names this owner. quick: in one try of a few seconds."""
        return owner.is_in(self.look(dataclasses.replace(self.once, silence=QUICK_SECONDS) if quick else self.door))

    def write(self, owner: LockOwner, generation: int, door: Bucket | None = None) -> bool:
        """True if the object of this generation (0: none) is replaced."""
        door = door or self.door

        def attempt() -> bool:
            try:
                self.generation = door.put(self.url, owner.content(), generation)
                return True
            except Changed:
                found = self.look(door)  # perhaps by a try of our own whose answer was lost
                if found is None or not owner.is_in(found):
                    return False
                self.generation = found.version
                return True

        return door.patiently(attempt, self.url)

    def remove(self, owner: LockOwner) -> None:
        """Gives the lock back, if a few tries are enough: else it runs out by itself."""
        door = dataclasses.replace(self.door, attempts=REMOVE_TRIES)
        with contextlib.suppress(Changed, Unreachable, FileNotFoundError):  # the second if a try's answer was lost
            door.patiently(lambda: door.delete(self.url, self.generation), self.url)


def folder_id(folder: pathlib.Path) -> tuple[int, int] | None:
    """What the folder is, whatever its name; None if there is none."""
    try:
        found = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def held(folder: Any, doing: str) -> Iterator[None]:
    """Holds a local folder; the system gives back what a process that dies has held. Where no folder can, nothing is.

    Raises BadInput where another process has it. doing: what that is at, in front of the folder's name.
    """
    if paths.is_remote(folder):
        yield
        return
    handle = os.open(folder, os.O_RDONLY)  # itself, so that nothing is left behind
    try:
        if flock(handle) is False:
            raise BadInput(f"another process is {doing} {folder} now; wait for it, or name a new folder")
        yield
    finally:
        os.close(handle)


def flock(handle: int) -> bool | None:
    """True if the file is flocked by this handle now, False if by another; None where the file system has no flock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None
