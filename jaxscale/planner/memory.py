"""Bytes per device that a training step needs: the state exactly, activations as an estimate."""

import dataclasses
import math
from typing import Any

import jax

from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.models import num_params
from jaxscale.models.llama import LlamaConfig

NUM_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}


@dataclasses.dataclass(frozen=True)
class MemoryNeed:
    """Bytes on one device."""

    params: int
    moments: int
    grads: int
    activations: int  # an estimate: XLA decides

    @property
    def state(self) -> int:
        """What no batch size can lower."""
        return self.params + self.moments + self.grads

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.activations


def memory_need(program: Program) -> MemoryNeed:
    """Bytes on each device at the peak of a step: float32 parameters, moments and gradients, and activations."""
    state = program.abstract_state
    params = shard_bytes(state.params)
    # Gradients are cut like the parameters, or more finely (zero2): an upper bound.
    return MemoryNeed(params, shard_bytes(state.opt_state), params, activation_bytes(program))


def least_memory(cfg: RunConfig, num_devices: int) -> MemoryNeed:
    """A lower bound for a mesh that cannot be made: the state shared evenly by all devices."""
    params = 4 * num_params(cfg.model) // num_devices
    return MemoryNeed(params, NUM_MOMENTS[cfg.optim.name] * params, params, 0)


def shard_bytes(abstract: Any) -> int:
    """Bytes of one device's parts of a tree of ShapeDtypeStructs with shardings."""
    leaves = jax.tree.leaves(abstract)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def activation_bytes(program: Program) -> int:
    """What the backward pass keeps of one microbatch on one device, and the logits of one chunk of its loss.

    Counted for each block: the residual stream and its normalised forms (4 D), attention's inputs and output, and the
    MLP's inner arrays; with remat only what the policy keeps, and one block whole.
    """
    cfg, shape = program.cfg, program.mesh.shape
    model = cfg.model
    tokens = cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards * cfg.seq_len
    width = 4 if model.compute_dtype == "float32" else 2
    D, tensor = model.embed_dim, shape["tensor"]
    if isinstance(model, LlamaConfig):
        heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        inner = heads + 3 * model.mlp_dim
    else:
        inner = 4 * D + 2 * 4 * D
    whole = 4 * D + inner // tensor
    kept = {"none": whole, "dots": D + inner // tensor, "attention": 2 * D, "full": D}[model.remat]
    if program.attention == "xla" and model.remat in ("none", "dots"):  # float32 scores and probabilities of each head
        whole += 2 * (model.num_heads // tensor) * cfg.seq_len * 4 // width
        kept = whole if model.remat == "none" else kept
    layers = tokens * width * (model.num_layers * kept + (whole if model.remat != "none" else 0))
    logits = (
        min(tokens, model.loss_chunk_tokens) * model.vocab_size // tensor * 4 * 3
    )  # logits, their exp, their gradient
    return layers + logits
