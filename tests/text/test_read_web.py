"""Web pages: out of WARC files and of single files, in the encoding they have, by both extractors."""

import gzip
import json
import pathlib
import zlib
from collections import Counter

import pytest

pytest.importorskip("resiliparse", reason="resiliparse is not installed")

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.read import read_file

CORPORA = pathlib.Path(__file__).parents[3] / "shared" / "corpora"


def read(path, **changes):
    """(documents, what was skipped)."""
    skipped = Counter()
    found = read_file(SourceFile(str(path), path.name, "web"), ReadConfig(**changes), skipped)
    return list(found), dict(skipped)


def page(text, charset=""):
    meta = f'<meta charset="{charset}">' if charset else ""
    menu = "<nav><a href='/'>Home</a></nav>"
    return f"<html><head>{meta}<title>t</title></head><body>{menu}<article><p>{text}</p></article></body></html>"


def record(kind, block, *, url="http://a.example/", mime="application/http; msgtype=response", length=None):
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: <{url}>\r\nWARC-Record-ID: <urn:uuid:{kind}>\r\n"
    size = len(block) if length is None else length
    return f"{head}Content-Type: {mime}\r\nContent-Length: {size}\r\n\r\n".encode() + block + b"\r\n\r\n"


def answer(body, mime="text/html", status="200 OK", *fields):
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Type: {mime}", *fields, "", ""]).encode() + body


LONG = "A sentence of the article that is long enough to be text, is it not? " * 6


def test_pages_come_out_of_a_warc_file_and_the_rest_is_counted(tmp_path):
    body = page(LONG + "naïve").encode()
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(body[i : i + 100]), body[i : i + 100]) for i in range(0, len(body), 100))
    raw = zlib.compressobj(wbits=-15)
    records = [
        record("warcinfo", b"software: test", mime="application/warc-fields"),
        record("request", b"GET / HTTP/1.1\r\n\r\n"),
        record("response", answer(body)),
        record("response", answer(chunked + b"0\r\n\r\n", "text/html", "200 OK", "Transfer-Encoding: chunked")),
        record("response", answer(gzip.compress(body), "text/html", "200 OK", "Content-Encoding: gzip")),
        record("response", answer(raw.compress(body) + raw.flush(), "text/html", "200", "Content-Encoding: deflate")),
        record("response", answer(body, "text/html", "200 OK", "Content-Encoding: gzip", "X-Already: undone")),
        record("response", answer(b"\xff\xd8picture", "image/jpeg")),
        record("response", answer(body, "text/html", "404 Not Found")),
        record("response", b"no http at all"),
        record("resource", body, mime="text/html"),
        record("conversion", "plain text é\n".encode(), mime="text/plain"),
        record("odd", b"?"),
    ]
    for name, content in (("a.warc", b"".join(records)), ("a.warc.gz", b"".join(map(gzip.compress, records)))):
        (tmp_path / name).write_bytes(content)
        documents, skipped = read(tmp_path / name)
        assert [document.text for document in documents] == [LONG.strip() + " naïve"] * 6 + ["plain text é"]
        assert documents[0].url == "http://a.example/" and documents[0].id == "urn:uuid:response"
        assert documents[0].offset == len(records[0] + records[1])
        assert skipped == {
            "WARC: no page but a warcinfo": 1, "WARC: no page but a request": 1, "WARC: not HTML": 1,
            "WARC: no page but another answer": 1, "WARC: not HTTP": 1,
            "WARC: no page but a record of an unknown kind": 1,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "header"),
    [
        (page("Grüße aus Köln – schön").encode(), "utf-8"),
        (page("Grüße aus Köln – schön").encode("cp1252"), "iso-8859-1"),
        (page("Grüße aus Köln – schön", "windows-1252").encode("cp1252"), ""),
        (page("Grüße aus Köln – schön", "iso-8859-1").encode(), "utf-8"),  # the header counts for more
        (page("Grüße aus Köln – schön").encode(), ""),
        ("\ufeff".encode() + page("Grüße aus Köln – schön", "latin1").encode(), "koi8-r"),
        (b"\xff\xfe" + page("Grüße aus Köln – schön").encode("utf-16-le"), ""),
        (page("Grüße aus Köln – schön", "utf-16").encode(), ""),
        (page("Grüße aus Köln – schön", "nonsense").encode(), "more-nonsense"),
    ],
)
def test_a_page_is_read_in_the_encoding_it_has(tmp_path, content, header):
    mime = "text/html" + (f"; charset={header}" if header else "")
    (tmp_path / "a.warc").write_bytes(record("response", answer(content, mime)))
    assert [document.text for document in read(tmp_path / "a.warc")[0]] == ["Grüße aus Köln – schön"]
    if not header:
        (tmp_path / "a.html").write_bytes(content)
        assert [document.text for document in read(tmp_path / "a.html")[0]] == ["Grüße aus Köln – schön"]


