"""The fast encoders give the ids of the slow one, or say for which text they do not."""

import gzip
import json
import re
from pathlib import Path
from typing import NamedTuple
from unicodedata import category

import numpy as np
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxscale.runtime.text.tokenizer.base import EncodedBlock, concat_block, find_objective_tokens, frame_documents
from jaxscale.runtime.text.tokenizer.bpe import PATTERNS, byte_alphabet, make_pre_tokenizer, split_of
from jaxscale.runtime.text.tokenizer.config import EncodeConfig, TrainTokenizerConfig
from jaxscale.runtime.text.tokenizer.fast import NEW_IN_17, TEXTS, check_equal_ids, probes, with_newer, with_spot_checks
from jaxscale.runtime.text.tokenizer.huggingface import HuggingFaceTokenizer
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.runtime.text.tokenizer.train import train_tokenizer

CORPORA = Path(__file__).parents[3] / "shared" / "corpora"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<extra_id_0>")
FAST = ("gigatoken", "tiktoken")

words = st.sampled_from(
    ["It's", "we'LL", "12345", " ", "  ", "\n", "\r\n", "\t", "日本", "ſ", "'ſ", "é", "👩‍🔬", *SPECIAL]
)
texts_of_all_kinds = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.lists(
            st.one_of(words, st.characters(exclude_categories=["Cs"]), st.text("ab '\n1é", max_size=8)), max_size=12
        ).map("".join),
    ),
    max_size=6,
)


@pytest.fixture(scope="module", params=PATTERNS)
def path(request, tmp_path_factory):
    """A tokenizer.json with the pattern, trained on the probes and on English."""
    file = tmp_path_factory.mktemp("fast") / f"{request.param}.json"
    cfg = TrainTokenizerConfig(vocab_size=900, split=request.param, special_tokens=("<|im_start|>",), reserved=1)
    train_tokenizer([*TEXTS, *["the cat sat on the mat, didn't it? 123 1234\n\n"] * 20], cfg, file)
    return str(file)


