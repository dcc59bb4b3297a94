"""Checks that losses and gradients are the same in every parallel layout.

The optimizer is SGD, because Adam divides each gradient by its magnitude, which magnifies rounding errors near zero to
full steps. Its momentum is 1e-30, too small to change a float32, so that its state is the last gradient. The compared
gradients are therefore those of the actual training step.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxscale.build import Program, make_program
from jaxscale.config import RunConfig
from jaxscale.core.batch import Batch
from jaxscale.core.config import ContextConfig, ExchangeName, ExpertConfig, MeshConfig, PipelineConfig, SharingName
from jaxscale.core.mesh import mesh_shape
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.hosts.meshes import put_rows
from jaxscale.system.attempt import simulated_devices_env
from jaxscale.system.exits import BadInput
from jaxscale.tools.qualify.timing import CompileLog

NUM_DEVICES, MAX_DEVICES = 8, 16  # most layouts use 8; layouts of four axes use 16
MICROBATCHES = (1, 2, 4)
AXES = ("pipeline", "data", "fsdp", "context", "tensor")  # a mixture of experts also has `expert`
CONTEXT_METHODS: tuple[SharingName, ...] = ("gather", "ulysses", "ring")  # values of context.attention
WHOLE_HEAD = PipelineConfig(head="whole")
STAGES = (PipelineConfig(), WHOLE_HEAD, PipelineConfig(schedule="gpipe"), PipelineConfig(chunks=2))
WIDTH = 58  # columns for a layout's name
NUM_STEPS = 20  # number of steps with compared losses
GRADIENT_STEPS = 5  # number of steps with compared gradients; later parameters differ too much by rounding
ROWS = NUM_DEVICES * max(MICROBATCHES)  # one row for each device in each microbatch
LR = 0.1  # changes the loss far more than the tolerance
TINY_MOMENTUM = 1e-30
TOLERANCE = 1e-5  # relative; float32 sums in a different order differ by about 1e-7
REMATERIALIZED = "Involuntary full rematerialization"  # XLA's warning when it copies a whole array between devices
COLUMNS = f"{'layout':{WIDTH}}{'microbatches':>12}{'loss':>10}{'gradient':>10}{'compiled':>10}"


class ParallelLayout(NamedTuple):
    """Mesh and the settings that distribute the work over it."""

    mesh: dict[str, int]  # axes longer than 1
    rules: str
    num_microbatches: int
    sharing: SharingName = "auto"  # context.attention
    stages: PipelineConfig = PipelineConfig()
    exchange: ExchangeName = "auto"  # expert.exchange

    def __str__(self) -> str:
        words = [*(f"{axis}={size}" for axis, size in self.mesh.items()), self.rules] if self.mesh else ["one device"]
        words += [form for form in (self.sharing, self.exchange) if form != "auto"]
        usual = vars(PipelineConfig())
        return " ".join([*words, *(f"{name}={v}" for name, v in vars(self.stages).items() if v != usual[name])])


def all_layouts(tensor: int, *, experts: bool = False) -> list[ParallelLayout]:
    """Returns layouts with one, two and four mesh axes. tensor: largest tensor axis. experts: include expert axes."""
    shared = [{"context": 8}, {"context": 4, "tensor": 2}, {"fsdp": 2, "context": 2, "tensor": 2}]
    shared_parts = {"ulysses": 1, "gather": 2, "ring": 2}
    cube = {"pipeline": 2, "context": 2, "tensor": 2}
    return [
        *[ParallelLayout({}, "zero3", parts) for parts in MICROBATCHES],
        *[ParallelLayout({"data": 8}, "zero3", parts) for parts in MICROBATCHES],
        *[ParallelLayout({"fsdp": 8}, rules, parts) for rules in ("zero1", "zero2", "zero3") for parts in (1, 4)],
        *[ParallelLayout({"fsdp": 4, "tensor": 2}, "zero3", parts) for parts in MICROBATCHES],
        *[tensor_layout(tensor, parts) for parts in (1, 2)],
        # a context axis, alone and with other axes, for every attention method
        *[ParallelLayout(mesh, "zero3", shared_parts[method], method) for mesh in shared for method in CONTEXT_METHODS],
        ParallelLayout({"data": 2, "context": 4}, "zero1", 2, "gather"),
        # a pipeline axis alone: each schedule, whole and sharded heads, several chunks
        *[ParallelLayout({"pipeline": 2}, "zero3", 4, stages=stages) for stages in STAGES],
        ParallelLayout({"pipeline": 4}, "zero3", 4),
        ParallelLayout({"pipeline": 4}, "zero3", 4, stages=PipelineConfig(schedule="zero_bubble")),
        # every pair of axes, and four axes
        *[
            ParallelLayout({one: 2, other: 2}, "zero3", parts)
            for one, other in itertools.combinations(AXES, 2)
            for parts in ((1, 4) if experts else (4,))
        ],
        ParallelLayout({"pipeline": 2, "fsdp": 4}, "zero1", 4, stages=WHOLE_HEAD),
        ParallelLayout(cube | {"fsdp": 2}, "zero3", 4),
        ParallelLayout(cube | {"data": 2}, "zero2", 4, stages=WHOLE_HEAD),
        *(expert_layouts() if experts else []),
    ]


def tensor_layout(size: int, num_microbatches: int) -> ParallelLayout:
    """Returns a layout with `size` devices on the tensor axis and the others on data."""
    mesh = {"data": NUM_DEVICES // size, "tensor": size}
    return ParallelLayout({axis: length for axis, length in mesh.items() if length > 1}, "zero3", num_microbatches)


def expert_layouts() -> list[ParallelLayout]:
    """Returns layouts with an expert axis: alone, with each other axis, and with three other axes."""
    meshes = [{"expert": 4}, *({"expert": 2, other: 2} for other in AXES)]
    ways = list(itertools.product(meshes, ("gather", "send"), (1, 4)))
    return [
        *[ParallelLayout(mesh, "zero3", parts, exchange=exchange) for mesh, exchange, parts in ways],
        ParallelLayout({"fsdp": 2, "expert": 4}, "zero1", 2, exchange="send"),
        ParallelLayout({"pipeline": 2, "fsdp": 2, "expert": 2, "tensor": 2}, "zero3", 4, exchange="send"),
    ]


@dataclasses.dataclass(frozen=True)
class LayoutRun:
    """Losses and gradients of the steps in one layout."""

    losses: np.ndarray  # float64[steps]
    gradients: list[list[np.ndarray]]  # one list of arrays for each of the first steps
    compilations: int  # number of compilations while the steps ran
    warnings: list[str]  # XLA's warnings about involuntary rematerialization


class Row(NamedTuple):
    """Comparison of a layout with the reference."""

    layout: ParallelLayout
    loss: float = 0.0  # largest relative difference of a step's loss
    gradient: float = 0.0  # largest relative norm of the difference of an early step's gradient
    compilations: int = 1
    warnings: Sequence[str] = ()
    unsupported: str = ""  # the reason if the model does not support this layout

    @property
    def agrees(self) -> bool:
        """True if unsupported, or if within the tolerance, with one compilation and no warning. NaN never agrees."""
        close = self.loss <= TOLERANCE and self.gradient <= TOLERANCE
        return bool(self.unsupported) or close and self.compilations == 1 and not self.warnings

    def line(self) -> str:
        """Returns the table row under COLUMNS."""
        begin = f"{str(self.layout):{WIDTH}}{self.layout.num_microbatches:>12}"
        if self.unsupported:
            return f"{begin}  not supported: {self.unsupported}"
        verdict = "agrees" if self.agrees else "DIFFERS"
        verdict += f", {len(self.warnings)} XLA warnings" if self.warnings else ""
        return f"{begin}{self.loss:>10.1e}{self.gradient:>10.1e}{self.compilations:>10}  {verdict}"


class Parity(NamedTuple):
    """Comparison of all layouts with the first one."""

    reference: LayoutRun
    rows: list[Row]

    @property
    def passes(self) -> bool:
        """True if every supported layout agrees."""
        return all(row.agrees for row in self.rows)

    def lines(self) -> list[str]:
        """Returns the warnings, and the verdict with the largest differences."""
        done = [row for row in self.rows if not row.unsupported]
        first, last = self.reference.losses[[0, -1]]
        loss, gradient = max(row.loss for row in done), max(row.gradient for row in done)
        return [
            *[f"{row.layout}, microbatches {row.layout.num_microbatches}: {w}" for row in done for w in row.warnings],
            f"loss {first:.4f} to {last:.4f} in {NUM_STEPS} steps",
            f"parity: {'all layouts agree' if self.passes else 'layouts DIFFER'}; largest relative differences: loss "
            f"{loss:.1e}, gradient {gradient:.1e} (tolerance {TOLERANCE:.0e})",
        ]


def settings(cfg: RunConfig) -> RunConfig:
    """Returns cfg in float32, with SGD, a constant learning rate, no dropout, and sizes that all layouts support."""
    model = dataclasses.replace(
        cfg.model,
        compute_dtype="float32",
        embed_compute_dtype=None,
        matmul_precision="default" if cfg.model.matmul_precision == "tf32" else cfg.model.matmul_precision,
        vocab_size=-(-cfg.model.vocab_size // NUM_DEVICES) * NUM_DEVICES,
        **({"dropout": 0.0} if cfg.model.dropout else {}),
    )
    sgd = dict(name="sgd", b1=TINY_MOMENTUM, clip_norm=0.0)
    constant = dict(peak_lr=LR, min_lr=0.0, decay="constant", warmup_tokens=0)
    guard = dataclasses.replace(cfg.train.guard, max_grad_norm=float(np.finfo(np.float32).max), spike_ratio=0.0)
    return dataclasses.replace(
        cfg,
        model=model,
        batch_tokens=ROWS * cfg.seq_len,
        batch_ramp=(),
        seq_len_ramp=(),
        train_tokens=f"{NUM_STEPS} steps",
        optim=dataclasses.replace(cfg.optim, **sgd, **constant),
        train=dataclasses.replace(cfg.train, num_microbatches=1, guard=guard),
    )


def layouts(cfg: RunConfig) -> list[ParallelLayout]:
    """Returns the layouts of all_layouts() that the model supports, and a layout with the config's mesh."""
    configured = []
    with contextlib.suppress(ValueError):  # the config's mesh may not fit 8 devices
        shape = mesh_shape(cfg.mesh, NUM_DEVICES)
        configured = [ParallelLayout({axis: size for axis, size in shape.items() if size > 1}, cfg.rules, 1)]
    sizes = [size for size in (8, 4, 2) if not unsupported_reason(cfg, tensor_layout(size, 1))]
    found = all_layouts(sizes[0] if sizes else 2, experts=getattr(cfg.model, "experts", None) is not None)
    optional = [layout for layout in found if "context" in layout.mesh or "pipeline" in layout.mesh]
    found = [layout for layout in found if layout not in optional or not unsupported_reason(cfg, layout)]
    return found + [layout for layout in configured if layout not in found]


