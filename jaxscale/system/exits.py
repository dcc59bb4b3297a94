"""Exit codes and the exceptions that select them. A supervisor may restart after 10, 13, 14, 15 and death by signal."""

import contextlib
import enum
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

INTERRUPTED = 130  # Ctrl-C; shells use these two codes for SIGINT and SIGPIPE
READER_GONE = 141


class Exit(enum.IntEnum):
    """Exit codes of a process, each with its cause and advice. See docs/survive.md."""

    event: str
    advice: str

    def __new__(cls, code: int, event: str, advice: str) -> "Exit":
        made = int.__new__(cls, code)
        made._value_, made.event, made.advice = code, event, advice
        return made

    DONE = 0, "done", "nothing"
    ERROR = 1, "an unexpected error, with a traceback", "report the traceback; if a supervisor gave up, read its reason"
    BAD_INPUT = 2, "a setting, a file or a combination of settings is invalid", "apply the fix in the message"
    NO_GO = 3, "a check or a rehearsal found that the run would fail", "change the settings in the table"
    PREEMPTED = 10, "saved and exited on a signal", "restart it"
    CONFIG_MISMATCH = (
        11,
        "the work folder belongs to another config",
        "restore the named settings, allow the change (`--allow_change`), or start a new run",
    )
    DATA_MISMATCH = (
        12,
        "the data differ from those the run started with",
        "restore the original data, or start a new run",
    )
    PEER_LOST = 13, "another process was lost", "restart all processes; check the named machine"
    STORAGE = 14, "saves kept failing", "free disk space or fix the named permission, then restart"
    HANG = 15, "no progress for too long", "restart; if it happens again, read WORKDIR/stacks"
    SILENT_CORRUPTION = 16, "a device computes wrong results", "remove the named device, then restart"
    NON_FINITE = (
        17,
        "training diverged and no recovery step is left",
        "inspect the named steps; lower the learning rate",
    )
    LOCK_HELD = 18, "another process trains in this folder", "stop the named process, or use another folder"
    CHECKPOINT_CORRUPT = (
        19,
        "no checkpoint can be restored",
        "restore one from a copy; do not start a new run in this folder",
    )


CODES_LINE = "Exit codes: 0 done, 1 unexpected error, 2 invalid input, named in the message; jaxscale --help lists all."
STARTED_AGAIN = (Exit.PREEMPTED, Exit.PEER_LOST, Exit.STORAGE, Exit.HANG)
BY_A_PERSON = (INTERRUPTED, READER_GONE)


def may_start_again(code: int) -> bool:
    """Returns True if the same command may succeed: after a preemption, lost process, hang, storage error or signal.

    For a signal, `code` is negative, as in Python, or above 128, as in shells. Returns False for Ctrl-C and a closed
    pipe, because the user caused them.
    """
    code = 128 - code if code < 0 else code
    return code in STARTED_AGAIN or (128 < code < 128 + signal.NSIG and code not in BY_A_PERSON)


def is_failure(code: int | None) -> bool:
    """Returns False if the process completed, was preempted, or was ended by the user, and True otherwise."""
    return code not in (Exit.DONE, Exit.PREEMPTED, *BY_A_PERSON)


def meaning(code: int) -> str:
    """Returns a description of an exit code: 'exit 13, another process was lost', 'killed by SIGKILL'."""
    number = -code if code < 0 else code - 128
    if code < 0 or code > 128:
        name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
        return f"killed by {name}" if code < 0 else f"exit {code}, {name}"
    return f"exit {code}, {Exit(code).event}" if code in list(Exit) else f"exit {code}, not an exit code of jaxscale"


def codes_help() -> str:
    """Returns one line for each exit code: the event, and advice."""
    return "\n".join(f"  {int(code):3}  {code.event}: {code.advice}" for code in Exit)


class BadInput(ValueError):
    """An error that the user can correct (exit 2). The message is one line with path, value, rule and fix.

    All other exceptions, including other ValueErrors, are defects and print a traceback (exit 1).
    """

    errno: int | None = None  # errno of the underlying OSError, if any

    def _render_traceback_(self) -> list[str]:
        """Returns the line that a notebook shows instead of a traceback."""
        _, line = verdict(self)
        assert line is not None, "errors of these classes have a one-line message"
        return [without_secrets(line)]


class Stop(Exception):
    """Ends the process with the exit code `code`. The message is one line: problem, location and fix."""

    def __init__(self, code: Exit, message: str):
        super().__init__(message)
        self.code = code

    _render_traceback_ = BadInput._render_traceback_


