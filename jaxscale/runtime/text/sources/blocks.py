"""Reads bytes and lines of files, and decompresses .gz (RFC 1952) and .zst (RFC 8878) in bounded memory."""

import codecs
import contextlib
import io
import os
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import BinaryIO

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.files import PACKED
from jaxscale.runtime.text.sources.part import (
    SKIP_REMAINDER,
    TRAILING,
    WHOLE,
    Damaged,
    Part,
    count_skipped,
    damage_fix,
    ignore_progress,
)
from jaxscale.system.paths import open_binary

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK_BYTES = 1 << 18  # fits the cache of a core
READ_BYTES = 1 << 16  # compressed bytes that are read at a time
RATIO_FLOOR = 64 << 20  # uncompressed bytes up to which the compression ratio is not checked
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SKIPPABLE = tuple(bytes([low, 0x2A, 0x4D, 0x18]) for low in range(0x50, 0x60))  # zstd frames without content
MAGIC = {GZIP: ".gz", ZSTD: ".zst"} | dict.fromkeys(SKIPPABLE, ".zst")
MAGIC_BYTES = 4
WINDOW_LOGS = (10, 31)  # smallest and largest windows that zstd decodes, as powers of two


def is_packed(path: str) -> bool:
    """Returns True for the name of a compressed file."""
    return path.lower().endswith(PACKED)


def read_blocks(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Iterator[bytes]:
    """Yields the uncompressed bytes of a file, or of a part of an uncompressed file. Raises Damaged."""
    if is_packed(path):
        yield from unpack(path, cfg, part.on_progress, skipped)
        return
    check_unpacked(path, cfg)
    with open_binary(path) as file:
        size = remaining = max(min(part.end, file.seek(0, os.SEEK_END)) - part.begin, 0)
        file.seek(part.begin)
        while remaining > 0 and (block := file.read(min(BLOCK_BYTES, remaining))):
            remaining -= len(block)
            part.on_progress(1 - remaining / size)
            yield block


def check_unpacked(path: str, cfg: ReadConfig) -> None:
    """Raises Damaged if a file is compressed, but its name has no suffix for compression."""
    with open_binary(path) as file:
        found = packed_suffix(file.read(MAGIC_BYTES))
    if found:
        raise Damaged(
            f"{path} is compressed, but its name has no {found} suffix; rename it to {os.path.basename(path)}{found}, "
            f"or set {cfg.where}damaged='skip' to skip it"
        )


def packed_problem(path: str, cfg: ReadConfig) -> str:
    """Returns why a compressed file cannot be decompressed, or ''. This may explain errors in its text."""
    try:
        for _ in unpack(path, cfg):
            pass
    except Damaged as error:
        return str(error)
    return ""


class BlockStream(io.RawIOBase):
    """Raw stream of blocks of bytes, for io.BufferedReader."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._buffered, self._place = blocks, b"", 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: memoryview) -> int:
        """Reads bytes of the next block; returns 0 at the end."""
        self._buffered = self._buffered or next(self._blocks, b"")
        size = min(len(buffer), len(self._buffered))
        buffer[:size], self._buffered = self._buffered[:size], self._buffered[size:]
        self._place += size
        return size


def as_file(blocks: Iterator[bytes]) -> io.BufferedReader:
    """Returns a file object that reads the blocks."""
    return io.BufferedReader(BlockStream(blocks), BLOCK_BYTES)


def read_lines(
    blocks: Iterator[bytes], limit: int, skipped: Counter, offset: int = 0
) -> Iterator[tuple[int, int, bytes]]:
    """Yields (uncompressed offset, number from 1, line without line end). Skips and counts lines over the limit."""
    stream, number = as_file(blocks), 0
    while piece := stream.readline(BLOCK_BYTES):
        number += 1
        pieces, size = [piece], len(piece)
        while not piece.endswith(b"\n") and (piece := stream.readline(BLOCK_BYTES)):
            pieces.append(piece)
            size += len(piece)
            if size > limit + 1:
                pieces.clear()
        size -= piece.endswith(b"\n")
        if size > limit:
            count_skipped(skipped, "longer than max_line_bytes", size)
        else:
            yield offset, number, b"".join(pieces).removesuffix(b"\n")
        offset += size + 1


def next_line(path: str, place: int, size: int, begin: int = 0) -> int:
    """Returns the offset of the first line that starts at or after `place`, or `size` if there is none."""
    if place <= 0:
        return 0
    with open(path, "rb") as file:
        file.seek(place - 1)
        place -= 1
        while block := file.read(1 << 16):
            if (found := block.find(b"\n")) >= 0:
                return min(place + found + 1, size)
            place += len(block)
    return size


def cut_parts(path: str, part_bytes: int, find: Callable[[str, int, int, int], int]) -> list[Part]:
    """Splits a file into parts of about part_bytes. find: next_line(), or a function for other split points."""
    size = os.path.getsize(path)
    if is_packed(path) or size <= part_bytes:
        return [WHOLE]
    places = [0]
    while (place := find(path, places[-1] + part_bytes, size, places[-1])) < size:
        places.append(place)
    return [Part(begin, end) for begin, end in zip(places, [*places[1:], size])]


class UnpackError(Exception):
    """Raised for data that cannot be decompressed. fix: replaces the default fix, which is another download."""

    def __init__(self, reason: str, fix: str = ""):
        super().__init__(reason)
        self.reason, self.fix = reason, fix


class GzipDecompressor:
    """Decompressor of a gzip member with the interface of zstd.ZstdDecompressor (PEP 784)."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


def packed_suffix(head: bytes) -> str:
    """Returns '.gz' or '.zst' if a file that begins with `head` is a gzip or Zstandard file, else ''."""
    return next((ending for magic, ending in MAGIC.items() if head.startswith(magic)), "")


def unpack(
    path: str, cfg: ReadConfig, on_progress: Callable[[float], None] = ignore_progress, skipped: Counter | None = None
) -> Iterator[bytes]:
    """Yields the uncompressed bytes of a .gz or .zst file, at most BLOCK_BYTES at a time.

    on_progress: called with the fraction of the file that was read. skipped: counts files with TRAILING bytes.
    Raises: Damaged with the file, location, reason and fix.
    """
    unpacked = 0
    with open_binary(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            for block in members(file, path, cfg, skipped):
                unpacked += len(block)
                check_size(path, unpacked, file.tell(), cfg)
                on_progress(file.tell() / size)
                yield block
        except UnpackError as error:
            if cfg.damaged == "skip":
                yield from up_to_break(path, cfg, unpacked)
            if error.fix:
                fix = damage_fix(cfg, SKIP_REMAINDER if unpacked else " to skip it", error.fix)
                raise Damaged(f"{path} {error.reason}; {fix}") from None
            raise Damaged(
                f"{path} {error.reason} after {unpacked:,} uncompressed bytes ({file.tell():,} of {size:,} compressed "
                f"bytes); {damage_fix(cfg, SKIP_REMAINDER)}"
            ) from None


def members(
    file: BinaryIO, path: str, cfg: ReadConfig, skipped: Counter | None = None, exact_from: int = 1 << 62
) -> Iterator[bytes]:
    """Yields the content of all members in blocks, or in single bytes after `exact_from` bytes. Raises UnpackError."""
    unpacked, data = 0, file.read(READ_BYTES)
    if not data:
        return  # an empty file has no content
    if (member := open_member(data, cfg)) is None:
        raise not_packed(path, data)
    while member:
        while not member.eof:
            try:
                block = member.decompress(data, BLOCK_BYTES if unpacked < exact_from else 1)
            except (zlib.error, zstd.ZstdError) as error:
                raise explain_error(error, path, cfg) from None
            data = file.read(READ_BYTES) if member.needs_input and not member.eof else b""
            if block:
                unpacked += len(block)
                yield block
            elif member.needs_input and not member.eof and not data:
                raise UnpackError("is truncated")
        data = member.unused_data
        while len(data := data.lstrip(b"\0")) < MAGIC_BYTES and (more := file.read(READ_BYTES)):
            data += more
        member = open_member(data, cfg)
    if data and any(magic.startswith(data) for magic in MAGIC):
        raise UnpackError("is truncated")
    if data and skipped is not None:
        skipped[TRAILING] += 1


def open_member(data: bytes, cfg: ReadConfig) -> "GzipDecompressor | zstd.ZstdDecompressor | None":
    """Returns a decompressor for the member that begins with `data`, or None if no member begins with it."""
    ending = packed_suffix(data)
    if ending == ".zst":
        smallest, largest = WINDOW_LOGS
        log = min(max(cfg.max_window_bytes.bit_length() - 1, smallest), largest)
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: log})
    return GzipDecompressor() if ending else None


