"""Safe reading of untrusted files. Rejects links out of their folder, devices and deeply nested JSON.

A model folder may contain a link to any file of this machine, whose content would be read, stored with the run, and
uploaded with an export. Links within the Hub's cache, from `models--ORG--NAME/snapshots/REV/FILE` to
`models--ORG--NAME/blobs/HASH`, are followed, as are links from any folder to such blobs in this user's cache. A path
that the user sets explicitly may be a link to any file.
"""

import errno
import json
import os
import pathlib
import re
import stat
from typing import Any, BinaryIO

from jaxscale.system.exits import BadInput
from jaxscale.system.open_files import too_many

LARGEST_JSON = 64 << 20  # bytes; an index has about 100 bytes per tensor, a tokenizer.json has up to 40 MB
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG)
DEEPEST = 64  # maximum nesting depth of JSON; a tokenizer.json has about ten levels
MOST_LINKS = 40  # maximum length of a chain of links, as in Linux
HF_HOME = "~/.cache/huggingface"
BLOB = re.compile(r"models--[^/]+/blobs/(?:[0-9a-f]{40}|[0-9a-f]{64})")
SNAPSHOT = re.compile(r"(.*/(?:models|datasets|spaces)--[^/]*)/snapshots/.", re.DOTALL)  # folder in the Hub's cache


def resolve_file(path: Any, inside: Any = None) -> pathlib.Path:
    """Returns the path of a regular file with all links resolved.

    `inside` is the folder that links must not leave, by default the file's folder. It can be a link itself.
    Raises FileNotFoundError, or BadInput if a link leaves the folder or the path is not a regular file.
    """
    path = pathlib.Path(path)
    folder = pathlib.Path(os.path.realpath(path.parent if inside is None else inside))
    resolved = pathlib.Path(os.path.realpath(path))
    if leads_out(resolved, folder):
        raise BadInput(
            f"{path} is a link to {resolved}, outside its folder; to use it, replace the link with a copy of the "
            f"file, or copy the folder with cp -rL {folder} NEW"
        )
    try:
        mode = os.stat(resolved).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:  # circular links, or no permission
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    check_regular(mode, path)
    return resolved


def check_folder(folder: Any, inside: Any) -> None:
    """Raises BadInput if a local folder is a link to a folder outside `inside`."""
    if "://" in os.fspath(folder):
        return
    resolved, root = os.path.realpath(folder), os.path.realpath(inside)
    if not pathlib.Path(resolved).is_relative_to(root):
        raise BadInput(f"{folder} is a link to {resolved}, outside {inside}; replace it with a copy")


def leads_out(file: pathlib.Path, folder: pathlib.Path) -> bool:
    """Returns True if a file is neither in the folder nor a blob in the Hub's cache. Both paths must be resolved."""
    snapshot = SNAPSHOT.match(folder.as_posix())
    if file.is_relative_to(folder) or snapshot and file.is_relative_to(f"{snapshot[1]}/blobs"):
        return False
    # this user's cache of the Hub; earlier versions of `hf download --local-dir` created links to its files
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME") or HF_HOME, "hub")
    hub = pathlib.Path(os.path.realpath(os.path.expanduser(cache)))
    return not (file.is_relative_to(hub) and BLOB.fullmatch(file.relative_to(hub).as_posix()))


def companion_folder(path: Any) -> pathlib.Path:
    """Returns the folder with the companion files of a file: its folder or, if it is a link, the target's folder."""
    path = pathlib.Path(path).expanduser()
    for _ in range(MOST_LINKS):
        resolved, folder = (pathlib.Path(os.path.realpath(one)) for one in (path, path.parent))
        if not (path.is_symlink() and leads_out(resolved, folder)):
            break
        path = path.parent / os.readlink(path)
    return path.parent


def read_named(path: Any, largest: int = LARGEST_JSON) -> bytes:
    """Returns the content of a local file set by the user, possibly a link. Raises FileNotFoundError or BadInput."""
    with open_regular(pathlib.Path(path).expanduser()) as file:
        return read_at_most(file, path, largest)


def check_regular(mode: int, path: Any) -> None:
    """Raises BadInput for a folder, a device or a pipe. Reading a device or a pipe may never end."""
    if not stat.S_ISREG(mode):
        raise BadInput(f"{path} cannot be read: it is a folder, a pipe or a device, not a file")


def open_file(path: Any, inside: Any = None) -> BinaryIO:
    """Opens a file for reading. Raises the errors of resolve_file."""
    return open_regular(resolve_file(path, inside), os.O_NOFOLLOW)


class Unreadable(BadInput):
    """Raised if a file cannot be read because of a storage error. Its content may be intact."""


def is_of_storage(error: Exception) -> bool:
    """Returns True for an error of the storage, such as EIO, but not for a missing file."""
    return isinstance(error, Unreadable) or (isinstance(error, OSError) and error.errno not in NO_FILE)


def cannot_read(path: Any, error: OSError, way_out: str = "") -> BadInput:
    """Returns the error for a file that cannot be opened or read, which is Unreadable if the storage failed."""
    kind = Unreadable if is_of_storage(error) else BadInput
    found = kind(f"{path} cannot be read: {error.strerror or error}{way_out or too_many(error)}")
    found.errno = error.errno  # distinguishes a stale file handle from a damaged disk
    return found


def open_regular(path: Any, flags: int = 0) -> BinaryIO:
    """Opens a regular local file for reading. Follows links by default. Raises FileNotFoundError or BadInput."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)  # non-blocking, in case of a pipe
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise cannot_read(path, error) from None
    try:
        check_regular(os.fstat(handle).st_mode, path)
        return os.fdopen(handle, "rb", buffering=0)
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: Any, largest: int = LARGEST_JSON, inside: Any = None) -> bytes:
    """Returns the content of a file or an object. Raises the errors of resolve_file and read_at_most."""
    if "://" in os.fspath(path):
        return path.read_bytes()
    with open_file(path, inside) as file:
        return read_at_most(file, path, largest)


def read_at_most(file: BinaryIO, path: Any, largest: int = LARGEST_JSON) -> bytes:
    """Returns the content of an open file. Raises BadInput if it has more than `largest` bytes."""
    size = os.fstat(file.fileno()).st_size
    content = file.read(largest + 1) if size <= largest else b""
    if size > largest or len(content) > largest:
        raise BadInput(
            f"{path} has {size:,} bytes, more than the limit of {largest:,}; check that it is the right file"
        )
    return content


def is_file(path: Any) -> bool:
    """Returns True if the file exists. Raises BadInput if resolve_file does not permit reading it."""
    if "://" in os.fspath(path):
        return path.is_file()
    try:
        resolve_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def parse_json(content: str | bytes | bytearray, **options: Any) -> Any:
    """Returns parsed JSON. Raises BadInput for invalid or deeply nested text; callers prepend the file's name."""
    try:
        value = json.loads(content, **options)
    except RecursionError:
        raise BadInput(TOO_DEEP) from None
    except ValueError as error:  # includes UnicodeDecodeError
        raise BadInput(" ".join(str(error).split())) from None
    check_depth(value)
    return value


def short(value: Any) -> str:
    """Returns a short representation of a value, for messages."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 200:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"


def check_depth(value: Any) -> None:
    """Raises BadInput for a value nested deeper than DEEPEST, because readers may be recursive."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        parts = (part for one in level for part in (one.values() if isinstance(one, dict) else one))
        level = [part for part in parts if isinstance(part, (dict, list))]
        if not level:
            return
    raise BadInput(TOO_DEEP)
