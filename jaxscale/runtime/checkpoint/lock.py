"""One writer for a run's folder: a second process is refused, and one that has lost the lock writes no more.

An owner renews its lock every lease_seconds. It is considered dead when the kernel reports so, or when nothing has been
renewed for three leases. That time is measured by one monotonic clock, the observer's or the bucket's; clocks of two
machines are never compared.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxscale.runtime.checkpoint.config import LockConfig
from jaxscale.runtime.checkpoint.lock_stores import (
    FileLock,
    LockOwner,
    LockState,
    Moved,
    ObjectLock,
    is_alive,
    this_process,
)
from jaxscale.runtime.checkpoint.storage_errors import short_reason
from jaxscale.runtime.monitor.events import ignore
from jaxscale.system import fence, paths
from jaxscale.system.bucket_errors import Changed, Unreachable
from jaxscale.system.exits import Exit, Stop

LEASES = 3  # without a renewal, after which an owner is considered dead
LOOKS_PER_LEASE = 8  # reads of a lock during one lease
JOIN_SECONDS = 5.0  # for a renewal in progress when the run ends


@dataclasses.dataclass(eq=False)
class RunLock:
    """The lock of a work folder, as a context manager.

    Only the first process of a run enters it; in the others, and before it is entered, every check passes.
    Raises: Stop (LOCK_HELD) if another run has the lock, BadInput if the folder cannot be made or written.
    """

    workdir: Any
    cfg: LockConfig = LockConfig()
    _: dataclasses.KW_ONLY
    steal: bool = False  # take the lock from any owner
    note: Callable[..., None] = ignore
    log: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    me: LockOwner = dataclasses.field(default_factory=this_process)

    def __post_init__(self) -> None:
        self.me = dataclasses.replace(self.me, lease_seconds=self.cfg.lease_seconds)
        self.store: Any = None  # FileLock or ObjectLock, once entered
        self.previous_owner: LockOwner | None = None
        self.lost: tuple[Exit, str] | None = None  # exit code and message
        self.reached, self.cause = self.clock(), ""  # time when the folder was last reached, and the error since then
        self.request_lock = threading.Lock()  # one request at a time
        self.ended, self.thread = threading.Event(), None
        self.fence = contextlib.ExitStack()

    def __enter__(self) -> "RunLock":
        folder = paths.make_run_dir(self.workdir)
        self.store = ObjectLock(str(self.workdir)) if paths.is_remote(self.workdir) else FileLock(folder)
        try:
            self.acquire()
        except Unreachable as error:
            raise Stop(Exit.STORAGE, f"{self.workdir} cannot be reached: {error}") from None
        self.reached = self.clock()
        self.fence.enter_context(fence.fenced(self.workdir, self.check))
        self.thread = threading.Thread(target=self.work, name="run-lock", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        if self.thread is None:
            return
        self.fence.close()
        self.thread.join(JOIN_SECONDS)
        if not self.thread.is_alive() and self.lost is None and not self.cause:
            with contextlib.suppress(OSError, ValueError, Moved):  # it expires anyway
                self.store.remove(self.me)

    def acquire(self) -> None:
        """Returns once this process has the lock. Raises Stop (LOCK_HELD) once its owner is known to be alive."""
        first, since = None, self.clock()
        while True:
            state: LockState | None = self.store.read_state()
            if state is None:
                if self.store.create(self.me):
                    return
                continue
            alive = self.is_owner_alive(state)
            if alive and not self.steal:
                raise self.in_use_error(state)
            if alive is None and not self.steal:
                if first is None:
                    first, since = state, self.clock()
                    if (left := self.expiry_seconds(state) - state.age) > 0:
                        self.log(
                            f"{self.workdir} is locked by {state.owner or 'an unknown process'}, not visible from this "
                            f"host: the lock is taken over if it is not renewed for {left:.0f} s (immediately with "
                            "--steal_lock)"
                        )
                if state.version != first.version:  # renewed, or taken by another process
                    raise self.in_use_error(state)
                if max(state.age, self.clock() - since) < self.expiry_seconds(state):
                    self.sleep(self.cfg.lease_seconds / LOOKS_PER_LEASE)
                    continue
            if self.store.replace(self.me, state, steal=self.steal):
                reason = "stolen" if alive is not False and self.steal else "its owner no longer runs"
                self.previous_owner = state.owner
                self.log(f"{self.workdir}: the lock of {state.owner or 'an unknown process'} was taken over: {reason}")
                self.note("lock_stolen", holder=str(state.owner), why=reason)
                return

    def is_owner_alive(self, state: LockState) -> bool | None:
        """Returns True or False if the owner is known to be alive or dead, None if only a renewal can show it."""
        if state.owner is None:
            return None
        living = is_alive(state.owner, self.me)
        if state.owner.same_kernel(self.me) and state.is_flocked is False and living is not True:
            return False  # the kernel releases the flock of any process that ends
        return living  # an flock that is taken may belong to a child process that outlived its trainer

    def expiry_seconds(self, state: LockState) -> float:
        """Returns the seconds without a renewal after which the owner is considered dead, by the longer lease."""
        theirs = state.owner.lease_seconds if state.owner else None
        return LEASES * max(self.cfg.lease_seconds, theirs or 0.0)

    def in_use_error(self, state: LockState) -> Stop:
        """Returns the error for a lock that another run owns."""
        return Stop(
            Exit.LOCK_HELD,
            f"{self.workdir} is in use by {state.owner or 'an unknown process'}; stop that run, or choose another "
            "--workdir (--steal_lock takes the lock over if that run can no longer be stopped)",
        )

    def work(self) -> None:
        """Renews the lock until the run ends or the lock is lost."""
        while not self.ended.wait(self.cfg.lease_seconds / (LOOKS_PER_LEASE if self.cause else 1)):
            try:
                with self.request_lock:
                    self.me = self.me.renewed()
                    self.store.renew(self.me)
                self.reached, self.cause = self.clock(), ""
            except (Changed, Moved) as error:
                self.lose(error)
                return
            except Exception as error:  # of the disk or the network: the next renewal may succeed
                self.cause = short_reason(error)

    def lose(self, error: Exception | None = None) -> None:
        """Records once that the lock is lost. Writes no event: the event log belongs to the new owner."""
        if self.lost is not None:
            return
        if isinstance(error, Moved):
            line = f"{self.workdir} was {error} while the run trained; no new folder was created"
            self.lost = Exit.STORAGE, f"{line}: restore the folder, or give its new path as --workdir"
            return
        who = "while this process was stopped, or deleted"
        with contextlib.suppress(Exception):  # the new owner is shown if known
            who = f"by {now}" if (now := self.store.read_state().owner) else who
        line = f"the lock of {self.workdir} was taken over {who}; this process has stopped without writing"
        self.lost = Exit.LOCK_HELD, line

    def poll(self) -> None:
        """Checks that this process still holds the lock; called after every step.

        Reads no files unless the process was suspended for three lease periods. In that case it makes one short
        request, unless the renewal thread is already making one.
        Raises: Stop with LOCK_HELD if the lock was lost, and with STORAGE if the folder was moved, deleted or
        unreachable for too long.
        """
        silent = self.clock() - self.reached
        if self.store is not None and not self.cause and silent > LEASES * self.cfg.lease_seconds:
            self.check_quickly()
        if self.lost is not None:
            raise Stop(*self.lost)
        if self.cause and 0 < self.cfg.outage_seconds < silent:
            raise Stop(
                Exit.STORAGE,
                f"{self.workdir} could not be reached for {silent:.0f} s (lock.outage_seconds="
                f"{self.cfg.outage_seconds:g}): {self.cause}; the run resumes from its last checkpoint once it can",
            )

    def check_quickly(self) -> None:
        """Checks the lock before the next step writes: the renewing thread was stopped too."""
        if self.lost is not None or not self.request_lock.acquire(blocking=False):
            return
        try:
            self.look(quick=True)
            self.reached = self.clock()
        except Exception as error:  # of the disk or the network
            self.cause = short_reason(error)
        finally:
            self.request_lock.release()

    def look(self, quick: bool = False) -> None:
        """Looks at the lock in storage, and records if it is lost. Raises the errors of the storage."""
        try:
            if self.lost is None and not self.store.is_owned_by(self.me, quick=quick):
                self.lose()
        except Moved as error:
            self.lose(error)

    def check(self) -> None:
        """Checks the lock in storage before a write to the folder: microseconds on a disk, a request to a bucket.

        Raises: Stop (LOCK_HELD) if the lock is lost, Stop (STORAGE) if the folder was moved or deleted; OSError or
        BadInput if the storage does not answer.
        """
        if self.store is None:
            return
        in_turn = self.request_lock if isinstance(self.store, ObjectLock) else contextlib.nullcontext()
        with in_turn:  # not on a disk, where a renewal may take as long as an fsync
            self.look()
        if self.lost is not None:
            raise Stop(*self.lost)
