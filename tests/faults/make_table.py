"""Writes docs/faults.md from test results.

pytest --fault_results=one.jsonl -m 'fault and not soak and not aot and not peer'
pytest --fault_results=two.jsonl -m 'fault and soak'
python tests/faults/make_table.py one.jsonl two.jsonl
"""

import json
import pathlib
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

from fault_table import FAULTS, TESTS, THREATS, covering

PAGE = TESTS.parent / "docs" / "faults.md"
ORDER = ("failed", "skipped", "passed")  # of a test with many parameters, the worst counts


def read_results(files: Iterable[pathlib.Path]) -> dict[str, str]:
    """Returns {test: the worst result of its parameters}."""
    found: dict[str, str] = {}
    for file in files:
        for line in file.read_text().splitlines():
            result = json.loads(line)
            known = found.get(result["test"], "passed")
            found[result["test"]] = min(known, result["outcome"], key=ORDER.index)
    return found


def page(covered: Mapping[str, Sequence[str]], outcomes: Mapping[str, str], made: str) -> str:
    """Returns the page. made: date and environment of the test run."""
    lines = [
        "# Fault tests",
        "",
        "This page lists faults and threats, with guaranteed behavior and tests.",
        "`tests/faults/make_table.py` generates it from a test run. "
        """`grep -rn 'fault(.*"F4"' tests` lists the tests of fault F4.""",
        "",
        f"Environment: {made}.",
        "All processes ran on one machine without TPU or GPU. Buckets were emulated.",
        "Tests that take minutes or need a missing package were skipped or not run.",
        "",
    ]
    for title, head, rows in (
        ("Faults", "fault | guaranteed behavior of the run", FAULTS),
        ("Security threats", "threat | guaranteed behavior", THREATS),
    ):
        lines += [f"## {title}", "", f"| | {head} | tests passed |", "|---|---|---|---|"]
        for fault, row in rows.items():
            result = verdict(covered.get(fault, ()), outcomes)
            lines.append(f"| {fault} | {row.what} | {row.promise} | {result} |")
        lines.append("")
    return "\n".join(lines)


def verdict(tests: Sequence[str], outcomes: Mapping[str, str]) -> str:
    """Summarizes the results of a row's tests."""
    if not tests:
        return "**NO TEST**"
    counts = Counter(outcomes.get(test, "not run") for test in tests)
    others = ", ".join(f"{counts[word]} {word}" for word in ("failed", "skipped", "not run") if counts[word])
    result = f"{counts['passed']}" + (f", {others}" if others else "")
    return f"**FAILED**: {result}" if counts["failed"] else result


def made_with() -> str:
    """'2026-11-21, Python 3.11.7, jax 0.10.2, orbax-checkpoint 0.12.8, Linux x86_64'."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "orbax-checkpoint"))
    machine = f"{platform.system()} {platform.machine()}"
    return f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {packages}, {machine}"


if __name__ == "__main__":
    results = read_results(pathlib.Path(name) for name in sys.argv[1:])
    if not results:
        sys.exit(__doc__)
    PAGE.write_text(page(covering(), results, made_with()))
    print(f"wrote {PAGE}: {Counter(results.values())}")
