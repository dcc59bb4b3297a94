"""Settings of muP, the maximal update parametrisation: what was tuned on a narrow model holds for a wide one like it.

Its rules are those of arXiv:2203.03466, tables 3 and 8; of depth, those of arXiv:2505.01618. docs/explanation/mup.md
has them in one table. All factors are 1 where the model has the base's sizes.
"""

import dataclasses
import re

from jaxscale.models.config import ModelConfig
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.units import or_list

STACKED = re.compile(r"(dense_)?blocks\.(\d+\.)?")  # how the names of a block's parameters begin
# Adam and Lion move every entry of a matrix by about the rate; SGD by the rate times the gradient, which shrinks with
# the width. What moves a matrix in another way needs a rule of its own.
ENTRYWISE = ("adamw", "lion")
OPTIMIZERS = (*ENTRYWISE, "sgd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MupConfig:
    """The sizes of the model that rates were tuned on (arXiv:2203.03466). All other widths grow with embed_dim."""

    base_dim: int = setting(help="its embed_dim; mlp_dim and the heads, or their size, are as many times as large here")
    base_head_dim: int | None = setting(None, "its head_dim; none: as here, and this model has more heads of that size")
    base_layers: int | None = setting(
        None, "its num_layers; what a block adds is then scaled by depth (arXiv:2505.01618); none: no rule of depth"
    )

    def __post_init__(self):
        for name in ("base_dim", "base_head_dim", "base_layers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadInput(f"{name}={value} must be at least 1")


@dataclasses.dataclass(frozen=True)
class Scales:
    """What muP multiplies with in a model of some size: each is 1 at the size of the base, and without muP."""

    width: float = 1.0  # embed_dim over that of the base
    head: float = 1.0  # the same of head_dim
    depth: float = 1.0  # the same of num_layers, or 1 where no rule of depth is wished for

    @property
    def output(self) -> float:
        """Of logits: their sum over the width has correlated terms once something is learned."""
        return 1 / self.width

    @property
    def scores(self) -> float:
        """Of attention's scores, besides 1 / sqrt(head_dim): together sqrt(base_head_dim) / head_dim."""
        return self.head**-0.5

    @property
    def residual(self) -> float:
        """Of what a block adds to the residual stream."""
        return 1 / self.depth

    @property
    def router_std(self) -> float:
        """Of a router's initial weights, besides 1 / sqrt(embed_dim): it maps the width to a fixed number of experts,
        as output weights do."""
        return self.width**-0.5

    @property
    def eps(self) -> float:
        """Of Adam's eps, which must shrink as gradients do (arXiv:2505.01618, table 1)."""
        return 1 / (self.width * self.depth)


def scales_of(model: ModelConfig) -> Scales:
    """The model's own, all 1 where it has no muP."""
    mup: MupConfig | None = getattr(model, "mup", None)
    if mup is None:
        return Scales()
    return Scales(
        width=model.embed_dim / mup.base_dim,
        head=model.head_dim / (mup.base_head_dim or model.head_dim),
        depth=model.num_layers / (mup.base_layers or model.num_layers),
    )


def rate_multiplier(model: ModelConfig, optimizer: str, name: str) -> float:
    """By what muP multiplies the learning rate of the parameter with this name ('blocks.attention.wq').

    Matrices whose inputs grow in number have a smaller rate with Adam (table 8); with SGD, whose steps follow the
    gradient, it is embeddings, norms, biases and the head that have a larger one.
    """
    scales, inner = scales_of(model), STACKED.sub("", name, count=1)
    matrices = model.matrices() | model.expert_matrices()
    if optimizer in ENTRYWISE:
        return 1 / scales.width if inner in matrices else 1.0
    if inner in matrices:
        return 1 / scales.width if inner == "mlp.router" else 1.0
    of_each_head = inner in ("attention.q_norm", "attention.k_norm") and getattr(model, "qk_norm_over", "") == "head"
    return scales.head if of_each_head else scales.width


def check_mup(model: ModelConfig, optimizer: str, adapters: bool) -> None:
    """Raises BadInput for what muP has no rule for here."""
    mup: MupConfig | None = getattr(model, "mup", None)
    if mup is None:
        return
    if optimizer not in OPTIMIZERS:
        raise BadInput(
            f"model.mup has no learning rates for optim.name={optimizer!r}; use {or_list(OPTIMIZERS)}, or leave it out"
        )
    if optimizer == "sgd" and mup.base_layers is not None:
        raise BadInput("model.mup.base_layers: its rule is one of AdamW, and optim.name='sgd'; leave base_layers out")
    if adapters:
        raise BadInput(
            "lora.rank cannot go with model.mup, which has no rule for adapters; export the model with jaxscale "
            "convert, bring it in again without muP, and train adapters on that"
        )


def folded(model: ModelConfig) -> dict[str, float]:
    """{name of a parameter, within its layer where it is in one: what its weights are multiplied with} to have the same
    model without muP. Only what is not 1."""
    if getattr(model, "mup", None) is None:
        return {}
    scales = scales_of(model)
    own = {"final_norm": scales.output}
    of_queries = ("q_norm",) if model.qk_norm else ("wq", "bias_q")
    own |= {f"attention.{name}": scales.scores for name in of_queries}
    added = ("attention_out_norm", "mlp_out_norm")
    if getattr(model, "norm_placement", "before") == "before":
        added = ("attention.wo", "attention.bias_o", "mlp.down", "mlp.shared.down")
    own |= {name: scales.residual for name in added}
    return {name: factor for name, factor in own.items() if factor != 1.0}


def without_mup(model: ModelConfig) -> ModelConfig:
    """The config of the same model whose weights are multiplied with folding_factor()."""
    return model if getattr(model, "mup", None) is None else dataclasses.replace(model, mup=None)


def folding_factor(model: ModelConfig, name: str) -> float:
    """What a parameter with this name ('blocks/attention/wq') is multiplied with to have the same model without muP."""
    return folded(model).get(STACKED.sub("", name.replace("/", "."), count=1), 1.0)
