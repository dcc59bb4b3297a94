"""Packed files are read as gzip and zstd read them, and what they would not read is named with the command to use."""

import gzip
import json
import struct
from collections import Counter

import pyarrow
import pytest

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.part import BROKEN, TRAILING, summarize_losses
from jaxscale.runtime.text.sources.read import read_file
from jaxscale.system.exits import BadInput

TEXTS = [f"document {i}" for i in range(50)]
LINES = "".join(json.dumps({"text": one}) + "\n" for one in TEXTS).encode()
SKIPPABLE = struct.pack("<II", 0x184D2A57, 4) + b"note"  # RFC 8878, 3.1.2
GARBAGE = b"-- end of transfer --"


def zstd(content, window_log=20):
    """A frame of one raw block (RFC 8878, 3.1.1), which states its window."""
    return (
        bytes.fromhex("28b52ffd00") + bytes([window_log - 10 << 3])
        + (len(content) << 3 | 1).to_bytes(3, "little") + content
    )  # fmt: skip


def documents(path, **settings):
    """(texts, counts of what was left out) of a file."""
    skipped = Counter()
    found = read_file(SourceFile(str(path), path.name, "text"), ReadConfig(**settings), skipped)
    return [document.text for document in found], skipped


HALF = LINES[: LINES.index(b"\n", len(LINES) // 2) + 1]
REST = LINES[len(HALF) :]
READ = {
    "two members": ("a.jsonl.gz", gzip.compress(HALF) + gzip.compress(REST)),
    "zero padding": ("a.jsonl.gz", gzip.compress(LINES) + bytes(700)),
    "zero padding between members": ("a.jsonl.gz", gzip.compress(HALF) + bytes(70_000) + gzip.compress(REST)),
    "many small members": ("a.jsonl.gz", b"".join(map(gzip.compress, LINES.splitlines(keepends=True)))),
    "an empty member": ("a.jsonl.gz", gzip.compress(b"") + gzip.compress(LINES)),
    "two frames": ("a.jsonl.zst", zstd(HALF) + pyarrow.compress(REST, "zstd", asbytes=True)),
    "zero padding after a frame": ("a.jsonl.zst", zstd(LINES) + bytes(700)),
    "skippable frames": ("a.jsonl.zst", SKIPPABLE + zstd(HALF) + SKIPPABLE + zstd(REST) + SKIPPABLE),
    "a window of 2 GiB": ("a.jsonl.zst", zstd(LINES, window_log=31)),
    "gzip named .zst, which zstd -d reads": ("a.jsonl.zst", gzip.compress(LINES)),
}


@pytest.mark.parametrize("case", READ)
def test_what_gzip_and_zstd_read_is_read_whole(tmp_path, case):
    name, content = READ[case]
    (tmp_path / name).write_bytes(content)
    assert documents(tmp_path / name) == (TEXTS, Counter())


@pytest.mark.parametrize("packed", [gzip.compress(LINES), zstd(LINES)], ids=["a.jsonl.gz", "a.jsonl.zst"])
def test_bytes_after_the_last_member_are_reported_and_lose_no_line(tmp_path, packed):
    path = tmp_path / ("a.jsonl.gz" if packed[0] == 0x1F else "a.jsonl.zst")
    path.write_bytes(packed + GARBAGE)
    texts, skipped = documents(path)
    assert texts == TEXTS and skipped == {TRAILING: 1}
    report = summarize_losses(skipped, len(texts), len(LINES), "data.")
    assert report.is_much and "1 files with other bytes after the packed data" in report.line


REFUSED = {
    "plain text named .gz": ("a.jsonl.gz", LINES, {}, r"is neither gzip nor zstd, .*: mv \S*a.jsonl.gz \S*a.jsonl, or"),
    "plain text named .zst": ("a.jsonl.zst", LINES, {}, r"is neither gzip nor zstd, .*: mv \S*a.jsonl.zst \S*a.jsonl"),
    "no text named .gz": ("a.jsonl.gz", bytes(range(256)), {}, "is neither gzip nor zstd, .*; download it again"),
    "a window larger than allowed": (
        "a.jsonl.zst", zstd(LINES, window_log=31), {"max_window_bytes": 1 << 30},
        r"larger than max_window_bytes=1,073,741,824; .* zstd -d --long=31 \S*a.jsonl.zst",
    ),
    "cut in a member": ("a.jsonl.gz", gzip.compress(LINES)[:-9], {}, "is truncated after"),
    "cut in the header of a second member": ("a.jsonl.gz", gzip.compress(LINES) + b"\x1f\x8b", {}, "is truncated"),
    "cut in a frame": ("a.jsonl.zst", zstd(LINES)[:-9], {}, "is truncated after"),
    "a wrong checksum": (
        "a.jsonl.gz", gzip.compress(LINES)[:-8] + bytes(8), {}, "is corrupt .incorrect data check. after",
    ),
    "a dictionary": (
        "a.jsonl.zst", bytes.fromhex("28b52ffd014807") + b"\1\0\0", {}, r"dictionary.* zstd -d -D \S+ \S*a.jsonl.zst",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_unpacked_is_named_with_its_reason_and_the_command(tmp_path, case):
    name, content, settings, reason = REFUSED[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=reason) as caught:
        documents(tmp_path / name, **settings)
    assert "damaged='skip'" in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert documents(tmp_path / name, damaged="skip", **settings)[1][BROKEN] == 1


@pytest.mark.parametrize("codec", ["gz", "zst"])
def test_no_line_before_a_break_is_lost(tmp_path, codec):
    """The second member is broken: all of the first is there, and what is whole of the second."""
    path = tmp_path / f"a.jsonl.{codec}"
    if codec == "gz":
        broken = gzip.compress(b"", 0)[:10] + b"\x00" + struct.pack("<HH", 5, 0xFFFA) + b"{}\n12" + b"\xff" * 99
        path.write_bytes(gzip.compress(LINES) + broken)
    else:
        path.write_bytes(zstd(LINES) + zstd(b"")[:6] + (5 << 3).to_bytes(3, "little") + b"{}\n12" + b"\xff" * 99)
    texts, skipped = documents(path, damaged="skip")
    assert texts == TEXTS
    assert skipped == {BROKEN: 1, "without text field": 1, "bytes left out": 2}  # the line {} was there
    with pytest.raises(BadInput, match="is corrupt"):
        documents(path)
