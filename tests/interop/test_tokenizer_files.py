"""A tokenizer goes along both ways, or it is said that it does not."""

import json

import numpy as np
import pytest
import tokenizers
from hf_folders import LLAMA, make_folder
from trained_tokenizers import SENTENCES, TEXT, make_tokenizers

from jaxscale.cli import convert
from jaxscale.runtime.text.tokenizer.bpe import train_bpe
from jaxscale.runtime.text.tokenizer.load import load_tokenizer, open_saved, save_tokenizer
from jaxscale.tools.interop import tokenizer_files
from jaxscale.tools.interop.post_processor import begin_with


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_tokenizers(tmp_path_factory.mktemp("tokenizers") / "made")


def run_with(tokenizer, **data):
    return {"config": {"seq_len": 128, "data": {"name": "files", "tokenizer": tokenizer} | data}}


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["bytes", "bpe", "newer", "unigram", "wordpiece"])
def test_our_own_tokenizers_become_a_tokenizer_json_with_the_same_ids(made, tmp_path, kind):
    name = "bytes" if kind == "bytes" else str(made[kind])
    texts, ours = tokenizer_files.export_files(tmp_path, run_with(name)), load_tokenizer(name)
    theirs = tokenizers.Tokenizer.from_str(texts.files["tokenizer.json"].decode())
    for text in (*SENTENCES, *TEXT[:5]):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == ours.encode(text).tolist() and theirs.decode(ids) == ours.decode(ids)
    about = json.loads(texts.files["tokenizer_config.json"])
    assert theirs.token_to_id(about["eos_token"]) == ours.eos_id == texts.end_ids["eos_token_id"]
    assert texts.notes == () and ("tokenizer.model" in texts.files) == (kind == "unigram")


@pytest.mark.parametrize(("kind", "begin"), [("bpe", "<|endoftext|>"), ("wordpiece", "[CLS]"), ("unigram", "</s>")])
def test_texts_of_an_export_begin_as_the_documents_of_the_run(made, tmp_path, kind, begin):
    texts = tokenizer_files.export_files(tmp_path, run_with(str(made[kind]), bos_token=begin))
    theirs = tokenizers.Tokenizer.from_str(texts.files["tokenizer.json"].decode())
    ours = load_tokenizer(str(made[kind]))
    first = ours.special_ids[begin]
    assert theirs.encode("the mesh").ids == [first, *ours.encode("the mesh").tolist()]
    about = json.loads(texts.files["tokenizer_config.json"])
    assert (about["bos_token"], about["add_bos_token"], texts.end_ids["bos_token_id"]) == (begin, True, first)


@pytest.mark.parametrize("with_config", [True, False], ids=["with tokenizer_config.json", "alone"])
@pytest.mark.parametrize("bos_token", ["", "none", "<|b|>"])
def test_an_export_of_a_tuned_model_begins_texts_so_too_and_ends_them_as_before(tmp_path, with_config, bos_token):
    (tmp_path / "from").mkdir()
    made = train_bpe(TEXT, 400, ["<|endoftext|>", "<|a|>", "<|b|>"], "gpt2", "tokenizers")
    ids = {name: made.token_to_id(name) for name in ("<|endoftext|>", "<|a|>", "<|b|>")}
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|a|> $A <|endoftext|>",
        pair="<|a|> $A <|endoftext|> $B:1 <|endoftext|>:1",
        special_tokens=[*ids.items()],
    )
    made.save(str(tmp_path / "from/tokenizer.json"))
    if with_config:
        (tmp_path / "from/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "extra": 1}')
    tokenizer = load_tokenizer(str(tmp_path / "from/tokenizer.json"), bos_token=bos_token)
    save_tokenizer(tokenizer, tmp_path / "run")
    texts = tokenizer_files.export_files(tmp_path / "run", run_with(tokenizer.name, bos_token=bos_token))
    theirs = tokenizers.Tokenizer.from_str(texts.files["tokenizer.json"].decode())
    plain, end = tokenizer.encode("mesh").tolist(), ids["<|endoftext|>"]
    begin = {"": [ids["<|a|>"]], "none": [], "<|b|>": [ids["<|b|>"]]}[bos_token]
    assert list(tokenizer.begin_ids) == begin and theirs.encode("mesh").ids == [*begin, *plain, end]
    assert theirs.encode("mesh", "mesh").ids == [*begin, *plain, end, *plain, end]
    assert texts.end_ids["bos_token_id"] == (begin[0] if begin else texts.end_ids["bos_token_id"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(texts.files[name])
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).begin_ids == tokenizer.begin_ids  # also read by ourselves
    if bos_token:
        about = json.loads(texts.files["tokenizer_config.json"])
        assert about["add_bos_token"] == bool(begin) and about.get("extra") == (1 if with_config else None)
        assert "as in this run's documents" in texts.notes[-1]
    else:
        assert texts.files["tokenizer.json"] == (tmp_path / "from/tokenizer.json").read_bytes() and texts.notes == ()


@pytest.mark.parametrize(("said", "bos_token", "expected"), [(True, "none", []), (False, "<|a|>", ["<|a|>"])])
def test_what_the_config_says_over_the_tokenizer_follows_the_run_too(tmp_path, said, bos_token, expected):
    (tmp_path / "from").mkdir()
    made = train_bpe(TEXT, 400, ["<|endoftext|>", "<|a|>"], "gpt2", "tokenizers")
    if not said:
        known = [("<|a|>", made.token_to_id("<|a|>"))]
        made.post_processor = tokenizers.processors.TemplateProcessing(single="<|a|> $A", special_tokens=known)
    made.save(str(tmp_path / "from/tokenizer.json"))
    about = {"eos_token": "<|endoftext|>", "bos_token": "<|a|>", "add_bos_token": said}
    (tmp_path / "from/tokenizer_config.json").write_text(json.dumps(about))
    tokenizer = load_tokenizer(str(tmp_path / "from/tokenizer.json"), bos_token=bos_token)
    save_tokenizer(tokenizer, tmp_path / "run")
    texts = tokenizer_files.export_files(tmp_path / "run", run_with(tokenizer.name, bos_token=bos_token))
    assert json.loads(texts.files["tokenizer_config.json"]) == about | {"add_bos_token": not said}
    theirs = tokenizers.Tokenizer.from_str(texts.files["tokenizer.json"].decode())
    assert theirs.encode("mesh").tokens[: len(expected)] == expected
    assert len(theirs.encode("mesh").ids) == len(tokenizer.encode("mesh")) + len(expected)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_older_post_processors_keep_what_they_put_behind_a_text(kind):
    made = train_bpe(TEXT, 400, ["</s>", "<s>"], "gpt2", "tokenizers")
    ids = {name: made.token_to_id(name) for name in ("</s>", "<s>")}
    made.post_processor = getattr(tokenizers.processors, f"{kind}Processing")(
        ("</s>", ids["</s>"]), ("<s>", ids["<s>"])
    )
    assert begin_with(["<s>"], made.to_str()) is None
    changed = tokenizers.Tokenizer.from_str(begin_with([], made.to_str()))
    for texts in (["mesh"], ["mesh", "axis"]):
        assert changed.encode(*texts).ids == made.encode(*texts).ids[1:]


def test_what_transformers_cannot_do_is_said_and_the_model_goes_along(made, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "unigram", lambda path: made["bpe"].read_text())  # other ids
    texts = tokenizer_files.export_files(tmp_path, run_with(str(made["unigram"])))
    assert sorted(texts.files) == ["tokenizer.model"] and "its .model file is exported" in texts.notes[0]


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (run_with("/nowhere/tokenizer.json"), "no tokenizer is exported: neither /nowhere/tokenizer.json nor"),
        (run_with("", name="tokens"), "its config sets none"),
        (run_with("") | {"converted": {"kept": {}}}, "its config sets none"),
    ],
)
def test_one_that_is_not_there_is_told(tmp_path, run, told):
    texts = tokenizer_files.export_files(tmp_path, run)
    assert told in texts.notes[0] and "tokenizer.json" not in texts.files


