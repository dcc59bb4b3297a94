"""Time limits of the phases of a run, and limits that depend on the number of hosts."""

import dataclasses
import math

from jaxscale.schema import adjustable
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class HostBudgets:
    """Timeouts and restart limit of a run. Values that are too small can end a run on healthy hosts."""

    roll_call_seconds: float  # timeout until all processes have joined
    heartbeat_seconds: int  # time without a heartbeat after which a process counts as frozen
    max_fruitless: int  # consecutive starts without a new checkpoint


def host_budgets(num_processes: int) -> HostBudgets:
    """Returns the timeouts and limits for num_processes. All runs of up to 16 processes have the same values.

    Roll call: all processes wait for the slowest host. If startup times have an exponential tail of about a minute (an
    assumption, for image pulls and late machines), doubling the number of hosts delays the slowest host by
    60 s x ln 2. The timeout grows by a minute per doubling. The roll call itself is fast (benchmarks/hosts.py).

    Heartbeats: process 0 answers them, and one late heartbeat ends the run, so at most 50 are sent per second. A dead
    host is detected within 7 s by its connection, for any number of hosts (roll_call.py).

    Restarts: an attempt ends if any host fails, so with more hosts, more attempts end before their first checkpoint. A
    second bad host is found only after the first is replaced. Each doubling beyond 64 hosts adds one attempt. A healthy
    run is then stopped with a probability below 1/1000, if a quarter of the attempts fail on 64 hosts (5 in a row), or
    half of the attempts on 2,048 hosts (10 in a row). A run on 2,048 hosts with H100 GPUs had a failure every 3.1 h
    (arXiv:2407.21783: 419 in 54 days on 16,384 GPUs).
    """
    doublings = lambda beyond: max(0, math.ceil(math.log2(num_processes / beyond)))
    return HostBudgets(
        roll_call_seconds=300.0 + 60.0 * doublings(16),
        heartbeat_seconds=max(10, math.ceil(num_processes / 50)),
        max_fruitless=5 + doublings(64),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangConfig:
    """Time limits of phases in seconds. A phase that exceeds its limit is a hang (exit code 15). 0: no limit."""

    step_seconds: float = adjustable(600.0, "one training step, including the metrics of the previous step")
    data_seconds: float = adjustable(600.0, "waiting for the batch of a step")
    compile_seconds: float = adjustable(3600.0, "the first step of a start, including its compilation")
    restore_seconds: float = adjustable(3600.0, "reading a checkpoint, or initializing the state")
    save_seconds: float = adjustable(3600.0, "saving a checkpoint, from the snapshot to its verification")
    eval_seconds: float = adjustable(3600.0, "one validation or one sample, including its compilation")
    statistics_seconds: float = adjustable(
        3600.0, "statistics of the layers at one step, with their compilation", read_if="monitor.statistics_every_steps"
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            seconds = getattr(self, field.name)
            if not (math.isfinite(seconds) and (seconds == 0 or seconds >= 1)):
                raise BadInput(f"{field.name}={seconds} must be 0 (no limit) or at least 1")
