"""Documents come out of every kind of file whole, in order, and none is lost without being counted."""

import glob
import gzip
import json
import os
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.text.sources import text as text_files
from jaxscale.runtime.text.sources.files import SourceFile, list_files, stdlib_files
from jaxscale.runtime.text.sources.read import read_file


def read(path, text_field="text", invalid_utf8="skip"):
    """(texts, what was skipped); the lineage of each is checked."""
    skipped = Counter()
    file = SourceFile(str(path), path.name, "text")
    found = list(read_file(file, DataConfig(text_field=text_field, invalid_utf8=invalid_utf8), skipped))
    assert all((document.file, document.source) == (path.name, "text") for document in found)
    offsets = [document.offset for document in found]
    assert offsets == sorted(set(offsets))
    return [document.text for document in found], dict(skipped)


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffünï\r\ncode\n".encode())
    assert read(path) == (["\ufeffünï\r\ncode\n"], {})


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(text_files, "DOCUMENT_BYTES", 50)
    text = "".join(f"line {i} é\n" for i in range(40)) + "日本語" * 60 + "\nend"
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    documents, skipped = read(path)
    assert "".join(documents) == text and not skipped and len(documents) > 5
    assert all(document.endswith("\n") for document in documents[:5])


def test_json_lines_and_parquet_give_the_same_documents(tmp_path):
    texts = ["first\nline", "", "naïve 日本", None, "last"]
    lines = "".join(json.dumps({"id": i, "body": text}) + "\n\n" for i, text in enumerate(texts))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.table({"body": texts, "id": range(5)})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=2)
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert read(tmp_path / name, "body") == (["first\nline", "naïve 日本", "last"], {"empty": 2}), name


def write_invalid(folder):
    """One file of each kind with one good document and one that is not UTF-8."""
    (folder / "a.txt").write_bytes(b"good\n\xff\xfe")
    (folder / "b.jsonl").write_bytes(b'{"text": "good"}\n{"text": "\xff"}\n{"text": "half \\ud800"}\n')
    column = pyarrow.array([b"good", b"\xff"], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), folder / "c.parquet")


def test_a_document_that_is_not_utf8_is_skipped_and_counted(tmp_path):
    write_invalid(tmp_path)
    assert read(tmp_path / "a.txt") == ([], {"invalid UTF-8": 1, "bytes left out": 7})
    assert read(tmp_path / "b.jsonl") == (["good"], {"invalid UTF-8": 2, "bytes left out": 21})
    assert read(tmp_path / "c.parquet") == (["good"], {"invalid UTF-8": 1, "bytes left out": 1})


@pytest.mark.parametrize("name, place", [("a.txt", "at 5 "), ("b.jsonl", "at line 2 "), ("c.parquet", "at row 1 ")])
def test_a_document_that_is_not_utf8_stops_when_told_and_says_where(tmp_path, name, place):
    write_invalid(tmp_path)
    with pytest.raises(ValueError, match=f"{name} is not UTF-8 {place}.*data.invalid_utf8='skip'"):
        read(tmp_path / name, invalid_utf8="stop")


def test_an_empty_file_is_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    assert read(tmp_path / "a.txt") == ([], {"empty": 1})


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": "cut', "line 2 is not JSON"),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}\n',
            "line 1 has no field 'text'; its fields are body, id; set data.text_field",
        ),
        ("a.jsonl", b"[1, 2]\n", "line 1 has no field 'text'; it is a list"),
        ("a.jsonl", b'{"text": 5}\n', "line 1: field 'text' is int, not text"),
        ("a.parquet", b"PAR1 but not really", "cannot be read as Parquet"),
    ],
)
def test_a_file_that_is_not_as_told_is_named_with_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_a_parquet_column_that_is_missing_or_no_text_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column 'text'; its columns are body, id"):
        read(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({}), tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="no column 'text'"):
        read(tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="column 'id' has type int64; it must be text"):
        read(tmp_path / "a.parquet", "id")


