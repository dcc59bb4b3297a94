"""Documents go into ArrayRecord files and come out of them unchanged."""

import sys

import numpy as np
import pytest
from damage import verify_shard
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("array_record", reason="array_record is not installed")

from jaxscale import schema
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.other_formats import export_array_record, import_array_record, read_records  # noqa: E402
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.shard_writer import ShardWriter  # noqa: E402
from jaxscale.runtime.data.shards import open_shard  # noqa: E402
from jaxscale.runtime.text.sources.data_sets import load_package
from jaxscale.runtime.text.sources.files import SourceFile


def write_shard(folder, name, documents, vocab_size):
    writer = ShardWriter(folder, name, vocab_size=vocab_size, eos_id=0, sources=["web"])
    for ids in documents:
        writer.add(np.array(ids, np.uint32), "web")
    about = {"name": "", "eos_token": "", "vocab_size": vocab_size, "fingerprint": ""}
    files = [{"name": name, "source": "web", "documents": len(documents)}]
    writer.finish(None, {"tokenizer": about, "eos_id": 0, "text_bytes": 0, "skipped": {}, "files": files})
    return open_shard(folder / f"{name}.json")


def write_records(path, records):
    writer = load_package().ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


@settings(max_examples=15, deadline=None)
@given(
    vocab_size=st.sampled_from([60_000, 200_000]),
    documents=st.lists(st.lists(st.integers(1, 59_999), max_size=20), min_size=1, max_size=30),
)
def test_a_shard_goes_out_and_comes_back_the_same(tmp_path_factory, vocab_size, documents):
    folder = tmp_path_factory.mktemp("records")
    shard = write_shard(folder, "here", documents, vocab_size)
    assert export_array_record([shard], folder / "a.array_record") == len(documents)
    dtype = shard.header["dtype"]
    records = [np.frombuffer(record, dtype).tolist() for record in read_records(folder / "a.array_record")]
    assert records == [[*ids, 0] for ids in documents]
    file = SourceFile(str(folder / "a.array_record"), "a.array_record", "web")
    import_array_record(file, folder, dtype=dtype, vocab_size=vocab_size, eos_id=0)
    verify_shard(folder / "tokens.json")
    assert open_shard(folder / "tokens.json").fingerprint == shard.fingerprint


def test_more_records_than_are_read_together_come_in_order(tmp_path):
    path = write_records(tmp_path / "many", [str(i).encode() for i in range(5000)])
    assert list(read_records(path)) == [str(i).encode() for i in range(5000)]


def test_every_record_has_a_group_of_its_own(tmp_path):
    shard = write_shard(tmp_path, "here", [[1], [2]], 300)
    export_array_record([shard], tmp_path / "a")
    reader = load_package().ArrayRecordReader(str(tmp_path / "a"))
    assert "group_size:1" in reader.writer_options_string()
    reader.close()


def test_a_run_reads_a_file_of_ids_by_its_documents(tmp_path):
    shard = write_shard(tmp_path, "here", [[1, 2, 3], [4, 5]], 300)
    export_array_record([shard], tmp_path / "set.array_record")
    values = {"name": "tokens", "files": str(tmp_path / "set.array_record"), "cache_dir": str(tmp_path / "cache")}
    opened = lambda **more: open_data(
        schema.from_dict(DataConfig, values | {"val_fraction": 0.0} | more), seq_len=4, vocab_size=300, seed=0
    )
    (_, lengths), *_ = opened(eos_id=0).train_rows.documents.members("train", 0)
    assert sorted(lengths.tolist()) == [3, 4]
    with pytest.raises(ValueError, match="requires an end-of-document id; set data.eos_id"):
        opened()


@pytest.mark.fault("F24")
def test_a_record_that_does_not_fit_is_named(tmp_path):
    make = dict(dtype="uint16", vocab_size=300, eos_id=0)
    path = write_records(tmp_path / "odd", [b"\1\0", b"\1\0\2"])
    with pytest.raises(ValueError, match="odd: record 1 has 3 bytes, which is not a multiple of the size of uint16"):
        import_array_record(SourceFile(str(path), path.name, "web"), tmp_path, **make)
    path = write_records(tmp_path / "beyond", [b"\1\0", b"\xff\xff"])
    with pytest.raises(ValueError, match="beyond: record 1: token id 65535 .* outside the vocabulary of 300 ids"):
        import_array_record(SourceFile(str(path), path.name, "web"), tmp_path, **make)
    assert not (tmp_path / "tokens.json").exists()


@pytest.mark.fault("F24")
def test_a_file_that_is_missing_cut_or_of_another_kind_is_named(tmp_path):
    with pytest.raises(ValueError, match="none does not exist"):
        list(read_records(tmp_path / "none"))
    whole = write_records(tmp_path / "whole", [bytes([i % 256]) * 1000 for i in range(300)]).read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text").write_text("no records here\n" * 10_000)
    for name in ("cut", "text"):
        with pytest.raises(ValueError, match=f"{name} is not a complete ArrayRecord file"):
            list(read_records(tmp_path / name))


def test_shards_of_two_types_do_not_share_a_file(tmp_path):
    shards = [write_shard(tmp_path, f"s{size}", [[1]], size) for size in (300, 70_000)]
    with pytest.raises(ValueError, match="cannot contain shards of uint16 and uint32"):
        export_array_record(shards, tmp_path / "a")


def test_without_the_package_the_way_out_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxscale\[prepare\]'"):
        load_package()
