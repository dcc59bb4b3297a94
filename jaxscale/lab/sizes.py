"""Models of other sizes and shapes from one config, as settings, and the rate that goes with them."""

import dataclasses
import math
from typing import Any

from jaxscale.config import RunConfig
from jaxscale.lab.rate import RATE, floor_of
from jaxscale.lab.trial import Base
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import ModelConfig
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.planning.scaling import rate_over_width
from jaxscale.system.exits import BadInput

SMALL_WIDTH = 8  # widths of small models are multiples of it; those of large ones of heads that share keys and values
LARGE = 3  # times those heads, from which on a model is large: as many more or less are a third of the width or less
AROUND = 1.3  # times the width that the depth alone would ask for, and as much below: where a shape is looked for


def check_varied(model: AnyModelConfig) -> LlamaConfig:
    """Returns the model's settings. Raises BadInput if it is not a dense decoder of the Llama kind."""
    if not isinstance(model, LlamaConfig) or model.experts is not None or model.latent is not None:
        kind = "one with experts or latent attention" if isinstance(model, LlamaConfig) else repr(model.name)
        raise BadInput(f"this experiment varies the size of dense models of model.name='llama', and this is {kind}")
    return model


def train_tokens_of(base: Base) -> int:
    """The tokens of the config's own run. Raises BadInput where they are not told as a number, or lie in a ramp."""
    tokens = base.cfg.train_tokens
    if base.cfg.seq_len_ramp or base.cfg.batch_ramp:
        raise BadInput("laws are of runs of one size of row and batch; leave seq_len_ramp and batch_ramp out")
    if not isinstance(tokens, int):
        raise BadInput(f"this experiment needs train_tokens as a number, not {tokens!r}")
    return tokens


def of_heads(model: LlamaConfig, heads: int) -> dict[str, Any]:
    """Settings of so many heads, with as many of keys and values for each as before."""
    groups = max(1, round(model.num_kv_heads * heads / model.num_heads))
    return {"num_heads": heads, "num_kv_heads": next(g for g in range(groups, 0, -1) if heads % g == 0)}


def as_settings(cfg: RunConfig, model: dict[str, Any]) -> dict[str, Any]:
    """Returns the model's settings by dotted name, and the learning rate for its width; muP scales the rate itself."""
    base = check_varied(cfg.model)
    times = model["embed_dim"] / base.embed_dim
    rate = cfg.optim.peak_lr * (1.0 if base.mup is not None else rate_over_width(cfg.optim.name, times))
    return {f"model.{name}": value for name, value in model.items()} | {RATE: rate} | floor_of(cfg.optim, rate)


def wider(cfg: RunConfig, times: float) -> dict[str, Any]:
    """The settings of a model `times` as wide, in whole heads. Raises BadInput as check_varied() does."""
    model = check_varied(cfg.model)
    heads = max(1, round(model.num_heads * times))
    factor = heads / model.num_heads
    sizes = {name: round(getattr(model, name) * factor) for name in ("embed_dim", "mlp_dim")}
    return as_settings(cfg, of_heads(model, heads) | sizes)


def larger(cfg: RunConfig, times: float) -> dict[str, Any]:
    """The settings of a model `times` as wide and as deep, in whole heads and layers. Raises as wider() does."""
    settings = wider(cfg, times)
    factor = settings["model.num_heads"] / cfg.model.num_heads
    return settings | {"model.num_layers": max(1, round(cfg.model.num_layers * factor))}


def inner_flops(model: ModelConfig, seq_len: int) -> float:
    """Operations a token of a training step in the blocks alone, without the embeddings and the head."""
    return model.flops_per_token(seq_len) - 6 * model.vocab_size * model.embed_dim


def shaped(cfg: RunConfig, layers: int) -> dict[str, Any]:
    """The settings of a model with so many layers whose blocks take as many operations a token as the config's.

    Of the widths about what that asks for, the one whose MLP is nearest to the config's own part of the width; the MLP
    then takes up what is left. Raises BadInput where none does, and as check_varied() does.
    """
    own = check_varied(cfg.model)
    wanted, ideal = inner_flops(own, cfg.seq_len), own.embed_dim * math.sqrt(own.num_layers / layers)
    shared = own.head_dim * (own.num_heads // own.num_kv_heads)
    step = shared if ideal >= LARGE * shared else SMALL_WIDTH
    found = {}
    for width in range(step, round(AROUND * ideal) + step, step):
        sizes = of_heads(own, max(1, round(own.num_heads * width / own.embed_dim)))
        head = own.head_dim * own.num_heads / own.embed_dim * width / sizes["num_heads"]
        sizes |= {"num_layers": layers, "embed_dim": width, "head_dim": max(2, 2 * round(head / 2))}
        least, next_one = (inner_flops(dataclasses.replace(own, **sizes, mlp_dim=m), cfg.seq_len) for m in (1, 2))
        mlp = round(1 + (wanted - least) / (next_one - least))
        if mlp > 0:
            off = abs(math.log(mlp / width * own.embed_dim / own.mlp_dim))
            found[off] = sizes | {"mlp_dim": mlp}
    if not found or min(found) > math.log(2):
        raise BadInput(
            f"no width gives a model of {layers} layers the operations of one of {own.num_layers} layers of width "
            f"{own.embed_dim}; take other --sizes, or a larger config"
        )
    return as_settings(cfg, found[min(found)])
