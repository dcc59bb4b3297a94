"""Decisions of a run (recovery, early decay), read from its events by later starts of the run and by replays."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxscale.runtime.data.mixture import Detour
from jaxscale.runtime.training.recovery import RecoveryState

EVENT_KINDS = ("resumed", "started", "skipped", "lr_cut", "rewind", "early_decay")


class LrCut(NamedTuple):
    """Multiplies the learning rate by `factor` from step `step` to step `until`, inclusive."""

    step: int
    factor: float
    until: int


class EarlyDecay(NamedTuple):
    """A decay that begins after step `step`, and ends the run at step `until` to stay within a limit."""

    step: int
    until: int


class Rewind(NamedTuple):
    """A rewind to a checkpoint."""

    number: int  # counted from 1
    to: int  # step of the checkpoint
    batch: int  # index of the next batch at that checkpoint
    skip_batches: tuple[tuple[int, int], ...]
    clean: Detour | None  # batches of a single source to train on first
    reason: str  # 'skipped' or 'replicas'


class Decisions(NamedTuple):
    """Decisions of a run, without decisions on abandoned steps."""

    skipped: tuple[int, ...] = ()  # steps, counted from 1
    cuts: tuple[LrCut, ...] = ()
    rewinds: tuple[Rewind, ...] = ()  # all rewinds of the run
    pending: Rewind | None = None  # decided, but not carried out before the process died
    recorded_detours: tuple[Detour, ...] = ()  # from the checkpoint, which may be a copy without events
    decay: EarlyDecay | None = None
    last_step: int = 0  # for a replayed run, its last step with decisions

    @property
    def skip_batches(self) -> list[tuple[int, int]]:
        """Ranges of batches that rewinds skip."""
        return [part for rewind in self.rewinds for part in rewind.skip_batches]

    @property
    def detours(self) -> list[Detour]:
        """Ranges of batches from a single source, without the parts that later rewinds removed."""
        detours = list(self.recorded_detours)  # detours of this run's rewinds are dropped and added again below
        for rewind in self.rewinds:
            if rewind.reason == "replicas":
                continue  # the same steps run again on the same batches
            detours = [detour for detour in detours if detour[0] < rewind.batch]
            if rewind.clean:
                detours = [(first, min(batches, rewind.batch - first), source) for first, batches, source in detours]
                detours.append(rewind.clean)
        return detours

    def up_to(self, step: int) -> "Decisions":
        """Returns the decisions up to `step`, for a run that continues from this step. Includes all rewinds."""
        skipped = tuple(number for number in self.skipped if number <= step)
        cuts = tuple(cut for cut in self.cuts if cut.step <= step + 1)  # decided before the checkpoint was saved
        decay = self.decay if self.decay and self.decay.step <= step else None  # a later decay is decided again
        return self._replace(skipped=skipped, cuts=cuts, decay=decay, pending=None)

    def with_recorded_detours(self, position: Mapping[str, Any] | None) -> "Decisions":
        """Returns the decisions with the detours in a checkpoint's data position, if there is a position."""
        detours = (position or {}).get("detours", ())
        return self._replace(recorded_detours=tuple((first, batches, source) for first, batches, source in detours))

    def recovery_state(self, window_steps: int, step: int) -> RecoveryState:
        """Returns the state of recovery for a start from `step`."""
        bad = tuple(number for number in self.skipped if number > step - window_steps)
        rewinds = sum(rewind.reason != "replicas" for rewind in self.rewinds)
        return RecoveryState(len(self.cuts), rewinds, bad, max((cut.step - 1 for cut in self.cuts), default=0))


def parse_decisions(events: Iterable[dict[str, Any]]) -> Decisions:
    """Returns the decisions in an event log. If the run restarts from step n, later decisions are dropped."""
    decisions = Decisions()
    for event in events:
        kind, step = event["event"], event["step"]
        if kind in ("resumed", "started"):
            decisions = decisions.up_to(step)
        elif kind == "skipped":
            decisions = decisions._replace(skipped=(*decisions.skipped, step))
        elif kind == "lr_cut":
            decisions = decisions._replace(cuts=(*decisions.cuts, LrCut(step, event["factor"], event["until"])))
        elif kind == "early_decay":
            decisions = decisions._replace(decay=EarlyDecay(step, event["until"]))
        elif kind == "rewind":
            ranges = tuple((int(start), int(stop)) for start, stop in event["skip_batches"])
            clean = tuple(event["clean"]) if event["clean"] else None
            rewind = Rewind(len(decisions.rewinds) + 1, event["to"], event["batch"], ranges, clean, event["why"])
            decisions = decisions._replace(rewinds=(*decisions.rewinds, rewind), pending=rewind)
    return decisions


def decision_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the events that parse_decisions() reads."""
    return [event for event in events if event["event"] in EVENT_KINDS]
