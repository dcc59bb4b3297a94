"""What the diagnosis is given about a run, and what it says: plain data."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.system.exits import BadInput

HARMLESS = ("busy_machine",)  # rules that tell of something outside the run
SHORT_WAIT = 1.0  # seconds that one save waited for the one before


def is_harmless(event: Mapping[str, Any]) -> bool:
    """True for an event of a troublesome kind that is over, or that says nothing against the run."""
    waited = event.get("waited")
    short = event.get("event") == "alarm" and isinstance(waited, float) and waited < SHORT_WAIT
    return bool(event.get("over")) or short or event.get("event") == "alert" and event.get("what") in HARMLESS


class Cause(NamedTuple):
    """What may be behind a finding."""

    what: str
    evidence: str  # that the run holds for it, or against it


class Finding(NamedTuple):
    """Something that is not as it should be, told once when it begins and once when it is over."""

    kind: str  # the rule's name
    step: int
    seen: str  # with numbers
    numbers: dict[str, Any]  # the same as plain JSON values
    causes: tuple[Cause, ...]  # likely ones first; none when it is over
    advice: tuple[str, ...]
    sources: tuple[str, ...]  # of the thresholds
    over: bool = False
    documents: tuple[str, ...] = ()  # with the most tokens in batch numbers["batch"], which causes may speak of


class Sign(NamedTuple):
    """What a rule makes of a record that it can judge."""

    bad: bool
    seen: str = ""
    numbers: dict[str, Any] = {}  # never changed
    sure: bool = False  # bad: one record is evidence enough. good: it is over at once


GOOD = Sign(False)


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What a run is known to be, before its metrics are looked at. All may be unknown."""

    workdir: str = "RUN"  # as it is named in commands
    total_steps: int | None = None
    warmup_steps: int = 0
    decay: str | None = None
    clip_norm: float = 0.0
    compute_dtype: str | None = None
    vocab_size: int | None = None
    branched: bool = False  # begun with another run's weights
    stage_batches: tuple[int, ...] = ()  # at which stages of the mixture begin, the first left out
    grows_at: tuple[int, ...] = ()  # batches from which on they, or their rows, are larger
    forecast: tuple[tuple[float, float, float], ...] = ()  # (tokens, low, high), by tokens
    on_cpu: bool = False  # the steps are computed by the processors that other programs use too
    experts: int = 0  # of a layer of a mixture
    chosen: int = 0  # of them by a token
    balanced_by: tuple[str, ...] = ()  # what keeps them equally busy
    bias_rate: float = 0.0  # 0 where no bias moves


def facts_of(config: Mapping[str, Any], workdir: str = "RUN", forecast: Mapping[str, Any] | None = None) -> RunFacts:
    """The facts in a run's config.json, and in its forecast.json if it has one.

    Raises: BadInput for a forecast of another form.
    """
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
        forecast=band_of(forecast) if forecast else (),
    )


def stage_batches(settings: Mapping[str, Any], budget: Mapping[str, Any]) -> tuple[int, ...]:
    """The batches at which the stages of data.mixture begin, but for the first.

    Left out is one that is written in epochs: how long one is stands in no file of the run.
    """
    mixture, batch_tokens = settings.get("data", {}).get("mixture") or {}, budget.get("batch_tokens")
    begins = []
    if batch_tokens:
        batches = units.recorded_sizes(budget)
    if batch_tokens and all(isinstance(weights, Mapping) for weights in mixture.values()):
        for start in mixture:
            with contextlib.suppress(BadInput):  # in epochs
                known = dict(seq_len=settings.get("seq_len", 1), batch_tokens=batch_tokens)
                whole = batches.begin(budget.get("total_steps", 0))
                begins.append(batches.holding(units.resolve("start", start, **known, train_tokens=whole)))
    return tuple(sorted({batch for batch in begins if batch > 0}))


def band_of(forecast: Mapping[str, Any]) -> tuple[tuple[float, float, float], ...]:
    """(tokens, low, high) in the order of the tokens, of {"tokens": [...], "low": [...], "high": [...]}."""
    try:
        columns = [[float(number) for number in forecast[name]] for name in ("tokens", "low", "high")]
        return tuple(sorted(zip(*columns, strict=True)))
    except (KeyError, TypeError, ValueError):
        raise BadInput("forecast.json must hold tokens, low and high, lists of numbers of one length") from None
