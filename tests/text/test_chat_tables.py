"""Conversations in Parquet, Arrow, saved datasets, hf:// and ArrayRecord are those of JSON Lines, and are asked for."""

import json

import chat_tokenizers
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from lineages import read_lineage

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.text.chat.chat_records import parse_record
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.system.exits import BadInput

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ROWS = [
    {"id": f"r{i}", "text": f"unrelated text {i} " * 9, "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": f"question {i} é"},
        {"role": "assistant", "content": f"answer {i}", **({"tool_calls": [CALL]} if i % 5 == 0 else {})},
    ]}
    for i in range(30)
]  # fmt: skip
# Shows whether a message has a field that Arrow gives to all of them.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% if 'tool_calls' in m %}"
    "{{ '[calls]' }}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizers.write_folder(tmp_path_factory.mktemp("tables"), TEMPLATE)


def write(kind, folder, rows):
    """Writes the rows as a file or dataset of this kind, and returns what data.files names."""
    folder.mkdir(exist_ok=True)
    path, table = folder / f"rows.{kind}", pyarrow.Table.from_pylist(rows)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif kind in ("arrow", "stream.arrow"):
        make = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    elif kind == "saved":
        datasets = pytest.importorskip("datasets", reason="datasets is not installed")
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif kind == "hf":
        pytest.importorskip("datasets", reason="datasets is not installed")
        path.mkdir()
        pyarrow.parquet.write_table(table, path / "a.parquet")
        return f"hf://{path}"
    elif kind == "array_record":
        module = pytest.importorskip("array_record.python.array_record_module", reason="array_record is not installed")
        writer = module.ArrayRecordWriter(str(path), "group_size:1")
        for row in rows:
            writer.write(json.dumps(row).encode())
        writer.close()
    return str(path)


def opened(tmp_path, files, tokenizer="", said=None, **changes):
    values = dict(name="chat", files=files, tokenizer=tokenizer, cache_dir=str(tmp_path / "cache"), val_fraction=0.0)
    cfg = DataConfig(**{**values, **changes})
    return open_data(cfg, seq_len=128, vocab_size=400, seed=0, say=(said if said is not None else []).append)


def tokens_and_weights(corpus):
    batch = corpus.batches(len(corpus.train_rows)).batch(0)
    return batch.tokens, batch.weights


TABLES = ["parquet", "arrow", "stream.arrow", "saved", "hf", "array_record"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", TABLES)
def test_conversations_in_a_table_are_those_of_json_lines(tmp_path, tokenizer, kind):
    lines = opened(tmp_path, write("jsonl", tmp_path / "lines", ROWS), tokenizer)
    table = opened(tmp_path, write(kind, tmp_path / "table", ROWS), tokenizer, record_format="json")
    for a, b in zip(tokens_and_weights(lines), tokens_and_weights(table)):
        np.testing.assert_array_equal(a, b)
    assert 0 < tokens_and_weights(table)[1].mean() < 0.5
    lineage = read_lineage(table.shards[0]).to_pydict()
    assert lineage["id"] == [row["id"] for row in ROWS] and lineage["offset"] == list(range(30))


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", ["jsonl", *TABLES])
def test_the_field_is_named_where_others_could_have_been_meant(tmp_path, tokenizer, kind):
    files, said = write(kind, tmp_path / "table", ROWS), []
    opened(tmp_path, files, tokenizer, said, record_format="json")
    (line,) = (line for line in said if "ignored" in line)
    assert line == f"{files}: conversations from 'messages'; ignored: text (text)"
    said.clear()
    opened(tmp_path, files, said=said, record_format="json", name="files")
    opened(tmp_path, files, said=said, record_format="json", name="files")  # out of the cache
    lines = [line for line in said if "ignored" in line]
    assert lines == [f"{files}: text from 'text'; ignored: messages (conversations: data.name='chat')"] * 2


@pytest.mark.cases(3)
@pytest.mark.parametrize("kind", ["jsonl", *TABLES])
def test_conversations_are_refused_where_there_are_none(tmp_path, kind):
    files = write(kind, tmp_path / "table", [{"text": f"text {i}" * 9} for i in range(30)])
    with pytest.raises(BadInput, match="data.name='chat', but no conversations .* set data.name='files'"):
        opened(tmp_path, files, record_format="json")


@pytest.mark.parametrize("kind", ["jsonl", *TABLES])
def test_text_is_refused_where_there_are_conversations_alone(tmp_path, kind):
    files = write(kind, tmp_path / "table", [{"messages": row["messages"]} for row in ROWS])
    with pytest.raises(BadInput, match="no text field 'text', but has conversations in 'messages'; .*data.name='chat'"):
        opened(tmp_path, files, record_format="json", name="files")


def test_a_row_of_each_form_is_read_as_what_it_has(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "first"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "second"}]},
        {"prompt": "q", "completion": "third"},
        {"text": "fourth"},
    ]
    full = [{**dict.fromkeys(("messages", "conversations", "prompt", "completion", "text")), **row} for row in rows]
    lines = opened(tmp_path, write("jsonl", tmp_path / "lines", rows))
    table = opened(tmp_path, write("parquet", tmp_path / "table", full))
    for a, b in zip(tokens_and_weights(lines), tokens_and_weights(table)):
        np.testing.assert_array_equal(a, b)


