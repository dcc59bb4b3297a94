"""What a run holds for or against a cause: one small function for each kind of evidence."""

import collections
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.monitor.health.finding import RunFacts

NEAR_RECORDS = 20  # records within which one thing may have led to another
AGAINST, NOTHING, FOR, STRONG = range(4)
REMEMBERED = 10_000  # batches by their hash
MOST_OF_SCORES = 0.1  # by which a step may move two experts apart: more, and loads swing from step to step
TELLING = ("resumed", "rewind", "lr_cut", "branch", "hang", "replicas_differ")  # events that change what is measured


class Evidence(NamedTuple):
    """How much it weighs, and in words."""

    weight: int
    text: str


class Past:
    """The last records and events, and the hashes of the batches so far."""

    def __init__(self) -> None:
        self.records: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=NEAR_RECORDS)
        self.events: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=50)
        self.batches: dict[str, int] = {}  # hash of the tokens: the first batch that had it
        self.repeats: collections.deque[tuple[int, int, int]] = collections.deque(maxlen=NEAR_RECORDS)
        self.highest_rate = 0.0

    def add(self, record: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> None:
        """Takes in a record, and what happened before it."""
        self.events.extend(event for event in events if event.get("event") in TELLING)
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
        if len(self.batches) > REMEMBERED:
            del self.batches[next(iter(self.batches))]

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest training record."""
        return self.records[-1] if self.records else {}

    @property
    def width(self) -> int:
        """Steps that the last records are apart in all."""
        return self.records[-1]["step"] - self.records[0]["step"] if len(self.records) > 1 else 0


def place_of(event: Mapping[str, Any]) -> int | None:
    """The step from which on an event shows in the metrics: of a rewind, that which the run went on from."""
    return event.get("to", event.get("step")) if event.get("event") == "rewind" else event.get("step")


def with_events(
    records: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Yields each record with the events that are due with it; those that lie behind the last record are left out."""
    placed = sorted(((place, event) for event in events if (place := place_of(event)) is not None), key=lambda p: p[0])
    waiting = collections.deque(placed)
    for record in records:
        due = []
        while waiting and waiting[0][0] <= record["step"]:
            due.append(waiting.popleft()[1])
        yield record, due


Ask = Callable[[Past, RunFacts, int], Evidence]  # step: of the first bad record


def warmup(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether the warmup has just ended."""
    if not facts.warmup_steps:
        return Evidence(NOTHING, "this run has no warmup, or it is not known")
    if step <= facts.warmup_steps:
        return Evidence(FOR, f"step {step} lies in the warmup, which ends at step {facts.warmup_steps}")
    since = step - facts.warmup_steps
    if since <= max(facts.warmup_steps / 2, 10):
        return Evidence(STRONG, f"the warmup ended at step {facts.warmup_steps}, {since} steps before")
    return Evidence(AGAINST, f"the warmup ended at step {facts.warmup_steps}, long before")


def rate(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether the learning rate is at its peak."""
    now = past.last.get("learning_rate")
    if now is None or not past.highest_rate:
        return Evidence(NOTHING, "the learning rate is not known" if now is None else "the learning rate is 0")
    if now >= 0.9 * past.highest_rate:
        return Evidence(FOR, f"the learning rate is {now:.3g}, at its highest so far")
    part = now / past.highest_rate
    return Evidence(NOTHING if part > 0.3 else AGAINST, f"the learning rate is {now:.3g}, {part:.0%} of its peak")


def low_rate(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether the learning rate is small, in itself or beside its peak."""
    now = past.last.get("learning_rate")
    if now is None:
        return Evidence(NOTHING, "the learning rate is not known")
    if now < 1e-6:
        return Evidence(STRONG, f"the learning rate is {now:.3g}; 1e-4 to 3e-4 is usual")
    if now < 0.5 * past.highest_rate:
        return Evidence(FOR, f"the learning rate is {now:.3g}, {now / past.highest_rate:.0%} of its peak")
    return Evidence(NOTHING, f"the learning rate is {now:.3g}")


def stage(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether a stage of the mixture has just begun."""
    batch = past.last.get("batch_index")
    if not facts.stage_batches or batch is None:
        return Evidence(AGAINST, "the mixture of sources is the same all along")
    begun = [first for first in facts.stage_batches if first <= batch]
    if begun and batch - begun[-1] <= past.width:
        return Evidence(STRONG, f"a stage of data.mixture began with batch {begun[-1]}; this is batch {batch}")
    return Evidence(AGAINST, f"no stage of data.mixture began near batch {batch}")


class Suspect(NamedTuple):
    """The batch that a person should look at."""

    number: int
    step: int  # that trained on it
    same_as: int | None  # an earlier batch of the very same tokens


def suspect(past: Past, step: int) -> Suspect | None:
    """A batch that came a second time near the step, or else that of the step; None where its number is not known."""
    for repeated, number, first in reversed(past.repeats):
        if repeated >= step - past.width:
            return Suspect(number, repeated, first)
    record = next((record for record in past.records if record["step"] >= step), past.last)
    number = record.get("batch_index")
    return None if number is None else Suspect(number, record["step"], None)


def batch(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Which batch it was, and whether one like it came before."""
    if (found := suspect(past, step)) is None:
        return Evidence(NOTHING, "the number of the batch is not known")
    if found.same_as is not None:
        text = f"batch {found.number} has the very tokens of batch {found.same_as}: {trace(facts, found.number)}"
        return Evidence(STRONG, text)
    return Evidence(FOR, f"step {found.step} trained on batch {found.number}: {trace(facts, found.number)}")


def trace(facts: RunFacts, number: int) -> str:
    """The command that lists a batch's documents."""
    return f"`jaxscale trace --workdir={shlex.quote(facts.workdir)} --batch={number}` lists its documents"


def gradient(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether the gradient was large before the loss was, and was clipped."""
    norms = [
        (record["step"], record.get("grad_norm")) for record in past.records if record["step"] <= step + past.width
    ]
    known = [(norm, at) for at, norm in norms if norm is not None]
    if not known:
        return Evidence(NOTHING, "the gradient norm is not known, or not finite")
    norm, at = max(known)
    if not facts.clip_norm:
        return Evidence(
            FOR if norm > 10 else NOTHING, f"the largest norm was {norm:.3g} at step {at}; nothing is clipped"
        )
    if norm > 3 * facts.clip_norm:
        text = f"the norm reached {norm:.3g} at step {at} and was clipped to {facts.clip_norm:g}"
        return Evidence(STRONG if norm > 10 * facts.clip_norm else FOR, text)
    return Evidence(AGAINST, f"the largest norm was {norm:.3g}, at step {at}, with clip_norm {facts.clip_norm:g}")


def numerics(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether the computation has few bits, or a loss scale that moves."""
    scales = {scale for record in past.records if (scale := record.get("train/loss_scale")) is not None}
    if len(scales) > 1:
        return Evidence(STRONG, f"the loss scale moved between {min(scales):g} and {max(scales):g}")
    if facts.compute_dtype == "float16":
        return Evidence(FOR, "model.compute_dtype is float16, which ends at 65504")
    if facts.compute_dtype == "float32":
        return Evidence(AGAINST, "model.compute_dtype is float32")
    return Evidence(NOTHING, f"model.compute_dtype is {facts.compute_dtype or 'not known'}")


def float16(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether the run computes in float16, in which small gradients underflow."""
    dtype = facts.compute_dtype
    if dtype == "float16":
        return Evidence(FOR, "model.compute_dtype is float16, whose smallest number is 6e-8")
    return Evidence(AGAINST if dtype else NOTHING, f"model.compute_dtype is {dtype or 'not known'}")


def data_wait(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether the step waits for data."""
    pairs = [(record.get("data_wait_seconds"), record.get("step_seconds")) for record in list(past.records)[-5:]]
    known = [(wait, seconds) for wait, seconds in pairs if wait is not None and seconds]
    if not known:
        return Evidence(NOTHING, "the wait for data is not known")
    part = sum(wait for wait, _ in known) / sum(seconds for _, seconds in known)
    text = f"{min(part, 1):.0%} of the step was spent waiting for data"
    return Evidence(STRONG if part > 0.3 else FOR if part > 0.1 else AGAINST, text)


def happened(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether the run was resumed, went back, or had its rate cut just before."""
    for event in reversed(past.events):
        at = place_of(event)
        if at is not None and step - max(past.width, 1) <= at <= step:
            to = f", to step {at}" if at != event["step"] else ""
            return Evidence(STRONG, f"events.jsonl has '{event['event']}' at step {event['step']}{to}")
    return Evidence(AGAINST, "events.jsonl has no start, rewind or cut of the rate near it")


def skips(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether the guard refused steps."""
    totals = [record["skipped_total"] for record in past.records if record.get("skipped_total") is not None]
    if not totals:
        return Evidence(NOTHING, "skipped steps are not known")
    skipped = totals[-1] - totals[0]
    if skipped > 0:
        return Evidence(FOR, f"{skipped} of the last {past.width} steps were skipped by train.guard")
    return Evidence(AGAINST, "no step near it was skipped")


def other_work(past: Past, facts: RunFacts, step: int) -> Evidence:
    """How much of this host's processors other programs took."""
    shares = [record["host_other_share"] for record in past.records if record.get("host_other_share") is not None]
    if not shares:
        return Evidence(NOTHING, "whose work the processors do is not known")
    part = sum(shares[-5:]) / len(shares[-5:])
    text = f"other programs took {part:.0%} of the processors"
    return Evidence(STRONG if part > 0.5 else FOR if part > 0.2 else AGAINST, text)


def schedule(past: Past, facts: RunFacts, step: int) -> Evidence:
    """How far along its schedule the run is."""
    if not facts.total_steps:
        return Evidence(NOTHING, "the length of the run is not known")
    text = f"{step / facts.total_steps:.0%} of {facts.total_steps} steps are done, decay {facts.decay or 'unknown'}"
    return Evidence(NOTHING, text)


def balance(past: Past, facts: RunFacts, step: int) -> Evidence:
    """Whether anything keeps experts equally busy."""
    if not facts.balanced_by:
        return Evidence(
            STRONG, "there is neither model.experts.bias with a rate nor a balance loss in train.aux_losses"
        )
    return Evidence(AGAINST, f"they are balanced by {' and '.join(facts.balanced_by)}")


def bias_rate(past: Past, facts: RunFacts, step: int) -> Evidence:
    """How fast biases move, beside the scores that they are added to."""
    scores = past.last.get("train/router_scores")
    if not facts.bias_rate or not scores:
        return Evidence(NOTHING, "no bias moves" if not facts.bias_rate else "the scores are not known")
    part = 2 * facts.bias_rate / scores
    text = f"model.experts.bias_rate is {facts.bias_rate:g}, and the scores of a token lie {scores:.3g} apart"
    return Evidence(STRONG if part > MOST_OF_SCORES else FOR if part > 0.03 else AGAINST, text)


def silent(past: Past, facts: RunFacts, step: int) -> Evidence:
    """For causes that leave no trace in the metrics."""
    return Evidence(NOTHING, "the metrics do not tell")
