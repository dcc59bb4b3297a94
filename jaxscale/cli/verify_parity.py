"""Proof that how the work is divided does not change the numbers: same losses and gradients in every layout.

The optimizer is plain SGD: Adam divides each gradient by its own size, which turns rounding near zero into whole steps.
Its momentum is 1e-30, far too small to move a float32, so that its state holds the last gradient and nothing else:
what is compared has gone through the very step that trains.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxscale.budget import resolve_budget
from jaxscale.build import Program, make_program
from jaxscale.cli.attempt import simulated_devices_env
from jaxscale.cli.parity_layouts import (
    MICROBATCHES,
    MOST_DEVICES,
    NUM_DEVICES,
    WIDTH,
    Layout,
    all_layouts,
    tensor_layout,
)
from jaxscale.config import RunConfig
from jaxscale.data.batch import Batch
from jaxscale.data.pipeline import open_data
from jaxscale.qualify.compilations import CompileLog
from jaxscale.sharding.config import ContextConfig, ExpertConfig, MeshConfig
from jaxscale.sharding.mesh import mesh_shape
from jaxscale.sharding.shardings import put_rows
from jaxscale.system.exits import BadInput

NUM_STEPS = 20  # whose losses are compared
GRADIENT_STEPS = 5  # and gradients; later ones are of parameters that rounding has moved apart
ROWS = NUM_DEVICES * max(MICROBATCHES)  # a row for each device in each microbatch
LR = 0.1  # the steps move the loss well beyond the tolerance
KEEPS_GRADIENT = 1e-30
TOLERANCE = 1e-5  # relative; float32 sums taken in another order differ by about 1e-7 each
REMATERIALIZED = "Involuntary full rematerialization"  # XLA's words for copying a whole array between devices
COLUMNS = f"{'layout':{WIDTH}}{'microbatches':>12}{'loss':>10}{'gradient':>10}{'compiled':>10}"


@dataclasses.dataclass(frozen=True)
class Trace:
    """What the steps in one layout gave."""

    losses: np.ndarray  # float64[steps]
    gradients: list[list[np.ndarray]]  # one list of arrays for each of the first steps
    compilations: int  # of anything, while the steps ran
    warnings: list[str]  # of XLA, on involuntary rematerialization


@dataclasses.dataclass(frozen=True)
class Row:
    """A layout against the reference."""

    layout: Layout
    loss: float = 0.0  # largest relative difference of a step's loss
    gradient: float = 0.0  # largest norm of the difference of an early step's gradient, over the norm
    compilations: int = 1
    warnings: Sequence[str] = ()
    impossible: str = ""  # why this model cannot be divided so

    @property
    def agrees(self) -> bool:
        """True within the tolerance, with one compilation and no warning. NaN agrees with nothing."""
        close = self.loss <= TOLERANCE and self.gradient <= TOLERANCE
        return bool(self.impossible) or close and self.compilations == 1 and not self.warnings

    def line(self) -> str:
        """The row of the table that COLUMNS heads."""
        begin = f"{str(self.layout):{WIDTH}}{self.layout.num_microbatches:>12}"
        if self.impossible:
            return f"{begin}  not possible: {self.impossible}"
        verdict = "agrees" if self.agrees else "BEYOND"
        verdict += f", {len(self.warnings)} warnings of XLA" if self.warnings else ""
        return f"{begin}{self.loss:>10.1e}{self.gradient:>10.1e}{self.compilations:>10}  {verdict}"


@dataclasses.dataclass(frozen=True)
class Parity:
    """All layouts against the first."""

    reference: Trace
    rows: list[Row]

    @property
    def agrees(self) -> bool:
        """True if every layout that is possible agrees."""
        return all(row.agrees for row in self.rows)

    def lines(self) -> list[str]:
        """The warnings, and the verdict with the largest differences."""
        done = [row for row in self.rows if not row.impossible]
        first, last = self.reference.losses[[0, -1]]
        loss, gradient = max(row.loss for row in done), max(row.gradient for row in done)
        return [
            *[f"{row.layout}, microbatches {row.layout.num_microbatches}: {w}" for row in done for w in row.warnings],
            f"loss {first:.4f} to {last:.4f} in {NUM_STEPS} steps",
            f"parity: {'agrees' if self.agrees else 'does NOT agree'}, largest difference {loss:.1e} in a loss "
            f"and {gradient:.1e} in a gradient (relative; tolerance {TOLERANCE:.0e})",
        ]


def settings(cfg: RunConfig) -> RunConfig:
    """The config in float32, under plain SGD with a constant rate, on rows enough for every layout.

    The vocabulary is rounded up, so that 8 devices can share it. Dropout is off, so that the losses tell more.
    """
    model = cfg.model
    own = {"dropout": 0.0} if model.dropout else {}
    model = dataclasses.replace(
        model,
        compute_dtype="float32",
        embed_compute_dtype=None,
        matmul_precision="default" if model.matmul_precision == "tf32" else model.matmul_precision,
        vocab_size=-(-model.vocab_size // NUM_DEVICES) * NUM_DEVICES,
        **own,
    )
    plain = dict(name="sgd", b1=KEEPS_GRADIENT, clip_norm=0.0)
    constant = dict(peak_lr=LR, min_lr=0.0, decay="constant", warmup_tokens=0)
    guard = dataclasses.replace(cfg.train.guard, max_grad_norm=float(np.finfo(np.float32).max), spike_ratio=0.0)
    return dataclasses.replace(
        cfg,
        model=model,
        batch_tokens=ROWS * cfg.seq_len,
        batch_ramp=(),
        seq_len_ramp=(),
        train_tokens=f"{NUM_STEPS} steps",
        optim=dataclasses.replace(cfg.optim, **plain, **constant),
        train=dataclasses.replace(cfg.train, num_microbatches=1, guard=guard),
    )


def layouts(cfg: RunConfig) -> list[Layout]:
    """What is proved: all_layouts() that this model can be divided by, and the config's own."""
    own = []
    with contextlib.suppress(ValueError):  # a mesh that 8 devices cannot be is not shown
        shape = mesh_shape(cfg.mesh, NUM_DEVICES)
        own = [Layout({axis: size for axis, size in shape.items() if size > 1}, cfg.rules, 1)]
    sizes = [size for size in (8, 4, 2) if not why_impossible(cfg, tensor_layout(size, 1))]
    wanted = all_layouts(sizes[0] if sizes else 2, experts=getattr(cfg.model, "experts", None) is not None)
    needs_more = [layout for layout in wanted if "context" in layout.mesh or "pipeline" in layout.mesh]
    wanted = [layout for layout in wanted if layout not in needs_more or not why_impossible(cfg, layout)]
    return wanted + [layout for layout in own if layout not in wanted]


