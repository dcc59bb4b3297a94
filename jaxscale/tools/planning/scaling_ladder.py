"""A scaling ladder of small finished runs, read from their work folders, with reasons for runs that are left out.

A loss law compares the held-out loss after the last step of a schedule. The loss in the middle of a decaying schedule
is higher than that of a run of this length (arXiv:2203.15556, appendix B). So only runs with a constant learning rate
provide intermediate points.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxscale import schema, units
from jaxscale.config import RunConfig
from jaxscale.core.optim.optimizer import optim_schedule
from jaxscale.program.budget import Budget, resolve_budget
from jaxscale.runtime.monitor.history import History, read_history
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.planning.best_size import Curve, curve_of_run
from jaxscale.tools.planning.loss_law import Point, SeedNoise
from jaxscale.tools.planning.scaling import is_mixture

LOSS, BITS = "validation/loss", "validation/bits_per_byte"
RATE_TOLERANCE = 0.01  # largest relative difference between logged and scheduled learning rates
MAX_RISE = 1.1  # largest ratio of final to lowest smoothed training loss in a healthy run
WARMUP_FACTOR = 2.0  # with a constant learning rate, points before this many warmups are ignored
COMPARED = (
    "seq_len", "model.name", "model.vocab_size", "data.name", "data.files", "data.val_files", "data.val_fraction",
    "data.tokenizer", "data.bos_token", "data.packing", "data.mixture", "data.objective",
)  # fmt: skip
MIN_FREEDOM = 2  # fewest degrees of freedom of noise measured from seeds; one pair of seeds is not enough
DECAY_TOLERANCE = 0.005  # largest difference of equal decay fractions, from rounding to steps in a short run


class ScheduleShape(NamedTuple):
    """Shape of a learning rate schedule, independent of its peak and length."""

    decay: str
    decay_fraction: float | None  # wsd only
    final: float  # last learning rate divided by the peak
    warmup: float  # warmup as a fraction of the run
    form: str = ""  # form of the decay, if not implied by its name

    def __str__(self) -> str:
        part = f" over the last {self.decay_fraction:.0%}" if self.decay_fraction else ""
        part += f" ({self.form})" if self.form else ""
        end = "" if self.decay == "constant" else f" to {self.final:.3g} of the peak"
        return f"{self.decay}{part}{end}, warmup {self.warmup:.1%}"

    def ends_as(self, other: "ScheduleShape") -> bool:
        """True if both schedules have the same decay, and final learning rates within 1%. Ignores the warmup."""
        parts = [part.decay_fraction or 0.0 for part in (self, other)]
        if (self.decay, self.form) != (other.decay, other.form) or abs(parts[0] - parts[1]) > DECAY_TOLERANCE:
            return False
        return self.decay == "constant" or math.isclose(self.final, other.final, rel_tol=0.01, abs_tol=1e-6)


@dataclasses.dataclass(frozen=True)
class LadderRun:
    """A finished run of the ladder."""

    folder: str
    params: int
    tokens: int
    flops: float
    loss: float  # final held-out loss, nats per token
    bits_per_byte: float | None
    recipe: str  # all settings except the seed, as JSON
    seed: int
    points: tuple[Point, ...]  # the final point; with a constant learning rate also intermediate points
    schedule: ScheduleShape
    steps: np.ndarray  # steps with logged loss as fractions of the run, in (0, 1]
    losses: np.ndarray  # training loss at `steps`, nats per token

    @property
    def name(self) -> str:
        """Base name of the folder."""
        return self.folder.rstrip("/").rpartition("/")[2]

    @property
    def curve(self) -> Curve:
        """Training loss over tokens, for approach 1 of best_size.py."""
        tokens, losses = (self.steps * self.tokens).tolist(), self.losses.tolist()
        return curve_of_run(self.params, self.flops / self.tokens, tokens, losses)


class Ladder(NamedTuple):
    """Runs comparable with the run to forecast (smallest first), and (folder, reason) of each excluded run."""

    rungs: tuple[LadderRun, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of all runs."""
        return tuple(point for rung in self.rungs for point in rung.points)

    @property
    def noise(self) -> SeedNoise | None:
        """Noise between seeds, or None with fewer than MIN_FREEDOM degrees of freedom."""
        ends: dict[str, dict[int, float]] = {}
        for rung in self.rungs:
            ends.setdefault(rung.recipe, {})[rung.seed] = math.log(rung.loss)
        return estimate_noise([list(losses.values()) for losses in ends.values()])

    @property
    def bits_per_nat(self) -> float | None:
        """Bits per byte divided by nats per token on the held-out text, or None if unknown or not equal in all runs."""
        found = [rung.bits_per_byte / rung.loss for rung in self.rungs if rung.bits_per_byte is not None]
        if not found or len(found) < len(self.rungs):
            return None
        ratios = np.array(found)
        return float(np.median(ratios)) if np.ptp(ratios) <= 1e-3 * ratios.mean() else None


