"""Settings of LoRA, and of muP (maximal update parametrisation), which transfers hyperparameters to wider models.

The rules of muP are from arXiv:2203.03466, tables 3 and 8, and for depth from arXiv:2505.01618.
docs/explanation/mup.md lists them. All factors are 1 at the sizes of the base model.
"""

import dataclasses
import re
from collections.abc import Collection

from jaxscale.core.models.config import BLOCKS, ModelConfig
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

STACKED = re.compile(r"(dense_)?blocks\.(\d+\.)?")  # prefix of a block's parameters
# Adam and Lion change every entry by about the learning rate. SGD changes it by the learning rate times the gradient,
# which decreases with the width. Other optimizers would need other rules.
ENTRYWISE = ("adamw", "lion")
OPTIMIZERS = (*ENTRYWISE, "sgd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MupConfig:
    """Sizes of muP's base model, for which learning rates are tuned (arXiv:2203.03466)."""

    base_dim: int = setting(help="embed_dim of the base; mlp_dim, and num_heads or head_dim, must scale with it")
    base_head_dim: int | None = setting(None, "head_dim of the base; none: that of this model, which has more heads")
    base_layers: int | None = setting(
        None, "num_layers of the base; scales block outputs by depth (arXiv:2505.01618); none: no depth rule"
    )

    def __post_init__(self):
        for name in ("base_dim", "base_head_dim", "base_layers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadInput(f"{name}={value} must be at least 1")


@dataclasses.dataclass(frozen=True)
class MupScales:
    """Ratios of the model's sizes to those of muP's base model, and the multipliers derived from them."""

    width: float = 1.0  # embed_dim divided by base_dim
    head: float = 1.0  # head_dim divided by base_head_dim
    depth: float = 1.0  # num_layers divided by base_layers, or 1 without the depth rule

    @property
    def output(self) -> float:
        """Multiplier of logits, which would otherwise grow with the width during training."""
        return 1 / self.width

    @property
    def scores(self) -> float:
        """Multiplier of attention scores, in addition to 1 / sqrt(head_dim)."""
        return self.head**-0.5

    @property
    def residual(self) -> float:
        """Multiplier of a block's additions to the residual stream."""
        return 1 / self.depth

    @property
    def router_std(self) -> float:
        """Multiplier of a router's initial std, in addition to 1 / sqrt(embed_dim)."""
        return self.width**-0.5

    @property
    def eps(self) -> float:
        """Multiplier of Adam's eps, which must decrease like gradients (arXiv:2505.01618, table 1)."""
        return 1 / (self.width * self.depth)


def mup_scales(model: ModelConfig) -> MupScales:
    """Returns the model's scales, all 1 without muP."""
    mup: MupConfig | None = getattr(model, "mup", None)
    if mup is None:
        return MupScales()
    return MupScales(
        width=model.embed_dim / mup.base_dim,
        head=model.head_dim / (mup.base_head_dim or model.head_dim),
        depth=model.num_layers / (mup.base_layers or model.num_layers),
    )


def learning_rate_multiplier(model: ModelConfig, optimizer: str, name: str) -> float:
    """Returns muP's learning rate multiplier for a parameter such as 'blocks.attention.wq'.

    With Adam, matrices whose fan-in grows with the width have smaller learning rates (arXiv:2203.03466, table 8). With
    SGD, embeddings, norms, biases and the head have larger learning rates.
    """
    scales, inner = mup_scales(model), STACKED.sub("", name, count=1)
    matrices = model.matrices() | model.expert_matrices()
    if optimizer in ENTRYWISE:
        return 1 / scales.width if inner in matrices else 1.0
    if inner in matrices:
        return 1 / scales.width if inner == "mlp.router" else 1.0
    per_head = inner in ("attention.q_norm", "attention.k_norm") and getattr(model, "qk_norm_over", "") == "head"
    return scales.head if per_head else scales.width


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of LoRA, which trains only a low-rank correction A B of each target matrix. B is initially 0."""

    rank: int = setting(0, "rank of A and B; 0: no adapters, all parameters are trained")
    alpha: float = setting(16.0, "the correction is multiplied by alpha / rank")
    targets: tuple[str, ...] = setting(
        (r"attention\.w[qkvo]$", r"mlp\.(gate|up|down)$"),
        "regexes searched in the names of the blocks' matrices, such as blocks.attention.wq; matching matrices get "
        "adapters, one per expert",
    )

    def __post_init__(self):
        if self.rank < 0:
            raise BadInput(f"rank={self.rank} must be at least 1, or 0 to disable adapters")
        if self.alpha <= 0:
            raise BadInput(f"alpha={self.alpha} must be above 0")
        if self.rank and not self.targets:
            raise BadInput("targets is empty, but rank is above 0; add a target, or set rank=0")
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"targets has {pattern!r}, which is not a valid regular expression: {error}") from None

    @property
    def on(self) -> bool:
        """True if the model has adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor by which corrections are multiplied."""
        return self.alpha / self.rank if self.rank else 0.0


NO_LORA = LoraConfig()


def adapted_matrices(cfg: LoraConfig, names: Collection[str]) -> set[str]:
    """Returns the matrices that get adapters. Raises BadInput for a target that matches no matrix."""
    for pattern in cfg.targets:
        if not any(re.search(pattern, name) for name in names):
            raise BadInput(f"lora.targets: {pattern!r} matches no matrix; use names among {', '.join(sorted(names))}")
    return {name for name in names if any(re.search(pattern, name) for pattern in cfg.targets)}


def lora_params(model: ModelConfig, cfg: LoraConfig, *, active: bool = False) -> int:
    """Returns the number of parameters in a model's adapters. active: whether to count only those used per token."""
    experts = model.experts
    num_experts = 0 if experts is None else experts.chosen if active else experts.number
    # Routers have no adapters, because top-k depends on the last bits of their output.
    plain = {name: sum(sizes) for name, sizes in model.matrices().items() if not name.endswith(".router")}
    matrices = plain | {name: num_experts * sum(sizes) for name, sizes in model.expert_matrices().items()}
    matrices = {f"{BLOCKS}.{name}": size for name, size in matrices.items()}
    layers = model.layer_stacks.get(BLOCKS, 0)
    return cfg.rank * layers * sum(matrices[name] for name in adapted_matrices(cfg, matrices))


def lora_flops(model: ModelConfig, cfg: LoraConfig) -> float:
    """Returns the change in FLOPs per token due to adapters: +6 per adapter parameter, -2 per frozen parameter."""
    return 6 * lora_params(model, cfg, active=True) - 2 * model.matmul_params
