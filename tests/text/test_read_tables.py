"""Parquet, Arrow and ArrayRecord: rows in order, in parts, bounded, and damage named."""

import json
import struct
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.data_sets import example
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.jsonl import MISSING
from jaxscale.runtime.text.sources.read import read_file, split_file


def read(path, part=None, **changes):
    """(documents, what was skipped)."""
    skipped = Counter()
    found = read_file(SourceFile(str(path), path.name, "s"), ReadConfig(**changes), skipped, *([part] if part else []))
    return list(found), dict(skipped)


def assert_parts_are_the_whole(path, part_bytes, **changes):
    file, cfg = SourceFile(str(path), path.name, "s"), ReadConfig(**changes)
    again, counted = [], Counter()
    for part in split_file(file, cfg, part_bytes):
        again += read_file(file, cfg, counted, part)
    assert (again, dict(counted)) == read(path, **changes)


TABLE = {
    "text": ["one", None, "", "two é", "x" * 5000],
    "id": [7, 8, 9, None, 11],
    "url": ["http://a", "", "", "http://b", None],
    "meta": [{"lang": "en", "text": f"inner {i}"} for i in range(5)],
}


def test_rows_keep_their_number_id_and_address(tmp_path):
    table = pyarrow.table(TABLE)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with pyarrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with pyarrow.OSFile(str(tmp_path / "c.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        documents, skipped = read(tmp_path / name, licence="CC0-1.0")
        found = [(document.offset, document.id, document.url, len(document.text)) for document in documents]
        assert found == [(0, "7", "http://a", 3), (3, "", "http://b", 5), (4, "11", "", 5000)], name
        assert skipped == {"empty": 2} and documents[0].licence == "CC0-1.0"
        inner = read(tmp_path / name, text_field="meta.text", id_field="meta.lang")[0]
        assert [document.text for document in inner] == [f"inner {i}" for i in range(5)] and inner[0].id == "en"


@settings(max_examples=12, deadline=None)
@given(st.lists(st.text(max_size=30), max_size=30), st.integers(1, 9), st.integers(1, 400))
def test_the_parts_of_a_parquet_file_are_the_whole(tmp_path_factory, texts, rows, part_bytes):
    path = tmp_path_factory.mktemp("table") / "a.parquet"
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(texts, "string")}), path, row_group_size=rows)
    assert_parts_are_the_whole(path, part_bytes, invalid_utf8="repair")


@pytest.mark.fault("F24")
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "b.arrow"])
def test_a_table_that_is_cut_short_or_broken_is_named_or_counted(tmp_path, name):
    path = tmp_path / name
    table = pyarrow.table({"text": [f"text number {i * 7919 % 10007}" for i in range(20_000)]})
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, path, row_group_size=1000, compression="zstd")
    else:
        make = pyarrow.ipc.new_stream if name == "a.arrow" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    content = path.read_bytes()
    assert len(read(path)[0]) == 20_000
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        ValueError, match=f"{name} (cannot be read as|is corrupt shortly after row 9,000).*set damaged='skip'"
    ):
        read(path)
    documents, skipped = read(path, damaged="skip")
    assert len(documents) == (9000 if name == "a.arrow" else 0) and skipped == {"files cut short or broken": 1}
    assert split_file(SourceFile(str(path), name, "s"), ReadConfig(damaged="skip"), 1000)
    if name == "a.parquet":
        broken = bytearray(content)
        broken[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="a.parquet is corrupt shortly after row .*damaged='skip'"):
            read(path)
        assert 5000 < len(read(path, damaged="skip")[0]) < 15_000


@pytest.mark.fault("H5")
def test_a_table_whose_few_bytes_hold_much_text_is_read_in_little_memory(tmp_path):
    path = tmp_path / "a.parquet"
    many = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 300, "int32"), pyarrow.array(["ab" * (1 << 19)]))
    pyarrow.parquet.write_table(pyarrow.table({"text": many}), path, store_schema=False)
    assert path.stat().st_size < 3 << 20
    before = pyarrow.total_allocated_bytes()
    pool, size = pyarrow.default_memory_pool(), 0
    for document in read_file(SourceFile(str(path), "a", "s"), ReadConfig(), Counter()):
        size += len(document.text)
    assert size == 300 << 20 and pool.max_memory() - before < 60 << 20


@pytest.mark.fault("F24", "H5")
def test_a_table_that_unpacks_to_too_much_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a" * (1 << 20) + str(i) for i in range(80)]})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    with pytest.raises(ValueError, match="a.parquet exceeds .* of its row group 0 decompress to 83,.*remove it"):
        read(path)
    assert len(read(path, max_unpacked_ratio=1e6)[0]) == 80


def test_an_id_that_is_no_utf8_is_replaced(tmp_path):
    ids = pyarrow.array([b"a", b"\xff"]).view("string")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", "y"], "id": ids}), tmp_path / "a.parquet")
    assert [document.id for document in read(tmp_path / "a.parquet")[0]] == ["a", "\ufffd"]


def write_records(path, records):
    module = pytest.importorskip("array_record.python.array_record_module", reason="array_record is not installed")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def as_example(**features):
    """A tf.train.Example of byte features."""

    def field(number, content):
        assert len(content) < 128
        return bytes([number << 3 | 2, len(content)]) + content

    entries = b"".join(
        field(1, field(1, name.encode()) + field(2, field(1, field(1, value.encode()))))
        for name, value in features.items()
    )
    other = field(1, field(1, b"count") + field(2, field(3, b"\x0a\x01\x05")) + b"\x18\x07\x25" + struct.pack("<f", 1))
    return field(1, entries + other)


@pytest.mark.parametrize("form", ["text", "json", "example"])
def test_array_records_are_read_whole_and_in_parts(tmp_path, form):
    texts = [f"record {i} é" for i in range(50)]
    make = {
        "text": str.encode,
        "json": lambda text: json.dumps({"text": text, "id": text[:8]}).encode(),
        "example": lambda text: as_example(text=text, id=text[:8]),
    }[form]
    path = tmp_path / "a.array_record-00000-of-00001"
    write_records(path, map(make, texts))
    documents, skipped = read(path, record_format=form)
    assert [document.text for document in documents] == texts and not skipped
    assert [document.offset for document in documents] == list(range(50))
    assert documents[3].id == ("" if form == "text" else "record 3")
    for part_bytes in (1, 500, 10**9):
        assert_parts_are_the_whole(path, part_bytes, record_format=form)


@pytest.mark.fault("F24")
def test_array_records_that_are_not_as_told_are_named(tmp_path):
    path = tmp_path / "a.array_record"
    write_records(path, [b'{"text": "a"}', b"plain", b'{"body": 1}'])
    with pytest.raises(ValueError, match="a.array_record record 1 is not JSON"):
        read(path, record_format="json")
    with pytest.raises(ValueError, match="a.array_record record 0 is not a tf.train.Example"):
        read(path, record_format="example")
    assert read(path, record_format="json", damaged="skip")[1] == {
        "not JSON": 1, "without text field": 1, "bytes left out": 16,
    }  # fmt: skip
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="a.array_record cannot be read as ArrayRecord"):
        read(path)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_example_end_in_an_answer(content):
    found = example(content, ReadConfig(damaged="skip"), skipped := Counter(), "record 0")
    lost = {"not tf.train.Example": 1, "bytes left out": len(content)}
    assert skipped == lost if found is MISSING else isinstance(found, dict) and not skipped
