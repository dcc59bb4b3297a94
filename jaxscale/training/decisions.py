"""What a run has decided about itself, read back from its events: it binds later starts, and a replay repeats it."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxscale.data.mixture import Detour
from jaxscale.training.recovery import Trouble

KINDS = ("resumed", "started", "skipped", "lr_cut", "rewind", "early_decay")  # that decisions are read from


class LrCut(NamedTuple):
    """The learning rate is multiplied by `factor` from step `step` to step `until`, both trained with it."""

    step: int
    factor: float
    until: int


class EarlyDecay(NamedTuple):
    """The decay begins after `step` steps, and the run ends after `until`: a limit would have cut it short."""

    step: int
    until: int


class GoneBack(NamedTuple):
    """One rewind."""

    number: int  # from 1
    to: int  # the checkpoint
    batch: int  # that would have come next at that checkpoint
    skip_batches: tuple[tuple[int, int], ...]
    clean: Detour | None  # batches of one source that come first afterwards
    why: str


class Decisions(NamedTuple):
    """Of the line of steps that leads to where the run is: what was decided on abandoned steps is not in it."""

    skipped: tuple[int, ...] = ()  # steps, from 1
    cuts: tuple[LrCut, ...] = ()
    rewinds: tuple[GoneBack, ...] = ()  # all of them: they bind
    pending: GoneBack | None = None  # decided, and not carried out before the process died
    recorded: tuple[Detour, ...] = ()  # in the checkpoint, which may have been copied without the events
    decay: EarlyDecay | None = None
    last_step: int = 0  # of a run that is replayed: decided up to here

    @property
    def skip_batches(self) -> list[tuple[int, int]]:
        """Batches that no step may train on any more."""
        return [part for rewind in self.rewinds for part in rewind.skip_batches]

    @property
    def detours(self) -> list[Detour]:
        """The batches of a single source that this line of the run has, where a rewind did not cut them off."""
        kept = list(self.recorded)  # those of its own rewinds are dropped, and decided again, below
        for rewind in self.rewinds:
            if rewind.why == "replicas":
                continue  # the same steps are run again, of the same batches
            kept = [detour for detour in kept if detour[0] < rewind.batch]
            if rewind.clean:
                kept = [(first, min(batches, rewind.batch - first), source) for first, batches, source in kept]
                kept.append(rewind.clean)
        return kept

    def up_to(self, step: int) -> "Decisions":
        """What is left of them where a run goes on from `step`. Rewinds bind all the same."""
        skipped = tuple(number for number in self.skipped if number <= step)
        cuts = tuple(cut for cut in self.cuts if cut.step <= step + 1)  # decided before the checkpoint was saved
        decay = self.decay if self.decay and self.decay.step <= step else None  # behind it, it is decided anew
        return self._replace(skipped=skipped, cuts=cuts, decay=decay, pending=None)

    def with_recorded(self, recorded: Mapping[str, Any] | None) -> "Decisions":
        """The same with the detours that a checkpoint tells of; recorded: its position in the data, if there is one."""
        detours = (recorded or {}).get("detours", ())
        return self._replace(recorded=tuple((first, batches, source) for first, batches, source in detours))

    def trouble(self, window_steps: int, step: int) -> Trouble:
        """What recovery remembers at the start from `step`."""
        bad = tuple(number for number in self.skipped if number > step - window_steps)
        rewinds = sum(rewind.why != "replicas" for rewind in self.rewinds)
        return Trouble(len(self.cuts), rewinds, bad, max((cut.step - 1 for cut in self.cuts), default=0))


def decisions_of(events: Iterable[dict[str, Any]]) -> Decisions:
    """The decisions, in the order of the log. A start from step n forgets what was decided behind n."""
    so_far = Decisions()
    for event in events:
        kind, step = event["event"], event["step"]
        if kind in ("resumed", "started"):
            so_far = so_far.up_to(step)
        elif kind == "skipped":
            so_far = so_far._replace(skipped=(*so_far.skipped, step))
        elif kind == "lr_cut":
            so_far = so_far._replace(cuts=(*so_far.cuts, LrCut(step, event["factor"], event["until"])))
        elif kind == "early_decay":
            so_far = so_far._replace(decay=EarlyDecay(step, event["until"]))
        elif kind == "rewind":
            parts = tuple((int(start), int(stop)) for start, stop in event["skip_batches"])
            clean = tuple(event["clean"]) if event["clean"] else None
            rewind = GoneBack(len(so_far.rewinds) + 1, event["to"], event["batch"], parts, clean, event["why"])
            so_far = so_far._replace(rewinds=(*so_far.rewinds, rewind), pending=rewind)
    return so_far


def deciding(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that decisions are read from."""
    return [event for event in events if event["event"] in KINDS]
