"""Settings of monitoring, and the thresholds of the health rules with their sources.

A "common rule" is widely used but has no published source (docs/health.md). Where common rules disagree, a finding
shows all of them and the setting selects the one that alerts. Thresholds without a source were chosen on synthetic
curves (seeds 0 to 3 of tests/monitor/curves.py, some revised with 4 to 7) and are evaluated in docs/health_table.md.
"""

import dataclasses
import math
import re
from typing import Any, Literal, NamedTuple

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

RULES = (
    "nonfinite", "spike", "divergence", "flat_start", "plateau", "oscillation", "explosion", "zero_gradient",
    "skipped_steps", "activations", "attention_logits", "busy_machine", "starvation", "slow_step", "utilisation_drop",
    "memory_creep", "overfitting", "source_jump", "forecast", "router_collapse", "dead_experts", "router_bias",
)  # fmt: skip
FRACTIONS = ("flat_drop", "plateau_drop", "data_wait", "speed_drop", "memory_rise", "overfit_rise", "branch_low")
RANGE = re.compile(r"([0-9]+):([0-9]+)")


class Steps(NamedTuple):
    """Range of steps from `first` to `stop` - 1, counted from 1 as in the log."""

    first: int
    stop: int


def parse_steps(text: str | None) -> Steps | None:
    """Parses '100:105' as steps 100 to 104; returns None for empty text. Raises BadInput for an invalid range."""
    if not text:
        return None
    if (found := RANGE.fullmatch(text)) and 1 <= int(found[1]) < int(found[2]):
        return Steps(int(found[1]), int(found[2]))
    raise BadInput(
        f"profile_steps={text!r} must be FIRST:STOP with 1 <= FIRST < STOP, such as 100:105 for steps 100 to 104"
    )


