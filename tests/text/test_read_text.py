"""Plain text and JSON lines: bounded, by policy, and the same documents however the file is divided."""

import gzip
import json
import tracemalloc
from collections import Counter

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources import jsonl
from jaxscale.runtime.text.sources import text as text_files
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.read import read_file, split_file
from jaxscale.system.exits import BadInput

MIB = 1 << 20


def read(path, part=None, **changes):
    """(documents, what was skipped)."""
    skipped = Counter()
    found = read_file(SourceFile(str(path), path.name, "s"), ReadConfig(**changes), skipped, *([part] if part else []))
    return list(found), dict(skipped)


def texts(path, **changes):
    return [document.text for document in read(path, **changes)[0]]


def write_json(path, *records):
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    return path


def packed(content, codec):
    return pyarrow.compress(content, codec, asbytes=True) if codec == "zstd" else gzip.compress(content)


def assert_parts_are_the_whole(path, part_bytes, **changes):
    file, cfg = SourceFile(str(path), path.name, "s"), ReadConfig(**changes)
    whole, skipped = read(path, **changes)
    again, counted = [], Counter()
    for part in split_file(file, cfg, part_bytes):
        again += read_file(file, cfg, counted, part)
    assert again == whole and dict(counted) == skipped


LINES = st.lists(st.sampled_from(["", "  ", "a", "b c d", "é" * 9, "x" * 40, "\r", "日本\r"]), max_size=30)


@settings(max_examples=40, deadline=None)
@given(LINES, st.booleans(), st.integers(1, 90), st.sampled_from(["line", "paragraph", "file"]))
def test_the_parts_of_a_text_file_are_the_whole(tmp_path_factory, lines, ended, part_bytes, kind):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(("\n".join(lines) + "\n" * ended).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "DOCUMENT_BYTES", 25)
        assert_parts_are_the_whole(path, part_bytes, text_documents=kind)
        if kind == "file":
            assert "".join(texts(path)) == path.read_bytes().decode()


def test_the_end_of_a_long_line_is_no_blank_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("first\n" + "x" * (1 << 16) + "  \nmore\n\nlast\n")
    assert_parts_are_the_whole(path, 3, text_documents="paragraph")
    assert len(texts(path, text_documents="paragraph")) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=15), st.integers(1, 200))
def test_the_parts_of_json_lines_are_the_whole(tmp_path_factory, written, part_bytes):
    path = tmp_path_factory.mktemp("json") / "a.jsonl"
    write_json(path, *({"text": text, "id": i} for i, text in enumerate(written)))
    assert_parts_are_the_whole(path, part_bytes, invalid_utf8="repair")
    content = path.read_bytes()
    for document in read(path, invalid_utf8="repair")[0]:  # the offset is where its line begins
        assert json.loads(content[document.offset :].split(b"\n")[0])["id"] == int(document.id)


def test_blocks_that_end_anywhere_give_the_same_lines(tmp_path, monkeypatch):
    path = write_json(tmp_path / "a.jsonl", *({"text": "é" * (i % 70) + "."} for i in range(200)))
    whole = read(path)
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr("jaxscale.runtime.text.sources.blocks.BLOCK_BYTES", size)
        assert read(path) == whole
        short = read(path, max_line_bytes=60)
        monkeypatch.setattr("jaxscale.runtime.text.sources.blocks.BLOCK_BYTES", MIB)
        assert short == read(path, max_line_bytes=60) and short[1]["longer than max_line_bytes"] > 50


def test_fields_of_lineage_are_read_and_may_lie_inside_another(tmp_path):
    record = {"body": {"raw": "hello"}, "id": 12345678901234567890123, "meta": {"url": "http://a", "license": None}}
    path = write_json(tmp_path / "a.jsonl", record, {"body": {"raw": "x"}, "id": 1.5, "license": "MIT"})
    fields = dict(text_field="body.raw", url_field="meta.url", licence="unknown")
    first, second = read(path, **fields)[0]
    assert (first.text, first.id, first.url, first.licence) == (
        "hello",
        "12345678901234567890123",
        "http://a",
        "unknown",
    )
    assert (second.id, second.url, second.licence, second.offset) == ("1.5", "", "MIT", len(json.dumps(record)) + 1)
    assert (first.file, first.source) == ("a.jsonl", "s")


