"""A large config becomes a small model of the same kind, and what was changed is said."""

import dataclasses
import pathlib

import pytest

from jaxscale.cli.shrink import as_overrides, changes_text, is_large, shrink, use_available_data, with_scaled_training
from jaxscale.program.budget import resolve_budget
from jaxscale.settings.config_file import file_text, load_config

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
    assert changes_text(cfg, cfg) == ["the config is unchanged"]


def test_layers_alone_changes_nothing_else():
    cfg = load_config(str(CONFIGS / "quickstart.py"))
    assert changes_text(cfg, shrink(cfg, layers=1))[1:] == ["  model.num_layers: 4 -> 1"]
    assert shrink(cfg, layers=99) == cfg


@pytest.mark.parametrize("name", LARGE)
def test_the_small_config_as_a_file_gives_the_same_config(tmp_path, name):
    cfg = load_config(str(CONFIGS / name))
    small = shrink(cfg, small=True)
    (tmp_path / "small.py").write_text(file_text(small))
    assert load_config(str(tmp_path / "small.py")) == small
    trained = with_scaled_training(cfg, small, ())
    assert load_config(str(CONFIGS / name), as_overrides(cfg, trained)) == trained
    per_parameter = lambda run: run.train_tokens / run.model.num_params
    assert per_parameter(trained) == pytest.approx(per_parameter(cfg), rel=1e-3)
    assert trained.optim.peak_lr * 128 == pytest.approx(cfg.optim.peak_lr * cfg.model.embed_dim)
    of_run = lambda run: (budget := resolve_budget(run, None)).warmup_steps / budget.total_steps
    assert of_run(trained) == pytest.approx(of_run(cfg), rel=0.01)
    told = ("train_tokens", "optim.peak_lr", "optim.warmup_tokens")
    assert with_scaled_training(cfg, small, told) == small


def test_data_that_are_not_there_are_replaced_aloud():
    cfg = load_config(str(CONFIGS / "7b.py"), {"data.files": "nowhere/*.bin"})
    replaced, problems = use_available_data(cfg)
    assert replaced.data.name == "synthetic" and "nowhere" in problems[0]
    assert use_available_data(replaced) == (replaced, [])
    assert dataclasses.replace(replaced, data=cfg.data) == cfg
