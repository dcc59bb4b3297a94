"""transformers reads what we write: every family, every tokenizer that can be trained here. Needs torch beside us."""

import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
from hf_folders import make_folder
from trained_tokenizers import SENTENCES, make_tokenizers

from jaxscale.cli import convert
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.tools.interop import families
from jaxscale.tools.interop.families.settings import unread

PYTHON = os.environ.get("JAXSCALE_TORCH_PYTHON", "")  # one with torch and transformers
SIDE = pathlib.Path(__file__).parent / "transformers_side.py"
pytestmark = pytest.mark.peer


def ask(*arguments):
    """What the other side found."""
    if not PYTHON:
        pytest.skip("set JAXSCALE_TORCH_PYTHON to a Python that has torch and transformers")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([PYTHON, SIDE, *map(str, arguments)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def leaves_of(run):
    """{leaf: [shape, dtype, fingerprint]} of what was brought in."""
    return Checkpoints(run / "checkpoints", CheckpointConfig()).read_record(0)["leaves"]


def test_it_loads_each_family_with_no_key_too_many_or_too_few_and_writes_the_same_text(tmp_path):
    ask("make", tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    joined = []
    for name in names:
        folder = tmp_path / name
        assert convert.main([f"--from={folder / 'hf'}", f"--workdir={folder / 'run'}"]) == 0
        if (folder / "joined").exists():
            assert convert.main([f"--from={folder / 'joined'}", f"--workdir={folder / 'same'}"]) == 0
            assert leaves_of(folder / "same") == leaves_of(folder / "run")
            joined.append(name)
        assert convert.main([f"--workdir={folder / 'run'}", f"--to={folder / 'out'}", "--shard_bytes=9e3"]) == 0
        assert len(list((folder / "out").glob("*.safetensors"))) > 1
    assert len(joined) >= 6
    found = ask("check", tmp_path)
    assert sorted(found) == names and len(names) >= 11
    for name, told in found.items():
        assert told["wrong"] == {} and told["same_text"], (name, told)
    assert len({tuple(told["text"]) for told in found.values()}) > 5  # not all the same word again and again


def test_every_key_that_a_config_class_has_is_read_refused_or_known_to_change_nothing(tmp_path):
    found = ask("keys", tmp_path)
    assert sorted(found) == sorted(families.FAMILIES)
    for name, keys in found.items():
        assert unread(families.FAMILIES[name], dict.fromkeys(keys, 1)) == [], name


def test_autotokenizer_gives_the_ids_of_our_own_tokenizers(tmp_path):
    made = make_tokenizers(tmp_path / "made")
    for name, file in made.items():
        folder = tmp_path / "all" / name
        make_folder(folder / "hf", dtype=np.dtype("<f4"))
        assert convert.main([f"--from={folder / 'hf'}", f"--workdir={folder / 'run'}"]) == 0
        kept = folder / "run" / "tokenizer"
        kept.mkdir()
        if name == "bytes":
            (kept / "jaxscale.json").write_text(json.dumps({"name": "bytes"}))
        else:
            (kept / {".model": "tokenizer.model", ".txt": "vocab.txt"}.get(file.suffix, "tokenizer.json")).write_bytes(
                file.read_bytes()
            )
        assert convert.main([f"--workdir={folder / 'run'}", f"--to={folder / 'out'}"]) == 0
    found = ask("encode", tmp_path / "all", json.dumps(SENTENCES))
    assert sorted(found) == sorted(made)
    for name, told in found.items():
        ours = load_tokenizer("bytes" if name == "bytes" else str(made[name]))
        assert told["ids"] == [ours.encode(text).tolist() for text in SENTENCES], name
        assert told["again"] == [ours.decode(ids) for ids in told["ids"]], name
        assert told["eos"] == ours.eos_id, name