def spec_of(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def written(folder, spec, name="changed.json"):
    (folder / name).write_text(json.dumps(spec))
    return str(folder / name)


def exact_and(path, encoder, **more):
    """The two tokenizers: slow and exact, and by `encoder`."""
    return HuggingFaceTokenizer(path, encoding=EncodeConfig(encoder="exact")), HuggingFaceTokenizer(
        path, encoding=EncodeConfig(encoder=encoder, **more)
    )


def assert_same(ours, theirs):
    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    assert ours.ids.dtype == np.uint32 and ours.lengths.dtype == np.int64


@pytest.mark.cases(2)
@pytest.mark.parametrize("encoder", FAST)
@settings(max_examples=25, deadline=None)
@given(texts=texts_of_all_kinds)
def test_fast_ids_are_the_slow_ones_for_every_text(path, encoder, texts):
    slow, fast = (load_tokenizer(path, encoding=EncodeConfig(encoder=name)) for name in ("exact", encoder))
    assert (slow.encoder, fast.encoder) == ("tokenizers", encoder)
    block = fast.encode_block(texts)
    assert_same(block, slow.encode_block(texts))
    for text, ids, one in zip(texts, block.split(), fast.encode_many(texts), strict=True):
        np.testing.assert_array_equal(ids, slow.encode(text))
        np.testing.assert_array_equal(ids, one)
        assert fast.decode(ids) == text and one.dtype == np.int32


@pytest.mark.cases(2)
@pytest.mark.parametrize("encoder", FAST)
def test_a_character_of_every_kind_is_read_alike_in_every_surrounding(path, encoder):
    slow, fast = exact_and(path, encoder)
    characters = [chr(code) for code in range(0, 0x30000, 197) if not 0xD800 <= code < 0xE000]
    texts = [f"a{c}b {c}{c} 1{c}2'{c}s\n{c}\r\n!{c}" for c in characters]
    assert_same(fast.encode_block(texts), slow.encode_block(texts))


@pytest.mark.parametrize("encoder", FAST)
def test_characters_of_the_last_unicode_are_read_alike_though_the_packages_know_different_ones(path, encoder, tmp_path):
    slow, fast = exact_and(path, encoder)
    characters = [chr(code) for first, last in NEW_IN_17 for code in {first, (first + last) // 2, last}]
    texts = [f"a{c}b {c}{c} 1{c}2'{c}s\n{c}\r\n!{c}" for c in characters]
    assert_same(fast.encode_block(texts), slow.encode_block(texts))


def test_texts_with_characters_newer_than_this_python_are_found():
    listed = np.zeros(0x110000, bool)
    for first, last in NEW_IN_17:
        listed[first : last + 1] = True
    new = [*(chr(code) for pair in NEW_IN_17 for code in pair), "\u2fe0", "\U0010ffff"]
    known = [chr(code) for code in np.flatnonzero(~listed) if category(chr(code)) not in ("Cn", "Cs")]
    old = ["", "plain", "é€日本語😀", "".join(known)]
    assert with_newer(old) == []
    for character in new:
        assert with_newer(["é", *old[:3], f"x{character}", "a", character, "é"]) == [4, 6], hex(ord(character))


@pytest.mark.parametrize("encoder", FAST)
def test_names_of_special_tokens_are_plain_text_to_fast_encoders(path, encoder):
    _, fast = exact_and(path, encoder)
    texts = [*SPECIAL, *(f"a{name} {name}b" for name in SPECIAL), "".join(SPECIAL)]
    special = {fast.eos_id, *fast.marks.sentinel_ids, spec_of(path)["added_tokens"][1]["id"]}
    assert len(special) == 3
    assert not special & set(fast.encode_block(texts).ids.tolist())


@pytest.mark.parametrize("encoder", FAST)
def test_added_tokens_that_are_text_keep_their_ids(path, encoder, tmp_path):
    spec = spec_of(path)
    added = {"content": "<tool>", "id": 900, "special": False, "normalized": False}
    spec["added_tokens"].append({**added, "single_word": False, "lstrip": False, "rstrip": False})
    slow, fast = exact_and(written(tmp_path, spec), encoder)
    texts = ["plain", "a <tool> b", "", "<tool><tool>", "<|endoftext|><tool>", "more"]
    block = fast.encode_block(texts)
    assert_same(block, slow.encode_block(texts))
    assert fast.encoder == encoder and (block.ids == slow.encode("<tool>")[0]).sum() == 4


@pytest.mark.cases(1)
@pytest.mark.parametrize("encoder", FAST)
def test_long_runs_are_read_alike(path, encoder):
    slow, fast = exact_and(path, encoder)
    texts = [" " * 400_000 + "x", "a" * 5_000, "\n" * 5_000, "1" * 5_000]
    assert_same(fast.encode_block(texts), slow.encode_block(texts))


def test_the_fastest_one_is_taken_and_the_fingerprint_does_not_depend_on_it(path):
    tokenizers_ = [load_tokenizer(path, encoding=EncodeConfig(encoder=name)) for name in ("auto", "tiktoken", "exact")]
    assert [one.encoder for one in tokenizers_] == ["gigatoken", "tiktoken", "tokenizers"]
    assert len({one.fingerprint for one in tokenizers_}) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(normalizer={"type": "NFC"}),
        lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True),
        lambda spec: spec.update(pre_tokenizer=None),
        lambda spec: spec["model"].update(end_of_word_suffix="</w>"),
    ],
)
def test_another_kind_of_file_is_left_to_the_slow_one_or_refused_by_name(tmp_path, change):
    train_tokenizer(["ab ab"], TrainTokenizerConfig(vocab_size=260), tmp_path / "plain.json")
    spec = spec_of(tmp_path / "plain.json")
    assert split_of(spec) == "gpt2"
    change(spec)
    file = written(tmp_path, spec)
    assert split_of(spec) is None and load_tokenizer(file).encoder == "tokenizers"
    for encoder in FAST:
        with pytest.raises(ValueError, match=f"encoder={encoder} .* is not a byte-level BPE"):
            HuggingFaceTokenizer(file, encoding=EncodeConfig(encoder=encoder)).encode_block(["a"])


def by_hand(folder, merges, split="gpt2", **model):
    """A byte-level tokenizer.json with these merges."""
    vocab = {piece: i for i, piece in enumerate([*byte_alphabet(), *(left + right for left, right in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **model))
    tokenizer.pre_tokenizer = make_pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "hand.json"))
    return str(folder / "hand.json")


def test_an_encoder_that_differs_is_refused_with_the_text_before_it_is_used(tmp_path):
    """tiktoken joins whatever gives a known piece; here 'abc' is known, but no merge makes it of 'a' and 'bc'."""
    file = by_hand(tmp_path, [("b", "c"), ("a", "b"), ("ab", "c")])
    assert HuggingFaceTokenizer(file).encode("abc").tolist() == [64, 256]
    with pytest.raises(
        ValueError, match=r"tiktoken and of the tokenizers package differ for the text 'abc.* from token 0: .258,"
    ):
        HuggingFaceTokenizer(file, encoding=EncodeConfig(encoder="tiktoken")).encode_block(["x"])
    slow, fast = exact_and(file, "gigatoken")
    assert_same(fast.encode_block(["abc", "ab"]), slow.encode_block(["abc", "ab"]))


