"""The limit of open files and connections of a process: raised as far as the system allows, and checked before use."""

import contextlib
import errno
import resource

from jaxscale.system.exits import BadInput, tell

MOST_OPEN = 1 << 20  # the kernel's own default for how far a limit can be raised, fs.nr_open
OWN_OPEN = 256  # of the program itself: a tiny run had 25 (2 cores, jax 0.10.2, 2026-11-23), and a bucket takes more
LEAST_OPEN = 32  # of any program


def raise_open_files() -> int:
    """Raises the limit of open files and connections of this process as far as the system allows, and returns it.

    Many systems begin at 1,024, for the sake of programs that wait with select(); nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if soft == resource.RLIM_INFINITY else soft


def check_open_files(number: int, of: str) -> None:
    """Prints a warning where `number` of these and the program's own files may be more than the limit."""
    if problem := open_files_problem(number, of, OWN_OPEN):
        tell(f"WARNING: {problem}")


def require_open_files(number: int, of: str) -> None:
    """Raises BadInput where `number` of these, open at the same time, are more than the limit."""
    if problem := open_files_problem(number, of, LEAST_OPEN):
        raise BadInput(problem)


def open_files_problem(number: int, of: str, others: int) -> str:
    """Returns the line for a limit that is too small for `number` of these and the others, '' if it is not."""
    limit, needed = raise_open_files(), number + others
    if needed <= limit:
        return ""
    return f"open files: {number:,} {of} and about {others} others need {needed:,}, and {way_out(limit, needed)}"


def too_many(error: OSError) -> str:
    """Returns '; the system allows ...' with the way out for an error about the limit, '' for any other."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    limit = raise_open_files()
    return f"; {way_out(limit, 4 * limit)}"


def way_out(limit: int, needed: int) -> str:
    """Returns what the limit is, and how it is raised."""
    return (
        f"the system allows {limit:,}; raise it before the start: ulimit -Hn {needed} (LimitNOFILE={needed} in "
        f"systemd, --ulimit nofile={needed} for docker)"
    )
