"""What a run does about copies of its state that differ: the same steps once more, and then a verdict."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxscale.monitor.events import Note, ignore
from jaxscale.system.exits import Exit, Stop
from jaxscale.training.config import ReplicaConfig
from jaxscale.training.replicas import ReplicaReport


class ReplicaWatch:
    """Compares the copies, and remembers a difference while its steps are run again: one object over both."""

    def __init__(
        self,
        cfg: ReplicaConfig,
        check: Callable[[Any], ReplicaReport],
        *,
        note: Note = ignore,
        say: Callable[[str], None] = print,
    ):
        self.cfg, self.check, self.note, self.say = cfg, check, note, say
        self.suspected: int | None = None  # the step after which copies differed
        self.passing: Counter[int] = Counter()  # by device

    def due(self, step: int, saving: bool) -> bool:
        """True if the copies are to be compared after `step` steps. Before a save always: what is saved is believed."""
        every = self.cfg.every_steps
        return every > 0 and (saving or step % every == 0 or step == self.suspected)

    def agree(self, step: int, state: Any) -> bool:
        """True if all copies of the state after `step` steps are the same; if not, go back and run these steps again.

        All processes get the same answer. Raises Stop (SILENT_CORRUPTION) naming the device if they differ again, or if
        one device has had too many faults that passed.
        """
        report = self.check(state)
        if report.same:
            if self.suspected is not None and step >= self.suspected:
                self.tell(step, "passing", "the same steps give the same copies now: a fault that has passed")
                self.suspected = None
            return True
        if self.suspected is not None:
            self.end(
                step, report, f"and the steps up to {self.suspected}, run once more, end in different copies again"
            )
        self.passing.update(report.devices)
        often = [device for device in report.devices if self.passing[device] > self.cfg.max_passing]
        if often:
            times = ", ".join(f"device {device} for the {self.passing[device]}th time" for device in often)
            self.end(step, report, f"{times}, and train.replicas.max_passing={self.cfg.max_passing}")
        self.suspected = step
        self.tell(step, "unknown", f"{report}; the same steps are run again from the last checkpoint", report)
        return False

    def end(self, step: int, report: ReplicaReport, why: str) -> None:
        """Raises the Stop that names the device."""
        self.tell(step, "lasting", f"{report}: {why}", report)
        raise Stop(
            Exit.SILENT_CORRUPTION,
            f"after step {step} {report}, {why}; take the device's machine out of the run and start the same command: "
            "the checkpoints were saved from copies that agreed",
        )

    def tell(self, step: int, verdict: str, text: str, report: ReplicaReport | None = None) -> None:
        """Reports a difference or its end, to people and as an event."""
        facts = {"devices": list(report.devices), "leaves": list(report.leaves)} if report else {}
        self.note("replicas_differ", step, verdict=verdict, **facts)
        self.say(f"replicas, step {step}: {text}")
