"""Settings of LoRA and of muP. With muP, the maximal update parametrisation, hyperparameters tuned on a narrow model
transfer to a wide one.

muP's rules: arXiv:2203.03466, tables 3 and 8; for depth, arXiv:2505.01618. docs/explanation/mup.md has them in one
table. All factors are 1 at the base model's sizes.
"""

import dataclasses
import re
from collections.abc import Collection

from jaxscale.core.models.config import BLOCKS, ModelConfig
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

STACKED = re.compile(r"(dense_)?blocks\.(\d+\.)?")  # prefix of a block's parameters
# Adam and Lion update every entry by about the rate; SGD by the rate times the gradient, which shrinks with the width.
# Other optimizers would need other rules.
ENTRYWISE = ("adamw", "lion")
OPTIMIZERS = (*ENTRYWISE, "sgd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MupConfig:
    """Sizes of the base model, where rates were tuned (arXiv:2203.03466). All other widths must scale with
    embed_dim."""

    base_dim: int = setting(help="embed_dim of the base; mlp_dim, and num_heads or head_dim, must scale with it")
    base_head_dim: int | None = setting(None, "head_dim of the base; none: the same as here, with more heads")
    base_layers: int | None = setting(
        None, "num_layers of the base; scales blocks' outputs by depth (arXiv:2505.01618); none: no depth rule"
    )

    def __post_init__(self):
        for name in ("base_dim", "base_head_dim", "base_layers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadInput(f"{name}={value} must be at least 1")


@dataclasses.dataclass(frozen=True)
class MupScales:
    """Size ratios of the model to the base, 1 without muP, and the multipliers derived from them."""

    width: float = 1.0  # embed_dim over that of the base
    head: float = 1.0  # the same of head_dim
    depth: float = 1.0  # the same of num_layers, or 1 without the depth rule

    @property
    def output(self) -> float:
        """Multiplier of logits: their sum over the width has correlated terms after training."""
        return 1 / self.width

    @property
    def scores(self) -> float:
        """Multiplier of attention scores besides 1 / sqrt(head_dim): together sqrt(base_head_dim) / head_dim."""
        return self.head**-0.5

    @property
    def residual(self) -> float:
        """Multiplier of a block's additions to the residual stream."""
        return 1 / self.depth

    @property
    def router_std(self) -> float:
        """Multiplier of a router's initial std besides 1 / sqrt(embed_dim): like output weights it maps the width to
        a fixed size."""
        return self.width**-0.5

    @property
    def eps(self) -> float:
        """Multiplier of Adam's eps, which must shrink as gradients do (arXiv:2505.01618, table 1)."""
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
    """Returns muP's factor of the learning rate of the parameter with this name ('blocks.attention.wq').

    Matrices whose fan-in grows have a smaller rate with Adam (table 8); with SGD, whose updates are proportional to
    gradients, embeddings, norms, biases and the head have a larger one.
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
    """LoRA: trains a correction A B of each target matrix and nothing else. B starts as 0, so the first loss is the
    base's."""

    rank: int = setting(0, "rank of A and B; 0: no adapters, all parameters are trained")
    alpha: float = setting(16.0, "the correction is multiplied by alpha / rank")
    targets: tuple[str, ...] = setting(
        (r"attention\.w[qkvo]$", r"mlp\.(gate|up|down)$"),
        "regexes searched in the names of the blocks' matrices, such as blocks.attention.wq; matches get adapters, one "
        "per expert",
    )

    def __post_init__(self):
        if self.rank < 0:
            raise BadInput(f"rank={self.rank} must be 1 or more, or 0 for no adapters")
        if self.alpha <= 0:
            raise BadInput(f"alpha={self.alpha} must be above 0")
        if self.rank and not self.targets:
            raise BadInput("targets is empty, and rank is above 0; name matrices to adapt")
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"targets has {pattern!r}, which is not a regular expression: {error}") from None

    @property
    def on(self) -> bool:
        """True if there are adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor of the correction."""
        return self.alpha / self.rank if self.rank else 0.0


NO_LORA = LoraConfig()


def adapted_matrices(cfg: LoraConfig, names: Collection[str]) -> set[str]:
    """Returns the matrices that get adapters. Raises BadInput for a target that matches none."""
    for pattern in cfg.targets:
        if not any(re.search(pattern, name) for name in names):
            raise BadInput(f"lora.targets has {pattern!r}, which matches no matrix; use {', '.join(sorted(names))}")
    return {name for name in names if any(re.search(pattern, name) for pattern in cfg.targets)}


def lora_params(model: ModelConfig, cfg: LoraConfig, *, active: bool = False) -> int:
    """Returns the number of parameters in a model's adapters. active: those used per token."""
    experts = model.experts
    num_experts = 0 if experts is None else experts.chosen if active else experts.number
    # Routers have no adapters: top-k depends on their last bits.
    plain = {name: sum(sizes) for name, sizes in model.matrices().items() if not name.endswith(".router")}
    matrices = plain | {name: num_experts * sum(sizes) for name, sizes in model.expert_matrices().items()}
    matrices = {f"{BLOCKS}.{name}": size for name, size in matrices.items()}
    layers = model.layer_stacks.get(BLOCKS, 0)
    return cfg.rank * layers * sum(matrices[name] for name in adapted_matrices(cfg, matrices))


def lora_flops(model: ModelConfig, cfg: LoraConfig) -> float:
    """Returns added FLOPs per token: 6 per adapter parameter, minus 2 per frozen parameter, which has no gradient."""
    return 6 * lora_params(model, cfg, active=True) - 2 * model.matmul_params
