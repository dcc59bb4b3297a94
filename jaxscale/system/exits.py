"""Exit codes, and the two exceptions that choose one. A supervisor may restart 10, 13, 14, 15 and death by signal."""

import contextlib
import enum
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from jaxscale.system.redact import shown, shown_traceback

INTERRUPTED = 130  # Ctrl-C, and a reader of our output that went away: what a shell calls death by these signals
READER_GONE = 141


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
    NON_FINITE = 17  # too many steps were refused, and all remedies are used up
    LOCK_HELD = 18
    CHECKPOINT_CORRUPT = 19  # a committed checkpoint cannot be read back


CODES_LINE = (
    "Exit codes: 0 done, 1 an unexpected error, 2 something to correct, which is named; jaxscale --help has all."
)
STARTED_AGAIN = (Exit.PREEMPTED, Exit.PEER_LOST, Exit.STORAGE, Exit.HANG)
BY_A_PERSON = (INTERRUPTED, READER_GONE)

# code: (what happened, what a person does). docs/survive.md has the long form, and a test holds the two together.
ADVICE: dict[Exit, tuple[str, str]] = {
    Exit.DONE: ("done", "nothing"),
    Exit.ERROR: ("an unexpected error, with a traceback", "report the traceback; or a supervisor gave up and said why"),
    Exit.BAD_INPUT: ("a setting, a file or a combination is wrong", "correct what the line names"),
    Exit.NO_GO: ("a check or a rehearsal found that the run cannot work here", "change what the table names"),
    Exit.PREEMPTED: ("saved on a signal", "start it again"),
    Exit.CONFIG_MISMATCH: (
        "the work folder belongs to another config",
        "set the named settings back, allow them (`--allow_change`), or begin anew",
    ),
    Exit.DATA_MISMATCH: ("the data are not those the run began with", "bring the old data back, or begin anew"),
    Exit.PEER_LOST: ("another process was lost", "start all again; look at the machine that is named"),
    Exit.STORAGE: ("saves kept failing", "make room or mend the permission that is named, then start again"),
    Exit.HANG: ("nothing moved for too long", "start again; if it comes back, read WORKDIR/stacks"),
    Exit.SILENT_CORRUPTION: ("a device computes wrong bits", "take the named device out, then start again"),
    Exit.NON_FINITE: ("training diverged and its remedies are used up", "look at the named steps; lower the rate"),
    Exit.LOCK_HELD: ("another process trains in this folder", "end the one that is named, or use another folder"),
    Exit.CHECKPOINT_CORRUPT: ("no checkpoint can be read back", "bring one back from a copy; never begin over it"),
}


def may_start_again(code: int) -> bool:
    """True if the same command may do better: saved on a signal, a lost process, storage, a hang, death by a signal.

    Args: code: negative for death by a signal, as Python has it, or above 128, as shells do. Ctrl-C and a closed pipe
    are a person's wish.
    """
    code = 128 - code if code < 0 else code
    return code in STARTED_AGAIN or (128 < code < 128 + signal.NSIG and code not in BY_A_PERSON)


def is_failure(code: int | None) -> bool:
    """True for an end that is neither done, nor saved on a signal, nor a person's wish."""
    return code not in (Exit.DONE, Exit.PREEMPTED, *BY_A_PERSON)


def meaning(code: int) -> str:
    """'exit 13, another process was lost', 'killed by SIGKILL': a code as in may_start_again, for people."""
    number = -code if code < 0 else code - 128
    if code < 0 or code > 128:
        name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        return f"killed by {name}" if code < 0 else f"exit {code}, {name}"
    return f"exit {code}, {ADVICE[Exit(code)][0]}" if code in list(Exit) else f"exit {code}, no code of jaxscale"


def codes_help() -> str:
    """A line for each exit code: what happened, and what a person does."""
    return "\n".join(f"  {int(code):3}  {what}: {do}" for code, (what, do) in ADVICE.items())


