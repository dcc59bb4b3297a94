"""Inputs and results of the health rules, as plain data."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.system.exits import BadInput

HARMLESS = ("busy_machine",)  # rules about causes outside the run
SHORT_WAIT = 1.0  # seconds that one save waited for the one before


def is_harmless(event: Mapping[str, Any]) -> bool:
    """Returns True for an alarm or alert that has ended, or that the run did not cause."""
    waited = event.get("waited")
    short = event.get("event") == "alarm" and isinstance(waited, float) and waited < SHORT_WAIT
    return bool(event.get("over")) or short or event.get("event") == "alert" and event.get("what") in HARMLESS


class Cause(NamedTuple):
    """A possible cause of a finding."""

    what: str
    evidence: str  # for or against it


class Finding(NamedTuple):
    """A problem, reported when it begins and when it ends."""

    kind: str  # the rule's name
    step: int
    seen: str  # with numbers
    numbers: dict[str, Any]  # the same as plain JSON values
    causes: tuple[Cause, ...]  # most likely first; empty when it is over
    advice: tuple[str, ...]
    sources: tuple[str, ...]  # of the thresholds
    over: bool = False
    documents: tuple[str, ...] = ()  # with the most tokens in batch numbers["batch"]


class RuleResult(NamedTuple):
    """Result of one rule for one record."""

    bad: bool
    seen: str = ""
    numbers: dict[str, Any] = {}  # never mutated
    sure: bool = False  # this record alone begins (bad) or ends (good) a finding


HEALTHY = RuleResult(False)


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts about a run that do not come from its metrics; any may be unknown."""

    workdir: str = "RUN"  # in commands
    total_steps: int | None = None
    warmup_steps: int = 0
    decay: str | None = None
    clip_norm: float = 0.0
    compute_dtype: str | None = None
    vocab_size: int | None = None
    branched: bool = False  # initialized with another run's weights
    stage_batches: tuple[int, ...] = ()  # first batch of each mixture stage after the first
    grows_at: tuple[int, ...] = ()  # batches at which the batch size or sequence length increases
    forecast: tuple[tuple[float, float, float], ...] = ()  # (tokens, low, high), by tokens
    on_cpu: bool = False  # steps run on processors that other programs share
    experts: int = 0  # per mixture layer
    chosen: int = 0  # experts per token
    balanced_by: tuple[str, ...] = ()  # "bias" and balance losses
    bias_rate: float = 0.0  # 0 without a router bias


def facts_from_config(
    config: Mapping[str, Any], workdir: str = "RUN", forecast: Mapping[str, Any] | None = None
) -> RunFacts:
    """Returns the facts in a run's config.json and forecast.json. Raises BadInput for a malformed forecast."""
    settings, budget = config.get("config", {}), config.get("budget", {})
    optim, model = settings.get("optim", {}), settings.get("model", {})
    experts = model.get("experts") or {}
    bias_rate = (experts.get("bias") and not settings.get("lora", {}).get("rank") and experts.get("bias_rate")) or 0.0
    losses = [name for name in settings.get("train", {}).get("aux_losses") or {} if name.endswith("balance_loss")]
    return RunFacts(
        workdir=workdir,
        total_steps=budget.get("total_steps"),
        warmup_steps=budget.get("warmup_steps") or 0,
        decay=optim.get("decay"),
        clip_norm=optim.get("clip_norm") or 0.0,
        compute_dtype=model.get("compute_dtype"),
        vocab_size=model.get("vocab_size"),
        on_cpu=config.get("devices", {}).get("kind") == "cpu",
        experts=experts.get("number") or 0,
        chosen=experts.get("chosen") or 0,
        balanced_by=(*(("bias",) if bias_rate else ()), *losses) if experts else (),
        bias_rate=bias_rate,
        branched=bool(settings.get("init", {}).get("from_path")),
        stage_batches=stage_batches(settings, budget),
        grows_at=tuple(int(first) for name in ("ramp", "seq_len_ramp") for first, _ in (budget.get(name) or ())[1:]),
        forecast=parse_forecast(forecast) if forecast else (),
    )


def stage_batches(settings: Mapping[str, Any], budget: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the first batch of each stage of data.mixture after the first.

    Stages written in epochs are left out: no file of the run records the length of an epoch.
    """
    mixture, batch_tokens = settings.get("data", {}).get("mixture") or {}, budget.get("batch_tokens")
    starts = []
    if batch_tokens:
        batches = units.recorded_sizes(budget)
    if batch_tokens and all(isinstance(weights, Mapping) for weights in mixture.values()):
        for start in mixture:
            with contextlib.suppress(BadInput):  # in epochs
                known = dict(seq_len=settings.get("seq_len", 1), batch_tokens=batch_tokens)
                whole = batches.begin(budget.get("total_steps", 0))
                starts.append(batches.holding(units.resolve("start", start, **known, train_tokens=whole)))
    return tuple(sorted({batch for batch in starts if batch > 0}))


def parse_forecast(forecast: Mapping[str, Any]) -> tuple[tuple[float, float, float], ...]:
    """Returns (tokens, low, high) tuples by tokens, from {"tokens": [...], "low": [...], "high": [...]}."""
    try:
        columns = [[float(number) for number in forecast[name]] for name in ("tokens", "low", "high")]
        return tuple(sorted(zip(*columns, strict=True)))
    except (KeyError, TypeError, ValueError):
        raise BadInput("forecast.json must hold tokens, low and high, lists of numbers of one length") from None
