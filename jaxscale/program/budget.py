"""Resolves tokens, steps, batch sizes and schedule steps of a run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.config import RunConfig
from jaxscale.core.optim.config import OptimConfig
from jaxscale.system.exits import BadInput


class Position(NamedTuple):
    """Position at which a run resumes, from runtime.run.resume_checks.recorded_position()."""

    steps_done: int = 0
    next_batch: int = 0
    finished: Mapping[str, tuple[tuple[int, int], ...]] = {}  # {field of Budget: stages of a completed ramp}
    begun: Mapping[str, int] = {}  # {start of a stage of data.mixture, as in the config: first batch}, if started


BEGINNING = Position()


@dataclasses.dataclass(frozen=True)
class Budget:
    """Tokens and steps of a run. Fields are written to run records."""

    batch_tokens: int  # tokens of the largest batch, which is the only size without a ramp
    train_tokens: int  # tokens as requested; a run has whole steps
    total_steps: int
    warmup_steps: int
    decay_start: int | None = None  # first step of the decay; None: determined by optim.decay_fraction
    factors: tuple[tuple[int, float], ...] = ()  # (step, factor) of optim.decay=piecewise
    ramp: tuple[tuple[int, int], ...] = ()  # (first batch, tokens) of each batch size; () for one size
    seq_len_ramp: tuple[tuple[int, int], ...] = ()  # (first batch, tokens per row) of each length; () for one length

    @property
    def schedule_steps(self) -> dict[str, Any]:
        """Arguments of optim_schedule() in addition to the settings."""
        return schedule_steps(dataclasses.asdict(self))

    def __str__(self) -> str:
        sizes = f"{self.batch_tokens} tokens"
        if self.ramp:
            sizes = ", ".join(f"{tokens} tokens from batch {first}" for first, tokens in self.ramp)
        rows = ", ".join(f"{length} from batch {first}" for first, length in self.seq_len_ramp)
        sizes += f" (sequence length: {rows})" if rows else ""
        rates = f", decay from step {self.decay_start}" if self.decay_start is not None else ""
        rates += "".join(f", learning rate x{factor:g} from step {step}" for step, factor in self.factors)
        return (
            f"{self.total_steps} steps of {sizes}, {units.count(self.tokens_of(self.total_steps))} tokens in total; "
            f"warmup {self.warmup_steps} steps{rates}"
        )

    def batches(self, row_tokens: int) -> units.BatchSizes:
        """Returns the number of sequences in each batch, for sequences of `row_tokens` tokens."""
        return units.recorded_sizes(dataclasses.asdict(self), row_tokens)

    def row_tokens(self, seq_len: int) -> units.BatchSizes:
        """Returns the sequence length of each batch. seq_len: the length after or without a ramp."""
        return recorded_rows(dataclasses.asdict(self), seq_len)

    @property
    def without_ramps(self) -> "Budget":
        """The budget with all batches like those of the last stage."""
        return dataclasses.replace(self, ramp=(), seq_len_ramp=())

    def tokens_of(self, steps: int) -> int:
        """Returns the number of tokens in the first `steps` steps, if no batch is skipped."""
        return self.batches(1).begin(steps)


def resolve_budget(cfg: RunConfig, epoch_tokens: int | None, position: Position = BEGINNING) -> Budget:
    """Returns the budget of a run. Raises BadInput for contradictory settings.

    epoch_tokens: tokens in one pass over the data, or None if unknown. position: position at which the run resumes.
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
        raise BadInput(f"train_tokens={cfg.train_tokens} is less than one token; use at least {batch} (one step)")
    if warmup_steps > max(total_steps, position.steps_done):
        raise BadInput(f"optim.warmup_tokens={cfg.optim.warmup_tokens} must be at most train_tokens={cfg.train_tokens}")
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
    """Returns the sizes of all batches in tokens. Raises BadInput if a size in batch_ramp is never used."""
    ends = [units.resolve("batch_ramp", until, **known) for _, until in cfg.batch_ramp]
    try:
        return units.BatchSizes.growing(list(zip(cfg.ramp_tokens, ends)), cfg.tokens_per_step)
    except BadInput as error:
        raise BadInput(f"batch_ramp (sizes and ends in tokens): {error}; use later ends, or remove that size") from None


def resolve_rows(cfg: RunConfig, sizes: units.BatchSizes, **known: Any) -> tuple[tuple[int, int], ...]:
    """Returns (first batch, sequence length) of each stage of seq_len_ramp. Stages end at whole batches.

    sizes: batch sizes in tokens. Raises BadInput if a length is never used.
    """
    ends = [units.resolve("seq_len_ramp", until, **known) for _, until in cfg.seq_len_ramp]
    begins = [0, *map(sizes.holding, ends)]
    for (length, until), begin, end in zip(cfg.seq_len_ramp, begins, begins[1:]):
        if end <= begin:
            raise BadInput(
                f"seq_len_ramp: length {length} is never used, because it ends at {until}, which is batch {end}, and "
                f"the previous length ends at batch {begin}; use a later end, or remove this length"
            )
    return tuple(zip(begins, (*(length for length, _ in cfg.seq_len_ramp), cfg.seq_len))) if ends else ()


def recorded_rows(budget: Mapping[str, Any], seq_len: int) -> units.BatchSizes:
    """Returns the sequence length of each batch from a recorded budget. seq_len: the length without a ramp."""
    stages = tuple((int(first), int(length)) for first, length in budget.get("seq_len_ramp") or ())
    return units.BatchSizes(stages or ((0, seq_len),))


