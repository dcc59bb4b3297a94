"""The words that the rules of quality count."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate import words
from jaxscale.tools.corpus.curate.words import block_stats, cut, hash_of, stats_of, words_of

PIECES = (
    "cannot Mr. (a) :D word. Word.” x. 2014. (8) 10am don’t 'em “so” café. naïve, С.Ш.А. 漢字。 ... a.b £5 №5 ill. Ill."
)
TEXTS = (
    st.lists(st.sampled_from(PIECES.split()) | st.text(max_size=4), max_size=9).map(" ".join)
    | st.text(st.sampled_from("aBé漢1 ,.'’\"(-/:$%\n\t\x00 😀\ud800"), max_size=60)
    | st.text(max_size=60)
)
words.letter_table()  # takes 0.1 s, which is made for the first text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("plain words", "plain words"),
        ("(Yes), he said.", "( Yes ) , he said ."),
        ("don't can't they'll've I'm", "do n't ca n't they 'll 've I 'm"),
        ("dont cannot gonna", "do nt can not gon na"),
        ("its well were", "its well were"),
        ("John’s dogs' O'Brien", "John ’s dogs ' O'Brien"),
        ("state-of-the-art 10-12 e-mail", "state - of - the - art 10 - 12 e - mail"),
        ("Mr. Smith of the U.S. left.", "Mr. Smith of the U.S. left ."),
        ("$5.50 10km 7pm 50%", "$ 5.50 10 km 7 pm 50 %"),
        ("wait...what… so", "wait ... what … so"),
        ("see www.example.com/a,b or http://a.org.", "see www.example.com/a,b or http://a.org ."),
        ("mail me@example.com, and/or call", "mail me@example.com , and/or call"),
        (":) this one,that one", ":) this one , that one"),
        ("end.Next either/or", "end . Next either / or"),
        ("a\x00b", "a\x00b"),
    ],
)
def test_words_are_split_from_marks_and_contractions_are_opened(text, expected):
    assert words_of(text) == expected.split()


@given(TEXTS)
def test_no_character_of_a_text_is_lost_or_moved(text):
    assert "".join(words_of(text)) == "".join(text.split())


@given(st.lists(TEXTS, max_size=3))
def test_words_between_whitespace_are_those_of_split(texts):
    for text, stats in zip(texts, block_stats(texts, "whitespace"), strict=True):
        expected = text.split()
        assert stats.hashes.tolist() == [hash_of(word) for word in expected]
        assert stats.lengths.tolist() == [len(word) for word in expected]
        assert (stats.plain, stats.plain_chars) == (len(expected), sum(map(len, expected)))
        assert stats.alphabetic == sum(any(map(str.isalpha, word)) for word in expected)


@given(TEXTS)
def test_the_arrays_say_what_the_words_say(text):
    stats, expected = block_stats([text])[0], words_of(text)
    plain = [word for word in expected if any(map(str.isalnum, word))]
    assert stats.total == len(expected)
    assert stats.hashes.tolist() == [hash_of(word) for word in expected]
    assert stats.lengths.tolist() == list(map(len, expected))
    assert (stats.plain, stats.plain_chars) == (len(plain), sum(map(len, plain)))
    assert stats.alphabetic == sum(any(map(str.isalpha, word)) for word in expected)


@given(st.lists(TEXTS, max_size=5))
def test_what_was_read_before_changes_nothing(texts):
    before = [block_stats([text])[0] for text in texts]
    for stats, text in zip(reversed(before), reversed(texts)):
        again = block_stats([text])[0]
        np.testing.assert_array_equal(again.hashes, stats.hashes)
        assert (again.plain, again.alphabetic) == (stats.plain, stats.alphabetic)


def test_a_full_memory_is_begun_anew(monkeypatch):
    texts = [" ".join(f"w-{place * 7 + n}," for n in range(50)) for place in range(20)]
    texts += [f"{place}-b," * 90 for place in range(20)]  # few pieces, and long ones
    before = [block_stats([text])[0].hashes.tolist() for text in texts]
    monkeypatch.setattr(words, "MAX_REMEMBERED", 60)
    first = words._memory
    assert [block_stats([text])[0].hashes.tolist() for text in texts] == before
    assert [block_stats([text])[0].hashes.tolist() for text in reversed(texts)] == before[::-1]
    assert words._memory is not first and words._memory.used <= 60 + 500  # and what the last text had


@given(st.lists(TEXTS, max_size=6), st.integers(1, 40), st.integers(1, 6))
def test_texts_taken_together_or_in_parts_have_the_same_words(texts, batch_chars, slot_bits):
    expected = [list(map(hash_of, words_of(text))) for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "BATCH_CHARS", batch_chars)
        patch.setattr(words, "SLOT_BITS", slot_bits)  # so few that pieces push each other out
        patch.setattr(words, "_memory", words._Memory())
        for _ in range(2):
            assert [stats.hashes.tolist() for stats in block_stats(texts)] == expected


def test_stats_are_made_once_and_kept_with_the_document():
    documents = [Document("one two"), Document(""), Document("three")]
    alone = stats_of(documents[:1])[0]
    together = stats_of(documents)
    assert [stats.total for stats in together] == [2, 0, 1]
    assert together[0] is alone and stats_of(documents[2:3])[0] is together[2]


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["(" * 1_000_000, "a" * 1_000_000, "a.b-c'd/" * 100_000, "1," * 400_000])
def test_a_piece_of_a_million_characters_takes_no_time_that_grows_with_its_square(piece):
    start = time.process_time()
    assert "".join(cut(piece)) == piece
    assert block_stats([piece])[0].lengths.sum() == len(piece)
    assert time.process_time() - start < 10  # 1 s on a quiet core
