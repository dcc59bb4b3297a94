"""Numbers and tokenizers that no model can have are told in a line, before anything is built or allocated."""

import json

import pytest
from hf_folders import GPT2, LLAMA, make_folder
from test_experts import SMALL_MIXTRAL
from test_foreign_folders import SMALL, with_tokenizer

from jaxscale.cli import convert
from jaxscale.runtime.text.tokenizer.load import open_saved
from jaxscale.system import foreign
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import tokenizer_files

pytestmark = pytest.mark.fault("H17")
ABSURD = 10**9


def bring_in(folder, workdir):
    return convert.main([f"--from={folder}", f"--workdir={workdir}", "--json"])


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("config", "name", "value", "told"),
    [
        (LLAMA, "num_hidden_layers", ABSURD, "num_hidden_layers=1000000000 is too large: there are 30 tensors"),
        (LLAMA | {"model_type": "gemma2", "architectures": []}, "num_hidden_layers", ABSURD, "there are 30 tensors"),
        (LLAMA, "num_hidden_layers", 10**400, "num_hidden_layers=a number of 1,329 bits is too large"),
        (LLAMA, "num_hidden_layers", -1, "num_hidden_layers=-1 must be a positive integer"),
        (LLAMA, "num_hidden_layers", "x" * 9999, "must be a positive integer"),
        (LLAMA, "vocab_size", ABSURD, "vocab_size=1000000000 is too large: the longest tensor axis is 96"),
        (LLAMA, "hidden_size", ABSURD, "hidden_size=1000000000 is too large"),
        (LLAMA, "intermediate_size", ABSURD, "intermediate_size=1000000000 is too large"),
        (LLAMA, "num_attention_heads", 0, "num_attention_heads=0 must be a positive integer"),
        (LLAMA, "num_key_value_heads", 1.5, "num_key_value_heads=1.5 must be a positive integer"),
        (LLAMA, "max_position_embeddings", [], r"max_position_embeddings=\[\] must be a positive integer"),
        (LLAMA, "max_position_embeddings", 1 << 60, "is too large: no model has a longer context"),
        (GPT2, "n_positions", ABSURD, "n_positions=1000000000 is too large: the longest tensor axis is 96"),
        (GPT2, "n_layer", ABSURD, "n_layer=1000000000 is too large"),
        (SMALL_MIXTRAL, "num_local_experts", ABSURD, "=1000000000 is too large: the largest router has"),
        (SMALL_MIXTRAL, "num_experts", ABSURD, "num_experts=1000000000 is too large"),
        (SMALL_MIXTRAL, "num_local_experts", 0, "num_local_experts=0 must be a positive integer"),
        (LLAMA, "rope_theta", "x" * 9999, "rope_theta='x.* must be a number"),
        (LLAMA, "hidden_act", "x" * 9999, "hidden_act='x.* is not supported for llama"),
        (LLAMA, "architectures", 7, "architectures=7 must be a list of names"),
        (LLAMA, "eos_token_id", -1, "eos_token_id=-1 must be an id from 0 to 95, or a list of such ids"),
        (LLAMA, "eos_token_id", [2, 96], r"eos_token_id=\[2, 96\] must be an id from 0 to 95"),
        (LLAMA, "eos_token_id", 2.0, "eos_token_id=2.0 must be an id"),
        (LLAMA, "eos_token_id", "2", "eos_token_id='2' must be an id"),
        (LLAMA, "eos_token_id", {"a": 1}, "eos_token_id={'a': 1} must be an id"),
        (LLAMA, "bos_token_id", [[1]], r"bos_token_id=\[\[1\]\] must be an id"),
    ],
)
def test_a_number_that_the_tensors_deny_is_refused_before_anything_is_made_of_it(tmp_path, config, name, value, told):
    make_folder(tmp_path / "hf", config=LLAMA if config.get("model_type") == "gemma2" else config)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(BadInput, match=told) as caught:
        bring_in(tmp_path / "hf", tmp_path / "run")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not (tmp_path / "run").exists()


