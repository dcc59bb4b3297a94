"""Reduces a config to a small model of the same kind, for checks and experiments on a laptop.

Unchanged: the kind of model and its options, the vocabulary, the ratio of query to key-value heads, and up to 2
microbatches. Reduced: layers, width, number and size of heads, sequence length, and sequences per batch.
"""

import dataclasses
import json
from collections.abc import Collection

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.kernels.hardware import host_memory_bytes
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.checkpoint.config import ExportConfig
from jaxscale.runtime.data.checks import check_data
from jaxscale.runtime.sampling.config import SampleConfig
from jaxscale.settings.unread import as_read
from jaxscale.tools.planning.scaling import rate_over_width

LARGE_PARAMS = 50_000_000
LARGE_BATCH_TOKENS = 65_536
STATE_BYTES = 16  # per parameter: float32 value, gradient and two moments
SMALL_LAYERS, SMALL_EMBED, SMALL_HEAD_DIM, SMALL_SEQ_LEN, SMALL_ROWS = 2, 128, 32, 64, 8
SMALL_HEADS = 8  # key-value heads; divisible by a tensor axis of 8


def is_large(cfg: RunConfig, copies: int) -> bool:
    """Returns True if the parameters, the batch or `copies` of the state are too large for a laptop."""
    params = cfg.model.num_params
    state = STATE_BYTES * params * copies
    return params > LARGE_PARAMS or cfg.tokens_per_step > LARGE_BATCH_TOKENS or 2 * state > host_memory_bytes()


def shrink(cfg: RunConfig, *, layers: int | None = None, small: bool = False, keep: Collection[str] = ()) -> RunConfig:
    """Returns cfg with at most `layers` layers. If `small`, also reduces width, batch and sequence length.

    layers: default: 2 if `small`, else no limit. keep: settings to leave unchanged, unless they depend on reduced ones.
    """
    layers = SMALL_LAYERS if layers is None and small else layers
    num_layers = min(layers or cfg.model.num_layers, cfg.model.num_layers)
    model = dataclasses.replace(cfg.model, num_layers=num_layers)
    if not small:
        return dataclasses.replace(cfg, model=model)
    seq_len = cfg.seq_len if "seq_len" in keep else min(cfg.seq_len, SMALL_SEQ_LEN)
    parts = cfg.train.num_microbatches if "train.num_microbatches" in keep else min(cfg.train.num_microbatches, 2)
    return dataclasses.replace(
        cfg,
        model=small_model(model, keep),
        seq_len=seq_len,
        batch_tokens=SMALL_ROWS * parts * seq_len,
        batch_ramp=(),
        seq_len_ramp=(),
        train=dataclasses.replace(cfg.train, num_microbatches=parts),
    )


def small_model(cfg: AnyModelConfig, keep: Collection[str]) -> AnyModelConfig:
    """Returns the model with a limit on embed_dim and on key-value heads. Settings in `keep` are unchanged."""

    def at_most(name: str, most: int) -> int:
        return getattr(cfg, name) if f"model.{name}" in keep else min(getattr(cfg, name), most)

    width = at_most("embed_dim", SMALL_EMBED)
    if not isinstance(cfg, LlamaConfig):
        heads = at_most("num_heads", SMALL_HEADS)
        return dataclasses.replace(cfg, num_heads=heads, embed_dim=width // heads * heads)
    kv_heads, latent = at_most("num_kv_heads", SMALL_HEADS), cfg.latent
    if latent is not None:
        sizes = {name: min(getattr(latent, name), SMALL_HEAD_DIM) for name in ("nope_dim", "rope_dim", "value_dim")}
        ranks = {name: min(getattr(latent, name), width) for name in ("q_rank", "kv_rank")}
        latent = dataclasses.replace(latent, **sizes, **ranks)
    return dataclasses.replace(
        cfg,
        latent=latent,
        embed_dim=width,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * (cfg.num_heads // cfg.num_kv_heads),
        head_dim=at_most("head_dim", SMALL_HEAD_DIM) if latent is None else latent.head_dim,
        mlp_dim=min(cfg.mlp_dim, max(8, cfg.mlp_dim * width // cfg.embed_dim // 8 * 8)),
    )


def with_scaled_training(old: RunConfig, new: RunConfig, keep: Collection[str]) -> RunConfig:
    """Returns `new`, a smaller model than `old`, with the tokens per parameter and the warmup fraction of `old`.

    Learning rates are scaled to the new width. Settings in `keep` do not change. `old` is the config without overrides.
    """
    tokens, optim, changed = old.train_tokens, new.optim, {}
    if isinstance(tokens, int) and "train_tokens" not in keep:
        steps = max(1, round(tokens * new.model.num_params / old.model.num_params / new.tokens_per_step))
        changed["train_tokens"] = steps * new.tokens_per_step
    if isinstance(tokens, int) and "optim.warmup_tokens" not in keep:
        budget = resolve_budget(old, None)
        optim = dataclasses.replace(optim, warmup_tokens=f"{100 * budget.warmup_steps / budget.total_steps:.3g}%")
    if "optim.peak_lr" not in keep and getattr(new.model, "mup", None) is None:
        scale = rate_over_width(optim.name, new.model.embed_dim / old.model.embed_dim)
        min_lr = optim.min_lr if "optim.min_lr" in keep else scale * optim.min_lr
        optim = dataclasses.replace(optim, peak_lr=scale * optim.peak_lr, min_lr=min_lr)
    return dataclasses.replace(new, optim=optim, **changed)


def as_overrides(old: RunConfig, new: RunConfig) -> dict[str, str]:
    """Returns the command-line overrides that change `old` into `new`."""
    was, now = (schema.flatten(as_read(cfg)) for cfg in (old, new))
    changed = {name: value for name, value in now.items() if name not in was or was[name] != value}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in changed.items()}


def use_available_data(cfg: RunConfig) -> tuple[RunConfig, list[str]]:
    """Returns (cfg, []) if its data can be read, or (cfg with synthetic tokens, problems)."""
    if problems := check_data(cfg.data, cfg.seq_len, cfg.model.vocab_size):
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, name="synthetic"))
    return cfg, problems


def without_extras(cfg: RunConfig) -> RunConfig:
    """Returns cfg without samples and exports."""
    return dataclasses.replace(cfg, sample=SampleConfig(), export=ExportConfig())


def changes_text(old: RunConfig, new: RunConfig) -> list[str]:
    """Returns a line for each changed setting, or a line that reports no change."""
    changed = schema.difference(schema.to_dict(old), schema.to_dict(new))
    lines = [f"  {name}: {was!r} -> {now!r}" for name, (was, now) in changed.items()]
    return ["changed for this check:", *lines] if lines else ["the config is unchanged"]
