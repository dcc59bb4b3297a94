"""The token that begins a document is one for training, prepared shards, token files and what reads the model later."""

import json

import chat_tokenizers
import numpy as np
import pytest
from test_document_ends import START, folder_of, open_corpus

from jaxscale.cli import prepare
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.text.tokenizer.bpe import train_bpe
from jaxscale.runtime.text.tokenizer.load import load_tokenizer, open_saved, save_tokenizer

NAME = "<|im_start|>"


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "raw.jsonl"
    path.write_text("".join(json.dumps({"text": f"hi {i}"}) + "\n" for i in range(40)))
    return path


def starts_of(corpus):
    """The first id of every document in the first rows."""
    batch = corpus.batches(4).batch(0)
    return batch.tokens[(batch.positions == 0) & (batch.segment_ids > 0)]


@pytest.mark.parametrize(
    ("about", "setting", "expected"),
    [
        ({}, "", ()),
        ({"bos_token": NAME}, "", ()),  # GPT-2 and Qwen name one that they do not use
        ({"bos_token": NAME, "add_bos_token": False}, "", ()),
        ({"bos_token": NAME, "add_bos_token": True}, "", (START,)),
        ({"bos_token": {"content": NAME}, "add_bos_token": True}, "", (START,)),
        ({"bos_token": NAME, "add_bos_token": True}, "none", ()),  # a person's word goes before
        ({"add_bos_token": False}, NAME, (START,)),
        ({"bos_token": "hi", "add_bos_token": True}, "", ()),  # no special token: any text could write it
    ],
    ids=str,
)
def test_documents_begin_as_the_files_beside_the_tokenizer_say(tmp_path, about, setting, expected):
    assert load_tokenizer(folder_of(tmp_path, **about), bos_token=setting).begin_ids == expected


def test_what_begins_documents_is_part_of_the_fingerprint_where_there_is_any(tmp_path):
    path = folder_of(tmp_path)
    plain, begun = load_tokenizer(path), load_tokenizer(path, bos_token=NAME)
    assert plain.fingerprint == load_tokenizer(path, bos_token="none").fingerprint != begun.fingerprint


def test_a_name_that_is_no_special_token_is_refused_with_the_way_out(tmp_path):
    for path in (folder_of(tmp_path), "bytes"):
        with pytest.raises(
            ValueError,
            match="data.bos_token=hi.*(not a special token of .*; set it to a special token, or to none|no such)",
        ):
            load_tokenizer(path, bos_token="hi")


def test_each_document_begins_so_the_first_token_of_a_text_is_learned_and_the_work_folder_knows(tmp_path, texts):
    path = folder_of(tmp_path, bos_token=NAME, add_bos_token=True)
    corpus = open_corpus(tmp_path, files=str(texts), tokenizer=path)
    batch = corpus.batches(4).batch(0)
    assert set(starts_of(corpus)) == {START} and f"documents begin with {NAME}" in corpus.summary
    assert START not in batch.targets[batch.weights > 0]
    first = corpus.tokenizer.encode("hi")[0]
    assert (batch.targets[(batch.tokens == START) & (batch.weights > 0)] == first).all()
    save_tokenizer(corpus.tokenizer, tmp_path / "run")
    assert open_saved(tmp_path / "run", {}).tokenizer.begin_ids == (START,)
    without = open_corpus(tmp_path, files=str(texts), tokenizer=path, bos_token="none")
    assert START not in without.batches(4).batch(0).tokens and "begin with" not in without.summary
    assert without.fingerprint != corpus.fingerprint


