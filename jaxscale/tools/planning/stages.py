"""Pipeline parallelism by arithmetic: ticks, bubble, and the arrays that a stage holds during a step.

P stages, M microbatches, V chunks per stage, L layers. Stages run in lockstep: each tick runs at most one chunk of
layers forward and one backward on every stage, and takes as long as the slowest stage.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.core.axes.expert_axis import EXPERTS
from jaxscale.core.axes.pipeline_schedules import EQUAL_COSTS, IDLE, Costs, split_layers
from jaxscale.core.models.config import BLOCKS, DENSE
from jaxscale.core.shardings import leaf_at, mesh_axis_names
from jaxscale.tools.planning.expert_traffic import expert_shards

PIPELINE = "pipeline"
COMMUNICATION_COSTS = Costs(weight_grads=0.0)  # per pass of a layer: weight gradients wait for no collective


@dataclasses.dataclass(frozen=True)
class Stages:
    """Pipeline schedule of a step, by formulas that hold for the tables of core/axes/pipeline_schedules.py."""

    size: int  # P
    layers: int  # L
    microbatches: int  # M
    chunks: int = 1  # V
    schedule: str = "1f1b"
    shards_head: bool = True  # embedding and output projection are sharded over the stages
    head_layers: float = 0.0  # the output projection's work, in layers
    num_leading: int = 0  # leading layers of another kind, on the first stage
    leading_layers: float = 0.0  # their work, in layers

    @property
    def is_pipelined(self) -> bool:
        """True with more than one stage."""
        return self.size > 1

    @property
    def split(self) -> np.ndarray:
        """Layers of each chunk, from split_layers."""
        head = 0.0 if self.shards_head else self.head_layers
        return split_layers(self.layers, self.size, self.chunks, head, self.leading_layers)

    @property
    def chunk_layers(self) -> int:
        """Layers of the longest chunk.

        If P V does not divide L, other chunks have one less. The last chunk has fewer if it alone holds the output
        projection, and the first if it holds leading layers.
        """
        return self.split.shape[-1]

    @property
    def chunk_work(self) -> float:
        """Work of the longest chunk, in layers, without the output projection."""
        return max(self.chunk_layers, int((self.split[0, 0] != IDLE).sum()) + self.leading_layers)

    @property
    def saved_input_layers(self) -> int:
        """Layers of a chunk for whose inputs a stage has buffers."""
        return max(self.chunk_layers, int((self.split[0, 0] != IDLE).sum()) + self.num_leading)

    @property
    def layer_slots(self) -> int:
        """Layer slots of a stage."""
        return self.chunks * self.chunk_layers

    @property
    def chunk_runs(self) -> int:
        """Forward chunk executions of a stage in a step."""
        return self.chunks * self.microbatches

    @property
    def bubble(self) -> float:
        """Idle fraction of the stages' time: (P-1) / (VM+P-1) (arXiv:2104.04473, section 2.2)."""
        return 1 - 1 / self.slowdown()

    @property
    def deferred(self) -> int:
        """Most chunks whose weight gradients are deferred, and which are then recomputed for them."""
        return min(self.size - 1, self.microbatches) if self.schedule == "zero_bubble" else 0

    def lost_time(self, costs: Costs) -> float:
        """Returns the cost of P-1 ticks of the fill and drain, recomputed passes included."""
        return (self.size - 1) * (sum(costs) - (costs.weight_grads if self.deferred else 0.0))

    def slowdown(self, costs: Costs = EQUAL_COSTS) -> float:
        """Returns the step time over the time of one stage's chunks: 1 / (1 - bubble)."""
        return 1 + self.lost_time(costs) / (self.chunk_runs * sum(costs))

    def recomputed(self, costs: Costs) -> float:
        """Returns the cost of passes that the last stage recomputes (it recomputes most), over its other work."""
        return self.deferred * (costs.recompute + costs.input_grads) / (self.chunk_runs * sum(costs))

    def idle_time(self, costs: Costs) -> float:
        """Returns the last stage's idle time over its busy time. A compiled program counts its passes."""
        return (self.slowdown(costs) - 1 - self.recomputed(costs)) / (1 + self.recomputed(costs))

    @property
    def ticks(self) -> int:
        """Iterations of the loop: runs + P - 1 of them have a forward pass on some stage, as many a backward pass."""
        if self.schedule == "gpipe":
            return 2 * (self.chunk_runs + self.size - 1)
        return self.chunk_runs + self.size * self.chunks + self.size - 2

    @property
    def slots(self) -> int:
        """Most chunks whose inputs a stage saves at one time."""
        return self.chunk_runs if self.schedule == "gpipe" else min(self.chunk_runs, self.size * (self.chunks + 1) - 1)

    @property
    def pending_cotangents(self) -> int:
        """Most gradients of the last layer's output that wait for their backward pass."""
        return self.microbatches if self.schedule == "gpipe" else 1

    @property
    def stores_stage_layers(self) -> bool:
        """True if a stage stores its own layers between steps; otherwise arrays are exchanged once a step."""
        return self.chunks == 1 and not self.num_leading and self.layer_slots * self.size == self.layers

    @property
    def head_shards(self) -> int:
        """Stages over which the vocabulary is sharded."""
        return self.size if self.shards_head else 1

    def head_fraction(self, head: float) -> float:
        """Returns the output projection's fraction of a stage's matmuls, given its fraction `head` of all matmuls."""
        local_head = head * self.size / self.head_shards
        return local_head / ((1 - head) * (1 + self.recomputed(EQUAL_COSTS)) + local_head)

    @property
    def formula(self) -> str:
        """Bubble as text, '5.2% = (P-1)/(VM+P-1) = 7/135'. Weight gradients are a quarter of a pass."""
        idle, chunk_runs = self.size - 1, self.chunk_runs
        if self.schedule == "zero_bubble":
            ratio = f"{3 * idle}/{4 * chunk_runs + 3 * idle} (recomputation included)"
            return f"{self.bubble:.1%} = 3(P-1)/(4VM+3(P-1)) = {ratio}"
        return f"{self.bubble:.1%} = (P-1)/(VM+P-1) = {idle}/{chunk_runs + idle}"


