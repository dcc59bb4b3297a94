"""Cache of tokenized text and of indexes of raw .bin files, in folders named by a hash of their inputs."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.remote import CacheUnwritable
from jaxscale.runtime.data.shard_writer import write_index
from jaxscale.runtime.data.shards import VERSION, Shard, file_entry, open_shard, unknown_tokenizer_header, verify_shards
from jaxscale.runtime.data.verified import HASHED, Say, remove, stamp_of
from jaxscale.runtime.text.sources.decode import REPAIRED, is_repair
from jaxscale.runtime.text.sources.files import SourceFile, file_stamp
from jaxscale.runtime.text.sources.part import read_error
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import Unreadable, open_regular
from jaxscale.system.paths import cache_dir, locked, make_private, write_json

Opened = TypeVar("Opened")

SCAN_TOKENS = 1 << 24  # tokens of a raw .bin that are read at a time
NAME = "tokens"
PROBED_IDS = 1 << 16  # ids of a raw .bin that are read to check its dtype
MIN_PROBED = 32  # fewer ids are not enough to check the dtype


def cache_folder(cfg: DataConfig) -> Path:
    """Returns the cache folder."""
    return Path(cfg.cache_dir).expanduser() if cfg.cache_dir else cache_dir()


def raw_dtype(cfg: DataConfig, vocab_size: int) -> str:
    """Returns the dtype of the ids in .bin files without a header."""
    if cfg.token_dtype != "auto":
        return cfg.token_dtype
    return "uint16" if vocab_size - 1 <= np.iinfo(np.uint16).max else "uint32"


def scan_raw(file: SourceFile, dtype: str, eos_id: int | None, cfg: DataConfig, say: Say) -> Shard:
    """Opens a .bin of ids without a header as a shard. Documents end with eos_id. Raises BadInput for a wrong dtype."""
    path, itemsize = file.path, np.dtype(dtype).itemsize
    size = size_and_mtime(path)[0]
    if size == 0 or size % itemsize:
        raise BadInput(
            f"{path} has {size:,} bytes, which is not a multiple of the size of {dtype} ids; change data.token_dtype"
        )
    ids = np.asarray(open_ids(path, dtype)[:PROBED_IDS])
    upper_halves_are_0 = not ids[1::2].any() and ids[::2].any()
    if dtype == "uint16" and size // 2 >= MIN_PROBED and size % 4 == 0 and upper_halves_are_0:
        raise BadInput(f"{path} does not look like uint16 ids: every second id is 0; use data.token_dtype=uint32")
    cache_key = {"bin": [*file, *size_and_mtime(path)], "dtype": dtype, "eos_id": eos_id}
    return cached_shard(cfg, cache_key, lambda folder: index_raw(folder, file, dtype, eos_id, say), say)


def index_raw(
    folder: Path,
    file: SourceFile,
    dtype: str,
    eos_id: int | None,
    say: Say,
    offsets: np.ndarray | None = None,
    negative_from: int = 1 << 64,
) -> None:
    """Writes the index of a raw .bin into `folder`. Raises BadInput for negative ids.

    offsets: int64[documents + 1], the start of each document and the end of the file; None: documents end with eos_id.
    negative_from: smallest unsigned value that is negative as a signed integer.
    """
    before = stamp_of(file.path)
    ids = open_ids(file.path, dtype) if before[0] else np.zeros(0, dtype)
    purpose = "to find its documents" if offsets is None else "to check its ids"
    say(f"reading {file.path} once, {purpose} ({len(ids):,} tokens)")
    sha256, largest, ends = hashlib.sha256(), 0, [np.zeros(1, np.int64)]
    for start in range(0, len(ids), SCAN_TOKENS):
        part = np.asarray(ids[start : start + SCAN_TOKENS])
        sha256.update(part.data)
        if part.min() < 0 or part.max() >= negative_from:
            raise BadInput(f"{file.path} has negative ids, so it is not a file of token ids; remove it from data.files")
        largest = max(largest, int(part.max()))
        if offsets is None and eos_id is not None:
            ends.append(np.flatnonzero(part == eos_id) + start + 1)
    if offsets is None:
        offsets = np.concatenate(ends)
        if offsets[-1] != len(ids):
            offsets = np.append(offsets, len(ids))
        if eos_id is not None and len(offsets) == 2:
            say(f"  the end token {eos_id} is not in the file, so the whole file is one document (see data.eos_id)")
    documents = len(offsets) - 1
    header = {"bin": file.path, "dtype": dtype, "num_tokens": len(ids), "max_id": largest}
    header |= unknown_tokenizer_header(file_entry(file, documents), eos_id)
    sums = {"bin": sha256.hexdigest()}
    write_index(folder / NAME, offsets.astype("<i8"), np.zeros(documents, "<u2"), None, sums, [file.source], header)
    write_json(folder / HASHED, {str(Path(file.path)): [*before, sums["bin"]]})


def open_ids(path: str, dtype: str) -> np.ndarray:
    """Returns the memory-mapped ids of a raw .bin."""
    try:
        with open_regular(path) as file:
            return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")
    except OSError as error:
        raise read_error(path, error) from None


def cached_shard(cfg: DataConfig, cache_key: dict[str, Any], make: Callable[[Path], None], say: Say) -> Shard:
    """Returns the cached shard with this key. Calls make(folder) to create a missing or damaged shard."""
    root = cache_folder(cfg)

    def open_whole(folder: Path) -> Shard:
        path = folder / f"{NAME}.json"
        shard = open_shard(path, outside=True)
        verify_shards([path], cfg, root, say)
        return shard

    return open_or_rebuild(root, "tokens", cache_key, make, open_whole, say)


def open_or_rebuild(
    root: Path,
    kind: str,
    cache_key: dict[str, Any],
    make: Callable[[Path], None],
    open_whole: Callable[[Path], Opened],
    say: Say,
) -> Opened:
    """Opens the cached folder with this key, and rebuilds it once if it is damaged. Raises storage errors."""
    folder = ensure_folder(root, kind, cache_key, make)
    try:
        return open_whole(folder)
    except Unreadable:
        raise
    except BadInput:
        pass  # checked again after locking, because a different process may have rebuilt the folder
    with contextlib.ExitStack() as stack:
        try:
            waiting = lambda: say(f"waiting while another process recreates {folder}")
            stack.enter_context(locked(root / f"lock-{folder.name}", waiting))
        except OSError as error:
            raise CacheUnwritable(f"{folder} is damaged and cannot be locked: {error}; set data.cache_dir") from None
        try:
            return open_whole(folder)
        except Unreadable:
            raise
        except BadInput as error:
            say(f"{folder} is damaged; recreating it ({error})")
        try:
            with contextlib.suppress(FileNotFoundError):
                remove(folder)
        except OSError as error:
            raise CacheUnwritable(f"{folder} is damaged and cannot be removed: {error}; set data.cache_dir") from None
        return open_whole(ensure_folder(root, kind, cache_key, make))


def folder_name(kind: str, cache_key: dict[str, Any]) -> str:
    """Returns a folder name that consists of `kind` and 32 hexadecimal digits of the sha256 of the key."""
    return f"{kind}-{hashlib.sha256(json.dumps([VERSION, cache_key], sort_keys=True).encode()).hexdigest()[:32]}"


def ensure_folder(
    root: Path, kind: str, cache_key: dict[str, Any], make: Callable[[Path], None], *, is_cache: bool = True
) -> Path:
    """Returns the folder with this key. A missing folder is created under a temporary name, and renamed when complete.

    If two processes create the folder, the later one discards its copy. is_cache: convert OSError to CacheUnwritable.
    """
    folder = root / folder_name(kind, cache_key)
    if not folder.is_dir():
        remove_leftovers(root)
        temporary = root / f"making-{folder.name.rpartition('-')[2]}-{socket.gethostname()}-{os.getpid()}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)  # from an earlier process with the same id
            make_private(root)
            temporary.mkdir()
            make(temporary)
            if not folder.is_dir():
                with contextlib.suppress(IsADirectoryError, PermissionError):  # just created by another process
                    folder.unlink(missing_ok=True)  # a file instead of a folder
            try:
                os.rename(temporary, folder)
            except OSError:
                if not folder.is_dir():
                    raise
        except OSError as error:
            if not is_cache:
                raise
            raise CacheUnwritable(f"the cache {root} cannot be written: {error}; set data.cache_dir") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def remove_leftovers(root: Path) -> None:
    """Deletes the temporary folders of killed processes on this host."""
    for folder in root.glob(f"making-*-{socket.gethostname()}-*"):
        try:
            os.kill(int(folder.name.rpartition("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):
            pass  # the process may be running


def size_and_mtime(path: str) -> tuple[int, int]:
    """Returns (bytes, mtime in nanoseconds) of a file, for the cache key; (0, 0) for a stream."""
    try:
        return file_stamp(path)
    except OSError as error:
        raise read_error(path, error) from None


def describe_skipped(skipped: dict[str, int]) -> str:
    """Formats counts such as '3 invalid UTF-8, 1 empty; repaired 2 windows-1252'."""
    counts = [f"{number:,} {reason}" for reason, number in skipped.items() if number and not is_repair(reason)]
    repairs = [f"{number:,} {reason.removeprefix(REPAIRED)}" for reason, number in skipped.items() if is_repair(reason)]
    return "; ".join(filter(None, [", ".join(counts), "repaired " * bool(repairs) + ", ".join(repairs)]))
