"""A ladder of small finished runs, read from their work folders, with the reason for each one that cannot be compared.

A law compares ends: held-out loss after the last step of a whole schedule. A point from the middle of a decaying
schedule is not what a run of that length would have reached (arXiv:2203.15556, appendix B), so only runs whose rate was
constant give points on the way.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxscale import schema, units
from jaxscale.budget import Budget, resolve_budget
from jaxscale.config import RunConfig
from jaxscale.optim.optimizers import optim_schedule
from jaxscale.planning.envelope import Curve, curve_of_run
from jaxscale.planning.loss_law import Noise, Point
from jaxscale.planning.scaling import is_mixture
from jaxscale.reporting.history import History, read_history
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

LOSS, BITS = "validation/loss", "validation/bits_per_byte"
RATE_OFF = 0.01  # relative; a logged rate further from its schedule's is another schedule's
ROSE = 1.1  # times the lowest smoothed training loss: an end above it is no end of a healthy run
WARM = 2.0  # times the warmup: points of a constant rate before that tell of the warmup
COMPARED = (
    "seq_len", "model.name", "model.vocab_size", "data.name", "data.files", "data.val_files", "data.val_fraction",
    "data.tokenizer", "data.bos_token", "data.packing", "data.mixture", "data.objective",
)  # fmt: skip
LEAST_FREEDOM = 2  # of a noise measured from seeds: one pair alone tells next to nothing
DECAY_OFF = 0.005  # difference of two parts of a run that decay: whole steps of a short one
WARMUP_OFF = 0.03  # difference of two warmups, as parts of their runs, that one shape of curve can have


class Schedule(NamedTuple):
    """The course of the learning rate, without its height and length."""

    decay: str
    decay_fraction: float | None  # wsd only
    final: float  # the last rate as a part of the peak
    warmup: float  # part of the run
    form: str = ""  # of the fall, where the name does not say it

    def __str__(self) -> str:
        part = f" over the last {self.decay_fraction:.0%}" if self.decay_fraction else ""
        part += f" ({self.form})" if self.form else ""
        end = "" if self.decay == "constant" else f" to {self.final:.3g} of the peak"
        return f"{self.decay}{part}{end}, warmup {self.warmup:.1%}"

    def ends_as(self, other: "Schedule") -> bool:
        """True if ends of both can be compared: all but the warmup is the same, the last rate of a decay to 1%."""
        parts = [part.decay_fraction or 0.0 for part in (self, other)]
        if (self.decay, self.form) != (other.decay, other.form) or abs(parts[0] - parts[1]) > DECAY_OFF:
            return False
        return self.decay == "constant" or math.isclose(self.final, other.final, rel_tol=0.01, abs_tol=1e-6)

    def runs_as(self, other: "Schedule") -> bool:
        """True if whole curves of both can be."""
        return self.ends_as(other) and abs(self.warmup - other.warmup) <= WARMUP_OFF


@dataclasses.dataclass(frozen=True)
class Rung:
    """A run of the ladder."""

    folder: str
    params: int
    tokens: int
    flops: float
    loss: float  # held-out, nats per token, at the end
    bits_per_byte: float | None
    recipe: str  # settings of the training, all but the seed
    seed: int
    points: tuple[Point, ...]  # the end, and points on the way where the rate was constant
    schedule: Schedule
    steps: np.ndarray  # as parts of the run, (0, 1]
    losses: np.ndarray  # training loss at those, nats per token

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.rstrip("/").rpartition("/")[2]

    @property
    def curve(self) -> Curve:
        """Its training loss, as approach 1 takes it."""
        return curve_of_run(
            self.params, self.flops / self.tokens, (self.steps * self.tokens).tolist(), self.losses.tolist()
        )


class Ladder(NamedTuple):
    """Runs that can be compared with the one to be forecast, the smallest first, and (folder, why not) of others."""

    rungs: tuple[Rung, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def points(self) -> tuple[Point, ...]:
        """Of all runs."""
        return tuple(point for rung in self.rungs for point in rung.points)

    @property
    def noise(self) -> Noise | None:
        """What runs differ by that differ in seed alone; None where fewer than LEAST_FREEDOM could be compared."""
        ends: dict[str, dict[int, float]] = {}
        for rung in self.rungs:
            ends.setdefault(rung.recipe, {})[rung.seed] = math.log(rung.loss)
        return noise_of([list(losses.values()) for losses in ends.values()])

    @property
    def bits_per_nat(self) -> float | None:
        """Bits per byte over nats per token, where every run tells both: the same held-out text has one such number."""
        found = [rung.bits_per_byte / rung.loss for rung in self.rungs if rung.bits_per_byte is not None]
        if not found or len(found) < len(self.rungs):
            return None
        ratios = np.array(found)
        return float(np.median(ratios)) if np.ptp(ratios) <= 1e-3 * ratios.mean() else None


def noise_of(repeated: Sequence[Sequence[float]]) -> Noise | None:
    """The noise of a run, from groups of log L that differ in seed alone; None with less than LEAST_FREEDOM."""
    groups = [np.array(group) for group in repeated if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < LEAST_FREEDOM:
        return None
    return Noise(math.sqrt(sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / freedom), freedom)


def find_runs(patterns: str) -> list[str]:
    """The folders that patterns such as 'runs/ladder/*,gs://bucket/small-*' match, in order. BadInput for none."""
    found: list[str] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        parts = pattern.split("/")
        wild = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
        base = "/".join(parts[:wild]) or ("/" if pattern.startswith("/") else ".")
        folder, rest = paths.as_path(base), "/".join(parts[wild:])
        matched = sorted(str(path) for path in folder.glob(rest) if path.is_dir()) if rest else [str(folder)]
        if not matched:
            raise BadInput(f"--runs={pattern} matches no folder; name work folders of finished runs, quoted")
        found += [name for name in matched if name not in found]
    if not found:
        raise BadInput("--runs must name work folders, such as --runs='runs/ladder/*'")
    return found


def read_ladder(folders: Sequence[str], target: RunConfig, budget: Budget, apart: str | None = None) -> Ladder:
    """The ladder for a run with this config.

    Args: apart: the run's own work folder, which is no rung. Damaged and foreign folders are left out, never raised.
    Raises BadInput for a run that is a mixture of experts.
    """
    check_dense(target, "the run to be forecast is")
    check_one_size(budget, "the run to be forecast has")
    wanted, own = comparable(target), schedule_of(target, budget)
    rungs, left_out = [], []
    for folder in folders:
        try:
            if apart is not None and paths.absolute(folder) == paths.absolute(apart):
                raise BadInput("it is the run to be forecast")
            rungs.append(read_rung(folder, wanted, own))
        except BadInput as why:
            left_out.append((folder, str(why)))
    return Ladder(tuple(sorted(rungs, key=lambda rung: rung.flops)), tuple(left_out))


def read_rung(folder: str, wanted: dict[str, Any], own: Schedule) -> Rung:
    """A finished run. Raises BadInput that says why it cannot stand beside the others."""
    history = read_history(folder)
    cfg, budget = settings_of(history)
    check_dense(cfg, "it is")
    check_one_size(budget, "it has")
    for name, value in comparable(cfg).items():
        if value != wanted[name]:
            raise BadInput(f"{name} is {told(value)}, not {told(wanted[name])} as in the config")
    schedule = schedule_of(cfg, budget)
    if not schedule.ends_as(own):
        raise BadInput(f"its schedule is {schedule}, not {own}")
    if history.config.get("ancestry"):
        raise BadInput("it began with the parameters of another run, so its tokens are not all it learned from")
    last = history.last_step
    steady = schedule.decay == "constant"
    if last < budget.total_steps and not steady:
        raise BadInput(f"it is not finished: step {last} of {budget.total_steps}")
    check_rate(history, cfg, budget)
    params, flops = cfg.model.num_params, cfg.flops_per_token
    told_at = [row for row in history.rows if LOSS in row]
    if not told_at:
        raise BadInput("it has no held-out loss; runs of a ladder need eval.num_rows above 0 and held-out text")
    bad = [row["step"] for row in told_at if row[LOSS] is None]
    if bad:
        raise BadInput(f"it diverged: its held-out loss at step {bad[0]} is not finite")
    end = told_at[-1]
    if not steady and end["step"] != budget.total_steps:
        raise BadInput(f"its last held-out loss is of step {end['step']}, and it ends at {budget.total_steps}")
    steps, losses = (np.array(values, float) for values in history.series("loss"))
    check_healthy(steps, losses, max(int(end["step"]), 1))
    ends = [row for row in told_at if row["step"] >= WARM * max(1, budget.warmup_steps)] if steady else [end]
    if not ends:
        raise BadInput(f"it has no held-out loss after its warmup of {budget.warmup_steps} steps")
    tokens = budget.batch_tokens
    points = [Point(params, row["step"] * tokens, row[LOSS], str(folder), flops * row["step"] * tokens) for row in ends]
    return Rung(
        folder=str(folder),
        params=params,
        tokens=end["step"] * tokens,
        flops=flops * end["step"] * tokens,
        loss=end[LOSS],
        bits_per_byte=end.get(BITS),
        recipe=recipe_of(cfg, budget),
        seed=cfg.seed,
        points=tuple(points),
        schedule=schedule,
        steps=steps / max(1, end["step"]),
        losses=losses,
    )


def check_dense(cfg: RunConfig, what: str) -> None:
    """Raises BadInput for a mixture of experts."""
    if is_mixture(cfg.model):
        raise BadInput(
            f"{what} a mixture of experts (model.experts), with {units.count(cfg.model.num_params)} parameters in all "
            f"and {units.count(cfg.model.active_params)} for a token: the law has one number of parameters and is of "
            "dense models; forecast a dense one"
        )


def check_one_size(budget: Budget, what: str) -> None:
    """Raises BadInput for a run whose batches or rows grow."""
    if budget.seq_len_ramp:
        raise BadInput(
            f"{what} rows that grow (seq_len_ramp): losses of rows of different lengths lie on no one curve; forecast "
            "and compare runs without one"
        )
    if budget.ramp:
        raise BadInput(
            f"{what} batches that grow (batch_ramp): curves are laid over each other by steps, which are not always as "
            "many tokens; forecast and compare runs without a ramp"
        )


def settings_of(history: History) -> tuple[RunConfig, Budget]:
    """(config, amounts) of a run as its config.json has them. Raises BadInput where that cannot be read."""
    if not history.config:
        raise BadInput(next((p for p in history.problems if "config.json" in p), "config.json is missing"))
    try:
        cfg = schema.from_dict(RunConfig, history.config["config"])
        return cfg, Budget(**history.config["budget"])
    except (KeyError, TypeError) as error:
        raise BadInput(f"its config.json lacks what a run writes there ({error})") from None
    except BadInput as error:
        raise BadInput(f"its config.json is of another version: {error}") from None


def comparable(cfg: RunConfig) -> dict[str, Any]:
    """What must be the same for two held-out losses to be comparable: the text, the tokens, the rows, the question."""
    values = schema.to_dict(cfg)
    return {name: schema.look_up(values, name) for name in COMPARED}


def recipe_of(cfg: RunConfig, budget: Budget) -> str:
    """What runs share that differ in seed alone: model, optimizer, amounts and data, as JSON."""
    parts = [schema.to_dict(part) for part in (cfg.model, cfg.optim, cfg.data, budget)]
    return json.dumps(parts, sort_keys=True, default=str)


def told(value: Any) -> str:
    """The value, shortened, for people."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def schedule_of(cfg: RunConfig, budget: Budget) -> Schedule:
    """The course of a run's learning rate."""
    optim, total, fraction, form = cfg.optim, budget.total_steps, None, ""
    final = optim.min_lr / optim.peak_lr if optim.peak_lr else 0.0
    decay = "wsd" if budget.decay_start is not None else optim.decay  # a constant rate that has decayed early
    if decay == "wsd":
        fraction = optim.decay_fraction if budget.decay_start is None else (total - budget.decay_start) / total
        form = "" if optim.decay_shape == "linear" else "1 - sqrt"
    elif optim.decay == "piecewise":
        form = ", ".join(f"{factor:g} from {begin / total:.0%}" for begin, factor in budget.factors)
        final = budget.factors[-1][1] if budget.factors else 1.0
    elif optim.decay == "inverse_sqrt":
        final = math.sqrt(max(1, budget.warmup_steps) / total)
    return Schedule(decay, fraction, final, budget.warmup_steps / total, form)


