"""A large config becomes a small model of the same kind, and what was changed is said."""

import dataclasses
import pathlib

import pytest

from jaxscale.cli.shrink import changes, changes_text, is_large, shrink, use_available_data
from jaxscale.command_line import parse
from jaxscale.config_file import load_config

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"
LARGE = ["gpt2_124m.py", "1b.py", "7b.py", "13b.py", "70b.py"]


@pytest.mark.parametrize("name", LARGE)
def test_a_shipped_large_config_becomes_a_small_one_of_the_same_kind(name):
    cfg = load_config(str(CONFIGS / name))
    small = shrink(cfg, small=True)
    assert is_large(cfg, copies=1) and not is_large(small, copies=8)
    assert small.model.num_params < 20e6 and small.tokens_per_step <= 2048
    assert small.model.num_layers == 2 and small.model.vocab_size == cfg.model.vocab_size
    if small.model.name == "llama":
        ratio = lambda model: model.num_heads // model.num_kv_heads
        assert ratio(small.model) == ratio(cfg.model)
        assert small.model.num_kv_heads % 8 == 0 or small.model.num_kv_heads == cfg.model.num_kv_heads


def test_the_quickstart_is_proved_as_it_is():
    cfg = load_config(str(CONFIGS / "quickstart.py"))
    assert not is_large(cfg, copies=8)
    assert shrink(cfg) == cfg
    assert changes_text(cfg, cfg) == ["the config as it is"]


def test_layers_alone_changes_nothing_else():
    cfg = load_config(str(CONFIGS / "quickstart.py"))
    assert changes(cfg, shrink(cfg, layers=1)) == {"model.num_layers": (4, 1)}
    assert shrink(cfg, layers=99) == cfg


@pytest.mark.parametrize("name", LARGE)
def test_the_changes_as_flags_give_the_same_config(name):
    cfg = load_config(str(CONFIGS / name))
    small, _ = use_available_data(shrink(cfg, small=True))
    arguments = parse(
        [f"--config={CONFIGS / name}", *(f"--config.{name}={now}" for name, (_, now) in changes(cfg, small).items())]
    )
    assert load_config(arguments.config, arguments.overrides) == small


def test_data_that_are_not_there_are_replaced_aloud():
    cfg = load_config(str(CONFIGS / "7b.py"), {"data.files": "nowhere/*.bin"})
    replaced, problems = use_available_data(cfg)
    assert replaced.data.name == "synthetic" and "nowhere" in problems[0]
    assert use_available_data(replaced) == (replaced, [])
    assert dataclasses.replace(replaced, data=cfg.data) == cfg
