"""Settings of the optimizer, its learning rate and parameter groups."""

import dataclasses
import re
from typing import Literal

from jaxscale import units
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

Decay = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt", "piecewise"]
DecayShape = Literal["linear", "one_minus_sqrt"]
STABLE = ("wsd", "constant")  # schedules whose learning rate stays at the peak until a decay begins
ARROW = "=>"
EARLY = "limit.on_overrun=decay"  # with this setting, a constant learning rate may decay like wsd
FACTORS = ("80%=>0.316", "90%=>0.1")  # the multi-step schedule of arXiv:2401.02954, section 2.3
WHOLE_TENSORS = ("muon", "adafactor", "lamb")  # update rules that are not elementwise
NEED_PARAMETERS = ("adafactor", "lamb")  # update rules that scale by the norm or RMS of the parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Settings of the parameters whose dotted path matches a regular expression. The first matching group applies."""

    pattern: str = setting(help="regular expression searched in paths such as 'blocks.attention.wq' or 'embedding'")
    lr_multiplier: float = setting(1.0, "multiplies the learning rate", read_if=".frozen=false")
    weight_decay: float | None = setting(
        None, "replaces optim.weight_decay; none: the value without a group", read_if=".frozen=false"
    )
    frozen: bool = setting(False, "true: the parameters do not change and have no moments")

    def __post_init__(self):
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise BadInput(f"pattern={self.pattern!r} is not a valid regular expression: {error}") from None
        if self.lr_multiplier < 0:
            raise BadInput(f"lr_multiplier={self.lr_multiplier} must not be negative; to freeze, use frozen=true")
        if self.weight_decay is not None and self.weight_decay < 0:
            raise BadInput(f"weight_decay={self.weight_decay} must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Settings of the optimizer. The default is AdamW with warmup and cosine decay."""

    name: Literal["adamw", "lion", "sgd", "muon", "adafactor", "lamb"] = setting(
        "adamw",
        "update rule. adamw: arXiv:1711.05101; lion: arXiv:2302.06675; muon: arXiv:2502.16982, orthogonalized momentum "
        "for matrices of blocks, AdamW for others; adafactor: arXiv:1804.04235, no momentum; lamb: arXiv:1904.00962",
    )
    peak_lr: float = setting(3e-4, "learning rate at the end of the warmup")
    min_lr: float = setting(
        3e-5, "learning rate at and after the last step", read_if=f"optim.decay=cosine|linear|wsd or {EARLY}"
    )
    warmup_tokens: units.Tokens = setting("1%", "linear warmup: tokens, '2000 steps' or '1%' of train_tokens")
    decay: Decay = setting("cosine", "shape of the learning rate after the warmup")
    decay_fraction: float = setting(
        0.2,
        "wsd only: length of the decay as a fraction of all steps",
        read_if=f"optim.decay=wsd and not optim.decay_tokens or {EARLY} and not optim.decay_tokens",
    )
    decay_tokens: units.Tokens | None = setting(
        None,
        "wsd only: length of the decay, instead of decay_fraction: tokens, '2000 steps' or '10%' of train_tokens",
        read_if=f"optim.decay=wsd or {EARLY}",
    )
    decay_shape: DecayShape = setting(
        "linear", "wsd only: linear, or 1 - sqrt (arXiv:2405.18392)", read_if=f"optim.decay=wsd or {EARLY}"
    )
    factors: tuple[str, ...] = setting(
        FACTORS,
        "piecewise only: ordered 'WHEN=>FACTOR', with WHEN in tokens, steps or percent of train_tokens; after WHEN the "
        "learning rate is peak_lr times FACTOR; the default is from arXiv:2401.02954",
        read_if="optim.decay=piecewise",
    )
    b1: float = setting(0.9, "decay rate of the first moment; momentum of sgd", read_if="optim.name!=adafactor")
    b2: float = setting(0.95, "decay rate of the second moment", read_if="optim.name=adamw|lion|muon|lamb")
    eps: float = setting(1e-8, "added to the root of the second moment", read_if="optim.name=adamw|muon|lamb")
    muon_momentum: float = setting(0.95, "Nesterov momentum for matrices", read_if="optim.name=muon")
    muon_heads: Literal["fused", "each"] = setting(
        "fused",
        "fused: orthogonalize attention matrices as a whole, [D, heads x head_dim], as in the source; each: the "
        "[D, head_dim] of each head",
        read_if="optim.name=muon",
    )
    muon_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "float32",
        "dtype of the all-to-all and the orthogonalization of matrices; auto: bfloat16 if model.compute_dtype is "
        "bfloat16, else float32",
        read_if="optim.name=muon",
    )
    muon_steps: Literal[2, 3, 4] | None = setting(
        None,
        "iterations of the orthogonalization, with optimal coefficients for that number (arXiv:2505.16932); none: 5 "
        "with constant coefficients, as in the source",
        read_if="optim.name=muon",
    )
    scale_by_parameter: bool = setting(
        False,
        "true: multiply updates by the parameter's root mean square, as in the source, with peak_lr about 1e-2; false: "
        "learning rates of AdamW apply",
        read_if="optim.name=adafactor",
    )
    weight_decay: float = setting(0.1, "decoupled weight decay, multiplied by the learning rate")
    weight_decay_all: bool = setting(
        False, "true: norms, biases and embeddings decay too", read_if="optim.weight_decay"
    )
    clip_norm: float = setting(1.0, "largest global gradient norm; 0: no clipping")
    qk_clip: float | None = setting(
        None,
        "largest attention score of a head; after a step that exceeds it, the query and key weights of the head are "
        "scaled down (arXiv:2507.20534 uses 100); null: none",
    )
    moment_dtype: Literal["float32", "bfloat16", "int8"] = setting(
        "float32",
        "dtype of moments between steps, with stochastic rounding; int8: blocks of values share a scale",
        read_if="optim.name!=adafactor",
    )
    offload_moments: bool = setting(
        False, "true: keep moments in host memory and copy them to the device layer by layer", may_change=True
    )
    offload_params: bool = setting(
        False, "true: keep parameters in host memory and copy them to the device layer by layer", may_change=True
    )
    groups: tuple[GroupConfig, ...] = setting((), "parameter groups; the first match applies")

    def __post_init__(self):
        if self.decay in ("cosine", "linear", "wsd") and not 0 <= self.min_lr <= self.peak_lr:
            raise BadInput(f"min_lr={self.min_lr:g} must be between 0 and peak_lr={self.peak_lr:g}")
        for name in ("b1", "b2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if not 0 < self.decay_fraction <= 1:
            raise BadInput(f"decay_fraction={self.decay_fraction} must be above 0 and at most 1")
        self.parse_factors()
        if self.offload_moments and self.name == "sgd" and self.b1 == 0:
            raise BadInput("offload_moments=true needs moments, but sgd with b1=0 has none; remove offload_moments")
        if self.moment_dtype != "float32" and self.name == "sgd" and self.b1 == 0:
            raise BadInput(f"moment_dtype={self.moment_dtype!r} needs moments, but sgd with b1=0 has none; remove it")
        if self.moment_dtype != "float32" and self.offload_moments:
            raise BadInput(
                f"moment_dtype={self.moment_dtype!r} cannot be combined with offload_moments=true; remove one of them"
            )
        for name, rules in (("offload_moments", WHOLE_TENSORS), ("offload_params", NEED_PARAMETERS)):
            if getattr(self, name) and self.name in rules:
                raise BadInput(f"{name} does not support name={self.name!r}, which needs whole tensors; remove {name}")
        if self.qk_clip is not None and self.qk_clip <= 0:
            raise BadInput(f"qk_clip={self.qk_clip} must be above 0; use none to disable it")
        for name in ("weight_decay", "clip_norm", "eps"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must not be negative")

    def parse_factors(self) -> list[tuple[str, float]]:
        """Returns factors as (amount of training, factor). Raises BadInput for other formats."""
        found = []
        for rule in self.factors:
            when, arrow, factor = rule.partition(ARROW)
            try:
                found.append((when.strip(), float(factor)))
            except ValueError:
                raise BadInput(
                    f"{rule!r} in factors must have the form 'WHEN{ARROW}FACTOR', such as '80%=>0.316'"
                ) from None
            units.parse("factors", when.strip())
            if not 0 <= found[-1][1] < float("inf"):
                raise BadInput(f"factors has {rule!r}, but factors must be finite and at least 0")
        return found
