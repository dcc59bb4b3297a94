"""Gopher's and FineWeb's rules of quality: each drops just beyond its threshold, and nothing else."""

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.runtime.text.document import Document
from jaxscale.schema import from_dict, to_dict
from jaxscale.tools.corpus.curate.config import C4Config, FineWebConfig, GopherConfig, RepetitionConfig
from jaxscale.tools.corpus.curate.quality import make_c4, make_fineweb, make_gopher, make_repetition

MAKERS = {
    C4Config: make_c4,
    FineWebConfig: make_fineweb,
    GopherConfig: make_gopher,
    RepetitionConfig: make_repetition,
}
PROSE = "the cat sat with care on a mat near the old door and then slept"


def all_off(config):
    """The config with every rule off; words as spaCy cuts them, where a mark can be one."""
    values = {"words": "spacy"} if hasattr(config, "words") else {}
    values |= {f.name: None for f in dataclasses.fields(config) if "None" in str(f.type)}
    return config(**values, **{f.name: False for f in dataclasses.fields(config) if f.type is bool})


def only(config, **rules):
    """The stage of one rule alone."""
    return MAKERS[config](dataclasses.replace(all_off(config), **rules))


def reason(stage, text):
    (outcome,) = stage([Document(text)])
    assert (outcome.document is None) == bool(outcome.reason)
    return outcome.reason


@pytest.mark.parametrize(
    ("rule", "kept", "dropped", "says"),
    [
        ({"min_words": 50}, "word, " * 50, "word, " * 49, "gopher: fewer than 50 words"),
        ({"max_words": 50}, "word, " * 50, "word, " * 51, "gopher: more than 50 words"),
        ({"min_word_length": 3.0}, "abc , ab , abcd", "abc ab", "gopher: words too short"),
        ({"max_word_length": 10.0}, "a" * 10 + " !", "a" * 10 + " " + "b" * 11, "gopher: words too long"),
        ({"max_symbol_ratio": 0.1}, "# " + "a " * 9, "# " + "a " * 8, "gopher: too many hash signs"),
        ({"max_symbol_ratio": 0.1}, "... " + "a " * 9, "... " + "a " * 8, "gopher: too many ellipses"),
        ({"max_symbol_ratio": 0.1}, "… " + "a " * 9, "… " + "a " * 8, "gopher: too many ellipses"),
        ({"max_bullet_lines": 0.9}, "- a\n" * 9 + "a - b", "- a\n" * 10, "gopher: too many bullet lines"),
        ({"max_bullet_lines": 0.9}, "• a\n" * 9 + "b", " • a\n" * 19 + "b", "gopher: too many bullet lines"),
        (
            {"max_ellipsis_lines": 0.3},
            "a...\n" * 3 + "b\n" * 7,
            "a… \n" * 4 + "b\n" * 6,
            "gopher: too many lines end in an ellipsis",
        ),
        ({"min_alphabetic_words": 0.8}, "a b c d 5", "a b c d 5 6", "gopher: too few words with a letter"),
        ({"min_stop_words": 2}, "the end of it", "the end, the end The to.do", "gopher: too few stop words"),
        ({"min_stop_words": 1, "stop_words": ("und",)}, "dies und das", "the and of", "gopher: too few stop words"),
    ],
)
def test_each_rule_of_gopher_drops_just_beyond_its_threshold(rule, kept, dropped, says):
    stage = only(GopherConfig, **rule)
    assert reason(stage, kept) == ""
    assert reason(stage, dropped) == says
    assert reason(make_gopher(all_off(GopherConfig)), dropped) == ""


def test_marks_are_words_only_where_spacy_cuts_them():
    dialogue = '"Oh!" said he. "Why, so, and to what end?" "No; none, but that; be still!" ' * 5
    assert reason(make_gopher(GopherConfig(words="spacy")), dialogue) == "gopher: too few words with a letter"
    assert reason(make_gopher(GopherConfig()), dialogue) == ""
    joined = ", and ".join(f"w{place:08}" for place in range(40))
    assert reason(make_repetition(RepetitionConfig(words="spacy")), joined).endswith("top 2-gram")
    assert reason(make_repetition(RepetitionConfig()), joined) == ""


@pytest.mark.parametrize(
    ("rule", "kept", "dropped", "says"),
    [
        (
            {"min_punctuated_lines": 0.12},
            "Yes.\n" * 12 + "no\n \n" * 88,
            "Yes.\n" * 11 + "no\n" * 89,
            "fineweb: too few lines end a sentence",
        ),
        (
            {"max_short_lines": 0.67},
            f"{'a' * 30}\n" * 67 + f"{'a' * 31}\n" * 33,
            f"{'a' * 30}\n" * 68 + f"{'a' * 31}\n" * 32,
            "fineweb: too many short lines",
        ),
        (
            {"max_duplicate_line_chars": 0.01},
            "a\n" + "b" * 98 + "\na",
            "a\n" + "b" * 97 + "\na",
            "fineweb: too many characters in duplicate lines",
        ),
        ({"max_newlines_per_word": 0.3}, "a,b,c d e\n\n\n1, 2", "a b c\n\n\nd e f g,", "fineweb: too many newlines"),
        ({"max_newlines_per_word": 0}, "a b", "a\nb", "fineweb: too many newlines"),
        ({}, "a", "\n \n", "fineweb: no text"),
    ],
)
def test_each_rule_of_fineweb_drops_just_beyond_its_threshold(rule, kept, dropped, says):
    stage = only(FineWebConfig, **rule)
    assert reason(stage, kept) == ""
    assert reason(stage, dropped) == says


