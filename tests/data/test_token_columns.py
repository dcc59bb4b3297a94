"""Token ids in columns: a run trains on the ids that a plain reader finds there, and on nothing else."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from lineages import read_lineage

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.ledger import Ledger
from jaxscale.runtime.data.objective_config import PrefixLmConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.remote import map_ids
from jaxscale.system.exits import BadInput

SEED = np.random.default_rng(0)
DOCUMENTS = [SEED.integers(0, 50_000, SEED.integers(1, 60)).tolist() for _ in range(200)]
EQUAL = [SEED.integers(0, 50_000, 16).tolist() for _ in range(60)]
LISTS = {
    "list": pyarrow.list_(pyarrow.int64()),
    "large_list": pyarrow.large_list(pyarrow.int32()),
    "uint16": pyarrow.list_(pyarrow.uint16()),
    "list_view": pyarrow.list_view(pyarrow.int32()),
    "fixed_size_list": pyarrow.list_(pyarrow.int32(), 16),
}


def write_table(path, table, kind="parquet"):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=37)
    elif kind == "saved":
        datasets = pytest.importorskip("datasets", reason="datasets is not installed")
        datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        make = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=23)
    return str(path)


def opened(tmp_path, files, said=None, vocab_size=50_000, seq_len=32, **changes):
    cfg = DataConfig(**{**dict(files=files, cache_dir=str(tmp_path / "cache"), val_fraction=0.0), **changes})
    say = (said if said is not None else []).append
    return open_data(cfg, seq_len=seq_len, vocab_size=vocab_size, seed=0, say=say)


def documents_of(corpus):
    """The ids of each document in the shards, in order."""
    found = []
    for shard in corpus.shards:
        ids = np.asarray(map_ids(shard.bin_path, shard.header["dtype"])[:])
        found += [part.tolist() for part in np.split(ids, shard.offsets[1:-1])]
    return found


def documents_in_rows(corpus):
    """What training reads of each document, from the rows of one epoch: the pieces of packed rows, sorted."""
    batch = corpus.batches(len(corpus.train_rows)).batch(0)
    pieces = []
    for row in range(len(batch.tokens)):
        for number in range(1, int(batch.segment_ids[row].max()) + 1):
            pieces.append(batch.tokens[row][batch.segment_ids[row] == number].tolist())
    return sorted(pieces)


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in LISTS
        for kind in ("parquet", "file", "stream")
        if (name, kind) != ("list_view", "parquet")
    ],
)
def test_every_type_of_list_is_read_as_a_plain_reader_does(tmp_path, name, kind):
    documents = EQUAL if name == "fixed_size_list" else DOCUMENTS
    column = pyarrow.array([*documents[:50], None, *documents[50:]], LISTS[name])
    path = write_table(tmp_path / f"ids.{'parquet' if kind == 'parquet' else 'arrow'}",
                       pyarrow.table({"input_ids": column}), kind)  # fmt: skip
    corpus = opened(tmp_path, path, said := [])
    assert documents_of(corpus) == documents
    assert corpus.tokenizer is None and "skipped 1 empty" in corpus.summary
    assert f"{path}: token ids from 'input_ids', because no field 'text' has text" in said


@pytest.mark.parametrize("kind", ["saved", "jsonl", "hf"])
def test_datasets_and_json_lines_are_read_as_a_plain_reader_does(tmp_path, kind):
    table = pyarrow.table({"input_ids": DOCUMENTS, "url": [f"http://{i}" for i in range(len(DOCUMENTS))]})
    if kind == "hf":
        pytest.importorskip("datasets", reason="datasets is not installed")
        write_table(tmp_path / "folder" / "a.parquet", table)
        corpus = opened(tmp_path, f"{tmp_path}/folder?split=train", name="hf")
    else:
        corpus = opened(tmp_path, write_table(tmp_path / f"ids.{kind}", table, kind))
    assert documents_of(corpus) == DOCUMENTS
    assert read_lineage(corpus.shards[0]).column("url").to_pylist() == table.column("url").to_pylist()


def test_files_of_several_types_in_one_source_are_read_in_order(tmp_path):
    for i, kind in enumerate((pyarrow.int32(), pyarrow.int64(), pyarrow.uint32())):
        column = pyarrow.array(DOCUMENTS[i * 50 : i * 50 + 50], pyarrow.list_(kind))
        write_table(tmp_path / "set" / f"{i}.parquet", pyarrow.table({"input_ids": column}))
    assert documents_of(opened(tmp_path, f"{tmp_path}/set/*.parquet")) == DOCUMENTS[:150]


def test_rows_hold_the_documents_and_a_document_ends_where_its_row_does(tmp_path):
    corpus = opened(tmp_path, write_table(tmp_path / "a.parquet", pyarrow.table({"input_ids": DOCUMENTS})), seq_len=64)
    assert documents_in_rows(corpus) == sorted(DOCUMENTS)
    batch = corpus.batches(len(corpus.train_rows)).batch(0)
    ends = (batch.segment_ids[:, :-1] != batch.segment_ids[:, 1:]) & (batch.segment_ids[:, :-1] > 0)
    assert ends.any() and not batch.weights[:, :-1][ends].any()  # no token learns the next document


def test_readers_on_other_hosts_and_after_a_resume_get_the_same_batches(tmp_path):
    path = write_table(tmp_path / "a.parquet", pyarrow.table({"input_ids": DOCUMENTS}))
    first, again = (opened(tmp_path, path, seq_len=16).batches(8) for _ in range(2))
    for number in (0, 3, 61):  # far behind the first epoch too
        whole = first.batch(number)
        for rows in ([0, 1, 2, 3], [4, 5, 6, 7], [6, 1]):
            part = again.rows(number, rows)
            for name in ("tokens", "targets", "weights", "segment_ids", "positions"):
                np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[rows])


def test_labels_tell_what_is_learned_and_masks_what_is_padding(tmp_path):
    ids = [[7, 8, 9, 10, 0, 0], [0, 0, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], [3, 3, 3, 3, 3, 3]]
    labels = [[-100, -100, 9, 10, -100, -100], [-100] * 4 + [7, 8], [1, 2, 3, 4, 5, 6], [-100] * 6]
    masks = [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1] * 6, [1] * 6]
    rows = [dict(input_ids=i, labels=own, attention_mask=m) for i, own, m in zip(ids, labels, masks)]
    table = pyarrow.Table.from_pylist(rows)
    for kind, name in (("parquet", "a.parquet"), ("jsonl", "b.jsonl")):
        path = write_table(tmp_path / name, table, kind)
        corpus = opened(tmp_path, path, said := [], seq_len=8, vocab_size=50)
        assert documents_of(corpus) == [[7, 8, 9, 10], [5, 6, 7, 8], [1, 2, 3, 4, 5, 6]]
        assert np.fromfile(corpus.shards[0].loss_mask_path, np.uint8).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, *[1] * 6]
        assert "skipped 1 no label to learn" in corpus.summary
        assert any("'labels' is the loss mask; padding in 'attention_mask' is removed" in line for line in said)
        batch = corpus.batches(len(corpus.train_rows)).batch(0)
        learned = sorted(batch.targets[batch.weights > 0].tolist())
        assert learned == sorted([9, 10, 7, 8, 2, 3, 4, 5, 6])


def test_labels_in_a_later_file_alone_are_read_too(tmp_path):
    write_table(tmp_path / "set" / "a.parquet", pyarrow.table({"input_ids": [[1, 2, 3]] * 4}))
    table = pyarrow.table({"input_ids": [[4, 5, 6]], "labels": [[-100, -100, 6]]})
    write_table(tmp_path / "set" / "b.parquet", table)
    corpus = opened(tmp_path, f"{tmp_path}/set/*.parquet", seq_len=4)
    assert np.fromfile(corpus.shards[0].loss_mask_path, np.uint8).tolist() == [1] * 12 + [0, 0, 1]
    with pytest.raises(BadInput, match="a.parquet has a loss mask, which data.objective.name='prefix_lm'"):
        opened(tmp_path, f"{tmp_path}/set/*.parquet", seq_len=4, objective=PrefixLmConfig())


BAD = [
    (dict(input_ids=[1, 2], labels=[1]), "has 1 labels for 2 token ids"),
    (
        dict(input_ids=[1, 2], labels=[2, 3]),
        r"has labels\[0\]=2, but token id 1 at the same index; a label must equal its token id",
    ),
    (dict(input_ids=[1, 2, 3], attention_mask=[1, 0, 1]), "has padding between tokens in its attention_mask"),
    (dict(input_ids=[1, 2, 3], attention_mask=[1, 1, 2]), "has 2 in its attention_mask; use 1 for tokens"),
    (dict(input_ids=[1, None, 3]), "'input_ids' is not a list of integers"),
    (dict(input_ids=[1, 50_000]), "has the token id 50000|contains token id 50000"),
    (dict(input_ids=[1, -1]), "has the token id -1"),
]


@pytest.mark.fault("F24")
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(("row", "told"), BAD)
def test_a_row_that_is_malformed_is_named_with_its_file(tmp_path, kind, row, told):
    good = {name: [1, 1] for name in row}
    path = write_table(tmp_path / f"a.{kind}", pyarrow.Table.from_pylist([good, good, row, good]), kind)
    place = f"a.{kind} {'row 2' if kind == 'parquet' else 'line 3'}"
    with pytest.raises(BadInput, match=told) as error:
        opened(tmp_path, path, seq_len=4)
    assert place in str(error.value) and "\n" not in str(error.value)
    if "token id" not in told or "labels" in told:  # an id beyond the vocabulary is never skipped
        corpus = opened(tmp_path, path, seq_len=4, damaged="skip")
        assert "3 documents" in corpus.summary and "skipped 1 without token ids" in corpus.summary


def test_ids_beyond_a_smaller_model_are_named_out_of_the_cache_too(tmp_path):
    path = write_table(tmp_path / "a.parquet", pyarrow.table({"input_ids": [[1, 2], [3, 40], [4, 5]]}))
    opened(tmp_path, path, seq_len=2, vocab_size=50)
    with pytest.raises(BadInput, match=r"a.parquet row 1 contains token id 40, but the model has model.vocab_size=30"):
        opened(tmp_path, path, seq_len=2, vocab_size=30)


def test_a_column_of_another_type_is_not_taken_for_ids(tmp_path):
    path = write_table(tmp_path / "a.parquet", pyarrow.table({"input_ids": [[1.5], [2.5]], "other": ["a", "b"]}))
    with pytest.raises(
        BadInput, match="no column 'text'; its columns are input_ids, other; set data.text_field or data.ids_field"
    ):
        opened(tmp_path, path)
    with pytest.raises(BadInput, match="has no lists of integers in 'input_ids'; its fields are input_ids, other"):
        opened(tmp_path, path, ids_field="input_ids")
    with pytest.raises(BadInput, match="has no field 'ids'; its fields are input_ids, other; set data.ids_field"):
        opened(tmp_path, path, ids_field="ids")


def test_text_goes_first_unless_ids_are_asked_for_and_both_are_named(tmp_path):
    table = pyarrow.table({"text": ["some text"] * 40, "input_ids": [[i, 2, 3, 4] for i in range(40)]})
    path = write_table(tmp_path / "a.parquet", table)
    text = opened(tmp_path, path, said := [])
    assert f"{path}: text from 'text'; ignored: input_ids (token ids: data.ids_field='input_ids')" in said
    ids = opened(tmp_path, path, said, ids_field="input_ids")
    assert f"{path}: token ids from 'input_ids'; ignored: text (text)" in said
    assert documents_of(ids) == table.column("input_ids").to_pylist() and text.fingerprint != ids.fingerprint


@pytest.mark.parametrize("kind", ["parquet", "file", "saved", "jsonl"])
def test_dotted_names_reach_fields_inside_others(tmp_path, kind):
    rows = [{"doc": {"ids": [i, 1, 2], "labels": [-100, 1, 2], "body": f"body {i}"}} for i in range(40)]
    path = write_table(tmp_path / f"a.{kind.replace('file', 'arrow')}", pyarrow.Table.from_pylist(rows), kind)
    ids = opened(tmp_path, path, ids_field="doc.ids")
    assert documents_of(ids) == [row["doc"]["ids"] for row in rows]
    assert np.fromfile(ids.shards[0].loss_mask_path, np.uint8).tolist() == [0, 1, 1] * 40
    text = opened(tmp_path, path, text_field="doc.body")
    assert [bytes(one[:-1]).decode() for one in documents_of(text)] == [row["doc"]["body"] for row in rows]


def test_a_dotted_name_into_a_column_of_text_is_one_line(tmp_path):
    path = write_table(tmp_path / "a.parquet", pyarrow.table({"doc": ["a", "b"]}))
    with pytest.raises(BadInput, match=r"has no column 'doc.body'; its columns are doc; set data.text_field"):
        opened(tmp_path, path, text_field="doc.body")


def test_a_tokenizer_that_is_named_counts_bytes_and_ends_and_refuses_ids_it_does_not_have(tmp_path):
    path = write_table(tmp_path / "a.parquet", pyarrow.table({"input_ids": [[5, 6, 256], [5, 6, 7], [8, 9, 256]] * 9}))
    corpus = opened(tmp_path, path, said := [], vocab_size=300, seq_len=4, tokenizer="bytes")
    assert corpus.tokenizer is not None and corpus.shards[0].header["text_bytes"] == 7 * 9
    assert corpus.shards[0].header["dtype"] == "uint16"
    assert "token ids are unchanged: 18 of 27 documents end with the end token (256)" in said
    beyond = write_table(tmp_path / "b.parquet", pyarrow.table({"input_ids": [[5], [260]]}))
    with pytest.raises(
        BadInput, match=r"b.parquet row 1 has the token id 260, but data.tokenizer=bytes has ids from 0 to 256"
    ):
        opened(tmp_path, beyond, vocab_size=300, seq_len=1, tokenizer="bytes")


def test_ids_beside_text_need_the_tokenizer_by_name(tmp_path):
    ids = write_table(tmp_path / "a.parquet", pyarrow.table({"input_ids": [[1, 2, 3]] * 40}))
    text = write_table(tmp_path / "b.parquet", pyarrow.table({"text": ["abc"] * 40}))
    with pytest.raises(
        BadInput, match="a.parquet contains token ids, and .*b.parquet contains text; set data.tokenizer"
    ):
        opened(tmp_path, (ids, text))
    with pytest.raises(BadInput, match="mix token ids and text; set data.tokenizer"):
        opened(tmp_path, ids, val_files=text)
    both = opened(tmp_path, (ids, text), tokenizer="bytes", vocab_size=300)
    assert documents_of(both) == [[1, 2, 3]] * 40 + [[97, 98, 99, 256]] * 40


def test_the_fingerprint_covers_ids_and_labels(tmp_path):
    tables = [
        {"input_ids": [[1, 2, 3]] * 40},
        {"input_ids": [[1, 2, 4]] * 40},
        {"input_ids": [[1, 2, 3]] * 40, "labels": [[-100, 2, 3]] * 40},
        {"input_ids": [[1, 2, 3, 1, 2, 3]] * 20},
    ]
    corpora = [
        opened(tmp_path, write_table(tmp_path / str(i) / "a.parquet", pyarrow.table(table)))
        for i, table in enumerate(tables)
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 4
    assert len({corpus.parts["file a.parquet"] for corpus in corpora}) == 4


def test_a_token_leads_back_to_its_row_and_a_row_to_its_batches(tmp_path):
    table = pyarrow.table({"input_ids": DOCUMENTS, "id": [f"doc-{i}" for i in range(len(DOCUMENTS))]})
    corpus = opened(tmp_path, write_table(tmp_path / "a.parquet", table), seq_len=64)
    ledger = Ledger(corpus, corpus.batches(8))
    batch, found = corpus.batches(8).batch(2), ledger.batch(2)
    assert sum(piece.tokens for piece in found) == (batch.segment_ids > 0).sum()
    for piece in found:
        assert (piece.file, piece.id) == ("a.parquet", f"doc-{piece.offset}")
        ids = batch.tokens[piece.row][piece.begin : piece.begin + piece.tokens].tolist()
        assert ids == DOCUMENTS[piece.offset][piece.first_token : piece.first_token + piece.tokens]
        assert 2 in {step for step, _ in ledger.steps_of(piece.id, stop=5)}
