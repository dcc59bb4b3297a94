"""A folder that is no Hugging Face model, or not one that can be read, is refused in a line that says what to do."""

import json

import numpy as np
import pytest
from hf_folders import LLAMA, make_folder, shapes_of, values_of, write_file

from jaxscale.cli import convert
from jaxscale.tools.interop.hf_checkpoint import open_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", "a\\b.safetensors", 7]
)
def test_an_index_leads_to_no_file_outside_its_folder(tmp_path, name):
    make_folder(tmp_path / "hf", files=2)
    (tmp_path / "evil.safetensors").write_bytes((tmp_path / "hf" / "model-00001-of-00002.safetensors").read_bytes())
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="maps 'lm_head.weight' to .* not a .safetensors file in the same folder"):
        open_checkpoint(str(tmp_path / "hf"))


def test_an_index_and_its_files_must_agree(tmp_path):
    make_folder(tmp_path / "hf", files=3)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    moved = index["weight_map"] | {"lm_head.weight": "model-00002-of-00003.safetensors"}
    (tmp_path / "hf" / INDEX).write_text(json.dumps({"weight_map": moved}))
    wrong = index["weight_map"]["lm_head.weight"] != moved["lm_head.weight"]
    assert wrong
    with pytest.raises(ValueError, match="which does not contain this tensor; download both files again"):
        open_checkpoint(str(tmp_path / "hf"))
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    (tmp_path / "hf" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="to model-00002-of-00003.safetensors, which is missing; download it"):
        open_checkpoint(str(tmp_path / "hf"))
    (tmp_path / "hf" / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="weight_map must map"):
        open_checkpoint(str(tmp_path / "hf"))


@pytest.mark.fault("H1")
def test_pickled_weights_are_refused_with_the_command_that_makes_safetensors(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    with pytest.raises(ValueError, match="pytorch_model.bin, which is pickled") as caught:
        convert.main([f"--from={folder}", f"--workdir={tmp_path / 'run'}"])
    for which in ("m", "t"):  # the tokenizer too: a model without it cannot be talked to
        assert f"; {which}.from_pretrained('{folder}').save_pretrained('FOLDER')" in str(caught.value)
    assert not (tmp_path / "run").exists()
    for name in ("consolidated.pt", "x.ckpt", "pytorch_model.bin"):
        with pytest.raises(ValueError, match="is pickled and is never read, because unpickling can run code"):
            open_checkpoint(str(folder / name))


def test_what_is_no_folder_of_a_model_is_refused(tmp_path):
    (tmp_path / "hf").mkdir()
    with pytest.raises(ValueError, match="to download it: hf download org/model --local-dir FOLDER"):
        open_checkpoint("org/model")
    (tmp_path / "hf" / "readme.md").write_text("x")
    with pytest.raises(ValueError, match="has no config.json"):
        open_checkpoint(str(tmp_path / "hf"))
    (tmp_path / "hf" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json is not a JSON object"):
        open_checkpoint(str(tmp_path / "hf"))
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf" / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="has neither model.safetensors nor .*; there is model.gguf"):
        open_checkpoint(str(tmp_path / "hf"))
    with pytest.raises(ValueError, match="is a file; give its folder"):
        open_checkpoint(str(tmp_path / "hf" / "model.safetensors"))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda values: values | {"model.norm.weight": values["model.norm.weight"][:-1]},
         r"model.safetensors: model.norm.weight has shape \[15\], but config.json requires \[16\]"),
        (lambda values: {name: value for name, value in values.items() if name != "model.norm.weight"},
         "hf: the checkpoint has no model.norm.weight"),
        (lambda values: values | {"model.layers.0.experts": np.zeros((2, 2), np.float32)},
         "hf: the checkpoint has model.layers.0.experts, which llama"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_those_of_the_config_are_named(tmp_path, change, told):
    make_folder(tmp_path / "hf")
    write_file(tmp_path / "hf" / "model.safetensors", change(values_of(shapes_of(LLAMA), np.float32)))
    with pytest.raises(ValueError, match=told):
        convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_a_model_of_no_family_is_refused(tmp_path):
    make_folder(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA | {"model_type": "bert"}))
    with pytest.raises(ValueError, match="hf: config.json: model_type='bert' is not supported; supported: "):
        convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"])


def test_a_tied_head_that_differs_from_its_table_is_refused(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    values = make_folder(tmp_path / "hf", config)
    table = values["model.embed_tokens.weight"]
    write_file(tmp_path / "hf" / "model.safetensors", values | {"lm_head.weight": table})
    assert convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"]) == 0
    other = table.copy()
    other[3, 3] += 1
    write_file(tmp_path / "hf" / "model.safetensors", values | {"lm_head.weight": other})
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'other'}"])
