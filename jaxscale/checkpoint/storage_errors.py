"""Why storage failed, as one short line; Orbax reports the same through pages of tracebacks."""

import contextlib
import errno
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from jaxscale.system import paths
from jaxscale.system.bucket_errors import Forbidden, Unreachable, missing_permission
from jaxscale.system.exits import Exit, Stop

T = TypeVar("T")
MAX_LETTERS = 240
NO_INODES = "no inodes left"
# what operating systems and object stores call the causes that people can do something about
TELLING = re.compile(
    r"(No space left on device|Disk quota exceeded|File too large|Read-only file system|Permission denied"
    r"|Input/output error|Stale file handle|Too many open files|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED"
    r"|DATA_LOSS|Too many requests)"
)
# Of the way to the storage, not of what lies there: a checkpoint that cannot be read for these is not damaged.
TROUBLE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT,
    errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNRESET,
}  # fmt: skip
TROUBLE_TEXT = re.compile(
    r"PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED"
    r"|Too many (requests|open files)|Permission denied"
    r"|^Forbidden: "
)
DENIED = re.compile(r"PERMISSION_DENIED|UNAUTHENTICATED|Permission denied|Operation not permitted|\b40[13]\b")
READ_ONLY = "Read-only file system"
CLIENTS = ("gcsfs", "aiohttp", "requests", "google")  # whose errors are of the way, and often no OSError


def short_reason(error: BaseException) -> str:
    """The most telling message in the error's chain, one line of at most MAX_LETTERS letters."""
    chain = list(errors_behind(error))
    for link in chain:
        if permission := missing_permission(str(link)):
            return f"this machine's account lacks the permission {permission} (403)"
    for link in chain:
        if isinstance(link, Unreachable):
            return clip(str(link))
        if (
            isinstance(link, OSError)
            and link.errno == errno.ENOSPC
            and link.filename
            and (message := no_inodes_message(link.filename))
        ):
            return clip(message)
        if isinstance(link, OSError) and link.strerror:
            return clip(f"{link.strerror}: {link.filename}" if link.filename else link.strerror)
    for link in chain:
        if found := TELLING.search(str(link)):
            return clip(found.group())
    root = chain[-1]
    return clip(f"{type(root).__name__}: {root}" if str(root).strip() else type(root).__name__)


def no_inodes_message(path: Any) -> str:
    """That a local disk has no more files to give, where it counts so; else ''. Only to word an error that is there:

    the system calls such a disk full, and some file systems of a network count so and give files all the same.
    """
    parent = os.path.abspath(path)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    found = os.statvfs(parent)
    if not found.f_files or found.f_favail:  # some file systems do not count them
        return ""
    return f"{NO_INODES} on the disk of {path}: it has room for bytes, and for not one more file; remove some files"


def errors_behind(error: BaseException):
    """Yields the error, what it holds if it is a group, and what caused it, each once."""
    pending, seen = [error], set()
    while pending:
        link = pending.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending += list(getattr(link, "exceptions", ()))
        pending += [behind for behind in (link.__cause__, link.__context__) if behind is not None]


def clip(text: str) -> str:
    """The text on one line, shortened."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_LETTERS else line[: MAX_LETTERS - 3] + "..."


def is_storage_error(error: BaseException) -> bool:
    """True if the storage could not be reached, or may not be read: it says nothing about what is stored."""
    for link in errors_behind(error):
        if isinstance(link, MemoryError | TimeoutError) or getattr(link, "errno", None) in TROUBLE:
            return True
        if isinstance(link, Unreachable | Forbidden) or type(link).__module__.partition(".")[0] in CLIENTS:
            return True
        if TROUBLE_TEXT.search(str(link)):
            return True
    return False


def reached(ask: Callable[[], T], folder: Any) -> T:
    """What ask() gives. Raises Stop (STORAGE), in one line, where a remote folder cannot be reached for it."""
    try:
        return ask()
    except Exception as error:
        if isinstance(error, Stop) or not paths.is_remote(folder) or not is_storage_error(error):
            raise
        cause = short_reason(error)
        way_out = missing_grant(cause, folder) or "; start again when it answers"
        raise Stop(Exit.STORAGE, f"{folder} cannot be reached: {cause}{way_out}") from None


def read_optional(path: Any) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none. Raises Stop (STORAGE) where its bucket cannot be reached."""
    with contextlib.suppress(OSError, ValueError):
        value = reached(lambda: paths.read_json(path), path)
        return value if isinstance(value, dict) else {}
    return {}


def written(write: Callable[[], T], folder: Any) -> T:
    """What write() gives. Raises Stop (STORAGE), in one line, where the folder does not take it."""
    try:
        return reached(write, folder)
    except OSError as error:
        cause = short_reason(error)
        way_out = missing_grant(cause, folder) or "; make room or mend the disk, then start again: nothing is lost"
        raise Stop(Exit.STORAGE, f"{folder} cannot be written: {cause}{way_out}") from error


def missing_grant(cause: str, directory: Any) -> str:
    """What is to be granted where the cause is that something is not allowed, as the end of a line; else ''."""
    if READ_ONLY in cause:
        return f"; mount {directory} for writing"
    if not DENIED.search(cause):
        return ""
    if paths.is_remote(directory):
        return f"; this account needs storage.objects.create, get, list and delete on {directory}"
    return f"; this user needs the right to write in {directory}"
