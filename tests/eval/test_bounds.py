"""An evaluation file is held in memory, so that it has bounds: a small one may unpack to more than there is."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from jaxscale.runtime.eval import bits_per_byte as text
from jaxscale.runtime.eval import items, named
from jaxscale.runtime.eval.bits_per_byte import EvalReading, TextSet
from jaxscale.runtime.eval.items import read_items
from jaxscale.runtime.eval.named import encode_items
from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources import records
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate import contamination

pytestmark = pytest.mark.fault("H17")
LIMITED = """
import pathlib, resource, sys
from jaxscale.runtime.eval.items import read_items
from jaxscale.tools.corpus.curate import contamination
import pyarrow.parquet
resource.setrlimit(resource.RLIMIT_AS, (5 << 29, 5 << 29))
for path in map(pathlib.Path, sys.argv[1:]):
    for read in (lambda: read_items([path], "cloze"), lambda: list(contamination.read_items(path, frozenset()))):
        try:
            read()
        except ValueError as error:
            print(f"{type(error).__name__} {error}")
"""


def write_lines(path, *values):
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else open(path, "w") as file:
        file.writelines(json.dumps(value) + "\n" for value in values)
    return path


@pytest.mark.slow
def test_a_small_file_does_not_take_all_memory(tmp_path):
    import pyarrow
    from pyarrow import parquet

    with gzip.open(tmp_path / "line.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b'{"context": "a", "target": "')
        for _ in range(300):
            file.write(b"b" * (1 << 20))
        file.write(b'"}\n')
    once = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000), pyarrow.array(["b" * (4 << 20)]))
    table = pyarrow.table({"context": ["a"] * 2000, "target": once})  # 8 GB where each row has its own
    parquet.write_table(table, tmp_path / "rows.parquet")
    paths = [str(tmp_path / name) for name in ("line.jsonl.gz", "rows.parquet")]
    done = subprocess.run([sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(lines) == 4 and all(line.startswith("BadInput /") for line in lines)
    assert all("line.jsonl.gz has a line of more than 8,388,608 bytes; use a part" in line for line in lines[:2])
    assert all("rows.parquet has more than 134,217,728 characters" in line for line in lines[2:])


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("MOST_RECORDS", 2, "has more than 2 records; use a part of the file"),
        ("MOST_TEXT", 90, "has more than 90 bytes"),
        ("LONGEST_LINE", 30, "has a line of more than 30 bytes"),
    ],
)
def test_each_bound_is_named_with_the_file(tmp_path, monkeypatch, name, value, told):
    path = write_lines(tmp_path / "x.jsonl.gz", *[{"context": "some", "target": " words"}] * 3)
    assert len(read_items([path], "cloze")) == 3
    monkeypatch.setattr(records, name, value)
    for read in (lambda: read_items([path], "cloze"), lambda: list(contamination.read_items(path, frozenset()))):
        with pytest.raises(BadInput, match=f"{path} {told}"):
            read()
    if name == "MOST_RECORDS":
        assert len(read_items([path], "cloze", limit=2)) == 2


def test_a_context_before_many_answers_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(items, "MAX_ITEM_CHARACTERS", 1000)
    path = write_lines(tmp_path / "x.jsonl", {"context": "c" * 100, "choices": ["a", "b"] * 5, "answer": 0})
    with pytest.raises(BadInput, match="x.jsonl:1 has 10 answers with 1,010 characters"):
        read_items([path], "choice")


def test_what_items_hold_in_memory_is_bounded_and_what_is_cut_is_given_back(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "x.jsonl", *[{"context": "c" * 9000, "target": "t"}] * 3)
    reading = EvalReading.of(ByteTokenizer(), 10)
    found = encode_items("cloze", read_items([path], "cloze"), reading)
    assert found.cut == 3 and all(span.ids.base is None or span.ids.base.nbytes < 100 for span in found.spans)
    monkeypatch.setattr(named, "MAX_IDS", 25)
    with pytest.raises(BadInput, match="x.jsonl:3: all items so far, with contexts, have more than 25 tokens"):
        encode_items("cloze", read_items([path], "cloze"), reading)


def test_text_that_is_held_in_memory_is_bounded(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("words " * 100)
    file = SourceFile(str(tmp_path / "a.txt"), "a.txt", "text")
    one = TextSet((file,), ReadConfig(), EvalReading.of(ByteTokenizer(), 10), 10)
    assert sum(len(ids) for ids, _ in one.loaded().in_memory[0]) == 600
    monkeypatch.setattr(text, "MAX_TOKENS", 500)
    with pytest.raises(
        BadInput, match="a.txt: more than 500 tokens, the maximum in memory; set `limit` to fewer documents"
    ):
        one.loaded()


@pytest.mark.parametrize("damage", ["cut short", "flipped"])
def test_a_damaged_gzip_is_one_line(tmp_path, damage):
    path = write_lines(tmp_path / "x.jsonl.gz", *[{"context": str(i), "target": " b"} for i in range(999)])
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    if damage == "flipped":
        content[len(content) // 2 :] ^= 0x55
    path.write_bytes(content[: len(content) // 2 if damage == "cut short" else None].tobytes())
    with pytest.raises(BadInput, match="x.jsonl.gz is (truncated|corrupt)"):
        read_items([path], "cloze")