def test_the_published_thresholds_are_the_defaults():
    gopher = to_dict(GopherConfig())
    assert [gopher[name] for name in list(gopher)[:10]] == ["whitespace", 50, 100_000, 3.0, 10.0, 0.1, 0.9, 0.3, 0.8, 2]
    assert list(to_dict(FineWebConfig()).values()) == [0.12, 0.67, 30, 0.01, 0.3]
    repetition = ["whitespace", 0.3, 0.3, 0.2, 0.2, 0.2, 0.18, 0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.1]
    assert list(to_dict(RepetitionConfig()).values()) == repetition
    assert list(to_dict(C4Config()).values()) == [
        True, [".", "?", "!", '"'], 5, 1000, True, True, True, True, True, 3, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (GopherConfig, {"max_symbol_ratio": 1.5}, "max_symbol_ratio=1.5 must be from 0 to 1"),
        (GopherConfig, {"min_words": 9, "max_words": 8}, "would drop every document"),
        (GopherConfig, {"min_words": -1}, "min_words=-1 must be at least 0"),
        (GopherConfig, {"min_stop_words": 3, "stop_words": ("a",)}, "from 0 to 1, the number of stop_words"),
        (FineWebConfig, {"max_short_lines": -0.1}, "max_short_lines=-0.1 must be from 0 to 1"),
        (FineWebConfig, {"short_line": -1}, "short_line=-1 must be at least 0"),
        (FineWebConfig, {"max_newlines_per_word": -1.0}, "max_newlines_per_word=-1.0 must be at least 0"),
        (RepetitionConfig, {"max_top_3gram": 2.0}, "max_top_3gram=2.0 must be from 0 to 1"),
        (C4Config, {"end_marks": (".", " ")}, "must be non-blank strings; to accept any line end, set"),
        (C4Config, {"min_sentences": 0}, "min_sentences=0 must be at least 1"),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(config, values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(config, values)


TEXTS = st.lists(
    st.sampled_from([PROSE, "Terse.", "the", "\n", "\n\n", " ", "- ", "...", "{", "\x00", "café 漢字", "[1]", "a b c"])
    | st.text(max_size=8),
    max_size=40,
).map(" ".join)


@pytest.mark.cases(1)
@pytest.mark.parametrize("config", MAKERS, ids=lambda config: config.__name__)
@given(texts=st.lists(TEXTS, max_size=4))
def test_a_verdict_depends_on_the_document_alone(config, texts):
    stage = MAKERS[config](config())
    documents = [Document(text, id=str(place)) for place, text in enumerate(texts)]
    outcomes = stage(documents)
    assert len(outcomes) == len(documents)
    assert stage(documents[::-1]) == outcomes[::-1]
    assert [document.text for document in documents] == texts
    for document, outcome in zip(documents, outcomes):
        assert stage([Document(document.text, id=document.id)]) == [outcome]
        assert (outcome.document is None) == bool(outcome.reason)
        if outcome.document and not outcome.edits:
            assert outcome.document.id == document.id


@pytest.mark.parametrize("config", MAKERS)
@pytest.mark.parametrize("text", ["", " ", "\n \n\n"])
def test_a_document_without_text_is_dropped(config, text):
    assert reason(MAKERS[config](config()), text)


@pytest.mark.cases(6)
@pytest.mark.parametrize("config", MAKERS, ids=lambda config: config.__name__)
@pytest.mark.parametrize(
    "text",
    ["\x00" * 1000, "\x00 " * 500, "a " * 500_000, "a" * 1_000_000, "the cat. " * 110_000, "\n" * 1_000_000,
     "." * 1_000_000, "a\n" * 300_000, "(" * 1_000_000],
    ids=["nul", "nuls", "words", "word", "line", "newlines", "dots", "lines", "brackets"],
)  # fmt: skip
def test_strange_texts_get_a_verdict_soon(config, text):
    stage = MAKERS[config](config())
    start = time.process_time()
    assert len(stage([Document(text)])) == 1
    assert time.process_time() - start < 10  # at most 2 s on a quiet core
    (outcome,) = MAKERS[config](all_off(config))([Document(text)])
    assert time.process_time() - start < 20
    assert outcome.document is None or outcome.document.text == text.strip() or config is not C4Config
