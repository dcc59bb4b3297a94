"""Converts storage errors, which Orbax reports as long tracebacks, to one short line."""

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
MAX_CHARACTERS = 240
NO_INODES = "no inodes left"
# error texts of operating systems and object stores for causes that the user can fix
KNOWN_CAUSES = re.compile(
    r"(No space left on device|Disk quota exceeded|File too large|Read-only file system|Permission denied"
    r"|Input/output error|Stale file handle|Too many open files|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED"
    r"|DATA_LOSS|Too many requests)"
)
# Errors of access to the storage. They do not show that the content is damaged.
ACCESS_ERRNOS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT,
    errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNRESET,
}  # fmt: skip
ACCESS_ERRORS = re.compile(
    r"PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED"
    r"|Too many (requests|open files)|Permission denied"
    r"|^Forbidden: "
)
DENIED = re.compile(r"PERMISSION_DENIED|UNAUTHENTICATED|Permission denied|Operation not permitted|\b40[13]\b")
READ_ONLY = "Read-only file system"
CLIENT_MODULES = ("gcsfs", "aiohttp", "requests", "google")  # errors from these modules are access errors


def short_reason(error: BaseException) -> str:
    """Returns the most specific message in a chain of exceptions, as one line of at most MAX_CHARACTERS characters."""
    chain = errors_behind(error)
    for link in chain:
        if permission := missing_permission(str(link)):
            return f"this machine's account lacks the permission {permission} (403)"
    for link in chain:
        if isinstance(link, Unreachable):
            return clip(str(link))
        if isinstance(link, OSError) and link.strerror:
            if link.errno == errno.ENOSPC and link.filename and (message := no_inodes_message(link.filename)):
                return clip(message)
            return clip(f"{link.strerror}: {link.filename}" if link.filename else link.strerror)
    for link in chain:
        if found := KNOWN_CAUSES.search(str(link)):
            return clip(found.group())
    root = chain[-1]
    return clip(f"{type(root).__name__}: {root}" if str(root).strip() else type(root).__name__)


def no_inodes_message(path: Any) -> str:
    """Returns a message if a local disk has no free inodes, else ''. The system reports this case as a full disk."""
    parent = os.path.abspath(path)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    try:
        found = os.statvfs(parent)
    except OSError:  # the disk has other errors
        return ""
    if not found.f_files or found.f_favail:  # some file systems do not count inodes
        return ""
    return f"{NO_INODES} on the disk of {path}: it has free bytes, but cannot create another file; remove some files"


def errors_behind(error: BaseException) -> list[BaseException]:
    """Returns the error, its causes and the members of exception groups, without duplicates."""
    chain = [error]
    for link in chain:  # the list grows during the iteration
        for behind in (*getattr(link, "exceptions", ()), link.__cause__, link.__context__):
            if behind is not None and all(behind is not known for known in chain):
                chain.append(behind)
    return chain


def clip(text: str) -> str:
    """Returns the text on one line, shortened to MAX_CHARACTERS."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 3] + "..."


def is_storage_error(error: BaseException) -> bool:
    """Returns True for errors of access to the storage. They do not imply that its content is damaged."""
    for link in errors_behind(error):
        if isinstance(link, MemoryError | TimeoutError) or getattr(link, "errno", None) in ACCESS_ERRNOS:
            return True
        if isinstance(link, Unreachable | Forbidden) or type(link).__module__.partition(".")[0] in CLIENT_MODULES:
            return True
        if ACCESS_ERRORS.search(str(link)):
            return True
    return False


def stop_if_unreachable(ask: Callable[[], T], folder: Any) -> T:
    """Returns the result of ask(). Raises Stop (STORAGE) if a remote folder cannot be reached."""
    try:
        return ask()
    except Exception as error:
        if isinstance(error, Stop) or not paths.is_remote(folder) or not is_storage_error(error):
            raise
        cause = short_reason(error)
        way_out = permission_hint(cause, folder) or "; restart when the storage responds"
        raise Stop(Exit.STORAGE, f"{folder} cannot be reached: {cause}{way_out}") from None


def read_optional(path: Any) -> dict[str, Any]:
    """Returns a file's JSON object, or {} if missing or invalid. Raises Stop (STORAGE) if a bucket is unreachable."""
    with contextlib.suppress(OSError, ValueError):
        value = stop_if_unreachable(lambda: paths.read_json(path), path)
        return value if isinstance(value, dict) else {}
    return {}


def stop_if_unwritable(write: Callable[[], T], folder: Any) -> T:
    """Returns the result of write(). Raises Stop (STORAGE) if the folder cannot be written."""
    try:
        return stop_if_unreachable(write, folder)
    except OSError as error:
        cause = short_reason(error)
        way_out = permission_hint(cause, folder) or "; delete other files or repair the disk, then restart"
        raise Stop(Exit.STORAGE, f"{folder} cannot be written: {cause}{way_out}") from error


def permission_hint(cause: str, directory: Any) -> str:
    """Returns the permission to grant, as the end of an error message, if access was denied; else ''."""
    if READ_ONLY in cause:
        return f"; mount {directory} for writing"
    if not DENIED.search(cause):
        return ""
    if paths.is_remote(directory):
        return f"; this account needs storage.objects.create, get, list and delete on {directory}"
    return f"; this user needs write permission for {directory}"
