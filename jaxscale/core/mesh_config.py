"""Settings: mesh axis sizes, context attention, expert exchange and the pipeline schedule."""

import dataclasses
from typing import Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

ScheduleName = Literal["1f1b", "zero_bubble", "gpipe"]
SharingName = Literal["auto", "gather", "ulysses", "ring"]
ExchangeName = Literal["auto", "gather", "send"]
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")  # slowest link first


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each mesh axis; one axis may be -1 and takes the remaining devices."""

    pipeline: int = setting(1, "pipeline stages, each with some of the layers")
    data: int = setting(1, "replicas of the model, each with other rows")
    fsdp: int = setting(-1, "devices that shard parameters, gradients or moments, each with other rows")
    expert: int = setting(1, "devices that shard the experts of a layer, each with other rows")
    context: int = setting(1, "devices that shard the positions of a row")
    tensor: int = setting(1, "devices that shard each matmul")

    def __post_init__(self):
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if size < 1 and size != -1:
                raise BadInput(f"{axis}={size} must be a positive number of devices, or -1 for the remaining ones")
        if len(free := [axis for axis in MESH_AXES if getattr(self, axis) == -1]) > 1:
            raise BadInput(f"only one axis may be -1, not {free}; set all but one (fsdp is -1 by default)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Attention over mesh.context, whose devices each have some positions of a row."""

    attention: SharingName = setting(
        "auto",
        "gather: all-gather keys and values; ulysses: all-to-all between positions and heads (arXiv:2309.14509); ring: "
        "ring attention (arXiv:2310.01889); auto prints its choice and reason",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Exchange between tokens and experts over mesh.expert, whose devices each have some of both."""

    exchange: ExchangeName = setting(
        "auto",
        "gather: all-gather the experts of a layer; send: all-to-all of tokens to their experts and back, in as many "
        "rounds as needed; auto prints its choice and reason",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Schedule, chunks and vocabulary sharding of mesh.pipeline."""

    schedule: ScheduleName = setting(
        "1f1b",
        "1f1b: saves activations of a few microbatches (arXiv:1806.03377); zero_bubble: the same, and defers some "
        "weight gradients until a stage idles (arXiv:2401.10241); gpipe: saves those of all (arXiv:1811.06965)",
    )
    chunks: int = setting(
        1, "chunks of layers per stage (interleaved schedule, arXiv:2104.04473): more make the bubble smaller"
    )
    head: Literal["cut", "whole"] = setting(
        "cut", "cut: the vocabulary is sharded over stages; whole: the first stage embeds, the last computes the logits"
    )

    def __post_init__(self):
        if self.chunks < 1:
            raise BadInput(f"chunks={self.chunks} must be at least 1")