def threshold(default: Any, help: str, *rules: str) -> Any:
    """Returns a setting of HealthConfig; `rules` names the rules that read it."""
    return setting(default, help, may_change=True, read_if=" or ".join(f".off!={rule}" for rule in rules))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Settings of health alerts. Alerts are derived from metrics and never change training.

    spike_ratio and grad_ratio are independent of train.guard, which decides which steps are applied. The guard compares
    a gradient norm with optim.clip_norm, whereas the health rules compare it with the median of the run.
    """

    on: bool = setting(True, "check the metrics, and report problems with likely causes and fixes", may_change=True)
    off: tuple[str, ...] = setting((), f"disabled rules: {', '.join(RULES)}", may_change=True)
    spike_ratio: float = threshold(
        1.5,
        "two consecutive losses of at least this multiple of the previous median are a spike; from a multiple of 2 on, "
        "one is enough (common rules use 1.5, 2 and 3)",
        "spike",
    )
    spike_sigma: float = threshold(
        8.0,
        "a spike must also be this many robust standard deviations above the median, which excludes the noise of small "
        "batches; at twice as many, spike_ratio is not required",
        "spike",
    )
    divergence_ratio: float = threshold(
        1.05, "a smoothed loss that stays above this multiple of its minimum has diverged", "divergence"
    )
    flat_drop: float = threshold(
        0.02, "a loss that has fallen by less than this fraction after the learning rate warmup is flat", "flat_start"
    )
    plateau_drop: float = threshold(
        0.01,
        "a loss whose fall over the last half of the run is certainly below this fraction is on a plateau (a common "
        "rule: the mean loss of the window's second half is at least 0.99 times that of its first half)",
        "plateau",
    )
    plateau_records: int = threshold(100, "records before a plateau can be detected", "plateau")
    oscillation_ratio: float = threshold(
        3.0, "swings of the loss that are this many times as wide as before are an oscillation", "oscillation"
    )
    grad_norm: float = threshold(
        100.0,
        "a gradient norm above this value raises an alert (0.1 to 10 is normal; another common rule, 3 times the clip "
        "norm, is shown but raises no alert)",
        "explosion",
    )
    grad_ratio: float = threshold(
        10.0, "two consecutive gradient norms above this multiple of the median also raise an alert", "explosion"
    )
    zero_grad_records: int = threshold(
        3,
        "consecutive records with statistics in which the gradient of one trained parameter is exactly zero",
        "zero_gradient",
    )
    activation_high: float = threshold(100.0, "largest healthy RMS of a layer's activations", "activations")
    activation_low: float = threshold(0.01, "smallest healthy RMS of a layer's activations", "activations")
    branch_low: float = threshold(
        1e-3,
        "smallest healthy RMS of a layer's attention or MLP output, relative to the RMS of the layer's output",
        "activations",
    )
    attention_logit: float = threshold(
        1000.0, "largest healthy attention logit; QK-Clip limits them to 100 (arXiv:2507.20534)", "attention_logits"
    )
    data_wait: float = threshold(0.1, "waiting for data for more of a step than this is starvation", "starvation")
    slow_ratio: float = threshold(2.0, "steps longer than this multiple of the run's median are slow", "slow_step")
    speed_drop: float = threshold(
        0.2, "a throughput that stays this fraction below its best has dropped", "utilisation_drop", "busy_machine"
    )
    speed_seconds: float = threshold(
        60.0,
        "seconds that data waits or slow steps must last before they are reported",
        "starvation",
        "slow_step",
        "utilisation_drop",
        "busy_machine",
    )
    memory_rise: float = threshold(
        0.05, "a steady rise of memory use by this fraction and at least 1 GiB is reported", "memory_creep"
    )
    overfit_rise: float = threshold(
        0.01, "a validation loss above its lowest by this fraction three consecutive times is reported", "overfitting"
    )
    source_ratio: float = threshold(1.25, "a source's loss above this multiple of its median has jumped", "source_jump")

    def __post_init__(self):
        if unknown := [name for name in self.off if name not in RULES]:
            raise BadInput(f"off={unknown} is not a rule; the rules are {', '.join(RULES)}")
        few = "a single zero gradient can be normal, such as in the first step or for a batch without targets"
        for name, value in dataclasses.asdict(self).items():
            for is_broken, rule in (
                (name.endswith("_ratio") and value <= 1, "above 1: it is a multiple of the usual value"),
                (name in FRACTIONS and not 0 < value < 1, "a fraction between 0 and 1"),
                (name in ("spike_sigma", "grad_norm", "attention_logit") and value <= 0, "above 0"),
                (name == "plateau_records" and value < 50, "at least 50: fewer records are too noisy"),
                (name == "zero_grad_records" and value < 2, f"at least 2: {few}"),
                (name == "speed_seconds" and value < 0, "at least 0"),
            ):
                if is_broken:
                    raise BadInput(f"{name}={value} must be {rule}")
        if not 0 < self.activation_low < self.activation_high:
            raise BadInput("activation_low must be above 0 and below activation_high")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Settings of metrics, the console, profiles and health alerts."""

    log_every_steps: int = setting(10, "steps between two records of training metrics", may_change=True)
    statistics_every_steps: int = setting(
        100,
        "steps between statistics of the activations, attention, gradients and updates of each layer; computing them "
        "takes about as long as a step; 0: none",
        may_change=True,
    )
    tensorboard: bool = setting(True, "write TensorBoard event files to WORKDIR/tensorboard", may_change=True)
    progress: Literal["auto", "bar", "lines", "off"] = setting(
        "auto",
        "progress on the console; auto: a bar on a terminal and in a notebook, a line every log_every_steps elsewhere",
        may_change=True,
    )
    health: HealthConfig = setting(HealthConfig, may_change=True, read_if="monitor.health.on")

    writers: tuple[Literal["wandb", "trackio"] | str, ...] = setting(
        (), "where metrics go besides metrics.jsonl and TensorBoard: wandb, trackio, other packages", may_change=True
    )
    profile_steps: str | None = setting(
        None, "steps to capture for XProf, FIRST:STOP such as 100:105 for 100 to 104", may_change=True
    )
    profile_processes: Literal["first", "all"] = setting(
        "first", "which processes capture profile_steps", may_change=True, read_if="monitor.profile_steps"
    )
    telemetry_seconds: float = setting(
        30.0, "seconds between reads of the devices' power and temperature; 0: never", may_change=True
    )

    def __post_init__(self):
        parse_steps(self.profile_steps)
        if len(set(self.writers)) < len(self.writers):
            raise BadInput(f"writers={self.writers} must not have duplicates; list each writer once")
        if self.telemetry_seconds != 0 and not 1 <= self.telemetry_seconds < math.inf:
            raise BadInput(f"telemetry_seconds={self.telemetry_seconds} must be 0 or at least 1; 0 disables telemetry")
        if self.log_every_steps < 1:
            raise BadInput(f"log_every_steps={self.log_every_steps} must be at least 1")
        if self.statistics_every_steps < 0:
            raise BadInput(f"statistics_every_steps={self.statistics_every_steps} must be at least 0 (0: off)")
