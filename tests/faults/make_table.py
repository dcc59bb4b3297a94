"""Writes docs/faults.md out of what the tests came to.

pytest --fault_results=one.jsonl                    # the whole suite, or -m fault
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
    """{test: the worst that any of its parameters came to}."""
    found: dict[str, str] = {}
    for file in files:
        for line in file.read_text().splitlines():
            result = json.loads(line)
            known = found.get(result["test"], "passed")
            found[result["test"]] = min(known, result["outcome"], key=ORDER.index)
    return found


def page(covered: Mapping[str, Sequence[str]], outcomes: Mapping[str, str], made: str) -> str:
    """The page. made: when and with what the tests ran."""
    lines = [
        "# What is promised when things break, and the tests of it",
        "",
        "Made by `tests/faults/make_table.py` out of a test run; not to be edited. A test says with",
        '`@pytest.mark.fault("F4")` what it covers, and the suite fails where a line of this page has no test.',
        f"{made}.",
        "Several processes ran on one machine, buckets were an emulator on it, and no TPU or GPU was there. A test",
        "that did not run in it, because it takes minutes or its package is missing, is listed as such.",
        "",
    ]
    for title, rows in (("Faults", FAULTS), ("Threats", THREATS)):
        lines += [f"## {title}", "", "| | what happens | what is promised | result |", "|---|---|---|---|"]
        for fault, row in rows.items():
            result = verdict(covered.get(fault, ()), outcomes)
            lines.append(f"| {fault} | {row.what} | {row.promise} | {result} |")
        lines.append("")
    lines += ["## The tests", ""]
    for fault in (*FAULTS, *THREATS):
        lines.append(f"**{fault}**")
        lines += [f"- `tests/{test}`: {outcomes.get(test, 'not run')}" for test in covered.get(fault, ())]
        lines.append("")
    return "\n".join(lines)


def verdict(tests: Sequence[str], outcomes: Mapping[str, str]) -> str:
    """What a row's tests came to, in a few words."""
    if not tests:
        return "**NO TEST**"
    counts = Counter(outcomes.get(test, "not run") for test in tests)
    told = ", ".join(f"{counts[word]} {word}" for word in ("passed", "failed", "skipped", "not run") if counts[word])
    return f"**FAILED**: {told}" if counts["failed"] else told


def tests_told(text: str) -> dict[str, list[str]]:
    """{fault: tests} as a page lists them."""
    found: dict[str, list[str]] = {}
    for line in text.partition("## The tests")[2].splitlines():
        if line.startswith("**"):
            found[fault := line.strip("*")] = []
        elif line.startswith("- `tests/"):
            found[fault].append(line.removeprefix("- `tests/").partition("`")[0])
    return found


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
