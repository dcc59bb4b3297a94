"""RunConfig: the rooms' own settings side by side, the checks that span them, and how a file and flags become one."""

import contextlib
import dataclasses
import difflib
import importlib.util
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxscale import schema, units
from jaxscale.checkpoint.manager import CheckpointConfig
from jaxscale.data.config import DataConfig
from jaxscale.eval.perplexity import EvalConfig
from jaxscale.models import AnyModelConfig, max_seq_len
from jaxscale.monitor.writers import MonitorConfig
from jaxscale.optim.optimizers import OptimConfig
from jaxscale.sample.generate import SampleConfig
from jaxscale.schema import setting
from jaxscale.sharding.mesh import MeshConfig
from jaxscale.train.config import TrainConfig
from jaxscale.units import divisors, or_list


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run. Everything but where arrays live, how long it goes on and when it reports is fixed once it has begun."""

    model: AnyModelConfig = setting(help="the model")
    seq_len: int = setting(1024, "tokens in a row")
    batch_tokens: units.Tokens = setting(help="tokens in a step, over all devices: an integer or '512 rows'")
    train_tokens: units.Tokens = setting(
        help="tokens in the run: an integer, '20000 steps' or '1 epoch'", may_change=True
    )
    seed: int = setting(0, "of the parameters, the order of the data and all else that is random")
    mesh: MeshConfig = setting(MeshConfig, may_change=True)
    rules: Literal["zero1", "zero2", "zero3"] = setting(
        "zero3", "what the fsdp axis shares: moments; gradients too; parameters too", may_change=True
    )
    compiler: dict[str, bool | int | float | str] = setting(
        {}, "options for XLA by name, over our own table of them (sharding/compiler_options.py)", may_change=True
    )
    optim: OptimConfig = setting(OptimConfig)
    train: TrainConfig = setting(TrainConfig)
    data: DataConfig = setting(DataConfig)
    eval: EvalConfig = setting(EvalConfig)
    checkpoint: CheckpointConfig = setting(CheckpointConfig)
    monitor: MonitorConfig = setting(MonitorConfig)
    sample: SampleConfig = setting(SampleConfig)

    def __post_init__(self):
        if self.seq_len < 2:
            raise ValueError(f"seq_len={self.seq_len} must be at least 2")
        longest = max_seq_len(self.model)
        if longest and self.seq_len > longest:
            raise ValueError(f"seq_len={self.seq_len} is longer than model.max_seq_len={longest}; raise that one")
        rows, rest = divmod(self.tokens_per_step, self.seq_len)
        if rest or not rows:
            nearest = max(1, round(self.tokens_per_step / self.seq_len)) * self.seq_len
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is no whole number of rows of seq_len={self.seq_len}; try {nearest}"
            )
        if rows % self.train.num_microbatches:
            raise ValueError(
                f"train.num_microbatches={self.train.num_microbatches} does not divide the {rows} rows of a batch; "
                f"it may be {or_list(divisors(rows))}"
            )
        for name, amount in (("train_tokens", self.train_tokens), ("optim.warmup_tokens", self.optim.warmup_tokens)):
            units.parse(name, amount)

    @property
    def tokens_per_step(self) -> int:
        """batch_tokens as a number."""
        return units.resolve("batch_tokens", self.batch_tokens, seq_len=self.seq_len)

    @property
    def rows_per_step(self) -> int:
        """Rows of a batch, over all devices."""
        return self.tokens_per_step // self.seq_len


@dataclasses.dataclass(frozen=True)
class Budget:
    """The amounts of a run as numbers."""

    batch_tokens: int
    train_tokens: int  # as wished; the run does whole steps, total_steps * batch_tokens
    total_steps: int
    warmup_steps: int

    def __str__(self) -> str:
        done = self.total_steps * self.batch_tokens
        return (
            f"{self.total_steps} steps of {self.batch_tokens} tokens, {units.count(done)} in all; "
            f"warmup {self.warmup_steps} steps"
        )


def resolve_budget(cfg: RunConfig, epoch_tokens: int | None) -> Budget:
    """The amounts as numbers. epoch_tokens: tokens of one pass over the data, None where that is unknown."""
    batch = cfg.tokens_per_step
    known = dict(seq_len=cfg.seq_len, batch_tokens=batch, epoch_tokens=epoch_tokens)
    train_tokens = units.resolve("train_tokens", cfg.train_tokens, **known)
    warmup = units.resolve("optim.warmup_tokens", cfg.optim.warmup_tokens, train_tokens=train_tokens, **known)
    total_steps, warmup_steps = units.steps(train_tokens, batch), units.steps(warmup, batch)
    if total_steps < 1:
        raise ValueError(f"train_tokens={cfg.train_tokens} is less than one token; a step has {batch}")
    if warmup_steps > total_steps:
        raise ValueError(
            f"optim.warmup_tokens={cfg.optim.warmup_tokens} is longer than train_tokens={cfg.train_tokens}"
        )
    return Budget(batch, train_tokens, total_steps, warmup_steps)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A command line taken apart."""

    config: str  # path, with ':argument' where the file takes one
    overrides: dict[str, str]  # dotted name to text
    options: dict[str, str]  # the command's own flags
    help: bool = False


