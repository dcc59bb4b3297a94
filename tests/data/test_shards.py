"""Shards at rest: what is written is what is read, and whatever was changed since is named."""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import pytest
from damage import verify_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from lineages import read_lineage

from jaxscale.runtime.data.shard_writer import ShardWriter, lineage_bytes, lineage_table
from jaxscale.runtime.data.shards import SUFFIXES, open_shard

TOKENIZER = {"name": "bytes", "eos_token": "", "vocab_size": 257, "fingerprint": "f"}


class Doc(NamedTuple):
    """As much of a Document as the lineage looks at."""

    file: str = "a.jsonl"
    offset: int = 0
    id: str = ""
    url: str = ""
    licence: str = ""
    language: str = ""
    scores: tuple = ()


def header(documents=0, source="web"):
    files = [{"name": "a.jsonl", "source": source, "documents": documents}]
    return {"tokenizer": TOKENIZER, "eos_id": 256, "text_bytes": 0, "skipped": {}, "files": files}


def write_shard(
    folder, documents, name="shard", *, vocab_size=257, eos_id=256, sources=("web",), lineage=None, marked=False
):
    """The path of a shard of the documents, each a list of ids. marked: all but the first is learned."""
    writer = ShardWriter(folder, name, vocab_size=vocab_size, eos_id=eos_id, sources=sources, trained=marked)
    for ids in documents:
        writer.add(np.array(ids, np.int32), sources[0], np.arange(len(ids) + 1) > 0 if marked else None)
    writer.finish(np.ones(vocab_size, np.int32), header(len(documents), sources[0]), lineage)
    return Path(folder) / f"{name}.json"


def documents_of(shard):
    ids = np.fromfile(shard.bin_path, np.dtype(shard.header["dtype"]))
    return [part.tolist() for part in np.split(ids, shard.offsets[1:-1])]