def estimate_noise(repeated: Sequence[Sequence[float]]) -> SeedNoise | None:
    """Returns the noise of log L, or None for too few runs. The runs of each group differ only in the seed."""
    groups = [np.array(group) for group in repeated if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < MIN_FREEDOM:
        return None
    return SeedNoise(math.sqrt(sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / freedom), freedom)


def find_runs(patterns: str) -> list[str]:
    """Returns folders that match 'runs/ladder/*,gs://bucket/small-*', for example. Raises BadInput without a match."""
    found: list[str] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        parts = pattern.split("/")
        wild = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
        base = "/".join(parts[:wild]) or ("/" if pattern.startswith("/") else ".")
        folder, wildcards = paths.as_path(base), "/".join(parts[wild:])
        matched = sorted(str(path) for path in folder.glob(wildcards) if path.is_dir()) if wildcards else [str(folder)]
        if not matched:
            raise BadInput(f"--runs={pattern} matches no folder; pass work folders of finished runs, in quotes")
        found += [name for name in matched if name not in found]
    if not found:
        raise BadInput("--runs must name work folders, such as --runs='runs/ladder/*'")
    return found


def read_ladder(folders: Sequence[str], target: RunConfig, budget: Budget, target_folder: str | None = None) -> Ladder:
    """Returns the ladder of runs comparable with `target`. Raises BadInput if the loss law does not cover `target`."""
    check_covered(target, budget, "the run to forecast")
    settings, schedule = comparable(target), schedule_of(target, budget)
    rungs, left_out = [], []
    for folder in folders:
        try:
            if target_folder is not None and paths.absolute(folder) == paths.absolute(target_folder):
                raise BadInput("this is the run to forecast")
            rungs.append(read_run(folder, settings, schedule))
        except BadInput as error:
            left_out.append((folder, str(error)))
    return Ladder(tuple(sorted(rungs, key=lambda rung: rung.flops)), tuple(left_out))


def read_run(folder: str, settings: dict[str, Any], target: ScheduleShape) -> LadderRun:
    """Returns a finished run. Raises BadInput if the run is not comparable with the target."""
    history = read_history(folder)
    cfg, budget = read_settings(history)
    check_covered(cfg, budget, "the run")
    for name, value in comparable(cfg).items():
        if value != settings[name]:
            raise BadInput(f"{name} is {short(value)}, but {short(settings[name])} in the run to forecast")
    schedule = schedule_of(cfg, budget)
    if not schedule.ends_as(target):
        raise BadInput(f"the schedule is {schedule}, but {target} in the run to forecast")
    if history.config.get("ancestry"):
        raise BadInput("the run started from the parameters of another run, so its token count is incomplete")
    last = history.last_step
    is_constant = schedule.decay == "constant"
    if last < budget.total_steps and not is_constant:
        raise BadInput(f"the run is not finished: step {last} of {budget.total_steps}")
    check_rate(history, cfg, budget)
    params, flops = cfg.model.num_params, cfg.flops_per_token
    evals = [row for row in history.rows if LOSS in row]
    if not evals:
        raise BadInput("the run has no held-out loss; repeat it with held-out text and eval.num_rows above 0")
    bad = [row["step"] for row in evals if row[LOSS] is None]
    if bad:
        raise BadInput(f"the run diverged: the held-out loss at step {bad[0]} is not finite")
    end = evals[-1]
    if not is_constant and end["step"] != budget.total_steps:
        raise BadInput(f"the last held-out loss is at step {end['step']}, but the last step is {budget.total_steps}")
    steps, losses = (np.array(values, float) for values in history.series("loss"))
    check_healthy(steps, losses, max(int(end["step"]), 1))
    settled = WARMUP_FACTOR * max(1, budget.warmup_steps)
    ends = [row for row in evals if row["step"] >= settled] if is_constant else [end]
    if not ends:
        raise BadInput(f"the run has no held-out loss after the warmup of {budget.warmup_steps} steps")
    tokens = budget.batch_tokens
    parts = (cfg.model, cfg.optim, cfg.data, budget)
    points = [Point(params, row["step"] * tokens, row[LOSS], str(folder), flops * row["step"] * tokens) for row in ends]
    return LadderRun(
        folder=str(folder),
        params=params,
        tokens=end["step"] * tokens,
        flops=flops * end["step"] * tokens,
        loss=end[LOSS],
        bits_per_byte=end.get(BITS),
        recipe=json.dumps([schema.to_dict(part) for part in parts], sort_keys=True, default=str),
        seed=cfg.seed,
        points=tuple(points),
        schedule=schedule,
        steps=steps / max(1, end["step"]),
        losses=losses,
    )


def check_covered(cfg: RunConfig, budget: Budget, what: str) -> None:
    """Raises BadInput if the model has experts, or if the run has a batch or sequence length ramp."""
    if is_mixture(cfg.model):
        raise BadInput(
            f"{what} has model.experts ({units.count(cfg.model.num_params)} parameters, "
            f"{units.count(cfg.model.active_params)} active), but the loss law is for dense models; use a dense model"
        )
    for name, ramp, reason in (
        ("seq_len_ramp", budget.seq_len_ramp, "losses at different sequence lengths are not comparable"),
        ("batch_ramp", budget.ramp, "steps with different numbers of tokens are not comparable"),
    ):
        if ramp:
            raise BadInput(f"{what} cannot have a {name}, because {reason}; use runs without a ramp")


def read_settings(history: History) -> tuple[RunConfig, Budget]:
    """Returns (config, budget) from a run's config.json. Raises BadInput if the file cannot be read."""
    if not history.config:
        raise BadInput(next((p for p in history.problems if "config.json" in p), "config.json is missing"))
    try:
        cfg = schema.from_dict(RunConfig, history.config["config"])
        return cfg, Budget(**history.config["budget"])
    except (KeyError, TypeError) as error:
        raise BadInput(f"config.json is incomplete ({error})") from None
    except BadInput as error:
        raise BadInput(f"config.json is from a different version of jaxscale ({error})") from None


def comparable(cfg: RunConfig) -> dict[str, Any]:
    """Returns the settings that must be equal for held-out losses to be comparable."""
    values = schema.to_dict(cfg)
    return {name: schema.look_up(values, name) for name in COMPARED}


def schedule_of(cfg: RunConfig, budget: Budget) -> ScheduleShape:
    """Returns the shape of a run's learning rate schedule."""
    optim, total, fraction, form = cfg.optim, budget.total_steps, None, ""
    final = optim.min_lr / optim.peak_lr if optim.peak_lr else 0.0
    decay = "wsd" if budget.decay_start is not None else optim.decay  # decay_start: added to a constant rate
    if decay == "wsd":
        fraction = optim.decay_fraction if budget.decay_start is None else (total - budget.decay_start) / total
        form = "" if optim.decay_shape == "linear" else "1 - sqrt"
    elif optim.decay == "piecewise":
        form = ", ".join(f"{factor:g} from {begin / total:.0%}" for begin, factor in budget.factors)
        final = budget.factors[-1][1] if budget.factors else 1.0
    elif optim.decay == "inverse_sqrt":
        final = math.sqrt(max(1, budget.warmup_steps) / total)
    return ScheduleShape(decay, fraction, final, budget.warmup_steps / total, form)


def check_rate(history: History, cfg: RunConfig, budget: Budget) -> None:
    """Raises BadInput if the logged learning rates differ from the schedule in the config."""
    steps, rates = (np.array(values, float) for values in history.series("learning_rate"))
    schedule = optim_schedule(cfg.optim, **budget.schedule_steps)
    scheduled = np.asarray(
        schedule(jnp.asarray(steps - 1)), float
    )  # metrics of step n contain the learning rate of update n - 1
    differs = np.abs(rates - scheduled) > RATE_TOLERANCE * np.maximum(scheduled, 1e-3 * cfg.optim.peak_lr)
    if differs.any():
        at = int(np.argmax(differs))
        raise BadInput(
            f"the learning rate at step {steps[at]:.0f} was {rates[at]:.3g}, but {scheduled[at]:.3g} in the schedule; "
            "either the number of steps changed during the run, or recovery reduced the learning rate"
        )


def check_healthy(steps: np.ndarray, losses: np.ndarray, last: int) -> None:
    """Raises BadInput if the final mean training loss (last 5% of the run) exceeds MAX_RISE times the lowest mean."""
    means = [losses[(steps > part * last) & (steps <= (part + 0.05) * last)] for part in np.arange(0.1, 1, 0.05)]
    means = [float(part.mean()) for part in means if len(part)]
    if means and means[-1] > MAX_RISE * min(means):
        raise BadInput(f"the run diverged: the training loss rose from {min(means):.4g} to {means[-1]:.4g}")


def target_budget(cfg: RunConfig, tokens: str | None) -> tuple[RunConfig, Budget]:
    """Returns (config, budget) of the run to forecast. tokens: value of --tokens, which replaces train_tokens."""
    if tokens is not None:
        cfg = dataclasses.replace(cfg, train_tokens=units.resolve("--tokens", tokens, seq_len=cfg.seq_len))
    return cfg, resolve_budget(cfg, None)
