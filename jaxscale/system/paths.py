"""Local files and files under gs://, and their atomic replacement."""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from jaxscale.system import fence, storage
from jaxscale.system.bucket import Upload
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import cannot_read, open_regular, parse_json
from jaxscale.system.redact import on_one_line

HUBS = ("huggingface.co", "www.huggingface.co", "hf.co")
PRIVATE = 0o700  # mode of a private folder
open_private = functools.partial(os.open, mode=0o600)  # opener of `open`


def is_remote(path: Any) -> bool:
    """Returns True for a path in an object store, such as gs://bucket/run."""
    return "://" in os.fspath(path)


def as_path(path: Any) -> Any:
    """Returns a pathlib.Path or, for gs://, an ObjectPath with the same methods.

    Raises BadInput for other schemes, if gcsfs is not installed, or if environment variables would send the machine's
    credentials to a different machine.
    """
    if is_remote(path):
        check_scheme(os.fspath(path))
        storage.check_environment()
        storage.require_gcsfs(os.fspath(path))
        return storage.ObjectPath(path)
    return pathlib.Path(path).expanduser()


def check_scheme(path: str) -> None:
    """Raises BadInput, with advice, for a URL that has no bucket or a scheme other than gs://."""
    scheme, _, remainder = path.partition("://")
    if scheme == "gs":
        if remainder.partition("/")[0] in ("", ".", ".."):  # such as gs://$BUCKET/run with BUCKET unset
            raise BadInput(f"{path} must be gs://BUCKET/NAME")
        return
    if scheme == "file":
        way_out = f"use the path {remainder.removeprefix('localhost') or '/'}"
    elif scheme == "hf" or remainder.split("/")[0] in HUBS:
        name = "/".join(remainder.split("/")[scheme != "hf" :][:2]) or "OWNER/NAME"
        way_out = f"for a model from the Hub: jaxscale convert --from={name} --workdir=FOLDER"
    else:
        way_out = "copy it to a disk or to gs:// first, or mount it"
    raise BadInput(f"{path}: {scheme}:// is not supported; use a local path or gs:// ({way_out})")


def absolute(path: Any) -> Any:
    """Returns the absolute path."""
    return as_path(path).absolute()


def write_text_atomic(path: Any, text: str) -> None:
    """Atomically replaces a file with `text`, as write_bytes_atomic does."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Any, content: Any) -> None:
    """Atomically replaces a file with `content` (bytes or a buffer). In an object store, a single write is atomic."""
    if is_remote(path):
        fence.ask(path)
        as_path(path).write_bytes(bytes(content))
        return
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Any) -> Iterator[BinaryIO]:
    """Yields a temporary file that atomically replaces a local file when the block ends."""
    target = as_path(path)
    fence.ask(target)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
    # the default mode according to the umask, unlike mkstemp
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename, since a power failure could otherwise leave an empty file
        fence.ask(target)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


class Growing:
    """File that is written sequentially. Counts and hashes the bytes."""

    def __init__(self, send: Callable[[memoryview], Any]):
        self.send, self.num_bytes = send, 0
        self.md5 = hashlib.md5(usedforsecurity=False)  # the hash that object stores report

    def write(self, content: Any) -> None:
        """Writes the next bytes, a buffer."""
        view = memoryview(content).cast("B")
        self.md5.update(view)
        self.num_bytes += len(view)
        self.send(view)


@contextlib.contextmanager
def growing_file(path: Any, num_bytes: int) -> Iterator[Growing]:
    """Yields a writer for a local or remote file of num_bytes, which becomes visible when complete."""
    with contextlib.ExitStack() as stack:
        if is_remote(path):
            upload = Upload(storage.open_bucket(writing=True), os.fspath(path), num_bytes)
        growing = Growing(upload.write if is_remote(path) else stack.enter_context(replacing(path)).write)
        yield growing
        if growing.num_bytes != num_bytes:
            raise RuntimeError(f"{path} should have {num_bytes} bytes, not {growing.num_bytes}")
        if is_remote(path):
            upload.finish(growing.md5.digest())


def remove_temporaries(folder: Any, names: Sequence[str]) -> None:
    """Removes the temporary files that killed processes left when they replaced files with these names."""
    if is_remote(folder):
        return
    for name in names:
        for left in as_path(folder).glob(f".{name}.{'[0-9a-f]' * 16}.tmp"):
            fence.ask(left)
            left.unlink(missing_ok=True)


def sync_folder(path: Any) -> None:
    """Calls fsync, which makes the content of a local file, or renames in a local folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_to_write(path: Any, flags: int, mode: int = 0o666) -> int:
    """Opens a local file with os.open, without blocking on a pipe. Raises OSError or the error of check_is_file."""
    check_is_file(path)
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)


