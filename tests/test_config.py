"""A config file and a command line become one RunConfig, or one clear line."""

import dataclasses
import pathlib
import sys

import pytest
import tiny

from jaxscale import config, schema
from jaxscale.config import RunConfig
from jaxscale.program.budget import resolve_budget
from jaxscale.settings.command_line import flag, parse
from jaxscale.settings.config_file import config_name, config_values, load_config
from jaxscale.settings.help_text import describe_settings
from jaxscale.system.exits import BadInput

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = f"""
import ml_collections

def get_config(argument=""):
    c = ml_collections.ConfigDict()
    for name, value in {tiny.VALUES!r}.items():
        c[name] = value
    if argument:
        c.model.num_layers = int(argument.removeprefix("depth="))
    return c
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "tiny.py").write_text(FILE)
    return str(tmp_path / "tiny.py")


def complaint(call, *args):
    """The one line that call(*args) is refused with."""
    with pytest.raises(ValueError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_and_its_values_become_a_run_config(path):
    assert load_config(path) == tiny.config()


def test_an_argument_reaches_the_file(path):
    assert load_config(path + ":depth=5").model.num_layers == 5


EXPERTS = {"model.experts": dict(number=4, chosen=2, mlp_dim=8)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optim.peak_lr", "2e-2", 0.02),  # named in the file
        ("optim.b2", "0.99", 0.99),  # not named in the file
        ("mesh.tensor", "2", 2),  # a group that the file does not name
        ("checkpoint.keep_last", "7", 7),
        ("model.qk_norm", "true", True),
        ("train.guard.max_grad_norm", "50", 50.0),
        ("train_tokens", "1e9", 1_000_000_000),
        ("train_tokens", "3 epochs", "3 epochs"),
        ("train.aux_losses.z_loss", "1e-4", {"z_loss": 1e-4}),
        ("init.from_path", "1e9", "1e9"),
    ],
)
def test_a_flag_sets_any_setting_in_the_file_or_not(path, name, text, value):
    found = load_config(path, {name: text})
    for part in name.split(".")[: 3 if "guard" in name else 2]:
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


def test_a_whole_number_written_with_an_exponent_is_an_integer(path):
    assert load_config(path, {"train_tokens": "1e9"}).train_tokens == 10**9
    assert type(load_config(path, {"seed": "1e3"}).seed) is int


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"model.vocab_sise": "9"}, "model.vocab_sise is not a setting of LlamaConfig; did you mean 'vocab_size'?"),
        ({"optim.peek_lr": "9"}, "optim.peek_lr is not a setting of OptimConfig; did you mean 'peak_lr'?"),
        ({"peak_lr": "9"}, "peak_lr is not a setting of RunConfig; did you mean 'optim.peak_lr'?"),
        ({"optm.peak_lr": "9"}, "optm is not a setting of RunConfig; did you mean 'optim'?"),
        (
            {"model.name": "lama"},
            "model.name='lama' must be one of ['encoder', 'gpt2', 'llama', 't5']; did you mean 'llama'?",
        ),
        ({"optim.peak_lr": "fast"}, "optim.peak_lr='fast' is not a number"),
        ({"seq_len": "16.5"}, "seq_len=16.5 is not an integer"),
        ({"model.scan_layers": "3"}, "model.scan_layers=3 is not true or false"),
        ({"model.compute_dtype": "bfloat1"}, "did you mean 'bfloat16'?"),
        ({"model": "llama"}, "model='llama' must be a group of settings"),
        ({"seed.x": "1"}, "seed.x='1' cannot be set: seed is 1, not a group of settings"),
        ({"rules": "zero4"}, "rules='zero4' is not one of zero1, zero2, zero3"),
    ],
)
def test_a_wrong_name_or_type_is_one_line_with_the_nearest_right_name(path, overrides, told):
    assert told in complaint(load_config, path, overrides)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"model.num_kv_heads": 3}, "model: num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"model.num_kv_heads": 0}, "num_kv_heads=0 must be at least 1"),
        ({"model.head_dim": 7}, "model: head_dim=7 must be even"),
        ({"model.head_dim": 0}, "head_dim=0 must be at least"),
        ({"model.mlp_dim": 0}, "mlp_dim=0 must be at least 1"),
        ({"model.vocab_size": 0}, "model: vocab_size=0 must be at least 1"),
        ({"model.logit_softcap": -1}, "model: logit_softcap=-1.0 must be above 0"),
        ({"batch_tokens": 250}, "batch_tokens=250 must be a multiple of seq_len=16, such as 256"),
        ({"batch_tokens": 3}, "batch_tokens=3 must be a multiple of seq_len=16, such as 16"),
        ({"batch_tokens": 0}, "batch_tokens=0 must be a multiple of seq_len=16"),
        ({"batch_tokens": "2 steps"}, "batch_tokens='2 steps' needs batch_tokens"),
        ({"train.num_microbatches": 3}, "does not divide the 16 sequences of a batch; use 1, 2, 4, 8 or 16"),
        ({"train.num_microbatches": 0}, "train: num_microbatches=0 must be at least 1"),
        ({"train.aux_losses": {"y_loss": 1.0}}, "train: aux_losses has 'y_loss', which is not an auxiliary loss"),
        ({"seq_len": 1}, "seq_len=1 must be at least 2"),
        ({"model": tiny.GPT2, "seq_len": 64}, "seq_len=64 is longer than model.max_seq_len=32; increase model"),
        ({"model": tiny.LLAMA | {"rope_scaling": {"name": "dynamic", "original_max_len": 32}}, "seq_len": 64},
         "is longer than the 32 tokens that model.rope_scaling supports; set model.rope_scaling.row_len=64"),
        ({"model": tiny.GPT2 | {"num_heads": 3}}, "model: embed_dim=16 must be a multiple of num_heads=3"),
        ({"data": dict(name="files", files="x.txt", cache_dir="s3://b/x")}, "cache_dir=s3://b/x must be a local"),
        ({"train_tokens": "a lot"}, "train_tokens='a lot' is not an amount of training"),
        ({"optim.warmup_tokens": "soon"}, "optim.warmup_tokens='soon' is not an amount of training"),
        ({"optim.min_lr": 1.0}, "optim: min_lr=1 must be between 0 and peak_lr=0.01"),
        ({"mesh.fsdp": 0}, "mesh: fsdp=0 must be a positive number of devices"),
        ({"mesh.data": -1}, "mesh: only one axis may be -1, but ['data', 'fsdp'] are"),
        ({"mesh.expert": 2}, "mesh.expert=2 needs a model with experts"),
        ({"train.aux_losses": {"balance_loss": 0.1}}, "train.aux_losses has 'balance_loss', but this model has no"),
        (EXPERTS | {"model.matmul_dtype": "int8"}, "model.matmul_dtype='int8' does not support model.experts"),
        ({"optim.groups": [{"pattern": "("}]}, "optim.groups[0]: pattern='(' is not a valid regular expression"),
        ({"checkpoint.keep_last": 0}, "checkpoint: keep_last=0 must be at least 1"),
        ({"sample.temperature": 0}, "sample: "),
        ({"train.loss_scale.initial": 0.5}, "train.loss_scale: initial=0.5 must be between min=1"),
    ],
)  # fmt: skip
def test_an_impossible_combination_is_one_line(overrides, told):
    assert told in complaint(tiny.config, overrides)


def test_a_required_setting_that_is_missing_is_named():
    values = {name: value for name, value in tiny.VALUES.items() if name != "batch_tokens"}
    assert "batch_tokens must be given: tokens per step" in complaint(schema.from_dict, config.RunConfig, values)


# The amounts.


def test_amounts_become_numbers_once():
    cfg = tiny.config({"train_tokens": "1000 steps", "optim.warmup_tokens": "1%"})
    budget = resolve_budget(cfg, None)
    assert (budget.batch_tokens, budget.train_tokens, budget.total_steps, budget.warmup_steps) == (
        256,
        256_000,
        1000,
        10,
    )
    assert "1000 steps of 256 tokens" in str(budget) and "warmup 10 steps" in str(budget)


def test_an_epoch_is_the_data_s_and_steps_round_up():
    budget = resolve_budget(tiny.config({"train_tokens": "2 epochs"}), 1000)
    assert (budget.train_tokens, budget.total_steps) == (2000, 8)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"train_tokens": "1 epoch"}, "train_tokens='1 epoch' needs the length of the data set"),
        ({"train_tokens": "1%"}, "train_tokens='1%' needs train_tokens"),
        ({"train_tokens": 0}, "train_tokens=0 is less than one token"),
        ({"optim.warmup_tokens": "21 steps"}, "optim.warmup_tokens=21 steps must be at most train_tokens=20 steps"),
    ],
)
def test_an_impossible_horizon_is_one_line(overrides, told):
    assert told in complaint(resolve_budget, tiny.config(overrides), None)


# The file.


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def get_config(:\n", "SyntaxError"),
        ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("x = 1\n", "the file has no function get_config()"),
        ("def get_config():\n    pass\n", "must return"),
        ("def get_config():\n    return 3\n", "must return"),
        ("def get_config():\n    return undefined\n", "NameError: name 'undefined' is not defined"),
        ("import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict().absent.x\n", "absent"),
        ("def get_config():\n    raise ValueError('depth=0 must be at least 1')\n", "depth=0 must be at least 1"),
        ("def get_config():\n    return 1 / 0\n", "ZeroDivisionError"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_that_names_it(tmp_path, text, told):
    (tmp_path / "broken.py").write_text(text)
    line = complaint(load_config, str(tmp_path / "broken.py"))
    assert told in line and "broken.py" in line


def test_an_attribute_error_inside_get_config_is_not_called_a_missing_get_config(tmp_path):
    (tmp_path / "broken.py").write_text("def get_config():\n    return (3).absent\n")
    assert "has no function get_config" not in complaint(load_config, str(tmp_path / "broken.py"))


def test_a_missing_file_is_told_with_the_nearest_there_is(path, tmp_path):
    assert f"did you mean {path}?" in complaint(load_config, str(tmp_path / "tyny.py"))
    assert "is not a file" in complaint(load_config, str(tmp_path / "nowhere" / "x.py"))
    assert "is not a file" in complaint(load_config, str(tmp_path))


def test_a_config_of_the_package_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart") == load_config(f"{ROOT}/configs/quickstart.py")
    assert load_config("auto:depth=2") == load_config(f"{ROOT}/configs/auto.py:depth=2")
    assert config_name("auto:depth=2") == "auto-depth2"
    (tmp_path / "quickstart").write_text("")  # a file has priority
    assert "must be a Python file" in complaint(load_config, "quickstart")
    assert "did you mean gpt2_124m?" in complaint(load_config, "gpt2_124")
    assert "did you mean 7b?" in complaint(load_config, "configs/7b.py")
    (tmp_path / "notes.txt").write_text("def get_config(): ...")
    assert "notes.txt must be a Python file" in complaint(load_config, str(tmp_path / "notes.txt"))
    assert "--config must be given" in complaint(load_config, "")


@pytest.mark.fault("H2")
def test_code_is_not_run_from_a_bucket():
    assert "must be a local file" in complaint(load_config, "gs://bucket/config.py")


def test_an_argument_that_the_file_does_not_take_is_one_line(tmp_path):
    (tmp_path / "plain.py").write_text("def get_config():\n    return {}\n")
    assert "plain.py" in complaint(load_config, str(tmp_path / "plain.py") + ":depth=8")


# The command line.


@dataclasses.dataclass(frozen=True)
class NoFlags:
    """Flags of a command line with settings only."""

    config: str = flag("", "", "FILE")
    settings: dict[str, str] = flag(dict, "", "VALUE", name="config.NAME")


@dataclasses.dataclass(frozen=True)
class Own(NoFlags):
    workdir: str = flag("", "where it goes", "FOLDER")
    steps: int = flag(3, "how many", least=1)
    fresh: bool = flag(False, "anew")
    several: tuple[str, ...] = flag((), "each")
    serve: int | None = flag(None, "a page", "PORT", bare="80", least=0)
    mesh: dict[str, str] = flag(dict, "axes", "N", name="mesh.AXIS", keys=("data",))


def test_a_flag_is_read_by_its_type():
    line = ["--steps=5", "--fresh", "--several=a", "--several", "b", "--serve", "--mesh.data=2", "--config.a.b=1"]
    found = parse(line, Own).flags
    assert found == Own(steps=5, fresh=True, several=("a", "b"), serve=80, mesh={"data": "2"}, settings={"a.b": "1"})
    assert parse(["--fresh=false", "--serve=8"], Own).flags == Own(serve=8)
    for argv, told in (
        (["--steps=0"], "--steps=0 must be a whole number, 1 or more"),
        (["--fresh=maybe"], "--fresh=maybe must be true or false; --fresh alone means true"),
        (["--mesh.pipes=2"], "settings are written --config.NAME=VALUE"),
        (["--several"], "--several needs a value"),
    ):
        assert told in complaint(parse, argv, Own)
    assert "--steps" in complaint(parse, ["--steps=2"], Own, ("workdir",))  # not of this command


@pytest.mark.parametrize(
    "argv",
    [
        ["--config=a.py", "--config.optim.peak_lr=1e-3", "--workdir=w"],
        ["--config", "a.py", "--config.optim.peak_lr", "1e-3", "--workdir", "w"],
    ],
)
def test_flags_are_written_with_or_without_an_equals_sign(argv):
    found = parse(argv, Own)
    assert (found.config, found.overrides, found.options) == ("a.py", {"optim.peak_lr": "1e-3"}, {"workdir": "w"})


def test_a_value_may_hold_an_equals_sign():
    assert parse(["--config=auto.py:depth=8"], NoFlags).config == "auto.py:depth=8"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--confg=a.py"], "--confg=a.py is not a flag of this command; did you mean --config?"),
        (["--workdr=w"], "did you mean --workdir?"),
        (["--zzz=1"], "--zzz=1 is not a flag of this command; flags: --config, --config.NAME, --workdir"),
        (["a.py"], "a.py is not a flag of this command; settings are written --config.NAME=VALUE"),
        (["--optim.peak_lr=1"], "settings are written --config.NAME=VALUE"),
        (["--config"], "--config needs a value"),
        (["--config=a.py", "--config.seed"], "--config.seed needs a value"),
    ],
)
def test_what_is_no_flag_is_one_line(argv, told):
    assert told in complaint(parse, argv, Own)


@pytest.mark.parametrize("flag", ["-h", "--help", "--helpfull"])
def test_help_lists_every_setting(flag):
    assert parse([flag], NoFlags).help
    text = describe_settings(RunConfig)
    for name in ("optim.peak_lr", "train.guard.max_grad_norm", "data.files", "mesh.tensor", "model.num_kv_heads"):
        assert f"--config.{name}=" in text


def test_a_run_s_folder_is_named_after_its_config():
    assert config_name("configs/auto.py:depth=8") == "auto-depth8"
    assert config_name("configs/quickstart.py") == "quickstart"


def test_every_setting_has_a_help_line():
    missing = [name for name, _, _, text in schema.describe(config.RunConfig) if not text]
    assert not missing


def test_only_the_horizon_the_cadences_and_the_placement_may_change():
    may = schema.changeable(config.RunConfig)
    assert {"train_tokens", "mesh", "rules"} <= may  # and how its axes are used
    memory = {"model.remat", "model.remat_save", "model.remat_offload", "model.row_parts"}  # not what is computed
    memory |= {"optim.offload_moments", "optim.offload_params"}
    judging = ("max_skipped_in_row", "max_spikes_in_row", "spike_ratio", "spike_sigma", "grad_ratio")
    answers = {f"train.guard.{name}" for name in judging}
    answers |= {name for name in may if name.startswith("train.recovery.")}
    watching = {"train.replicas.every_steps", "train.replicas.max_passing"}
    fixed = ("model", "optim", "train.", "seed", "seq_len", "batch_tokens")
    assert {name for name in may if name.startswith(fixed)} == memory | answers | watching


def test_a_run_config_survives_being_written_down():
    cfg = tiny.config({"optim.groups": [{"pattern": "wq", "lr_multiplier": 2}], "data.skip_batches": [[3, 5]]})
    assert schema.from_dict(config.RunConfig, schema.to_dict(cfg)) == cfg
    assert dataclasses.replace(cfg, seed=2) != cfg


def test_a_flag_is_never_taken_for_the_value_of_the_one_before():
    told = complaint(parse, ["--config.optim.weight_decay_all", "--workdir=x"], Own)
    assert "--config.optim.weight_decay_all needs a value" in told and "--config.optim.weight_decay_all=VALUE" in told
    assert "--workdir=x" in told
    assert parse(["--config.a", "-1"], NoFlags).overrides == {"a": "-1"}
    assert parse(["--config.a=--b"], NoFlags).overrides == {"a": "--b"}


@pytest.mark.parametrize("argv", [["--workdir="], ["--config="]])
def test_an_empty_flag_is_one_line(argv):
    assert f"{argv[0][:-1]} needs a value" in complaint(parse, argv, Own)


def test_a_config_s_path_may_hold_a_colon(tmp_path):
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "tiny.py").write_text(FILE)
    assert load_config(str(folder / "tiny.py")) == tiny.config()
    assert load_config(f"{folder / 'tiny.py'}:depth=5").model.num_layers == 5
    assert config_name(f"{folder / 'tiny.py'}:depth=5") == "tiny-depth5"


def test_configs_import_each_other_wherever_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shared_base.py").write_text(f"NAME = {name!r}\n")
        text = "import shared_base\ndef get_config():\n    return {'name': shared_base.NAME}\n"
        (tmp_path / name / "run.py").write_text(text)
    before, modules = list(sys.path), set(sys.modules)
    assert [config_values(f"{name}/run.py")["name"] for name in ("one", "two")] == ["one", "two"]
    assert sys.path == before and set(sys.modules) == modules


def test_help_says_which_model_a_setting_belongs_to():
    text = describe_settings(RunConfig)
    lines = [line for line in text.splitlines() if line.startswith("  --config.model.num_layers=")]
    models = ("llama", "gpt2", "encoder", "t5")
    assert len(lines) == len(models) and all(any(f"({model})" in line for line in lines) for model in models)
    assert "(" not in next(line for line in text.splitlines() if "--config.seq_len=" in line)


ABSURD = (
    "0",
    "-1",
    "1" + "0" * 30,
    "1e308",
    "1e999",
    "nan",
    "",
    "a",
    "[]",
    "{}",
    "null",
    "1e308 steps",
    "9" * 5000,
    "(" * 3000,
)
PARTS = len(ABSURD)  # each setting meets one of the texts in a part, and all of them in all parts


@pytest.mark.slow
@pytest.mark.fault("F39")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, PARTS))])
def test_whatever_is_typed_for_a_setting_is_taken_or_refused_in_one_line(part):
    for number, (_, name, *_) in enumerate(schema.describe_groups(RunConfig)):
        try:
            cfg = load_config("configs/quickstart.py", {name: ABSURD[(number + part) % PARTS]})
            resolve_budget(cfg, epoch_tokens=12345)
            assert cfg.flops_per_token > 0
        except BadInput as error:
            assert "\n" not in str(error)