def test_words_that_are_whole_pieces_are_read_alike_when_merges_are_ignored_for_them(tmp_path):
    file = by_hand(tmp_path, [("b", "c"), ("a", "b"), ("ab", "c")], ignore_merges=True)
    slow, fast = exact_and(file, "gigatoken")
    assert_same(fast.encode_block(["abc", "xabc abc"]), slow.encode_block(["abc", "xabc abc"]))


def test_ids_that_do_not_rise_with_the_merges_are_not_for_tiktoken(tmp_path):
    spec = spec_of(by_hand(tmp_path, [("a", "b"), ("c", "d")]))
    spec["model"]["merges"].reverse()
    with pytest.raises(ValueError, match="its ids are not in the order of its merges"):
        HuggingFaceTokenizer(written(tmp_path, spec), encoding=EncodeConfig(encoder="tiktoken")).encode_block(["x"])


def lengths_of(texts):
    """An encoder of a kind: every character is one id."""
    return concat_block([[ord(character) for character in text] for text in texts])


def test_a_difference_in_a_real_document_is_an_error_that_shows_where(tmp_path):
    def wrong(texts):
        return lengths_of([text.replace("café", "cafe") for text in texts])

    texts = [f"document {n} of the café" for n in range(200)]
    with pytest.raises(
        ValueError, match=r"differ for the text 'document \d+ of .*' from token \d+: \[101\] and \[233\]"
    ):
        with_spot_checks("it.json", "fast", wrong, lengths_of, 50)(texts)
    with_spot_checks("it.json", "fast", lengths_of, lengths_of, 1)(texts)
    with pytest.raises(ValueError, match=r"from token 1: \[\] and \[98\]; set encode.encoder=exact .*, uninstall fast"):
        check_equal_ids("it.json", "fast", ["ab"], lambda _: lengths_of(["a"]), lengths_of)


def test_one_document_in_n_is_compared_and_which_does_not_depend_on_the_order():
    texts = [f"document {n} of many" for n in range(2_000)]
    seen = []

    def exact(texts):
        seen.append(set(texts))
        return lengths_of(texts)

    for order in (texts, texts[::-1]):
        with_spot_checks("it.json", "fast", lengths_of, exact, 50)(order)
    assert seen[0] == seen[1] and 20 <= len(seen[0]) <= 70


def test_a_text_that_is_no_unicode_is_named(path):
    for encoder in ("exact", *FAST):
        with pytest.raises(ValueError, match="unpaired surrogate at character 2, near"):
            HuggingFaceTokenizer(path, encoding=EncodeConfig(encoder=encoder)).encode_block(["fine", "ab\ud800c"])


class Ends(NamedTuple):
    """What frame_documents reads of a tokenizer."""

    eos_id: int
    vocab_size: int
    begin_ids: tuple[int, ...] = ()


def test_documents_are_framed_by_their_tokens_and_ids_beyond_the_vocabulary_are_refused():
    block = concat_block([[1, 2], [], [3]])
    framed = frame_documents(block, Ends(9, 10), np.dtype("<u2"))
    assert framed.ids.tolist() == [1, 2, 9, 9, 3, 9] and framed.lengths.tolist() == [3, 1, 2]
    assert framed.ids.dtype == np.dtype("<u2")
    assert frame_documents(concat_block([]), Ends(9, 10), np.dtype("<u2")).ids.tolist() == []
    begun = frame_documents(block, Ends(9, 10, (7, 8)), np.dtype("<u2"))
    assert begun.ids.tolist() == [7, 8, 1, 2, 9, 7, 8, 9, 7, 8, 3, 9] and begun.lengths.tolist() == [5, 3, 4]
    for eos_id, vocab_size, ids in [(9, 9, [1]), (2, 9, [9]), (2, 100_000, [70_000])]:
        with pytest.raises(ValueError, match=r"token id \d+ must be below vocab_size=\d+ and fit in uint16"):
            frame_documents(concat_block([ids]), Ends(eos_id, vocab_size), np.dtype("<u2"))
    assert EncodedBlock(np.zeros(0, np.uint32), np.zeros(0, np.int64)).split() == []


