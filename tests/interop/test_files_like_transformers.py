"""Of several files in a folder `convert` reads those that transformers 4, transformers 5 and PEFT read, or refuses."""

import json
import os
import pathlib
import subprocess

import file_choices
import numpy as np
import pytest

from jaxscale.runtime.text.tokenizer.load import find_template, open_saved
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import tokenizer_files
from jaxscale.tools.interop.source_model import open_source_model

PYTHON = os.environ.get("JAXSCALE_TORCH_PYTHON", "")  # one with torch, transformers, peft and sentencepiece
HERE = pathlib.Path(__file__).parent
SIDE = HERE / "file_choices.py"
THEIRS = {version: json.loads((HERE / f"file_choices_{version}.json").read_text()) for version in "45"}
CASES = file_choices.cases()
PICKLED = "is pickled and is never read, because unpickling can run code"
NO_WEIGHTS = "has neither model.safetensors nor model.safetensors.index.json"
GONE = "model.safetensors.index.json: weight_map maps .* to {}, which is missing; download it"
NO_DEFAULT = (
    "additional_chat_templates has tool_use.jinja but no default.jinja, so transformers ignores the "
    "chat_template of {}; save the required template as .*chat_template.jinja"
)
TWO_MODELS = (
    "adapter in .*adapter is for .*base, but its folder also has {0}: transformers 5 applies it to {0}, "
    "but transformers 4 and PEFT to .*base; select one with --base"
)
REFUSED = {
    "weights": {
        "shards without an index": f"{NO_WEIGHTS}; there is model-00001-of-00002.safetensors",
        "index whose shards are gone": GONE.format(file_choices.SHARDS[0]),
        "index whose second shard is gone": GONE.format(file_choices.SHARDS[1]),
        "a tensor in another shard than the index says": "gate_proj.weight' to model-00002-of-00002.safetensors, "
        "which does not contain this tensor",
        "a tensor in both shards with other numbers": "lm_head.weight differs between "
        "model-00001-of-00002.safetensors and model-00002-of-00002.safetensors",
        "pickled": f"has pytorch_model.bin, which {PICKLED}",
        "pickled, and index whose shards are gone": GONE.format(file_choices.SHARDS[0]),
        "pickled shards": f"has pytorch_model-00001-of-00002.bin, which {PICKLED}",
        "pickled shards, and one pickled": PICKLED,
        "variant": f"{NO_WEIGHTS}, only the variant model.fp16.safetensors",
        "variant, and pickled": f"has pytorch_model.bin, which {PICKLED}",
        "variant in shards": f"{NO_WEIGHTS}, only the variant model.safetensors.index.fp16.json",
        "consolidated": f"{NO_WEIGHTS}; there is consolidated.safetensors",
        "one file in a subfolder": NO_WEIGHTS,
        "config.json names another file": "config.json: transformers_weights='other.safetensors' is not supported",
    },
    "config": {"config.json for some versions": "configuration_files=.'config.4.0.0.json'. is not supported"},
    "tokenizer": {
        "tokenizer.json and one for some versions": "fast_tokenizer_files=.* selects files other than tokenizer.json"
    },
    "end": {},
    "template": {
        "several in settings, none of them default": "has the chat templates tool_use, but none is named default",
        "more and settings": NO_DEFAULT.format("tokenizer_config.json"),
        "more and several in settings": NO_DEFAULT.format("tokenizer_config.json"),
        "processor and more": NO_DEFAULT.format("chat_template.json"),
    },
    "adapter": {
        "pickled adapter": "has no adapter_model.safetensors; adapter_model.bin is a pickle",
        "adapter with a whole model": TWO_MODELS.format("model.safetensors"),
        "adapter with a whole model in shards": TWO_MODELS.format("model.safetensors.index.json"),
        "settings of an adapter with a whole model": "has no adapter_model.safetensors; download it",
        "adapter without its settings, with a whole model": "--adapter requires a PEFT adapter",
        "adapter of an adapter": "first has no config.json",
    },
}
DIFFERENT = {  # where they differ from each other, or we from them, and why
    ("weights", "a tensor in a shard and not in the index"): [2.0, 3.0],  # as 5; 4 leaves it as it was initialized
    ("tokenizer", "vocab.json"): None,  # not read here; `convert` says so
    ("template", "processor"): "processor",  # only AutoProcessor reads it there
    ("adapter", "adapter of a whole model with an adapter"): [[8.0], 2.0],  # as all but PEFT with transformers 4
}


