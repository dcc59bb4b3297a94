"""Downtime of a run of several processes after one is killed, by phase, and the lost work.

  python -m benchmarks.restart --config=configs/quickstart.py --processes=4

Starts processes of the training command on this machine, each with its own local folder, like a host. The last process
is killed by SIGKILL during training and all processes are restarted at once, without local copies of checkpoints and
with them. The pause of a supervisor between two starts is not included.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import config_flags, run_main, show
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput

LOCAL = "JAXSCALE_BENCH_HOST"  # variable with the local folder of each process
MOST_SECONDS = 500.0  # timeout until a start reaches its first step
STEP, JOINED = (
    re.compile(r"step (\d+)/\d+  loss "),  # training; an evaluation may be printed before
    re.compile(r"processes: the roll call took ([\d.]+) s, jax.distributed.initialize ([\d.]+) s"),
)
PHASES = (
    ("detection", "until the first survivor reports the lost process"),
    ("teardown", "until the last process has exited"),
    ("imports", "start of new processes, until the roll call"),
    ("distributed init", "roll call and jax.distributed"),
    ("opening", "lock, list of checkpoints, data, program"),
    ("restore", "reads and verifies the state, opens record and metrics"),
    ("first step", "compilation or cache, the step, and its report"),
)


class Started:
    """The processes of one start, with the time of each printed line."""

    def __init__(self, flags: Sequence[str], count: int, folder: pathlib.Path):
        self.began, port = time.monotonic(), free_ports()
        self.lines: list[list[tuple[float, str]]] = [[] for _ in range(count)]
        self.processes = []
        for number in range(count):
            place = [f"--coordinator=localhost:{port}", f"--num_processes={count}", f"--process_id={number}"]
            env = os.environ | {LOCAL: str(folder / f"host{number}"), "PYTHONUNBUFFERED": "1"}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "jaxscale.main", *flags, *place],
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", env=env,
                )
            )  # fmt: skip
            threading.Thread(target=self.read, args=(number,), daemon=True).start()

    def read(self, number: int) -> None:
        """Records the time of each line of a process."""
        for line in self.processes[number].stdout:
            self.lines[number].append((time.monotonic(), line.rstrip("\n")))

    def find(self, pattern: str | re.Pattern, processes: Sequence[int] = (0,)) -> tuple[float, re.Match] | None:
        """Returns (time, match) of the first line that matches, or None."""
        found = [(when, re.search(pattern, line)) for one in processes for when, line in list(self.lines[one])]
        return min(((when, match) for when, match in found if match), key=lambda pair: pair[0], default=None)

    def wait_for(self, pattern: str | re.Pattern, processes: Sequence[int] = (0,)) -> tuple[float, re.Match]:
        """Waits for a line and returns find(). Raises BadInput with the last lines if the run ends before."""
        deadline = time.monotonic() + MOST_SECONDS
        while (found := self.find(pattern, processes)) is None:
            if all(process.poll() is not None for process in self.processes) or time.monotonic() > deadline:
                time.sleep(0.5)  # the last lines may not have been read yet
                if found := self.find(pattern, processes):
                    return found
                raise BadInput(
                    f"the run did not print {pattern!r}: {' | '.join(text for _, text in self.lines[0][-3:])}"
                )
            time.sleep(0.005)
        return found

    def steps(self) -> dict[int, float]:
        """Returns {step: time of its report}."""
        return {int(found[1]): when for when, line in list(self.lines[0]) if (found := STEP.match(line))}

    def end(self) -> None:
        """Kills the remaining processes."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@contextlib.contextmanager
def started(*arguments: Any) -> Iterator[Started]:
    """Yields a start whose processes are killed at the end of the block."""
    one = Started(*arguments)
    try:
        yield one
    finally:
        one.end()


