"""Files that somebody else made: no link leads out of their folder, no device is opened, and no JSON nests without end.

A folder of a model may hold a link to any file of this machine, whose content would be read, kept beside the run, and
sent out with an export. The Hub's own cache is made of links, `models--ORG--NAME/snapshots/REV/FILE` to
`models--ORG--NAME/blobs/HASH`, and these are followed, as are those to such files of this user's cache from any folder.
A file that a person names by its own path may be a link to anywhere.
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

LARGEST_JSON = 64 << 20  # bytes: an index has about 100 for each tensor; a tokenizer.json up to 40 MB
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG)
DEEPEST = 64  # JSON in JSON; a tokenizer.json has about ten
MOST_LINKS = 40  # to one another, as in Linux
HF_HOME = "~/.cache/huggingface"
BLOB = re.compile(r"models--[^/]+/blobs/(?:[0-9a-f]{40}|[0-9a-f]{64})")
KINDS = ("models--", "datasets--", "spaces--")  # what the Hub's cache calls a repository's folder begins so


def real_file(path: Any, inside: Any = None) -> pathlib.Path:
    """Where a regular file of a local folder really lies.

    Args: inside: the folder that nothing may lead out of, the file's own unless given. It may be a link itself.
    Raises: FileNotFoundError; BadInput for a link that leads out of the folder, and for what is no regular file.
    """
    path = pathlib.Path(path)
    folder = pathlib.Path(os.path.realpath(path.parent if inside is None else inside))
    real = pathlib.Path(os.path.realpath(path))
    if leads_out(real, folder):
        raise BadInput(
            f"{path} is a link that leads out of its folder, to {real}; if it is meant, put the file itself there, for "
            f"all of them by cp -rL {folder} NEW"
        )
    try:
        mode = os.stat(real).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:  # links in a circle, or what this user may not read
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    check_regular(mode, path)
    return real


def check_folder(folder: Any, inside: Any) -> None:
    """Raises BadInput for a local folder that is a link out of another one."""
    if "://" in os.fspath(folder):
        return
    real, root = os.path.realpath(folder), os.path.realpath(inside)
    if not pathlib.Path(real).is_relative_to(root):
        raise BadInput(f"{folder} is a link that leads out of {inside}, to {real}; if it is meant, copy it there")


def blobs_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Where the files of a snapshot in the Hub's cache lie; [] for any other folder. folder: without links."""
    parts = folder.parts
    for index in range(len(parts) - 1, 0, -1):
        if parts[index] == "snapshots" and parts[index - 1].startswith(KINDS) and index + 1 < len(parts):
            return [pathlib.Path(*parts[:index], "blobs")]
    return []


def leads_out(real: pathlib.Path, folder: pathlib.Path) -> bool:
    """Whether a file lies neither in a folder nor where the Hub's tools put one of its. Both: without links."""
    return not (is_hub_blob(real) or any(real.is_relative_to(root) for root in (folder, *blobs_of(folder))))


def is_hub_blob(real: pathlib.Path) -> bool:
    """Whether a file is one of the Hub's cache of this user, to which `hf download --local-dir` once made links."""
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME") or HF_HOME, "hub")
    root = pathlib.Path(os.path.realpath(os.path.expanduser(cache)))
    return real.is_relative_to(root) and BLOB.fullmatch(real.relative_to(root).as_posix()) is not None


def own_folder(path: Any) -> pathlib.Path:
    """Where the files lie that belong to one that a person has named: beside it, or beside what it is a link to."""
    path = pathlib.Path(path).expanduser()
    for _ in range(MOST_LINKS):
        real, folder = (pathlib.Path(os.path.realpath(one)) for one in (path, path.parent))
        if not (path.is_symlink() and leads_out(real, folder)):
            break
        path = path.parent / os.readlink(path)
    return path.parent


def read_named(path: Any, largest: int = LARGEST_JSON) -> bytes:
    """The content of a local file that a person has named; it may be a link. Raises as open_regular and read_bytes."""
    with open_regular(pathlib.Path(path).expanduser()) as file:
        return read_at_most(file, path, largest)


def check_regular(mode: int, path: Any) -> None:
    """Raises BadInput for a folder, a device, a pipe: what need not have an end."""
    if not stat.S_ISREG(mode):
        raise BadInput(f"{path} cannot be read: it is a folder, a pipe or a device, and no file")


def open_file(path: Any, inside: Any = None) -> BinaryIO:
    """The file, open for reading. Raises as real_file does."""
    return open_regular(real_file(path, inside), os.O_NOFOLLOW)


class Unreadable(BadInput):
    """The storage does not give a file now: no word on what it holds, and no reason to make it again."""


def is_of_storage(error: Exception) -> bool:
    """True if a file could not be read because of its storage, false where none of this name is there."""
    return isinstance(error, Unreadable) or (isinstance(error, OSError) and error.errno not in NO_FILE)


def cannot_read(path: Any, error: OSError, way_out: str = "") -> BadInput:
    """The error for a file that could not be opened or read: Unreadable, with its errno, if that is of its storage."""
    kind = Unreadable if is_of_storage(error) else BadInput
    found = kind(f"{path} cannot be read: {error.strerror or error}{way_out or too_many(error)}")
    found.errno = error.errno  # by which a stale handle is told from a damaged disk
    return found


def open_regular(path: Any, flags: int = 0) -> BinaryIO:
    """A regular local file, open for reading; it may be a link unless the flags say otherwise.

    Raises: FileNotFoundError; BadInput for what is no regular file or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)  # a pipe would wait for a writer
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
    """The content of a file, local or in a bucket, which has no links.

    Raises: as real_file does, and BadInput for more than `largest` bytes.
    """
    if "://" in os.fspath(path):
        return path.read_bytes()
    with open_file(path, inside) as file:
        return read_at_most(file, path, largest)


def read_at_most(file: BinaryIO, path: Any, largest: int = LARGEST_JSON) -> bytes:
    """All of an open file. Raises BadInput for more than `largest` bytes, of which no more are read."""
    size = os.fstat(file.fileno()).st_size
    content = file.read(largest + 1) if size <= largest else b""
    if size > largest or len(content) > largest:
        raise BadInput(f"{path} has {size:,} bytes, and at most {largest:,} are read; is it the right file?")
    return content


def is_file(path: Any, inside: Any = None) -> bool:
    """True if a file is there. Raises BadInput as real_file does, for one that must not be read."""
    if "://" in os.fspath(path):
        return path.is_file()
    try:
        real_file(path, inside)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def parse_json(content: str | bytes | bytearray, **how: Any) -> Any:
    """The value of a JSON text. Raises BadInput, to be read behind its name, for what is none or is nested too deeply.

    how: as json.loads has it.
    """
    try:
        value = json.loads(content, **how)
    except RecursionError:
        raise BadInput(TOO_DEEP) from None
    except ValueError as error:  # UnicodeDecodeError is one too
        raise BadInput(" ".join(str(error).split())) from None
    check_depth(value)
    return value


def short(value: Any) -> str:
    """A value for a message: a hostile one may be long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 200:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"


def check_depth(value: Any) -> None:
    """Raises BadInput for a value that is nested deeper than DEEPEST: what reads it may call itself at each level."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        parts = (part for one in level for part in (one.values() if isinstance(one, dict) else one))
        level = [part for part in parts if isinstance(part, (dict, list))]
        if not level:
            return
    raise BadInput(TOO_DEEP)
