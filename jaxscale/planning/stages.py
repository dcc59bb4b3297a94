"""The stages of a pipeline by arithmetic: ticks, bubble, and what a stage holds while a step runs.

P stages, M microbatches, V chunks of a stage, L layers. All stages work in lockstep: in a tick each runs at most one
chunk of layers forward and one backward, and all wait for the slowest.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.models.config import BLOCKS, DENSE
from jaxscale.planning.experts import resting_parts
from jaxscale.sharding.expert_axis import EXPERTS
from jaxscale.sharding.rules import mesh_axis_names
from jaxscale.sharding.schedules import EQUAL_COSTS, IDLE, Costs, split_layers
from jaxscale.sharding.shardings import leaf_at

PIPELINE = "pipeline"
SENT = Costs(weight_grads=0.0)  # within a layer, by its passes: gradients of weights wait for nobody


@dataclasses.dataclass(frozen=True)
class Stages:
    """How the stages of a pipeline share a step, by the formulas that hold for the tables of sharding/schedules.py."""

    size: int  # P
    layers: int  # L
    microbatches: int  # M
    chunks: int = 1  # V
    schedule: str = "1f1b"
    cuts_head: bool = True  # embedding and output projection are shared by all stages
    head_layers: float = 0.0  # the output projection's work, in layers
    num_first: int = 0  # layers of another kind, which the first stage has before all L
    leading_layers: float = 0.0  # their work, in layers

    @property
    def on(self) -> bool:
        """Whether there is more than one."""
        return self.size > 1

    @property
    def split(self) -> np.ndarray:
        """The layers of each chunk, as split_layers has them."""
        head = 0.0 if self.cuts_head else self.head_layers
        return split_layers(self.layers, self.size, self.chunks, head, self.leading_layers)

    @property
    def chunk_layers(self) -> int:
        """Layers of the longest chunk: of L that P V do not divide, others have one less, and the last where it has the
        output projection alone, or the first where it has other layers, some less."""
        return self.split.shape[-1]

    @property
    def chunk_work(self) -> float:
        """Work of the longest chunk, in layers, the output projection left out."""
        return max(self.chunk_layers, int((self.split[0, 0] != IDLE).sum()) + self.leading_layers)

    @property
    def kept_layers(self) -> int:
        """Layers of a chunk whose inputs a stage has room for."""
        return max(self.chunk_layers, int((self.split[0, 0] != IDLE).sum()) + self.num_first)

    @property
    def held_layers(self) -> int:
        """Layers that a stage has room for."""
        return self.chunks * self.chunk_layers

    @property
    def runs(self) -> int:
        """Chunks that a stage runs forward in a step."""
        return self.chunks * self.microbatches

    @property
    def bubble(self) -> float:
        """The part of the stages' time that is lost to each: (P-1) / (VM+P-1) (arXiv:2104.04473, section 2.2)."""
        return 1 - 1 / self.stretch()

    @property
    def later(self) -> int:
        """Chunks that a stage goes back through without gradients of weights, at most, and once more for these."""
        return min(self.size - 1, self.microbatches) if self.schedule == "zero_bubble" else 0

    def lost(self, costs: Costs) -> float:
        """Time that no stage has of what it would do alone: P-1 turns, with the passes that are done twice in them."""
        return (self.size - 1) * (sum(costs) - (costs.weight_grads if self.later else 0.0))

    def stretch(self, costs: Costs = EQUAL_COSTS) -> float:
        """How many times longer the stages take than the chunks of one of them: 1 / (1 - bubble)."""
        return 1 + self.lost(costs) / (self.runs * sum(costs))

    def twice(self, costs: Costs) -> float:
        """Passes that the last stage, which has the most, does twice, over what it would do alone."""
        return self.later * (costs.recompute + costs.input_grads) / (self.runs * sum(costs))

    def waiting(self, costs: Costs) -> float:
        """What the last stage waits for others, over all that it does: a compiled program counts its passes."""
        return (self.stretch(costs) - 1 - self.twice(costs)) / (1 + self.twice(costs))

    @property
    def ticks(self) -> int:
        """Turns of the loop. In runs + P - 1 of them some stage goes forward, in as many some stage goes backward."""
        if self.schedule == "gpipe":
            return 2 * (self.runs + self.size - 1)
        return self.runs + self.size * self.chunks + self.size - 2

    @property
    def slots(self) -> int:
        """Chunks whose inputs a stage keeps at one time, at most."""
        return self.runs if self.schedule == "gpipe" else min(self.runs, self.size * (self.chunks + 1) - 1)

    @property
    def held(self) -> int:
        """Gradients of the last layer's result that wait for their backward pass, at most."""
        return self.microbatches if self.schedule == "gpipe" else 1

    @property
    def rests_by_layer(self) -> bool:
        """Whether a stage keeps its own layers between steps; else all arrays are exchanged once a step."""
        return self.chunks == 1 and not self.num_first and self.held_layers * self.size == self.layers

    @property
    def head_shares(self) -> int:
        """Stages that share the vocabulary."""
        return self.size if self.cuts_head else 1

    def head_part(self, head: float) -> float:
        """Part of a stage's own products that are the output projection's, where it is `head` of all products."""
        own = head * self.size / self.head_shares
        return own / ((1 - head) * (1 + self.twice(EQUAL_COSTS)) + own)

    @property
    def formula(self) -> str:
        """'5.2% = (P-1)/(VM+P-1) = 7/135'; of a pass, gradients of weights are a quarter."""
        idle, runs = self.size - 1, self.runs
        if self.schedule == "zero_bubble":
            of_all = f"{3 * idle}/{4 * runs + 3 * idle} (what is done twice included)"
            return f"{self.bubble:.1%} = 3(P-1)/(4VM+3(P-1)) = {of_all}"
        return f"{self.bubble:.1%} = (P-1)/(VM+P-1) = {idle}/{runs + idle}"


