"""Exit codes, and the one exception that carries one. A supervisor may restart 10, 13, 14, 15 and death by signal."""

import contextlib
import enum
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

INTERRUPTED = 130  # Ctrl-C, and a reader of our output that went away: what a shell calls death by these signals
READER_GONE = 141
PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


class Exit(enum.IntEnum):
    """What a process says of itself when it ends."""

    DONE = 0
    ERROR = 1  # unexpected: a traceback is shown
    BAD_INPUT = 2  # a setting, a file or a combination that a person can correct
    NO_GO = 3  # the check before a run found that it cannot work on this machine
    PREEMPTED = 10  # saved and left on a signal: start again
    CONFIG_MISMATCH = 11  # the work folder belongs to another config
    DATA_MISMATCH = 12  # the data are not those the run began with
    PEER_LOST = 13
    STORAGE = 14  # a save failed for good
    HANG = 15
    SILENT_CORRUPTION = 16
    NON_FINITE = 17  # too many steps in a row had a non-finite or absurd gradient
    LOCK_HELD = 18
    CHECKPOINT_CORRUPT = 19  # a committed checkpoint cannot be read back


class Stop(Exception):
    """Ends the process with `code` after printing the message: one line that says what, where and the way out."""

    def __init__(self, code: Exit, message: str):
        super().__init__(message)
        self.code = code


def run_and_exit(main: Callable[[list[str]], int | None]) -> None:
    """Runs main(argv) and leaves with its exit code; ValueError, Stop and Ctrl-C become one clear line on stderr.

    Where nobody reads our output any more, as after `| head`, it leaves without a word.
    """
    try:
        code = main(sys.argv[1:])
    except BrokenPipeError:
        if not (has_no_reader(sys.stdout) or has_no_reader(sys.stderr)):
            raise  # another pipe than our output
        code = READER_GONE
    except BaseException as error:
        code, line = verdict(error)
        if line is None:
            raise  # our mistake, and its traceback is the evidence
        tell(line)
    silence_closed_streams()
    sys.exit(int(code or 0))


def verdict(error: BaseException) -> tuple[int, str | None]:
    """(exit code, line for people) of an error that ends the program; the line is None where a traceback tells more."""
    if isinstance(error, Stop):
        return error.code, f"stopped ({error.code.name.lower()}, exit {int(error.code)}): {error}"
    if isinstance(error, ValueError) and is_for_people(error):  # not one from inside a library
        return Exit.BAD_INPUT, f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, f"stopped (interrupted, exit {INTERRUPTED})"
    return Exit.ERROR, None


def tell(line: str) -> None:
    """Prints a line to stderr, if anybody reads it."""
    with contextlib.suppress(BrokenPipeError):
        print(f"{line}\n", end="", file=sys.stderr)  # in one piece, where several processes write to one file


def silence_closed_streams() -> None:
    """Flushes stdout and stderr. One without a reader leads nowhere from now on, or Python's own end would fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def has_no_reader(stream: TextIO) -> bool:
    """True if the stream is a pipe whose other end is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # no file at all
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def is_for_people(error: BaseException) -> bool:
    """True if the error was raised by jaxscale itself, whose ValueErrors are written for the person at the keyboard."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return False
    name = frame.tb_frame.f_globals.get("__name__", "")
    # a module of ours that is run by itself is called __main__
    return name.partition(".")[0] == "jaxscale" or frame.tb_frame.f_code.co_filename.startswith(PACKAGE)
