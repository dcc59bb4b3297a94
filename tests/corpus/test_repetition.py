"""Gopher's rules of repetition, against a count that follows the paper word by word."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import RepetitionConfig
from jaxscale.tools.corpus.curate.quality import count_repeats, make_repetition, ngram_keys, repeated_characters
from jaxscale.tools.corpus.curate.words import block_stats, words_of

RULES = [field.name for field in dataclasses.fields(RepetitionConfig) if field.name != "words"]
OFF = dataclasses.replace(RepetitionConfig(words="spacy"), **dict.fromkeys(RULES))


def reason(text, **rules):
    (outcome,) = make_repetition(dataclasses.replace(OFF, **rules))([Document(text)])
    return outcome.reason


def others(count, length=9):
    """So many words of one length, no two equal."""
    return [f"{chr(97 + place // 20)}{chr(97 + place % 20)}".rjust(length, "z") for place in range(count)]


@pytest.mark.parametrize(
    ("rule", "kept", "dropped"),
    [
        ({"max_duplicate_lines": 0.3}, "a\na\na\na\n" + "\n".join("bcdefg"), "a\na\na\na\n" + "\n".join("bcdef")),
        ({"max_duplicate_paragraphs": 0.5}, "a\n\na\n\nb\nb\nb", "a\n\n\na\n\na"),
        ({"max_duplicate_line_chars": 0.2}, "ab\nab\n" + "c" * 4, "ab\nab\n" + "c" * 3),
        ({"max_duplicate_paragraph_chars": 0.2}, "ab\n\nab\n\n" + "c" * 2, "ab\n\nab\n\n" + "c"),
    ],
)
def test_a_line_or_paragraph_said_again_counts_just_beyond_its_threshold(rule, kept, dropped):
    assert reason(kept, **rule) == ""
    assert reason(dropped, **rule).startswith("repetition: ")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_most_frequent_sequence_counts_just_beyond_its_threshold(n):
    said = ["often", *others(n - 1, 5)]
    filler = others(40)
    text = " ".join([*said, *filler[:20], *said, *filler[20:], *said])
    characters = 3 * len(" ".join(said))
    rule = f"max_top_{n}gram"
    assert reason(text, **{rule: characters / len(text)}) == ""
    assert (
        reason(text, **{rule: (characters - 1) / len(text)}) == f"repetition: too many characters in the top {n}-gram"
    )


@pytest.mark.parametrize("n", range(5, 11))
def test_repeated_sequences_count_just_beyond_their_threshold(n):
    said = others(12, 5)
    text = " ".join([*said, *others(30), *said, "end"])
    characters = 5 * n * (12 // n)  # the twelve words are gone over n at a time
    rule = f"max_duplicate_{n}gram"
    assert reason(text, **{rule: characters / len(text)}) == ""
    told = reason(text, **{rule: (characters - 1) / len(text)})
    assert told == f"repetition: too many characters in duplicate {n}-grams"


def test_the_parts_said_again_are_all_but_the_first():
    assert count_repeats(["ab", "c", "ab", "ab"]) == (2, 4)
    assert count_repeats([]) == (0, 0)


def expected_reason(words, text, cfg):
    """The rules on sequences, counted in the plain way."""
    for n, most in cfg.ngram_rules("top"):
        if len(words) >= n:
            grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
            gram, times = collections.Counter(grams).most_common(1)[0]
            if len(gram) * times > most * len(text):
                return f"repetition: too many characters in the top {n}-gram"
    for n, most in cfg.ngram_rules("duplicate"):
        seen, characters, place = set(), 0, 0
        while place + n <= len(words):
            gram = tuple(words[place : place + n])
            if gram in seen:
                characters += sum(map(len, gram))
                place += n
            else:
                seen.add(gram)
                place += 1
        if characters > most * len(text):
            return f"repetition: too many characters in duplicate {n}-grams"
    return ""


@given(
    st.lists(st.sampled_from(["a", "bb", "ccc"]), min_size=1, max_size=60)
    | st.lists(st.sampled_from(others(12)), min_size=1, max_size=60),
    st.lists(st.none() | st.floats(0, 1), min_size=9, max_size=9),
)
def test_the_quick_verdict_is_the_plain_one(words, thresholds):
    names = RULES[4:]
    cfg = dataclasses.replace(OFF, **dict(zip(names, thresholds)))
    text = " ".join(words)
    assert words_of(text) == words
    (outcome,) = make_repetition(cfg)([Document(text)])
    assert outcome.reason == expected_reason(words, text, cfg)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.integers(1, 15))
def test_a_sequence_has_the_hash_of_its_words_in_order(hashes, n):
    base = 0x9E3779B97F4A7C15
    keys = ngram_keys(np.array(hashes, np.uint64), n)
    places = range(max(0, len(hashes) - n + 1))
    assert keys.tolist() == [
        sum(word * pow(base, n - 1 - at, 1 << 64) for at, word in enumerate(hashes[place : place + n])) % 2**64
        for place in places
    ]


def test_what_lies_in_a_repeated_sequence_is_not_counted_again():
    stats = block_stats(["a b c a b c a b c"])[0]
    ends = np.concatenate([[0], stats.lengths.cumsum()])
    assert repeated_characters(ngram_keys(stats.hashes, 3), ends, 3) == 6
