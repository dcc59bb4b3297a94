"""Runs all probes in order with time estimates and watchdog phases, and writes the result after each probe."""

import dataclasses
import datetime
import json
import socket
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

import jax

from jaxscale.runtime.hosts.agree import FailedElsewhere, agreed, align_keys, gathered, next_key
from jaxscale.runtime.monitor.runinfo import versions
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop, print_stderr
from jaxscale.tools.planning.measured import QUALIFY, save_measured
from jaxscale.tools.qualify.axis_bandwidth import measure_links
from jaxscale.tools.qualify.kernels import measure_kernels
from jaxscale.tools.qualify.model import measure_model
from jaxscale.tools.qualify.products import measure_devices, measure_products
from jaxscale.tools.qualify.qualification_page import make_page
from jaxscale.tools.qualify.result import Machine, Probe, Qualification, first_words
from jaxscale.tools.qualify.storage import measure_storage
from jaxscale.units import duration

# Expected seconds of each probe on an accelerator, mostly for compilation. Assumed, and only used for time estimates.
EXPECTED = {"products": 20.0, "devices": 20.0, "links": 60.0, "kernels": 90.0, "step": 180.0, "storage": 60.0}
PROBES = tuple(EXPECTED)


def qualify(
    machine: Machine, *, only: Collection[str] = PROBES, say: Callable[[str], None], clock=time.monotonic
) -> Qualification:
    """Runs the probes in all processes. Process 0 writes the result after each probe, even if the probe fails."""
    began, records = clock(), []

    def measure_step(machine: Machine) -> Probe:
        probe, record = measure_model(machine)
        records.extend(filter(None, [record]))
        return probe

    functions = (measure_products, measure_devices, measure_links, measure_kernels, measure_step, measure_storage)
    hosts = tuple(dict.fromkeys(gathered(next_key("hosts"), socket.gethostname())))
    found: list[Probe] = []
    wanted = [name for name in PROBES if name in only]
    result = describe(machine, hosts, (), 0.0, tuple(wanted))
    for name, function in zip(PROBES, functions):
        elapsed = agreed(lambda: clock() - began)
        if name not in only:
            found.append(Probe(name=name, left_out=True, notes=("not requested",)))
        elif elapsed > machine.seconds:
            found.append(Probe(name=name, left_out=True, notes=(f"time limit reached after {duration(elapsed)}",)))
        else:
            number = wanted.index(name) + 1
            say(f"[{number}/{len(wanted)}] {name}: {to_go(wanted[: number - 1], wanted[number - 1 :], elapsed)}")
            found.append(attempt(name, function, machine, clock))
            state = f"{found[-1].state} in {duration(found[-1].seconds)}"
            say("\n".join(f"      {line}" for line in (state, *found[-1].failures)))
        left = tuple(name for name in PROBES[len(found) :] if name in only)
        result = describe(machine, hosts, tuple(found), clock() - began, left)
        if jax.process_index() == 0:
            write(result, machine.folder)
    if records and jax.process_index() == 0:
        storage = [figure for probe in found if probe.name == "storage" for figure in probe.figures]
        rate = next((figure.value for figure in storage if figure.name.startswith("save")), None)
        save_measured(dataclasses.replace(records[0], by=QUALIFY, save_bytes_per_second=rate))
    return result


def to_go(done: Collection[str], ahead: Collection[str], elapsed: float) -> str:
    """Returns text such as 'about 3m20s left', from the expected times of the probes and the speed so far."""
    pace = elapsed / sum(EXPECTED[name] for name in done) if done else 1.0
    return f"about {duration(pace * sum(EXPECTED[name] for name in ahead))} left"


def attempt(name: str, function: Callable[[Machine], Probe], machine: Machine, clock: Callable[[], float]) -> Probe:
    """Runs a probe. Returns its result with its duration and the failures of all processes.

    If local work fails in a process, the process waits for the others at the end of the probe. If a collective fails,
    the other processes wait until their watchdog ends the run. Raises Stop if a process is lost.
    """
    began, key, process = clock(), next_key("probe"), jax.process_index()
    try:
        with machine.phase(name):
            probe = function(machine)
    except FailedElsewhere:
        probe = Probe(name=name)
    except Exception as error:
        if isinstance(error, Stop) and error.code == Exit.PEER_LOST:
            raise
        probe = Probe(name=name, problem=first_words(error), traceback=traceback.format_exc())
        if jax.process_count() > 1:  # logged at once, since other processes may wait until the timeout
            print_stderr(f"process {process}: {name} failed: {probe.problem}")
    try:
        answers = gathered(key, [probe.problem, list(probe.outside)], machine.wait_seconds)
    except TimeoutError as error:
        raise Stop(Exit.PEER_LOST, f"{name} failed: {error}; restart all processes") from None
    if any(problem for problem, _ in answers):
        align_keys(f"{key}/numbers")
    problems, outside = [probe.problem] if probe.problem else [], []
    for other, (problem, lines) in enumerate(answers):
        if other != process:
            problems += [f"process {other}: {problem}"] if problem and problem != probe.problem else []
            outside += [f"process {other}: {line}" for line in lines if line not in probe.outside]
    joined = "; ".join(problems)
    return dataclasses.replace(probe, problem=joined, elsewhere=tuple(outside), seconds=clock() - began)


def describe(
    machine: Machine, hosts: tuple[str, ...], probes: tuple[Probe, ...], seconds: float, unfinished: tuple[str, ...]
) -> Qualification:
    """Returns the result of the probes finished so far."""
    chip = machine.chip
    return Qualification(
        devices=f"{len(machine.devices)} x {machine.devices[0].device_kind}",
        hosts=hosts,
        num_processes=jax.process_count(),
        chip=chip and chip.name,
        datasheet=chip.source if chip else "",
        floors=machine.floors,
        probes=probes,
        seconds=seconds,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(),
        unfinished=unfinished,
    )


def write(result: Qualification, folder: Any) -> None:
    """Writes qualify.json and qualify.html to the folder."""
    text = json.dumps(result.to_dict(), indent=1, default=str, allow_nan=False)
    paths.write_text_atomic(folder / "qualify.json", text + "\n")
    paths.write_text_atomic(folder / "qualify.html", make_page(result))
