"""The limit of open files and connections of a process: raises and checks it."""

import contextlib
import errno
import resource

from jaxscale.system.exits import BadInput, print_stderr

MAX_OPEN = 1 << 20  # the kernel's own default for how far a limit can be raised, fs.nr_open
PROGRAM_FILES = 256  # of a run: a tiny one had 25 (2 cores, jax 0.10.2, 2026-11-23), and a bucket takes more
MIN_FILES = 32  # of any program


def raise_open_files() -> int:
    """Raises the limit of open files and connections of this process as far as allowed, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if soft == resource.RLIM_INFINITY else soft


def check_open_files(number: int, of: str) -> None:
    """Prints a warning if `number` of these and the program's files may exceed the limit."""
    if problem := open_files_problem(number, of, PROGRAM_FILES):
        print_stderr(f"WARNING: {problem}")


def require_open_files(number: int, of: str) -> None:
    """Raises BadInput if `number` of these, open at the same time, exceed the limit."""
    if problem := open_files_problem(number, of, MIN_FILES):
        raise BadInput(problem)


def open_files_problem(number: int, of: str, others: int) -> str:
    """Returns an error line if the limit is too small for `number` of these and the others, else ''."""
    limit, needed = raise_open_files(), number + others
    if needed <= limit:
        return ""
    return f"open files: {number:,} {of} and about {others} other files need {needed:,}, but {way_out(limit, needed)}"


def too_many(error: OSError) -> str:
    """Returns '; the limit is ...' with advice for an error about the limit, '' for any other."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    limit = raise_open_files()
    return f"; {way_out(limit, 4 * limit)}"


def way_out(limit: int, needed: int) -> str:
    """Returns the limit, and how to raise it."""
    return (
        f"the limit is {limit:,}; raise it before starting: ulimit -Hn {needed} (LimitNOFILE={needed} in "
        f"systemd, --ulimit nofile={needed} for docker)"
    )
