"""The cache: text is tokenised once, a raw .bin is scanned once, and either is found again by what it was made from."""

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

from jaxscale.data.config import DataConfig
from jaxscale.data.header import VERSION, listed, untold_header
from jaxscale.data.remote import Unwritable
from jaxscale.data.shard_writer import write_index
from jaxscale.data.shards import Shard, expect_whole, open_shard
from jaxscale.data.verified import HASHED, Say, remove, stamp_of
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import Unreadable, open_regular
from jaxscale.system.paths import cache_dir, locked, make_private, write_json
from jaxscale.text.sources.decode import REPAIRED, is_repair
from jaxscale.text.sources.files import SourceFile, file_stamp
from jaxscale.text.sources.part import unreadable

Opened = TypeVar("Opened")

SCAN_TOKENS = 1 << 24  # of a raw .bin looked at at once
NAME = "tokens"
PROBED_IDS = 1 << 16  # of a raw .bin, to see whether its type is the right one
FEWEST_PROBED = 32  # fewer prove nothing


def cache_folder(cfg: DataConfig) -> Path:
    """Where tokenised text is kept."""
    return Path(cfg.cache_dir).expanduser() if cfg.cache_dir else cache_dir()


def raw_dtype(cfg: DataConfig, vocab_size: int) -> str:
    """Type of the ids in a .bin without a header."""
    if cfg.token_dtype != "auto":
        return cfg.token_dtype
    return "uint16" if vocab_size - 1 <= np.iinfo(np.uint16).max else "uint32"


def scanned(file: SourceFile, dtype: str, eos_id: int | None, cfg: DataConfig, say: Say) -> Shard:
    """A raw .bin of ids as a shard: documents end at `eos_id`, or the file is one document.

    Raises: BadInput if the file cannot hold ids of this type, or cannot be read.
    """
    path, itemsize = file.path, np.dtype(dtype).itemsize
    size = stamp(path)[0]
    if size == 0 or size % itemsize:
        raise BadInput(f"{path} has {size:,} bytes, which is no whole number of {dtype} ids; see data.token_dtype")
    if dtype == "uint16" and looks_wider(open_ids(path, dtype)):
        raise BadInput(
            f"{path} is no file of uint16 ids: every second one of its first is 0; set data.token_dtype=uint32"
        )
    made_from = {"bin": [*file, *stamp(path)], "dtype": dtype, "eos_id": eos_id}
    return cached(cfg, made_from, lambda folder: index_raw(folder, file, dtype, eos_id, say), say)


def index_raw(
    folder: Path,
    file: SourceFile,
    dtype: str,
    eos_id: int | None,
    say: Say,
    offsets: np.ndarray | None = None,
    negative_from: int = 1 << 64,
) -> None:
    """Writes into `folder` the index of a raw .bin, which stays where it is.

    Args: offsets: int64[documents + 1], where documents begin, and the end; None: each ends at eos_id.
    negative_from: ids from here on stand for negative numbers. Raises BadInput for one of those.
    """
    before = stamp_of(file.path)
    ids = open_ids(file.path, dtype) if before[0] else np.zeros(0, dtype)
    why = "to find its documents" if offsets is None else "to know its ids"
    say(f"reading {file.path} once, {why} ({len(ids):,} tokens)")
    sha256, largest, ends = hashlib.sha256(), 0, [np.zeros(1, np.int64)]
    for start in range(0, len(ids), SCAN_TOKENS):
        part = np.asarray(ids[start : start + SCAN_TOKENS])
        sha256.update(part.data)
        if part.min() < 0 or part.max() >= negative_from:
            raise BadInput(f"{file.path} holds negative ids: it is no file of token ids")
        largest = max(largest, int(part.max()))
        if offsets is None and eos_id is not None:
            ends.append(np.flatnonzero(part == eos_id) + start + 1)
    if offsets is None:
        offsets = np.concatenate(ends)
        if offsets[-1] != len(ids):
            offsets = np.append(offsets, len(ids))
        if eos_id is not None and len(offsets) == 2:
            say(f"  the end token {eos_id} does not divide it: the whole file is one document (see data.eos_id)")
    documents = len(offsets) - 1
    header = {"bin": file.path, "dtype": dtype, "num_tokens": len(ids), "max_id": largest}
    header |= untold_header(listed(file, documents), eos_id)
    sums = {"bin": sha256.hexdigest()}
    write_index(folder / NAME, offsets.astype("<i8"), np.zeros(documents, "<u2"), None, sums, [file.source], header)
    write_json(folder / HASHED, {str(Path(file.path)): [*before, sums["bin"]]})


def open_ids(path: str, dtype: str) -> np.ndarray:
    """The ids of a raw .bin, memory-mapped."""
    try:
        with open_regular(path) as file:
            return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")
    except OSError as error:
        raise unreadable(path, error) from None


