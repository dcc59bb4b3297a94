"""Files of JSON records, one object a line: metrics.jsonl, events.jsonl, samples.jsonl. Their only reader and writer.

One rule for all of them: a line counts if it holds a whole JSON object. A last line that does not is torn (it is being
written, or its writer was killed) and is left out; any other line that does not is damaged, is left out and counted,
and hides none of its neighbours. Appending first ends the file in a whole line, so that nothing is glued to a torn one.
"""

import collections
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxscale.monitor.upload import OwnObject, Uploader
from jaxscale.system import fence, paths
from jaxscale.system.exits import BadInput, Stop
from jaxscale.system.foreign import parse_json

LONGEST_LINE = 8 * 2**20  # bytes; a longer one is damaged
CHUNK = 2**20  # bytes read at once
TAIL_BYTES = 1 << 18  # some hundred records of metrics, and a run may have written gigabytes
FIRST_BYTES = 32 << 20  # of a local file that is followed, at the first look: some 50,000 records
MOST_UNWRITTEN = 10_000  # records that wait in memory for a disk that is full, about 10 MB

Record = dict[str, Any]


@dataclasses.dataclass
class Damage:
    """What a reader left out."""

    lines: int = 0  # damaged
    first: int = 0  # the number of the first of them, from 1
    torn: bool = False  # the last line
    number: int = 0  # of the line that was read last


def parse_record(line: bytes | None) -> Record | None:
    """The JSON object of a line, None for anything else."""
    try:
        record = parse_json(line) if line is not None else None
    except BadInput:
        return None
    return record if isinstance(record, dict) else None


def read_records(path: Any, damage: Damage | None = None) -> Iterator[Record]:
    """Yields the records of a file, local or in a bucket, in bounded memory; none where there is no file.

    Args: damage: is told what is left out. Raises: OSError where the file cannot be read, BadInput where it is no file.
    """
    for _, record in read_lines(path, damage):
        yield record


def read_lines(path: Any, damage: Damage | None = None) -> Iterator[tuple[bytes, Record]]:
    """Yields (line without its newline, record): read_records, for what copies lines as they are."""
    with contextlib.suppress(FileNotFoundError), paths.open_binary(path) as file:
        yield from lines_of(file, damage or Damage())


def lines_of(file: Any, damage: Damage) -> Iterator[tuple[bytes, Record]]:
    """read_lines of an open file."""
    for line, whole in pieces(file):
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


def pieces(file: Any) -> Iterator[tuple[bytes | None, bool]]:
    """Yields (line, whether it ended) of each line; None for one that is too long to be a record."""
    held, skipping = b"", False
    while chunk := file.read(CHUNK):
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            yield (None if skipping or len(line) > LONGEST_LINE else line), True
            skipping = False
        if len(held) > LONGEST_LINE:
            held, skipping = b"", True
    if skipping or held:
        yield (None if skipping else held), False


def parse_lines(content: bytes) -> tuple[list[Record], int, int]:
    """(records, number of damaged lines, bytes up to a torn last line) of some lines of a file."""
    *lines, last = content.split(b"\n")
    parsed = [parse_record(line) for line in lines if line.strip()]
    records = [record for record in parsed if record is not None]
    ending = parse_record(last) if last else None
    whole = len(content) - len(last) if ending is None else len(content)
    return [*records, *([ending] if ending is not None else ())], len(parsed) - len(records), whole


def tail_records(path: Any) -> list[Record]:
    """The last records of a file, those in its last TAIL_BYTES; [] where there is no file. Raises as read_records."""
    try:
        if paths.is_remote(path):
            whole = paths.read_bytes(path)
            begin = max(0, len(whole) - TAIL_BYTES)
            content = whole[begin:]
        else:
            with paths.open_binary(path) as file:
                begin = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                content = file.read()
    except FileNotFoundError:
        return []
    return parse_lines(content.partition(b"\n")[2] if begin else content)[0]


class Follower:
    """The new records of a file that another process appends to, or replaces. Holds no file open between looks."""

    def __init__(self, path: Any, first_bytes: int = FIRST_BYTES):
        """first_bytes: of a longer local file, so many from its end are read at the first look."""
        self.path, self.remote, self.first_bytes = paths.as_path(path), paths.is_remote(path), first_bytes
        self.key: Any = None  # of the file that was read: another one takes its place when a run goes back
        self.offset = 0  # bytes that were read, up to a torn line
        self.grown_at: float | None = None  # seconds since 1970
        self.damaged = 0  # lines

    def look(self) -> tuple[list[Record], bool]:
        """(new records, whether they replace all earlier ones). Raises OSError where the file cannot be read."""
        try:
            return self.look_into_bucket() if self.remote else self.look_at_disk()
        except FileNotFoundError:
            gone, self.key, self.offset = self.key is not None, None, 0
            return [], gone

    def look_at_disk(self) -> tuple[list[Record], bool]:
        """Reads from where the last look ended."""
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
                file.readline()  # it begins in the middle of a line
                self.offset = file.tell()
            file.seek(self.offset)
            records, damaged, read = parse_lines(file.read())
        self.offset, self.damaged = self.offset + read, self.damaged + damaged
        return records, replaced

    def look_into_bucket(self) -> tuple[list[Record], bool]:
        """Reads the object whole where it has changed: nothing can be read from its middle on."""
        stat = self.path.stat()
        key = (stat.st_mtime, stat.st_size)
        if key == self.key:
            return [], False
        self.key, self.grown_at = key, stat.st_mtime
        records, self.damaged, _ = parse_lines(self.path.read_bytes())
        return records, True