@pytest.mark.fault("F24")
def test_a_warc_file_that_is_cut_short_or_broken_is_named_or_counted(tmp_path):
    path, whole = tmp_path / "a.warc", record("response", answer(page(LONG).encode()))
    for content, told in (
        (whole + whole[:-200], f"is truncated in the WARC record at uncompressed byte {len(whole)};"),
        (whole + b"rubbish" * 99, f"has no WARC record at uncompressed byte {len(whole)}"),
        (whole + whole[:60], f"has no WARC record at uncompressed byte {len(whole)}"),
        (
            whole + record("response", b"", length=-5),
            "the WARC record at uncompressed byte .* has an invalid Content-Length",
        ),
        (whole + record("response", b"", length=10**15), "is truncated"),
        (whole + b"WARC/1.0\r\n" + b"x: y\r\n" * 99_999, "has no WARC record at uncompressed byte"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"a.warc:? {told}.*set damaged='skip'"):
            read(path)
        documents, skipped = read(path, damaged="skip")
        assert len(documents) == 1 and skipped == {"files cut short or broken": 1}
    (tmp_path / "a.warc.gz").write_bytes(gzip.compress(whole * 99)[:-40])
    with pytest.raises(ValueError, match="a.warc.gz is truncated after"):
        read(tmp_path / "a.warc.gz")


def test_pages_that_are_too_long_or_no_text_are_counted(tmp_path):
    bomb = answer(gzip.compress(bytes(20 << 20)), "text/html", "200 OK", "Content-Encoding: gzip")
    long = record("response", answer(page("x" * 300_000).encode()))
    binary = record("response", answer(bytes(range(256)) * 8))
    (tmp_path / "a.warc").write_bytes(
        record("response", bomb) + long + binary + record("resource", b"", mime="text/html")
    )
    documents, skipped = read(tmp_path / "a.warc", max_line_bytes=250_000)
    assert documents == [] and skipped.pop("bytes left out") > 250_000
    assert skipped == {"longer than max_line_bytes": 2, "page that is no text": 1, "empty": 1}
    (tmp_path / "a.html").write_text(page("x" * 300_000))
    assert read(tmp_path / "a.html", max_line_bytes=250_000)[1] == {
        "longer than max_line_bytes": 1, "bytes left out": (tmp_path / "a.html").stat().st_size,
    }  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.fault("H5")
@pytest.mark.parametrize("extractor", ["resiliparse", "trafilatura"])
def test_a_page_of_endless_depth_does_no_harm(tmp_path, extractor):
    if extractor == "trafilatura":
        pytest.importorskip("trafilatura", reason="trafilatura is not installed", exc_type=ImportError)
    for before, after in (("<div>" * 50_000, ""), ("<b><i class='x'>" * 9_000, "</i></b>" * 9_000)):
        (tmp_path / "a.html").write_text(before + page(LONG) + after)
        size = (tmp_path / "a.html").stat().st_size
        lost = {"page nested too deeply": 1, "bytes left out": size}
        assert read(tmp_path / "a.html", html_text=extractor) == ([], lost)
    (tmp_path / "a.html").write_text("<p>a<br>b <img src=x> <svg><path d=''/></svg>" * 2_000 + page(LONG))
    assert read(tmp_path / "a.html", html_text=extractor)[0]


def test_the_sample_of_a_crawl_gives_its_pages():
    path = CORPORA / "web_warc" / "sample-0000.warc.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    documents, skipped = read(path)
    assert len(documents) == 22 and sum(skipped.values()) == 26 and skipped["WARC: not HTML"] == 2
    assert documents[2].url == "https://soldaini.net/" and "My name is Luca Soldaini" in documents[2].text
    assert len({document.offset for document in documents}) == 22


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("how", "precision", "recall"),
    [
        ({"html_text": "resiliparse"}, 0.75, 0.90),
        ({"html_text": "trafilatura"}, 0.90, 0.93),
        ({"html_text": "trafilatura", "html_mode": "fast"}, 0.90, 0.90),
        ({"html_text": "trafilatura", "html_mode": "precision"}, 0.94, 0.90),
        ({"html_text": "trafilatura", "html_mode": "recall"}, 0.90, 0.93),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else None,
)
def test_the_text_of_pages_holds_what_people_say_it_should(how, precision, recall):
    if not (CORPORA / "web_html" / "gold.json").exists():
        pytest.skip(f"{CORPORA}/web_html/gold.json is not there")
    if how["html_text"] == "trafilatura":
        pytest.importorskip("trafilatura", reason="trafilatura is not installed", exc_type=ImportError)
    gold = json.loads((CORPORA / "web_html" / "gold.json").read_text())
    wanted, kept, unwanted, pages = 0, 0, 0, 0
    for name, told in gold.items():
        if (path := CORPORA / "web_html" / f"{name}.gz").exists():
            documents, _ = read(path, **how)
            text = documents[0].text if documents else ""
            pages, wanted = pages + 1, wanted + len(told["with"])
            kept += sum(words in text for words in told["with"])
            unwanted += sum(words in text for words in told["without"])
    found = kept / (kept + unwanted), kept / wanted
    print(f"{how}: {pages} pages, precision {found[0]:.3f}, recall {found[1]:.3f}")
    assert pages >= 30 and found[0] >= precision and found[1] >= recall