def looks_wider(ids: np.ndarray) -> bool:
    """True if uint16 ids are the halves of uint32 ones: of each pair the second, its upper half, is 0."""
    first = np.asarray(ids[:PROBED_IDS])
    return len(ids) % 2 == 0 and len(ids) >= FEWEST_PROBED and not first[1::2].any() and bool(first[::2].any())


def cached(cfg: DataConfig, made_from: dict[str, Any], make: Callable[[Path], None], say: Say) -> Shard:
    """The shard in the cache's folder that stands for `made_from`, made first if it is not there."""
    root = cache_folder(cfg)

    def open_whole(folder: Path) -> Shard:
        path = folder / f"{NAME}.json"
        shard = open_shard(path, outside=True)
        expect_whole([path], cfg, root, say)
        return shard

    return open_cached(root, "tokens", made_from, make, open_whole, say)


def open_cached(
    root: Path,
    kind: str,
    made_from: dict[str, Any],
    make: Callable[[Path], None],
    open_whole: Callable[[Path], Opened],
    say: Say,
) -> Opened:
    """What `open_whole` gives of made_folder's folder. Where it finds that damaged, the folder is made again.

    One that the storage does not give is not damaged: Unreadable is raised as it is.
    """
    folder = made_folder(root, kind, made_from, make)
    try:
        return open_whole(folder)
    except Unreadable:
        raise
    except BadInput:
        pass  # to be looked at again by the one who holds the lock: another process may have made it again by then
    with contextlib.ExitStack() as stack:
        try:
            waiting = lambda: say(f"waiting for another process that makes {folder} again")
            stack.enter_context(locked(root / f"lock-{folder.name}", waiting))
        except OSError as error:
            raise Unwritable(f"{folder} is damaged and cannot be locked: {error}; set data.cache_dir") from None
        try:
            return open_whole(folder)
        except Unreadable:
            raise
        except BadInput as error:
            say(f"{folder} is damaged, and is made again ({error})")
        try:
            with contextlib.suppress(FileNotFoundError):
                remove(folder)
        except OSError as error:
            raise Unwritable(f"{folder} is damaged and cannot be removed: {error}; set data.cache_dir") from None
        return open_whole(made_folder(root, kind, made_from, make))


def folder_name(kind: str, made_from: dict[str, Any]) -> str:
    """What the folder of something is called that is made from this."""
    return f"{kind}-{hashlib.sha256(json.dumps([VERSION, made_from], sort_keys=True).encode()).hexdigest()[:32]}"


def made_folder(
    root: Path, kind: str, made_from: dict[str, Any], make: Callable[[Path], None], *, is_cache: bool = True
) -> Path:
    """The folder KIND-(sha256 of `made_from`), made beside it and renamed if it is not there.

    is_cache: OSErrors become Unwritable, which speaks of data.cache_dir.

    So a folder under its final name was whole: a process that is killed leaves only a folder that is never read, and of
    two that make the same one, the second to finish throws its own away.
    """
    folder = root / folder_name(kind, made_from)
    if not folder.is_dir():
        remove_leftovers(root)
        making = root / f"making-{folder.name.rpartition('-')[2]}-{socket.gethostname()}-{os.getpid()}"
        try:
            shutil.rmtree(making, ignore_errors=True)  # of an earlier process with our number
            make_private(root)
            making.mkdir()
            make(making)
            if not folder.is_dir():
                with contextlib.suppress(IsADirectoryError, PermissionError):  # another process has made it just now
                    folder.unlink(missing_ok=True)  # something else of this name
            try:
                os.rename(making, folder)
            except OSError:
                if not folder.is_dir():
                    raise
        except OSError as error:
            if not is_cache:
                raise
            raise Unwritable(f"the cache {root} cannot be written: {error}; set data.cache_dir") from None
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return folder


def remove_leftovers(root: Path) -> None:
    """Deletes half-made folders of this machine's killed processes."""
    mine = f"-{socket.gethostname()}-"
    for folder in root.glob(f"making-*{mine}*"):
        try:
            os.kill(int(folder.name.rpartition("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, PermissionError):
            pass  # not known to be dead


def stamp(path: str) -> tuple[int, int]:
    """(bytes, nanoseconds of the last change): a file with another stamp is tokenised again; a stream has (0, 0)."""
    try:
        return file_stamp(path)
    except OSError as error:
        raise unreadable(path, error) from None


def describe_skipped(skipped: dict[str, int]) -> str:
    """'3 invalid UTF-8, 1 empty; repaired 2 windows-1252'."""
    counts = [f"{number:,} {reason}" for reason, number in skipped.items() if number and not is_repair(reason)]
    repairs = [f"{number:,} {reason.removeprefix(REPAIRED)}" for reason, number in skipped.items() if is_repair(reason)]
    return "; ".join(filter(None, [", ".join(counts), "repaired " * bool(repairs) + ", ".join(repairs)]))


def count(number: int, thing: str) -> str:
    """'1 file', '2 files'."""
    return f"{number:,} {thing}{'s' * (number != 1)}"
