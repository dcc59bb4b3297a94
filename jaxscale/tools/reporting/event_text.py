"""Text of events for the incident log and for the marks in plots."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.runtime.monitor.goodput import unix_time
from jaxscale.runtime.monitor.health.rule import is_harmless
from jaxscale.runtime.monitor.history import is_number
from jaxscale.runtime.monitor.run_files import as_list
from jaxscale.system.exits import is_failure, meaning
from jaxscale.tools.reporting.page_text import clock, plain, seconds
from jaxscale.tools.reporting.plots import Mark

TROUBLE = frozenset(
    "save_failed fallback set_aside skipped spike alarm alert lr_cut rewind lock_stolen hang replicas_differ "
    "overrun".split()
)
MARKED = tuple("spike alarm alert lr_cut rewind hang replicas_differ fallback overrun early_decay".split())
RESTARTS = ("resumed", "branch")
MOST_MARKS = 60
MOST_INCIDENTS = 300
LONGEST, LONGEST_MARK = 1200, 200  # most characters of an incident in the log, and of a mark


class Incident(NamedTuple):
    """A line of the incident log."""

    when: str
    step: str
    what: str
    is_trouble: bool


def incidents(events: Sequence[Mapping[str, Any]]) -> tuple[list[Incident], int]:
    """Returns (newest incidents, number of omitted incidents). Consecutive saves or skipped steps are merged."""
    found = []
    for kind, group in itertools.groupby(events, key=lambda event: event["event"]):
        members = list(group)
        if kind == "saved":
            found.append(several_saves(members))
        elif kind == "skipped" and len(members) > 1:
            steps = [event["step"] for event in members if is_number(event.get("step"))]
            reasons = ", ".join(dict.fromkeys(str(event.get("why")) for event in members))
            what = f"{len(members)} steps skipped: {reasons}"
            found.append(Incident(when(members[-1]), span(steps), what, True))
        else:
            for event in members:
                step = f"{event['step']:,}" if is_number(event.get("step")) else ""
                message = shortened(event_message(event), LONGEST)
                found.append(Incident(when(event), step, message, is_trouble(event)))
    return found[-MOST_INCIDENTS:], max(len(found) - MOST_INCIDENTS, 0)


def shortened(text: str, most: int) -> str:
    """Returns the text, shortened to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3].rstrip()}..."


def several_saves(events: Sequence[Mapping[str, Any]]) -> Incident:
    """Returns one incident for consecutive checkpoints."""
    steps = [event["step"] for event in events if is_number(event.get("step"))]
    times = [event["seconds"] for event in events if is_number(event.get("seconds"))]
    sizes = [event["bytes"] for event in events if is_number(event.get("bytes"))]
    bad = [event["step"] for event in events if event.get("verified") is False]
    many = len(events) > 1
    what = f"{len(events)} checkpoints saved" if many else "checkpoint saved"
    if times:
        what += f", {units.duration(statistics.median(times))}{' each' if many else ''}"
    if sizes:
        what += f", {units.size(sizes[-1])}"
    if bad:
        what += f"; NOT verified: {', '.join(map(str, bad))}"
    return Incident(when(events[-1]), span(steps), what, bool(bad))


def span(steps: Sequence[float]) -> str:
    """Returns text such as '100 to 400', or '100' for one step."""
    if not steps:
        return ""
    low, high = min(steps), max(steps)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def when(event: Mapping[str, Any]) -> str:
    """Returns the time of an event as text, or '' if unknown."""
    return clock(unix_time(event.get("time")))


def event_message(event: Mapping[str, Any]) -> str:
    """Returns the message of an event."""
    get = event.get
    cause = str(get("cause") or "")
    batch = f", batch {get('batch'):,}" if is_number(get("batch")) else ""
    metrics = (("loss", "loss"), ("grad_norm", "gradient norm"))
    numbers = ", ".join(f"{word} {plain(get(name))}" for name, word in metrics if is_number(get(name)))
    match event["event"]:
        case "started":
            return f"started{devices_text(get('devices'))}"
        case "resumed":
            return f"resumed{devices_text(get('devices'))}{changes_text(get('changed'))}"
        case "restored":
            return f"checkpoint restored{facts_text(event)}"
        case "branch":
            return f"branched from {described(get('ancestor'))}"
        case "saved":
            return several_saves([event]).what
        case "save_failed":
            repeated = f" ({get('in_row')} in a row)" if is_number(get("in_row")) else ""
            return f"checkpoint save failed: {cause}{repeated}"
        case "fallback":
            return f"the checkpoint could not be restored; resumed from step {get('to')}: {cause}"
        case "set_aside":
            return f"checkpoint moved aside ({get('why')})" + (f": {cause}" if cause else "")
        case "skipped":
            return f"step skipped: {get('why')}{'; ' + numbers if numbers else ''}{batch}"
        case "spike":
            return f"loss spike: {numbers}{batch}"
        case "alarm":
            waited = f"waited {seconds(get('waited'))}" if is_number(get("waited")) else ""
            parts = [str(get("what") or cause), numbers, waited]
            return ("" if is_harmless(event) else "alarm: ") + "; ".join(filter(None, parts)) + batch
        case "alert":
            return alert_text(event)
        case "lr_cut":
            return f"learning rate multiplied by {described(get('factor'))} until step {get('until')}"
        case "overrun":
            late = get("over_seconds")
            over = f"; forecast end {units.duration(late)} after it" if is_number(late) else ""
            ends = "the decay will start early" if get("decays") is True else "the run continues"
            return f"{get('limit')} {'has passed' if get('passed') is True else 'will be exceeded'}{over}; {ends}"
        case "early_decay":
            return f"the decay starts early, and the run ends at step {get('until')}: {get('why')}"
        case "rewind":
            return rewind_text(event)
        case "stopped":
            code = get("code")
            ending = meaning(code) if isinstance(code, int) else "ended"
            return ending if str(get("why")) in ("", "None", "done") else f"{ending}: {get('why')}"
        case "hang":
            return f"no progress: {cause}"
        case "replicas_differ":
            return f"replicas of the state differ between devices: {get('verdict')}"
        case "lock_stolen":
            return f"another process took the folder's lock ({get('why')}): {get('holder')}"
        case "signal":
            return f"signal {get('name') or get('signal') or cause}"
        case kind:
            return f"{kind}{facts_text(event)}"


