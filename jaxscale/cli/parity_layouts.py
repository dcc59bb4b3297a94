"""The parallel layouts that `jaxscale verify parity` compares: each mesh axis alone, each pair, and four at a time."""

import dataclasses
import itertools
import math

from jaxscale.core.config import ExchangeName, PipelineConfig, SharingName

NUM_DEVICES, MAX_DEVICES = 8, 16  # most layouts use 8; layouts of four axes use 16
MICROBATCHES = (1, 2, 4)
AXES = ("pipeline", "data", "fsdp", "context", "tensor")  # and expert, for a mixture of experts
CONTEXT_METHODS: tuple[SharingName, ...] = ("gather", "ulysses", "ring")  # of context.attention
WHOLE_HEAD = PipelineConfig(head="whole")
WIDTH = 58  # of a layout's name


@dataclasses.dataclass(frozen=True)
class ParallelLayout:
    """A mesh and the settings that divide the work over it."""

    mesh: dict[str, int]  # axes longer than 1
    rules: str
    num_microbatches: int
    sharing: SharingName = "auto"  # context.attention
    stages: PipelineConfig = PipelineConfig()
    exchange: ExchangeName = "auto"  # expert.exchange

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return math.prod(self.mesh.values())

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        words = [axes, self.rules] if self.mesh else ["one device"]
        words += [form for form in (self.sharing, self.exchange) if form != "auto"]
        changed = [
            f"{field.name}={getattr(self.stages, field.name)}"
            for field in dataclasses.fields(self.stages)
            if getattr(self.stages, field.name) != field.default
        ]
        return " ".join(words + changed)


def all_layouts(tensor: int, *, experts: bool = False) -> list[ParallelLayout]:
    """Returns layouts of accumulation, ZeRO, data, fsdp and tensor; then of context, pipeline and expert axes.

    Args: tensor: the largest tensor axis that the model allows. experts: True for a mixture of experts.
    """
    return [
        *[ParallelLayout({}, "zero3", parts) for parts in MICROBATCHES],
        *[ParallelLayout({"data": 8}, "zero3", parts) for parts in MICROBATCHES],
        *[ParallelLayout({"fsdp": 8}, rules, parts) for rules in ("zero1", "zero2", "zero3") for parts in (1, 4)],
        *[ParallelLayout({"fsdp": 4, "tensor": 2}, "zero3", parts) for parts in MICROBATCHES],
        *[tensor_layout(tensor, parts) for parts in (1, 2)],
        *context_layouts(),
        *pipeline_layouts(),
        *combined_layouts((1, 4) if experts else (4,)),
        *(expert_layouts() if experts else []),
    ]


def tensor_layout(size: int, num_microbatches: int) -> ParallelLayout:
    """Returns a layout with `size` devices on the tensor axis and the others on data."""
    mesh = {"data": NUM_DEVICES // size, "tensor": size}
    return ParallelLayout({axis: length for axis, length in mesh.items() if length > 1}, "zero3", num_microbatches)


def context_layouts() -> list[ParallelLayout]:
    """Returns layouts with a context axis, alone and with other axes, for every attention method."""
    meshes = [{"context": 8}, {"context": 4, "tensor": 2}, {"fsdp": 2, "context": 2, "tensor": 2}]
    parts = {"ulysses": 1, "gather": 2, "ring": 2}
    return [
        *[ParallelLayout(mesh, "zero3", parts[method], method) for mesh in meshes for method in CONTEXT_METHODS],
        ParallelLayout({"data": 2, "context": 4}, "zero1", 2, "gather"),
    ]


def pipeline_layouts() -> list[ParallelLayout]:
    """Returns layouts with a pipeline axis alone: each schedule, whole and sharded heads, several chunks."""
    chunked = PipelineConfig(chunks=2)
    return [
        ParallelLayout({"pipeline": 2}, "zero3", 4),
        ParallelLayout({"pipeline": 2}, "zero3", 4, stages=WHOLE_HEAD),
        ParallelLayout({"pipeline": 2}, "zero3", 4, stages=PipelineConfig(schedule="gpipe")),
        ParallelLayout({"pipeline": 2}, "zero3", 4, stages=chunked),
        ParallelLayout({"pipeline": 4}, "zero3", 4),
        ParallelLayout({"pipeline": 4}, "zero3", 4, stages=PipelineConfig(schedule="zero_bubble")),
    ]


def combined_layouts(microbatches: tuple[int, ...]) -> list[ParallelLayout]:
    """Returns layouts of every pair of axes with each number of microbatches, and of four axes."""
    pairs = itertools.combinations(AXES, 2)
    cube = {"pipeline": 2, "context": 2, "tensor": 2}
    return [
        *[ParallelLayout({one: 2, other: 2}, "zero3", n) for one, other in pairs for n in microbatches],
        ParallelLayout({"pipeline": 2, "fsdp": 4}, "zero1", 4, stages=WHOLE_HEAD),
        ParallelLayout(cube | {"fsdp": 2}, "zero3", 4),
        ParallelLayout(cube | {"data": 2}, "zero2", 4, stages=WHOLE_HEAD),
    ]


def expert_layouts() -> list[ParallelLayout]:
    """Returns layouts with an expert axis, alone and with each other axis, and of four axes."""
    meshes = [{"expert": 4}, *({"expert": 2, other: 2} for other in AXES)]
    return [
        *[
            ParallelLayout(mesh, "zero3", n, exchange=form)
            for mesh in meshes
            for form in ("gather", "send")
            for n in (1, 4)
        ],
        ParallelLayout({"fsdp": 2, "expert": 4}, "zero1", 2, exchange="send"),
        ParallelLayout({"pipeline": 2, "fsdp": 2, "expert": 2, "tensor": 2}, "zero3", 4, exchange="send"),
    ]
