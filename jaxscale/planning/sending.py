"""What the layout of a step sends over which links, and how much of it products hide: arithmetic, no compiler."""

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxscale.build import Program
from jaxscale.models.config import ATTENTION_ADDED, lora_params
from jaxscale.planning.links import DCN, Stage, Torus, group_lines, make_torus, ring_through, rotated, staged
from jaxscale.planning.memory import saved_names
from jaxscale.planning.topology import Topology, link_domains
from jaxscale.sharding.compiler_options import SPARSE_CORE
from jaxscale.sharding.mesh import spanning_shape

KINDS = frozenset({"all-gather", "reduce-scatter"})


@dataclasses.dataclass(frozen=True)
class Sent:
    """Alike collectives of a step, of one device."""

    axis: str
    kind: str
    nbytes: float  # of the whole arrays, over all of a step
    hides: bool  # beside products, where the compiler lets it run beside any


@dataclasses.dataclass(frozen=True)
class Sending:
    """Seconds of one device and step."""

    links_s: dict[str, float]  # by link, 'ici:fsdp:x' or 'dcn:data'
    total_s: float  # one after the other
    blocking_s: float  # of those beside which nothing runs

    def exposed_s(self, compute_s: float) -> float:
        """How long products stand still: for what blocks, and for what takes longer than all of them."""
        return self.blocking_s + max(0.0, self.total_s - self.blocking_s - compute_s)


def plan_sending(program: Program, topology: Topology) -> Sending:
    """What a step sends, each stage with the links of its own dimension of the torus.

    Assumed of the compiler (hidden_kinds): which kinds run beside products. The sum over data, once at a step's end,
    and those of activations over tensor, which the next product waits for, run beside none.
    """
    devices, chip = list(program.mesh.devices.flat), topology.chip
    shape, groups, torus = dict(program.mesh.shape), link_domains(devices), make_torus(devices, chip)
    outer = spanning_shape(shape, "group", groups) if len(set(groups)) > 1 else dict.fromkeys(shape, 1)
    hidden = hidden_kinds(program, topology)
    links: collections.Counter[str] = collections.Counter()
    blocking = 0.0
    for sent in sent_arrays(program):
        if shape[sent.axis] == 1:
            continue
        lines = axis_lines(program, sent.axis, groups, torus)
        stages = list(stages_of(sent, lines, torus, program.compiler_options.offloads_torus))
        if (number := outer[sent.axis]) > 1:
            passes = 2 if sent.kind == "all-reduce" else 1
            inside = math.prod(line.size for line in lines)
            stages.append(Stage(DCN, number, 1.0, passes * sent.nbytes * (number - 1) / number / inside))
        for stage in stages:
            seconds = stage.seconds(chip) or 0.0
            along = f":{stage.along}" if torus and stage.along != DCN else ""
            links[f"{'dcn' if stage.along == DCN else 'ici'}:{sent.axis}{along}"] += seconds
            blocking += 0.0 if sent.hides and sent.kind in hidden else seconds
    return Sending(dict(links), links.total(), blocking)


def hidden_kinds(program: Program, topology: Topology) -> frozenset[str]:
    """The kinds of collectives that the compiler runs beside products, as its scheduled programs show it.

    XLA:TPU (libtpu 0.0.51): gathers on v5e; elsewhere those that the SparseCores are given. XLA:GPU: both, by its
    latency-hiding scheduler. Seen on programs of this project, 2026-11-23; nothing was timed.
    """
    if topology.platform == "gpu":
        return KINDS
    if topology.devices[0].device_kind == "TPU v5 lite":
        return frozenset({"all-gather"})
    options = program.compiler_options.values
    return frozenset(kind for kind in KINDS if options.get(SPARSE_CORE + kind.replace("-", "_")))