def test_marks_are_found_by_their_usual_names():
    t5 = find_objective_tokens({"<pad>": 0, "</s>": 1, **{f"<extra_id_{n}>": 200 - n for n in range(100)}})
    assert t5.pad_id == 0 and t5.mask_id is None and t5.sentinel_ids[:2] == (200, 199) and len(t5.sentinel_ids) == 100
    bert = find_objective_tokens({"[MASK]": 103, "[CLS]": 101, "[SEP]": 102, "[PAD]": 0})
    assert (bert.mask_id, bert.cls_id, bert.sep_id, bert.pad_id, bert.sentinel_ids) == (103, 101, 102, 0, ())
    assert find_objective_tokens({f"<|reserved_special_token_{n}|>": 5 + n for n in range(3)}).sentinel_ids == (5, 6, 7)


def test_the_probes_hold_every_class_and_the_names():
    texts = probes(["<|x|>"], ["the"])
    whole = "".join(texts)
    assert 5_000 < len(whole.encode()) < 100_000
    for pattern in (
        r"\x00",
        r"\u3000",
        "\U0010ffff",
        r"\d{4}",
        r"'ſ",
        r"\u0301",
        "the",
        r"<\|x\|>",
        r"\r\n\r\n",
        " {9}",
    ):
        assert re.search(pattern, whole), pattern


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """GPT-2's own vocabulary as a tokenizer.json."""
    if not (CORPORA / "tokenizers").is_dir():
        pytest.skip(f"no {CORPORA}")
    folder = CORPORA / "tokenizers"
    model = models.BPE.from_file(str(folder / "gpt2_vocab.json"), str(folder / "gpt2_merges.txt"))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    file = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    tokenizer.save(str(file))
    return str(file)


def corpus(tokenizer, every=1):
    """Real documents: web text, books, an encyclopedia, forums, text messages, sentences in thirty languages.

    every: only one in so many.
    """
    ids = np.fromfile(CORPORA / "web_openwebtext" / "meg-gpt2-openwebtext_text_document.bin", "<u2")
    texts = [tokenizer.decode(one) for one in np.split(ids, np.flatnonzero(ids == tokenizer.eos_id))[::every]]
    texts += pyarrow.parquet.read_table(next((CORPORA / "web_c4").glob("*.parquet")))["text"].to_pylist()[::every]
    for file in sorted((CORPORA / "web_dolma").glob("*.gz")):
        texts += [json.loads(line)["text"] for line in gzip.open(file, "rt", encoding="utf-8")][::every]
    files = [
        file for name in ("wikitext-2", "web_forum", "spam", "multilingual") for file in (CORPORA / name).rglob("*.t*")
    ]
    for file in sorted(files):
        texts += paragraphs(file.read_bytes())[::every]
    for file in sorted((CORPORA / "gutenberg").glob("*.gz")):
        texts += paragraphs(gzip.decompress(file.read_bytes()))[::every]
    return [text for text in texts if text]


def paragraphs(raw):
    """Parts of about 4,000 characters."""
    text = raw.decode(errors="replace")
    return [text[start : start + 4000] for start in range(0, len(text), 4000)]


@pytest.mark.soak
def test_real_documents_get_the_slow_ids(gpt2):
    slow = exact_and(gpt2, "exact")[0]
    texts = corpus(slow, every=2000)
    wanted = slow.encode_block(texts)
    for encoder in FAST:
        assert_same(exact_and(gpt2, encoder)[1].encode_block(texts), wanted)


@pytest.mark.soak
def test_all_real_documents_get_the_slow_ids(gpt2):
    slow = exact_and(gpt2, "exact")[0]
    texts = corpus(slow)
    wanted = slow.encode_block(texts)
    for encoder in FAST:
        assert_same(exact_and(gpt2, encoder)[1].encode_block(texts), wanted)
    print(f"{len(texts):,} documents, {sum(len(text.encode()) for text in texts):,} bytes, {len(wanted.ids):,} tokens")


@pytest.mark.soak
@pytest.mark.parametrize("encoder", FAST)
@pytest.mark.parametrize("split", PATTERNS)
def test_every_character_is_read_alike(split, encoder, tmp_path):
    """With merges that show on which side of a cut a character went."""
    spell = {byte: character for character, byte in byte_alphabet().items()}
    near, high = [spell[byte] for byte in b" aA1!\n'"], [spell[byte] for byte in range(128, 256)]
    merges = [(one, byte) for one in near for byte in high] + [(byte, one) for one in near for byte in high]
    slow, fast = exact_and(by_hand(tmp_path, merges, split=split), encoder)
    codes = np.array([*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200)])  # the rest is empty
    for part in np.array_split(codes, 100):
        texts = [f"a{chr(c)}b {chr(c)}{chr(c)} 1{chr(c)}2'{chr(c)}s\n{chr(c)}\r\n!{chr(c)}" for c in part]
        assert_same(fast.encode_block(texts), slow.encode_block(texts))