def stages_of(cfg: RunConfig, mesh_shape: Mapping[str, int]) -> Stages:
    """The stages of a config on a mesh of this shape."""
    size, pipeline = mesh_shape[PIPELINE], cfg.pipeline
    layers = cfg.model.layer_stacks.get(BLOCKS, cfg.model.num_layers)
    stages = Stages(size, layers, cfg.train.num_microbatches)
    if size == 1:
        return stages
    cuts = pipeline.head == "cut"
    head = cfg.model.vocab_size * cfg.model.embed_dim / cfg.model.block_matrix_params
    return dataclasses.replace(
        stages,
        chunks=pipeline.chunks,
        schedule=pipeline.schedule,
        cuts_head=cuts,
        head_layers=head,
        num_first=cfg.model.layer_stacks.get(DENSE, 0),
        leading_layers=cfg.model.leading_layers,
    )


def idle_share(stages: Stages, head: float) -> float:
    """Time that a stage stands still in a step, over that of its equal part of all products.

    For others while the pipeline fills and empties, for layers that a longer chunk has, and for an output projection
    that the last stage has alone. head: the projection's part of all products. A cut one makes nobody wait.
    """
    work = stages.layers + stages.leading_layers
    layers = stages.chunk_work * stages.chunks * stages.size / work * stages.stretch()
    return (1 - head) * (layers - 1) + head * (stages.size / stages.head_shares - 1)


def held_numbers(program: Program, tree: Any) -> tuple[int, int]:
    """(numbers of the blocks, of all else) among the arrays of a tree like the parameters that one device holds while a
    step of a pipeline runs: whole, but for what the tensor axis, the stages, and experts to which rows are sent divide.
    """
    blocks = others = 0
    for is_block, _, number in held_arrays(program, tree):
        if is_block:
            blocks += number
        else:
            others += number
    return blocks, others


def held_experts(program: Program, tree: Any) -> int:
    """Of the numbers of the blocks in held_numbers(), those of experts."""
    return sum(number for _, axes, number in held_arrays(program, tree) if EXPERTS in axes)


def held_arrays(program: Program, tree: Any) -> Iterator[tuple[bool, tuple[str, ...], int]]:
    """(whether stages divide its layers, logical axes, numbers that one device holds while a step of a pipeline runs)
    of each array of such a tree."""
    stages, model = stages_of(program.cfg, program.mesh.shape), program.model
    tensor = program.mesh.shape["tensor"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = leaf_at(model.axes, path)
        cut = tensor if any("tensor" in mesh_axis_names(model.rules.params[axis]) for axis in axes) else 1
        cut *= resting_parts(program) if EXPERTS in axes else 1
        if block := path[0].key == BLOCKS:
            yield block, axes, math.prod(leaf.shape[1:]) * stages.held_layers // cut
        else:
            yield block, axes, leaf.size // cut // (stages.head_shares if "vocab" in axes else 1)


def hop_bytes(program: Program) -> int:
    """Bytes of the residual stream of one microbatch on one device, which travel from stage to stage."""
    cfg, shape = program.cfg, program.mesh.shape
    tokens = cfg.tokens_per_step // cfg.train.num_microbatches // (shape["data"] * shape["fsdp"] * shape["expert"])
    return tokens * cfg.model.embed_dim // (shape["context"] * shape["tensor"]) * compute_bytes(cfg)


def compute_bytes(cfg: RunConfig) -> int:
    """Bytes of a number of the type in which the model computes."""
    return 4 if cfg.model.compute_dtype == "float32" else 2
