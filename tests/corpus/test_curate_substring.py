"""Repeated passages are cut but for their first occurrence, and text stays text."""

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import SubstringConfig
from jaxscale.tools.corpus.curate.duplicates import make_substring, repeated_passages

pytest.importorskip("pydivsufsort", reason="repeated passages need the extra jaxscale[prepare]")


def stage(texts, min_bytes=8, min_document_characters=0):
    cfg = SubstringConfig(min_bytes=min_bytes, min_document_characters=min_document_characters)
    return make_substring(cfg)([Document(text) for text in texts])


def brute_force(texts, size):
    """bool[bytes]: what is to be cut, window by window."""
    flat = b"".join(text.encode() + b"\xff" for text in texts)
    seen, cut = {}, np.zeros(len(flat), bool)
    for place in range(len(flat) - size + 1):
        window = flat[place : place + size]
        if b"\xff" not in window:
            first = seen.setdefault(window, place)
            if first != place:
                cut[max(place, first + size) : place + size] = True
    whole = np.zeros(len(flat), bool)
    place = 0
    for text in texts:
        for character in text:
            width = len(character.encode())
            whole[place : place + width] = cut[place : place + width].all()
            place += width
        place += 1
    return whole


# fragments that come again often, next to characters that share bytes: é c3a9, è c3a8, © c2a9
FRAGMENTS = st.lists(st.sampled_from(["abcdef", "éabcde", "abcde©", "abcdeè", "a", "ba", "文字"]), max_size=8).map(
    "".join
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(FRAGMENTS | st.text("ab", max_size=40), max_size=5))
@example(["ha" * 30])
@example(["1234567é", "1234567è"])
@example(["é1234567", "©1234567"])
def test_what_is_cut_is_what_windows_find_one_by_one(texts):
    flat = np.frombuffer(b"".join(text.encode() + b"\xff" for text in texts), np.uint8)
    starts, stops = repeated_passages(flat, 8)
    found = np.zeros(len(flat), bool)
    for start, stop in zip(starts, stops):
        assert stop > start
        found[start:stop] = True
    assert np.array_equal(found, brute_force(texts, 8))
    assert np.all(starts[1:] > stops[:-1])  # neighbours are one passage


@settings(max_examples=60, deadline=None)
@given(st.lists(FRAGMENTS, max_size=4))
def test_no_character_is_made_up_and_the_first_document_keeps_its_begin(texts):
    outcomes = stage(texts)
    assert len(outcomes) == len(texts)
    for text, outcome in zip(texts, outcomes):
        kept = iter(text)
        assert all(character in kept for character in outcome.document.text.replace("\n", ""))  # a subsequence
    if texts:
        assert outcomes[0].document.text.startswith(texts[0].encode()[:8].decode(errors="ignore"))


def test_a_planted_passage_is_cut_where_it_comes_again():
    rng = random.Random(0)
    words = lambda n: " ".join(f"{rng.getrandbits(40):x}" for _ in range(n))
    passage = f" {words(30)} "
    texts = [words(50) + passage + words(50), words(20), words(40) + passage + words(40), passage + words(30)]
    outcomes = stage(texts, min_bytes=200)
    assert [outcome.document.text for outcome in outcomes[:2]] == texts[:2]
    assert (
        outcomes[2].document.text
        == texts[2].replace(passage, "")[:0] + texts[2].split(passage)[0] + "\n" + texts[2].split(passage)[1]
    )
    assert outcomes[3].document.text == texts[3][len(passage) :]
    assert outcomes[2].edits == (("repeated passage", 1),)
    assert outcomes[2].detail == f"{len(passage.encode())} bytes repeated"


def test_a_document_of_which_little_is_left_is_dropped():
    text = "A passage that is there twice, word for word."
    first, second = stage([text, text + " And more."], min_document_characters=20)
    assert first.document.text == text
    assert second.document is None and second.reason == "repeated passages: too little is left"


def test_copies_side_by_side_do_not_match_across_documents():
    first, second, third = stage(["abcd", "efgh", "abcd"])  # abcd/efgh/abcd: 8 bytes only with a separator
    assert [o.document.text for o in (first, second, third)] == ["abcd", "efgh", "abcd"]


def test_an_empty_block_and_empty_documents_are_no_trouble():
    assert stage([]) == []
    assert [outcome.document.text for outcome in stage(["", "", "a"])] == ["", "", "a"]


@pytest.mark.parametrize("wrong", [dict(min_bytes=7), dict(min_document_characters=-1)])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SubstringConfig(**wrong)
