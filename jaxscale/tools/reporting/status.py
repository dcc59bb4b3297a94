"""Status of a run (state, elapsed and remaining time, cost) for the report and `jaxscale watch`."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.kernels.hardware import Price, find_chip
from jaxscale.runtime.monitor.goodput import PREFIX, measure_goodput, unix_time
from jaxscale.runtime.monitor.history import History, Row, is_finite, is_number
from jaxscale.system.exits import Exit, is_failure, meaning
from jaxscale.tools.reporting.page_text import NONE, clock, money

MEASURING = ("validation_seconds", "evals_seconds")  # time of the training loop outside training
RECENT = 20  # reports from which the recent speed and interval are computed
PACE = 50  # reports from which the recent wall time per step is computed
QUIET_SECONDS = 180.0  # time without a report before a run counts as silent; allows saves, validation and uploads
RECORDS = 10  # or the time of this number of reports, if longer
STARTING_SECONDS = 3600.0  # the same before the first report, the default of hang.compile_seconds
BEGINS = ("started", "resumed")
PRICE_FLAG = "from --price"


class State(NamedTuple):
    """State of a run."""

    name: str  # running, starting, finished, stopped, failed, silent, begun
    words: str  # short description
    more: str = ""  # details

    @property
    def sentence(self) -> str:
        """Description and details, as shown next to the name."""
        return "; ".join(part for part in (self.words, self.more) if part and part != self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Facts in the header of the page. Unknown values are None."""

    state: State
    step: int
    total_steps: float | None
    loss: float | None
    validation_loss: float | None
    tokens: float | None
    tokens_per_second: float | None
    mfu: float | None
    wall_seconds: float | None  # run time summed over all starts
    starts: int
    left_seconds: float | None  # time to the last step at the recent speed
    chips: float | None
    chip: str
    price: Price | None  # price of a chip, from --price or the chip table
    cost: float | None  # dollars so far
    cost_to_end: float | None  # dollars for the whole run


def status_of(history: History, now: float, price: float | None = None) -> Status:
    """Returns the status at Unix time `now`. price: dollars per chip-hour; the default is the list price."""
    total = history.part("budget").get("total_steps")
    total = total if is_number(total) else None
    state = state_of(history, now, total)
    devices = history.part("devices")
    kind = str(devices.get("kind") or "")
    chip = find_chip(kind)
    chips = devices.get("number") if is_number(devices.get("number")) else None
    if chips is not None and chip is not None:
        chips = chips / chip.devices_per_chip
    spent = measure_goodput(history.rows, history.events)
    # excludes the time between starts; without events, the sum of step times
    wall = spent.wall_seconds - spent.seconds["idle"] if spent.starts else step_time(history.rows)
    left = left_seconds(history, total) if state.name != "finished" else 0.0
    paid = Price(price, "", PRICE_FLAG) if price is not None else chip.price if chip else None
    hourly = paid.dollars_per_hour * chips / 3600 if paid and chips else None
    tokens, batches = history.latest("tokens_seen"), history.batches
    if tokens is not None and batches is not None:  # includes steps since the last report
        tokens = max(tokens, batches.begin(history.reached_step))
    return Status(
        state=state,
        step=history.reached_step,
        total_steps=total,
        loss=history.latest("loss"),
        validation_loss=history.latest("validation/loss"),
        tokens=tokens,
        tokens_per_second=recent(history.rows, "tokens_per_second"),
        mfu=recent(history.rows, "mfu"),
        wall_seconds=wall,
        starts=spent.starts,
        left_seconds=left,
        chips=chips,
        chip=chip.name if chip else kind,
        price=paid,
        cost=hourly * wall if hourly is not None and wall is not None else None,
        cost_to_end=hourly * (wall + left) if hourly is not None and wall is not None and left is not None else None,
    )


def state_of(history: History, now: float, total: float | None) -> State:
    """Returns the state of a run, from its last start or stop event and the age of its files."""
    last = next((event for event in reversed(history.events) if event["event"] in (*BEGINS, "stopped")), None)
    if last is not None and last["event"] == "stopped":
        code = last.get("code")
        code = code if isinstance(code, int) else Exit.ERROR
        when, reason = clock(unix_time(last.get("time"))), str(last.get("why") or "")
        if code == Exit.DONE and (total is None or history.reached_step >= total):
            return State("finished", "completed all steps", when)
        words = "stopped on request before its last step" if code == Exit.DONE else meaning(code)
        more = "; ".join(part for part in ("" if reason == "done" else reason, when) if part)
        return State("failed" if is_failure(code) else "stopped", words, more)
    if last is None and not history.rows:
        return State("begun", "no start or step was logged yet")
    if history.written_at is None:
        return State("begun", "the time of the last write is unknown")
    quiet = units.duration(now - history.written_at)
    began_at = last["step"] if last and is_number(last.get("step")) else 0
    if now - history.written_at > patience_seconds(history.rows, began_at):
        return State("silent", f"silent for {quiet}", "no end was logged: the run was killed or hangs")
    if not any("loss" in row and row["step"] > began_at for row in reversed(history.rows)):
        began = unix_time(last.get("time")) if last else None
        return State("starting", f"starting for {units.duration(now - (now if began is None else began))}")
    return State("running", "running", f"last written {quiet} ago")


