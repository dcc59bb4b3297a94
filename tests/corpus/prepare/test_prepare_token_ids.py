"""prepare takes token ids: they come out unchanged, stages judge their text, and what is edited is encoded again."""

import collections

import pyarrow
import pyarrow.parquet
import pytest
from prepared import documents_in, recipe, run

from jaxscale import schema
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.prepare.engine import make_plan

TEXTS = [f"{i} the quick brown fox number {i} jumps over the lazy dog, and again {i * i}." for i in range(80)]


def write_ids(path, documents, **columns):
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": documents, **columns}), path, row_group_size=9)
    return path


def ids_in(folder):
    return sorted(ids for *_, ids in documents_in(folder))


def test_ids_come_out_unchanged_with_their_lineage_and_beside_text(tmp_path):
    documents = [list(text.encode()) + [256] * (i % 2) for i, text in enumerate(TEXTS)]
    names = [f"d{i}" for i in range(len(TEXTS))]
    write_ids(tmp_path / "raw" / "a.parquet", documents, id=names)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["plain text"]}), tmp_path / "raw" / "b.parquet")
    output = run(recipe(tmp_path / "raw" / "*.parquet", block_bytes=1024), tmp_path / "set")
    assert ids_in(output) == sorted([*documents, [*b"plain text", 256]])
    found = {name: (offset, ids) for _, file, offset, name, ids in documents_in(output) if file == "a.parquet"}
    assert found == {name: (i, documents[i]) for i, name in enumerate(names)}
    cfg = DataConfig(name="tokens", files=str(output / "manifest.json"), cache_dir=str(tmp_path / "cache"))
    corpus = open_data(cfg, seq_len=64, vocab_size=300, seed=0, say=lambda line: None)
    assert corpus.tokenizer is not None and "documents end with" not in corpus.summary


def test_stages_judge_the_text_of_ids_and_an_edited_text_is_encoded_again(tmp_path):
    copies = [*TEXTS, *TEXTS[:20], "cafe\u0301 with a mark of its own, which is put together with its letter"]
    write_ids(tmp_path / "raw" / "a.parquet", [list(text.encode()) for text in copies])
    cfg = recipe(tmp_path / "raw" / "*.parquet", stages=("repair", "exact_dedup"))
    counts = collections.Counter(map(tuple, ids_in(run(cfg, tmp_path / "set"))))
    edited = "caf\xe9 with a mark of its own, which is put together with its letter"
    assert counts == {tuple(text.encode()): 1 for text in TEXTS} | {(*edited.encode(), 256): 1}


def test_ids_need_their_tokenizer_and_have_no_labels(tmp_path):
    path = write_ids(tmp_path / "raw" / "a.parquet", [[1, 2, 3]])
    trained = schema.to_dict(recipe(path)) | {"tokenizer": {"name": "train"}}
    with pytest.raises(BadInput, match="token ids, not text to train on; set tokenizer.name to their tokenizer"):
        make_plan(schema.from_dict(type(recipe(path)), trained))
    beyond = write_ids(tmp_path / "raw" / "b.parquet", [[1, 2], [3, 300]])
    with pytest.raises(BadInput, match="b.parquet row 1 has the token id 300, but tokenizer.name=bytes has ids from 0"):
        run(recipe(beyond), tmp_path / "one")
    labelled = write_ids(tmp_path / "raw" / "c.parquet", [[1, 2]], labels=[[-100, 2]])
    with pytest.raises(BadInput, match="c.parquet row 0 has masked labels"):
        run(recipe(labelled), tmp_path / "two")


def test_the_field_that_is_read_is_said(tmp_path):
    path = write_ids(tmp_path / "raw" / "a.parquet", [[1, 2]], text=["ab"], messages=[[{"role": "user"}]])
    (line,) = make_plan(recipe(path)).notes
    assert line.endswith(
        "a.parquet: text from 'text'; ignored: input_ids (token ids: read.ids_field='input_ids'), messages "
        "(conversations: data.name='chat')"
    )
    (line,) = make_plan(recipe(path, read={"ids_field": "input_ids"})).notes
    assert "a.parquet: token ids from 'input_ids'; ignored: text (text)" in line