def pipeline_stages(cfg: RunConfig, mesh_shape: Mapping[str, int]) -> Stages:
    size, pipeline = mesh_shape[PIPELINE], cfg.pipeline
    layers = cfg.model.layer_stacks.get(BLOCKS, cfg.model.num_layers)
    stages = Stages(size, layers, cfg.train.num_microbatches)
    if size == 1:
        return stages
    shards_head = pipeline.head == "cut"
    head = cfg.model.vocab_size * cfg.model.embed_dim / cfg.model.block_matrix_params
    return dataclasses.replace(
        stages,
        chunks=pipeline.chunks,
        schedule=pipeline.schedule,
        shards_head=shards_head,
        head_layers=head,
        num_leading=cfg.model.layer_stacks.get(DENSE, 0),
        leading_layers=cfg.model.leading_layers,
    )


def idle_ratio(stages: Stages, head: float) -> float:
    """Returns a stage's idle time in a step over its equal share of all matmuls.

    It waits while the pipeline fills and drains, for longer chunks, and for an output projection on the last stage
    only. head: the projection's fraction of all matmuls. A sharded projection causes no wait.
    """
    work = stages.layers + stages.leading_layers
    layers = stages.chunk_work * stages.chunks * stages.size / work * stages.slowdown()
    return (1 - head) * (layers - 1) + head * (stages.size / stages.head_shards - 1)


def stage_elements(program: Program, tree: Any) -> tuple[int, int]:
    """Returns (elements of the blocks, of everything else) that one device holds during a pipelined step.

    tree: shaped like the parameters. Arrays are gathered, except over tensor, pipeline and experts that receive rows.
    """
    blocks = others = 0
    for is_block, _, size in stage_arrays(program, tree):
        if is_block:
            blocks += size
        else:
            others += size
    return blocks, others


def stage_expert_elements(program: Program, tree: Any) -> int:
    """Returns the expert elements included in the blocks of stage_elements()."""
    return sum(size for _, axes, size in stage_arrays(program, tree) if EXPERTS in axes)


def stage_arrays(program: Program, tree: Any) -> Iterator[tuple[bool, tuple[str, ...], int]]:
    """Yields (is a block, logical axes, elements that one device holds during a pipelined step) of each array."""
    stages, model = pipeline_stages(program.cfg, program.mesh.shape), program.model
    tensor = program.mesh.shape["tensor"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = leaf_at(model.axes, path)
        num_shards = tensor if any("tensor" in mesh_axis_names(model.plan.rules.params[axis]) for axis in axes) else 1
        num_shards *= expert_shards(program) if EXPERTS in axes else 1
        if block := path[0].key == BLOCKS:
            yield block, axes, math.prod(leaf.shape[1:]) * stages.layer_slots // num_shards
        else:
            yield block, axes, leaf.size // num_shards // (stages.head_shards if "vocab" in axes else 1)


def hop_bytes(program: Program) -> int:
    """Returns local bytes of one microbatch's residual stream, which stages send to each other."""
    cfg, shape = program.cfg, program.mesh.shape
    tokens = cfg.tokens_per_step // cfg.train.num_microbatches // (shape["data"] * shape["fsdp"] * shape["expert"])
    return tokens * cfg.model.embed_dim // (shape["context"] * shape["tensor"]) * compute_bytes(cfg)


def compute_bytes(cfg: RunConfig) -> int:
    """Returns bytes per element of the compute dtype."""
    return 4 if cfg.model.compute_dtype == "float32" else 2