def verify(cfg: RunConfig, tested: Sequence[ParallelLayout], say: Callable[[str], None] = lambda text: None) -> Parity:
    """Compares every layout with the first one on the same batches. Prints a row for each layout."""
    batches = read_batches(cfg)
    say(f"relative differences to {tested[0]}\n{COLUMNS}")
    reference, rows = run(program(cfg, tested[0]), batches), []
    for layout in tested:
        if reason := unsupported_reason(cfg, layout):
            row = Row(layout, unsupported=reason)
        else:
            trace = reference if layout == tested[0] else run(program(cfg, layout), batches)
            row = compare(reference, trace, layout)
        rows.append(row)
        say(row.line())
    return Parity(reference, rows)


def read_batches(cfg: RunConfig) -> list[Batch]:
    """Returns the first batches of the run, on the host."""
    corpus = open_data(cfg.data, seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed)
    batches = corpus.batches(cfg.rows_per_step)
    return [batches.batch(n) for n in range(NUM_STEPS)]


def program(cfg: RunConfig, layout: ParallelLayout) -> Program:
    """Returns the compiled config in this layout."""
    pipeline_settings = dict(remat="full", remat_save=(), remat_offload=(), scan_layers=True)
    cfg = dataclasses.replace(
        cfg,
        mesh=MeshConfig(**({"fsdp": 1} | layout.mesh)),
        rules=layout.rules,
        context=ContextConfig(attention=layout.sharing),
        expert=ExpertConfig(exchange=layout.exchange),
        pipeline=layout.stages,
        model=dataclasses.replace(cfg.model, **pipeline_settings) if layout.mesh.get("pipeline", 1) > 1 else cfg.model,
        train=dataclasses.replace(cfg.train, num_microbatches=layout.num_microbatches),
    )
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[: math.prod(layout.mesh.values())])


