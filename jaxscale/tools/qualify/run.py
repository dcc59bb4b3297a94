"""Runs all probes in order, with a time estimate and a watchdog phase for each, and writes the result after each."""

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
from jaxscale.tools.planning.measured import QUALIFY, Measured, save_measured
from jaxscale.tools.qualify.kernels import measure_kernels
from jaxscale.tools.qualify.link_bandwidth import measure_links
from jaxscale.tools.qualify.model import measure_model
from jaxscale.tools.qualify.products import measure_devices, measure_products
from jaxscale.tools.qualify.qualification_page import make_page
from jaxscale.tools.qualify.result import Machine, Probe, ProbeFunction, Qualification, first_words
from jaxscale.tools.qualify.storage import measure_storage
from jaxscale.units import duration

# Expected seconds of each probe on an accelerator, mostly compilation; assumed, used only for the time estimate.
EXPECTED = {"products": 20.0, "devices": 20.0, "links": 60.0, "kernels": 90.0, "step": 180.0, "storage": 60.0}
PROBES = tuple(EXPECTED)


class Kept:
    """Holds the step probe's record for `jaxscale plan`."""

    measured: Measured | None = None


def probe_functions(kept: Kept) -> dict[str, ProbeFunction]:
    """Returns {name: probe function} in the order of PROBES; the step probe sets kept.measured."""

    def step(machine: Machine) -> Probe:
        probe, kept.measured = measure_model(machine)
        return probe

    functions = (measure_products, measure_devices, measure_links, measure_kernels, step, measure_storage)
    return dict(zip(PROBES, functions))


def qualify(
    machine: Machine, *, only: Collection[str] = PROBES, say: Callable[[str], None], clock=time.monotonic
) -> Qualification:
    """Runs the probes; writes qualify.json and qualify.html after each. All processes call it, and process 0 writes.

    A failed probe is part of the result. A probe that hangs is ended by the watchdog, through machine.phase.
    """
    began, step_result = clock(), Kept()
    hosts = tuple(dict.fromkeys(gathered(next_key("hosts"), socket.gethostname())))
    found: list[Probe] = []
    wanted = [name for name in PROBES if name in only]
    result = describe(machine, hosts, (), 0.0, tuple(wanted))
    for name, function in probe_functions(step_result).items():
        elapsed = agreed(lambda: clock() - began)
        if name not in only:
            found.append(Probe(name=name, left_out=True, notes=("not asked for",)))
        elif elapsed > machine.seconds:
            found.append(Probe(name=name, left_out=True, notes=(f"no time was left after {duration(elapsed)}",)))
        else:
            number = wanted.index(name) + 1
            say(f"[{number}/{len(wanted)}] {name}: {to_go(wanted[: number - 1], wanted[number - 1 :], elapsed)}")
            found.append(attempt(name, function, machine, clock))
            say(f"      {probe_line(found[-1])}")
        left = tuple(name for name in PROBES[len(found) :] if name in only)
        result = describe(machine, hosts, tuple(found), clock() - began, left)
        if jax.process_index() == 0:
            write(result, machine.folder)
    if step_result.measured is not None and jax.process_index() == 0:
        save_measured(dataclasses.replace(step_result.measured, by=QUALIFY, save_bytes_per_second=save_rate(found)))
    return result


def to_go(done: Collection[str], ahead: Collection[str], elapsed: float) -> str:
    """Returns the time estimate, such as 'about 3m20s to go', from the expected times and the pace so far."""
    pace = elapsed / sum(EXPECTED[name] for name in done) if done else 1.0
    return f"about {duration(pace * sum(EXPECTED[name] for name in ahead))} to go"


def attempt(name: str, function: ProbeFunction, machine: Machine, clock: Callable[[], float]) -> Probe:
    """Runs a probe. Returns it with its duration and the failures of all processes.

    A process that fails in local work rejoins the others at the end of the probe. If it fails in a collective, the
    others wait in it until their watchdog ends the run. Raises Stop if a process is lost.
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
        if jax.process_count() > 1:  # logged now: the others may wait for this process until the timeout
            print_stderr(f"process {process}: {name} failed: {probe.problem}")
    try:
        answers = gathered(key, [probe.problem, list(probe.outside)], machine.wait_seconds)
    except TimeoutError as error:
        raise Stop(Exit.PEER_LOST, f"{name}: {error}; start all again") from None
    if any(problem for problem, _ in answers):
        align_keys(f"{key}/numbers")
    problems, outside = [probe.problem] if probe.problem else [], []
    for other, (problem, lines) in enumerate(answers):
        if other != process:
            problems += [f"process {other}: {problem}"] if problem and problem != probe.problem else []
            outside += [f"process {other}: {line}" for line in lines if line not in probe.outside]
    joined = "; ".join(problems)
    return dataclasses.replace(probe, problem=joined, elsewhere=tuple(outside), seconds=clock() - began)


def probe_line(probe: Probe) -> str:
    """Returns state and duration, such as 'passed in 12s', followed by a line for each failure."""
    return f"{probe.state} in {duration(probe.seconds)}" + "".join(f"\n      {line}" for line in probe.failures)


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


def save_rate(probes: Collection[Probe]) -> float | None:
    """Returns the measured bytes/s of a save over all hosts; None if it was not measured."""
    figures = [figure for probe in probes if probe.name == "storage" for figure in probe.figures]
    return next((figure.value for figure in figures if figure.name.startswith("save")), None)
