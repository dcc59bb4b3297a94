"""What a run has cost and will, in words: the amount, the price that it rests on, and where that is from."""

from collections.abc import Sequence

from jaxscale.reporting.status import Status
from jaxscale.reporting.text import NONE, money


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
