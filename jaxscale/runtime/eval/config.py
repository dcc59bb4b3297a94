"""Settings of the evaluators that run during training, each with a schedule and data."""

import dataclasses
import re
from typing import Literal

from jaxscale.runtime.text.config import Globs, ReadConfig
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
EVERY = "steps between evaluations, with one before the first step and one at the end; 0: only at the end"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextEval(ReadConfig):
    """Settings of text evaluation (perplexity and bits per byte), including the settings of ReadConfig."""

    kind: Literal["text"] = setting("text", "kind of evaluation")
    files: Globs = setting(help="glob or list of globs, or {source: globs}; any file type of data.files")
    every_steps: int = setting(1000, EVERY)
    limit: int = setting(0, "maximum number of documents per source; 0: all")
    stride: int = setting(0, "tokens by which the window over a long document advances; 0: half of the context")

    def __post_init__(self):
        super().__post_init__()
        check_numbers(self, "every_steps", "limit", "stride")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemEval:
    """Settings of evaluators for items in files."""

    kind: Literal["choice", "cloze"]
    file: str = setting(help=".jsonl (also .gz, .zst), .parquet or .arrow, or a glob of them")
    every_steps: int = setting(1000, EVERY)
    limit: int = setting(0, "maximum number of items; 0: all")
    damaged: Literal["stop", "skip"] = setting(
        "stop", "action for an item or file that cannot be read or scored: stop with an error, or skip and count it"
    )

    def __post_init__(self):
        check_numbers(self, "every_steps", "limit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceEval(ItemEval):
    """Settings of multiple-choice evaluation (PIQA, SciQ, ARC or custom): accuracy, also normalized by length."""

    kind: Literal["choice"] = setting("choice", "kind of evaluation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClozeEval(ItemEval):
    """Settings of cloze evaluation (LAMBADA or custom): accuracy and perplexity of the end of each text."""

    kind: Literal["cloze"] = setting("cloze", "kind of evaluation")


NamedEval = TextEval | ChoiceEval | ClozeEval
Evals = dict[str, NamedEval]


def check_numbers(settings: TextEval | ItemEval, *names: str) -> None:
    """Raises BadInput if a setting with one of these names is below 0."""
    for name in names:
        if getattr(settings, name) < 0:
            raise BadInput(f"{name}={getattr(settings, name)} must be 0 or more")


def check_names(evals: Evals) -> None:
    """Raises BadInput for an evaluator name that cannot be part of a metric name."""
    for name in evals:
        if not NAME.fullmatch(name):
            raise BadInput(
                f"evals has an invalid name {name!r}; use at most 64 letters, digits, '_', '.' and '-', and begin with "
                "a letter or digit"
            )


def setting_name(name: str, settings: NamedEval) -> str:
    """Returns the name of the setting with the data, such as 'evals.wiki.files', for messages."""
    return f"evals.{name}.{'files' if isinstance(settings, TextEval) else 'file'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Settings of the schedule and size of validation."""

    every_steps: int = setting(
        200,
        "steps between validations; 0: only at the end",
        may_change=True,
        read_if="eval.num_rows or not eval.every_steps",
    )
    num_rows: int = setting(
        64,
        "number of held-out sequences of seq_len tokens, the same at every validation; 0: no validation",
        read_if="data.val_fraction or data.val_files or data.name=synthetic or not eval.num_rows",
    )

    def __post_init__(self):
        if self.every_steps < 0 or self.num_rows < 0:
            raise BadInput("every_steps and num_rows must be at least 0")