@settings(max_examples=40, deadline=None)
@given(
    vocab_size=st.sampled_from([300, 65_536, 65_537, 2_000_000, 2**32]),
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_documents_written_one_by_one_or_in_blocks_are_the_documents_read(
    tmp_path_factory, vocab_size, shapes, cuts, seed
):
    folder, draw, eos_id = tmp_path_factory.mktemp("shard"), np.random.default_rng(seed), vocab_size - 1
    documents = [draw.integers(0, vocab_size, length, dtype=np.uint32) for length, _ in shapes]
    numbers = [number for _, number in shapes]
    sources = [("web", "code", "books")[number] for number in numbers]
    make = dict(vocab_size=vocab_size, eos_id=eos_id, sources=["web", "code", "books"])
    single, block = ShardWriter(folder, "single", **make), ShardWriter(folder, "block", **make)
    for ids, source in zip(documents, sources):
        single.add(ids, source)
    edges = sorted({0, len(documents), *(min(cut, len(documents)) for cut in cuts)})
    for first, last in zip(edges, edges[1:]):
        part = [np.append(ids, np.uint32(eos_id)) for ids in documents[first:last]]
        block.add_block(np.concatenate(part), [len(ids) for ids in part], numbers[first:last])
    for writer in (single, block):
        writer.finish(None, header(len(documents)))
    shards = [open_shard(folder / f"{name}.json") for name in ("single", "block")]
    assert shards[0].header["sha256"] == shards[1].header["sha256"]
    assert shards[0].fingerprint == shards[1].fingerprint
    assert shards[1].header["dtype"] == ("uint16" if vocab_size <= 65_536 else "uint32")
    assert shards[1].header["max_id"] == eos_id
    assert documents_of(shards[1]) == [[*ids.tolist(), eos_id] for ids in documents]
    assert [shards[1].header["sources"][number] for number in shards[1].source_ids] == sources
    verify_shard(folder / "block.json")


def test_an_empty_block_changes_nothing(tmp_path):
    writer = ShardWriter(tmp_path, "s", vocab_size=10, eos_id=9, sources=["a", "b"])
    writer.add_block(np.array([0, 9, 1, 2, 9]), [2, 3], [1, 1])
    writer.add_block(np.zeros(0, np.uint16), [], [])
    assert (writer.num_documents, writer.num_tokens) == (2, 5)
    writer.finish(None, header(2))
    assert open_shard(tmp_path / "s.json").source_ids.tolist() == [1, 1]


@pytest.mark.fault("F24")
@pytest.mark.parametrize("bad", [300, 256 + 2**16, 257, -1])
def test_an_id_beyond_the_vocabulary_is_named_and_nothing_of_it_is_written(tmp_path, bad):
    writer = ShardWriter(tmp_path, "s", vocab_size=257, eos_id=256, sources=["web"])
    writer.add(np.array([1, 2]), "web")
    with pytest.raises(
        ValueError, match=rf"token id {bad} in document 1 of .*s\.bin is outside the vocabulary of 257 ids"
    ):
        writer.add(np.array([3, bad]), "web")
    with pytest.raises(ValueError, match=rf"token id {bad} in document 3 of .*s\.bin"):
        writer.add_block(np.array([256, 1, 2, 256, 3, bad, 256]), [1, 3, 3], [0, 0, 0])
    writer.add(np.array([4]), "web")
    writer.finish(None, header(2))
    assert documents_of(open_shard(tmp_path / "s.json")) == [[1, 2, 256], [4, 256]]


def test_an_end_token_beyond_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the end token 257 is outside the vocabulary of 257 ids"):
        ShardWriter(tmp_path, "s", vocab_size=257, eos_id=257, sources=["web"])


@pytest.mark.parametrize(
    ("lengths", "sources", "told"),
    [
        ([1, 1], [0, 0], "the lengths of 2 documents do not sum to 3 ids"),
        ([3, 0], [0, 0], "the lengths of 2 documents do not sum to 3 ids"),
        ([1, 2], [0, 0], "does not end with the end token 256"),
        ([1, 2], [0], "1 source numbers must be 2 indices"),
        ([1, 2], [0, 1], "2 source numbers must be 2 indices"),
    ],
)
def test_a_block_that_does_not_fit_together_is_refused(tmp_path, lengths, sources, told):
    writer = ShardWriter(tmp_path, "s", vocab_size=257, eos_id=256, sources=["web"])
    with pytest.raises(ValueError, match=told):
        writer.add_block(np.array([1, 2, 256]), lengths, sources)
    with pytest.raises(ValueError, match="source 'books' is not one of"):
        writer.add(np.array([1]), "books")
    assert (writer.num_documents, writer.num_tokens) == (0, 0)
    writer.abandon()


def test_the_lineage_of_every_document_is_kept(tmp_path):
    docs = [
        Doc(offset=7, id="x", url="http://u", licence="CC0", language="en", scores=(("toxicity", 0.5),)),
        Doc(file="b.parquet", offset=2**40, scores=(("quality", 1.0),)),
    ]
    path = write_shard(tmp_path, [[1], [2]], lineage=lineage_table(docs))
    rows = read_lineage(open_shard(path)).to_pylist()
    empty = {"id": "", "url": "", "licence": "", "language": ""}
    assert rows == [
        {"file": "a.jsonl", "offset": 7, "id": "x", "url": "http://u", "licence": "CC0", "language": "en",
         "score.quality": None, "score.toxicity": 0.5},
        {"file": "b.parquet", "offset": 2**40, **empty, "score.quality": 1.0, "score.toxicity": None},
    ]  # fmt: skip
    file_column = read_lineage(open_shard(path)).schema.field("file")
    assert file_column.type.value_type == pyarrow.string()


def test_equal_lineage_gives_equal_bytes_however_the_table_was_put_together():
    docs = [Doc(file=f"{i % 3}.txt", offset=i, scores=(("b", i), ("a", i / 3))) for i in range(50)]
    whole = lineage_table(docs)
    parts = pyarrow.concat_tables([lineage_table(docs[:20]), lineage_table(docs[20:])])
    dictionary = pyarrow.DictionaryArray.from_arrays([i % 3 for i in range(50)], ["0.txt", "1.txt", "2.txt"])
    renumbered = pyarrow.DictionaryArray.from_arrays([2 - i % 3 for i in range(50)], ["2.txt", "1.txt", "0.txt"])
    variants = [whole, parts, whole.select(reversed(whole.column_names))]
    variants += [whole.set_column(0, "file", column) for column in (dictionary, renumbered)]
    variants += [whole.replace_schema_metadata({"pandas": "{}"})]
    assert len({lineage_bytes(table, 50) for table in variants}) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda table: table.slice(1), "has 1 rows for 2 documents"),
        (lambda table: table.drop_columns(["offset"]), r"lacks the columns \['offset'\]"),
        (lambda table: table.set_column(1, "offset", pyarrow.array(["a", "b"])), "'offset' has type string, not int64"),
        (lambda table: table.append_column("score", pyarrow.array(["high", "low"])), "column 'score' has type string"),
        (lambda table: table.append_column("id", table["id"]), "duplicate columns"),
    ],
)  # fmt: skip
def test_a_lineage_that_does_not_fit_is_refused_before_the_header_is_written(tmp_path, change, told):
    with pytest.raises(ValueError, match=told):
        write_shard(tmp_path, [[1], [2]], lineage=change(lineage_table([Doc(), Doc()])))
    assert not (tmp_path / "shard.json").exists()


@pytest.fixture
def shard_path(tmp_path):
    return write_shard(tmp_path, [[1, 2, 3], [4]], lineage=lineage_table([Doc(), Doc()]), marked=True)


@pytest.mark.fault("H10")
@pytest.mark.parametrize("ending", SUFFIXES.values())
@pytest.mark.parametrize("damage", ["gone", "cut", "longer", "flipped"])
def test_every_damage_to_every_file_is_found_and_named(shard_path, ending, damage):
    file = shard_path.with_suffix(ending)
    verify_shard(shard_path)
    content = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        changed = {"cut": content[:-1], "longer": content + b"\0", "flipped": content}[damage]
        file.write_bytes(changed)
    with pytest.raises(ValueError, match=rf"shard{ending.replace('.', '[.]')}"):
        verify_shard(shard_path)


def test_a_lineage_that_is_gone_is_named(shard_path):
    shard_path.with_suffix(".docs.parquet").unlink()
    with pytest.raises(ValueError, match="shard.docs.parquet cannot be read: .*No such file"):
        read_lineage(open_shard(shard_path))


def test_a_shard_that_was_moved_is_the_same_shard(shard_path, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in shard_path.parent.glob("shard.*"):
        shutil.copy(file, moved / file.name)
    verify_shard(moved / "shard.json")
    assert open_shard(moved / "shard.json").fingerprint == open_shard(shard_path).fingerprint
