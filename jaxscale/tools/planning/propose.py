"""Configs for a number of FLOPs or parameters, with shape, tokens, batch and learning rate by published rules."""

import dataclasses
import json
import math
from typing import Any

from jaxscale import units
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning import scaling

HEAD_DIM = 128
ASPECT = 128  # width over depth of Llama 2 7B (arXiv:2307.09288); the optimum is flat: arXiv:2001.08361, figure 5
VOCAB_SIZE = 32_768
SEQ_LEN = 4096
SMALL_WIDTH = 1024  # up to this width, head_dim is 64 and seq_len 2,048
LARGEST = 1e13  # largest number of parameters; more is probably a typing error


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A proposed run."""

    params: int  # exact number of parameters
    tokens: int
    flops: float  # 6 N D
    reason: str
    model: dict[str, Any]  # model settings
    seq_len: int
    rows: int  # sequences per step
    peak_lr: float
    rule: scaling.Alternative  # the optimum before rounding to whole heads
    num_microbatches: int = 1
    save_every_steps: int = 500

    @property
    def total_steps(self) -> int:
        return self.tokens // (self.rows * self.seq_len)

    def values(self) -> dict[str, Any]:
        """Returns the proposal as RunConfig settings."""
        return {
            "seq_len": self.seq_len,
            "batch_tokens": self.rows * self.seq_len,
            "train_tokens": self.tokens,
            "mesh": {"fsdp": -1},
            "train": {"num_microbatches": self.num_microbatches},
            "model": self.model,
            "optim": {"peak_lr": self.peak_lr, "min_lr": self.peak_lr / 10, "warmup_tokens": warmup(self)},
            "data": {"name": "tokens", "files": "shards/manifest.json"},
            "eval": {"every_steps": 500, "num_rows": 1024},
            "checkpoint": {"save_every_steps": self.save_every_steps, "keep_last": 3},
        }


def propose_for_flops(flops: float, reason: str) -> Proposal:
    """Returns the compute-optimal run for C = `flops`. The number of tokens is C / 6 / N."""
    if not 1.2e16 <= flops <= 6 * scaling.TOKENS_PER_PARAM * LARGEST**2:
        raise BadInput(f"{flops:.3g} FLOPs are outside the supported range, 1.2e16 to 1.2e28; check the units")
    rule = scaling.lowest_alternative(flops)
    model = find_shape(rule.params, within=0.02)
    return make_proposal(model, round(flops / 6 / shape_params(model)), rule, f"{reason}: {rule_text(rule)}")


def propose_for_size(params: float, reason: str) -> Proposal:
    """Returns a run with about `params` parameters, trained on the compute-optimal number of tokens."""
    if not 1e7 <= params <= LARGEST:
        raise BadInput(
            f"a model of {params:.3g} parameters is outside the supported range, 1e7 to 1e13; check the units"
        )
    model = find_shape(params)
    tokens = scaling.lowest_tokens(params)
    loss = scaling.fitted_loss(params, tokens)
    rule = scaling.Alternative(params, tokens, scaling.train_flops(params, tokens), loss)
    return make_proposal(model, round(scaling.lowest_tokens(shape_params(model))), rule, f"{reason}: {rule_text(rule)}")


def rule_text(rule: scaling.Alternative) -> str:
    """Returns the rule for size and tokens as text with its source."""
    if rule.loss is None:
        return f"{scaling.TOKENS_PER_PARAM:g} tokens per parameter (arXiv:2203.15556); no fit covers smaller models"
    return f"the minimum of E + A / N^a + B / D^b at 6 N D FLOPs ({scaling.BESIROGLU_SOURCE})"


def shortened(proposal: Proposal, share: float) -> Proposal:
    """Returns the run with the fraction `share` of its tokens, rounded down to whole steps (at least one)."""
    batch_tokens = proposal.rows * proposal.seq_len
    tokens = max(1, int(share * proposal.tokens) // batch_tokens) * batch_tokens
    return dataclasses.replace(proposal, tokens=tokens, flops=scaling.train_flops(proposal.params, tokens))


def make_proposal(model: dict[str, Any], tokens: int, rule: scaling.Alternative, reason: str) -> Proposal:
    """Returns the run. Batch size (below critical) and learning rate follow arXiv:2401.02954, equation 1."""
    params = shape_params(model)
    flops = scaling.train_flops(params, tokens)
    seq_len = SEQ_LEN if model["embed_dim"] > SMALL_WIDTH else SEQ_LEN // 2
    critical = scaling.critical_batch(scaling.predicted_loss(params, tokens))
    most = min(critical, tokens / 100) / seq_len  # at least 100 steps
    target = 2 ** round(math.log2(scaling.batch_by_flops(flops) / seq_len))
    rows = max(1, min(target, 2 ** math.floor(math.log2(max(1.0, most)))))
    rate = float(f"{scaling.rate_by_flops(flops):.2g}")
    return Proposal(params, tokens, flops, reason, model, seq_len, rows, rate, rule)


def warmup(proposal: Proposal) -> str:
    """Returns 2,000 steps as published. Runs below 20,000 steps use 1% of them (at least 40, at most 10%)."""
    steps = proposal.total_steps
    return "2000 steps" if steps >= 20_000 else f"{max(1, min(2000, max(40, steps // 100), steps // 10))} steps"


def find_shape(params: float, within: float = 0.06) -> dict[str, Any]:
    """Returns a Llama whose width is about 128 times its depth. within: largest difference in log(parameters)."""
    models = [config_for_depth(depth, params) for depth in range(2, 257)]
    distance = lambda model: (
        abs(math.log(shape_params(model) / params)),
        abs(math.log(model["embed_dim"] / model["num_layers"] / ASPECT)),
    )
    near = [model for model in models if distance(model)[0] < within]
    return min(near, key=lambda model: distance(model)[1]) if near else min(models, key=distance)


def config_for_depth(depth: int, params: float) -> dict[str, Any]:
    """Returns settings of a Llama with `depth` layers and about `params` parameters."""
    a, b = 12 * depth, 2 * VOCAB_SIZE
    target = (math.sqrt(b * b + 4 * a * params) - b) / (2 * a)
    head_dim = HEAD_DIM if target > SMALL_WIDTH else HEAD_DIM // 2
    heads = max(1, round(target / head_dim))
    heads = 8 * round(heads / 8) if heads >= 24 else 4 * round(heads / 4) if heads >= 8 else heads  # for mesh.tensor
    width = head_dim * heads
    mlp = 256 * max(1, round(8 / 3 * width / 256))  # SwiGLU at equal parameters (arXiv:2002.05202)
    return dict(
        name="llama", vocab_size=VOCAB_SIZE, num_layers=depth, embed_dim=width, num_heads=heads, num_kv_heads=heads,
        head_dim=head_dim, mlp_dim=mlp, remat="full",
    )  # fmt: skip


def shape_params(model: dict[str, Any]) -> int:
    """Returns the number of parameters of a Llama with these settings."""
    return LlamaConfig(**model).num_params


def config_text(proposal: Proposal, command: str) -> str:
    """Returns the text of a config file with the proposal's settings. command: command line to write in the file."""
    values = proposal.values()
    model = ", ".join(f"{name}={json.dumps(value)}" for name, value in proposal.model.items())
    split = model.index("num_heads")
    others = "".join(
        f"    c.{name} = dict({', '.join(f'{key}={json.dumps(value)}' for key, value in values[name].items())})\n"
        for name in ("mesh", "train", "optim", "data", "eval", "checkpoint")
    )
    size = f"{proposal.params:,} parameters on {units.count(proposal.tokens)} tokens"
    return f'''"""Llama of {size}. Not measured.

    python -m jaxscale.main --config=FILE --config.data.files='shards/manifest.json'

Training FLOPs: {proposal.flops:.3g} (6 N D). Generated by: {command}
Batch size and learning rate by FLOPs: arXiv:2401.02954, equation 1. Warmup and final learning rate: arXiv:2307.09288.
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens = {proposal.seq_len}, {proposal.rows} * {proposal.seq_len}
    c.train_tokens = {proposal.tokens:_}  # {proposal.tokens / proposal.params:.3g} per parameter
    c.model = dict(
        {model[:split].rstrip()}
        {model[split:]},
    )  # fmt: skip
{others}    return c
'''
