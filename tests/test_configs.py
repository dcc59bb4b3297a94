"""Every file in configs/ loads, makes a program, and resolves to what it resolved to before."""

import ast
import importlib.util
import json
import pathlib
import re

import pytest

from jaxscale import config, schema, units
from jaxscale.build import make_program
from jaxscale.cli.verify_parity import captured_stderr
from jaxscale.core.models.config import DENSE
from jaxscale.program.budget import resolve_budget
from jaxscale.program.memory import memory_lower_bound
from jaxscale.settings.config_file import load_config

ROOT = pathlib.Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("update_configs", ROOT / "tests" / "golden" / "update_configs.py")
golden = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(golden)
PATHS = golden.config_paths()
NAMES = {"quickstart", "gpt2_124m", "1b", "7b", "13b", "70b", "auto:depth=4", "finetune:lora"}


def test_the_configs_that_are_promised_are_there():
    assert NAMES <= set(PATHS)


@pytest.mark.parametrize("name", PATHS)
def test_its_settings_are_those_it_had(name):
    """A difference on purpose: python tests/golden/update_configs.py, in a commit that says why."""
    before = json.loads(golden.GOLDEN.read_text())
    assert golden.resolved(PATHS[name]) == before[name]


def test_the_golden_file_holds_no_config_that_is_gone():
    assert set(json.loads(golden.GOLDEN.read_text())) == set(PATHS)


@pytest.mark.parametrize("name", PATHS)
def test_its_amounts_resolve_and_its_warmup_is_a_small_part(name):
    cfg = load_config(PATHS[name])
    budget = resolve_budget(cfg, epoch_tokens=10**10)
    assert 0 < budget.warmup_steps <= budget.total_steps / 5
    assert budget.total_steps >= 100


@pytest.mark.parametrize("name", PATHS)
def test_its_memory_can_be_told_without_a_device(name):
    cfg = load_config(PATHS[name])
    moments = 1 if cfg.optim.name == "muon" else 2
    a_parameter = 4 if cfg.lora.on else 4 * (2 + moments)  # float32, and so are gradients; frozen: itself alone
    assert memory_lower_bound(cfg, 1).state >= a_parameter * cfg.model.num_params


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.py")), ids=lambda file: file.stem)
def test_a_file_is_short_says_how_it_is_run_and_what_it_costs_and_imports_nothing_of_ours(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 40
    header = ast.get_docstring(ast.parse(text))
    assert f"python -m jaxscale.main --config=configs/{file.name}" in header
    assert re.search("cost|minute|hour|day", header, re.IGNORECASE)
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [node for node in imports if "jaxscale" in ast.unparse(node)]


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt2_124m", 0.1244), ("1b", 1.0), ("7b", 6.74), ("13b", 13.0), ("70b", 70.0)]
)
def test_a_model_is_of_the_size_in_its_name(name, billions):
    assert load_config(PATHS[name]).model.num_params / 1e9 == pytest.approx(billions, rel=0.25)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("olmoe_1b_7b", 6_919_161_856, 1_282_017_280),
        ("mixtral_8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704),
        ("deepseek_v3", 671_026_404_352, 37_552_282_624),  # of the released files, without 58 x 256 biases of routers
        ("kimi_k2", 1_026_408_209_408, 32_861_477_888),
    ],
)
def test_a_mixture_has_as_many_parameters_as_the_published_one(name, total, active):
    model = load_config(PATHS[name]).model
    assert (model.num_params, model.active_params) == (total, active)


def test_the_dial_turns_everything_in_the_same_direction():
    small, middle, large = (load_config(str(golden.CONFIGS / f"auto.py:depth={depth}")) for depth in (2, 8, 32))
    for part in (
        lambda cfg: cfg.model.num_params,
        lambda cfg: cfg.tokens_per_step,
        lambda cfg: units.resolve("train_tokens", cfg.train_tokens, seq_len=cfg.seq_len, epoch_tokens=10**9),
        lambda cfg: -cfg.optim.peak_lr,
        lambda cfg: cfg.model.embed_dim,
    ):
        assert part(small) < part(middle) < part(large)


@pytest.mark.parametrize("argument", ["depth=0", "depth=x", "width=3", "depth="])
def test_a_wrong_turn_of_the_dial_is_one_line(argument):
    with pytest.raises(ValueError, match="write configs/auto.py:depth=N") as error:
        load_config(str(golden.CONFIGS / f"auto.py:{argument}"))
    assert "\n" not in str(error.value)


def test_a_base_of_a_fine_tuning_that_is_no_work_folder_is_one_line_with_the_way_out(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for base in (tmp_path, tmp_path / "nothere"):
        wanted = f"{base}/config.json is missing or not from a run; use the work folder of a run or of jaxscale convert"
        with pytest.raises(ValueError, match=wanted) as error:
            load_config(str(golden.CONFIGS / f"finetune.py:lora,{base}"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", PATHS)
def test_any_of_its_settings_can_be_set_by_name(name):
    cfg = load_config(PATHS[name], {"optim.peak_lr": "1e-2", "mesh.tensor": "2", "seed": "5"})
    assert (cfg.optim.peak_lr, cfg.mesh.tensor, cfg.seed) == (1e-2, 2, 5)
    assert schema.from_dict(config.RunConfig, json.loads(json.dumps(schema.to_dict(cfg)))) == cfg


@pytest.mark.aot
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", PATHS)
def test_its_layers_make_no_device_copy_whole_activations(name, mesh):
    """XLA tells of it on stderr alone, as 'involuntary full rematerialization', where two shardings do not meet."""
    sizes = {f"mesh.{axis}": size for axis, size in ({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | mesh).items()}
    leading = load_config(PATHS[name]).model.layer_stacks.get(DENSE, 0)  # layers before those that are most
    rows = {"batch_tokens": "16 rows", "train.num_microbatches": 2, "model.num_layers": max(2, leading + 1)}
    cfg = load_config(PATHS[name], sizes | rows | {"train_tokens": "100 steps", "optim.warmup_tokens": 0})
    if cfg.model.vocab_size % cfg.mesh.tensor:
        pytest.skip(f"a vocabulary of {cfg.model.vocab_size} is not split by {cfg.mesh.tensor}")
    program = make_program(cfg, resolve_budget(cfg, epoch_tokens=None))
    with captured_stderr() as said:
        program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    assert "rematerialization" not in "".join(said).lower()
