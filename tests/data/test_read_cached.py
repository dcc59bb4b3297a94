"""Training from raw files of every kind: tokenized once, and each document of the cache knows where it came from."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.shard_writer import join_lineages, lineage_table
from jaxscale.runtime.text.document import Document

PAGE = (
    "<html><body><article><p>" + "The text of a page that is worth to be read. " * 20 + "</p></article></body></html>"
)


def opened(tmp_path, files, **changes):
    """(corpus, what was said)."""
    said = []
    cfg = DataConfig(files=files, cache_dir=str(tmp_path / "cache"), val_fraction=0.0, **changes)
    return open_data(cfg, seq_len=8, vocab_size=257, seed=0, say=said.append), said


def lineage_of(tmp_path):
    """The table of the one folder in the cache."""
    (path,) = (tmp_path / "cache").glob("*/*.docs.parquet")
    return pyarrow.parquet.read_table(path).to_pydict()


def test_files_of_every_kind_train_together_and_keep_their_lineage(tmp_path):
    (tmp_path / "in").mkdir()
    text = {"text": "some text of a document", "id": "one", "url": "http://a", "license": "CC0"}
    line, base = json.dumps(text).encode() + b"\n", tmp_path / "in"
    (base / "a.jsonl").write_bytes(line * 2)
    (base / "b.json.gz").write_bytes(gzip.compress(line))
    (base / "c.jsonl.zst").write_bytes(pyarrow.compress(line, "zstd", asbytes=True))
    (base / "d.txt.zst").write_bytes(pyarrow.compress(b"plain text", "zstd", asbytes=True))
    table = pyarrow.table({name: [value] for name, value in text.items()})
    pyarrow.parquet.write_table(table, base / "e.parquet")
    with pyarrow.OSFile(str(base / "f.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + PAGE.encode()
    head = f"WARC/1.1\r\nWARC-Type: response\r\nWARC-Target-URI: http://b\r\nContent-Length: {len(block)}\r\n\r\n"
    names = ["a.jsonl", "a.jsonl", "b.json.gz", "c.jsonl.zst", "d.txt.zst", "e.parquet", "f.arrow"]
    try:
        import resiliparse  # noqa: F401
    except ImportError:
        pass
    else:
        (base / "g.html").write_text(PAGE)
        (base / "h.warc.gz").write_bytes(gzip.compress(head.encode() + block + b"\r\n\r\n"))
        names += ["g.html", "h.warc.gz"]
    corpus, said = opened(tmp_path, str(base / "*"))
    assert f"{len(names)} documents" in " ".join(said) and corpus.train_rows
    lineage = lineage_of(tmp_path)
    assert lineage["file"] == names and lineage["offset"] == [0, len(line)] + [0] * (len(names) - 2)
    assert lineage["id"][:6] == ["one"] * 4 + ["", "one"] and lineage["licence"][:5] == ["CC0"] * 4 + [""]
    assert lineage["url"][-1] == ("http://b" if len(names) > 7 else "http://a") and set(lineage["language"]) == {""}
    again, said = opened(tmp_path, str(base / "*"))
    assert said == [] and again.fingerprint == corpus.fingerprint


def test_a_setting_of_reading_is_part_of_the_fingerprint(tmp_path):
    (tmp_path / "a.txt").write_text("one line of text\nand another one\n")
    whole, _ = opened(tmp_path, str(tmp_path / "a.txt"))
    lines, said = opened(tmp_path, str(tmp_path / "a.txt"), text_documents="line")
    assert said and "2 documents" in lines.summary and lines.fingerprint != whole.fingerprint


@pytest.mark.parametrize("changes", [pytest.param({"name": "hf"}, marks=pytest.mark.soak), {}])
def test_a_data_set_of_the_hub_is_tokenized_once(tmp_path, changes):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": ["some text", "more text"], "id": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text('{"text": "streamed text", "id": "a"}\n')
    opened(tmp_path, str(tmp_path / "saved"), **changes)
    assert lineage_of(tmp_path)["id"] == ["a", "b"]
    assert opened(tmp_path, str(tmp_path / "saved"), **changes)[1] == []
    name = f"{tmp_path}/hub" if changes else f"hf://{tmp_path}/hub"
    corpus, said = opened(tmp_path, name, **changes)
    assert any("1 document" in line for line in said)
    again = opened(tmp_path, name, **changes)[1]
    assert all("using the version" in line for line in again)  # it is not pinned, and that is all there is to say


def test_what_was_repaired_is_told_and_not_as_a_loss(tmp_path):
    (tmp_path / "a.txt").write_bytes("naïve text that is long enough".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes(b"")
    corpus, said = opened(tmp_path, str(tmp_path / "*.txt"), invalid_utf8="repair")
    assert "skipped: 1 empty; repaired 1 windows-1252" in " ".join(said) and "1 document" in corpus.summary


def test_a_damaged_file_is_named_as_itself_with_the_setting(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text" * 999)[:-20])
    with pytest.raises(ValueError, match="a.txt.gz is truncated after .*set data.damaged='skip'"):
        opened(tmp_path, str(tmp_path / "a.txt.gz"))
    assert not list((tmp_path / "cache").iterdir())


def test_lineage_is_one_table_however_many_parts_and_scores():
    parts = []
    for i in range(9):
        scores = (("quality", i / 2),) if i % 2 else ()
        document = Document("text", "s", f"file {i % 2}", i, str(i), language="en", scores=scores)
        parts.append(lineage_table([document]))
    table = join_lineages(parts)
    assert table.column_names == ["file", "offset", "id", "url", "licence", "language", "score.quality"]
    assert len(table) == 9 and table["score.quality"].to_pylist()[:4] == [None, 0.5, None, 1.5]
    assert set(table["file"].to_pylist()) == {"file 0", "file 1"}
    assert table["offset"].to_pylist() == list(range(9)) and join_lineages([lineage_table([])]).num_rows == 0