def test_a_list_of_end_ids_is_taken(tmp_path):
    make_folder(tmp_path / "hf", config=LLAMA | {"eos_token_id": [2, 3]})
    assert bring_in(tmp_path / "hf", tmp_path / "run") == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer_config.json", "header"])
def test_json_without_end_is_one_line(tmp_path, name):
    folder = with_tokenizer(tmp_path / "hf", config=SMALL, files=2)
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    if name == "header":
        name = "model-00001-of-00002.safetensors"
        (folder / name).write_bytes(len(deep).to_bytes(8, "little") + deep.encode())
    else:
        (folder / name).write_text(deep)
    with pytest.raises(BadInput, match=f"{name}.*it is nested deeper than 64 levels") as caught:
        bring_in(folder, tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_what_nests_no_deeper_than_it_may_is_read():
    assert foreign.parse_json("[" * 64 + "]" * 64)
    with pytest.raises(BadInput, match="deeper than 64 levels"):
        foreign.parse_json('{"a":' * 65 + "1" + "}" * 65)


def spec(**more):
    """A tokenizer.json, with parts of another."""
    words = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], **parts, "model": words} | more


def words(**more):
    return {"model": spec()["model"] | more}


BROKEN = {
    "no unknown token": (spec(**words(unk_token="<unk>")), "cannot be used: WordLevel error: Missing .UNK. token"),
    "the library panics": (spec(pre_tokenizer={"type": "FixedLength", "length": 0}), "chunk size must be non-zero"),
    "it panics while it reads": (
        spec(model={"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}), "cannot be read as a tokenizer.json"
    ),
    "it panics while it decodes": (
        spec(decoder={"type": "Strip", "content": "a", "start": 5, "stop": 5}), "index out of bounds"
    ),
    "no end": (spec(**words(vocab={"a": 0})), "has none of the common end-of-document tokens"),
    "too many ids": (spec(**words(vocab={"a": 0, "</s>": 9999})), "has 10000 ids, but the model in .* has only 257"),
    "no JSON": ("{", "cannot be read as a tokenizer.json"),
}  # fmt: skip


@pytest.mark.cases(3)
@pytest.mark.parametrize(("content", "told"), BROKEN.values(), ids=BROKEN)
def test_convert_tries_the_tokenizer_and_says_what_is_wrong_with_it(tmp_path, content, told):
    folder = with_tokenizer(tmp_path / "hf", config=SMALL)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(BadInput, match=told) as caught:
        bring_in(folder, tmp_path / "run")
    assert str(folder / "tokenizer.json") in str(caught.value) and "remove tokenizer.json" in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.cases(2)
@pytest.mark.parametrize("found", [-1, 2.5, "end", [1, "x"], {"a": 1}, True], ids=str)
def test_an_odd_end_in_a_work_folder_is_one_line(tmp_path, found):
    with_tokenizer(tmp_path / "hf", config=SMALL)
    assert bring_in(tmp_path / "hf", tmp_path / "run") == 0
    (tmp_path / "run" / "tokenizer" / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    with pytest.raises(BadInput, match="generation_config.json: eos_token_id=.* must be a token id or a list"):
        open_saved(tmp_path / "run", {})


def test_an_export_of_a_broken_tokenizer_is_one_line(tmp_path):
    with_tokenizer(tmp_path / "hf", config=SMALL)
    assert bring_in(tmp_path / "hf", tmp_path / "run") == 0
    kept = tmp_path / "run" / "tokenizer"
    (kept / "jaxscale.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "begin_tokens": []}))
    (kept / "tokenizer.json").write_text(json.dumps(BROKEN["it panics while it reads"][0]))
    with pytest.raises(BadInput, match="tokenizer.json cannot be read: range end index 2"):
        tokenizer_files.export_files(tmp_path / "run", {"config": {}})