def measure_restart(flags: Sequence[str], *, processes: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Returns medians of the phases of a restart and the lost work [s], without local copies and with them.

    `flags` are those of the training command without a work folder. Training lasts `seconds` before the kill.
    """
    ways = {"work folder alone": [], "local copies": [f"--config.checkpoint.local.folder=${LOCAL}"]}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for turn in range(rounds):
            for name, more in ways.items():
                place = pathlib.Path(folder, f"{name.replace(' ', '_')}_{turn}")
                place.mkdir()
                own = [*flags, *more, "--config.monitor.log_every_steps=1", "--config.monitor.progress=lines"]
                found[name].append(one_restart([*own, f"--workdir={place / 'run'}"], processes, seconds, place))
                shutil.rmtree(place)
    return {
        "processes": processes, "seconds": seconds, "rounds": rounds, "load": os.getloadavg()[0],
        "ways": {name: medians(turns) for name, turns in found.items()}, "turns": found,
    }  # fmt: skip


def medians(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of each value over several restarts."""
    middle = lambda name, of: statistics.median(one[name] for one in of)
    inner = [one["phases"] for one in turns]
    figures = [name for name in turns[0] if name != "phases"]
    return {"phases": {name: middle(name, inner) for name in inner[0]}} | {
        name: middle(name, turns) for name in figures
    }


def one_restart(flags: Sequence[str], count: int, seconds: float, folder: pathlib.Path) -> dict[str, Any]:
    """Measures one kill and restart."""
    with started(flags, count, folder) as before:
        before.wait_for(STEP)
        time.sleep(seconds)
        steps, killed = before.steps(), time.monotonic()
        before.processes[-1].send_signal(signal.SIGKILL)
        survivors = range(count - 1)
        named = before.wait_for("was lost|has left|broke", survivors)[0]
        for process in before.processes:
            process.wait(MOST_SECONDS)
        ended = time.monotonic()
    with started(flags, count, folder) as after:
        first = after.wait_for(STEP)[0]
        joined, took = after.wait_for(JOINED)
        described = after.wait_for("parameters, ")[0]
        restored = after.wait_for("^versions: ")[0]
        resumed = after.find(r"resuming from step (\d+)")
        began = after.began
    roll, jax = float(took[1]), float(took[2])
    times = [
        named - killed, ended - named, joined - began - roll - jax, roll + jax, described - joined,
        restored - described, first - restored,
    ]  # fmt: skip
    step = int(resumed[1][1]) if resumed else 0
    return {
        "phases": {name: spent for (name, _), spent in zip(PHASES, times, strict=True)},
        "still_seconds": (ended - killed) + (first - began),
        "step": step,
        "steps_lost": max(steps) - step,
        "work_lost_seconds": killed - steps.get(step, min(steps.values())),
    }


def free_ports() -> int:
    """Returns a port of this machine that is free together with the next port."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", port + 1))
                return port


def restart_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as lines of text."""
    ways = record["ways"]
    lines = [
        f"SIGKILL of one of {record['processes']} processes after {record['seconds']:g} s of training; medians of "
        f"{record['rounds']} (load {record['load']:.1f})",
        f"  {'seconds':<18}" + "".join(f"{name:>20}" for name in ways),
    ]
    for name, about in PHASES:
        lines.append(
            f"  {name:<18}" + "".join(f"{way['phases'][name]:>20.2f}" for way in ways.values()) + f"   {about}"
        )
    for name, key in (("kill to next step", "still_seconds"), ("work lost", "work_lost_seconds")):
        lines.append(f"  {name:<18}" + "".join(f"{way[key]:>20.2f}" for way in ways.values()))
    lines.append(f"  {'steps lost':<18}" + "".join(f"{way['steps_lost']:>20g}" for way in ways.values()))
    return lines


@dataclasses.dataclass(frozen=True)
class RestartFlags:
    """Flags of this benchmark."""

    config: str = flag("", "the run's config", "FILE")
    settings: dict[str, str] = flag(dict, "sets any setting", "VALUE", name="config.NAME")
    processes: int = flag(4, "processes of the run, of which the last is killed", least=2)
    kill_after: int = flag(20, "seconds of training before the kill", least=1)
    rounds: int = flag(1, "rounds of both variants", least=1)
    json: bool = flag(False, "one line of JSON")


@command(RestartFlags)
def main(arguments: Arguments) -> None:
    """Kills a process, restarts the run, and measures each phase."""
    flags = arguments.flags
    if not arguments.config:
        raise BadInput("restart trains on several processes; pass --config=FILE, such as configs/quickstart.py")
    record = measure_restart(
        config_flags(arguments), processes=flags.processes, seconds=flags.kill_after, rounds=flags.rounds
    )
    show(record, restart_lines(record), as_json=flags.json)


if __name__ == "__main__":
    run_main(main)