def up_to_break(path: str, cfg: ReadConfig, begin: int) -> Iterator[bytes]:
    """Yields the bytes of a damaged file from `begin` to the damage. Decompressors drop them with the last block."""
    place, remaining = 0, bytearray()
    with contextlib.suppress(UnpackError), open_binary(path) as file:
        for block in members(file, path, cfg, exact_from=begin):
            place += len(block)
            if place > begin:
                remaining += block
    if remaining:
        yield bytes(remaining)


def check_size(path: str, unpacked: int, packed: int, cfg: ReadConfig) -> None:
    """Raises Damaged if the uncompressed size of a file exceeds the limits in the settings."""
    if unpacked > cfg.max_unpacked_bytes:
        setting = f"{cfg.where}max_unpacked_bytes"
    elif unpacked > max(RATIO_FLOOR, cfg.max_unpacked_ratio * packed):
        setting = f"{cfg.where}max_unpacked_ratio"
    else:
        return
    raise Damaged(
        f"{path} exceeds {setting}: its first {packed:,} bytes decompress to {unpacked:,}; remove it, or raise the "
        "limit if you trust the file"
    )


def not_packed(path: str, head: bytes) -> UnpackError:
    """Returns the error for a file whose name, but not its content, is that of a compressed file."""
    fix = f"if it is text, rename it: mv {shlex.quote(path)} {shlex.quote(os.path.splitext(path)[0])}"
    try:
        is_text = "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        is_text = False
    reason = "is neither gzip nor zstd, despite its suffix"
    return UnpackError(reason, fix if is_text else "download it again")


def explain_error(error: Exception, path: str, cfg: ReadConfig) -> UnpackError:
    """Converts an error of a decompressor to UnpackError with a reason and a fix."""
    reason = str(error).removeprefix("Unable to decompress Zstandard data: ")
    reason = reason.removeprefix("Error -3 while decompressing data: ")
    if "too much memory" in reason:
        setting = f"{cfg.where}max_window_bytes"
        return UnpackError(
            f"needs a zstd window larger than {setting}={cfg.max_window_bytes:,}",
            f"raise the setting, or decompress the file: zstd -d --long=31 {shlex.quote(path)}",
        )
    if "Dictionary" in reason:
        return UnpackError(
            "was compressed with a zstd dictionary, which is not in the file",
            f"decompress the file: zstd -d -D DICTIONARY {shlex.quote(path)}",
        )
    return UnpackError(f"is corrupt ({reason})")
