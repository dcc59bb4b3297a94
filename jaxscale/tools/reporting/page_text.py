"""Formatting of text and numbers on the report page, which includes untrusted text from runs, data and models.

All text in HTML passes through `escape`, and all values for the script pass through `json_block`. A document that
contains `</script>` or an escape sequence is therefore displayed and not interpreted.
"""

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale import units
from jaxscale.system.redact import in_html, redacted

NONE = "n/a"
escape = in_html
# The data for the script are in a script element, which ends at the next "</script", even inside a JSON string.
FOR_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def json_block(value: Any) -> str:
    """Returns the value as JSON that is safe in a script element. Raises ValueError for NaN."""
    written = json.dumps(redacted(value), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    for character, spelt in FOR_SCRIPT.items():
        written = written.replace(character, spelt)
    return written


def plain(value: float | None) -> str:
    """Returns text with up to four significant digits, such as '2.314', '3e-05' or '-4.5M', or 'n/a' for None."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 9999.5:  # would round to five digits
        return units.count(value)
    if size and size < 1e-4:
        return power(value)
    return f"{value:.4g}"


def percent(value: float | None) -> str:
    """Returns text such as '41.3%'."""
    return NONE if value is None else f"{100 * value:.{3 if abs(value) >= 0.01 else 2}g}%"


def seconds(value: float | None) -> str:
    """Returns text such as '3.2ms', '0.58s' or '1h02m'."""
    if value is None:
        return NONE
    if 0 < abs(value) < 0.1:
        return f"{value * 1e3:.3g}ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g}us"
    return f"{value:.3g}s" if value < 10 else units.duration(value)


def or_none(write: Callable[[float], str]) -> Callable[[float | None], str]:
    """Returns a version of `write` that returns 'n/a' for None."""
    return lambda value: NONE if value is None else write(value)


# formats such as '24.4 GiB', '6.74B', '$1,234' and '1h02m'
size, count, money, duration = map(or_none, (units.size, units.count, units.dollars, units.duration))


def tick_texts(values: Sequence[float], numbers: str) -> list[str]:
    """Returns the labels of ticks. 0 has no unit, sizes are exact, and small numbers all use powers of ten."""
    others = [abs(value) for value in values if value]
    small = numbers == "plain" and bool(others) and min(others) < 1e-4 and max(others) < 1e-2
    # exact sizes such as '1.25 GiB' and '512 MiB'
    unit = lambda value: next((unit for unit in (2**40, 2**30, 2**20, 2**10) if abs(value) >= unit), 1)
    exact_size = lambda value: f"{value / unit(value):.6g} {size(unit(value)).split()[1]}"
    write = power if small else exact_size if numbers == "size" else NUMBERS[numbers]
    return ["0" if value == 0 else write(value) for value in values]


def power(value: float) -> str:
    """Returns text such as '2.5e-4'."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


NUMBERS = {"plain": plain, "percent": percent, "size": size, "seconds": seconds, "count": count}


def clock(when: float | None) -> str:
    """Returns text such as '2026-11-21 21:34:23 UTC'."""
    if when is None:
        return ""
    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