def test_tools_written_as_json_are_those_of_a_list(tmp_path):
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = parse_record({"messages": [], "tools": json.dumps(tools)}, ChatConfig(), "text")
    assert found == parse_record({"messages": [], "tools": tools}, ChatConfig(), "text") and found.tools == tools
    for wrong in ("add", '{"name": "add"}'):
        with pytest.raises(BadInput, match="has tools as text that is not a JSON list"):
            parse_record({"messages": [], "tools": wrong}, ChatConfig(), "text")


def test_a_malformed_row_is_named(tmp_path):
    rows = [{"messages": row["messages"][:2] + [{"role": "assistant", "content": None}]} for row in ROWS[:3]]
    with pytest.raises(BadInput, match=r"rows.parquet row 0 has messages\[2\].content of type null; it must be text"):
        opened(tmp_path, write("parquet", tmp_path, rows))


def bad_table(path):
    """A conversation in which a text is not UTF-8, between two that are."""
    roles, texts = pyarrow.array(["user", "assistant"] * 3), [b"q", b"a", b"q", b"b\xe9", b"q", b"c"]
    messages = pyarrow.StructArray.from_arrays([roles, pyarrow.array(texts).view("string")], ["role", "content"])
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 2, 4, 6], messages)})
    pyarrow.parquet.write_table(table, path)
    return str(path)


def test_text_that_is_not_utf8_in_a_row_is_skipped_repaired_or_named(tmp_path):
    files = bad_table(tmp_path / "a.parquet")
    skipped = opened(tmp_path, files)
    assert "2 documents" in skipped.summary and "skipped 1 invalid UTF-8" in skipped.summary
    repaired = opened(tmp_path, files, invalid_utf8="repair")
    assert "3 documents" in repaired.summary and "repaired 1 windows-1252" in repaired.summary
    good = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in ("a", "bé", "c")]
    lines = opened(tmp_path, write("jsonl", tmp_path, [{"messages": one} for one in good]))
    np.testing.assert_array_equal(tokens_and_weights(repaired)[0], tokens_and_weights(lines)[0])
    with pytest.raises(BadInput, match="a.parquet is not UTF-8 at row 1"):
        opened(tmp_path, files, invalid_utf8="stop")


def test_prompts_in_tf_examples_are_pairs(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module", reason="array_record is not installed")

    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for i in range(6):
        pair = {b"prompt": b"q%d" % i, b"completion": b"answer %d" % i}
        entries = [field(1, name) + field(2, field(1, field(1, value))) for name, value in pair.items()]
        writer.write(field(1, b"".join(field(1, entry) for entry in entries)))
    writer.close()
    examples = opened(tmp_path, str(tmp_path / "a.array_record"), record_format="example")
    rows = [{"prompt": f"q{i}", "completion": f"answer {i}"} for i in range(6)]
    lines = opened(tmp_path, write("jsonl", tmp_path, rows))
    for a, b in zip(tokens_and_weights(lines), tokens_and_weights(examples)):
        np.testing.assert_array_equal(a, b)