def test_files_come_along_both_ways_as_they_are(tmp_path):
    make_folder(tmp_path / "hf", LLAMA | {"vocab_size": 400}, np.dtype("<f4"))
    train_bpe(TEXT, 400, ["<|begin|>", "<|eot|>"], "gpt2", "tokenizers").save(str(tmp_path / "hf" / "tokenizer.json"))
    texts = {
        "tokenizer_config.json": '{"eos_token": {"content": "<|eot|>"}, "tokenizer_class": "PreTrainedTokenizerFast"}',
        "chat_template.jinja": "{{ messages }}", "special_tokens_map.json": "{}",
        "generation_config.json": '{"eos_token_id": [399, 2], "temperature": 0.6}',
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / "hf" / name).write_text(text)
    (tmp_path / "hf" / "training_args.bin").write_bytes(b"never read")
    assert convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"]) == 0
    data = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["data"]
    assert data["tokenizer"] == str(tmp_path / "run" / "tokenizer" / "tokenizer.json")
    assert load_tokenizer(data["tokenizer"]).eos_token == "<|eot|>"
    assert open_saved(tmp_path / "run", {}).stop_ids == (399, 2)
    assert convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"]) == 0
    for name in (*texts, "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert not (tmp_path / "out" / "training_args.bin").exists()


def test_a_folder_without_generation_config_stops_at_the_ends_of_its_config_json(made, tmp_path):
    make_folder(tmp_path / "hf", LLAMA | {"vocab_size": 400, "eos_token_id": [7, 9]}, np.dtype("<f4"))
    (tmp_path / "hf" / "tokenizer.json").write_bytes(made["bpe"].read_bytes())
    assert convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"]) == 0
    learned = load_tokenizer(str(made["bpe"])).eos_id
    assert open_saved(tmp_path / "run", {}).stop_ids == (learned, 7, 9)
    assert convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"]) == 0
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [7, 9]}


def test_the_ends_of_a_model_that_is_trained_on_come_from_its_tokenizer(made, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(made["bpe"].read_bytes())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    texts = tokenizer_files.export_files(tmp_path, run_with("gone"))
    assert texts.end_ids == {"bos_token_id": None, "eos_token_id": load_tokenizer(str(made["bpe"])).eos_id}
    (folder / "generation_config.json").write_text('{"eos_token_id": 7, "bos_token_id": 3}')
    assert tokenizer_files.export_files(tmp_path, run_with("gone")).end_ids == {"bos_token_id": 3, "eos_token_id": 7}


def test_an_export_stops_where_the_run_has_ended_its_documents_too(made, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(made["bpe"].read_bytes())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.6}')
    (folder / "jaxscale.json").write_text('{"eos_token": "<|endoftext|>"}')
    texts, learned = tokenizer_files.export_files(tmp_path, run_with("gone")), load_tokenizer(str(made["bpe"])).eos_id
    assert json.loads(texts.files["generation_config.json"]) == {"eos_token_id": [7, learned], "temperature": 0.6}
    assert "also stops at <|endoftext|>" in texts.notes[0]