def unsupported_reason(cfg: RunConfig, layout: ParallelLayout) -> str:
    """Returns '' if the model supports the layout, or the error."""
    try:
        program(cfg, layout)
    except BadInput as error:
        return str(error)
    return ""


def run(program: Program, batches: Sequence[Batch]) -> LayoutRun:
    """Trains on these batches from the initial parameters."""
    placed = [put_rows(batch, list(range(ROWS)), ROWS, program.batch_sharding) for batch in batches]
    state, losses, gradients = program.init(), [], []
    jax.block_until_ready((state, placed))
    with captured_stderr() as written, CompileLog() as log:
        for batch in placed:
            state, metrics = program.train_step(state, batch)
            losses.append(float(jax.device_get(metrics["objective"])))
            if len(gradients) < GRADIENT_STEPS:
                gradients.append([np.asarray(leaf) for leaf in jax.tree.leaves(state.opt_state)])
    warnings = [line for line in "".join(written).splitlines() if REMATERIALIZED in line]
    return LayoutRun(np.array(losses), gradients, log.count, warnings)


def compare(reference: LayoutRun, other: LayoutRun, layout: ParallelLayout) -> Row:
    """Returns the largest relative differences of a layout from the reference."""
    loss = np.max(np.abs(other.losses - reference.losses) / np.abs(reference.losses))
    gradient = max(relative_difference(*pair) for pair in zip(other.gradients, reference.gradients, strict=True))
    return Row(layout, float(loss), gradient, other.compilations, other.warnings)


