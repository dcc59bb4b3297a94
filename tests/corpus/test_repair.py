"""Texts come out in one form, what is mended is counted, and clean text is the same object as before."""

import dataclasses
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import RepairConfig
from jaxscale.tools.corpus.curate.repair import CONTROL, EMPTY, INVALID, TOO_LONG, make_repair, repair

PLAIN = RepairConfig(mojibake=False)


def mended(text, **settings):
    """(text or None, {edit: count}, reason) of one document."""
    (outcome,) = make_repair(RepairConfig(**settings))([Document(text)])
    return outcome.document and outcome.document.text, dict(outcome.edits), outcome.reason


@pytest.mark.parametrize(
    "text", ["plain", "SÃO PAULO, Ângela", "日本語\n\ttab", "Привет ÅÄÖ — “q”", "e\u0301".join("xy")]
)
def test_a_clean_document_is_handed_on_as_it_is(text):
    doc = Document(unicodedata.normalize("NFC", text), id="7")
    assert make_repair(PLAIN)([doc]) == [(doc, "", (), "")] and make_repair(PLAIN)([doc])[0].document is doc


@pytest.mark.parametrize(
    ("text", "right", "edits"),
    [
        ("cafe\u0301", "caf\u00e9", {"normalised": 1}),
        ("a\r\nb\rc\u2028d\u0085e", "a\nb\nc\nd\ne", {"line end": 4}),
        ("nul\x00 bell\x07\x1b[0m\x7f tab\t", "nul bell[0m tab\t", {"control character": 4}),
        ("\ufeffmark \x9d\ufffe", "mark ", {"control character": 3}),
        ("one\x0ctwo\x1f\x0bthree \x0cfour\n\x0cfive", "one two three four\nfive", {"control character": 5}),
        ("lost \ufffd\ufffd bytes", "lost  bytes", {"replacement character": 2}),
        ("half \ud83d pair", "half  pair", {"half surrogate": 1}),
        ("e\x00\u0301", "\u00e9", {"control character": 1, "normalised": 1}),
    ],
)
def test_what_is_no_text_is_taken_out_and_counted(text, right, edits):
    assert mended(text, mojibake=False) == (right, edits, "")


@pytest.mark.parametrize(
    "text", ["It’s “naïve” — café", "schön, Größe", "Привет, мир", "日本語", "Åland, Ärger", "10 € für É"]
)
@pytest.mark.parametrize("wrong", ["cp1252", "latin-1"])
def test_mojibake_is_undone(text, wrong):
    pytest.importorskip("ftfy", reason="ftfy (jaxscale[prepare]) is not installed")
    planted = "".join(bytes([b]).decode(wrong, "ignore") or chr(b) for b in text.encode())  # as browsers read cp1252
    assert mended(f"clean line\n{planted}\nclean line") == (f"clean line\n{text}\nclean line", {"mojibake": 1}, "")


def test_what_one_repair_brings_together_the_next_one_mends():
    pytest.importorskip("ftfy", reason="ftfy (jaxscale[prepare]) is not installed")
    assert mended("cafA\u0303\u00a9") == ("caf\u00e9", {"normalised": 1, "mojibake": 1}, "")


def test_text_without_marks_does_not_need_ftfy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ftfy", None)
    assert mended("Ã la carte, naïve")[0] == "Ã la carte, naïve"
    with pytest.raises(ValueError, match=r"jaxscale\[prepare\]"):
        mended("naÃ¯ve")


@pytest.mark.parametrize("text", ["a\x00b", "\ufffd", "\udc80", "\x85\x86"])
def test_invalid_text_is_refused_where_that_is_the_policy(text):
    assert mended(text, invalid="drop") == (None, {}, INVALID)
    with pytest.raises(ValueError, match="part-3.jsonl at 99: .*'repair' or 'drop'"):
        make_repair(RepairConfig(invalid="stop"))([Document(text, file="part-3.jsonl", offset=99)])


def test_lines_and_documents_have_a_longest_length():
    text = "short\n" + "word " * 10 + "\nlast"
    assert mended(text, max_line_chars=20) == ("short\nlast", {"long line dropped": 1}, "")
    assert mended(text, max_line_chars=20, long_line="cut") == (
        "short\n" + "word " * 4 + "\nlast",
        {"long line cut": 1},
        "",
    )
    split, edits, _ = mended(text, max_line_chars=20, long_line="split")
    assert split.replace("\n", " ").split() == text.split() and edits == {"long line split": 1}
    assert max(map(len, split.split("\n"))) <= 20
    assert mended(text, max_chars=30) == (None, {}, TOO_LONG)
    assert mended(text, max_chars=30, long_document="cut") == (text[:30], {"document cut": 1}, "")
    assert mended("x" * 30, max_line_chars=20) == (None, {}, EMPTY)
    assert mended("x" * 45, max_line_chars=20, long_line="split")[0] == "\n".join(["x" * 20, "x" * 20, "x" * 5])


@pytest.mark.slow
def test_a_line_of_100_million_characters_takes_no_longer_than_reading_it():
    text = "x" * 100_000_000
    assert mended(text)[2] == TOO_LONG
    assert mended(text, max_chars=0)[2] == EMPTY


policies = st.builds(
    RepairConfig,
    mojibake=st.just(False),
    normalise=st.sampled_from(["NFC", "NFKC"]),
    max_line_chars=st.sampled_from([0, 4]),
    long_line=st.sampled_from(["drop", "cut", "split"]),
    max_chars=st.sampled_from([0, 12]),
    long_document=st.sampled_from(["drop", "cut"]),
)
texts = st.text(st.characters() | st.sampled_from("\x00\r\n \u0085\u0301\ufffd\ud800e"), max_size=40)


@given(texts=st.lists(texts, max_size=5), cfg=policies)
def test_every_document_has_one_outcome_and_mending_twice_changes_nothing(texts, cfg):
    docs = [Document(text, offset=i) for i, text in enumerate(texts)]
    outcomes = make_repair(cfg)(docs)
    assert len(outcomes) == len(docs)
    for doc, outcome in zip(docs, outcomes):
        assert (outcome.document is None) == bool(outcome.reason)
        if outcome.document is None:
            continue
        text = outcome.document.text
        assert dataclasses.replace(outcome.document, text=doc.text) == doc
        assert bool(outcome.edits) == (text != doc.text)
        assert not CONTROL.search(text) and "\r" not in text and unicodedata.is_normalized(cfg.normalise, text)
        text.encode("utf-8")
        assert repair(text, cfg) == (text, {}, "")


def test_wrong_settings_are_told():
    with pytest.raises(ValueError, match="max_chars=-1"):
        RepairConfig(max_chars=-1)
