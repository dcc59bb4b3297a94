"""Step times of pipeline schedules on simulated CPU devices, compared with the schedule simulator.

  python -m benchmarks.pipeline_stages --spec=S --devices=2

Each simulated device computes on one thread, so that an idle stage leaves its core idle. The results are meaningful
only if the machine has a core for each stage.
"""

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from benchmarks import run_main, show
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.core.axes.pipeline_schedules import EQUAL_COSTS, Costs, Schedule
from jaxscale.core.config import MeshConfig, PipelineConfig, ScheduleName
from jaxscale.core.models.config import BLOCKS
from jaxscale.program.budget import resolve_budget
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.attempt import simulated_devices_env
from jaxscale.system.exits import put
from jaxscale.tools.planning.schedule_times import simulated_seconds
from jaxscale.tools.qualify.step import SpecFlags, place, random_batches, read_config

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
COLUMNS = (
    f"{'schedule':12}{'chunks':>8}{'microbatches':>14}{'bubble':>9}{'simulated s':>13}{'measured s':>12}{'ratio':>8}"
)


class Cut(NamedTuple):
    """A schedule to be measured."""

    name: ScheduleName
    chunks: int
    microbatches: int


@dataclasses.dataclass(frozen=True)
class Timed:
    """A measured schedule."""

    cut: Cut
    schedule: Schedule
    seconds: float


def cuts(stages: int) -> list[Cut]:
    """Returns the schedules to measure. The first has the smallest bubble; its time defines the simulator's unit."""
    most = 8 * stages
    return [
        Cut("1f1b", 1, most), Cut("1f1b", 1, 4 * stages), Cut("1f1b", 1, 2 * stages), Cut("1f1b", 1, stages),
        Cut("1f1b", 2, stages), Cut("1f1b", 2, 2 * stages), Cut("gpipe", 1, stages), Cut("gpipe", 1, 4 * stages),
        Cut("zero_bubble", 1, stages), Cut("zero_bubble", 1, 2 * stages), Cut("zero_bubble", 2, stages),
    ]  # fmt: skip


def measure_stages(cfg: RunConfig, stages: int, steps: int, put: Callable[[str], None]) -> dict[str, Any]:
    """Times a step of each schedule with microbatches of one row, and prints a line for each. Returns the record."""
    put(COLUMNS)
    rows, unit = [], 0.0
    for cut in cuts(stages):
        timed = time_steps(cfg, stages, cut, steps)
        simulated = in_units(cfg, timed.schedule)
        unit = unit or timed.seconds / simulated  # seconds of a layer's forward pass
        bubble, ratio = timed.schedule.bubble, timed.seconds / (unit * simulated)
        found = dict(bubble=bubble, simulated_s=unit * simulated, measured_s=timed.seconds, ratio=ratio)
        rows.append(cut._asdict() | found)
        put(line(rows[-1]))
    return {"stages": stages, "cores": os.cpu_count(), "rows": rows}


def in_units(cfg: RunConfig, schedule: Schedule) -> float:
    """Returns the simulated step time, in units of a layer's forward pass. Each part of a backward pass takes one unit.

    The head, with a forward and a backward pass, is divided among the stages.
    """
    model = cfg.model
    layers = model.layer_stacks[BLOCKS] + model.leading_layers
    layers /= schedule.num_stages * schedule.num_chunks
    head = model.vocab_size * model.embed_dim / model.block_matrix_params / schedule.num_stages
    return simulated_seconds(schedule, Costs(*(layers * part for part in EQUAL_COSTS)), head=3 * head)


def time_steps(cfg: RunConfig, stages: int, cut: Cut, steps: int) -> Timed:
    """Returns the median time of `steps` steps, after an untimed step."""
    cfg = dataclasses.replace(
        cfg,
        batch_tokens=cut.microbatches * cfg.seq_len,
        batch_ramp=(),
        seq_len_ramp=(),
        mesh=MeshConfig(pipeline=stages, fsdp=1),
        pipeline=PipelineConfig(schedule=cut.name, chunks=cut.chunks),
        model=dataclasses.replace(cfg.model, remat="full", scan_layers=True),
        train=dataclasses.replace(cfg.train, num_microbatches=cut.microbatches),
    )
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:stages])
    state, batch, seconds = program.init(), place(program, random_batches(program, 1)[0]), []
    for _ in range(1 + steps):
        began = time.perf_counter()
        state, metrics = program.train_step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    schedule = program.model.plan.pipeline.schedule(cut.name, cut.microbatches)
    return Timed(cut, schedule, statistics.median(seconds[1:]))


def line(row: dict[str, Any]) -> str:
    """Returns a row of the table with the header COLUMNS."""
    return (
        f"{row['name']:12}{row['chunks']:>8}{row['microbatches']:>14}{row['bubble']:>9.1%}{row['simulated_s']:>13.3f}"
        f"{row['measured_s']:>12.3f}{row['ratio']:>8.2f}"
    )


def stage_lines(record: dict[str, Any]) -> list[str]:
    """Returns a summary of the table."""
    far = max(abs(row["ratio"] - 1) for row in record["rows"])
    few = record["cores"] < record["stages"]
    cores = f"{record['cores']} cores" + (", fewer than stages: idle stages leave their cores to others" if few else "")
    return [f"{record['stages']} stages on {cores}; the first row defines the unit; ratios are within {far:.0%} of 1"]


def on_stages(stages: int, command: list[str]) -> None:
    """Re-executes `command` with `stages` simulated devices of one thread each, unless jax already has them."""
    env = simulated_devices_env(stages)
    if ONE_THREAD not in env["XLA_FLAGS"]:
        env["XLA_FLAGS"] += f" {ONE_THREAD}"
    if env != dict(os.environ):
        sys.stdout.flush()
        os.execve(command[0], command, env)


@dataclasses.dataclass(frozen=True)
class StagesFlags(SpecFlags):
    """Flags of this benchmark."""

    devices: int = flag(2, "pipeline stages, one simulated CPU device each", least=2)
    steps: int = flag(3, "timed steps of each schedule", least=1)
    json: bool = flag(False, "one line of JSON")


@command(StagesFlags)
def main(arguments: Arguments) -> None:
    """Times each schedule."""
    flags = arguments.flags
    on_stages(flags.devices, [sys.executable, "-m", "benchmarks.pipeline_stages", *arguments.words])
    say = (lambda text: None) if flags.json else put
    record = measure_stages(read_config(arguments)[1], flags.devices, flags.steps, say)
    show(record, stage_lines(record), as_json=flags.json)


if __name__ == "__main__":
    run_main(main)
