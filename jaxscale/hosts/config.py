"""How long each phase of a run may take, and what follows the number of its hosts."""

import dataclasses
import math

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class HostBudgets:
    """What processes of a run allow each other. One that allows too little ends a run of healthy hosts."""

    roll_call_seconds: float  # until all must be there
    heartbeat_seconds: int  # without a sign of life, which counts as frozen
    max_fruitless: int  # starts in a row without a new checkpoint


def host_budgets(num_processes: int) -> HostBudgets:
    """The budgets of a run of so many processes; up to 16 those of a small one.

    Roll call: all wait for the slowest of n starts. If what a start takes has an exponential tail of about a minute
    (images pulled, machines booted one late; an assumption), the slowest of twice as many comes 60 s x ln 2 later: a
    minute is added for each doubling. Calling itself is quick: benchmarks/hosts.py.

    Heartbeats are answered by the first process, and one that comes too late, on any of n hosts, ends the run: at most
    50 a second fall due. A host that is dead and not frozen is found out in 7 s by its connection, however many there
    are (roll_call.py).

    Restarts: whatever ends any host ends the start, so that with n hosts more starts end before their first checkpoint,
    and a second bad host is found only when the first is replaced. One more start for each doubling past 64 keeps the
    chance of giving up a healthy run under 1/1000 where that happens to every fourth start (5 in a row) of 64 hosts,
    and to every second one (10 in a row) of 2,048. On 2,048 hosts of H100 something ended every 3.1 h
    (arXiv:2407.21783: 419 times in 54 days on 16,384 GPUs).
    """
    doublings = lambda beyond: max(0, math.ceil(math.log2(num_processes / beyond)))
    return HostBudgets(
        roll_call_seconds=300.0 + 60.0 * doublings(16),
        heartbeat_seconds=max(10, math.ceil(num_processes / 50)),
        max_fruitless=5 + doublings(64),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangConfig:
    """How long a phase of the run may take before it counts as a hang (exit 15), in seconds; 0: for ever."""

    step_seconds: float = setting(600.0, "one training step, and the metrics of the step before", may_change=True)
    data_seconds: float = setting(600.0, "waiting for the batch of a step", may_change=True)
    compile_seconds: float = setting(3600.0, "the first step of a start, with its compilation", may_change=True)
    restore_seconds: float = setting(3600.0, "reading a checkpoint, or making the first state", may_change=True)
    save_seconds: float = setting(3600.0, "saving a checkpoint, from the snapshot to its verification", may_change=True)
    eval_seconds: float = setting(3600.0, "one validation, or one sample, with its compilation", may_change=True)
    statistics_seconds: float = setting(
        3600.0,
        "one look at the statistics of the layers, with its compilation",
        may_change=True,
        read_if="monitor.statistics_every_steps",
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            seconds = getattr(self, field.name)
            if not (math.isfinite(seconds) and (seconds == 0 or seconds >= 1)):
                raise BadInput(f"{field.name}={seconds} must be 0 (never a hang) or at least 1")
