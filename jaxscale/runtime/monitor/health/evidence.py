"""Evidence for or against the causes of a finding, one function for each kind of cause."""

import collections
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.runtime.monitor.health.rule import RunFacts

NEAR_RECORDS = 20  # records within which an event can be a cause
AGAINST, NEUTRAL, FOR, STRONG = range(4)
MAX_HASHES = 10_000  # number of batches
MAX_BIAS_STEP = 0.1  # change of a bias difference per step, in score ranges; above it loads oscillate
EVENTS = ("resumed", "rewind", "lr_cut", "branch", "hang", "replicas_differ")  # events that can change the metrics


class Evidence(NamedTuple):
    """A weight, from AGAINST to STRONG, and its reason."""

    weight: int
    text: str


class RecentRecords:
    """The last records and events, and the token hashes of the batches so far."""

    def __init__(self) -> None:
        self.records: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=NEAR_RECORDS)
        self.events: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=50)
        self.batches: dict[str, int] = {}  # {tokens_hash: the first batch with it}
        self.repeats: collections.deque[tuple[int, int, int]] = collections.deque(maxlen=NEAR_RECORDS)
        self.highest_rate = 0.0

    def add(self, record: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> None:
        """Adds a record and the events since the previous one."""
        self.events.extend(event for event in events if event.get("event") in EVENTS)
        if "loss" not in record:
            return
        self.records.append(record)
        self.highest_rate = max(self.highest_rate, record.get("learning_rate") or 0.0)
        seen, batch = record.get("tokens_hash"), record.get("batch_index")
        if seen is None or batch is None:
            return
        first = self.batches.setdefault(seen, batch)
        if first != batch:
            self.repeats.append((record["step"], batch, first))
        if len(self.batches) > MAX_HASHES:
            del self.batches[next(iter(self.batches))]

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest training record."""
        return self.records[-1] if self.records else {}

    def known(self, name: str) -> list[Any]:
        """Returns the values of a metric, from the recent records that contain it."""
        return [record[name] for record in self.records if record.get(name) is not None]

    @property
    def width(self) -> int:
        """Number of steps that the recent records span."""
        return self.records[-1]["step"] - self.records[0]["step"] if len(self.records) > 1 else 0


def effective_step(event: Mapping[str, Any]) -> int | None:
    """Returns the first step that an event affects. For a rewind, this is the step that the run resumed from."""
    return event.get("to", event.get("step")) if event.get("event") == "rewind" else event.get("step")


def pair_with_events(
    records: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Yields (record, events since the previous record). Events after the last record are dropped."""
    steps = ((step, event) for event in events if (step := effective_step(event)) is not None)
    pending = collections.deque(sorted(steps, key=lambda pair: pair[0]))
    for record in records:
        due = []
        while pending and pending[0][0] <= record["step"]:
            due.append(pending.popleft()[1])
        yield record, due


EvidenceFn = Callable[[RecentRecords, RunFacts, int], Evidence]  # the last argument is the step of the first bad record


def warmup(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the warmup is too short: the step is in the warmup or soon after it."""
    if not facts.warmup_steps:
        return Evidence(NEUTRAL, "this run has no warmup, or it is unknown")
    if step <= facts.warmup_steps:
        return Evidence(FOR, f"step {step} is in the warmup, which ends at step {facts.warmup_steps}")
    since = step - facts.warmup_steps
    if since <= max(facts.warmup_steps / 2, 10):
        return Evidence(STRONG, f"the warmup ended at step {facts.warmup_steps}, {since} steps earlier")
    return Evidence(AGAINST, f"the warmup ended long before, at step {facts.warmup_steps}")


def rate(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the learning rate is too high: it is near its peak."""
    now = recent.last.get("learning_rate")
    if now is None or not recent.highest_rate:
        return Evidence(NEUTRAL, "the learning rate is unknown" if now is None else "the learning rate is 0")
    if now >= 0.9 * recent.highest_rate:
        return Evidence(FOR, f"the learning rate is {now:.3g}, its maximum so far")
    fraction = now / recent.highest_rate
    weight = NEUTRAL if fraction > 0.3 else AGAINST
    return Evidence(weight, f"the learning rate is {now:.3g}, {fraction:.0%} of its peak")


def low_rate(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the learning rate is too low, absolutely or relative to its peak."""
    now = recent.last.get("learning_rate")
    if now is None:
        return Evidence(NEUTRAL, "the learning rate is unknown")
    if now < 1e-6:
        return Evidence(STRONG, f"the learning rate is {now:.3g}; 1e-4 to 3e-4 is usual")
    if now < 0.5 * recent.highest_rate:
        return Evidence(FOR, f"the learning rate is {now:.3g}, {now / recent.highest_rate:.0%} of its peak")
    return Evidence(NEUTRAL, f"the learning rate is {now:.3g}")


def stage(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that a stage of the data mixture has just begun."""
    batch = recent.last.get("batch_index")
    if not facts.stage_batches or batch is None:
        return Evidence(AGAINST, "the mixture of sources does not change")
    started = [first for first in facts.stage_batches if first <= batch]
    if started and batch - started[-1] <= recent.width:
        return Evidence(STRONG, f"a stage of data.mixture started with batch {started[-1]}; this is batch {batch}")
    return Evidence(AGAINST, f"no stage of data.mixture started near batch {batch}")


def suspect_batch(recent: RecentRecords, step: int) -> tuple[int, int, int | None] | None:
    """Returns (batch, step, earlier batch with the same tokens) for a repeated batch near the step.

    If no batch is repeated, returns (batch, step, None) for the batch of the step, or None if its number is unknown.
    """
    for repeated, number, first in reversed(recent.repeats):
        if repeated >= step - recent.width:
            return number, repeated, first
    record = next((record for record in recent.records if record["step"] >= step), recent.last)
    number = record.get("batch_index")
    return None if number is None else (number, record["step"], None)


def batch(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the batch is bad: its number, and whether it repeats the tokens of an earlier batch."""
    if (found := suspect_batch(recent, step)) is None:
        return Evidence(NEUTRAL, "the batch number is unknown")
    n, trained_at, same_as = found
    hint = f"`jaxscale trace --workdir={shlex.quote(facts.workdir)} --batch={n}` lists its documents"
    if same_as is not None:
        return Evidence(STRONG, f"batch {n} has the same tokens as batch {same_as}: {hint}")
    return Evidence(FOR, f"step {trained_at} trained on batch {n}: {hint}")


def gradient(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the gradient norm was large, compared with the clip norm."""
    near = [record for record in recent.records if record["step"] <= step + recent.width]
    known = [(record["grad_norm"], record["step"]) for record in near if record.get("grad_norm") is not None]
    if not known:
        return Evidence(NEUTRAL, "the gradient norm is unknown or not finite")
    norm, at = max(known)
    if not facts.clip_norm:
        text = f"the largest norm was {norm:.3g} at step {at}; gradients are not clipped"
        return Evidence(FOR if norm > 10 else NEUTRAL, text)
    if norm > 3 * facts.clip_norm:
        text = f"the norm reached {norm:.3g} at step {at} and was clipped to {facts.clip_norm:g}"
        return Evidence(STRONG if norm > 10 * facts.clip_norm else FOR, text)
    return Evidence(AGAINST, f"the largest norm was {norm:.3g}, at step {at}, with clip_norm {facts.clip_norm:g}")


def numerics(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence of overflow or underflow: float16, or a varying loss scale."""
    if len(scales := set(recent.known("train/loss_scale"))) > 1:
        return Evidence(STRONG, f"the loss scale varied between {min(scales):g} and {max(scales):g}")
    if facts.compute_dtype == "float16":
        return Evidence(FOR, "model.compute_dtype is float16, whose largest number is 65504")
    if facts.compute_dtype == "float32":
        return Evidence(AGAINST, "model.compute_dtype is float32")
    return Evidence(NEUTRAL, f"model.compute_dtype is {facts.compute_dtype or 'unknown'}")


def float16(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the run computes in float16, in which small gradients underflow."""
    dtype = facts.compute_dtype
    if dtype == "float16":
        return Evidence(FOR, "model.compute_dtype is float16, whose smallest number is 6e-8")
    return Evidence(AGAINST if dtype else NEUTRAL, f"model.compute_dtype is {dtype or 'unknown'}")


def data_wait(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that steps wait for data."""
    pairs = [(record.get("data_wait_seconds"), record.get("step_seconds")) for record in list(recent.records)[-5:]]
    known = [(wait, seconds) for wait, seconds in pairs if wait is not None and seconds]
    if not known:
        return Evidence(NEUTRAL, "the time spent waiting for data is unknown")
    fraction = sum(wait for wait, _ in known) / sum(seconds for _, seconds in known)
    text = f"{min(fraction, 1):.0%} of the step was spent waiting for data"
    return Evidence(STRONG if fraction > 0.3 else FOR if fraction > 0.1 else AGAINST, text)


def recent_event(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the run was just resumed or rewound, or had its learning rate cut."""
    for event in reversed(recent.events):
        at = effective_step(event)
        if at is not None and step - max(recent.width, 1) <= at <= step:
            to = f", to step {at}" if at != event["step"] else ""
            return Evidence(STRONG, f"events.jsonl has '{event['event']}' at step {event['step']}{to}")
    return Evidence(AGAINST, "events.jsonl has no start, rewind or learning rate cut shortly before")


def skips(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the guard skipped steps."""
    if not (totals := recent.known("skipped_total")):
        return Evidence(NEUTRAL, "the number of skipped steps is unknown")
    skipped = totals[-1] - totals[0]
    if skipped > 0:
        return Evidence(FOR, f"{skipped} of the last {recent.width} steps were skipped by train.guard")
    return Evidence(AGAINST, "no recent step was skipped")


def other_work(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that other programs used the CPU of this host."""
    if not (shares := recent.known("host_other_share")):
        return Evidence(NEUTRAL, "the CPU use of other programs is unknown")
    share = sum(shares[-5:]) / len(shares[-5:])
    text = f"other programs used {share:.0%} of the CPU"
    return Evidence(STRONG if share > 0.5 else FOR if share > 0.2 else AGAINST, text)


def schedule(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence from the progress of the run in its schedule."""
    if not facts.total_steps:
        return Evidence(NEUTRAL, "the length of the run is unknown")
    text = (
        f"{step / facts.total_steps:.0%} of {facts.total_steps} steps are completed, decay: {facts.decay or 'unknown'}"
    )
    return Evidence(NEUTRAL, text)


def balance(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the experts are unbalanced because neither a router bias nor a balance loss is active."""
    if not facts.balanced_by:
        text = "neither model.experts.bias nor a balance loss in train.aux_losses is active"
        return Evidence(STRONG, text)
    return Evidence(AGAINST, f"experts are balanced by {' and '.join(facts.balanced_by)}")


def bias_rate(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Evidence that the router biases change by a large fraction of the scores in each step."""
    scores = recent.last.get("train/router_scores")
    if not facts.bias_rate or not scores:
        return Evidence(NEUTRAL, "biases do not change" if not facts.bias_rate else "the scores are unknown")
    fraction = 2 * facts.bias_rate / scores
    text = f"model.experts.bias_rate is {facts.bias_rate:g}, and the scores of a token span {scores:.3g}"
    return Evidence(STRONG if fraction > MAX_BIAS_STEP else FOR if fraction > 0.03 else AGAINST, text)


def no_evidence(recent: RecentRecords, facts: RunFacts, step: int) -> Evidence:
    """Neutral evidence, for causes that the metrics cannot show."""
    return Evidence(NEUTRAL, "cannot be seen in the metrics")


# causes that several rules share: (description, evidence function)
RATE = ("the learning rate is too high", rate)
BATCH = ("a bad batch: broken, repeated or very long documents", batch)
WARMUP = ("the warmup is too short", warmup)
STAGE = ("the data changed", stage)
NUMERICS = ("overflow or underflow in the computation", numerics)
RETURN = ("the run has just resumed or rewound", recent_event)
GRADIENT = ("a gradient explosion", gradient)
WAIT = ("the step waits for data", data_wait)
OTHER_PROGRAMS = ("other programs use the host's CPU", other_work)
SLOW_DEVICE = ("a device or a link is slow, or thermally throttled", no_evidence)
