"""The amounts of a run as numbers: tokens, steps, sizes of batches, where its schedule turns."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.config import RunConfig
from jaxscale.optim.config import OptimConfig
from jaxscale.system.exits import BadInput


class Position(NamedTuple):
    """Where a run resumes; of run.resume_checks.recorded_position."""

    steps_done: int = 0
    next_batch: int = 0
    finished: Mapping[str, tuple[tuple[int, int], ...]] = {}  # stages of each ramp that is over, by field of Budget
    begun: Mapping[str, int] = {}  # first batch of each stage of data.mixture that has begun, by its start as written


BEGINNING = Position()


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

    @property
    def without_ramps(self) -> "Budget":
        """The budget of the same run if all batches were as in its last stage."""
        return dataclasses.replace(self, ramp=(), seq_len_ramp=())

    def tokens_of(self, steps: int) -> int:
        """Tokens of the first steps, where no batch is skipped."""
        return self.batches(1).begin(steps)


def resolve_budget(cfg: RunConfig, epoch_tokens: int | None, position: Position = BEGINNING) -> Budget:
    """The amounts as numbers. Raises BadInput for amounts that contradict each other.

    epoch_tokens: tokens of one pass over the data, None where that is unknown.
    """
    finished = position.finished
    batch = cfg.tokens_per_step
    known: dict[str, Any] = dict(seq_len=cfg.seq_len, batch_tokens=batch, epoch_tokens=epoch_tokens)
    train_tokens = units.resolve("train_tokens", cfg.train_tokens, **known)
    warmup = units.resolve("optim.warmup_tokens", cfg.optim.warmup_tokens, train_tokens=train_tokens, **known)
    if "ramp" in finished:
        sizes = units.BatchSizes(finished["ramp"])
    else:
        sizes = resolve_sizes(cfg, train_tokens=train_tokens, **known)
    total_steps, warmup_steps = sizes.holding(train_tokens), sizes.holding(warmup)
    number, unit = units.parse("optim.warmup_tokens", cfg.optim.warmup_tokens)
    if unit == "steps":
        warmup_steps = math.ceil(number)
    if total_steps < 1:
        raise BadInput(f"train_tokens={cfg.train_tokens} is less than one token; a step has {batch}")
    if warmup_steps > max(total_steps, position.steps_done):
        raise BadInput(f"optim.warmup_tokens={cfg.optim.warmup_tokens} is longer than train_tokens={cfg.train_tokens}")
    known |= dict(train_tokens=train_tokens)
    return Budget(
        batch,
        train_tokens,
        total_steps,
        warmup_steps,
        resolve_decay_start(cfg.optim, sizes, total_steps, **known),
        resolve_factors(cfg.optim, sizes, position.steps_done, **known),
        sizes.stages if sizes.vary else (),
        finished.get("seq_len_ramp") or resolve_rows(cfg, sizes, **known),
    )


def resolve_sizes(cfg: RunConfig, **known: Any) -> units.BatchSizes:
    """The sizes of all batches in tokens. Raises BadInput for a size of batch_ramp that no batch would have."""
    ends = [units.resolve("batch_ramp", until, **known) for _, until in cfg.batch_ramp]
    try:
        return units.BatchSizes.growing(list(zip(cfg.ramp_tokens, ends)), cfg.tokens_per_step)
    except BadInput as error:
        raise BadInput(f"batch_ramp, in tokens: {error}; write later ends, or leave that size out") from None


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


class BatchStage(NamedTuple):
    """A range of batches of one size, with rows of one length: what batch_ramp and seq_len_ramp divide a run into."""

    first: int  # batch
    stop: int | None  # the first batch of the next stage; None: there is no next stage
    tokens: int  # of a batch
    row_tokens: int


def batch_stages(budget: Budget, seq_len: int) -> list[BatchStage]:
    """All stages of a run, in order. The last one has the largest batches and the longest rows."""
    sizes, rows = budget.batches(1), budget.row_tokens(seq_len)
    firsts = sorted({first for first, _ in (*sizes.stages, *rows.stages)})
    stops = [*firsts[1:], None]
    return [BatchStage(first, stop, sizes.size(first), rows.size(first)) for first, stop in zip(firsts, stops)]


def remaining_stages(
    budget: Budget, seq_len: int, next_batch: int = 0, skipped: Sequence[tuple[int, int]] = ()
) -> list[BatchStage]:
    """The stages that a run still trains on from batch `next_batch` on. skipped: ranges of batches left out."""

    def remains(stage: BatchStage) -> bool:
        batch = max(stage.first, next_batch)
        for first, stop in sorted(skipped):
            batch = stop if first <= batch < stop else batch
        return stage.stop is None or batch < stage.stop

    return [stage for stage in batch_stages(budget, seq_len) if remains(stage)]


def batch_sizes(configs: Sequence[RunConfig]) -> str:
    """'2 programs, each compiled when the run reaches it: 8 rows of 64 tokens in 1 microbatch, ...'; '' for one.

    configs: of the programs of a run, in the order of its stages.
    """
    sizes = [
        f"{one.rows_per_step} rows of {one.seq_len} tokens in {units.plural(one.train.num_microbatches, 'microbatch')}"
        for one in configs
    ]
    return f"{len(sizes)} programs, each compiled when the run reaches it: {', '.join(sizes)}" if sizes[1:] else ""


def train_flops(cfg: RunConfig, budget: Budget) -> float:
    """Floating-point operations of the run, each batch with rows of its own length."""
    stages = batch_stages(budget, cfg.seq_len)
    begins = [budget.tokens_of(min(stage.first, budget.total_steps)) for stage in stages]
    begins.append(budget.tokens_of(budget.total_steps))
    flops = [cfg.with_batch(stage.tokens, stage.row_tokens).flops_per_token for stage in stages]
    return sum(each * (end - begin) for each, begin, end in zip(flops, begins, begins[1:]))


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


def resolve_factors(
    optim: OptimConfig, sizes: units.BatchSizes, steps_done: int, **known: Any
) -> tuple[tuple[int, float], ...]:
    """optim.factors of a piecewise schedule by the step that each begins with.

    Raises BadInput unless those that begin after `steps_done` rise: of the others, the last one counts.
    """
    if optim.decay != "piecewise":
        return ()
    when = [units.resolve("optim.factors", amount, **known) for amount, _ in optim.parse_factors()]
    begins = [sizes.holding(tokens) for tokens in when]
    ahead = begins[next((at for at, begin in enumerate(begins) if begin > steps_done), len(begins)) :]
    if ahead != sorted(set(ahead)):
        raise BadInput(
            f"optim.factors={', '.join(optim.factors)} begin after {', '.join(map(str, begins))} steps of this run, "
            "and each must begin after the one before; put them in order, or leave one out"
        )
    return tuple((begin, factor) for begin, (_, factor) in zip(begins, optim.parse_factors()))


SCHEDULE_STEPS = ("warmup_steps", "total_steps", "decay_start", "factors")  # fields of Budget
