"""Settings for different sizes and shapes of a config's model, with a learning rate for each."""

import dataclasses
import math
from typing import Any

from jaxscale.config import RunConfig
from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.config import ModelConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.tools.lab.rate import RATE, floor_of
from jaxscale.tools.lab.trial import Base
from jaxscale.tools.planning.scaling import rate_over_width

SMALL_WIDTH = 8  # widths of small models are multiples of this; of large models, of a group of query heads
LARGE = 3  # width of a large model in groups, so that one group changes the width by at most a third
AROUND = 1.3  # largest width to try, relative to the width with equal FLOPs at that depth


def check_varied(model: AnyModelConfig) -> LlamaConfig:
    """Returns the config of a dense Llama. Raises BadInput for other models and for latent attention."""
    if not isinstance(model, LlamaConfig) or model.experts is not None or model.latent is not None:
        kind = "models with experts or latent attention" if isinstance(model, LlamaConfig) else repr(model.name)
        raise BadInput(f"this experiment does not support {kind}; use a dense Llama, model.name='llama'")
    return model


def train_tokens_of(base: Base) -> int:
    """Returns cfg.train_tokens. Raises BadInput if it is not an integer, or if the config has a ramp."""
    tokens = base.cfg.train_tokens
    if base.cfg.seq_len_ramp or base.cfg.batch_ramp:
        raise BadInput("this experiment does not support ramps; remove seq_len_ramp and batch_ramp")
    if not isinstance(tokens, int):
        raise BadInput(f"train_tokens={tokens!r} must be an integer in this experiment, such as 20000000")
    return tokens


def head_sizes(model: LlamaConfig, heads: int) -> dict[str, Any]:
    """Returns settings for `heads` query heads, with about the config's ratio of KV heads to query heads."""
    groups = max(1, round(model.num_kv_heads * heads / model.num_heads))
    return {"num_heads": heads, "num_kv_heads": next(g for g in range(groups, 0, -1) if heads % g == 0)}


def as_settings(cfg: RunConfig, model: dict[str, Any]) -> dict[str, Any]:
    """Returns {dotted name: value}, including the learning rate, which depends on the width unless muP is used."""
    base = check_varied(cfg.model)
    times = model["embed_dim"] / base.embed_dim
    rate = cfg.optim.peak_lr * (1.0 if base.mup is not None else rate_over_width(cfg.optim.name, times))
    return {f"model.{name}": value for name, value in model.items()} | {RATE: rate} | floor_of(cfg.optim, rate)


def wider(cfg: RunConfig, times: float) -> dict[str, Any]:
    """Returns settings for a model with `times` the width. Raises BadInput if the model is not supported."""
    model = check_varied(cfg.model)
    heads = max(1, round(model.num_heads * times))
    factor = heads / model.num_heads
    sizes = {name: round(getattr(model, name) * factor) for name in ("embed_dim", "mlp_dim")}
    return as_settings(cfg, head_sizes(model, heads) | sizes)


def larger(cfg: RunConfig, times: float) -> dict[str, Any]:
    """Returns settings for a model with `times` the width and depth. Raises BadInput if the model is not supported."""
    settings = wider(cfg, times)
    factor = settings["model.num_heads"] / cfg.model.num_heads
    return settings | {"model.num_layers": max(1, round(cfg.model.num_layers * factor))}


def inner_flops(model: ModelConfig, seq_len: int) -> float:
    """Returns the training FLOPs per token of the blocks, without embeddings and output projection."""
    return model.flops_per_token(seq_len) - 6 * model.vocab_size * model.embed_dim


def shaped(cfg: RunConfig, layers: int) -> dict[str, Any]:
    """Returns settings for a model with `layers` layers and the same FLOPs per token in its blocks.

    The MLP size follows from the width. Selects the width with the ratio of MLP size to width that is closest to the
    config's. Raises BadInput if no width fits, or for an unsupported model.
    """
    model = check_varied(cfg.model)
    wanted, ideal = inner_flops(model, cfg.seq_len), model.embed_dim * math.sqrt(model.num_layers / layers)
    shared = model.head_dim * (model.num_heads // model.num_kv_heads)
    step = shared if ideal >= LARGE * shared else SMALL_WIDTH
    found = {}
    for width in range(step, round(AROUND * ideal) + step, step):
        sizes = head_sizes(model, max(1, round(model.num_heads * width / model.embed_dim)))
        head = model.head_dim * model.num_heads / model.embed_dim * width / sizes["num_heads"]
        sizes |= {"num_layers": layers, "embed_dim": width, "head_dim": max(2, 2 * round(head / 2))}
        least, next_one = (inner_flops(dataclasses.replace(model, **sizes, mlp_dim=m), cfg.seq_len) for m in (1, 2))
        mlp = round(1 + (wanted - least) / (next_one - least))
        if mlp > 0:
            off = abs(math.log(mlp / width * model.embed_dim / model.mlp_dim))
            found[off] = sizes | {"mlp_dim": mlp}
    if not found or min(found) > math.log(2):
        raise BadInput(
            f"no width gives {layers} layers as many FLOPs as the config's {model.num_layers} layers of width "
            f"{model.embed_dim}; pass other --sizes, or use a larger model"
        )
    return as_settings(cfg, found[min(found)])
