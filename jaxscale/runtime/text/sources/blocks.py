"""Bytes and lines of a file, decompressed on the fly in bounded memory."""

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.files import PACKED
from jaxscale.runtime.text.sources.left_out import count_skipped
from jaxscale.runtime.text.sources.part import WHOLE, Damaged, Part
from jaxscale.runtime.text.sources.unpack import BLOCK_BYTES, MAGIC_BYTES, packed_suffix, unpack
from jaxscale.system.paths import open_binary

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def is_packed(path: str) -> bool:
    """Returns True for the name of a packed file."""
    return path.lower().endswith(PACKED)


def read_blocks(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Iterator[bytes]:
    """Yields the bytes of a file, or of a part of one that is not packed, at most BLOCK_BYTES at a time.

    skipped: counts bytes after the packed data. Raises: Damaged naming file, location and fix if the file is truncated,
    broken, or larger than cfg allows.
    """
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
    """Raises Damaged for a file that is packed by its first bytes but not by its name."""
    with open_binary(path) as file:
        found = packed_suffix(file.read(MAGIC_BYTES))
    if found:
        raise Damaged(
            f"{path} is packed, by its first bytes, and its name does not say so; name it "
            f"{os.path.basename(path)}{found}, or set {cfg.where}damaged='skip' to leave it out"
        )


def packed_problem(path: str, cfg: ReadConfig) -> str:
    """Returns why a packed file cannot be unpacked, which may explain errors in its text; '' if it can."""
    try:
        for _ in unpack(path, cfg):
            pass
    except Damaged as error:
        return str(error)
    return ""


class BlockStream(io.RawIOBase):
    """Blocks of bytes as a raw stream, for io.BufferedReader."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._buffered, self._place = blocks, b"", 0

    def readable(self) -> bool:
        """Returns True: the stream is read-only."""
        return True

    def tell(self) -> int:
        """Returns the number of bytes read."""
        return self._place

    def readinto(self, buffer: memoryview) -> int:
        """Reads the next bytes of one block; returns 0 at the end."""
        self._buffered = self._buffered or next(self._blocks, b"")
        size = min(len(buffer), len(self._buffered))
        buffer[:size], self._buffered = self._buffered[:size], self._buffered[size:]
        self._place += size
        return size


def as_file(blocks: Iterator[bytes]) -> io.BufferedReader:
    """Wraps the blocks as a file that is open for reading."""
    return io.BufferedReader(BlockStream(blocks), BLOCK_BYTES)


def read_lines(
    blocks: Iterator[bytes], limit: int, skipped: Counter, offset: int = 0
) -> Iterator[tuple[int, int, bytes]]:
    """Yields (offset in the unpacked file, number from 1, line without its end). The last line needs no end.

    A line longer than `limit` bytes is counted in `skipped` and never buffered.
    """
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
    """Returns the first line start at or after `place`; the file's `size` if there is none."""
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
    """Splits a file into parts of about part_bytes. find: next_line, or a similar function for other split points."""
    size = os.path.getsize(path)
    if is_packed(path) or size <= part_bytes:
        return [WHOLE]
    places = [0]
    while (place := find(path, places[-1] + part_bytes, size, places[-1])) < size:
        places.append(place)
    return [Part(begin, end) for begin, end in zip(places, [*places[1:], size])]