def verify(cfg: RunConfig, wanted: Sequence[Layout], say: Callable[[str], None] = lambda text: None) -> Parity:
    """Every layout against the first of `wanted`, on the same batches; says a line for each as it is done."""
    batches = read_batches(cfg)
    say(f"relative differences to {wanted[0]}\n{COLUMNS}")
    reference, rows = run(program(cfg, wanted[0]), batches), []
    for layout in wanted:
        if reason := why_impossible(cfg, layout):
            row = Row(layout, impossible=reason)
        else:
            trace = reference if layout == wanted[0] else run(program(cfg, layout), batches)
            row = against(reference, trace, layout)
        rows.append(row)
        say(row.line())
    return Parity(reference, rows)


def read_batches(cfg: RunConfig) -> list[Batch]:
    """The first batches of the run, on the host."""
    corpus = open_data(cfg.data, seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed)
    batches = corpus.batches(cfg.rows_per_step)
    return [batches.batch(n) for n in range(NUM_STEPS)]


def program(cfg: RunConfig, layout: Layout) -> Program:
    """What the config compiles to in this layout."""
    stages_need = dict(remat="full", remat_save=(), remat_offload=(), scan_layers=True)
    cfg = dataclasses.replace(
        cfg,
        mesh=MeshConfig(**({"fsdp": 1} | layout.mesh)),
        rules=layout.rules,
        context=ContextConfig(attention=layout.sharing),
        expert=ExpertConfig(exchange=layout.exchange),
        pipeline=layout.stages,
        model=dataclasses.replace(cfg.model, **stages_need) if layout.mesh.get("pipeline", 1) > 1 else cfg.model,
        train=dataclasses.replace(cfg.train, num_microbatches=layout.num_microbatches),
    )
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[: layout.num_devices])


def why_impossible(cfg: RunConfig, layout: Layout) -> str:
    """'' if the model can be divided so, else why not."""
    try:
        program(cfg, layout)
    except BadInput as error:
        return str(error)
    return ""


def run(program: Program, batches: Sequence[Batch]) -> Trace:
    """Trains from the first parameters on these batches."""
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
    return Trace(np.array(losses), gradients, log.count, warnings)


def against(reference: Trace, other: Trace, layout: Layout) -> Row:
    """The largest relative differences of a layout to the reference."""
    loss = np.max(np.abs(other.losses - reference.losses) / np.abs(reference.losses))
    gradient = max(relative_difference(*pair) for pair in zip(other.gradients, reference.gradients, strict=True))
    return Row(layout, float(loss), gradient, other.compilations, other.warnings)


def relative_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Norm of the difference of two lists of arrays over the norm of the second, in float64; NaN for 0 over 0."""
    square = lambda arrays: sum(float(np.sum(np.square(array, dtype=np.float64))) for array in arrays)
    norm = square(other) ** 0.5
    return square([a - b for a, b in zip(one, other, strict=True)]) ** 0.5 / norm if norm else float("nan")


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """A list that holds, at the end, all that the process wrote to stderr meanwhile: XLA writes past sys.stderr.

    Another process passes it on as it comes, so that what XLA says before it ends this one is seen.
    """
    written: list[str] = []
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.NamedTemporaryFile(mode="r", encoding="utf-8", errors="replace") as file:
        copy = subprocess.Popen(["tee", "-i", file.name], stdin=subprocess.PIPE, stdout=own)
        assert copy.stdin is not None, "it is a pipe"
        os.dup2(copy.stdin.fileno(), 2)
        try:
            yield written
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            copy.stdin.close()
            copy.wait()
            written.append(file.read())


def on_simulated_devices(command: list[str]) -> None:
    """Returns if jax will see 16 simulated CPU devices, else re-executes `command` with them.

    The compilation cache is off there, since a program out of the cache gives no warning, and XLA's warnings are on.
    """
    wanted = simulated_devices_env(MOST_DEVICES) | {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    if wanted != dict(os.environ):
        sys.stdout.flush()
        os.execve(command[0], command, wanted)