def sent_arrays(program: Program) -> list[Sent]:
    """Weights gathered and gradients scattered along fsdp and context, summed along data, activations summed along
    tensor, and what attention needs of the devices that share rows."""
    cfg, shape = program.cfg, program.mesh.shape
    data, fsdp, context, tensor = (shape[axis] for axis in ("data", "fsdp", "context", "tensor"))
    params, parts = cfg.model.num_params / tensor, cfg.train.num_microbatches
    reduced = 2 if cfg.train.reduce_dtype == "bfloat16" else 4
    computed = 4 if cfg.model.compute_dtype == "float32" else 2
    learned = reduced * (lora_params(cfg.model, cfg.lora) / tensor if cfg.lora.on else params)
    gathered = 2 * parts * computed * params if cfg.rules == "zero3" else 4 * params
    passes = 2 if (kept := saved_names(cfg.model)) is None or ATTENTION_ADDED in kept else 3
    rows = cfg.tokens_per_step / (data * fsdp * context) * cfg.model.embed_dim * computed
    scattered = learned * (parts if cfg.rules != "zero1" else 1)
    return [
        Sent("fsdp", "all-gather", gathered, True),
        Sent("fsdp", "reduce-scatter", scattered, True),
        Sent("context", "all-gather", gathered / fsdp, True),
        Sent("context", "reduce-scatter", scattered / fsdp, True),
        *attention_arrays(program, cfg.tokens_per_step / (data * fsdp) * computed / tensor, passes - 1),
        Sent("data", "all-reduce", learned / (fsdp * context), False),
        Sent("tensor", "all-reduce", passes * 2 * cfg.model.num_layers * rows, False),
    ]


def attention_arrays(program: Program, token_bytes: float, runs: int) -> list[Sent]:
    """What the devices that share rows send for attention. token_bytes: one number of each token of the rows that they
    share. runs: forward passes of a block, the one that the backward pass repeats included."""
    model, form = program.cfg.model, program.model.kernels.sharing.form
    keys = 2 * model.num_layers * model.key_width * token_bytes
    if form == "gather":
        return [Sent("context", "all-gather", 2 * keys, True), Sent("context", "reduce-scatter", keys, True)]
    if form == "ring":  # forward and back, where gradients travel too
        return [Sent("context", "all-gather", (runs + 1) * keys, True), Sent("context", "all-gather", 2 * keys, True)]
    if form == "ulysses":
        queries = 2 * model.num_layers * model.query_width * token_bytes
        return [Sent("context", "all-to-all", (runs + 1) * (queries + keys) / program.mesh.shape["context"], False)]
    return []


def axis_lines(program: Program, axis: str, groups: Sequence[int], torus: Torus | None) -> tuple[Stage, ...]:
    """The links that join the devices along a mesh axis within one slice or host."""
    mesh = program.mesh
    places = np.arange(mesh.size).reshape(mesh.devices.shape)
    line = np.moveaxis(places, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])[0].tolist()
    return group_lines(torus, [place for place in line if groups[place] == groups[line[0]]])


def stages_of(sent: Sent, lines: Sequence[Stage], torus: Torus | None, at_once: bool) -> tuple[Stage, ...]:
    """The stages of collectives as the step makes them (sharding/torus.py), and XLA:TPU runs them (libtpu 0.0.51).

    at_once: gathers and scatters over several dimensions are one operation. Gathers then keep the links of all of them
    busy, scatters go round one ring through all; as do gathers over two dimensions that the TensorCores run.
    """
    if torus is None or len(lines) < 2:
        return staged(sent.kind, sent.nbytes, lines)
    if sent.kind == "reduce-scatter" and at_once or sent.kind == "all-gather" and len(lines) == 2 and not at_once:
        return staged(sent.kind, sent.nbytes, ring_through(lines, torus.num_links))
    if sent.kind == "all-gather" and at_once or sent.axis == "data":
        orders = [[*lines[first:], *lines[:first]] for first in range(len(lines))]
        return rotated([staged(sent.kind, sent.nbytes, order) for order in orders])
    return staged(sent.kind, sent.nbytes, lines)