@pytest.mark.parametrize("bos_token", ["", "none"])
def test_shards_tell_how_their_documents_begin(tmp_path, texts, bos_token):
    path = folder_of(tmp_path, bos_token=NAME, add_bos_token=True)
    recipe = [f"--config.tokenizer.name={path}", "--config.stages=()", f"--config.tokenizer.bos_token={bos_token}"]
    assert prepare.main(["--workers=1", f"--input={texts}", f"--output={tmp_path / 'out'}", *recipe]) == 0
    expected = () if bos_token else (START,)
    for tokenizer in ("", path):  # found by the header, also where the files beside the tokenizer say otherwise
        corpus = open_corpus(tmp_path, name="tokens", files=str(tmp_path / "out/manifest.json"), tokenizer=tokenizer)
        assert corpus.tokenizer.begin_ids == expected
        assert (set(starts_of(corpus)) == {START}) == bool(expected)
    other = "none" if expected else NAME
    stranger = str(tmp_path / "other.json")
    train_bpe(["hi there"], 300, ["<|endoftext|>"], "gpt2", "tokenizers").save(stranger)
    with pytest.raises(ValueError, match="did not produce"):
        open_corpus(tmp_path, name="tokens", files=str(tmp_path / "out/manifest.json"), tokenizer=stranger)
    with pytest.raises(ValueError, match="did not produce"):
        open_corpus(tmp_path, name="tokens", files=str(tmp_path / "out/manifest.json"), tokenizer=path, bos_token=other)


@pytest.mark.parametrize("begin", [(), (START,)], ids=["bare", "begun"])
def test_most_of_the_first_documents_tell_how_raw_ids_begin(tmp_path, begin):
    tokenizer = load_tokenizer(folder_of(tmp_path, bos_token=NAME, add_bos_token=True))
    document = [*begin, *tokenizer.encode("hi there you"), tokenizer.eos_id]
    np.array([tokenizer.eos_id, *document * 40], np.uint16).tofile(tmp_path / "raw.bin")  # an odd one goes before
    cfg = DataConfig(
        name="tokens",
        files=str(tmp_path / "raw.bin"),
        tokenizer=tokenizer.name,
        cache_dir=str(tmp_path / "c"),
        val_fraction=0,
    )
    said = []
    corpus = open_data(cfg, seq_len=32, vocab_size=264, seed=0, say=said.append)
    assert corpus.tokenizer.begin_ids == begin
    assert any("do not begin with <|im_start|>" in line for line in said) == (not begin)


@pytest.mark.parametrize("name", ["train", "bytes", "given"])
def test_a_recipe_with_a_begin_that_its_tokenizer_does_not_have_is_refused_before_any_work(
    tmp_path, texts, name, capfd
):
    path = folder_of(tmp_path) if name == "given" else name
    recipe = [f"--config.tokenizer.name={path}", "--config.tokenizer.bos_token=<s>", "--config.stages=()"]
    with pytest.raises(ValueError, match="tokenizer.bos_token=<s>"):
        prepare.main(["--workers=1", f"--input={texts}", f"--output={tmp_path / 'out'}", *recipe])
    assert not (tmp_path / "out").exists()


def test_a_note_of_before_opens_its_tokenizer_and_another_file_does_not(tmp_path):
    tokenizer = load_tokenizer(folder_of(tmp_path, bos_token=NAME, add_bos_token=True))
    save_tokenizer(tokenizer, tmp_path / "run")
    note = tmp_path / "run/tokenizer/jaxscale.json"
    bare = load_tokenizer(tokenizer.name, bos_token="none").fingerprint  # as it was when it knew no beginning
    note.write_text(json.dumps(json.loads(note.read_text()) | {"fingerprint": bare, "files": {}}))
    assert open_saved(tmp_path / "run", {}).tokenizer.begin_ids == (START,)
    file = tmp_path / "run/tokenizer/tokenizer.json"
    file.write_text(file.read_text().replace(NAME, "<|im_begin|>"))
    with pytest.raises(ValueError, match="is not the tokenizer that the run used"):
        open_saved(tmp_path / "run", {})


def test_conversations_follow_the_setting_too(tmp_path):
    path = folder_of(tmp_path, template=chat_tokenizers.CHATML, bos_token=NAME, add_bos_token=True)
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi", "completion": "there"}\n' * 8)
    for bos_token, expected in (("", START), ("none", load_tokenizer(path).encode("hi")[0])):
        said = dict(name="chat", files=str(tmp_path / "a.jsonl"), tokenizer=path, bos_token=bos_token)
        assert set(starts_of(open_corpus(tmp_path, **said))) == {expected}
