"""One writer for a run's folder: a second process is refused, and one that has lost the folder writes no more.

An owner renews its lock every lease_seconds. It is dead when its kernel says so, or when nothing has been renewed for
three leases: watched by one's own steady clock, or measured by the bucket's, never by comparing those of two machines.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxscale.checkpoint.config import LockConfig
from jaxscale.checkpoint.lock_stores import FileLock, LockOwner, Look, Moved, ObjectLock, lives, this_process
from jaxscale.checkpoint.storage_errors import short_reason
from jaxscale.monitor.events import ignore
from jaxscale.system import fence, paths
from jaxscale.system.bucket_errors import Changed, Unreachable
from jaxscale.system.exits import Exit, Stop

LEASES = 3  # without a sign of life, after which an owner counts as dead
LOOKS = 8  # at a lock during one lease
JOIN_SECONDS = 5.0  # for a renewal that is under way when the run ends
USUAL = LockConfig()


class RunLock:
    """The lock of a work folder, for a `with` block.

    Of a run's processes the first one enters it; for the others, and while it is not entered, all questions to it are
    answered as by a folder that is ours. Args: steal: takes it from whoever has it. me, clock: who asks, and a
    monotonic clock, passed in for tests.
    Raises: Stop (LOCK_HELD) where another run has it, BadInput where the folder cannot be made or written.
    """

    def __init__(
        self,
        workdir: Any,
        cfg: LockConfig = USUAL,
        *,
        steal: bool = False,
        note: Callable[..., None] = ignore,
        log: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        me: LockOwner | None = None,
    ):
        self.workdir, self.cfg, self.steal = workdir, cfg, steal
        self.note, self.log, self.clock, self.sleep = note, log, clock, sleep
        self.me = dataclasses.replace(me or this_process(), lease_seconds=cfg.lease_seconds)
        self.store: FileLock | ObjectLock | None = None
        self.taken_from: LockOwner | None = None  # of whom the lock was when this run began
        self.lost: tuple[Exit, str] | None = None  # the line that says so, and the code to leave with
        self.reached, self.cause = clock(), ""  # when the folder was last reached, and why not since
        self.using = threading.Lock()  # one request at a time
        self.ended, self.thread = threading.Event(), None
        self.fence = contextlib.ExitStack()

    def __enter__(self) -> "RunLock":
        self.store = open_store(self.workdir, self.log)
        if self.store is not None:
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
            with contextlib.suppress(OSError, ValueError, Moved):  # it runs out by itself
                self.opened.remove(self.me)

    @property
    def opened(self) -> "FileLock | ObjectLock":
        """The store of a lock that is entered and has one."""
        assert self.store is not None, "no store was opened"
        return self.store

    def acquire(self) -> None:
        """Returns once the lock is ours. Raises Stop (LOCK_HELD) once it is known that its owner lives."""
        first, since = None, self.clock()
        while True:
            look = self.opened.look()
            if look is None:
                if self.opened.create(self.me):
                    return
                continue
            alive = self.alive(look)
            if alive and not self.steal:
                raise self.held(look)
            if alive is None and not self.steal:
                if first is None:
                    first, since = look, self.clock()
                    self.announce_wait(look)
                if look.version != first.version:  # it was renewed, or another one came first
                    raise self.held(look)
                if max(look.age, self.clock() - since) < self.silence_of(look):
                    self.sleep(self.cfg.lease_seconds / LOOKS)
                    continue
            if self.opened.replace(self.me, look, steal=self.steal):
                return self.took_over(look, "stolen" if alive is not False and self.steal else "its owner is gone")

    def alive(self, look: Look) -> bool | None:
        """Whether the owner is there: True, False, or None where only its next renewal can tell."""
        if look.owner is None:
            return None
        living = lives(look.owner, self.me)
        if look.owner.same_kernel(self.me) and look.guarded is False and living is not True:
            return False  # whatever ends a process ends its flock
        return living  # a flock that is held may be that of a child which its trainer left behind

    def silence_of(self, look: Look) -> float:
        """Seconds without a renewal after which the owner counts as dead: by its own lease, or ours if longer."""
        theirs = look.owner.lease_seconds if look.owner else None
        return LEASES * max(self.cfg.lease_seconds, theirs or 0.0)

    def announce_wait(self, look: Look) -> None:
        left = self.silence_of(look) - look.age
        if left > 0:
            self.log(
                f"{self.workdir} is locked by {look.owner or 'an unknown process'}, of which nothing is known here: "
                f"it is taken over if that does not renew its lock for {left:.0f} s (at once with --steal_lock)"
            )

    def took_over(self, look: Look, why: str) -> None:
        """Says from whom the lock was taken."""
        self.taken_from = look.owner
        self.log(f"{self.workdir}: the lock of {look.owner or 'an unknown process'} was taken over: {why}")
        self.note("lock_stolen", holder=str(look.owner), why=why)

    def held(self, look: Look) -> Stop:
        """The error for a folder that another run writes."""
        return Stop(
            Exit.LOCK_HELD,
            f"{self.workdir} is in use by {look.owner or 'an unknown process'}; stop that run, or choose another "
            "--workdir (--steal_lock takes it from a run that can no longer end by itself)",
        )

    def work(self) -> None:
        """Renews the lock until the run ends or the lock is another's."""
        while not self.ended.wait(self.cfg.lease_seconds / (LOOKS if self.cause else 1)):
            try:
                with self.using:
                    self.me = self.me.renewed()
                    self.opened.renew(self.me)
                self.reached, self.cause = self.clock(), ""
            except (Changed, Moved) as error:
                self.lose(error)
                return
            except Exception as error:  # of the disk or the network: the next renewal may do better
                self.cause = short_reason(error)

    def lose(self, why: Exception | None = None) -> None:
        """Remembers that the folder is no longer ours, once. Nothing is noted in it: the log is another's too."""
        if self.lost is not None:
            return
        if isinstance(why, Moved):
            line = f"{self.workdir} was {why} while the run trained; nothing was made anew in its place"
            self.lost = Exit.STORAGE, f"{line}: bring the folder back, or give its new place as --workdir"
            return
        now = None
        with contextlib.suppress(Exception):  # who it is, is only of interest
            look = self.opened.look()
            now = look.owner if look else None
        who = f"by {now}" if now else "while this process stood still, or deleted"
        line = f"the lock of {self.workdir} was taken over {who}; this process has stopped without writing"
        self.lost = Exit.LOCK_HELD, line

    def poll(self) -> None:
        """To be called every step. It looks at no file, unless this process has just stood still for three leases.

        Even then it asks once and quickly, or not at all where the thread that renews is asking already.
        Raises: Stop with LOCK_HELD if the lock was lost, with STORAGE if the folder was moved or deleted, or could not
        be reached for too long.
        """
        silent = self.clock() - self.reached
        if self.store is not None and not self.cause and silent > LEASES * self.cfg.lease_seconds:
            self.glance()
        if self.lost is not None:
            raise Stop(*self.lost)
        if self.cause and 0 < self.cfg.outage_seconds < silent:
            raise Stop(
                Exit.STORAGE,
                f"{self.workdir} could not be reached for {silent:.0f} s (lock.outage_seconds="
                f"{self.cfg.outage_seconds:g}): {self.cause}; the run goes on from its last checkpoint once it can",
            )

    def glance(self) -> None:
        """Looks whether the lock is still ours: the thread that renews has slept as well, and a step writes."""
        if self.lost is not None or not self.using.acquire(blocking=False):
            return
        try:
            if not self.opened.is_own(self.me, quick=True):
                self.lose()
            self.reached = self.clock()
        except Moved as error:
            self.lose(error)
        except Exception as error:  # of the disk or the network
            self.cause = short_reason(error)
        finally:
            self.using.release()

    def check(self) -> None:
        """Asks the storage, before anything in the folder is written: microseconds on a disk, a request to a bucket.

        Raises: Stop (LOCK_HELD) if the lock is another's or gone, Stop (STORAGE) if the folder was moved or deleted;
        OSError or BadInput if the storage does not answer.
        """
        if self.store is None:
            return
        in_turn = self.using if isinstance(self.store, ObjectLock) else contextlib.nullcontext()
        try:
            with in_turn:  # on a disk a renewal may take as long as an fsync, and nobody waits for it
                if self.lost is None and not self.opened.is_own(self.me):
                    self.lose()
        except Moved as error:
            self.lose(error)
        if self.lost is not None:
            raise Stop(*self.lost)


def open_store(workdir: Any, log: Callable[[str], None]) -> FileLock | ObjectLock | None:
    """Where the lock of this folder is kept, which is made if it is missing; None for a storage that has no locks."""
    folder = paths.make_run_dir(workdir)
    if not paths.is_remote(workdir):
        return FileLock(folder)
    if str(workdir).startswith("gs://"):
        return ObjectLock(str(workdir))
    log(f"{workdir}: this kind of storage has no lock; see to it that no other run writes there")
    return None
