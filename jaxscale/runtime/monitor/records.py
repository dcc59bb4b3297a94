"""The reader and writer of JSON Lines files: metrics.jsonl, events.jsonl, samples.jsonl.

A record is a line with a complete JSON object. An incomplete last line is called torn and is skipped: it is still being
written, or its writer was killed. Any other invalid line is called damaged; it is skipped and counted. Appending first
removes or completes a torn line, so that a new record never joins it.
"""

import collections
import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxscale.runtime.monitor.upload import ExclusiveObject, Uploader
from jaxscale.system import fence, paths
from jaxscale.system.exits import BadInput, Stop
from jaxscale.system.foreign import parse_json

MAX_LINE_BYTES = 8 * 2**20  # longer lines count as damaged
CHUNK_BYTES = 2**20
TAIL_BYTES = 1 << 18  # a few hundred metrics records; a whole file can be gigabytes
FIRST_BYTES = 32 << 20  # limit of the first poll of a local file, about 50,000 records
MAX_UNWRITTEN = 10_000  # records buffered while a disk is full, about 10 MB

Record = dict[str, Any]


@dataclasses.dataclass
class Damage:
    """Lines that a reader skipped."""

    lines: int = 0  # damaged lines
    first: int = 0  # number of the first damaged line, counted from 1
    torn: bool = False  # the last line is incomplete
    number: int = 0  # number of the line read last


def parse_record(line: bytes | None) -> Record | None:
    """Parses a line as a JSON object; returns None for anything else."""
    try:
        record = parse_json(line) if line is not None else None
    except BadInput:
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Any, damage: Damage | None = None) -> Iterator[Record]:
    """Yields the records of a file, which may be missing. `damage` counts skipped lines. Raises OSError or BadInput."""
    for _, record in read_lines(path, damage):
        yield record


def read_lines(path: Any, damage: Damage | None = None) -> Iterator[tuple[bytes, Record]]:
    """Yields (line without its newline, record) pairs of a file, which may be missing."""
    with contextlib.suppress(FileNotFoundError), paths.open_binary(path) as file:
        yield from parse_file(file, damage or Damage())


def parse_file(file: Any, damage: Damage) -> Iterator[tuple[bytes, Record]]:
    """Yields (line without its newline, record) pairs of an open file."""
    for line, whole in split_lines(file):
        damage.number += 1
        if line is not None and not line.strip():
            continue
        if line is not None and (record := parse_record(line)) is not None:
            yield line, record
        elif whole:
            damage.lines += 1
            damage.first = damage.first or damage.number
        else:
            damage.torn = True


def split_lines(file: Any) -> Iterator[tuple[bytes | None, bool]]:
    """Yields (line, True if it ends with a newline). The line is None if it is longer than MAX_LINE_BYTES."""
    partial, skipping = b"", False
    while chunk := file.read(CHUNK_BYTES):
        *lines, partial = (partial + chunk).split(b"\n")
        for line in lines:
            yield (None if skipping or len(line) > MAX_LINE_BYTES else line), True
            skipping = False
        if len(partial) > MAX_LINE_BYTES:
            partial, skipping = b"", True
    if skipping or partial:
        yield (None if skipping else partial), False


def parse_lines(content: bytes) -> tuple[list[Record], int, int]:
    """Returns (records, number of damaged lines, number of bytes before an incomplete last line)."""
    damage = Damage()
    records = [record for _, record in parse_file(io.BytesIO(content), damage)]
    return records, damage.lines, content.rfind(b"\n") + 1 if damage.torn else len(content)


def tail_records(path: Any) -> list[Record]:
    """Returns the records in the last TAIL_BYTES of a file, or [] if it is missing. Raises OSError or BadInput."""
    try:
        with io.BytesIO(paths.read_bytes(path)) if paths.is_remote(path) else paths.open_binary(path) as file:
            begin = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            content = file.read()
    except FileNotFoundError:
        return []
    return parse_lines(content.partition(b"\n")[2] if begin else content)[0]


