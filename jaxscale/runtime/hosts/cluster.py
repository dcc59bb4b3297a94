"""Runs of several processes: roll call, jax.distributed, and a coordinated exit."""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

import jaxscale
from jaxscale.runtime.hosts.config import host_budgets
from jaxscale.runtime.hosts.discovery import FLAGS, HostFlags, ProcessInfo, discover_process, parse_number
from jaxscale.runtime.hosts.roll_call import call_roll, interface
from jaxscale.runtime.hosts.watch import Watch, linger_on_abort
from jaxscale.system.exits import BadInput, Exit, Stop, print_stderr, put, silence_closed_streams, verdict
from jaxscale.system.open_files import check_open_files
from jaxscale.system.redact import redact, shown_traceback

SHUTDOWN_SECONDS = 60
SWITCH_SECONDS = 0.0005  # Python's default of 0.005 would delay the watch while another thread computes
BROKEN = re.compile(r"Gloo|NCCL|Connection (reset|closed|refused)|Read timeout|[Hh]eartbeat|UNAVAILABLE|coordination")
LOST_PEER_SECONDS = 3.0  # a broken collective can precede the message that names the lost process
SAME_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that change the compiled program


__all__ = ["FLAGS", "HostFlags", "ProcessInfo", "Team", "discover_process", "joined"]


class Team:
    """The processes of a run. Calling a Team prints a text in the primary process only."""

    def __init__(self, watch: Watch | None = None, process: int = 0, primary: bool = True):
        self.watch, self.process, self.primary = watch, process, primary

    def __call__(self, text: str) -> None:
        if not self.primary:
            return
        try:
            put(text)
        except BadInput as error:  # a log on a full disk must not end the run
            self.primary = False
            print_stderr(f"WARNING: {error}")

    def report_hang(self, line: str) -> None:
        """Reports a hang of this process to all other processes, which then also write their stacks and exit."""
        if self.watch:
            self.watch.report_hang(line)

    def on_hang(self, callback: Callable[[str], None]) -> None:
        """Sets a function callback(line) that a thread calls when another process reports a hang."""
        if self.watch:
            self.watch.hang_callback = callback


@contextlib.contextmanager
def joined(place: ProcessInfo | None, facts: Mapping[str, Any], flags: Mapping[str, str]) -> Iterator[Team]:
    """Yields the team once all processes have joined with equal facts.

    An exception in the body ends this process immediately, then the others. Python's normal exit would wait for them.
    place: None for a run with a single process. facts: values that must be equal in all processes.
    """
    if place is None:
        yield Team()
        return
    # process 0 has two connections to every other process: for the roll call, which stays open, and for jax's service
    check_open_files(2 * place.num_processes if place.is_first else 2, "connections with other processes")
    text = flags.get("roll_call_seconds")
    default = host_budgets(place.num_processes).roll_call_seconds
    seconds = default if text is None else float(parse_number("--roll_call_seconds", text))
    facts, began = {**facts, **program_facts()}, time.monotonic()
    watch = Watch(place, call_roll(place, facts, seconds), aborts=linger_on_abort())
    sys.setswitchinterval(SWITCH_SECONDS)
    called = time.monotonic()
    try:
        start_jax(place)
        team = Team(watch, place.process_id, jax.process_index() == 0)  # TPUs number processes by their topology
        joining = time.monotonic() - called
        team(
            f"{place.num_processes} processes: the roll call took {called - began:.2f} s, "
            f"jax.distributed.initialize {joining:.2f} s"
        )
        yield team
    except BaseException as error:
        end_with(watch, error)
    watch.goodbye(Exit.DONE)


def program_facts() -> dict[str, Any]:
    """Returns the values that determine the compiled program: versions, source code, and jax's variables."""
    facts = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    package, source = pathlib.Path(jaxscale.__path__[0]), hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        source.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    facts["jaxscale's source"] = source.hexdigest()[:12]
    for name in SAME_VARIABLES:
        words = os.environ.get(name, "").split()
        facts[name] = " ".join(word for word in words if not word.startswith("--xla_dump"))
    return facts


def start_jax(place: ProcessInfo) -> None:
    """Initializes jax.distributed."""
    # jax's preemption service would handle SIGTERM, so that a second signal would not exit at once
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=address(place.host, place.port),
            num_processes=place.num_processes,
            process_id=place.process_id,
            local_device_ids=place.local_device_ids,
            cluster_detection_method="deactivate",  # jax would assign each Slurm process a single GPU
            coordinator_bind_address=address(interface(place.host), place.port) if place.is_first else None,
            heartbeat_timeout_seconds=host_budgets(place.num_processes).heartbeat_seconds,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (RuntimeError, OSError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Stop(
            Exit.PEER_LOST,
            f"jax.distributed.initialize failed in {place.name(place.process_id)} with the coordinator "
            f"{address(place.host, place.port)}: {cause}",
        ) from error
    if jax.process_count() != place.num_processes:
        raise Stop(
            Exit.BAD_INPUT,
            f"{place.num_processes} processes joined ({place.found_in}), but the {jax.default_backend()} devices "
            f"belong to {jax.process_count()} processes; start one process on each host of each slice",
        )


def address(host: str, port: int) -> str:
    """Returns 'host:port', or '[::1]:port'."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def end_with(watch: Watch, error: BaseException) -> None:
    """Prints the error, sends it to the other processes, and exits. Does not return."""
    code, line = verdict(error)
    if isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(LOST_PEER_SECONDS)  # if another process was lost, the watch reports it and exits first
        if BROKEN.search(str(error)):
            cause = str(error).splitlines()[0][:200]
            code = Exit.PEER_LOST
            line = (
                f"stopped (peer_lost, exit {int(code)}): communication with other processes failed: {cause}; "
                "restart all"
            )
    print_stderr(line or shown_traceback(error).rstrip("\n"))
    silence_closed_streams()
    watch.goodbye(code, redact(line or f"{type(error).__name__}: {str(error)[:500]}"))
    sys.stderr.flush()
    os._exit(int(code))