def check_rate(history: History, cfg: RunConfig, budget: Budget) -> None:
    """Raises BadInput if the rates that were logged are not those of the schedule.

    So it is after a horizon that was changed on the way, and after a cut of the rate in answer to trouble: the end of
    such a run is not that of a run which had its last schedule from the beginning.
    """
    steps, rates = (np.array(values, float) for values in history.series("learning_rate"))
    schedule = optim_schedule(cfg.optim, **budget.schedule_steps)
    due = np.asarray(schedule(jnp.asarray(steps - 1)), float)  # a line of step n has the rate that made it, from 0 on
    off = np.abs(rates - due) > RATE_OFF * np.maximum(due, 1e-3 * cfg.optim.peak_lr)
    if off.any():
        at = int(np.argmax(off))
        raise BadInput(
            f"its learning rate at step {steps[at]:.0f} was {rates[at]:.3g}, and its schedule has {due[at]:.3g}: the "
            "horizon changed on the way, or the rate was cut"
        )


def check_healthy(steps: np.ndarray, losses: np.ndarray, last: int) -> None:
    """Raises BadInput if the training loss rose again: its mean over the last twentieth against the lowest one."""
    means = [losses[(steps > part * last) & (steps <= (part + 0.05) * last)] for part in np.arange(0.1, 1, 0.05)]
    means = [float(part.mean()) for part in means if len(part)]
    if means and means[-1] > ROSE * min(means):
        raise BadInput(f"it diverged: its training loss ends at {means[-1]:.4g} after {min(means):.4g}")


def target_budget(cfg: RunConfig, tokens: str | None) -> tuple[RunConfig, Budget]:
    """(config, amounts) of the run to be forecast; tokens: as in --tokens, in place of train_tokens.

    Raises BadInput where the amounts need the data, which is not opened here.
    """
    if tokens is not None:
        cfg = dataclasses.replace(cfg, train_tokens=units.resolve("--tokens", tokens, seq_len=cfg.seq_len))
    return cfg, resolve_budget(cfg, None)