class Follower:
    """Reads new records of a file that another process appends to or replaces. Keeps no file open between polls."""

    def __init__(self, path: Any, first_bytes: int = FIRST_BYTES):
        """The first poll of a local file reads at most its last `first_bytes` bytes."""
        self.path, self.remote, self.first_bytes = paths.as_path(path), paths.is_remote(path), first_bytes
        self.key: Any = None  # identity of the file that was read; a rewind replaces the file
        self.offset = 0  # bytes read so far, without a torn last line
        self.grown_at: float | None = None  # seconds since 1970
        self.damaged = 0  # number of damaged lines

    def poll(self) -> tuple[list[Record], bool]:
        """Returns (new records, True if they replace all earlier records). Raises OSError if the file is unreadable."""
        try:
            return self.poll_bucket() if self.remote else self.poll_disk()
        except FileNotFoundError:
            gone, self.key, self.offset = self.key is not None, None, 0
            return [], gone

    def poll_disk(self) -> tuple[list[Record], bool]:
        """Polls a local file, starting where the last poll ended."""
        stat = self.path.stat()
        replaced = stat.st_ino != self.key or stat.st_size < self.offset
        if replaced:
            self.key, self.offset, self.damaged = stat.st_ino, 0, 0
        self.grown_at = stat.st_mtime
        if stat.st_size == self.offset:
            return [], replaced
        with paths.open_binary(self.path) as file:
            if self.offset == 0 and stat.st_size > self.first_bytes:
                file.seek(stat.st_size - self.first_bytes)
                file.readline()  # skip a partial line
                self.offset = file.tell()
            file.seek(self.offset)
            records, damaged, read = parse_lines(file.read())
        self.offset, self.damaged = self.offset + read, self.damaged + damaged
        return records, replaced

    def poll_bucket(self) -> tuple[list[Record], bool]:
        """Polls an object in a bucket. Reads the whole object if it has changed."""
        stat = self.path.stat()
        key = (stat.st_mtime, stat.st_size)
        if key == self.key:
            return [], False
        self.key, self.grown_at = key, stat.st_mtime
        records, self.damaged, _ = parse_lines(self.path.read_bytes())
        return records, True


