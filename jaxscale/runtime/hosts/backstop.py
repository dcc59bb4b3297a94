"""Kernel timers that end a process whose Python is blocked, and a delay for a process that is about to abort.

A Python thread cannot run while C code holds the GIL, possibly for ever. Timers therefore call functions of the C
library, which need no interpreter: `_exit(15)` in a separate thread.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from typing import BinaryIO

from jaxscale.system.exits import Exit

# After the deadline, at which the watchdog thread would have acted: first the stacks, then a line, then the exit.
STACKS_SECONDS, LINE_SECONDS, EXIT_SECONDS = 2.0, 2.3, 3.0
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2  # an unused real-time signal
BY_SIGNAL, BY_THREAD, ABSOLUTE = 0, 2, 1  # SIGEV_SIGNAL, SIGEV_THREAD and TIMER_ABSTIME of Linux


class Event(ctypes.Structure):
    """struct sigevent of 64-bit Linux."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    ]


class Backstop:
    """Ends the process with exit code 15 at a deadline that is moved repeatedly, after writing stacks to a file.

    faulthandler writes the stacks of all threads, also without the interpreter.
    """

    def __init__(self, stacks: BinaryIO):
        """Raises OSError on systems without these timers; Linux has them."""
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
        """Exits EXIT_SECONDS after `deadline` of time.monotonic(), after printing the line to stderr."""
        self.text.value = line.encode(errors="replace").replace(b"%", b" percent")[:499]  # a format string of warnx
        for number, later in enumerate((STACKS_SECONDS, LINE_SECONDS, EXIT_SECONDS)):
            self.set(number, deadline + later)
        self.armed = True

    def disarm(self) -> None:
        """Cancels the exit."""
        if self.armed:
            for number in range(3):
                self.set(number, 0.0)
        self.armed = False

    def end_at(self, moment: float) -> None:
        """Exits at this moment of time.monotonic(), without stacks or line."""
        self.set(0, 0.0)
        self.set(1, 0.0)
        self.set(2, moment)

    def set(self, number: int, moment: float) -> None:
        """Sets one of the timers; 0.0 turns it off."""
        self.times[number][2] = int(moment)
        self.times[number][3] = int(moment % 1 * 1e9)
        self.libc.timer_settime(self.timers[number], ABSOLUTE, ctypes.byref(self.times[number]), None)

    def close(self) -> None:
        """Deletes the timers."""
        for timer in self.timers:
            self.libc.timer_delete(timer)
        self.timers, self.armed = [], False
        faulthandler.unregister(STACKS_SIGNAL)


def library() -> ctypes.CDLL:
    """Returns the C library with timers; before glibc 2.34 they were in librt."""
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
    """Delays an abort by six seconds; returns a pipe that becomes readable when it begins. None outside Linux.

    jax aborts a process, from a C++ thread, when another one is lost. The delay is enough to log which one, and to exit
    with a code for the supervisor. The signal handler is the C library's sleep(), whose argument is then the signal
    number: 6 for SIGABRT. Before it, faulthandler writes the thread's stack to the pipe. Neither needs the interpreter.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, address(libc, "sleep"))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # an unread stack must not block the exit
    faulthandler.enable(file=writer, all_threads=False)
    return reader
