"""Every tokenizer gives ids that come back as the text, and knows how many bytes each id stands for."""

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from jaxscale.runtime.text.tokenizer.load import load_tokenizer, tokenizer_problem

TEXTS = [
    "def f(x):\n\treturn x  + 1\n\n\n# done\r\n",
    "naïve café, Ελληνικά, 日本語, 👩‍🔬 and a\u00a0hard space",
    "the end is spelt <|endoftext|> here, or </s>",
    " leading and trailing ",
    "\x00\x7f",
]
TRAINING = ["the cat sat on the mat, and the dog stood by the door of the hut\n", "def f(x):\n    return x + 1\n"] * 20


@pytest.fixture(scope="module")
def byte_level_file(tmp_path_factory):
    """A byte-level BPE like GPT-2's, and a special and a plain token added by hand."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TRAINING, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.add_tokens(["日本語"])
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    """A SentencePiece BPE that changes nothing in the text and falls back on bytes, like Llama's."""
    folder = tmp_path_factory.mktemp("spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING), model_prefix=str(folder / "spm"), vocab_size=340, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return str(folder / "spm.model")


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_and_byte_level_ids_come_back_as_the_text_and_count_its_bytes(byte_level_file, text):
    for name in ("bytes", byte_level_file):
        tokenizer = load_tokenizer(name)
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.ndim == 1
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert tokenizer.eos_id not in ids  # no text can end its own document
        assert len(tokenizer.token_bytes) == tokenizer.vocab_size and ids.max() < tokenizer.vocab_size


@pytest.mark.parametrize("text", TEXTS[:3])
def test_sentencepiece_ids_count_the_bytes_of_the_text_and_of_the_space_put_before_it(sentencepiece_file, text):
    tokenizer = load_tokenizer(sentencepiece_file)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode()) + 1
    assert tokenizer.eos_id == 2 and tokenizer.token_bytes[2] == 0 and tokenizer.eos_id not in ids


def test_many_texts_at_once_give_the_same_ids(byte_level_file, sentencepiece_file):
    for name in ("bytes", byte_level_file, sentencepiece_file):
        tokenizer = load_tokenizer(name)
        for text, ids in zip(TEXTS, tokenizer.encode_many(TEXTS), strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text), err_msg=name)


def test_the_vocabulary_reaches_to_the_largest_id_and_special_tokens_stand_for_no_text(byte_level_file):
    tokenizer = load_tokenizer(byte_level_file)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (302, 300)
    assert tokenizer.token_bytes[300] == 0 and tokenizer.token_bytes[301] == 9


def test_the_end_token_is_a_setting_when_its_name_is_unusual(byte_level_file):
    assert load_tokenizer(byte_level_file, "the").eos_id == load_tokenizer(byte_level_file).encode("the")[0]
    with pytest.raises(ValueError, match="'<nothing>', the end token in data.eos_token"):
        load_tokenizer(byte_level_file, "<nothing>")


def test_a_tokenizer_without_a_usual_end_token_says_what_to_set(tmp_path):
    path = str(tmp_path / "tokenizer.json")
    tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(path)
    with pytest.raises(ValueError, match="none of the common end-of-document tokens .* data.eos_token"):
        load_tokenizer(path)


@pytest.mark.fault("H3")
def test_the_fingerprint_follows_the_file_and_the_end_token(byte_level_file, sentencepiece_file):
    prints = [load_tokenizer(*name).fingerprint for name in
              [("bytes",), (byte_level_file,), (byte_level_file, "the"), (sentencepiece_file,)]]  # fmt: skip
    assert len(set(prints)) == 4


def test_a_name_that_is_no_tokenizer_is_one_clear_line(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "broken.model").write_text("nothing")
    for name, message in [
        ("byte", "must be 'bytes', a tokenizer.json or a SentencePiece .model"),
        (str(tmp_path / "none.json"), "does not exist"),
        ("gs://bucket/tokenizer.json", "not a local file"),
        (str(tmp_path / "broken.json"), "cannot be read as a tokenizer.json"),
        (str(tmp_path / "broken.model"), "cannot be read as a SentencePiece model"),
    ]:
        with pytest.raises(ValueError, match=message) as raised:
            load_tokenizer(name)
        assert "\n" not in str(raised.value) and name in str(raised.value)
    assert tokenizer_problem("bytes") is None