class Terminated(BaseException):
    """Raised on SIGTERM if there is nothing to save. Like KeyboardInterrupt, it is not an Exception."""

    _render_traceback_ = BadInput._render_traceback_


def run_and_exit(main: Callable[[list[str]], int | None], *, is_verb: bool = True) -> None:
    """Runs main(argv) and exits with its code. BadInput, Stop and Ctrl-C are printed as one line on stderr.

    Exits silently if the reader has closed the output, as `| head` does. For a verb, --help also prints exit codes.
    """
    with tracebacks_shown():
        try:
            code = main(argv := sys.argv[1:])
            flags = argv[: argv.index("--")] if "--" in argv else argv  # words after -- are for a different program
            if is_verb and not code and {"-h", "--help", "--helpfull"} & set(flags):
                put(f"\n{CODES_LINE}")
        except BrokenPipeError:
            if not (has_no_reader(sys.stdout) or has_no_reader(sys.stderr)):
                raise  # a different pipe is broken
            code = READER_GONE
        except BaseException as error:
            code, line = verdict(error)
            if line is None:
                raise  # a defect, which prints its traceback
            print_stderr(line)
    silence_closed_streams()
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(int(code or 0)))  # SIGTERM keeps the exit code
    sys.exit(int(code or 0))


@contextlib.contextmanager
def tracebacks_shown() -> Iterator[None]:
    """Prints the tracebacks of uncaught exceptions, including those in threads, to stderr without secrets."""
    from jaxscale.system.redact import shown_traceback

    def thread_ended(end: threading.ExceptHookArgs) -> None:
        if end.exc_value is not None and end.exc_type is not SystemExit:
            trace = shown_traceback(end.exc_value).rstrip("\n")
            print_stderr(f"in thread {end.thread.name if end.thread else '?'}: {trace}")

    # not restored, since Python calls it after this block
    sys.excepthook = lambda kind, error, frames: print_stderr(shown_traceback(error).rstrip("\n"))
    old, threading.excepthook = threading.excepthook, thread_ended
    try:
        yield
    finally:
        threading.excepthook = old


def verdict(error: BaseException) -> tuple[int, str | None]:
    """Returns (exit code, message) for an error that ends the program. The message is None if a traceback is needed."""
    if isinstance(error, Stop | BadInput):
        message = "\\n".join(str(error).splitlines())  # file names may contain newlines
        if isinstance(error, BadInput):
            return Exit.BAD_INPUT, f"error: {message}"
        return error.code, f"stopped ({error.code.name.lower()}, exit {int(error.code)}): {message}"
    if isinstance(error, Terminated):
        return Exit.PREEMPTED, (
            f"stopped (preempted, exit {int(Exit.PREEMPTED)}): SIGTERM: exited immediately; the same command "
            "resumes from the last checkpoint"
        )
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, f"stopped (interrupted, exit {INTERRUPTED})"
    return Exit.ERROR, None


def first_line(error: BaseException) -> str:
    """Returns 'TYPE: MESSAGE' of an error, with the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def without_secrets(text: str) -> str:
    """Returns the text without secrets and control characters."""
    from jaxscale.system.redact import shown  # imported late, since only programs that print need its patterns

    return shown(text)


def print_stderr(line: str) -> None:
    """Prints a line to stderr, without secrets and control characters. Ignores write errors."""
    with contextlib.suppress(OSError):  # no reader, or a full disk
        print(f"{without_secrets(line)}\n", end="", file=sys.stderr)  # noqa: T201  one write, as processes may share a file


def put(*lines: str, end: str = "\n") -> None:
    """Prints lines to stdout without secrets and control characters, and flushes. Raises the errors of `put_raw`."""
    put_raw(without_secrets("\n".join(lines)) + end)


def put_raw(text: str) -> None:
    """Writes text to stdout and flushes. Raises BrokenPipeError for a closed pipe, or BadInput for other errors."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        cause = error.strerror or error
        raise BadInput(
            f"cannot write to standard output: {cause}; free disk space, or redirect the output to a different file"
        ) from None


def silence_closed_streams() -> None:
    """Flushes stdout and stderr. If this fails, redirects the stream to the null device, so that Python can exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def has_no_reader(stream: TextIO) -> bool:
    """Returns True if the stream is a pipe whose read end is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # not a file descriptor
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
