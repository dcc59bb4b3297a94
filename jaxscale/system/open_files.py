"""Raises and checks the limit on open files and connections of a process."""

import contextlib
import errno
import resource

from jaxscale.system.exits import BadInput, print_stderr

MAX_OPEN = 1 << 20  # the kernel's default upper bound for the limit, fs.nr_open
PROGRAM_FILES = 256  # allowance for a run; a tiny run had 25 (2 cores, jax 0.10.2, 2026-11-23), a bucket needs more
MIN_FILES = 32  # allowance for any program


def raise_open_files() -> int:
    """Raises the process's limit on open files and connections as far as permitted. Returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if soft == resource.RLIM_INFINITY else soft


def check_open_files(number: int, of: str) -> None:
    """Warns if the limit is too small for a run with `number` open files. `of` describes these files."""
    if problem := open_files_problem(number, of, PROGRAM_FILES):
        print_stderr(f"WARNING: {problem}")


def require_open_files(number: int, of: str) -> None:
    """Raises BadInput if the limit is too small for `number` open files. `of` describes these files."""
    if problem := open_files_problem(number, of, MIN_FILES):
        raise BadInput(problem)


def open_files_problem(number: int, of: str, others: int) -> str:
    """Returns an error message if the limit is too small for `number` + `others` open files, or ''."""
    limit, needed = raise_open_files(), number + others
    if needed <= limit:
        return ""
    return f"open files: {number:,} {of} and about {others} other files need {needed:,}, but {way_out(limit, needed)}"


def too_many(error: OSError) -> str:
    """Returns '; the limit is ...' with advice if the limit caused the error, or ''."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    limit = raise_open_files()
    return f"; {way_out(limit, 4 * limit)}"


def way_out(limit: int, needed: int) -> str:
    """Returns the limit, and advice on raising it."""
    return (
        f"the limit is {limit:,}; raise it before starting: ulimit -Hn {needed} (LimitNOFILE={needed} in "
        f"systemd, --ulimit nofile={needed} for docker)"
    )
