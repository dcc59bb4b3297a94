"""Input that was damaged, or is no file, is one line of prepare or is counted, never a traceback and never silent."""

import functools
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from damage import DAMAGES, flip, in_time, text

from jaxscale.cli.prepare import main
from jaxscale.system.exits import verdict

pytestmark = pytest.mark.fault("F24")
TEXTS = [text(i, 30) for i in range(60)]
LINES = "".join(json.dumps({"text": one}) + "\n" for one in TEXTS).encode()
TABLE = pa.table({"text": TEXTS})
RECORD = "WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{}\r\n\r\n"
WARC = "".join(RECORD.format(len(one), one) for one in TEXTS).encode()


def arrow(open_writer):
    sink = io.BytesIO()
    with open_writer(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue()


def parquet():
    sink = io.BytesIO()
    pyarrow.parquet.write_table(TABLE, sink)
    return sink.getvalue()


def records():
    module = pytest.importorskip("array_record.python.array_record_module", reason="array_record is not installed")
    with tempfile.TemporaryDirectory() as folder:
        writer = module.ArrayRecordWriter(f"{folder}/a", "group_size:1")
        for one in TEXTS:
            writer.write(json.dumps({"text": one}).encode())
        writer.close()
        return Path(folder, "a").read_bytes()


FILES = {
    "a.jsonl": lambda: LINES,
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.jsonl.zst": lambda: pa.compress(LINES, codec="zstd", asbytes=True),
    "a.parquet": parquet,
    "file.arrow": lambda: arrow(pa.ipc.new_file),
    "stream.arrow": lambda: arrow(pa.ipc.new_stream),
    "a.warc": lambda: WARC,
    "a.warc.gz": lambda: gzip.compress(WARC),
    "a.array_record": records,
}
HOLDING = {
    "bytes 255": b"\xff" * 5000,
    "lists without end": b"[" * 100_000,
    "objects without end": b'{"text":' * 100_000,
    "a deep list in a record": b'{"text": "good", "a": ' + b"[" * 2000 + b"]" * 2000 + b"}\n" + LINES,
    "a long number": b'{"text": ' + b"9" * 5000 + b"}\n",
}
CHANGES = {
    **{name: DAMAGES[name] for name in ("head flipped", "tail flipped", "cut in half", "emptied", "zeros")},
    **{name: DAMAGES[name] for name in ("a folder", "a FIFO", "a dangling link")},
    **{name: functools.partial(Path.write_bytes, data=content) for name, content in HOLDING.items()},
    "footer flipped": flip(lambda size: max(0, size - 60)),
}


def prepared(path, *flags):
    """(exit code, the line) of prepare over a path; what would be a traceback is raised."""
    flags = ["--workers=1", "--config.stages=()", "--config.tokenizer.name=bytes", *flags]
    try:
        with in_time():
            return main([f"--input={path}", f"--output={path.parent / 'out'}", *flags]), ""
    except Exception as error:
        code, line = verdict(error)
        if line is None:
            raise
        return code, line


@pytest.mark.cases(40)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_damaged_input_is_told_by_its_name_or_read(tmp_path, name, change):
    path = tmp_path / name
    path.write_bytes(FILES[name]())
    CHANGES[change](path)
    flags = ["--config.read.record_format=json"]
    code, line = prepared(path, *flags)
    assert code in (0, 2) and "\n" not in line
    assert not line or name in line or "no documents are left after pass 1: reading" in line
    if code == 2 and name in line and "damaged='skip'" in line:
        code, line = prepared(path, *flags, "--config.read.damaged=skip")
        report = path.parent / "out" / "report.json"
        counted = line if code else report.read_text()
        assert "files cut short or broken" in counted or "not JSON" in counted, counted


LATIN = ("Der B\u00e4r l\u00e4uft. " * 20).encode("latin-1")
STORED = bytearray(gzip.compress(LINES * 60, 0))  # in which a changed byte is a changed byte of text
STORED[len(STORED) // 2 : len(STORED) // 2 + 200] = b'"' * 200
LEFT_OUT = {  # files, what the line says, and the way out that it names
    "encodings": (
        {f"{i:02}.txt": LATIN if i < 20 else LATIN.decode("latin-1").encode("utf-16" if i < 40 else "utf-8")
         for i in range(60)},
        "reading skipped 40 of 60 documents (66.7%), 17.6 KiB of 24.3 KiB: 40 invalid UTF-8 in ",
        "set read.invalid_utf8='repair'",
    ),
    "Latin-1 alone": ({"a.txt": LATIN}, "no documents are left.*1 of 1 documents", "set read.invalid_utf8='repair'"),
    "a damaged gz": ({"a.jsonl.gz": bytes(STORED)}, "a.jsonl.gz is corrupt .*incorrect data check", "damaged='skip'"),
    "gz without its name": ({"a.jsonl": gzip.compress(LINES)}, "a.jsonl is compressed, but its name", "a.jsonl.gz"),
    "one long line": (
        {"a.jsonl": b'{"text": "' + b"a" * (34 << 20) + b'"}'},
        "no documents are left.*1 of 1 documents .*, 34.0 MiB of 34.0 MiB: 1 longer than max_line_bytes in a.jsonl",
        "raise read.max_line_bytes",
    ),
    "a table": ({"a.csv": b"a,b\n1,2\n"}, "a.csv is a table by its suffix", ".jsonl or .parquet"),
}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_reading_leaves_out_is_said_with_the_way_out(tmp_path, capsys, case):
    files, told, way_out = LEFT_OUT[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    code, line = prepared(tmp_path / "*.*")
    told = told if "no document" in told or ".*" in told else re.escape(told)
    assert (code == 0) == (case == "encodings")
    said = line or capsys.readouterr().out
    assert re.search(told, said) and way_out in said, said
    if case == "a damaged gz":
        code, line = prepared(tmp_path / "*.*", "--config.read.damaged=skip")
        assert code == 0 and "WARNING: reading skipped" in (said := capsys.readouterr().out), said
        assert re.search(r"\d of \d,\d\d\d documents", said) and " not JSON in a.jsonl.gz" in said, said
        assert "the rest of 1 file: " in said and "1 files cut short or broken" in said
    if code == 0:
        page = (tmp_path / "out" / "report.html").read_text()
        assert page.split('<div class="warn">')[1].startswith("reading skipped ")
        flags = ["--strict"] if case == "encodings" else ["--strict", "--config.read.damaged=skip"]
        for again in range(2):  # of a set that is there, and of none
            code, line = prepared(tmp_path / "*.*", *flags)
            assert code == 2 and "reading skipped " in line and "omit --strict" in line
            shutil.rmtree(tmp_path / "out")


def test_a_little_that_is_left_out_is_said_and_passes_strict(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(LINES * 2 + b'{"text": "\xff"}\n')
    assert prepared(tmp_path / "a.jsonl", "--strict")[0] == 0
    said = capsys.readouterr().out
    assert "reading skipped 1 of 121 documents (0.8%)" in said and "WARNING" not in said


@pytest.mark.parametrize("kind", ["a FIFO", "a dangling link"])
def test_a_pattern_that_matches_what_is_no_file_is_refused_by_its_name(tmp_path, kind):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_bytes(LINES)
    DAMAGES[kind](tmp_path / "b.jsonl")
    code, line = prepared(tmp_path / "*.jsonl")
    assert code == 2 and str(tmp_path / "b.jsonl") in line


def test_the_line_about_a_file_with_a_line_end_in_its_name_is_one(tmp_path):
    path = tmp_path / "a\nb.jsonl"
    path.write_bytes(b"[]\n")
    code, line = prepared(path)
    assert code == 2 and "a\\nb.jsonl line 1" in line and len(line.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv, which takes root's rights away")
def test_what_this_user_may_not_read_or_write_is_one_line(tmp_path):
    (tmp_path / "shut.jsonl").write_bytes(LINES)
    (tmp_path / "open.jsonl").write_bytes(LINES)
    (tmp_path / "shut.jsonl").chmod(0)
    (tmp_path / "locked").mkdir(mode=0o500)
    bounded = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*bounded, sys.executable, "-c", """
import sys
from jaxscale.cli.prepare import main
from jaxscale.system.exits import verdict
for name, output in (("shut", "out"), ("open", "locked"), ("open", "locked/out")):
    try:
        main([f"--input={name}.jsonl", f"--output={output}", "--workers=1", "--config.stages=()",
              "--config.tokenizer.name=bytes"])
    except Exception as error:
        print(*verdict(error))
"""]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    told = [line for line in done.stdout.splitlines() if " error: " in line]
    assert [line.startswith("2 error: ") for line in told] == [True] * 3, (done.stdout, done.stderr[-2000:])
    assert "shut.jsonl cannot be read: Permission denied" in told[0]
    assert "locked is not writable" in told[1] and "locked/out cannot be created" in told[2]
