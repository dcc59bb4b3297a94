"""Coordinate check of muP (arXiv:2203.03466, appendix D.1) for models that differ only in width.

Measures the change of each kind of activation in a few steps. Under muP, the changes do not depend on the width.

B batch  T query position  S key position  D embed  N query heads  K kv heads  G query heads per kv head  H head dim
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.build import Program, make_program
from jaxscale.config import RunConfig
from jaxscale.core.batch import Batch
from jaxscale.core.config import MeshConfig
from jaxscale.core.models.layers import StackedModel
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.model import unembed
from jaxscale.core.recorder import ACTIVATION, ATTENTION, MLP, Recorder
from jaxscale.program.budget import Budget
from jaxscale.system.exits import BadInput

EMBEDDING, SCORES, LOGITS = "embedding", "scores", "logits"
KINDS = (EMBEDDING, SCORES, ATTENTION, MLP, ACTIVATION, LOGITS)  # ACTIVATION: the residual stream after a layer


class Coordinate(NamedTuple):
    """A row of the table. Values are means over layers, positions, entries and seeds."""

    kind: str  # one of KINDS
    width: int
    step: int  # number of updates
    size: float  # mean |activation|
    change: float  # mean |activation - activation before the first step|, on the same tokens


class ArrayRecorder(Recorder):
    """Records the activations of each layer, for a model on one device."""

    def __init__(self):
        self.layer, self.stacks = {}, []

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Wraps `attend` to record the scores of its queries and keys."""

        def recorded_attend(q_BTNH, k_BSKH, *args, **kwargs):
            (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
            q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
            self.layer[SCORES] = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH) * H**-0.5
            return attend(q_BTNH, k_BSKH, *args, **kwargs)

        return recorded_attend

    def sow(self, name: str, x_BTD: jax.Array) -> jax.Array:
        """Records x_BTD and returns it."""
        self.layer[name] = x_BTD
        return x_BTD

    def end_layer(self, x_BTD: jax.Array) -> dict[str, jax.Array]:
        """Returns the activations of the layer."""
        seen, self.layer = self.layer | {ACTIVATION: x_BTD}, {}
        return seen

    def end_stack(self, seen: dict[str, jax.Array]) -> None:
        """Records the activations of a stack, with a leading axis of layers."""
        self.stacks.append(seen)


def coordinate_check(
    cfg: RunConfig, widths: Sequence[int], steps: int = 3, seeds: Sequence[int] = (0,)
) -> list[Coordinate]:
    """Returns the table for each width after each of `steps` steps on one batch of random tokens.

    Runs on one device in float32, with optim.peak_lr from the first step. Raises BadInput for a model other than llama,
    or for a width at which a model size is not an integer.
    """
    table = []
    for width in widths:
        program = make_width_program(at_width(cfg, width), steps)
        measure = jax.jit(functools.partial(measure_changes, program))
        by_seed = [changes(program, measure, steps, seed) for seed in seeds]
        means = np.mean(by_seed, axis=0)  # [steps, kinds, 2]
        table += [
            Coordinate(kind, width, step, *map(float, means[step - 1, i]))
            for i, kind in enumerate(KINDS)
            for step in range(1, steps + 1)
        ]
    return table


def slopes(table: Sequence[Coordinate], step: int, of: str = "change") -> dict[str, float]:
    """Returns {kind: slope of the log of a column over log(width)} after a step. of: column, 'change' or 'size'."""
    at = {kind: [row for row in table if row.kind == kind and row.step == step] for kind in KINDS}
    logs = lambda values: np.log(np.maximum(np.array(values, float), np.finfo(float).tiny))
    line = lambda rows: np.polyfit(logs([row.width for row in rows]), logs([getattr(row, of) for row in rows]), 1)
    return {kind: float(line(rows)[0]) for kind, rows in at.items()}


