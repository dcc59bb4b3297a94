"""C4's rules: which lines are kept, which documents are dropped, what is counted."""

import dataclasses

import pytest

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import C4Config
from jaxscale.tools.corpus.curate.quality import count_sentences, make_c4

OFF = C4Config(
    terminal_punctuation=False, min_line_words=None, max_word_length=None, javascript=False, policies=False,
    citations=False, lorem_ipsum=False, curly_bracket=False, min_sentences=None,
)  # fmt: skip


def outcome(text, **rules):
    (result,) = make_c4(dataclasses.replace(OFF, **rules))([Document(text, id="x")])
    return result


def lines_kept(text, **rules):
    result = outcome(text, **rules)
    return result.document.text.split("\n"), dict(result.edits)


@pytest.mark.parametrize(
    ("rule", "lines", "kept", "edit"),
    [
        (
            {"terminal_punctuation": True},
            ["One.", "Two!", "Three?", 'He said "four"', "it's 'five'", "six", "seven...", "eight;"],
            4,
            {"c4: line without terminal punctuation": 4},
        ),
        (
            {"terminal_punctuation": True, "end_marks": ("'", "\u3002")},
            ["it's 'five'", "\u4e00\u3002", "One."],
            2,
            {"c4: line without terminal punctuation": 1},
        ),
        (
            {"min_line_words": 3},
            ["one two three", "one, two; three", "one two", "one"],
            2,
            {"c4: line of few words": 2},
        ),
        ({"max_word_length": 10}, ["a" * 10 + " b", "a" * 11 + " b"], 1, {"c4: line with a long word": 1}),
        ({"javascript": True}, ["coffee", "Please turn JavaScript on"], 1, {"c4: line with javascript": 1}),
        (
            {"policies": True},
            [
                "cookies are sweet",
                "Read our Privacy Policy",
                "TERMS OF USE",
                "we use cookies",
                "this site uses cookies",
            ],
            1,
            {"c4: line on policies": 4},
        ),
    ],
)
def test_a_rule_takes_out_lines_and_counts_them(rule, lines, kept, edit):
    assert lines_kept("\n".join(lines), **rule) == (lines[:kept], edit)


def test_citations_are_taken_out_of_their_line():
    text = "Water is wet.[1] Fire[citation needed] is hot.[23][edit] See [a]."
    assert lines_kept(text, citations=True) == (["Water is wet. Fire is hot. See [a]."], {"c4: citation": 4})


def test_a_line_with_lorem_ipsum_or_a_bracket_drops_the_document_if_it_would_be_kept():
    assert outcome("Fine.\nLorem Ipsum dolor.", lorem_ipsum=True).reason == "c4: lorem ipsum"
    assert outcome("Fine.\nif (x) { y }", curly_bracket=True).reason == "c4: curly bracket"
    assert outcome("Fine.\nlorem ipsum", lorem_ipsum=True, terminal_punctuation=True).document.text == "Fine."
    assert outcome("Fine.\nif {", curly_bracket=True, terminal_punctuation=True).document.text == "Fine."


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two. Three. Four. Five.", 5),
        ("One. Two. Three. Four", 4),
        ("One\nTwo\nThree\nFour\nFive", 5),
        ("One. Two\nThree... four\nFour. 'Five", 5),
        ('He said "No!" Then? "Yes." ! ?', 3),
        ("Mr. Smith of the U.S. army left.", 1),
        ("Wait... what", 1),
        ("One.two", 1),
    ],
)
def test_sentences_are_counted_within_lines_and_over_them(text, sentences):
    assert outcome(text, min_sentences=sentences).document
    assert outcome(text, min_sentences=sentences + 1).reason == f"c4: fewer than {sentences + 1} sentences"
    assert sum(count_sentences(line, 99) for line in text.split("\n")) == sentences


def test_a_document_that_passes_whole_is_the_same_object():
    document = Document("Here is a whole line.\nAnd here is one more.\nThis is the third. A fourth! A fifth?")
    (result,) = make_c4(C4Config())([document])
    assert result.document is document and result.edits == ()


def test_blank_lines_stay_only_where_no_rule_asks_for_words_in_a_line():
    assert lines_kept("a b c\n\nd e f") == (["a b c", "", "d e f"], {})
    assert lines_kept("a b c\n\n d e f ", min_line_words=3) == (["a b c", "d e f"], {})
    assert outcome(" \n \n").reason == "c4: no line left"


def test_a_bad_word_drops_only_as_a_whole_word(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("darn\n\nheck it\nc++\n", encoding="utf-8")
    dropped = outcome("Well, DARN!", bad_words=str(path))
    assert (dropped.reason, dropped.detail) == ("c4: bad word", "darn")
    assert outcome("so heck it.", bad_words=str(path)).reason
    assert outcome("I darned my socks; heck is it", bad_words=str(path)).document


def test_a_file_of_bad_words_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(ValueError, match="bad_words=.*cannot be read"):
        make_c4(C4Config(bad_words=str(tmp_path / "none.txt")))
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no words"):
        make_c4(C4Config(bad_words=str(tmp_path / "empty.txt")))
