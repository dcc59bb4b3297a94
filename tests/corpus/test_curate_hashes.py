"""Hashes say the same everywhere, and the array paths agree with the plain definition."""

import dataclasses
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate import hashes
from jaxscale.tools.corpus.curate.hashes import (
    hash_words,
    line_hashes,
    ngram_hashes,
    ngram_table,
    text_hash,
    word_hashes,
    word_hashes_of,
    word_spans,
)

MIXED = st.text(
    st.sampled_from("abzAZ019 .,'\n\t_éÉßΣσςİı\u0301中文字ー한국кирилл\U0001d400\U0001f600\u00a0\u3000\x00")
)


WORDS = [
    5845325944204517568,
    12852412053637655647,
    6128502749543806854,
    491954077667728179,
    639152920025852561,
    14223074510246868777,
]
NGRAMS = [18425109332481218042, 17414178362623474133]
TEXT = 75481193028632457549274888831424950261
LINES = [7079015680057576913]


def in_word(character):
    return unicodedata.category(character)[0] in "LNM"


def words_of(text):
    """The words by the definition, one character at a time."""
    words = [[]]
    for character in text:
        words[-1:] = [[*words[-1], character]] if in_word(character) else [words[-1], []]
    return ["".join(word) for word in words if word]


def test_hashes_are_these_numbers_on_every_machine():
    assert word_hashes("The cat's 2 naïve Ωmega").tolist() == WORDS
    assert ngram_hashes(word_hashes("one two three four"), 3).tolist() == NGRAMS
    assert text_hash(" Wrapped\n text, é ") == TEXT
    assert line_hashes("a short one\nA line of some length", 10)[0].tolist() == LINES


@given(MIXED | st.text(max_size=60))
def test_words_are_maximal_runs_and_hash_the_same_whatever_is_around_them(text):
    words = words_of(text)
    expected = [int(word_hashes(word)[0]) for word in words]
    assert word_hashes(text).tolist() == expected
    assert word_hashes(text + " é").tolist()[:-1] == expected  # not ASCII: the other path
    assert [text[begin:end] for begin, end in word_spans(text)] == words


@given(st.text(max_size=60))
def test_case_does_not_matter_where_it_is_one_character_for_one(text):
    text = "".join(c for c in text if len(c.lower()) == len(c.upper()) == 1 and c.lower() == c.upper().lower())
    assert np.array_equal(word_hashes(text.upper()), word_hashes(text.lower()))


@pytest.mark.parametrize(
    ("one", "other"), [("ΟΔΟΣ", "οδος"), ("ΟΔΟΣ", "οδοσ"), ("İZMİR", "izmir"), ("STRASSE", "strasse")]
)
def test_words_that_differ_by_case_alone_are_one(one, other):
    assert np.array_equal(word_hashes(one), word_hashes(other))


@given(st.lists(st.text("ab é", max_size=9), max_size=30).map(" ".join), st.integers(1, 40))
def test_a_long_text_is_hashed_in_pieces_as_if_at_once(text, piece):
    whole = word_hashes(text), word_spans(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashes, "PIECE", piece)
        assert np.array_equal(word_hashes(text), whole[0])
        assert np.array_equal(word_spans(text), whole[1])


@given(st.lists(MIXED | st.text("ab\ud800", max_size=9), max_size=9), st.integers(1, 40), st.integers(1, 40))
def test_texts_that_are_hashed_together_have_the_words_of_each(texts, together, piece):
    alone = [word_hashes(text).tolist() for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashes, "HASHED_TOGETHER", together)
        patch.setattr(hashes, "PIECE", piece)
        assert [row.tolist() for row in word_hashes_of(texts)] == alone


def test_different_words_have_different_hashes_in_all_bits():
    found = np.array([word_hashes(f"w{i}")[0] for i in range(10_000)], np.uint64)
    assert len(np.unique(found)) == len(found)
    bits = np.unpackbits(found.view(np.uint8)).reshape(-1, 64).mean(0)
    assert np.all(np.abs(bits - 0.5) < 0.028)  # 5.6 standard errors
    assert len(set(word_hashes("ab ba aab aba baa").tolist())) == 5


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.integers(1, 15))
def test_an_ngram_hashes_the_same_wherever_it_stands(values, n):
    values = np.array(values, np.uint64)
    found = ngram_hashes(values, n)
    assert found.tolist() == [int(ngram_hashes(values[i : i + n], n)[0]) for i in range(max(0, len(values) - n + 1))]


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 7), st.integers(1, 30))
def test_a_table_of_ngrams_is_that_of_each_row(lengths, n, together):
    rows = [word_hashes(" ".join(f"{i} {j}" for j in range(length))) for i, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashes, "TOGETHER", together)
        found, counts = ngram_table(rows, n)
    assert counts.tolist() == [max(0, len(row) - n + 1) for row in rows]
    assert found.tolist() == [value for row in rows for value in ngram_hashes(row, n).tolist()]


def test_order_counts_in_an_ngram_and_repetition_in_a_word():
    a, b = word_hashes("to be"), word_hashes("be to")
    assert ngram_hashes(a, 2)[0] != ngram_hashes(b, 2)[0]
    assert len(set(word_hashes("a aa aaa aaaa").tolist())) == 4


def test_a_copy_that_is_wrapped_otherwise_is_the_same_text():
    assert text_hash("some words\nhere") == text_hash("  some\twords \r\n here\u00a0\u3000")
    assert text_hash("Some") != text_hash("some")
    assert text_hash("SÖME", lower=True) == text_hash("söme", lower=True)
    assert text_hash("SOME", lower=True) == text_hash("some")
    assert text_hash("a, b") != text_hash("a b")


def test_only_long_lines_are_hashed_and_their_place_is_told():
    found, places = line_hashes("short\nthis is long enough\n\n   éééé   \n  This is  long enough", 15)
    assert places.tolist() == [1, 4]
    assert found[0] != found[1]
    lowered, _ = line_hashes("this is long enough\nThis is long enough", 15, lower=True)
    assert lowered[0] == lowered[1] == found[0]
    assert line_hashes("é" * 9, 10)[1].tolist() == []  # 18 bytes, but 9 characters
    assert line_hashes("", 1)[1].tolist() == []


def test_text_that_cannot_be_encoded_is_hashed_all_the_same():
    assert len(word_hashes("a \ud800 b")) == 2
    assert text_hash("\ud800") != text_hash("")
    assert line_hashes("\ud800" * 5, 5)[1].tolist() == [0]


def test_a_document_keeps_its_words_but_not_those_of_another_text():
    document = Document("one two")
    assert hash_words([document])[0] is hash_words([document])[0]
    assert len(hash_words([dataclasses.replace(document, text="one")])[0]) == 1
    other = Document("three")
    assert [len(words) for words in hash_words([document, other])] == [2, 1]
    assert hash_words([other])[0] is other.computed["words"]