def append(path: Any, content: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Appends complete lines to a file, either all of them or none. Creates a missing file with `mode`.

    Rewrites an object in a bucket, which cannot be appended to. If `durable`, syncs to disk before returning.
    Raises OSError after removing a partial write if possible, BadInput if the path is not a file, and Stop if this
    process no longer owns the folder.
    """
    if paths.is_remote(path):
        before = paths.read_bytes(path) if path.exists() else b""
        paths.write_bytes_atomic(path, without_torn_line(before) + content)
        return
    is_new = not os.path.exists(path)
    if is_new:
        fence.ask(path)
    handle = paths.open_to_write(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if is_new else 0), mode)
    try:
        fence.ask(path)  # again, now that the file is open
        fix_last_line(handle)
        before, written = os.fstat(handle).st_size, 0
        try:
            while written < len(content):  # one write unless the disk is full, so concurrent lines stay complete
                written += os.write(handle, content[written:])
            if durable:
                os.fsync(handle)
            if durable and is_new:
                paths.sync_folder(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                if os.fstat(handle).st_size == before + written:  # no other process has appended
                    os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def fix_last_line(handle: int) -> None:
    """Removes an incomplete last line. If only the newline is missing, adds it."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return
    begin = max(0, size - MAX_LINE_BYTES)
    found = os.pread(handle, size - begin, begin)
    if (whole := without_torn_line(found)) == found + b"\n":
        os.write(handle, b"\n")
    else:
        os.ftruncate(handle, begin + len(whole))


def without_torn_line(content: bytes) -> bytes:
    """Returns the content without an incomplete last line. If only the newline is missing, adds it."""
    last = content[content.rfind(b"\n") + 1 :]
    if not last:
        return content
    return content + b"\n" if parse_record(last) is not None else content[: -len(last)]


def replace_with_copy(path: Any) -> None:
    """Replaces a local file with a copy. A process that has the old file open cannot append to the copy."""
    with contextlib.suppress(FileNotFoundError):
        paths.write_bytes_atomic(path, paths.read_bytes(path))


def write_lines(path: Any, lines: Iterable[bytes]) -> None:
    """Atomically replaces the content of a file with these lines."""
    paths.write_bytes_atomic(path, b"".join(line + b"\n" for line in lines))


def abandon(workdir: Any, to_step: int, rewind: int) -> int:
    """Moves records after `to_step` from metrics.jsonl to abandoned.jsonl. Returns how many it moved. Idempotent."""
    folder = paths.as_path(workdir)
    remaining, moved = [], []
    for line, record in read_lines(folder / "metrics.jsonl"):
        if not isinstance(step := record.get("step"), (int, float)):
            continue  # the next start would drop it too
        if step > to_step:
            moved.append(json.dumps({"rewind": rewind} | record).encode())
        else:
            remaining.append(line)
    if moved:
        before = [line for line, _ in read_lines(folder / "abandoned.jsonl")]
        write_lines(folder / "abandoned.jsonl", dict.fromkeys([*before, *moved]))
        write_lines(folder / "metrics.jsonl", remaining)
    return len(moved)


class RecordFile:
    """A JSON Lines file. Buffers records after a disk error. In a bucket, a thread uploads the records."""

    def __init__(self, path: Any, *, mode: int = 0o666, durable: bool = False, every_seconds: float = 0.0):
        """`every_seconds` is the pause between uploads to a bucket."""
        self.path, self.mode, self.durable, self.every_seconds = path, mode, durable, every_seconds
        self.unwritten: collections.deque[str] = collections.deque(maxlen=MAX_UNWRITTEN)
        self.cause: str | None = None  # error that prevented the last write
        self.uploader: Uploader | None = None

    def open_object(self) -> tuple[bytes, Uploader]:
        """Opens the object in the bucket. Returns (content, uploader). Raises the errors of ExclusiveObject.read."""
        remote = ExclusiveObject(os.fspath(self.path))
        found = remote.read()
        self.uploader = Uploader(self.path, remote.write, every_seconds=self.every_seconds)
        return found, self.uploader

    @property
    def problem(self) -> str | None:
        """Error that delays writes to the file, or None. A pause between uploads is not an error."""
        if self.uploader is not None:
            return self.uploader.problem
        if self.cause is None:
            return None
        lost = "; its oldest lines are lost" if len(self.unwritten) == MAX_UNWRITTEN else ""
        return f"{self.path} could not be written and will be retried: {self.cause}{lost}"

    def write(self, record: Mapping[str, Any]) -> bool:
        """Writes a record. Returns False if it is only buffered. Raises Stop if another process owns the folder."""
        self.unwritten.append(json.dumps(record, allow_nan=False) + "\n")
        return self.write_out()

    def write_out(self) -> bool:
        """Writes buffered records; returns True if none remain."""
        text = "".join(self.unwritten)
        try:
            if not paths.is_remote(self.path):
                append(self.path, text.encode(), mode=self.mode, durable=self.durable)
            else:
                uploader = self.uploader
                if uploader is None:
                    found, uploader = self.open_object()
                    text = without_torn_line(found).decode("utf-8", "replace") + text
                uploader.append(text)
        except Stop:
            self.unwritten.clear()
            raise
        except (OSError, BadInput) as error:
            self.cause = getattr(error, "strerror", None) or str(error)
            return False
        self.unwritten.clear()
        self.cause = None
        return True

    def upload_soon(self) -> None:
        """Skips the pause between uploads once, without blocking."""
        if self.uploader is not None:
            self.uploader.skip_pause()

    def flush(self, seconds: float) -> bool:
        """Waits for all records to be written and uploaded; returns False on a timeout."""
        if self.unwritten:
            self.write_out()
        return not self.unwritten and (self.uploader is None or self.uploader.flush(seconds))

    def close(self) -> None:
        """Stops the uploads."""
        if self.uploader is not None:
            self.uploader.close()
