"""Of several files that could be meant in a folder, the one is read that transformers reads, or both are named."""

import json

import numpy as np
import pytest
from hf_folders import FLOAT32, LLAMA, assert_same, make_folder, read_file, shapes_of, values_of, write_file

from jaxscale.cli import convert
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import hub, tokenizer_files
from jaxscale.tools.interop.hf_checkpoint import INDEX, WEIGHTS, open_checkpoint

SHARDS = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]


def read_all(folder):
    """{name: values} of what would be converted."""
    return {name: tensor.read() for name, tensor in open_checkpoint(str(folder)).tensors.items()}


@pytest.mark.parametrize("shards", ["gone", "there"])
def test_one_file_is_read_and_not_an_older_index_next_to_it(tmp_path, capsys, shards):
    """transformers' save_pretrained leaves the index of the shards that were there before."""
    folder = tmp_path / "hf"
    make_folder(folder, dtype=FLOAT32, files=2, seed=1)
    if shards == "gone":
        for name in SHARDS:
            (folder / name).unlink()
    values = values_of(shapes_of(LLAMA), FLOAT32, seed=2)
    write_file(folder / WEIGHTS, values)
    assert_same(read_all(folder), values)
    assert convert.main([f"--from={folder}", f"--workdir={tmp_path / 'run'}"]) == 0
    assert f"{WEIGHTS} is read and {INDEX} is ignored, as in transformers" in capsys.readouterr().err
    assert convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}", "--dtype=float32"]) == 0
    assert_same(read_file(tmp_path / "out" / WEIGHTS), values)


def test_tensors_that_the_index_leaves_out_are_read_with_the_rest_of_their_file(tmp_path):
    folder = tmp_path / "hf"
    values = make_folder(folder, dtype=FLOAT32, files=2)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["lm_head.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert_same(read_all(folder), values)


def test_a_tensor_that_two_files_have_otherwise_is_refused_and_both_are_named(tmp_path):
    folder = tmp_path / "hf"
    values = make_folder(folder, dtype=FLOAT32, files=2)
    first = read_file(folder / SHARDS[0])
    assert "lm_head.weight" not in first or "lm_head.weight" not in read_file(folder / SHARDS[1])
    for scale, is_same in ((1, True), (2, False)):
        for name in SHARDS:
            inside = {key: value for key, value in read_file(folder / name).items() if key != "lm_head.weight"}
            write_file(folder / name, inside | {"lm_head.weight": values["lm_head.weight"]})
            if name == SHARDS[0]:
                write_file(folder / name, inside | {"lm_head.weight": values["lm_head.weight"] * np.float32(scale)})
        if is_same:
            assert_same(read_all(folder), values)
        else:
            with pytest.raises(BadInput, match=f"lm_head.weight differs between {SHARDS[0]} and {SHARDS[1]}"):
                open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("names", "rename"),
    [
        (["model.fp16.safetensors"], WEIGHTS),
        (["model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json"], INDEX),
    ],
)
def test_a_variant_is_read_only_under_the_usual_name(tmp_path, names, rename):
    make_folder(tmp_path / "hf")
    (tmp_path / "hf" / WEIGHTS).unlink()
    for name in names:
        (tmp_path / "hf" / name).write_bytes(b"")
    with pytest.raises(BadInput, match=f"only the variant {names[-1]}, .* rename it to {rename}"):
        open_checkpoint(str(tmp_path / "hf"))


@pytest.mark.parametrize("key", ["transformers_weights", "configuration_files"])
def test_a_config_that_names_another_file_is_refused_by_the_name_of_the_setting(tmp_path, key):
    value = "other.safetensors" if key == "transformers_weights" else ["config.5.0.0.json"]
    make_folder(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(json.dumps(LLAMA | {key: value}))
    with pytest.raises(BadInput, match=f"config.json: {key}=.* is not supported"):
        convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"])


SMALL = LLAMA | {"vocab_size": 257, "eos_token_id": 256, "bos_token_id": 256}


def with_tokenizer(folder, **files):
    """A model's folder with the byte tokenizer, and these files."""
    make_folder(folder, SMALL)
    (folder / "tokenizer.json").write_text(tokenizer_files.byte_level())
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def test_what_is_not_brought_along_of_a_tokenizer_is_told(tmp_path, capsys):
    about = {"eos_token": "<|endoftext|>", "auto_map": {"AutoTokenizer": ["x.X", None]}}
    folder = with_tokenizer(tmp_path / "hf", **{"tokenizer_config.json": json.dumps(about)})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("t")
    assert convert.main([f"--from={folder}", f"--workdir={tmp_path / 'run'}"]) == 0
    told = capsys.readouterr().err
    assert "additional_chat_templates/ is not copied (tool_use.jinja): to use a chat template other" in told
    assert "tokenizer_config.json has custom tokenizer code (auto_map), which is not run" in told


def test_a_tokenizer_for_some_versions_of_transformers_is_refused_by_name(tmp_path):
    about = {"eos_token": "<|endoftext|>", "fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"]}
    folder = with_tokenizer(tmp_path / "hf", **{"tokenizer_config.json": json.dumps(about)})
    with pytest.raises(BadInput, match="tokenizer_config.json: fast_tokenizer_files=.* selects files other than"):
        convert.main([f"--from={folder}", f"--workdir={tmp_path / 'run'}"])


@pytest.mark.parametrize(
    ("path", "is_fetched"),
    [
        ("model.safetensors", True),
        ("chat_template.json", True),
        ("added_tokens.json", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("original/consolidated.00.safetensors", False),
        ("onnx/model.safetensors", False),
        ("onnx/config.json", False),
        ("pytorch_model.bin", False),
    ],
)
def test_what_is_fetched_of_a_repository(path, is_fetched):
    filter_repo_objects = pytest.importorskip("huggingface_hub.utils", reason="the extra hub").filter_repo_objects

    patterns = dict(allow_patterns=list(hub.ALLOW_PATTERNS), ignore_patterns=list(hub.IGNORE_PATTERNS))
    assert list(filter_repo_objects([path], **patterns)) == [path] * is_fetched
