"""A model that nobody gave a tokenizer reads and writes token ids, and is never taken to read bytes."""

import copy
import json
import shutil

import hf_folders
import numpy as np
import pytest
import tokenizers

import jaxscale
from jaxscale.cli import convert
from jaxscale.cli import evaluate as evaluate_verb
from jaxscale.cli import sample as sample_verb
from jaxscale.runtime.data.checks import tokenizer_problems
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.eval.bits_per_byte import open_documents
from jaxscale.runtime.text.chat.spans import open_prompts
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import tokenizer_files

CONFIG = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=257, hidden_size=16, intermediate_size=24,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=256,
)  # fmt: skip
WAY_OUT = "set --tokenizer=FILE .* or convert it again from a folder with the tokenizer's files; the Python API"
PROMPT = list(b"def f")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A converted model without the files of a tokenizer."""
    folder = tmp_path_factory.mktemp("ids")
    hf_folders.make_folder(folder / "hf", config=CONFIG, dtype=hf_folders.FLOAT32)
    assert convert.main([f"--from={folder / 'hf'}", f"--workdir={folder / 'run'}", "--json"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def model(workdir):
    return jaxscale.open_model(str(workdir), say=lambda line: None)


@pytest.mark.slow
def test_sample_and_evaluate_refuse_a_converted_model_without_a_tokenizer(workdir, model, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(BadInput, match=WAY_OUT):
        sample_verb.main([f"--workdir={workdir}", "--prompt=a"])
    with pytest.raises(BadInput, match=WAY_OUT):
        evaluate_verb.main([f"--workdir={workdir}", f"--text={tmp_path / 'a.txt'}"])
    with pytest.raises(BadInput, match=WAY_OUT):
        jaxscale.sample(model, "a")


@pytest.mark.slow
def test_a_tokenizer_may_be_named_for_it_and_ids_give_the_same(workdir, model, capsys, tmp_path):
    how = ["--num_tokens=6", "--temperature=0", "--json"]
    sample_verb.main([f"--workdir={workdir}", "--tokenizer=bytes", "--prompt=def f", *how])
    text = json.loads(capsys.readouterr().out)["text"]
    ids = jaxscale.sample(model, PROMPT, num_tokens=6, temperature=0.0)
    assert ids and all(isinstance(one, int) for one in ids) and bytes(ids).decode("utf-8", "replace") == text
    several = jaxscale.sample(model, [PROMPT, np.array([1, 2, 3])], num_tokens=6, temperature=0.0, batch=1)
    assert several[0] == ids and len(several) == 2
    with pytest.raises(BadInput, match="tokenizer=/none.json"):
        sample_verb.main([f"--workdir={workdir}", "--tokenizer=/none.json", "--prompt=a"])


def test_what_is_no_prompt_of_ids_is_one_line(model):
    for prompt, told in (
        ([257], "token id 257"), ([[]], "must be text, or a non-empty"), ([[1.5]], "must be text, or a non-empty"),
        (["a", [1]], "prompts must be either all strings"), ([[-1]], "token id -1"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=f"{told}|does not record the model's tokenizer"):
            jaxscale.sample(model, prompt)
    with pytest.raises(BadInput, match="chat and stop apply only to text prompts"):
        jaxscale.sample(model, [1], stop="a")
    assert jaxscale.sample(model, []) == []


@pytest.mark.slow
def test_token_ids_are_evaluated_from_arrays_and_from_files(workdir, model, tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, length).astype("<u2") for length in (200, 7, 1, 90)]
    found = jaxscale.evaluate(model, tokens={"own": documents})["own"]
    assert found["documents"] == 3 and found["tokens"] == 199 + 6 + 89 and "bits_per_byte" not in found
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    for number, ids in enumerate(documents):
        ids.tofile(tmp_path / f"{number}.bin")
    files = jaxscale.evaluate(model, tokens={"own": f"{tmp_path}/*.bin"}, save=True)["own"]
    assert files == found and "evals/own/loss" in (workdir / "evals.jsonl").read_text()
    (tmp_path / "a.txt").write_bytes(bytes(range(97, 123)) * 3)
    text = jaxscale.evaluate(jaxscale.open_model(str(workdir), tokenizer="bytes"), text={"t": f"{tmp_path}/a.txt"})["t"]
    same = jaxscale.evaluate(model, tokens={"t": [[256, *(tmp_path / "a.txt").read_bytes()]]})["t"]
    assert same["loss"] == pytest.approx(text["loss"], rel=1e-6)  # the end of a document stands before both


def test_what_is_no_token_file_is_one_line(model, tmp_path):
    np.array([300], "<u2").tofile(tmp_path / "large.bin")
    for given, told in (
        (f"{tmp_path}/none.bin", r"tokens\['x'\]=.*none.bin does not exist"),
        (f"{tmp_path}/large.bin", "large.bin .*300.*257"),
        ([[300]], r"tokens\['x'\]\[0\] has the token id 300, but the model's vocabulary has 257 ids"),
        ([1, 2], r"tokens\['x'\]\[0\] must be a list of token ids; pass a single document as \[ids\]"),
        ([[1]], "has no document with at least two tokens"),
        ([], "has no document with at least two tokens"),
    ):
        with pytest.raises(BadInput, match=told):
            jaxscale.evaluate(model, tokens={"x": given})
    first_two = open_documents("x", [[1], [2], [300]], 257, limit=2)()
    assert list(map(list, first_two)) == [[1], [2]]  # what lies beyond the limit is neither read nor checked
    with pytest.raises(BadInput, match="tokens=.* must be a dict of named evaluators"):
        jaxscale.evaluate(model, tokens=[[1, 2]])


@pytest.fixture(scope="module")
def with_more(tmp_path_factory):
    """A folder whose tokenizer has a special token that its model has no row for, as Gemma 3's smallest has."""
    folder = tmp_path_factory.mktemp("more")
    hf_folders.make_folder(folder / "hf", config=CONFIG, dtype=hf_folders.FLOAT32)
    made = tokenizers.Tokenizer.from_str(tokenizer_files.byte_level())
    made.add_special_tokens(["<image>"])
    made.save(str(folder / "hf/tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages[0].content }}<image>"}
    (folder / "hf/tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.slow
def test_special_tokens_that_only_a_larger_model_has_are_told_and_never_used(with_more, capsys):
    assert convert.main([f"--from={with_more / 'hf'}", f"--workdir={with_more / 'run'}"]) == 0
    told = "tokenizer.json has special tokens outside the model's vocabulary, which are not used: <image>"
    assert told in capsys.readouterr().err
    lines = []
    model = jaxscale.open_model(str(with_more / "run"), say=lines.append)
    assert [told in line for line in lines].count(True) == 1
    assert jaxscale.sample(model, "a<image>", num_tokens=3, temperature=0.0) is not None  # in a text it is text
    refused = "conversation contains <image>, token id 257 of the tokenizer, but the model has only 257 ids"
    with pytest.raises(BadInput, match=refused):
        open_prompts(model.saved_tokenizer, "2026-01-01").ids([{"role": "user", "content": "a"}])
    config = DataConfig(tokenizer=str(with_more / "run/tokenizer/tokenizer.json"))
    assert tokenizer_problems(config, config.tokenizer, 257, 64) == []
    assert copy.copy(model.tokenizer).vocab_size == 258


@pytest.mark.parametrize("kind", ["text", "end", "begin"])
def test_a_tokenizer_whose_texts_need_more_ids_than_the_model_has_is_refused(with_more, tmp_path, kind):
    shutil.copytree(with_more / "hf", tmp_path / "hf")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
    about = {"eos_token": "<image>" if kind == "end" else "<|endoftext|>", "bos_token": "<image>"}
    if kind == "text":
        made.add_tokens(["plain"])
        made.save(str(tmp_path / "hf/tokenizer.json"))
    (tmp_path / "hf/tokenizer_config.json").write_text(json.dumps(about | {"add_bos_token": kind == "begin"}))
    with pytest.raises(BadInput, match="tokenizer.json has 25[89] ids, but the model in config.json has only 257"):
        convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"])
