"""A text that comes token by token is the text that comes at once, whatever tokens cut in two."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.sampling.text_stream import TextStream, overlap
from jaxscale.runtime.text.tokenizer.bpe import train_bpe
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer

BYTES = ByteTokenizer()


def streamed(ids, decode, prompt=(), stops=()):
    stream = TextStream(decode, prompt, stops)
    pieces = [stream.push(int(i)) for i in ids]
    return [*pieces, stream.end()], stream


@given(st.text(max_size=30), st.text(max_size=6))
@settings(max_examples=60, deadline=None)
def test_no_piece_has_half_a_character_and_none_is_lost(text, prompt):
    pieces, _ = streamed(BYTES.encode(text), BYTES.decode, BYTES.encode(prompt))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=40))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_text_come_as_they_are_decoded_at_once(ids):
    pieces, _ = streamed(ids, BYTES.decode)
    assert "".join(pieces) == BYTES.decode(ids)


def test_a_character_comes_with_its_last_byte_and_other_bytes_do_not_wait_for_ever():
    pieces, _ = streamed("a€b".encode(), BYTES.decode)
    assert pieces == ["a", "", "", "€", "b", ""]
    pieces, _ = streamed([0xFF] * 9, BYTES.decode)
    assert "".join(pieces[:9]) == "\ufffd" * 6 and pieces[-1] == "\ufffd" * 3


def test_a_tokenizer_that_drops_the_first_space_keeps_it_behind_a_prompt():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.decoder = tokenizers.decoders.Metaspace(replacement="▁", prepend_scheme="always")
    decode = lambda ids: tokenizer.decode([int(i) for i in ids])
    assert decode([1, 1]) == "b b"
    assert streamed([1, 1], decode, prompt=[0])[0] == [" b", " b", ""]
    long = np.random.default_rng(0).integers(0, 2, 40)
    assert "".join(streamed(long, decode)[0]) == decode(long)


def test_pieces_of_a_trained_tokenizer_give_its_text():
    texts = ["größer 🙂 als 12 €, nicht wahr?"] * 3
    trained = train_bpe(texts, 300, ["<|endoftext|>"], "gpt2", "tokenizers")
    ids = trained.encode(texts[0]).ids
    pieces, _ = streamed(ids, lambda some: trained.decode([int(i) for i in some]), prompt=ids[:5])
    assert "".join(pieces) == texts[0] and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 99])
@pytest.mark.parametrize(
    "stops, wanted",
    [(["\nUser:"], "Hello"), (["xyz"], None), (["o", "ll"], "He"), (["🙂"], None), (["lo\nUs", "o"], "Hell")],
)
def test_a_stop_text_ends_it_wherever_tokens_are_cut(stops, wanted, cut):
    text = "Hello\nUser: hi\nUs 🙂"
    chunks = [text[i : i + cut] for i in range(0, len(text), cut)]
    decode = lambda ids: "".join(chunks[int(i)] for i in ids)
    pieces, stream = streamed(range(len(chunks)), decode, stops=stops)
    wanted = text.partition(stops[0])[0] if wanted is None else wanted
    assert "".join(pieces) == wanted
    assert stream.stopped == any(stop in text for stop in stops)


ALPHABET = "aé€🙂"  # of one to four bytes; the last bytes of some are those of others


@given(st.text(ALPHABET, max_size=12), st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_a_text_ends_before_the_first_stop_text_to_be_complete_wherever_bytes_are_cut(text, stops, data):
    content = text.encode()
    ends = [end for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    wanted = text
    if ends:
        before = text[: ends[0]]
        wanted = min((before.removesuffix(stop) for stop in stops if before.endswith(stop)), key=len)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(content)), max_size=8)) | {0, len(content)})
    chunks = [content[begin:end] for begin, end in zip(cuts, cuts[1:])]
    decode = lambda ids: b"".join(chunks[i] for i in ids).decode(errors="replace")
    pieces, stream = streamed(range(len(chunks)), decode, stops=stops)
    assert ("".join(pieces), stream.stopped) == (wanted, bool(ends))


def test_an_empty_stop_text_is_refused():
    with pytest.raises(ValueError, match="a stop string is empty"):
        TextStream(BYTES.decode, stops=["a", ""])


def test_what_only_looks_like_a_stop_text_is_held_until_it_does_not():
    stream = TextStream(BYTES.decode, stops=["END"])
    assert [stream.push(byte) for byte in b"xENxEN"] == ["x", "", "", "ENx", "", ""]
    assert stream.end() == "EN" and not stream.stopped


def test_ends_and_beginnings_that_overlap_are_counted():
    assert [overlap(*pair) for pair in (("abc", "cab"), ("ab", "abc"), ("abc", "abc"), ("", "a"), ("aa", "aab"))] == [
        1, 2, 0, 0, 2,
    ]  # fmt: skip