def read(kind, folder, workdir):
    """Returns what `convert` reads, as file_choices.read does; None for nothing."""
    if kind == "adapter":
        found = open_source_model(str(folder / "adapter"), keep=True)
        return file_choices.plain({name: tensor.read() for name, tensor in found.tensors.items()})
    found = open_source_model(str(folder))
    if kind == "weights":
        return file_choices.numbers({name: tensor.read() for name, tensor in found.tensors.items()})
    if kind == "config":
        generation = json.loads(found.files[file_choices.GENERATION])
        return [generation.get(f"{name}_token_id") for name in ("bos", "eos")]
    tokenizer_files.save_to_workdir(found.files, workdir)
    if (saved := open_saved(workdir, {}, converted=True)) is None:
        return None
    if kind == "tokenizer":
        return len(saved.tokenizer.encode(file_choices.TEXT))
    template = find_template(saved.about)
    return saved.tokenizer.eos_token if kind == "end" else template and template[0]


def theirs(kind, name):
    """Returns the different results of transformers 4, transformers 5 and PEFT, errors left out."""
    found = [THEIRS[version][f"{kind}: {name}"] for version in THEIRS]
    if kind == "adapter":
        found = [one for pair in found for one in pair]
    if kind == "config":
        found = [one[:2] for one in found]  # their dtype: every tensor becomes float32 here
    found = [one for one in found if not (isinstance(one, str) and one.endswith("Error"))]
    return [one for number, one in enumerate(found) if one not in found[:number]] or [None]


@pytest.mark.cases(30)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_folder_is_read_as_they_read_it_or_refused(tmp_path, kind, name):
    file_choices.write(tmp_path / "hf", kind, CASES[kind, name])
    if (line := REFUSED[kind].get(name)) is not None:
        with pytest.raises(BadInput, match=line) as error:
            read(kind, tmp_path / "hf", tmp_path / "run")
        assert "\n" not in str(error.value)
        return
    ours = read(kind, tmp_path / "hf", tmp_path / "run")
    if (kind, name) in DIFFERENT:
        assert ours == DIFFERENT[kind, name] and theirs(kind, name) != [ours]
    else:
        assert [ours] == theirs(kind, name)


def test_every_result_refusal_and_difference_is_of_a_folder():
    assert {(kind, name) for kind, names in REFUSED.items() for name in names} <= CASES.keys()
    assert DIFFERENT.keys() <= CASES.keys()
    assert all(list(found) == [f"{kind}: {name}" for kind, name in CASES] for found in THEIRS.values())


@pytest.mark.parametrize(("base", "number"), [("base", 1.0), ("adapter", 4.0)])
def test_base_says_which_of_two_models_an_adapter_is_added_to(tmp_path, base, number):
    file_choices.write(tmp_path, "adapter", CASES["adapter", "adapter with a whole model"])
    found = open_source_model(str(tmp_path / "adapter"), str(tmp_path / base), keep=True)
    assert file_choices.plain({name: tensor.read() for name, tensor in found.tensors.items()}) == [[number], 2.0]
    assert any("; model.safetensors next to it is ignored" in note for note in found.notes) == (base == "base")


def ask(*arguments):
    """Returns the output of the program in a Python with transformers, and the version of transformers there."""
    if not PYTHON:
        pytest.skip("set JAXSCALE_TORCH_PYTHON to a Python that has torch, transformers, peft and sentencepiece")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = lambda *command: subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    version = run(PYTHON, "-c", "from importlib.metadata import version; print(version('transformers'))")
    return run(PYTHON, SIDE, *arguments), version.partition(".")[0]


@pytest.mark.peer
def test_they_still_read_the_same_files():
    found, version = ask()
    assert json.loads(found) == THEIRS[version]


@pytest.mark.peer
def test_a_model_that_transformers_saved_over_another_one_is_read_as_transformers_reads_it(tmp_path):
    ask(tmp_path)
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "model.safetensors.index.json").exists()
    found = open_source_model(str(tmp_path))
    with np.load(tmp_path / "loaded.npz") as loaded:
        assert found.tensors.keys() == set(loaded)
        for name, tensor in found.tensors.items():
            np.testing.assert_array_equal(tensor.read(), loaded[name])
    assert any("model.safetensors is read and" in note for note in found.notes)