def step_time(rows: Sequence[Row]) -> float | None:
    """Returns the total time of all steps in seconds, or None if no step times were logged."""
    total, before, known = 0.0, 0, False
    for row in rows:
        if "loss" in row:
            if is_number(row.get("step_seconds")):
                total, known = total + (row["step"] - before) * row["step_seconds"], True
            before = row["step"]
        total += sum(row[name] for name in MEASURING if is_number(row.get(name)))
    return total if known else None


def left_seconds(history: History, total: float | None) -> float | None:
    """Returns the expected time to the last step at the recent speed, or None if it is unknown."""
    pace, each = wall_pace(history.rows) or None, recent(history.rows, "step_seconds")
    if pace is None and each is not None:  # step time, scaled for the time of evaluations so far
        spent = step_time(history.rows) or 0.0
        measuring = sum(sum(history.series(name)[1]) for name in MEASURING)
        pace = each * (spent / (spent - measuring) if spent > measuring else 1.0)
    if total is None or pace is None:
        return None
    done, batches = history.reached_step, history.batches
    if batches is None or not batches.vary or done >= total:
        return max(total - done, 0) * pace
    return (batches.begin(int(total)) - batches.begin(done)) / batches.size(max(done - 1, 0)) * pace  # by tokens


def wall_pace(rows: Sequence[Row]) -> float | None:
    """Returns the recent wall time per step, including saves and validation, or None if it was not logged."""
    wall = f"{PREFIX}wall_seconds"
    reports = [row for row in rows[-2 * PACE :] if "loss" in row and is_number(row.get(wall))][-PACE:]
    first = len(reports) - 1
    while first > 0 and reports[first - 1][wall] <= reports[first][wall]:  # the clock of each start begins at 0
        first -= 1
    steps = reports[-1]["step"] - reports[first]["step"] if reports else 0
    return (reports[-1][wall] - reports[first][wall]) / steps if steps > 0 else None


def recent(rows: Sequence[Row], name: str) -> float | None:
    """Returns the median of the newest values of a metric, or None if there are none."""
    found = [row[name] for row in itertools.islice((r for r in reversed(rows) if is_number(r.get(name))), RECENT)]
    return statistics.median(found) if found else None


def patience_seconds(records: Sequence[Mapping[str, Any]], began_at: int) -> float:
    """Returns the time without logs after which a run is silent. began_at: step of the last start."""
    reports = [record for record in records if "loss" in record and (record.get("step") or 0) > began_at][-RECENT:]
    if not reports:
        return STARTING_SECONDS
    first = reports[0]["step"] if len(reports) > 1 else began_at
    stride = (reports[-1]["step"] - first) / max(len(reports) - 1, 1)
    times = [record["step_seconds"] for record in reports if is_finite(record.get("step_seconds"))]
    return max(QUIET_SECONDS, RECORDS * stride * (statistics.median(times) if times else 0.0))


def cost_fact(status: Status) -> tuple[str, str, str]:
    """Returns (name, amount, details) of the cost. If the price is unknown, the amount is 'no price'."""
    name = "cost so far"
    if status.price is None:
        return (name, "no price", f"known for {status.chip}") if status.chip else (name, NONE, "")
    known = status.state.name != "finished" and status.cost_to_end is not None
    return name, money(status.cost), f"{money(status.cost_to_end)} at the end" if known else ""


def price_words(statuses: Sequence[Status]) -> str:
    """Returns a sentence on the prices, or '' if the chips are unknown."""
    lines = []
    for chip, price in dict.fromkeys((status.chip, status.price) for status in statuses if status.chip):
        if price is None:
            lines.append(f"no price known for {chip}")
            continue
        origin = f"list price of {price.date} ({price.source})" if price.date else price.source
        lines.append(f"{chip} at {money(price.dollars_per_hour)} per chip-hour, {origin}")
    given = any(status.price and not status.price.date for status in statuses)
    way_out = "" if given else " Set your price per chip-hour with --price=DOLLARS."
    return f"Cost: {'; '.join(lines)}.{way_out}" if lines else ""