@contextlib.contextmanager
def locked(path: pathlib.Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Locks a file, which is created if missing. If another process holds the lock, calls waiting() and waits."""
    with open(path, "ab", opener=open_to_write) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_is_file(path: Any) -> None:
    """Raises BadInput if the path is a folder, a pipe, a device or a broken link."""
    is_broken_link = os.path.islink(path) and not os.path.exists(path)  # writing would create the link's target
    if is_broken_link or os.path.exists(path) and not os.path.isfile(path):
        kind = "a broken link" if is_broken_link else "a folder, a pipe or a device"
        raise BadInput(f"{path} must be a file, but is {kind}; move or delete it")


def read_bytes(path: Any) -> bytes:
    """Returns the content of a local or remote file. Raises the errors of open_binary."""
    if is_remote(path):
        return as_path(path).read_bytes()
    with open_binary(path) as file:
        return file.read()


def open_binary(path: Any) -> BinaryIO:
    """Opens a local or remote file for reading. Raises FileNotFoundError, or BadInput if it is not a regular file."""
    return as_path(path).open("rb") if is_remote(path) else open_regular(as_path(path))


def read_json(path: Any) -> Any:
    """Returns the JSON value in a file. Raises FileNotFoundError, or BadInput for invalid JSON."""
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from None
    try:
        return parse_json(text)
    except BadInput as error:
        raise BadInput(f"{path} is not valid JSON ({error}): it was damaged or edited; restore it") from None


def write_json(path: Any, value: Any) -> None:
    """Writes the value atomically as indented JSON. Raises ValueError for NaN, which JSON does not support."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def make_run_dir(path: Any, mode: int = PRIVATE) -> Any:
    """Returns the folder of a run, created with `mode` if it is missing on a local disk.

    The mode of an existing folder is unchanged. An object store is not accessed, because it has no folders.
    Raises BadInput if the path is empty, is a file, or is not supported for checkpoints, or if the folder cannot be
    created or is not writable.
    """
    if not os.fspath(path).strip():
        raise BadInput(f"workdir={path!r} is empty; set a folder, such as --workdir=runs/first")
    folder = as_path(path)
    if is_remote(path):
        return folder
    name, encoding = os.fspath(folder.absolute()), sys.getfilesystemencoding()
    if os.fsencode(name) != name.encode("utf-8", "replace"):  # TensorStore assumes UTF-8 in any locale
        fix = "rename it" if encoding == "utf-8" else f"Python decodes file names as {encoding}: set PYTHONUTF8=1"
        raise BadInput(f"workdir={on_one_line(name)} is not UTF-8, so arrays cannot be saved in it; {fix}")
    if special := set(name) & set("[]*?\\"):
        raise BadInput(
            f"workdir={path}: Orbax interprets {' '.join(sorted(special))} in {name} as a pattern; use a different "
            "workdir"
        )
    try:
        if not folder.is_dir():
            make_private(folder, mode)  # a run contains data samples and settings, and Orbax would use 0755
    except (FileExistsError, NotADirectoryError):
        raise BadInput(f"workdir={path} or a parent of it is a file; use a different workdir") from None
    except OSError as error:
        cause = error.strerror or error
        raise BadInput(f"workdir={path} cannot be created ({cause}); use a different workdir") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"workdir={path} is not writable by this user; use a different workdir")
    return folder


def make_folder(folder: Any) -> None:
    """Creates a missing folder and its parents with the default mode."""
    fence.ask(folder)
    as_path(folder).mkdir(parents=True, exist_ok=True)


def make_private(folder: pathlib.Path, mode: int = PRIVATE) -> None:
    """Creates a local folder with `mode`, and its parents with the default mode. Existing folders are unchanged."""
    fence.ask(folder)
    try:
        folder.mkdir(parents=True, mode=mode)
    except FileExistsError:  # possibly created by another process
        if not folder.is_dir():
            raise


def cache_dir() -> pathlib.Path:
    """Returns the user's cache folder, $XDG_CACHE_HOME/jaxscale or ~/.cache/jaxscale, without creating it."""
    return pathlib.Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "jaxscale"