def test_globs_give_each_file_once_sorted_with_names_that_do_not_move(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    files, problems = list_files(str(tmp_path / "**" / "*.txt"), "data.files", "text")
    assert [file.name for file in files] == ["a.txt", "b.txt", "deep/er/c.txt"] and files[0].source == "text"
    named = {"notes": str(tmp_path / "deep" / "d.md"), "top": (str(tmp_path / "*.txt"), str(tmp_path / "a.txt"))}
    files, problems = list_files(named, "data.files", "text")
    assert [(file.name, file.source) for file in files] == [("d.md", "notes"), ("a.txt", "top"), ("b.txt", "top")]
    assert not problems


def test_each_file_is_there_once_whatever_links_lead_to_it(tmp_path):
    corpus = tmp_path / "corpus"
    for name in ("a.txt", "deep/b.txt", "deep/er/c.txt", ".hidden/d.txt"):
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        (corpus / name).write_text(name)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "e.txt").write_text("e")
    (corpus / "latest").symlink_to(".")  # a folder that links to itself, and another: 2^40 paths
    (corpus / "deep" / "up").symlink_to("..")
    (corpus / "0-first.txt").symlink_to("deep/b.txt")
    os.link(corpus / "a.txt", corpus / "deep" / "er" / "hard.txt")
    (corpus / "away").symlink_to(tmp_path / "beside")
    said = []
    files, problems = list_files(str(corpus / "**" / "*.txt"), "data.files", "text", say=said.append)
    assert [file.name for file in files] == ["a.txt", "away/e.txt", "deep/b.txt", "deep/er/c.txt"] and not problems
    (line,) = said
    assert line.startswith("data.files: skipped 4 links to files that are already included, such as ")
    both = (str(corpus / "**" / "c.txt"), str(corpus / "latest" / "deep" / "er" / "c.txt"))
    assert [file.path for file in list_files(both, "data.files", "text")[0]] == [str(corpus / "deep/er/c.txt")]
    found = {file.path for file in list_files(str(corpus / "**"), "data.files", "text")[0]}
    assert found == {str(corpus / name) for name in ("a.txt", "away/e.txt", "deep/b.txt", "deep/er/c.txt")}


@pytest.mark.parametrize("pattern", ["**/*.txt", "deep/**/*.txt", "**/er/*", "**", "*/**/c.*", "**/**/*.txt", "*.txt"])
def test_a_glob_without_links_finds_what_the_standard_library_finds(tmp_path, pattern):
    for name in ("a.txt", "deep/b.txt", "deep/er/c.txt", "deep/er/.d.txt", ".hidden/e.txt", "x[1]/f.txt", "x*y/g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    theirs = [path for path in glob.glob(str(tmp_path / pattern), recursive=True) if os.path.isfile(path)]
    files, _ = list_files(str(tmp_path / pattern), "data.files", "text")
    assert sorted(file.path for file in files) == sorted(set(theirs))


def test_a_glob_that_gives_nothing_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    globs = {"a": "none/*.txt", "b": "none.txt", "c": str(tmp_path), "d": "gs://bucket/x.txt"}
    files, problems = list_files(globs, "data.files", "text")
    assert files == [] and len(problems) == 4
    parts = (
        "data.files.a=none/*.txt matches no file",
        "data.files.b=none.txt does not exist",
        "is a folder",
        "only the manifest.json of a prepared set can be read",
    )
    for problem, part in zip(problems, parts):
        assert part in problem and "\n" not in problem


def test_a_file_whose_name_holds_brackets_is_found(tmp_path):
    (tmp_path / "x[1].txt").write_text("x")
    files, problems = list_files(str(tmp_path / "x[1].txt"), "data.files", "text")
    assert [file.name for file in files] == ["x[1].txt"] and not problems


def test_the_standard_library_is_there_without_its_tests():
    files = stdlib_files()
    names = {file.name for file in files}
    assert {"argparse.py", os.path.join("json", "decoder.py")} <= names and len(files) > 400
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split(os.sep))]
    assert {file.source for file in files} == {"modules", "packages"}
    assert files == stdlib_files()
