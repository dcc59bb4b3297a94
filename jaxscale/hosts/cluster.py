"""Several processes as one run: who is who, the roll call, leaving together, and agreements on the way."""

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

from jaxscale.hosts.backstop import linger_on_abort
from jaxscale.hosts.config import host_budgets
from jaxscale.hosts.place import FLAGS, HostFlags, Place, find_own_place, number
from jaxscale.hosts.roll_call import call_roll, interface
from jaxscale.hosts.watch import Watch
from jaxscale.system.exits import BadInput, Exit, Stop, put, silence_closed_streams, tell, verdict
from jaxscale.system.open_files import check_open_files
from jaxscale.system.redact import redact, shown_traceback

SHUTDOWN_SECONDS = 60
SWITCH_SECONDS = 0.0005  # Python's own 0.005 would be how late the watch is where another thread computes
BROKEN = re.compile(r"Gloo|NCCL|Connection (reset|closed|refused)|Read timeout|[Hh]eartbeat|UNAVAILABLE|coordination")
NEWS_SECONDS = 3.0  # a collective that broke tells of a lost process before anybody has named it
SAME_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")  # where they differ, the programs do


__all__ = ["FLAGS", "HostFlags", "Place", "Team", "find_own_place", "joined"]


class Team:
    """The processes of a run. Called with a text it prints it, at the first one only: the first has said it for all."""

    def __init__(self, watch: Watch | None = None, process: int = 0, speaks: bool = True):
        self.watch, self.process, self.speaks = watch, process, speaks

    def __call__(self, text: str) -> None:
        if not self.speaks:
            return
        try:
            put(text)
        except BadInput as error:  # a log on a full disk ends no run
            self.speaks = False
            tell(f"WARNING: {error}")

    def tell_hang(self, line: str) -> None:
        """Tells all others that this process ends because of a hang, so that they leave their stacks and end too."""
        if self.watch:
            self.watch.tell_hang(line)

    def on_hang(self, heard: Callable[[str], None]) -> None:
        """heard(line) is called, in a thread, when another process has reported a hang."""
        if self.watch:
            self.watch.heard_hang = heard


@contextlib.contextmanager
def joined(place: Place | None, facts: Mapping[str, Any], flags: Mapping[str, str]) -> Iterator[Team]:
    """The body runs once all processes are there and run the same; gives the team, which prints at the first one only.

    If the body fails, this process ends here and now, and the others with it: Python's own way out would wait for them.
    Args: place: None for a run of one process, where nothing of this happens. facts: must be the same everywhere.
    """
    if place is None:
        yield Team()
        return
    # the first has two connections with each of the others: of the roll call, which stays, and of jax's service
    check_open_files(2 * place.num_processes if place.is_first else 2, "connections with other processes")
    given = flags.get("roll_call_seconds")
    usual = host_budgets(place.num_processes).roll_call_seconds
    seconds = usual if given is None else float(number("--roll_call_seconds", given))
    facts, began = {**facts, **own_facts()}, time.monotonic()
    watch = Watch(place, call_roll(place, facts, seconds), aborts=linger_on_abort())
    sys.setswitchinterval(SWITCH_SECONDS)
    called = time.monotonic()
    try:
        start_jax(place)
        team = Team(watch, place.process_id, jax.process_index() == 0)  # on a TPU, its own wiring numbers the processes
        joining = time.monotonic() - called
        team(f"{place.num_processes} processes: the roll call took {called - began:.2f} s, joining jax {joining:.2f} s")
        yield team
    except BaseException as error:
        end_with(watch, error)
    watch.goodbye(Exit.DONE)


def own_facts() -> dict[str, Any]:
    """What must be equal for the processes to compile the same program: versions, source, and jax's variables."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return versions | {"jaxscale's source": source_digest()} | {name: variable(name) for name in SAME_VARIABLES}


def variable(name: str) -> str:
    """The variable without what only says where to write dumps."""
    return " ".join(word for word in os.environ.get(name, "").split() if not word.startswith("--xla_dump"))


def source_digest() -> str:
    """Twelve hexadecimal digits that stand for this package's source."""
    package, content = pathlib.Path(__file__).parent.parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return content.hexdigest()[:12]


def start_jax(place: Place) -> None:
    """Joins this process to the others in jax, which then sees the devices of all."""
    # jax's own service would take SIGTERM away from us, and with it the second signal that leaves at once
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=address(place.host, place.port),
            num_processes=place.num_processes,
            process_id=place.process_id,
            local_device_ids=place.local_device_ids,
            cluster_detection_method="deactivate",  # it would give each Slurm process a single GPU
            coordinator_bind_address=address(interface(place.host), place.port) if place.is_first else None,
            heartbeat_timeout_seconds=host_budgets(place.num_processes).heartbeat_seconds,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (RuntimeError, OSError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Stop(
            Exit.PEER_LOST,
            f"jax could not join {place.name(place.process_id)} at {address(place.host, place.port)}: {cause}",
        ) from error
    if jax.process_count() != place.num_processes:
        raise Stop(
            Exit.BAD_INPUT,
            f"{place.num_processes} processes answered the roll call ({place.found_in}), and the devices, of kind "
            f"{jax.default_backend()}, belong to {jax.process_count()}; start one process for each host of the slices",
        )


def address(host: str, port: int) -> str:
    """'host:port', or '[::1]:port'."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def end_with(watch: Watch, error: BaseException) -> None:
    """Tells the others what has happened, prints it, and ends the process. Does not return."""
    code, line = verdict(error)
    if isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(NEWS_SECONDS)  # perhaps only the echo of another process's end, which the watch then puts into words
        if BROKEN.search(str(error)):
            cause = str(error).splitlines()[0][:200]
            code = Exit.PEER_LOST
            line = (
                f"stopped (peer_lost, exit {int(code)}): work with the other processes broke: {cause}; start all again"
            )
    tell(line or shown_traceback(error).rstrip("\n"))
    silence_closed_streams()
    watch.goodbye(code, redact(line or f"{type(error).__name__}: {str(error)[:500]}"))
    sys.stderr.flush()
    os._exit(int(code))