ODD_LINES = [
    b'{"text": "plain", "id": "a"}', b'{"text": "half \\ud800 pair", "id": "b\\udc00"}', b'{"text": "nan", "x": NaN}',
    b'{"text": "big", "id": ' + b"9" * 30 + b"}", b'{"text": "huge", "id": ' + b"9" * 5000 + b"}", b'{"text": 5}',
    b'{"text": "twice", "text": "again"}', b"[1]", b"5", b'{"text": "cut', b"\xff\xfe", b'{"text": "\xff"}', b"  \t ",
    b'{"text": "float", "id": 1e400}', b'{"text": "tab\there"}', b'{"text": null}', b'{"other": 1}', b'{"text": ["a"]}',
    b'{"text": "nul \\u0000 byte"}', b'{"text": "deep", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"\xef\xbb\xbf{}",
    b'{"text": "win\\u2028line"}\r', b'{"text": "' + b"\xc3\xa9" * 9 + b'", "id": -0.0}', b'{"text": "t", "id": true}',
]  # fmt: skip


@pytest.mark.parametrize("policy", ["skip", "repair"])
def test_both_json_parsers_give_the_same_documents(tmp_path, monkeypatch, policy):
    pytest.importorskip("orjson")
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(ODD_LINES))
    fast = read(path, damaged="skip", invalid_utf8=policy)
    monkeypatch.setattr(jsonl, "orjson", None)
    assert read(path, damaged="skip", invalid_utf8=policy) == fast
    assert len(fast[0]) == (12 if policy == "repair" else 9) and fast[1]["not JSON"] >= 3
    [document.id.encode() + document.text.encode() for document in fast[0]]


def test_a_byte_order_mark_before_json_lines_is_no_part_of_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    documents, skipped = read(path)
    assert [document.text for document in documents] == ["one", "two"] and not skipped


@pytest.mark.fault("F24")
@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"[" * 100_000 + b"]" * 100_000, "line 2 is not readable JSON: it is nested too deeply"),
        (b'"text"', "line 2 has no field 'text'; it is a str; set text_field"),
        (b"null", "line 2 has no field 'text'; it is a NoneType; set text_field"),
        (b'{"body": 1, "id": 2}', "line 2 has no field 'text'; its fields are body, id; set text_field"),
        (b'{"text": {}}', "line 2: field 'text' is dict, not text"),
        (b'{"text": "a"', "line 2 is not JSON: Expecting"),
        (b"{}", "line 2 has no field 'text'; it is empty; set text_field"),
    ],
)
def test_a_line_that_is_not_as_told_is_named_or_counted(tmp_path, line, told):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "end"}\n')
    with pytest.raises(ValueError, match=f"a.jsonl {told}"):
        read(path)
    documents, skipped = read(path, damaged="skip")
    assert [document.text for document in documents] == ["good", "end"]
    assert sum(skipped.values()) == 1 + skipped["bytes left out"] > 1


def test_a_line_in_a_later_part_is_named_by_its_place_in_it(tmp_path):
    path = write_json(tmp_path / "a.jsonl", *[{"text": "x"}] * 9, {"no": 1})
    file, cfg = SourceFile(str(path), path.name, "s"), ReadConfig()
    last = split_file(file, cfg, 40)[-1]
    with pytest.raises(ValueError, match=rf"a.jsonl line \d after byte {last.begin} has no field"):
        list(read_file(file, cfg, Counter(), last))


