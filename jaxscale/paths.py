"""Files, on a local disk or under gs://, and how they are replaced whole. etils is imported only for gs://."""

import contextlib
import importlib.util
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO


def is_remote(path: Any) -> bool:
    """True for a path in an object store, such as gs://bucket/run."""
    return "://" in os.fspath(path)


def as_path(path: Any) -> Any:
    """A pathlib.Path, or an epath.Path (which has the same methods) for gs://.

    Raises ValueError for gs:// where the package that reads it is not installed.
    """
    if is_remote(path):
        if os.fspath(path).startswith("gs://") and importlib.util.find_spec("gcsfs") is None:
            raise ValueError(f"{os.fspath(path)} needs gcsfs: pip install 'jaxscale[gcs]'")
        from etils import epath  # only runs in a bucket pay for it

        return epath.Path(path)
    return pathlib.Path(path).expanduser()


def write_text_atomic(path: Any, text: str) -> None:
    """Replaces the file by `text`, as write_bytes_atomic does."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Any, content: Any) -> None:
    """Replaces the file by `content` (bytes, or a buffer of them), as `replacing` does.

    An object store replaces an object whole by itself, so there it is a plain write.
    """
    if is_remote(path):
        as_path(path).write_bytes(bytes(content))
        return
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Any) -> Iterator[BinaryIO]:
    """A file to write into that takes the place of a local one when the block ends.

    A reader, or a crash at any moment, sees the old file or the new one, never a part.
    """
    target = as_path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a power cut can leave a renamed empty file
        os.replace(temporary, target)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Makes renames inside a local folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Any) -> Any:
    """The JSON value in the file. Raises FileNotFoundError, or ValueError that names the file if it is no JSON file."""
    try:
        text = as_path(path).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return json.loads(text)
    except ValueError as error:  # UnicodeDecodeError is one too
        raise ValueError(f"{path} is not valid JSON ({error}); it is damaged or was edited by hand") from None


def write_json(path: Any, value: Any) -> None:
    """Writes the value as indented JSON, whole or not at all. Raises ValueError for NaN, which JSON does not have."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def make_run_dir(path: Any) -> Any:
    """The folder of a run as a path. If missing it is made, private to its owner (0700) on a local disk.

    A folder that is there keeps its mode, which its owner chose.
    Raises ValueError if the path is empty, a file is in the way, or the folder may not be made or written.
    """
    if not os.fspath(path).strip():
        raise ValueError(f"workdir={path!r} is empty; name a folder, such as --workdir=runs/first")
    folder = as_path(path)
    try:
        if is_remote(path):
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            make_private(folder)  # a run holds data samples and settings; Orbax itself would leave 0755
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"workdir={path} runs through a file where a folder is needed; choose another workdir"
        ) from None
    except OSError as error:
        cause = error.strerror or error
        raise ValueError(f"workdir={path} cannot be created ({cause}); choose another workdir") from None
    if not is_remote(path) and not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"workdir={path} cannot be written by this user; choose another workdir")
    return folder


def make_private(folder: pathlib.Path) -> None:
    """Makes a local folder with mode 0700, and with the usual mode those above it. One that is there stays as it is."""
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:  # perhaps another process has just made it
        if not folder.is_dir():
            raise


def cache_dir() -> pathlib.Path:
    """The user's folder for what can be made again: $XDG_CACHE_HOME/jaxscale or ~/.cache/jaxscale. Makes nothing."""
    return pathlib.Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "jaxscale"
