"""Text and numbers as the page shows them. Whatever a run, its data or its model wrote comes through here.

`escape` is the only way of text into HTML, `json_block` the only way of values to the script: a document that holds
`</script>` or an escape sequence is shown, not obeyed.
"""

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale import units
from jaxscale.system.redact import in_html, redacted

NONE = "n/a"
escape = in_html
# The script's data stand in a script element, which ends at the next "</script" whatever JSON makes of it.
FOR_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def json_block(value: Any) -> str:
    """The value as JSON that can stand in a script element. NaN in it is the caller's defect (ValueError)."""
    written = json.dumps(redacted(value), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for character, spelt in FOR_SCRIPT.items():
        written = written.replace(character, spelt)
    return written


def plain(value: float | None) -> str:
    """'2.314', '0.0003', '3e-05', '12.3K', '-4.5M': four significant digits at most; 'n/a' for None."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 9999.5:  # would round to five digits
        return units.count(value)
    if size and size < 1e-4:
        return power(value)
    return f"{value:.4g}"


def percent(value: float | None) -> str:
    """'41.3%'."""
    return NONE if value is None else f"{100 * value:.{3 if abs(value) >= 0.01 else 2}g}%"


def seconds(value: float | None) -> str:
    """'3.2ms', '0.58s', '1h02m'."""
    if value is None:
        return NONE
    if 0 < abs(value) < 0.1:
        return f"{value * 1e3:.3g}ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g}us"
    return f"{value:.3g}s" if value < 10 else units.duration(value)


def or_none(write: Callable[[float], str]) -> Callable[[float | None], str]:
    """The function, with 'n/a' for None."""
    return lambda value: NONE if value is None else write(value)


# '24.4 GiB'; '6.74B'; '$1,234', '$0.42'; '1h02m'
size, count, money, duration = map(or_none, (units.size, units.count, units.dollars, units.duration))


def tick_texts(values: Sequence[float], numbers: str) -> list[str]:
    """Formats ticks: 0 without a unit, exact sizes, and small numbers in one notation."""
    others = [abs(value) for value in values if value]
    small = numbers == "plain" and bool(others) and min(others) < 1e-4 and max(others) < 1e-2
    # '1.25 GiB', '512 MiB'
    unit = lambda value: next((unit for unit in (2**40, 2**30, 2**20, 2**10) if abs(value) >= unit), 1)
    exact_size = lambda value: f"{value / unit(value):.6g} {size(unit(value)).split()[1]}"
    write = power if small else exact_size if numbers == "size" else NUMBERS[numbers]
    return ["0" if value == 0 else write(value) for value in values]


def power(value: float) -> str:
    """'2.5e-4'."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


NUMBERS = {"plain": plain, "percent": percent, "size": size, "seconds": seconds, "count": count}


def clock(when: float | None) -> str:
    """'2026-11-21 21:34:23 UTC'."""
    if when is None:
        return ""
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
