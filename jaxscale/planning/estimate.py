"""A guess at a step's memory and time from shapes alone, made in milliseconds: it decides what is worth compiling.

It ranks; it is never reported as a result. Memory comes from planning/memory.py, time from counting products and the
bytes of the collectives that the layout needs at the least.
"""

import dataclasses

from jaxscale.build import Program
from jaxscale.models.config import ATTENTION_ADDED, KEY, MLP_GATE, MLP_UP, QUERY, VALUE, ModelConfig, lora_params
from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.planning.memory import activation_bytes, activation_sizes, host_bytes, kept_names, shard_bytes
from jaxscale.planning.topology import Topology, link_domains, link_shares
from jaxscale.sharding.mesh import spanning_shape

HOST_LINK = 16e9  # bytes/s between a device and its host, assumed: PCIe 4.0 x8; only the order of guesses rests on it


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A guess, of one device and step."""

    state_bytes: int  # parameters, moments and gradients in the device's own memory
    activation_bytes: int
    compute_s: float
    link_s: float  # on all links, one after another

    def memory(self, scale: float = 1.0) -> float:
        """Bytes at the peak, with activations and temporaries `scale` times as large as guessed."""
        return self.state_bytes + scale * self.activation_bytes

    @property
    def cost(self) -> tuple[float, float]:
        """What candidates are sorted by: the time if all overlaps, then the time if nothing does."""
        return (max(self.compute_s, self.link_s), self.compute_s + self.link_s)


def estimate(program: Program, topology: Topology) -> Estimate:
    """The guess for a program. Its cfg may differ in remat and microbatches from the one it was made of."""
    cfg = program.cfg
    state = (program.abstract_state.params, program.abstract_state.opt_state, program.abstract_state.ema)
    params = shard_bytes(state[0]) + host_bytes(state[0])
    gradients = params if cfg.rules == "zero1" else 4 * cfg.model.num_params // sharing(program)
    gradients = shard_bytes(program.abstract_grads) if cfg.lora.on else gradients
    flops = cfg.flops_per_token + recomputed_flops(cfg.model, cfg.seq_len)
    passes = 2 * cfg.train.num_microbatches  # of weights to the device, forward and backward
    moved = 2 * host_bytes(state) + passes * host_bytes(state[0])  # and there and back when the step renews it
    return Estimate(
        state_bytes=shard_bytes(state) + gradients,
        activation_bytes=activation_bytes(program),
        compute_s=flops * cfg.tokens_per_step / program.mesh.size / topology.chip.peak_flops,
        link_s=link_seconds(program, topology) + moved / HOST_LINK,
    )


def sharing(program: Program) -> int:
    """Devices that share one copy of the moments."""
    return program.mesh.shape["fsdp"] * program.mesh.shape["tensor"]


def recomputed_flops(model: ModelConfig, seq_len: int) -> float:
    """Operations per token of the forward pass that the backward pass does again under the remat policy."""
    kept = kept_names(model)
    if kept is None:
        return 0.0
    sizes, D = activation_sizes(model, 1), model.embed_dim
    costs = {name: 2 * D * sizes[name] for name in (QUERY, KEY, VALUE, MLP_GATE, MLP_UP) if name in sizes}
    costs[ATTENTION_OUT] = 2 * seq_len * model.query_width  # two products over half the keys
    costs[ATTENTION_ADDED] = 2 * D * model.query_width
    held = kept | set(model.remat_offload)
    return float(model.num_layers * sum(cost for name, cost in costs.items() if name not in held))


def link_seconds(program: Program, topology: Topology) -> float:
    """Seconds that one device sends, by the layout: gathers and sums along fsdp, sums along data and tensor."""
    cfg, shape, chip = program.cfg, program.mesh.shape, topology.chip
    data, fsdp, tensor = shape["data"], shape["fsdp"], shape["tensor"]
    params, parts = cfg.model.num_params / tensor, cfg.train.num_microbatches
    reduced = 2 if cfg.train.reduce_dtype == "bfloat16" else 4
    computed = 4 if cfg.model.compute_dtype == "float32" else 2
    learned = lora_params(cfg.model, cfg.lora) / tensor if cfg.lora.on else params
    along_fsdp = reduced * learned * (parts if cfg.rules != "zero1" else 1)
    along_fsdp += 2 * parts * computed * params if cfg.rules == "zero3" else 4 * params
    along_data = 2 * reduced * learned / fsdp
    passes = 2 if (kept := kept_names(cfg.model)) is None or ATTENTION_ADDED in kept else 3
    rows = cfg.tokens_per_step / (data * fsdp) * cfg.model.embed_dim * computed
    along_tensor = passes * 2 * cfg.model.num_layers * 2 * rows
    groups = link_domains(list(program.mesh.devices.flat))
    outer = spanning_shape(dict(shape), "group", groups) if len(set(groups)) > 1 else dict.fromkeys(shape, 1)
    shares = link_shares(program.mesh, chip)
    total = 0.0
    for axis, sent in (("fsdp", along_fsdp), ("data", along_data), ("tensor", along_tensor)):
        inside = shape[axis] // outer[axis]
        if inside > 1 and chip.ici_bandwidth:
            total += sent * (inside - 1) / inside / (chip.ici_bandwidth * shares[axis])
        if outer[axis] > 1 and chip.dcn_bandwidth:
            total += sent * (outer[axis] - 1) / outer[axis] / inside / chip.dcn_bandwidth
    return total