class BatchStage(NamedTuple):
    """A range of batches with the same batch size and sequence length."""

    first: int  # first batch
    stop: int | None  # first batch of the next stage; None for the last stage
    tokens: int  # tokens per batch
    row_tokens: int  # tokens per row


def batch_stages(budget: Budget, seq_len: int) -> list[BatchStage]:
    """Returns all stages of a run in order. The last stage has the largest batches and the longest sequences."""
    sizes, rows = budget.batches(1), budget.row_tokens(seq_len)
    firsts = sorted({first for first, _ in (*sizes.stages, *rows.stages)})
    stops = [*firsts[1:], None]
    return [BatchStage(first, stop, sizes.size(first), rows.size(first)) for first, stop in zip(firsts, stops)]


def remaining_stages(
    budget: Budget, seq_len: int, next_batch: int = 0, skipped: Sequence[tuple[int, int]] = ()
) -> list[BatchStage]:
    """Returns the stages that still have batches to train on, from `next_batch` on. skipped: batch ranges to skip."""

    def remains(stage: BatchStage) -> bool:
        batch = max(stage.first, next_batch)
        for first, stop in sorted(skipped):
            batch = stop if first <= batch < stop else batch
        return stage.stop is None or batch < stage.stop

    return [stage for stage in batch_stages(budget, seq_len) if remains(stage)]


def batch_sizes(configs: Sequence[RunConfig]) -> str:
    """Returns a line that lists the batch sizes of the programs of a run, or '' for a single program.

    configs: config of each program, in the order of stages.
    """
    sizes = [
        f"{cfg.rows_per_step} sequences of {cfg.seq_len} tokens in "
        f"{units.plural(cfg.train.num_microbatches, 'microbatch')}"
        for cfg in configs
    ]
    return f"{len(sizes)} programs, each compiled when the run reaches it: {', '.join(sizes)}" if sizes[1:] else ""


def train_flops(cfg: RunConfig, budget: Budget) -> float:
    """Returns the floating-point operations of the whole run, including the stages of its ramps."""
    stages = batch_stages(budget, cfg.seq_len)
    begins = [budget.tokens_of(min(stage.first, budget.total_steps)) for stage in stages]
    begins.append(budget.tokens_of(budget.total_steps))
    flops = [cfg.with_batch(stage.tokens, stage.row_tokens).flops_per_token for stage in stages]
    return sum(each * (end - begin) for each, begin, end in zip(flops, begins, begins[1:]))


def schedule_steps(budget: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of optim_schedule() from a recorded budget, which may lack fields of later versions."""
    return {name: budget[name] for name in SCHEDULE_STEPS if name in budget}


def resolve_decay_start(optim: OptimConfig, sizes: units.BatchSizes, total_steps: int, **known: Any) -> int | None:
    """Returns the first step of the decay set by optim.decay_tokens, or None. Raises BadInput if it exceeds the run."""
    if optim.decay != "wsd" or optim.decay_tokens is None:
        return None
    tokens = units.resolve("optim.decay_tokens", optim.decay_tokens, **known)
    before = sizes.begin(total_steps) - tokens
    start = sizes.find(before)[0] if before >= 0 else -1
    if not 0 <= start < total_steps:
        raise BadInput(
            f"optim.decay_tokens={optim.decay_tokens} must be above 0 and not exceed the run ({total_steps} steps)"
        )
    return start


def decay_steps(optim: OptimConfig, total_steps: int, **known: Any) -> int:
    """Returns the number of decay steps of a run of total_steps."""
    if optim.decay_tokens is None:
        return round(optim.decay_fraction * total_steps)
    return units.steps(units.resolve("optim.decay_tokens", optim.decay_tokens, **known), known["batch_tokens"])


def decay_begin(optim: OptimConfig, total_steps: int, decay_start: int | None) -> int | None:
    """Returns the first decay step of a wsd schedule, or None for other schedules. decay_start: Budget.decay_start."""
    if decay_start is not None or optim.decay != "wsd":
        return decay_start
    return total_steps - round(optim.decay_fraction * total_steps)


def resolve_factors(
    optim: OptimConfig, sizes: units.BatchSizes, steps_done: int, **known: Any
) -> tuple[tuple[int, float], ...]:
    """Returns (first step, factor) of each entry of optim.factors, or () if the schedule is not piecewise.

    Raises BadInput unless the first steps after `steps_done` increase. Of the earlier entries, the last one applies.
    """
    if optim.decay != "piecewise":
        return ()
    when = [units.resolve("optim.factors", amount, **known) for amount, _ in optim.parse_factors()]
    begins = [sizes.holding(tokens) for tokens in when]
    ahead = begins[next((at for at, begin in enumerate(begins) if begin > steps_done), len(begins)) :]
    if ahead != sorted(set(ahead)):
        raise BadInput(
            f"optim.factors={', '.join(optim.factors)} start at steps {', '.join(map(str, begins))} of this run, "
            "which must increase; reorder the factors, or remove one"
        )
    return tuple((begin, factor) for begin, (_, factor) in zip(begins, optim.parse_factors()))


SCHEDULE_STEPS = ("warmup_steps", "total_steps", "decay_start", "factors")  # fields of Budget