def at_width(cfg: RunConfig, width: int) -> RunConfig:
    """Returns the config with embed_dim=width. Scales mlp_dim and the heads (or head_dim, with mup.base_head_dim)."""
    model = cfg.model
    if not isinstance(model, LlamaConfig):
        raise BadInput(f"model.name={model.name!r}: the coordinate check supports only model.name='llama'")
    in_heads = model.mup is None or model.mup.base_head_dim is None
    growing = ("num_heads", "num_kv_heads") if in_heads else ("head_dim",)
    sizes = {name: getattr(model, name) for name in ("mlp_dim", *growing)}
    grown: dict[str, Any] = {name: scaled(name, size, model.embed_dim, width) for name, size in sizes.items()}
    if (experts := model.experts) is not None:
        dims = {name: getattr(experts, name) for name in ("mlp_dim", "shared_dim")}
        dims = {name: scaled(f"experts.{name}", size, model.embed_dim, width) for name, size in dims.items()}
        grown["experts"] = dataclasses.replace(experts, **dims)
    model = dataclasses.replace(model, embed_dim=width, compute_dtype="float32", **grown)
    train = dataclasses.replace(cfg.train, num_microbatches=1)
    optim = dataclasses.replace(cfg.optim, decay="constant", warmup_tokens=0)
    return dataclasses.replace(cfg, model=model, train=train, optim=optim, mesh=MeshConfig())


def scaled(name: str, size: int, embed_dim: int, width: int) -> int:
    """Returns `size`, scaled from embed_dim to `width`. Raises BadInput unless the result is an integer."""
    if size * width % embed_dim:
        would = f"model.{name}={size} at embed_dim={embed_dim} would become {size * width / embed_dim:g}"
        raise BadInput(f"width={width}: {would}, which is not an integer; choose a different width")
    return size * width // embed_dim


def changes(program: Program, measure: Callable[..., jax.Array], steps: int, seed: int) -> np.ndarray:
    """Returns the size and change of each kind after each step, float[steps, kinds, 2]. measure: measure_changes()."""
    cfg, ones_BT = program.cfg, np.ones((program.cfg.rows_per_step, program.cfg.seq_len), np.int32)
    tokens_BT = np.random.default_rng(seed).integers(0, cfg.model.vocab_size, (cfg.rows_per_step, cfg.seq_len + 1))
    tokens_BT, positions_BT = tokens_BT.astype(np.int32), np.cumsum(ones_BT, axis=1, dtype=np.int32) - 1
    batch = Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], positions_BT, ones_BT, ones_BT.astype(np.float32))
    state = make_width_program(dataclasses.replace(cfg, seed=seed), steps).init()
    before = jax.tree.map(jnp.copy, state.params)  # the step donates its state
    results = []
    for _ in range(steps):
        state, _ = program.train_step(state, batch)
        results.append(measure(before, state.params, batch))
    return np.array(jax.device_get(results))


def make_width_program(cfg: RunConfig, steps: int) -> Program:
    """Returns the program of the config on one device, without warmup."""
    tokens = cfg.tokens_per_step
    return make_program(cfg, Budget(tokens, steps * tokens, steps, 0), jax.devices()[:1])


def measure_changes(program: Program, before: Any, after: Any, batch: Batch) -> jax.Array:
    """Returns the size and change of each kind of activation, float32[kinds, 2]. before, after: parameters."""
    old, new = (activations(program, params, batch) for params in (before, after))
    mean = lambda arrays: sum(jnp.sum(jnp.abs(array)) for array in arrays) / sum(array.size for array in arrays)
    differences = lambda kind: [a - b for a, b in zip(new[kind], old[kind], strict=True)]
    return jnp.array([[mean(new[kind]), mean(differences(kind))] for kind in KINDS])


def activations(program: Program, params: Any, batch: Batch) -> dict[str, list[jax.Array]]:
    """Returns {kind: arrays of activations, one per stack of layers}."""
    recorder = ArrayRecorder()
    model = program.model.merge(params, recorder=recorder)
    assert isinstance(model, StackedModel), "at_width() rejects models other than llama"
    rows = batch.tokens, batch.positions, batch.segment_ids
    logits_BTV = unembed(model, model.hidden(*rows))
    by_stack = {name: [stack[name] for stack in recorder.stacks] for name in (SCORES, ATTENTION, MLP, ACTIVATION)}
    return by_stack | {EMBEDDING: [model.embed_tokens(*rows)], LOGITS: [logits_BTV]}
