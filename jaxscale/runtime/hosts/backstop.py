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


class SignalEvent(ctypes.Structure):
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
    """Ends the process with exit code 15 at a deadline that is moved, after faulthandler has written all stacks."""

    def __init__(self, stacks: BinaryIO):
        """Raises OSError on systems without these timers; Linux has them."""
        self.text = ctypes.create_string_buffer(500)
        self.timers: list[ctypes.c_void_p] = []
        if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
            raise OSError("no timers of the kernel")
        self.libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self.libc, "timer_create"):  # before glibc 2.34 the timers were in librt
            self.libc = ctypes.CDLL("librt.so.1", use_errno=True)
        self.libc.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self.libc.timer_delete.argtypes = [ctypes.c_void_p]
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
        for event in (
            SignalEvent(notify=BY_SIGNAL, signal=STACKS_SIGNAL),
            SignalEvent(notify=BY_THREAD, function=address(self.libc, "warnx"), value=ctypes.addressof(self.text)),
            SignalEvent(notify=BY_THREAD, function=address(self.libc, "_exit"), value=int(Exit.HANG)),
        ):
            timer = ctypes.c_void_p()
            if self.libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
                self.close()
                raise OSError(ctypes.get_errno(), "timer_create failed")
            self.timers.append(timer)

    def arm(self, deadline: float, line: str) -> None:
        """Exits EXIT_SECONDS after `deadline` of time.monotonic(), after printing the line to stderr."""
        self.text.value = line.encode(errors="replace").replace(b"%", b" percent")[:499]  # a format string of warnx
        self.set_timers(deadline + STACKS_SECONDS, deadline + LINE_SECONDS, deadline + EXIT_SECONDS)

    def disarm(self) -> None:
        """Cancels the exit."""
        self.set_timers(0.0, 0.0, 0.0)

    def set_timers(self, *moments: float) -> None:
        """Sets the timers of stacks, line and exit; 0.0 turns one off."""
        for timer, moment in zip(self.timers, moments):
            once = (ctypes.c_long * 4)(0, 0, int(moment), int(moment % 1 * 1e9))
            self.libc.timer_settime(timer, ABSOLUTE, ctypes.byref(once), None)

    def close(self) -> None:
        """Deletes the timers."""
        for timer in self.timers:
            self.libc.timer_delete(timer)
        self.timers = []
        faulthandler.unregister(STACKS_SIGNAL)


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
