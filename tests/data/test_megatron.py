"""Megatron's pairs are read where they lie, and what is written from them is the same bytes."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.other_formats import (
    HEAD,
    TYPES,
    export_megatron,
    index_bytes,
    is_megatron,
    megatron_shard,
    read_index,
)
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.shard_writer import ShardWriter
from jaxscale.runtime.data.shards import open_shard
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.system.exits import BadInput

REAL = Path(__file__).parents[3] / "shared/corpora/web_openwebtext/meg-gpt2-openwebtext_text_document.bin"


def write_pair(folder, documents, code=8, name="pair"):
    """documents: lists of sequences, each a list of ids."""
    sequences = [sequence for document in documents for sequence in document]
    content = np.array([i for sequence in sequences for i in sequence], TYPES[code])
    (folder / f"{name}.bin").write_bytes(content.tobytes())
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    bounds = np.cumsum([0, *(len(document) for document in documents)])
    (folder / f"{name}.idx").write_bytes(index_bytes(code, lengths, bounds))
    return folder / f"{name}.bin"


def read_pair(path, tmp_path, **changes):
    said = []
    cfg = DataConfig(name="tokens", cache_dir=str(tmp_path / "cache"), **changes)
    return megatron_shard(SourceFile(str(path), Path(path).name, "text"), cfg, said.append), said


def documents_of(shard):
    ids = np.fromfile(shard.bin_path, np.dtype(shard.header["dtype"]))
    return [part.tolist() for part in np.split(ids, shard.offsets[1:-1])]


@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not there")
def test_a_real_pair_is_read_where_it_lies_and_written_again_byte_for_byte(tmp_path):
    shard, said = read_pair(REAL, tmp_path)
    assert shard.bin_path == str(REAL) and len(said) == 2
    assert shard.header["num_documents"] == 1000 and shard.header["num_tokens"] == REAL.stat().st_size // 2
    assert shard.header["max_id"] == 4999
    assert np.fromfile(REAL, "<u2")[shard.offsets[1:] - 1].tolist() == [4999] * 1000  # its end token
    export_megatron([shard], tmp_path / "out" / "again")
    for ending in (".bin", ".idx"):
        assert (tmp_path / "out" / f"again{ending}").read_bytes() == REAL.with_suffix(ending).read_bytes()
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()) < 20_000
    assert read_pair(REAL, tmp_path)[1] == []  # its index is in the cache


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=4), min_size=1, max_size=12),
    code=st.sampled_from([1, 2, 3, 4, 5, 8]),
)
def test_documents_of_many_sequences_come_out_as_they_went_in(tmp_path_factory, documents, code):
    folder = tmp_path_factory.mktemp("pair")
    path = write_pair(folder, documents, code)
    index = read_index(path.with_suffix(".idx"))
    assert index_bytes(index.code, index.lengths, index.documents) == path.with_suffix(".idx").read_bytes()
    shard, _ = read_pair(path, folder)
    assert documents_of(shard) == [sum(document, []) for document in documents]
    export_megatron([shard], folder / "flat")
    flat, _ = read_pair(folder / "flat.bin", folder)
    assert documents_of(flat) == documents_of(shard)


@pytest.mark.parametrize(("vocab_size", "code"), [(65_536, 8), (65_537, 4)])
def test_shards_of_ours_are_exported_one_after_the_other(tmp_path, vocab_size, code):
    shards = []
    for number in range(2):
        writer = ShardWriter(tmp_path, f"s{number}", vocab_size=vocab_size, eos_id=vocab_size - 1, sources=["web"])
        writer.add(np.array([number]), "web")
        writer.add(np.arange(1, 6) + number, "web")
        about = {"name": "", "eos_token": "", "vocab_size": vocab_size, "fingerprint": ""}
        header = {"tokenizer": about, "eos_id": 0, "text_bytes": 0, "skipped": {}}
        writer.finish(None, {**header, "files": []})
        shards.append(open_shard(tmp_path / f"s{number}.json"))
    export_megatron(shards, tmp_path / "out")
    assert read_index(tmp_path / "out.idx").code == code
    shard, _ = read_pair(tmp_path / "out.bin", tmp_path)
    assert documents_of(shard) == [document for one in shards for document in documents_of(one)]


def test_the_head_of_an_index_is_laid_out_as_megatron_has_it(tmp_path):
    path = write_pair(tmp_path, [[[1, 2], [3]], [[4]]]).with_suffix(".idx")
    assert path.read_bytes() == (
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 3) + struct.pack("<3i", 2, 1, 1)
        + struct.pack("<3q", 0, 4, 6) + struct.pack("<3q", 0, 2, 3)
    )  # fmt: skip


def test_a_pair_is_known_by_how_its_index_begins(tmp_path):
    path = write_pair(tmp_path, [[[1]]])
    assert is_megatron(str(path)) and is_megatron(str(path.with_suffix(".idx")))
    (tmp_path / "other.idx").write_bytes(np.zeros(4, np.int64).tobytes())
    assert not any(is_megatron(str(tmp_path / name)) for name in ("other.bin", "missing.bin", "pair.txt"))


def test_a_glob_that_matches_both_files_of_a_pair_reads_it_once(tmp_path):
    path, folder = write_pair(tmp_path, [[[1, 2], [3]], [[4]]] * 9), str(tmp_path / "cache")
    opened = lambda **files: open_data(
        DataConfig(name="tokens", val_fraction=0.0, cache_dir=folder, **files),
        seq_len=4, vocab_size=9, seed=0, say=lambda line: None,
    )  # fmt: skip
    assert opened(files=str(tmp_path / "pair.*")).train_rows.num_tokens == 36
    with pytest.raises(BadInput, match="pair.bin is in data.files and in data.val_files"):
        opened(files=str(path), val_files=str(path.with_suffix(".idx")))


def test_a_pair_that_changed_is_read_anew(tmp_path):
    shard, _ = read_pair(write_pair(tmp_path, [[[1, 2]]]), tmp_path)
    again, said = read_pair(write_pair(tmp_path, [[[1], [2]], [[3]]]), tmp_path)
    assert said and again.fingerprint != shard.fingerprint and documents_of(again) == [[1, 2], [3]]


def change(path, place, content):
    raw = bytearray(path.read_bytes())
    raw[place : place + len(content)] = content
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda idx: idx.write_bytes(b""), "is not a Megatron index"),
        (lambda idx: idx.write_bytes(idx.read_bytes()[:20]), "is not a Megatron index"),
        (lambda idx: change(idx, 0, b"X"), "is not a Megatron index"),
        (lambda idx: change(idx, 9, b"\2"), "has version 2"),
        (lambda idx: change(idx, 17, b"\x09"), "type 9"),
        (lambda idx: change(idx, 17, b"\x06"), "type 6 .float64.; token ids must be integers|are not contiguous"),
        (lambda idx: idx.write_bytes(idx.read_bytes()[:-1]), "truncated"),
        (lambda idx: idx.write_bytes(idx.read_bytes() + b"too much"), "too long"),
        (lambda idx: change(idx, HEAD.size, b"\3"), "are not contiguous"),
        (lambda idx: change(idx, HEAD.size, b"\xff\xff\xff\xff"), "are not contiguous"),
        (lambda idx: change(idx, HEAD.size + 3 * 12, b"\1"), "does not cover all 3 sequences"),
        (lambda idx: change(idx, HEAD.size + 3 * 12 + 8, b"\4"), "does not cover all 3 sequences"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, damage, told):
    path = write_pair(tmp_path, [[[1, 2], [3]], [[4]]])
    damage(path.with_suffix(".idx"))
    with pytest.raises(ValueError, match=rf"pair\.idx.*({told})"):
        read_pair(path, tmp_path)


def test_a_multimodal_set_is_refused(tmp_path):
    path = write_pair(tmp_path, [[[1, 2], [3]], [[4]]])
    path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes() + b"\0\1\0")
    with pytest.raises(ValueError, match="multimodal"):
        read_pair(path, tmp_path)


@pytest.mark.parametrize(("content", "told"), [(b"\1\0", "truncated"), (b"\0" * 10, "too long"), (None, "cannot be")])
def test_tokens_that_do_not_fit_their_index_are_named(tmp_path, content, told):
    path = write_pair(tmp_path, [[[1, 2], [3]], [[4]]])
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"pair\.bin .*{told}"):
        read_pair(path, tmp_path)


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_negative_ids_are_refused(tmp_path, code):
    path = write_pair(tmp_path, [[[1, -2]]], code)
    with pytest.raises(ValueError, match=r"pair\.bin has negative ids"):
        read_pair(path, tmp_path)
