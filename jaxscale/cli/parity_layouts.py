"""The layouts that `jaxscale verify parity` compares: each mesh axis alone, each pair, and four at a time."""

import dataclasses
import itertools
import math

from jaxscale.sharding.config import ExchangeName, PipelineConfig, SharingName

NUM_DEVICES, MOST_DEVICES = 8, 16  # for most layouts, and for four axes
MICROBATCHES = (1, 2, 4)
AXES = ("pipeline", "data", "fsdp", "context", "tensor")  # and expert, of mixtures
WAYS: tuple[SharingName, ...] = ("gather", "ulysses", "ring")  # of context.attention
WHOLE = PipelineConfig(head="whole")
WIDTH = 58  # of a layout's name


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to divide the work."""

    mesh: dict[str, int]  # axes longer than 1
    rules: str
    num_microbatches: int
    sharing: SharingName = "auto"  # context.attention
    stages: PipelineConfig = PipelineConfig()
    exchange: ExchangeName = "auto"  # expert.exchange

    @property
    def num_devices(self) -> int:
        """How many devices it takes."""
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


def all_layouts(tensor: int, *, experts: bool = False) -> list[Layout]:
    """Accumulation and ZeRO stages beside data, fsdp and tensor; then the axes that cut rows, layers and experts.

    tensor: the most devices that the model can have on that axis alone, the rest being on data. experts: whether it has
    any.
    """
    return [
        *[Layout({}, "zero3", parts) for parts in MICROBATCHES],
        *[Layout({"data": 8}, "zero3", parts) for parts in MICROBATCHES],
        *[Layout({"fsdp": 8}, rules, parts) for rules in ("zero1", "zero2", "zero3") for parts in (1, 4)],
        *[Layout({"fsdp": 4, "tensor": 2}, "zero3", parts) for parts in MICROBATCHES],
        *[tensor_layout(tensor, parts) for parts in (1, 2)],
        *shared_rows(),
        *staged(),
        *together((1, 4) if experts else (4,)),
        *(shared_experts() if experts else []),
    ]


def tensor_layout(size: int, num_microbatches: int) -> Layout:
    """So many devices on the tensor axis and the rest on data."""
    mesh = {"data": NUM_DEVICES // size, "tensor": size}
    return Layout({axis: length for axis, length in mesh.items() if length > 1}, "zero3", num_microbatches)


def shared_rows() -> list[Layout]:
    """Devices that share rows, alone and beside each other axis, in every way."""
    meshes = [{"context": 8}, {"context": 4, "tensor": 2}, {"fsdp": 2, "context": 2, "tensor": 2}]
    parts = {"ulysses": 1, "gather": 2, "ring": 2}
    return [
        *[Layout(mesh, "zero3", parts[way], way) for mesh in meshes for way in WAYS],
        Layout({"data": 2, "context": 4}, "zero1", 2, "gather"),
    ]


def staged() -> list[Layout]:
    """Stages alone: each schedule, whole heads and shared ones, several chunks."""
    chunked = PipelineConfig(chunks=2)
    return [
        Layout({"pipeline": 2}, "zero3", 4),
        Layout({"pipeline": 2}, "zero3", 4, stages=WHOLE),
        Layout({"pipeline": 2}, "zero3", 4, stages=PipelineConfig(schedule="gpipe")),
        Layout({"pipeline": 2}, "zero3", 4, stages=chunked),
        Layout({"pipeline": 4}, "zero3", 4),
        Layout({"pipeline": 4}, "zero3", 4, stages=PipelineConfig(schedule="zero_bubble")),
    ]


def together(microbatches: tuple[int, ...]) -> list[Layout]:
    """Every pair of axes, with each number of microbatches, and four of them at a time."""
    pairs = itertools.combinations(AXES, 2)
    cube = {"pipeline": 2, "context": 2, "tensor": 2}
    return [
        *[Layout({one: 2, other: 2}, "zero3", n) for one, other in pairs for n in microbatches],
        Layout({"pipeline": 2, "fsdp": 4}, "zero1", 4, stages=WHOLE),
        Layout(cube | {"fsdp": 2}, "zero3", 4),
        Layout(cube | {"data": 2}, "zero2", 4, stages=WHOLE),
    ]


def shared_experts() -> list[Layout]:
    """Devices that share experts, alone and beside each other axis, and four axes at a time."""
    meshes = [{"expert": 4}, *({"expert": 2, other: 2} for other in AXES)]
    return [
        *[Layout(mesh, "zero3", n, exchange=form) for mesh in meshes for form in ("gather", "send") for n in (1, 4)],
        Layout({"fsdp": 2, "expert": 4}, "zero1", 2, exchange="send"),
        Layout({"pipeline": 2, "fsdp": 2, "expert": 2, "tensor": 2}, "zero3", 4, exchange="send"),
    ]
