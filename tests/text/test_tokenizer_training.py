"""A tokenizer is a function of the text it is trained on, and reads every text."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from jaxscale.runtime.text.tokenizer.config import TrainTokenizerConfig, special_names
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.runtime.text.tokenizer.train import sample, train_tokenizer

SYLLABLES = ["ka", "to", "mi", "ré", "lun", "dor", "ße", "ba", "qu", "el", "вод", "水", "ni", "sta", "for", "ing"]
KINDS = {
    "bpe": dict(kind="bpe", vocab_size=600),
    "bpe by tokenizers": dict(kind="bpe", vocab_size=600, trainer="tokenizers", split="cl100k"),
    "bpe o200k": dict(kind="bpe", vocab_size=600, split="o200k"),
    "sentencepiece_bpe": dict(kind="sentencepiece_bpe", vocab_size=600),
    "unigram": dict(kind="unigram", vocab_size=500),
    "wordpiece": dict(kind="wordpiece", vocab_size=300),
}
NAMES = ["<|endoftext|>", "<|tool|>", "<extra_id_0>", "<extra_id_2>", "[MASK]", "[SEP]", "</s>"]


def made_up_texts(number=150):
    """Documents of made-up words, some of them the same."""
    rng = random.Random(5)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(400)]
    texts = []
    for _ in range(number):
        chosen = rng.choices(words, weights=[1 / (n + 1) for n in range(400)], k=60)
        texts.append(" ".join(chosen).capitalize() + ".\n\tIt's  12345, isn't it?\n")
    return texts + texts[:20]


def config(name, **more):
    return TrainTokenizerConfig(**{**KINDS[name], "reserved": 3, "special_tokens": ("<|tool|>",), **more})


def file_for(folder, name):
    return folder / f"tokenizer{config(name).ending}"


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """(name of the kind, what train_tokenizer says, the tokenizer loaded)."""
    path = file_for(tmp_path_factory.mktemp("trained"), request.param)
    made = train_tokenizer(made_up_texts(), config(request.param), path)
    return request.param, made, load_tokenizer(str(path))


@pytest.mark.cases(1)
def test_equal_texts_in_another_order_and_another_process_give_the_same_file(trained, tmp_path):
    name, made, _ = trained
    shuffled = made_up_texts()
    random.Random(1).shuffle(shuffled)
    path = file_for(tmp_path, name)
    (tmp_path / "texts.json").write_text(json.dumps(shuffled))
    program = (
        "import json, sys; from jaxscale.runtime.text.tokenizer.train import *; from jaxscale.schema import from_dict\n"
        "cfg = from_dict(TrainTokenizerConfig, json.loads(sys.argv[2]))\n"
        "train_tokenizer(json.load(open(sys.argv[1])), cfg, sys.argv[3])"
    )
    settings_ = {**KINDS[name], "reserved": 3, "special_tokens": ["<|tool|>"]}
    arguments = [str(tmp_path / "texts.json"), json.dumps(settings_), str(path)]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=120)
    assert path.read_bytes() == Path(made.path).read_bytes()


def test_special_tokens_have_ids_and_marks_and_never_come_out_of_a_text(trained):
    name, made, tokenizer = trained
    assert made.vocab_size == tokenizer.vocab_size <= config(name).vocab_size
    special = {tokenizer.eos_id, *tokenizer.marks.sentinel_ids, tokenizer.marks.mask_id, tokenizer.marks.cls_id} - {
        None
    }
    assert len(tokenizer.marks.sentinel_ids) == 3
    assert (tokenizer.token_bytes[list(special)] == 0).all()
    for text in [*NAMES, *(f"a {one} b{one}c" for one in NAMES), "".join(NAMES)]:
        assert not special & set(tokenizer.encode(text).tolist()), text
        assert not special & set(tokenizer.encode_block([text]).ids.tolist()), text


def test_training_makes_longer_pieces_and_says_what_it_used(trained):
    name, made, tokenizer = trained
    text = made_up_texts()[0]
    assert len(tokenizer.encode(text)) < 0.6 * len(text)
    assert made.documents == len(made_up_texts()) and made.text_bytes == sum(len(t.encode()) for t in made_up_texts())
    package = "sentencepiece" if config(name).is_sentencepiece else "tokenizers"
    package = {"bpe": "rustbpe", "bpe o200k": "rustbpe"}.get(name, package)
    assert made.trainer.split()[0] == package


@pytest.mark.cases(2)
@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=5))
def test_every_text_comes_back_through_bytes(trained, texts):
    name, _, tokenizer = trained
    if name == "wordpiece":  # which keeps neither spaces nor capitals
        return
    block = tokenizer.encode_block(texts)
    for text, ids in zip(texts, block.split(), strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
        # SentencePiece writes a space as U+2581, and so cannot tell the two apart
        assert tokenizer.decode(ids) == (text.replace("\u2581", " ") if config(name).is_sentencepiece else text)


def test_wordpiece_gives_words_in_lower_case_and_one_id_for_a_word_it_cannot_spell(trained):
    name, _, tokenizer = trained
    if name == "wordpiece":
        assert tokenizer.decode(tokenizer.encode("Kato.  MIrélun")) == "kato. mirelun"
        assert tokenizer.fallback[tokenizer.encode("\u4e01")].all()


def test_the_bpe_of_sentencepiece_has_a_piece_for_each_digit_and_none_of_two(trained):
    name, made, tokenizer = trained
    if name == "sentencepiece_bpe":
        processor = sentencepiece.SentencePieceProcessor(model_file=made.path)
        pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
        assert not [piece for piece in pieces if sum(map(str.isdigit, piece)) > 1 and not piece.startswith("<")]
        assert len(tokenizer.encode("12345")) == 5
        model = sentencepiece_model_pb2.ModelProto.FromString(Path(made.path).read_bytes())
        assert model.trainer_spec.model_type == model.trainer_spec.BPE


def test_bytes_stand_in_for_characters_that_a_unigram_never_saw(tmp_path):
    path = str(tmp_path / "it.model")
    train_tokenizer(made_up_texts(), config("unigram"), path)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("中")
    assert tokenizer.fallback[ids].sum() == 3 and tokenizer.decode(ids) == "中"


def test_a_unigram_without_bytes_has_one_id_for_what_it_does_not_know(tmp_path):
    path = str(tmp_path / "it.model")
    train_tokenizer(made_up_texts(), config("unigram", byte_fallback=False, vocab_size=300), path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.fallback[tokenizer.encode("中")].sum() == 1 and tokenizer.fallback.sum() == 1


def test_the_sample_does_not_depend_on_the_order_and_keeps_to_its_size():
    texts = [*made_up_texts(60), "", "x"]
    shuffled = texts[:]
    for seed in range(20):
        random.Random(seed).shuffle(shuffled)
        for limit in (500, 5_000, 1 << 30):
            chosen = sample(shuffled, limit, 3)
            assert chosen == sample(texts, limit, 3)
            size = sum(len(text.encode()) for text in chosen)
            assert size <= limit and (size > limit / 2 or limit != 5_000)
    assert sorted(sample(texts, 1 << 30, 0)) == sorted(text for text in texts if text)
    assert set(sample(texts, 5_000, 0)) != set(sample(texts, 5_000, 1))


def test_settings_that_cannot_work_are_refused():
    for wrong, message in [
        (dict(vocab_size=257), "vocab_size=257 must exceed 257"),
        (dict(kind="wordpiece", vocab_size=5), "vocab_size=5 must exceed 6, to fit one token and 5 special tokens"),
        (dict(special_tokens=("<|endoftext|>",)), r"duplicates in .*: \['<\|endoftext\|>'\]"),
        (dict(eos_token=""), "must not be empty"),
        (dict(reserved=-1), "reserved=-1 must be at least 0"),
        (dict(character_coverage=1.5), "above 0 and at most 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            TrainTokenizerConfig(**wrong)
    assert special_names(TrainTokenizerConfig(kind="wordpiece"))[4] == "[MASK]"


def test_text_that_cannot_be_trained_on_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no text"):
        train_tokenizer(["", ""], config("bpe"), tmp_path / "a.json")
    with pytest.raises(ValueError, match="must have the suffix .model"):
        train_tokenizer(["a"], config("unigram"), tmp_path / "a.json")
    with pytest.raises(ValueError, match="is too small for"):
        train_tokenizer(made_up_texts(), config("wordpiece", vocab_size=40), tmp_path / "a.json")
    with pytest.raises(ValueError, match="is also an ordinary token"):
        train_tokenizer(made_up_texts(), config("bpe", eos_token="to"), tmp_path / "a.json")


def test_a_vocab_txt_is_read_as_cased_or_uncased_by_its_pieces(tmp_path):
    common = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cafe", "café", "##s", "!"]
    for pieces, expected in [(common, ["cafe", "##s", "!"]), ([*common, "Café"], ["Café", "##s", "!"])]:
        path = tmp_path / f"{len(pieces)}-vocab.txt"
        path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.encode("Cafés!").tolist() == [pieces.index(piece) for piece in expected]
        assert (tokenizer.marks.mask_id, tokenizer.marks.pad_id, tokenizer.eos_id) == (4, 0, 3)
        assert tokenizer.fallback[tokenizer.encode("xyz")].all()
        assert not {2, 3, 4} & set(tokenizer.encode("[MASK][CLS] [SEP]").tolist())
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"cannot be read as a WordPiece vocab.txt: the file has no \[UNK\]"):
        load_tokenizer(str(tmp_path / "vocab.txt"))
