"""Lock of a work folder: only the process that has the lock writes to the folder.

The owner renews its lock every lease_seconds. The owner is considered dead if its kernel reports that the process has
ended, or if the lock was not renewed for three leases. This time is measured by a single clock, of the observing
process or of the bucket. Clocks of different machines are never compared.
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

LEASES = 3  # leases without a renewal after which an owner is considered dead
LOOKS_PER_LEASE = 8  # reads of the lock per lease while waiting for it to expire
JOIN_SECONDS = 5.0  # timeout of a renewal in progress when the run ends


@dataclasses.dataclass(eq=False)
class RunLock:
    """The lock of a work folder, as a context manager.

    Only the first process of a run enters the context. In the other processes, every check passes.
    Raises: Stop (LOCK_HELD) if a different run has the lock, BadInput if the folder cannot be created or written.
    """

    workdir: Any
    cfg: LockConfig = LockConfig()
    _: dataclasses.KW_ONLY
    steal: bool = False  # True: take the lock from any owner
    note: Callable[..., None] = ignore
    log: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    me: LockOwner = dataclasses.field(default_factory=this_process)

    def __post_init__(self) -> None:
        self.me = dataclasses.replace(self.me, lease_seconds=self.cfg.lease_seconds)
        self.store: Any = None  # FileLock or ObjectLock; None until the context is entered
        self.previous_owner: LockOwner | None = None
        self.lost: tuple[Exit, str] | None = None  # exit code and message after the lock was lost
        self.reached, self.cause = self.clock(), ""  # time of the last successful access, and the error since then
        self.request_lock = threading.Lock()  # serializes requests
        self.ended, self.thread = threading.Event(), None
        self.fence = contextlib.ExitStack()

    def __enter__(self) -> "RunLock":
        folder = paths.make_run_dir(self.workdir)
        self.store = ObjectLock(str(self.workdir)) if paths.is_remote(self.workdir) else FileLock(folder)
        try:
            self.acquire()
        except Unreachable as error:
            raise Stop(Exit.STORAGE, f"{self.workdir} cannot be reached: {error}; check the storage") from None
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
            with contextlib.suppress(OSError, ValueError, Moved):  # a lock that is not removed expires
                self.store.remove(self.me)

    def acquire(self) -> None:
        """Waits until this process has the lock. Raises Stop (LOCK_HELD) if the current owner is alive."""
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
                            f"{self.workdir} is locked by {state.owner or 'an unknown process'}, which is not "
                            f"visible from this host: the lock is taken over if it is not renewed for {left:.0f} s "
                            "(immediately with --steal_lock)"
                        )
                if state.version != first.version:  # renewed, or acquired by a different process
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
        """Returns True if the owner is known to be alive, False if it is known to be dead, None if unknown."""
        if state.owner is None:
            return None
        living = is_alive(state.owner, self.me)
        if state.owner.same_kernel(self.me) and state.is_flocked is False and living is not True:
            return False  # the kernel releases the flock when a process ends
        return living  # the flock alone proves nothing: a child process may hold it after its parent has ended

    def expiry_seconds(self, state: LockState) -> float:
        """Returns the seconds without a renewal after which an owner is considered dead (LEASES x longer lease)."""
        theirs = state.owner.lease_seconds if state.owner else None
        return LEASES * max(self.cfg.lease_seconds, theirs or 0.0)

    def in_use_error(self, state: LockState) -> Stop:
        """Returns the error for a lock that a different run owns."""
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
            except Exception as error:  # error of the disk or the network: the next renewal may succeed
                self.cause = short_reason(error)

    def lose(self, error: Exception | None = None) -> None:
        """Records that the lock is lost. Writes no event, because the event log now belongs to the new owner."""
        if self.lost is not None:
            return
        if isinstance(error, Moved):
            line = f"{self.workdir} was {error} while the run trained; no new folder was created"
            self.lost = Exit.STORAGE, f"{line}: restore the folder, or give its new path as --workdir"
            return
        who = "or deleted while this process was suspended"
        with contextlib.suppress(Exception):  # names the new owner if known
            who = f"by {now}" if (now := self.store.read_state().owner) else who
        line = f"the lock of {self.workdir} was taken over {who}; this process has stopped without writing"
        self.lost = Exit.LOCK_HELD, line

    def poll(self) -> None:
        """Checks that this process still holds the lock. Call after every step.

        Reads files only if the process was suspended for three lease periods. It then makes one short request, unless
        the renewal thread is making a request.
        Raises: Stop (LOCK_HELD) if the lock was lost, Stop (STORAGE) if the folder was moved, deleted or unreachable
        for too long.
        """
        silent = self.clock() - self.reached
        if self.store is not None and not self.cause and silent > LEASES * self.cfg.lease_seconds:
            self.check_quickly()
        if self.lost is not None:
            raise Stop(*self.lost)
        if self.cause and 0 < self.cfg.outage_seconds < silent:
            raise Stop(
                Exit.STORAGE,
                f"{self.workdir} was unreachable for {silent:.0f} s, longer than lock.outage_seconds="
                f"{self.cfg.outage_seconds:g}: {self.cause}; restart the run when the storage responds",
            )

    def check_quickly(self) -> None:
        """Checks the lock with one short request. Called after a suspension, which also stops the renewal thread."""
        if self.lost is not None or not self.request_lock.acquire(blocking=False):
            return
        try:
            self.look(quick=True)
            self.reached = self.clock()
        except Exception as error:  # error of the disk or the network
            self.cause = short_reason(error)
        finally:
            self.request_lock.release()

    def look(self, quick: bool = False) -> None:
        """Reads the lock from storage and records whether it is lost. Raises storage errors."""
        try:
            if self.lost is None and not self.store.is_owned_by(self.me, quick=quick):
                self.lose()
        except Moved as error:
            self.lose(error)

    def check(self) -> None:
        """Checks the lock in storage before a write. Takes microseconds on a disk, and one request to a bucket.

        Raises: Stop (LOCK_HELD) if the lock is lost, Stop (STORAGE) if the folder was moved or deleted, OSError or
        BadInput if the storage does not respond.
        """
        if self.store is None:
            return
        in_turn = self.request_lock if isinstance(self.store, ObjectLock) else contextlib.nullcontext()
        with in_turn:  # only for buckets: on a disk a renewal may hold request_lock for a whole fsync
            self.look()
        if self.lost is not None:
            raise Stop(*self.lost)