def relative_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Returns norm(one - other) / norm(other) over all arrays, in float64. Returns NaN for 0 / 0."""
    square = lambda arrays: sum(float(np.sum(np.square(array, dtype=np.float64))) for array in arrays)
    norm = square(other) ** 0.5
    return square([a - b for a, b in zip(one, other, strict=True)]) ** 0.5 / norm if norm else float("nan")


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Yields a list that receives the output to file descriptor 2 on exit. `tee` also forwards this output."""
    written: list[str] = []
    sys.stderr.flush()
    stderr_fd = os.dup(2)
    with tempfile.NamedTemporaryFile(mode="r", encoding="utf-8", errors="replace") as file:
        copy = subprocess.Popen(["tee", "-i", file.name], stdin=subprocess.PIPE, stdout=stderr_fd)
        assert copy.stdin is not None, "it is a pipe"
        os.dup2(copy.stdin.fileno(), 2)
        try:
            yield written
        finally:
            sys.stderr.flush()
            os.dup2(stderr_fd, 2)
            os.close(stderr_fd)
            copy.stdin.close()
            copy.wait()
            written.append(file.read())


def on_simulated_devices(command: list[str]) -> None:
    """Re-executes `command` with 16 simulated devices, XLA warnings and no compilation cache, unless already set."""
    more = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TF_CPP_MIN_LOG_LEVEL": "1"}
    env = simulated_devices_env(MAX_DEVICES) | more
    if env != dict(os.environ):
        sys.stdout.flush()
        os.execve(command[0], command, env)