def append(path: Any, content: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Adds whole lines to the file, all of them or none; it is made with this mode if it is missing.

    An object of a bucket cannot be appended to and is written again, whole. Args: durable: returns when they would
    survive a power cut.
    Raises: OSError, after what was written of the content is taken away again, unless the disk refuses that as well;
    BadInput where the path is no file; Stop where its folder is not this process's any more.
    """
    if paths.is_remote(path):
        before = paths.read_bytes(path) if path.exists() else b""
        paths.write_bytes_atomic(path, ended(before) + content)
        return
    is_new = not os.path.exists(path)
    if is_new:
        fence.ask(path)
    handle = paths.open_to_write(path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if is_new else 0), mode)
    try:
        fence.ask(path)  # this very file
        end_in_whole_line(handle)
        before, written = os.fstat(handle).st_size, 0
        try:
            while written < len(content):  # once, unless the disk is full: other writers' lines stay whole
                written += os.write(handle, content[written:])
            if durable:
                os.fsync(handle)
            if durable and is_new:
                paths.sync_folder(path.parent)
        except OSError:
            with contextlib.suppress(OSError):
                if os.fstat(handle).st_size == before + written:  # nobody has written behind it
                    os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def end_in_whole_line(handle: int) -> None:
    """Takes a torn last line away, and gives a whole one its newline."""
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return
    begin = max(0, size - LONGEST_LINE)
    found = os.pread(handle, size - begin, begin)
    if (whole := ended(found)) == found + b"\n":
        os.write(handle, b"\n")
    else:
        os.ftruncate(handle, begin + len(whole))


def ended(content: bytes) -> bytes:
    """The content without a torn last line, and with a newline behind a whole one."""
    last = content[content.rfind(b"\n") + 1 :]
    if not last:
        return content
    return content + b"\n" if parse_record(last) is not None else content[: -len(last)]


def renew(path: Any) -> None:
    """Puts a copy in the place of a local file: what another process still appends to the old one is nobody's."""
    with contextlib.suppress(FileNotFoundError):
        paths.write_bytes_atomic(path, paths.read_bytes(path))


def write_lines(path: Any, lines: Iterable[bytes]) -> None:
    """Replaces the file by one of these lines, atomically."""
    paths.write_bytes_atomic(path, b"".join(line + b"\n" for line in lines))


def abandon(workdir: Any, to_step: int, rewind: int) -> int:
    """Moves the lines of metrics.jsonl after to_step, which a rewind has given up, to abandoned.jsonl; how many.

    Each gets "rewind": the number of the rewind that it was lost by. Done again after a crash, it moves nothing twice.
    """
    folder = paths.as_path(workdir)
    kept, moved = [], []
    for line, record in read_lines(folder / "metrics.jsonl"):
        if not isinstance(step := record.get("step"), (int, float)):
            continue  # the next start of the metrics would drop it too
        if step > to_step:
            moved.append(json.dumps({"rewind": rewind} | record).encode())
        else:
            kept.append(line)
    if moved:
        before = [line for line, _ in read_lines(folder / "abandoned.jsonl")]
        known = set(before)
        write_lines(folder / "abandoned.jsonl", [*before, *(line for line in moved if line not in known)])
        write_lines(folder / "metrics.jsonl", kept)
    return len(moved)


class RecordFile:
    """A file that a run appends records to: on the disk once `write` returns; a thread brings them to a bucket.

    What a disk or bucket does not take waits in memory, and goes first at the next write.
    """

    def __init__(
        self,
        path: Any,
        *,
        mode: int = 0o666,
        durable: bool = False,
        every_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """every_seconds: the pause between two uploads to a bucket."""
        self.path, self.mode, self.durable = path, mode, durable
        self.every_seconds, self.clock = every_seconds, clock
        self.unwritten: collections.deque[str] = collections.deque(maxlen=MOST_UNWRITTEN)
        self.cause: str | None = None  # why they are
        self.uploader: Uploader | None = None

    def take_up(self) -> tuple[bytes, Uploader]:
        """Returns (what the bucket's object holds, what appends to it). Raises as OwnObject.read does."""
        own = OwnObject(os.fspath(self.path))
        found = own.read()
        self.uploader = Uploader(self.path, every_seconds=self.every_seconds, clock=self.clock, write=own.write)
        return found, self.uploader

    @property
    def problem(self) -> str | None:
        """Why the file is behind, if it is so for other reasons than the pause between uploads to a bucket."""
        if self.uploader is not None:
            return self.uploader.problem
        if self.cause is None:
            return None
        lost = "; the oldest of its lines are lost" if len(self.unwritten) == MOST_UNWRITTEN else ""
        return f"{self.path} is behind and tried again: {self.cause}{lost}"

    def write(self, record: Mapping[str, Any]) -> bool:
        """True if the record is in the file, or on its way to the bucket. Raises Stop where the folder is another's."""
        self.unwritten.append(json.dumps(record, allow_nan=False) + "\n")
        return self.write_out()

    def write_out(self) -> bool:
        """True if nothing waits any more."""
        text = "".join(self.unwritten)
        try:
            if not paths.is_remote(self.path):
                append(self.path, text.encode(), mode=self.mode, durable=self.durable)
            else:
                uploader = self.uploader
                if uploader is None:
                    found, uploader = self.take_up()
                    text = ended(found).decode("utf-8", "replace") + text
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
        """Leaves out the pause between uploads, once. Never waits."""
        if self.uploader is not None:
            self.uploader.hurry()

    def flush(self, seconds: float) -> bool:
        """True if all records are where they belong within so many seconds."""
        if self.unwritten:
            self.write_out()
        return not self.unwritten and (self.uploader is None or self.uploader.flush(seconds))

    def close(self) -> None:
        """Ends the uploads: nothing is sent any more."""
        if self.uploader is not None:
            self.uploader.close()