def rewind_text(event: Mapping[str, Any]) -> str:
    """Returns the message of a rewind, with the target step, the reason and the skipped batches."""
    skips = as_list(event.get("skip_batches"))
    ranges = ", ".join(f"{part[0]} to {part[1] - 1}" for part in skips if is_pair(part))
    to = event.get("to")
    lost = f", {event['step'] - to:,} steps discarded" if is_number(to) and is_number(event.get("step")) else ""
    reasons = {"skipped": "too many steps were skipped", "replicas": "replicas of the state differed"}
    reason = reasons.get(str(event.get("why")), event.get("why"))
    return f"rewound to step {to}{lost}: {reason}" + (f"; batches {ranges} will be skipped" if ranges else "")


def is_pair(part: Any) -> bool:
    """Returns True for a list of two numbers, [first, stop)."""
    return isinstance(part, list) and len(part) == 2 and all(map(is_number, part))


def alert_text(event: Mapping[str, Any]) -> str:
    """Returns the message of a health alert, with the observation, likely causes and advice."""
    kind = str(event.get("what") or "alert").replace("_", " ")
    if event.get("over"):
        return f"{kind} ended: {event.get('seen') or ''}".rstrip(": ")
    causes = [
        f"{cause.get('what')} ({cause['evidence']})" if cause.get("evidence") else str(cause.get("what"))
        for cause in as_list(event.get("causes"))
        if isinstance(cause, dict)
    ][:3]
    advice = [str(line) for line in as_list(event.get("advice"))][:3]
    parts = [f"{kind}: {event.get('seen') or ''}".rstrip(": ")]
    parts += [f"likely: {', or '.join(causes)}"] if causes else []
    parts += [f"try: {'; '.join(advice)}"] if advice else []
    return "; ".join(part.rstrip(".") for part in parts)


def is_trouble(event: Mapping[str, Any]) -> bool:
    """Returns True if an event is a problem."""
    if event["event"] == "stopped":
        return is_failure(event.get("code"))
    return event["event"] in TROUBLE and not is_harmless(event)


def described(value: Any) -> str:
    """Returns plain data as text without brackets."""
    if isinstance(value, dict):
        given = {name: inner for name, inner in value.items() if inner not in (None, [], {}, "")}
        return ", ".join(f"{name} {described(inner)}" for name, inner in given.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(described, value))
    return plain(value) if isinstance(value, float) else str(value)


def devices_text(devices: Any) -> str:
    """Returns text such as ' on 8 x TPU v4'."""
    if not isinstance(devices, dict) or "kind" not in devices:
        return ""
    return f" on {devices.get('number', '?')} x {devices['kind']}"


def changes_text(changes: Any) -> str:
    """Returns text such as '; changed: optim.peak_lr 0.002 -> 0.001', or ''."""
    changed = [
        f"{change.get('name')} {described(change.get('old'))} -> {described(change.get('new'))}"
        for change in as_list(changes)
        if isinstance(change, dict)
    ]
    return f"; changed: {', '.join(changed)}" if changed else ""


def facts_text(event: Mapping[str, Any]) -> str:
    """Returns the remaining fields of an event as text such as ': name value, ...'."""
    facts = {name: value for name, value in event.items() if name not in ("time", "event", "step")}
    return f": {described(facts)}" if facts else ""


def marks(events: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Returns marks for the newest problems and restarts, at most MOST_MARKS, without duplicates in a step."""
    found: dict[tuple[float, str], Mark] = {}
    for event in events:
        kind = "trouble" if event["event"] in MARKED and is_trouble(event) else ""
        kind = "change" if event["event"] in RESTARTS else kind
        if kind and is_number(event.get("step")):
            about = (event["step"], f"{event['event']} {event.get('what')}")
            found.setdefault(about, Mark(event["step"], shortened(event_message(event), LONGEST_MARK), kind))
    return list(found.values())[-MOST_MARKS:]