def parse_arguments(argv: Sequence[str], options: Sequence[str]) -> Arguments:
    """--config=FILE, --config.NAME=VALUE, and `options` of the command's own; each as --name=value or --name value.

    Raises ValueError for anything else, with the nearest flag there is.
    """
    config, overrides, found, rest = "", {}, {}, list(argv)
    while rest:
        flag = rest.pop(0)
        if flag in ("-h", "--help", "--helpfull"):
            return Arguments(config, overrides, found, help=True)
        name, equals, value = flag.removeprefix("--").partition("=")
        known = name == "config" or name.startswith("config.") or name in options
        if not flag.startswith("--") or not known:
            close = difflib.get_close_matches(name, ["config", *options], n=1)
            hint = (
                f"; did you mean --{close[0]}?"
                if close
                else f"; flags are --config, --config.NAME, {flag_list(options)}"
            )
            if not flag.startswith("--") or "." in name:
                hint = "; settings are written --config.NAME=VALUE"
            raise ValueError(f"{flag} is not a flag of this command{hint}")
        if not equals:
            if not rest:
                raise ValueError(f"--{name} needs a value: --{name}=VALUE")
            value = rest.pop(0)
            if value.startswith("--"):
                raise ValueError(f"--{name} needs a value: --{name}=VALUE (=true for a switch), not {value}")
        if not value and (name == "config" or name in options):
            raise ValueError(f"--{name} needs a value: --{name}=VALUE")
        if name == "config":
            config = value
        elif name in options:
            found[name] = value
        else:
            overrides[name.removeprefix("config.")] = value
    return Arguments(config, overrides, found)


def flag_list(options: Sequence[str]) -> str:
    """'--workdir, --steps'."""
    return ", ".join(f"--{name}" for name in options) or "none other"


def load_config(path: str, overrides: dict[str, Any] | None = None) -> RunConfig:
    """The RunConfig of a file with get_config(), which returns an ml_collections.ConfigDict, and of overrides by name.

    'configs/auto.py:depth=8' calls get_config('depth=8'). A config is code: it is run, so it must be a local file.
    """
    return schema.from_dict(RunConfig, schema.merge(config_values(path), overrides or {}))


def config_values(path: str) -> dict[str, Any]:
    """What the file's get_config returns, as nested plain dicts."""
    if "://" in path:
        raise ValueError(f"--config={path} must be a local file: a config is code, and code is not run from a bucket")
    name, argument = split_argument(path)
    file = pathlib.Path(name)
    if not name:
        raise ValueError("--config must be given, such as --config=configs/quickstart.py")
    if not file.is_file():
        near = sorted(str(p) for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        close = difflib.get_close_matches(str(file), near, n=1)
        raise ValueError(f"--config={name} is no file{f'; did you mean {close[0]}?' if close else ''}")
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        with neighbours_first(file.parent):
            spec.loader.exec_module(module)
            if not hasattr(module, "get_config"):
                raise ValueError("it has no get_config()")
            values = module.get_config(argument) if argument else module.get_config()
        values = values.to_dict() if hasattr(values, "to_dict") else values
        if not isinstance(values, dict):
            raise ValueError(f"get_config() must return a ConfigDict or a dict, and returned {values!r}")
    except Exception as error:  # a config is anybody's code: whatever it raises is told in one line
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        told = " ".join(str(error).split())
        raise ValueError(f"--config={path} cannot be read: {kind}{told}{line_of(error, str(file))}") from None
    return values


def split_argument(path: str) -> tuple[str, str]:
    """'configs/auto.py:depth=8' as (file, argument). A colon elsewhere belongs to the file's name."""
    name, mark, argument = path.partition(".py:")
    return (f"{name}.py", argument) if mark else (path, "")


@contextlib.contextmanager
def neighbours_first(folder: pathlib.Path) -> Iterator[None]:
    """Lets a config import those beside it, as a script could, wherever the command runs. Leaves nothing behind."""
    place, known = str(folder.resolve()), set(sys.modules)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # taken out by the config itself
            sys.path.remove(place)
        for name in set(sys.modules) - known:  # another folder's config may have a neighbour of the same name
            file = getattr(sys.modules[name], "__file__", None)
            if file and os.path.dirname(file) == place:  # not what lies deeper: that may be an environment
                del sys.modules[name]


def line_of(error: BaseException, file: str) -> str:
    """' (line 7)': the last line of `file` that the error went through; '' if it went through none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]})" if lines else ""


def config_name(path: str) -> str:
    """A short name for the work folder: 'configs/auto.py:depth=8' -> 'auto-depth8'."""
    name, argument = split_argument(path)
    stem = pathlib.Path(name).stem
    return f"{stem}-{argument.replace('=', '').replace(os.sep, '_')}" if argument else stem


def settings_help() -> str:
    """Every setting with its type, default and meaning, for --help, and the model that has it."""
    lines = []
    for group, name, kind, default, text in schema.describe_groups(RunConfig):
        of = f" ({group})" if group else ""
        lines.append(f"  --config.{name}={default}{of}\n      {kind}{': ' + text if text else ''}")
    return "\n".join(lines)
