"""RoPE of a config.json is what transformers reads there, however it is said, or the line names what is not read."""

import json
import os
import pathlib
import subprocess

import pytest
import rope_cases
from rope_cases import FULL, SLIDING, WORDS

from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import families

PYTHON = os.environ.get("JAXSCALE_TORCH_PYTHON", "")  # one with torch and transformers
HERE = pathlib.Path(__file__).parent
THEIRS = json.loads((HERE / "rope_read.json").read_text())  # transformers 5.23
CASES = rope_cases.cases()
READ_WAYS = ("old", "old_type", "new", "new_theta_outside", "both_theta_outside", "both_with_theta", "empty")


def said(base, scaling):
    """WORDS of RoPE as ours has it."""
    if scaling is None:
        return dict(rope_type="default", rope_theta=base)
    told = dict(rope_type=scaling.name, rope_theta=base, factor=scaling.factor)
    if scaling.name == "llama3":
        told |= dict(low_freq_factor=scaling.low_freq_factor, high_freq_factor=scaling.high_freq_factor)
    if scaling.name == "yarn":
        told |= {name: getattr(scaling, name) for name in ("beta_fast", "beta_slow", "attention_factor")}
    if scaling.name == "longrope":
        told |= dict(short_factor=list(scaling.short_factor), long_factor=list(scaling.long_factor))
    if scaling.name in ("llama3", "yarn", "longrope"):
        told |= dict(original_max_position_embeddings=scaling.original_max_len)
    if scaling.name == "dynamic":
        assert scaling.original_max_len == rope_cases.SMALL["max_position_embeddings"]
    return told


def same(ours, theirs):
    """Whether both compute the same: what a kind of scaling does not use is nothing to it."""
    theirs = {word: value for word, value in zip(WORDS, theirs) if word in ours}
    return ours == theirs


@pytest.mark.parametrize("kind", rope_cases.KINDS)
@pytest.mark.parametrize("family", rope_cases.FAMILIES)
def test_each_way_of_saying_it_is_read_as_transformers_reads_it_or_is_refused_by_name(family, kind):
    read, mine = [], {name: hf for name, hf in CASES.items() if name.startswith(f"{family} {kind} ")}
    for name, hf in mine.items():
        try:
            cfg = families.read(hf)[1]
        except BadInput as error:
            assert "\n" not in str(error) and any(word in str(error) for word in ("rope", "RoPE", "rotary")), name
            continue
        ours = {FULL if cfg.local_rope_base else "": said(cfg.rope_base, cfg.rope_scaling)}
        ours |= {SLIDING: said(cfg.local_rope_base, None)} if cfg.local_rope_base else {}
        assert isinstance(THEIRS[name], dict), (name, THEIRS[name])
        assert ours.keys() == THEIRS[name].keys(), name
        assert all(same(ours[layers], THEIRS[name][layers]) for layers in ours), (name, ours, THEIRS[name])
        read.append(name.split()[2])
    if kind == "proportional":  # RoPE over a part of a head
        assert read in ([], ["both_types"], ["other_shape"])
    else:  # those we compute are not refused
        refused = set(READ_WAYS) - set(read)
        assert refused <= ({"old_type"} if family == "gemma3_text" else set())


def test_what_is_said_in_two_places_that_differ_is_named_with_what_transformers_takes():
    told = {
        "llama proportional both": "partial_rotary_factor",
        "llama linear both": "transformers ignores rope_theta=500000.0",
    }
    told |= {"gemma3_text linear old_type": "type='linear' differs from rope_type='default'"}
    told |= {"gemma3_text linear other_shape": "rope_parameters has rope_type outside the groups"}
    told |= {"llama llama3 original_outside": "requires one original_max_position_embeddings"}
    for name, line in told.items():
        with pytest.raises(BadInput, match=line):
            families.read(CASES[name])


@pytest.mark.peer
def test_transformers_still_reads_it_so_in_every_family():
    if not PYTHON:
        pytest.skip("set JAXSCALE_TORCH_PYTHON to a Python that has torch and transformers")
    command = [PYTHON, HERE / "rope_cases.py", *rope_cases.FAMILIES, *rope_cases.LIKE_LLAMA]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {name: found[name] for name in THEIRS} == THEIRS
    for family in rope_cases.LIKE_LLAMA:
        for name in (name for name in THEIRS if name.startswith("llama ") and not name.endswith("other_shape")):
            assert found[name.replace("llama", family, 1)] == THEIRS[name], (family, name)
