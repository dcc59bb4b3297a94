"""One token ends documents in training, in shards and where text stops: the one that the model's own files name."""

import json

import chat_tokenizers
import numpy as np
import pytest

from jaxscale.cli import prepare
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.text.tokenizer.fitting import fits
from jaxscale.runtime.text.tokenizer.load import load_tokenizer, open_saved, save_tokenizer

DOCUMENT, START, TURN = 257, 258, 259  # the ids of chat_tokenizers.SPECIALS


def folder_of(tmp_path, **about):
    """A tokenizer.json with ChatML's tokens; about: what stands in tokenizer_config.json."""
    return chat_tokenizers.write_folder(tmp_path / "tokenizer", **about)


def open_corpus(tmp_path, **data):
    cfg = DataConfig(**{"cache_dir": str(tmp_path / "cache"), "val_fraction": 0.0} | data)
    return open_data(cfg, seq_len=32, vocab_size=264, seed=0, say=lambda line: None)


@pytest.mark.parametrize(
    ("about", "setting", "expected"),
    [
        ({"eos_token": "<|im_end|>"}, "", TURN),  # of a chat model: Qwen's
        ({"eos_token": {"content": "<|im_end|>", "special": True}}, "", TURN),
        ({"eos_token": "<|endoftext|>"}, "", DOCUMENT),  # of the base model beside it
        ({"eos_token": None, "model_max_length": 1024}, "", DOCUMENT),  # GPT-2's names none
        ({}, "", DOCUMENT),
        ({"eos_token": "<|im_end|>"}, "<|endoftext|>", DOCUMENT),  # a person's word goes before
    ],
    ids=str,
)
def test_documents_end_as_the_files_beside_the_tokenizer_say(tmp_path, about, setting, expected):
    assert load_tokenizer(folder_of(tmp_path, **about), setting).eos_id == expected


def test_special_tokens_map_overrides_a_tokenizer_config_without_added_tokens_as_in_transformers(tmp_path):
    path = folder_of(tmp_path)
    (tmp_path / "tokenizer/special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert load_tokenizer(path).eos_id == TURN
    (tmp_path / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert load_tokenizer(path).eos_id == TURN
    about = {"eos_token": "<|endoftext|>", "added_tokens_decoder": {}}
    (tmp_path / "tokenizer/tokenizer_config.json").write_text(json.dumps(about))
    assert load_tokenizer(path).eos_id == DOCUMENT  # read again, though tokenizer.json is the same


def test_a_name_that_the_tokenizer_does_not_have_is_refused_with_the_way_out(tmp_path):
    path = folder_of(tmp_path)
    with pytest.raises(
        ValueError, match="'</s>', the end token in data.eos_token .* is not a token of .*; set data.eos"
    ):
        load_tokenizer(path, "</s>")
    assert load_tokenizer(path, "<|im_end|>").eos_id == TURN


def test_an_end_that_only_the_config_names_is_the_next_id_as_in_transformers_and_no_model_without_it_takes_it(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, eos_token="</s>"))
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (TURN + 1, TURN + 2)
    assert fits(tokenizer, TURN + 2) and not fits(tokenizer, TURN + 1)


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("chat", {"prompt": "hi", "completion": "there"}),
        ("files", {"text": "hi there you"}),
    ],
    ids=str,
)
def test_a_row_learns_the_end_that_the_model_stops_at(tmp_path, name, record):
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(record)}\n" * 8)
    path = folder_of(tmp_path, eos_token="<|im_end|>")
    said = dict(name=name, files=str(tmp_path / "data.jsonl"), tokenizer=path)
    corpus = open_corpus(tmp_path, **said)
    row = corpus.batches(1).batch(0)
    learned = row.targets[row.weights > 0]
    assert (learned == TURN).any() and DOCUMENT not in learned
    assert "documents end with <|im_end|>" in corpus.summary
    save_tokenizer(corpus.tokenizer, tmp_path / "run", corpus.chat)
    assert open_saved(tmp_path / "run", {}).stop_ids == (TURN,)
    # who trains on with what the run kept goes on with the same end
    assert load_tokenizer(str(tmp_path / "run/tokenizer/tokenizer.json")).fingerprint == corpus.tokenizer.fingerprint
    assert open_corpus(tmp_path, **said, eos_token="<|endoftext|>").tokenizer.eos_id == DOCUMENT


def test_text_among_conversations_begins_as_prompts_do_whatever_file_it_is_in(tmp_path):
    about = {"template": chat_tokenizers.CHATML, "bos_token": "<|im_start|>"}
    path = folder_of(tmp_path, **about, add_bos_token=True)
    (tmp_path / "a.jsonl").write_text('{"text": "hi there"}\n')
    (tmp_path / "a.txt").write_text("hi there")
    (tmp_path / "chat.jsonl").write_text('{"prompt": "hi", "completion": "you"}\n')

    def ids_of(name):
        """The ids of the text, and of the pair behind it."""
        files = (str(tmp_path / name), str(tmp_path / "chat.jsonl"))
        (shard,) = open_corpus(tmp_path, name="chat", files=files, tokenizer=path).shards
        return np.split(np.fromfile(shard.bin_path, shard.header["dtype"]), shard.offsets[1:-1])

    text, pair = ids_of("a.txt")
    assert text[0] == pair[0] == START
    np.testing.assert_array_equal(text, ids_of("a.jsonl")[0])
    folder_of(tmp_path, **about, add_bos_token=False)  # the same files, and another rule next to them
    assert START not in np.concatenate(ids_of("a.jsonl"))


def test_a_run_that_was_told_another_end_hands_it_on_with_its_tokenizer(tmp_path):
    told = load_tokenizer(folder_of(tmp_path, eos_token="<|im_end|>"), "<|endoftext|>")
    save_tokenizer(told, tmp_path / "run")
    assert load_tokenizer(str(tmp_path / "run/tokenizer/tokenizer.json")).eos_id == DOCUMENT
    assert open_saved(tmp_path / "run", {}).stop_ids == (DOCUMENT,)


def test_shards_keep_the_end_though_they_lie_without_the_file_that_named_it(tmp_path):
    path = folder_of(tmp_path, eos_token="<|im_end|>")
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps({"text": f"hi {i}"}) + "\n" for i in range(40)))
    recipe = ["--workers=1", f"--config.tokenizer.name={path}", "--config.stages=()"]
    assert prepare.main([f"--input={tmp_path / 'raw.jsonl'}", f"--output={tmp_path / 'out'}", *recipe]) == 0
    corpus = open_corpus(tmp_path, name="tokens", files=str(tmp_path / "out/manifest.json"))
    assert corpus.tokenizer.eos_id == TURN  # found again beside the shards, where nothing else names it
    ids = np.fromfile(tmp_path / "out/shard-00000-of-00001.bin", np.uint16)
    assert (ids == TURN).sum() == 40 and DOCUMENT not in ids
    (tmp_path / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    with pytest.raises(ValueError, match="has a different dataset"):  # the recipe is another one now
        prepare.main([f"--input={tmp_path / 'raw.jsonl'}", f"--output={tmp_path / 'out'}", *recipe])