@pytest.mark.cases(1)
@pytest.mark.fault("F24", "H5")
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.txt"])
def test_a_line_of_100_mb_is_counted_and_never_held(tmp_path, name):
    path, good = tmp_path / name, b'{"text": "good"}\n'
    if name.endswith(".zst"):
        line = b'{"text": "' + b"ab" * (50 << 20) + b'"}\n'
        path.write_bytes(pyarrow.compress(good + line + good, "zstd", asbytes=True))
        del line
    else:
        with open(path, "wb") as file:
            file.write(good)
            file.seek(100 << 20, 1)  # a hole: zeros that no disk holds
            file.write(b"\n" + good)
    tracemalloc.start()
    try:
        documents, skipped = read(path, text_documents="line", max_unpacked_ratio=1e6)
        grown = tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()
    assert len(documents) == 2 and skipped["longer than max_line_bytes"] == 1
    assert skipped["bytes left out"] >= 100 << 20 and documents[1].offset > 100 << 20
    assert grown < 40, f"{grown} MiB"


@pytest.mark.fault("F24", "H5")
def test_a_document_that_is_too_long_is_counted(tmp_path):
    path = write_json(tmp_path / "a.jsonl", {"text": "é" * 50}, {"text": "é" * 51}, {"text": "a" * 101})
    documents, skipped = read(path, max_document_bytes=100)
    assert [document.text for document in documents] == ["é" * 50]
    assert skipped == {"longer than max_document_bytes": 2, "bytes left out": 203}
    (tmp_path / "b.txt").write_text("aa\nbb\n\n" + "c\n" * 99 + "\n" + "d" * 101 + "\n\nend")
    documents, skipped = read(tmp_path / "b.txt", max_document_bytes=100, text_documents="paragraph")
    assert [document.text for document in documents] == ["aa\nbb", "end"]
    assert skipped == {"longer than max_document_bytes": 2, "bytes left out": 202}


def test_lines_and_paragraphs_are_documents_where_told(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\n \r\n\r\n  three\r\n".encode())
    found = [(document.offset, document.text) for document in read(path, text_documents="line")[0]]
    assert found == [(0, "one"), (8, "two"), (18, "  three")]
    found = [(document.offset, document.text) for document in read(path, text_documents="paragraph")[0]]
    assert found == [(0, "one\ntwo"), (18, "  three")]


@pytest.mark.fault("F24")
def test_nul_bytes_are_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one \x00two")
    assert read(path) == ([], {"NUL bytes": 1, "bytes left out": 8})
    assert texts(path, invalid_utf8="repair") == ["one two"]
    assert read(path, invalid_utf8="repair")[1] == {"repaired: NUL removed": 1}
    with pytest.raises(
        ValueError, match="a.txt is not UTF-8 at 4 .it contains NUL.*; correct it, or set invalid_utf8='skip'"
    ):
        read(path, invalid_utf8="stop")
    path.write_bytes(bytes(range(256)) * 40)
    assert read(path, invalid_utf8="repair") == ([], {"no text in any encoding": 1, "bytes left out": 10240})


@pytest.mark.fault("F24")
@pytest.mark.parametrize(
    ("content", "encoding", "text", "how"),
    [
        ("naïve café".encode("latin-1"), "", "naïve café", "windows-1252"),
        ("“quotes” – €".encode("cp1252"), "", "“quotes” – €", "windows-1252"),
        ("日本語 ".encode() * 3 + b"caf\xe9", "", "日本語 日本語 日本語 café", "windows-1252"),
        ("привет".encode("koi8-r"), "koi8-r", "привет", "koi8-r"),
        ("UTF sixteen é".encode("utf-16"), "", "UTF sixteen é", "utf-16"),
        ("日本語".encode("shift-jis"), "shift-jis", "日本語", "shift-jis"),
    ],
)
def test_text_in_another_encoding_is_repaired_and_counted(tmp_path, content, encoding, text, how):
    (tmp_path / "a.txt").write_bytes(content)
    documents, skipped = read(tmp_path / "a.txt", invalid_utf8="repair", encoding=encoding)
    assert [document.text for document in documents] == [text] and skipped == {f"repaired: {how}": 1}


def test_json_lines_in_another_encoding_are_repaired_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "café"}\n'.encode("latin-1") + b'{"text": "half \\ud83d."}\n')
    documents, skipped = read(path, invalid_utf8="repair")
    assert [document.text for document in documents] == ["café", "half \ufffd."]
    assert skipped == {"repaired: windows-1252": 1, "repaired: half a surrogate pair": 1}
    path.write_bytes(b'{"text": "good"}\n\xff no JSON\n')
    with pytest.raises(BadInput, match="a.jsonl line 2 is not JSON: Expecting value at column 1$"):
        read(path, invalid_utf8="repair")