class BadInput(ValueError):
    """What a person can mend: the message is one line with the place, the value, the rule and the way out; exit 2.

    Any other exception, a ValueError too, is a defect and keeps its traceback (exit 1).
    """

    errno: int | None = None  # of the OSError behind it, where there is one

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook shows in place of a traceback: the line."""
        _, line = verdict(self)
        assert line is not None, "each class with this method has a line"
        return [shown(line)]


class Stop(Exception):
    """Ends the process with `code` after printing the message: one line that says what, where and the way out."""

    def __init__(self, code: Exit, message: str):
        super().__init__(message)
        self.code = code

    _render_traceback_ = BadInput._render_traceback_


class Terminated(BaseException):
    """SIGTERM where there is nothing to save: as KeyboardInterrupt, it passes by whoever catches errors."""

    _render_traceback_ = BadInput._render_traceback_


def run_and_exit(main: Callable[[list[str]], int | None], *, is_verb: bool = True) -> None:
    """Runs main(argv) and leaves with its exit code; BadInput, Stop and Ctrl-C become one clear line on stderr.

    Where nobody reads our output any more, as after `| head`, it leaves without a word. The help of a verb ends with
    what its exit codes mean.
    """
    with tracebacks_shown():
        try:
            code = main(sys.argv[1:])
            if is_verb and not code and asks_for_help(sys.argv[1:]):
                put(f"\n{CODES_LINE}")
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
    with contextlib.suppress(ValueError):  # of another thread than the main one
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(int(code or 0)))  # the end is known: no other one
    sys.exit(int(code or 0))


def asks_for_help(argv: Sequence[str]) -> bool:
    """True if a flag asks for help; what comes after `--` is for another program."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return bool({"-h", "--help", "--helpfull"} & set(own))


@contextlib.contextmanager
def tracebacks_shown() -> Iterator[None]:
    """Tracebacks that end the program or one of its threads are printed as `tell` prints a line, without secrets."""
    old, threading.excepthook = threading.excepthook, thread_ended
    sys.excepthook = lambda kind, error, frames: tell(shown_traceback(error).rstrip("\n"))  # stays: it is called last
    try:
        yield
    finally:
        threading.excepthook = old


def thread_ended(end: threading.ExceptHookArgs) -> None:
    """Prints what ended a thread."""
    if end.exc_value is not None and end.exc_type is not SystemExit:
        tell(f"in thread {end.thread.name if end.thread else '?'}: " + shown_traceback(end.exc_value).rstrip("\n"))


def verdict(error: BaseException) -> tuple[int, str | None]:
    """(exit code, line for people) of an error that ends the program; the line is None where a traceback tells more."""
    if isinstance(error, Stop):
        return error.code, f"stopped ({error.code.name.lower()}, exit {int(error.code)}): {in_one_line(error)}"
    if isinstance(error, BadInput):
        return Exit.BAD_INPUT, f"error: {in_one_line(error)}"
    if isinstance(error, Terminated):
        return Exit.PREEMPTED, (
            f"stopped (preempted, exit {int(Exit.PREEMPTED)}): SIGTERM: left at once, what was saved is kept; the same "
            "command goes on from there"
        )
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, f"stopped (interrupted, exit {INTERRUPTED})"
    return Exit.ERROR, None


def in_one_line(error: BaseException) -> str:
    """What the error says; a line end in it is that of a file's name, or of another's text."""
    return "\\n".join(str(error).splitlines())


def tell(line: str) -> None:
    """Prints a line to stderr, if anybody reads it, without secrets and what could drive a terminal."""
    with contextlib.suppress(OSError):  # no reader, or a full disk: there is no other place to report it
        print(f"{shown(line)}\n", end="", file=sys.stderr)  # noqa: T201  in one piece: several processes may write to one file


def put(*lines: str, end: str = "\n") -> None:
    """Prints lines to stdout at once, without secrets and what could drive a terminal. Raises as `put_raw` does."""
    put_raw(shown("\n".join(lines)) + end)


def put_raw(text: str) -> None:
    """Writes text to stdout at once. Raises BrokenPipeError without a reader, and BadInput if it takes no more."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        cause = error.strerror or error
        raise BadInput(f"standard output cannot be written: {cause}; make room, or send it to another file") from None


def silence_closed_streams() -> None:
    """Flushes stdout and stderr. One that cannot be written becomes the null device, or Python's own end would fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
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
