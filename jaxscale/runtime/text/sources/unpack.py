"""Decompresses .gz (RFC 1952) and .zst (RFC 8878) files of any number of members, in bounded memory."""

import codecs
import contextlib
import os
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.left_out import TRAILING
from jaxscale.runtime.text.sources.part import SKIP_REMAINDER, Damaged, damage_fix, ignore_progress
from jaxscale.system.paths import open_binary

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_BYTES = 1 << 18  # fits the cache of a core
READ_BYTES = 1 << 16  # compressed bytes read at once
RATIO_FLOOR = 64 << 20  # the ratio of a file that has unpacked to less than this is not checked
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SKIPPABLE = tuple(bytes([low, 0x2A, 0x4D, 0x18]) for low in range(0x50, 0x60))  # zstd frames without content
MAGIC = {GZIP: ".gz", ZSTD: ".zst"} | dict.fromkeys(SKIPPABLE, ".zst")
MAGIC_BYTES = 4
WINDOW_LOGS = (10, 31)  # the smallest and the largest window that zstd decodes, as powers of two


class UnpackError(Exception):
    """Packed data that cannot be decompressed. fix: instead of fetching the file again."""

    def __init__(self, reason: str, fix: str = ""):
        super().__init__(reason)
        self.reason, self.fix = reason, fix


class Decompressor(Protocol):
    """The interface of zstd.ZstdDecompressor (PEP 784) for one member of a packed file."""

    @property
    def eof(self) -> bool:
        """True at the end of the member."""
        ...

    @property
    def needs_input(self) -> bool:
        """True if decompress() gives nothing more without more data."""
        ...

    @property
    def unused_data(self) -> bytes:
        """The bytes after the end of the member."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Returns at most max_length unpacked bytes."""
        ...


class GzipDecompressor:
    """zlib with the interface of Decompressor."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        """True at the end of the member."""
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        """True if decompress() gives nothing more without more data."""
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        """The bytes after the end of the member."""
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Returns at most max_length unpacked bytes."""
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


def packed_suffix(head: bytes) -> str:
    """Returns '.gz' or '.zst' if a file that begins with these bytes is packed, else ''."""
    return next((ending for magic, ending in MAGIC.items() if head.startswith(magic)), "")


def unpack(
    path: str, cfg: ReadConfig, on_progress: Callable[[float], None] = ignore_progress, skipped: Counter | None = None
) -> Iterator[bytes]:
    """Yields the unpacked bytes of a .gz or .zst file, at most BLOCK_BYTES at a time.

    Args: on_progress: called with the fraction of the file read. skipped: counts TRAILING bytes after the packed data.
    Raises: Damaged naming the file, location, reason and fix.
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
                fix = damage_fix(cfg, SKIP_REMAINDER if unpacked else " to leave it out", error.fix)
                raise Damaged(f"{path} {error.reason}; {fix}") from None
            raise Damaged(
                f"{path} {error.reason} after {unpacked:,} unpacked bytes, {file.tell():,} of {size:,} packed; "
                f"{damage_fix(cfg, SKIP_REMAINDER)}"
            ) from None


def members(
    file: BinaryIO, path: str, cfg: ReadConfig, skipped: Counter | None = None, exact_from: int = 1 << 62
) -> Iterator[bytes]:
    """Yields the content of each member, at most BLOCK_BYTES at a time; from byte `exact_from` on one byte at a time.

    Zero bytes between and after the members are padding. Raises Unpackable.
    """
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
                raise UnpackError("is cut short")
        data = after_padding(file, member.unused_data)
        member = open_member(data, cfg)
    if data and any(magic.startswith(data) for magic in MAGIC):
        raise UnpackError("is cut short")
    if data and skipped is not None:
        skipped[TRAILING] += 1


def open_member(data: bytes, cfg: ReadConfig) -> Decompressor | None:
    """Returns the decompressor of the member that begins with `data`; None if none begins there."""
    ending = packed_suffix(data)
    if ending == ".zst":
        smallest, largest = WINDOW_LOGS
        log = min(max(cfg.max_window_bytes.bit_length() - 1, smallest), largest)
        return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: log})
    return GzipDecompressor() if ending else None


def after_padding(file: BinaryIO, data: bytes) -> bytes:
    """Returns the bytes after zero padding, at least MAGIC_BYTES if there are as many."""
    while len(data := data.lstrip(b"\0")) < MAGIC_BYTES and (more := file.read(READ_BYTES)):
        data += more
    return data


def up_to_break(path: str, cfg: ReadConfig, begin: int) -> Iterator[bytes]:
    """Yields the bytes from `begin` up to the break of a broken file, which decompressors drop with the last block."""
    place, remaining = 0, bytearray()
    with contextlib.suppress(UnpackError), open_binary(path) as file:
        for block in members(file, path, cfg, exact_from=begin):
            place += len(block)
            if place > begin:
                remaining += block
    if remaining:
        yield bytes(remaining)


def check_size(path: str, unpacked: int, packed: int, cfg: ReadConfig) -> None:
    """Raises Damaged for a file that unpacks to more than the settings allow."""
    if unpacked > cfg.max_unpacked_bytes:
        setting = f"{cfg.where}max_unpacked_bytes"
    elif unpacked > max(RATIO_FLOOR, cfg.max_unpacked_ratio * packed):
        setting = f"{cfg.where}max_unpacked_ratio"
    else:
        return
    raise Damaged(
        f"{path} is refused: its first {packed:,} bytes unpack to {unpacked:,}, more than {setting} allows; "
        "take it out, or raise the limit if you trust it"
    )


def not_packed(path: str, head: bytes) -> UnpackError:
    """Returns the error for a file that is packed only by its name."""
    reason = "is neither gzip nor zstd by its first bytes, although its name says so"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return UnpackError(reason, "fetch it again")
    if b"\0" in head:
        return UnpackError(reason, "fetch it again")
    return UnpackError(
        reason, f"if it is text, rename it: mv {shlex.quote(path)} {shlex.quote(os.path.splitext(path)[0])}"
    )


def explain_error(error: Exception, path: str, cfg: ReadConfig) -> UnpackError:
    """Converts a decompressor's error to a reason and a fix."""
    reason = str(error).removeprefix("Unable to decompress Zstandard data: ")
    reason = reason.removeprefix("Error -3 while decompressing data: ")
    if "too much memory" in reason:
        setting = f"{cfg.where}max_window_bytes"
        return UnpackError(
            f"needs a zstd window larger than {setting}={cfg.max_window_bytes:,} allows",
            f"raise that, or unpack it: zstd -d --long=31 {shlex.quote(path)}",
        )
    if "Dictionary" in reason:
        return UnpackError(
            "was packed with a zstd dictionary, which is not part of it",
            f"unpack it: zstd -d -D DICTIONARY {shlex.quote(path)}",
        )
    return UnpackError(f"is broken ({reason})")
