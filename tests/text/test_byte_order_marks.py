"""A byte order mark at the beginning of a file is no part of its text, whichever part of jaxscale reads it."""

import gzip
import json
from collections import Counter

import pytest

from jaxscale.cli.sample import read_prompts
from jaxscale.runtime.eval.items import read_items
from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.read import read_file
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate import contamination
from jaxscale.tools.corpus.curate.origin import entries
from jaxscale.tools.corpus.curate.quality import read_words

MARK = b"\xef\xbb\xbf"  # as PowerShell and Notepad write it


def marked(path, *records):
    """A file that begins with the mark, and has another where two files were joined."""
    lines = [json.dumps(record).encode() if path.name.startswith("a.jsonl") else record.encode() for record in records]
    content = MARK + b"\r\n".join(lines) + b"\r\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_items_prompts_and_documents_of_a_marked_file_are_read(tmp_path, name):
    item = {"context": "a b", "target": " c", "text": "a b c"}
    path = marked(tmp_path / name, item, item)
    assert [one.name for one in read_items([path], "cloze")] == [f"{name}:1", f"{name}:2"]
    assert [one.texts for one in contamination.read_items(path, frozenset(["text"]))] == [["a b c"]] * 2
    found = read_file(SourceFile(str(path), name, "text"), ReadConfig(), Counter())
    assert [document.text for document in found] == ["a b c"] * 2
    assert read_prompts([], str(path)) == ["a b c"] * 2


def test_marks_where_files_were_joined_are_no_part_of_their_lines(tmp_path):
    path = marked(tmp_path / "a.jsonl", {"context": "a", "target": "b"})
    path.write_bytes(path.read_bytes() * 2)
    assert len(read_items([path], "cloze")) == 2


def test_lists_and_texts_that_are_marked_are_read(tmp_path):
    words = marked(tmp_path / "words.txt", "Darn", "drat")
    assert read_words(str(words), "word_list") == ["darn", "drat"]
    assert list(entries(str(marked(tmp_path / "list.txt.gz", "bad.example", "worse.example")))) == [
        "bad.example", "worse.example",
    ]  # fmt: skip
    (item,) = contamination.read_items(marked(tmp_path / "items.txt", "who was it", "it was she"), frozenset())
    assert item.texts == ["who was it", "it was she"]
    assert read_prompts([], str(marked(tmp_path / "prompts.txt", "one", "two"))) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.ndjson", "a.jsonl.zst", "A.JSONL", "a.json.gz"])
def test_items_are_read_under_every_name_that_training_reads(tmp_path, name):
    import pyarrow

    content = json.dumps({"context": "a", "target": "b"}).encode() + b"\n"
    packed = {"gz": gzip.compress, "zst": lambda text: pyarrow.compress(text, "zstd", asbytes=True)}
    (tmp_path / name).write_bytes(packed.get(name.rpartition(".")[2], bytes)(content))
    assert len(read_items([tmp_path / name], "cloze")) == 1


def test_a_prompt_that_is_no_json_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(MARK + b'"one"\n{"prompt": 3}\n')
    with pytest.raises(BadInput, match="a.jsonl line 2 is neither a JSON string nor an object with a prompt"):
        read_prompts([], str(tmp_path / "a.jsonl"))
