"""Text is tokenized once; a folder in the cache is whole or is not there."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxscale.runtime.data.cache import index_raw, scan_raw
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.shard_writer import ShardWriter, dtype_for
from jaxscale.runtime.data.shards import open_shard, read_header
from jaxscale.runtime.data.tokenize import open_tokenized
from jaxscale.runtime.text.sources.files import list_files
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer

# Tokenizes the files given on the command line, and waits as told at the second chunk (a folder is then half written).
SLOW_WRITER = """
import pathlib, sys, time
from jaxscale.runtime.data.tokenize import open_tokenized
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.text.sources.files import list_files
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer

class Slow(ByteTokenizer):
    chunks = 0
    def encode_many(self, texts):
        self.chunks += 1
        if self.chunks == 2:
            print("half way", flush=True)
            sys.stdin.readline()
        return super().encode_many(texts)

files, _ = list_files(sys.argv[1], "data.files", "text")
print(open_tokenized(files, Slow(), DataConfig(cache_dir=sys.argv[2]), say=lambda line: None).fingerprint)
"""


def start_writer(files, cache):
    writer = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, files, cache], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert writer.stdout.readline() == "half way\n"
    return writer


@pytest.fixture
def corpus(tmp_path):
    """9 MB of text: three chunks for the tokenizer."""
    (tmp_path / "long.txt").write_text("a line of text that is long enough\n" * 260_000)
    return str(tmp_path / "*.txt"), tmp_path / "cache"


def open_cached(globs, cache, **changes):
    said = []
    cfg = DataConfig(cache_dir=str(cache), **changes)
    files, problems = list_files(globs, "data.files", "text")
    assert not problems
    return open_tokenized(files, ByteTokenizer(), cfg, said.append), said


@pytest.mark.slow
def test_a_killed_writer_leaves_nothing_that_is_ever_read(corpus):
    globs, cache = corpus
    writer = start_writer(globs, str(cache))
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    left = list(cache.iterdir())
    assert len(left) == 1 and left[0].name.startswith("making-") and (left[0] / "tokens.bin").stat().st_size > 0
    shard, _ = open_cached(globs, cache)
    assert shard.header["text_bytes"] == 260_000 * 35
    assert [folder.name.split("-")[0] for folder in cache.iterdir() if folder.is_dir()] == [
        "tokens"
    ]  # no half made one


@pytest.mark.slow
def test_two_writers_at_once_end_with_one_good_folder(corpus):
    globs, cache = corpus
    writers = [start_writer(globs, str(cache)) for _ in range(2)]
    outputs = [writer.communicate("go on\n")[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0] and outputs[0] == outputs[1]
    assert [folder.name.split("-")[0] for folder in cache.iterdir() if folder.is_dir()] == ["tokens"]
    shard, said = open_cached(globs, cache)
    assert shard.fingerprint == outputs[0].strip() and said == []


def write_texts(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return str(folder / "*.txt")


def test_text_is_tokenized_again_only_when_something_changed(tmp_path):
    globs = write_texts(tmp_path, a="one", b="two")
    first, said = open_cached(globs, tmp_path / "cache")
    assert "tokenizing 2 files" in said[0] and "2 documents" in said[1]
    again, said = open_cached(globs, tmp_path / "cache")
    assert said == [] and again.fingerprint == first.fingerprint
    write_texts(tmp_path, b="too")
    changed, said = open_cached(globs, tmp_path / "cache")
    assert said and changed.fingerprint != first.fingerprint
    assert open_cached(globs, tmp_path / "cache", text_field="body")[1]
    assert open_cached(globs, tmp_path / "cache", invalid_utf8="stop")[1]


def test_the_fingerprint_depends_on_the_content_and_not_on_place_or_date(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write_texts(tmp_path / place, a="one", b="two")
    os.utime(tmp_path / "there" / "a.txt", (1, 1))
    here, there = (open_cached(str(tmp_path / place / "*.txt"), tmp_path / "cache")[0] for place in ("here", "there"))
    assert here.fingerprint == there.fingerprint and here.bin_path != there.bin_path


def test_the_shard_on_disk_is_what_its_documentation_says(tmp_path):
    globs = write_texts(tmp_path, a="ab", b="", c="é")
    (tmp_path / "d.txt").write_bytes(b"\xff")
    shard, said = open_cached(globs, tmp_path / "cache")
    folder = Path(shard.bin_path).parent
    assert np.fromfile(folder / "tokens.bin", "<u2").tolist() == [97, 98, 256, 0xC3, 0xA9, 256]
    assert np.fromfile(folder / "tokens.idx", "<i8").tolist() == [0, 3, 6]
    assert np.fromfile(folder / "tokens.src", "<u2").tolist() == [0, 0]
    assert np.load(folder / "tokens.token_bytes.npy").tolist() == [1] * 256 + [0]
    header = json.loads((folder / "tokens.json").read_text())
    expected = {
        "dtype": "uint16", "num_tokens": 6, "num_documents": 2, "max_id": 256, "eos_id": 256, "text_bytes": 4,
        "sources": ["text"], "skipped": {"empty": 1, "invalid UTF-8": 1, "bytes left out": 1},
    }  # fmt: skip
    assert {key: header[key] for key in expected} == expected
    assert [part["documents"] for part in header["files"]] == [1, 0, 1, 0]
    assert "1 empty, 1 invalid UTF-8, 1 bytes left out" in said[-3]
    assert said[-2].startswith("WARNING: reading skipped 1 of 3 documents (33.3%)")  # and not in silence
    assert "d.txt: 1 document skipped, not UTF-8" in said[1]


def test_files_without_a_document_are_an_error_that_leaves_no_folder(tmp_path):
    globs = write_texts(tmp_path, a="", b="")
    with pytest.raises(ValueError, match=r"no documents found in .*a.txt and the other files \(2 empty\)"):
        open_cached(globs, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("largest, dtype", [(256, "uint16"), (65_535, "uint16"), (65_536, "uint32")])
def test_ids_are_two_bytes_up_to_65535_and_four_above(tmp_path, largest, dtype):
    assert dtype_for(largest).name == dtype
    writer = ShardWriter(tmp_path, "x", vocab_size=largest + 1, eos_id=0, sources=["s"])
    writer.add(np.array([largest, 1], np.int32), "s")
    tokenizer = {"name": "", "eos_token": "", "vocab_size": 0, "fingerprint": ""}
    writer.finish(None, {"tokenizer": tokenizer, "eos_id": 0, "text_bytes": 0, "skipped": {}, "files": []})
    shard = open_shard(tmp_path / "x.bin")
    assert np.fromfile(shard.bin_path, shard.header["dtype"]).tolist() == [largest, 1, 0]
    assert shard.header["max_id"] == largest


@pytest.mark.fault("F24")
@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokens.src", "tokens.token_bytes.npy"])
def test_a_damaged_shard_is_told_and_made_again(tmp_path, name):
    globs = write_texts(tmp_path, a="some text")
    shard, _ = open_cached(globs, tmp_path / "cache")
    path = Path(shard.bin_path).parent / name
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    again, said = open_cached(globs, tmp_path / "cache")
    assert said[0].startswith(f"{path.parent} is damaged; recreating it (") and name in said[0]
    assert path.read_bytes() == good and again.fingerprint == shard.fingerprint
    assert open_cached(globs, tmp_path / "cache")[1] == []


def test_a_raw_bin_is_scanned_once_and_stays_where_it_is(tmp_path):
    path = tmp_path / "raw.bin"
    np.array([5, 6, 0, 7, 0, 8], "<u2").tofile(path)
    file = list_files(str(path), "data.files", "tokens")[0][0]
    cfg, said = DataConfig(cache_dir=str(tmp_path / "cache")), []
    for _ in range(2):
        shard = scan_raw(file, "uint16", 0, cfg, said.append)
    assert len(said) == 2 and "(2 files, 0.0 MB)" in said[1] and shard.bin_path == str(path)
    assert shard.offsets.tolist() == [0, 3, 5, 6] and shard.header["max_id"] == 8
    assert scan_raw(file, "uint16", None, cfg, said.append).offsets.tolist() == [0, 6]
    with pytest.raises(ValueError, match="raw.bin has 11 bytes, which is not a multiple of the size of uint16 ids"):
        path.write_bytes(b"x" * 11)
        scan_raw(file, "uint16", 0, cfg, said.append)


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path):
    globs = write_texts(tmp_path, a="some text")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match="cannot be written: .*; set data.cache_dir"):
        open_cached(globs, tmp_path / "cache")


@pytest.mark.parametrize("key", ["bin", "num_tokens", "max_id", "sha256", "tokenizer", "files", "text_bytes"])
def test_a_header_that_lacks_something_is_an_error_that_names_the_file(tmp_path, key):
    shard, _ = open_cached(write_texts(tmp_path, a="some text"), tmp_path / "cache")
    path = Path(shard.bin_path).with_suffix(".json")
    header = json.loads(path.read_text())
    for broken in ({k: v for k, v in header.items() if k != key}, header | {key: None}):
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=f"{path} has an invalid {key!r}; delete the folder"):
            read_header(path)


def test_a_header_of_another_version_is_told_as_such(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"format": "jaxscale-tokens", "version": 9}))
    with pytest.raises(ValueError, match="x.json has format version 9; this jaxscale supports version 2"):
        read_header(tmp_path / "x.bin")


@pytest.mark.parametrize("dtype", ["uint16", "auto"])
def test_four_byte_ids_read_as_two_bytes_are_refused(tmp_path, dtype):
    np.arange(1, 101, dtype="<u4").tofile(tmp_path / "raw.bin")
    file = list_files(str(tmp_path / "raw.bin"), "data.files", "tokens")[0][0]
    cfg = DataConfig(cache_dir=str(tmp_path / "cache"), token_dtype=dtype)
    with pytest.raises(ValueError, match="raw.bin .*; use data.token_dtype=uint32"):
        scan_raw(file, "uint16", None, cfg, print)
    assert scan_raw(file, "uint32", None, cfg, lambda text: None).header["num_tokens"] == 100
    for ids in ([5, 0], [0] * 100):  # short, or nothing but zeros: nothing is known
        np.array(ids, "<u2").tofile(tmp_path / "raw.bin")
        assert scan_raw(file, "uint16", None, cfg, lambda text: None).header["num_tokens"] == len(ids)


def test_a_source_that_cannot_be_read_is_not_told_as_the_cache(tmp_path):
    globs = write_texts(tmp_path, a="some text")
    file = list_files(globs, "data.files", "text")[0][0]
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").mkdir()
    for read in (
        lambda cfg: open_tokenized([file], ByteTokenizer(), cfg, lambda text: None),
        lambda cfg: index_raw(tmp_path, file, "uint16", None, lambda text: None),
        lambda cfg: open_tokenized(
            [file._replace(path=str(tmp_path / "gone"))], ByteTokenizer(), cfg, lambda text: None
        ),
    ):
        with pytest.raises(ValueError, match="(a.txt|gone) cannot be read: ") as error:
            read(DataConfig(cache_dir=str(tmp_path / "cache")))
        assert "cache" not in str(error.value)


def test_a_full_disk_is_told_as_the_cache_and_not_as_the_source(tmp_path):
    globs = write_texts(tmp_path, a="x" * (5 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # bytes of a file: a quota that is used up
    try:
        with pytest.raises(ValueError, match="the cache .* cannot be written: .*File too large"):
            open_cached(globs, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
