"""Devices along each axis of the mesh, and how the context and pipeline axes are used."""

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
    """Devices along each mesh axis; one axis may be -1 and takes what is left."""

    pipeline: int = setting(1, "stages, each of which holds some of the layers")
    data: int = setting(1, "copies of the model that each see other rows")
    fsdp: int = setting(-1, "devices that share one copy of parameters, gradients or moments; they see other rows too")
    expert: int = setting(1, "devices that share the experts of a layer; they see other rows too")
    context: int = setting(1, "devices that share the positions of a row")
    tensor: int = setting(1, "devices that split each matrix product")

    def __post_init__(self):
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if size < 1 and size != -1:
                raise BadInput(f"{axis}={size} must be a positive number of devices, or -1 for what is left")
        if len(free := [axis for axis in MESH_AXES if getattr(self, axis) == -1]) > 1:
            raise BadInput(
                f"only one axis may be -1, not {free}; set all but one (fsdp is -1 unless you say otherwise)"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """How the devices of mesh.context, each with some positions of a row, attend to the others' keys."""

    attention: SharingName = setting(
        "auto",
        "gather: keys and values are gathered; ulysses: positions are exchanged for heads (arXiv:2309.14509); ring: "
        "keys and values go round (arXiv:2310.01889); auto prints what it chose and why",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """How tokens and experts meet on the devices of mesh.expert, each of which has some of both."""

    exchange: ExchangeName = setting(
        "auto",
        "gather: all experts of a layer come to every device; send: tokens go to their experts and back, in rounds "
        "until all have been; auto prints what it chose and why",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the stages of mesh.pipeline work on the microbatches of a step."""

    schedule: ScheduleName = setting(
        "1f1b",
        "1f1b: activations of a few microbatches exist at a time (arXiv:1806.03377); zero_bubble: so too, and some "
        "gradients of weights wait until a stage idles (arXiv:2401.10241); gpipe: of all (arXiv:1811.06965)",
    )
    chunks: int = setting(
        1, "runs of layers that each stage holds, taken in turn (interleaved, arXiv:2104.04473): a smaller bubble"
    )
    head: Literal["cut", "whole"] = setting(
        "cut", "cut: all stages share the vocabulary; whole: the first stage embeds and the last has the logits"
    )

    def __post_init__(self):
        if self.chunks < 1:
            raise BadInput(f"chunks={self.chunks} must be at least 1")
