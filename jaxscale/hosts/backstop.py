"""Timers of the kernel that end a process whose Python stands still, and time to speak for one that is about to abort.

A watching thread of Python cannot run while another one holds the interpreter's lock, as C code may for ever. So the
ends are functions of the C library, which need no interpreter: a timer calls `_exit(15)` in a thread of its own.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from typing import BinaryIO

from jaxscale.system.exits import Exit

# Beyond the deadline, by which the watching thread would have acted: first the stacks, a line, and then the end.
STACKS_SECONDS, LINE_SECONDS, EXIT_SECONDS = 2.0, 2.3, 3.0
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2  # of the many that nobody uses
BY_SIGNAL, BY_THREAD, ABSOLUTE = 0, 2, 1  # SIGEV_SIGNAL, SIGEV_THREAD and TIMER_ABSTIME of Linux


class Event(ctypes.Structure):
    """struct sigevent of 64-bit Linux."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 32),
    ]


class Backstop:
    """Ends the process with exit code 15 at a moment that is put off again and again; the stacks go to a file first.

    The stacks are those of all threads as faulthandler writes them, which needs no interpreter either.
    """

    def __init__(self, stacks: BinaryIO):
        """Raises OSError where the system has no such timers; Linux has them."""
        self.stacks = stacks
        self.text = ctypes.create_string_buffer(500)
        self.timers: list[ctypes.c_void_p] = []
        self.times = [(ctypes.c_long * 4)() for _ in range(3)]
        self.armed = False
        if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
            raise OSError("no timers of the kernel")
        self.libc = library()
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
        for event in (
            Event(notify=BY_SIGNAL, signal=STACKS_SIGNAL),
            Event(notify=BY_THREAD, function=address(self.libc, "warnx"), value=ctypes.addressof(self.text)),
            Event(notify=BY_THREAD, function=address(self.libc, "_exit"), value=int(Exit.HANG)),
        ):
            timer = ctypes.c_void_p()
            if self.libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
                self.close()
                raise OSError(ctypes.get_errno(), "timer_create failed")
            self.timers.append(timer)

    def arm(self, deadline: float, line: str) -> None:
        """The end comes EXIT_SECONDS after `deadline` of time.monotonic(), and the line before it on stderr."""
        self.text.value = line.encode(errors="replace").replace(b"%", b" percent")[:499]  # warnx would fill in a %
        for number, later in enumerate((STACKS_SECONDS, LINE_SECONDS, EXIT_SECONDS)):
            self.set(number, deadline + later)
        self.armed = True

    def disarm(self) -> None:
        """No end."""
        if self.armed:
            for number in range(3):
                self.set(number, 0.0)
        self.armed = False

    def end_at(self, moment: float) -> None:
        """The end comes at this moment of time.monotonic(), and nothing before it."""
        self.set(0, 0.0)
        self.set(1, 0.0)
        self.set(2, moment)

    def set(self, number: int, moment: float) -> None:
        """Sets one of the timers; 0.0: it is off."""
        self.times[number][2] = int(moment)
        self.times[number][3] = int(moment % 1 * 1e9)
        self.libc.timer_settime(self.timers[number], ABSOLUTE, ctypes.byref(self.times[number]), None)

    def close(self) -> None:
        """Takes the timers away."""
        for timer in self.timers:
            self.libc.timer_delete(timer)
        self.timers, self.armed = [], False
        faulthandler.unregister(STACKS_SIGNAL)


def library() -> ctypes.CDLL:
    """The C library; before glibc 2.34 the timers were in one of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "timer_create"):
        libc = ctypes.CDLL("librt.so.1", use_errno=True)
    libc.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.timer_delete.argtypes = [ctypes.c_void_p]
    return libc


def address(library: ctypes.CDLL, name: str) -> int:
    """Returns the address of a function of the library."""
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None, "only a null pointer has no value"
    return found


def linger_on_abort() -> int | None:
    """A pipe that can be read as soon as the process aborts, which then takes six seconds; None where it cannot be had.

    jax aborts a process, from a thread of C++, when another one is lost. These seconds are enough to say who that was
    and to leave with an exit code that tells a supervisor what to do. The handler is the C library's own sleep(), which
    gets the number of the signal for its seconds: 6 for SIGABRT. Before it, faulthandler writes the thread's stack
    into the pipe. Neither needs the interpreter.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, address(libc, "sleep"))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # a stack that nobody reads must not hold up the end
    faulthandler.enable(file=writer, all_threads=False)
    return reader
