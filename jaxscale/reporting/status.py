"""Where a run stands: state, time, what is left, when it counts as silent, and what it costs, also in words."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale import units
from jaxscale.hardware import Price, find_chip
from jaxscale.monitor.goodput import goodput_of, unix_time
from jaxscale.reporting.history import History, Row, is_finite, is_number
from jaxscale.reporting.text import NONE, clock, money
from jaxscale.system.exits import Exit, meaning

MEASURING = ("validation_seconds", "evals_seconds")  # time of the loop that is no training
RECENT = 20  # reports over which the speed, and their distance, are taken
QUIET_SECONDS = 180.0  # saves, validation and a bucket's uploads lie between two lines
RECORDS = 10  # or as long as so many of them take
STARTING_SECONDS = 3600.0  # before the first one, while it compiles: the default of hang.compile_seconds
BEGINS = ("started", "resumed")
OWN = "as given by --price"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """What the head of the page says of a run. None: not known."""

    state: str  # running, finished, stopped, failed, silent, begun
    words: str
    step: int
    total_steps: int | None
    loss: float | None
    validation_loss: float | None
    tokens: float | None
    tokens_per_second: float | None
    mfu: float | None
    wall_seconds: float | None  # in which the command ran, over all starts
    starts: int
    left_seconds: float | None  # to the last step, at the speed of the last reports
    chips: float | None
    chip: str
    price: Price | None  # of a chip: what was given, else the chip table's
    cost: float | None  # so far, dollars
    cost_to_end: float | None  # the whole run


def status_of(history: History, now: float, price: float | None = None) -> Status:
    """The Status at the time `now` (Unix seconds). price: dollars an hour for one chip; else that of the chip table."""
    total = history.part("budget").get("total_steps")
    total = total if is_number(total) else None
    state, words = state_of(history, now, total)
    devices = history.part("devices")
    kind = str(devices.get("kind") or "")
    chip = find_chip(kind)
    chips = devices.get("number") if is_number(devices.get("number")) else None
    if chips is not None and chip is not None:
        chips = chips / chip.devices_per_chip
    wall, starts = wall_seconds(history)
    left = left_seconds(history, total) if state != "finished" else 0.0
    paid = Price(price, "", OWN) if price is not None else chip.price if chip else None
    hourly = paid.dollars_per_hour * chips / 3600 if paid and chips else None
    return Status(
        state=state,
        words=words,
        step=history.reached_step,
        total_steps=total,
        loss=history.latest("loss"),
        validation_loss=history.latest("validation/loss"),
        tokens=tokens_of(history),
        tokens_per_second=recent(history.rows, "tokens_per_second"),
        mfu=recent(history.rows, "mfu"),
        wall_seconds=wall,
        starts=starts,
        left_seconds=left,
        chips=chips,
        chip=chip.name if chip else kind,
        price=paid,
        cost=hourly * wall if hourly is not None and wall is not None else None,
        cost_to_end=hourly * (wall + left) if hourly is not None and wall is not None and left is not None else None,
    )


def tokens_of(history: History) -> float | None:
    """Tokens of all steps that are done; None where no report has told how many one takes."""
    reported, each = history.latest("tokens_seen"), history.part("budget").get("batch_tokens")
    if reported is not None and is_number(each):
        reported = max(reported, history.reached_step * each)
    return reported


def state_of(history: History, now: float, total: int | None) -> tuple[str, str]:
    """(state, what it means)."""
    ends = [event for event in history.events if event["event"] in (*BEGINS, "stopped")]
    if ends and ends[-1]["event"] == "stopped":
        code, why = ends[-1].get("code"), str(ends[-1].get("why") or "")
        code = code if isinstance(code, int) else Exit.ERROR
        when = clock(unix_time(ends[-1].get("time")))
        if code == Exit.DONE and (total is None or history.reached_step >= total):
            return "finished", f"all steps are done, {when}" if when else "all steps are done"
        state = "stopped" if code in (Exit.DONE, Exit.PREEMPTED) else "failed"
        told = "ended before its last step, as it was told to" if code == Exit.DONE else meaning(code)
        return state, "; ".join(part for part in (told, "" if why == "done" else why, when) if part)
    if history.written_at is None:
        return "begun", "when it was last written is not known"
    quiet = now - history.written_at
    step = ends[-1].get("step") if ends else None
    if quiet > patience_seconds(history.rows, step if is_number(step) else 0):
        return (
            "silent",
            f"nothing was written for {units.duration(quiet)}, and no end was noted: it was killed, or it hangs",
        )
    return "running", f"last written {units.duration(quiet)} ago"


def wall_seconds(history: History) -> tuple[float | None, int]:
    """(seconds in which the run's processes ran, number of its starts).

    As the goodput has them, without what lies between starts. Where there are no events, the steps' own time counts.
    """
    found = goodput_of(history.rows, history.events)
    if found.starts:
        return found.wall_seconds - found.seconds["idle"], found.starts
    return step_time(history.rows), 0


def step_time(rows: Sequence[Row]) -> float | None:
    """Seconds of all steps, from what their reports say a step took; None without any."""
    total, before, known = 0.0, 0, False
    for row in rows:
        if "loss" in row:
            if is_number(row.get("step_seconds")):
                total, known = total + (row["step"] - before) * row["step_seconds"], True
            before = row["step"]
        total += sum(row[name] for name in MEASURING if is_number(row.get(name)))
    return total if known else None


def left_seconds(history: History, total: int | None) -> float | None:
    """Seconds to the last step: the median of the last reports, and the share of measuring in the time so far."""
    each = recent(history.rows, "step_seconds")
    if total is None or each is None:
        return None
    spent = step_time(history.rows) or 0.0
    measuring = sum(sum(history.series(name)[1]) for name in MEASURING)
    share = spent / (spent - measuring) if spent > measuring else 1.0
    return max(total - history.reached_step, 0) * each * share


def recent(rows: Sequence[Row], name: str) -> float | None:
    """The median of a metric's last values; None without any."""
    found: list[float] = []
    for row in reversed(rows):
        if is_number(row.get(name)):
            found.append(row[name])
            if len(found) == RECENT:
                break
    return statistics.median(found) if found else None


def patience_seconds(records: Sequence[Mapping[str, Any]], began_at: int) -> float:
    """Seconds without a line after which a run is silent. began_at: the step that its last start went on from."""
    own = [record for record in records if "loss" in record and (record.get("step") or 0) > began_at][-RECENT:]
    if not own:
        return STARTING_SECONDS
    first = own[0]["step"] if len(own) > 1 else began_at
    stride = (own[-1]["step"] - first) / max(len(own) - 1, 1)
    times = [record["step_seconds"] for record in own if is_finite(record.get("step_seconds"))]
    return max(QUIET_SECONDS, RECORDS * stride * (statistics.median(times) if times else 0.0))


def cost_fact(status: Status) -> tuple[str, str, str]:
    """(name, amount, more): 'no price' where none is known."""
    name = "cost so far"
    if status.price is None:
        return (name, "no price", f"of {status.chip} is known") if status.chip else (name, NONE, "")
    known = status.state != "finished" and status.cost_to_end is not None
    return name, money(status.cost), f"{money(status.cost_to_end)} in all at its end" if known else ""


def price_words(statuses: Sequence[Status]) -> str:
    """Which prices the cost rests on, and how to give another; '' where nothing is known of the chips."""
    told = list(dict.fromkeys(line for status in statuses if (line := price_line(status))))
    given = any(status.price and not status.price.date for status in statuses)
    way_out = "" if given else " --price=DOLLARS gives what an hour of one chip really costs."
    return f"Cost: {'; '.join(told)}.{way_out}" if told else ""


def price_line(status: Status) -> str:
    """'TPU v5p at $4.20 a chip-hour, list price of 2025 (SOURCE)'."""
    if not status.chip:
        return ""
    if status.price is None:
        return f"no price of {status.chip} is known"
    price = status.price
    origin = f"list price of {price.date} ({price.source})" if price.date else price.source
    return f"{status.chip} at {money(price.dollars_per_hour)} a chip-hour, {origin}"
