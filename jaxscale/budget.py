"""The amounts of a run as numbers: tokens, steps, sizes of batches, where its schedule turns."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxscale import units
from jaxscale.config import RunConfig
from jaxscale.optim.config import OptimConfig
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class Budget:
    """The amounts of a run as numbers."""

    batch_tokens: int  # of the largest batch, the only size without a ramp
    train_tokens: int  # as wished; the run does whole steps
    total_steps: int
    warmup_steps: int
    decay_start: int | None = None  # the step that the decay begins with, where it is not optim.decay_fraction's
    factors: tuple[tuple[int, float], ...] = ()  # (step, factor) of optim.decay=piecewise
    ramp: tuple[tuple[int, int], ...] = ()  # (first batch, tokens) of each size; () where there is one
    seq_len_ramp: tuple[tuple[int, int], ...] = ()  # (first batch, tokens in a row), as ramp

    @property
    def schedule_steps(self) -> dict[str, Any]:
        """What optim_schedule wants beside the settings."""
        return schedule_steps(dataclasses.asdict(self))

    def __str__(self) -> str:
        sizes = f"{self.batch_tokens} tokens"
        if self.ramp:
            sizes = ", ".join(f"{tokens} tokens from batch {first}" for first, tokens in self.ramp)
        rows = ", ".join(f"{length} from batch {first}" for first, length in self.seq_len_ramp)
        sizes += f" (tokens in a row: {rows})" if rows else ""
        rates = f", decay from step {self.decay_start} on" if self.decay_start is not None else ""
        rates += "".join(f", rate x{factor:g} from step {step} on" for step, factor in self.factors)
        return (
            f"{self.total_steps} steps of {sizes}, {units.count(self.tokens_of(self.total_steps))} in all; "
            f"warmup {self.warmup_steps} steps{rates}"
        )

    def batches(self, row_tokens: int) -> units.BatchSizes:
        """How many rows of so many tokens each batch has."""
        return units.recorded_sizes(dataclasses.asdict(self), row_tokens)

    def row_tokens(self, seq_len: int) -> units.BatchSizes:
        """How many tokens the rows of each batch have, where those of the data have seq_len."""
        return recorded_rows(dataclasses.asdict(self), seq_len)

    def tokens_of(self, steps: int) -> int:
        """Tokens of the first steps, where no batch is skipped."""
        return self.batches(1).begin(steps)


def resolve_budget(cfg: RunConfig, epoch_tokens: int | None) -> Budget:
    """The amounts as numbers. epoch_tokens: tokens of one pass over the data, None where that is unknown."""
    batch = cfg.tokens_per_step
    known = dict(seq_len=cfg.seq_len, batch_tokens=batch, epoch_tokens=epoch_tokens)
    train_tokens = units.resolve("train_tokens", cfg.train_tokens, **known)
    warmup = units.resolve("optim.warmup_tokens", cfg.optim.warmup_tokens, train_tokens=train_tokens, **known)
    ends = [
        (size, units.resolve("batch_ramp", until, train_tokens=train_tokens, **known))
        for size, (_, until) in zip(cfg.ramp_tokens, cfg.batch_ramp)
    ]
    try:
        sizes = units.BatchSizes.growing(ends, batch)
    except BadInput as error:
        raise BadInput(f"batch_ramp, in tokens: {error}; write later ends, or leave that size out") from None
    total_steps, warmup_steps = sizes.holding(train_tokens), sizes.holding(warmup)
    number, unit = units.parse("optim.warmup_tokens", cfg.optim.warmup_tokens)
    if unit == "steps":
        warmup_steps = math.ceil(number)
    if total_steps < 1:
        raise BadInput(f"train_tokens={cfg.train_tokens} is less than one token; a step has {batch}")
    if warmup_steps > total_steps:
        raise BadInput(f"optim.warmup_tokens={cfg.optim.warmup_tokens} is longer than train_tokens={cfg.train_tokens}")
    known |= dict(train_tokens=train_tokens)
    return Budget(
        batch,
        train_tokens,
        total_steps,
        warmup_steps,
        resolve_decay_start(cfg.optim, sizes, total_steps, **known),
        resolve_factors(cfg.optim, sizes, **known),
        sizes.stages if sizes.vary else (),
        resolve_rows(cfg, sizes, **known),
    )


def resolve_rows(cfg: RunConfig, sizes: units.BatchSizes, **known: Any) -> tuple[tuple[int, int], ...]:
    """(first batch, tokens in a row) of each length of seq_len_ramp, each for the fewest batches that reach its end.

    sizes: of batches, in tokens. Raises BadInput for a length that no batch would have.
    """
    ends = [units.resolve("seq_len_ramp", until, **known) for _, until in cfg.seq_len_ramp]
    begins = [0, *map(sizes.holding, ends)]
    for (length, until), begin, end in zip(cfg.seq_len_ramp, begins, begins[1:]):
        if end <= begin:
            raise BadInput(
                f"seq_len_ramp: no batch has rows of {length} tokens until {until}, which batch {end} begins with, and "
                f"those before them end at batch {begin}; write a later end, or leave that length out"
            )
    return tuple(zip(begins, (*(length for length, _ in cfg.seq_len_ramp), cfg.seq_len))) if ends else ()


def recorded_rows(budget: Mapping[str, Any], seq_len: int) -> units.BatchSizes:
    """How many tokens the rows of each batch have, by a run's record's "budget"; seq_len: those of the data."""
    stages = tuple((int(first), int(length)) for first, length in budget.get("seq_len_ramp") or ())
    return units.BatchSizes(stages or ((0, seq_len),))


def stages_of_programs(cfg: RunConfig, budget: Budget) -> list[tuple[int, RunConfig]]:
    """[(first batch, the run as if all batches were like it), ...] wherever batch_ramp or seq_len_ramp go on.

    The last is of the largest batches and the longest rows.
    """
    sizes, rows = budget.batches(1), budget.row_tokens(cfg.seq_len)
    firsts = sorted({first for first, _ in (*sizes.stages, *rows.stages)})
    return [(first, cfg.with_batch(sizes.size(first), rows.size(first))) for first in firsts]


def train_flops(cfg: RunConfig, budget: Budget) -> float:
    """Floating-point operations of the run, each batch with rows of its own length."""
    stages = stages_of_programs(cfg, budget)
    begins = [budget.tokens_of(min(first, budget.total_steps)) for first, _ in stages]
    begins.append(budget.tokens_of(budget.total_steps))
    return sum(one.flops_per_token * (end - begin) for (_, one), begin, end in zip(stages, begins, begins[1:]))


def schedule_steps(budget: Mapping[str, Any]) -> dict[str, Any]:
    """What optim_schedule wants of a budget, be it one that an earlier version recorded."""
    return {name: budget[name] for name in SCHEDULE_STEPS if name in budget}


def resolve_decay_start(optim: OptimConfig, sizes: units.BatchSizes, total_steps: int, **known: Any) -> int | None:
    """The step that a decay of optim.decay_tokens begins with. Raises BadInput where the run is shorter."""
    if optim.decay != "wsd" or optim.decay_tokens is None:
        return None
    tokens = units.resolve("optim.decay_tokens", optim.decay_tokens, **known)
    before = sizes.begin(total_steps) - tokens
    start = sizes.find(before)[0] if before >= 0 else -1
    if not 0 <= start < total_steps:
        raise BadInput(
            f"optim.decay_tokens={optim.decay_tokens} must be above 0, and at most the {total_steps} steps of "
            "train_tokens"
        )
    return start


def decay_steps(optim: OptimConfig, total_steps: int, **known: Any) -> int:
    """Steps of the decay of a run of so many steps."""
    if optim.decay_tokens is None:
        return round(optim.decay_fraction * total_steps)
    return units.steps(units.resolve("optim.decay_tokens", optim.decay_tokens, **known), known["batch_tokens"])


def decay_begin(optim: OptimConfig, total_steps: int, decay_start: int | None) -> int | None:
    """The step that the decay of a stable rate begins with; None for one that has none. decay_start: of the budget."""
    if decay_start is not None or optim.decay != "wsd":
        return decay_start
    return total_steps - round(optim.decay_fraction * total_steps)


def resolve_factors(optim: OptimConfig, sizes: units.BatchSizes, **known: Any) -> tuple[tuple[int, float], ...]:
    """optim.factors of a piecewise schedule by the step that each begins with. Raises BadInput unless these rise."""
    if optim.decay != "piecewise":
        return ()
    when = [units.resolve("optim.factors", amount, **known) for amount, _ in optim.parse_factors()]
    begins = [sizes.holding(tokens) for tokens in when]
    if begins != sorted(set(begins)):
        raise BadInput(
            f"optim.factors={', '.join(optim.factors)} begin after {', '.join(map(str, begins))} steps of this run, "
            "and each must begin after the one before; put them in order, or leave one out"
        )
    return tuple((begin, factor) for begin, (_, factor) in zip(begins, optim.parse_factors()))


SCHEDULE_STEPS = ("warmup_steps", "total_steps", "decay_start", "factors")  # fields of Budget