@pytest.mark.cases(1)
@pytest.mark.fault("F24")
@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_packed_file_that_is_cut_short_is_named_or_counted(tmp_path, codec):
    content = packed(b"".join(b'{"text": "%d"}\n' % (i * 7919 % 99991) for i in range(50_000)), codec)
    path = tmp_path / ("a.jsonl.gz" if codec == "gzip" else "a.jsonl.zst")
    path.write_bytes(content)
    assert len(read(path)[0]) == 50_000
    path.write_bytes(content[: len(content) * 4 // 5])
    way_out = "download it again, or set damaged='skip'"
    with pytest.raises(ValueError, match=f"{path.name} is truncated after .* uncompressed bytes .*; {way_out}"):
        read(path)
    documents, skipped = read(path, damaged="skip")
    assert 20_000 < len(documents) < 50_000 and skipped == {"files cut short or broken": 1}
    path.write_bytes(b"no such thing as a packed file" * 9)
    with pytest.raises(ValueError, match=f"{path.name} is neither gzip nor zstd, .*or set damaged='skip'"):
        read(path)
    path.write_bytes(b"")
    assert read(path) == ([], {})


@pytest.mark.fault("F24", "H5")
@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_bomb_is_refused_by_name_before_it_is_unpacked(tmp_path, codec):
    content = packed(bytes(1 << 20), codec)
    path = tmp_path / ("a.txt.gz" if codec == "gzip" else "a.txt.zst")
    path.write_bytes(content * 1000)
    for changes, setting in (
        ({}, "max_unpacked_ratio"),
        ({"max_unpacked_ratio": 1e6, "max_unpacked_bytes": 5 << 20}, "max_unpacked_bytes"),
    ):
        with pytest.raises(ValueError, match=f"{path.name} exceeds {setting}: .*; remove it"):
            read(path, **changes)
    assert read(path, damaged="skip")[1]["files cut short or broken"] == 1


def test_packed_files_of_many_members_are_read_whole(tmp_path):
    for codec, name in (("gzip", "a.txt.gz"), ("zstd", "a.txt.zst")):
        (tmp_path / name).write_bytes(b"".join(packed(b"part %d\n" % i, codec) for i in range(50)))
        assert texts(tmp_path / name) == ["".join(f"part {i}\n" for i in range(50))]


@pytest.mark.fault("F24")
def test_an_empty_file_of_any_kind_holds_nothing(tmp_path):
    for name in ("a.txt", "a.jsonl", "a.html", "a.warc", "a.txt.zst", "a.json.gz"):
        (tmp_path / name).write_bytes(b"")
        documents, skipped = read(tmp_path / name)
        assert documents == [] and set(skipped) <= {"empty"}, name


def test_settings_that_cannot_be_are_refused():
    for wrong in ({"max_line_bytes": 0}, {"encoding": "klingon"}, {"text_field": ""}, {"max_unpacked_ratio": 0.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ReadConfig(**wrong)
    with pytest.raises(ValueError, match="part_bytes=0 must be"):
        split_file(SourceFile("a.txt", "a.txt", "s"), ReadConfig(), 0)
