"""Writes docs/health_table.md: detections and false alarms of the health rules on synthetic and recorded runs.

    python tests/monitor/health_table.py        # some minutes; writes docs/health_table.md

Thresholds were chosen on the seeds of TUNED, and some of them again after a table of SEEN: slow_step was made silent
during starvation, memory_creep got its long window, and plateau_records went from 200 to 100. The table is of REPORTED,
which nothing was chosen by.
"""

import collections
import dataclasses
import pathlib
import statistics
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import recorded_runs  # noqa: E402
from curves import EVERY, FAULTS, NOISE, SCHEDULES, Fault, Kind, clean, faulty  # noqa: E402

from jaxscale.runtime.monitor.config import RULES
from jaxscale.runtime.monitor.health import Finding, Health, RunFacts  # noqa: E402

DOC = pathlib.Path(__file__).parents[2] / "docs" / "health_table.md"
TUNED, SEEN, REPORTED = range(4), range(4, 8), range(8, 12)
CADENCES = (1, 2, 5, 10)  # steps between records of the recorded runs
QUICKSTART = RunFacts(total_steps=489, warmup_steps=25, decay="cosine", clip_norm=1.0, vocab_size=264)
SMALL = dataclasses.replace(QUICKSTART, total_steps=200, warmup_steps=10)
WARMUPS = {"hotter": 100}  # steps, where it is not SMALL's


def facts_of_recorded(name: str) -> RunFacts:
    """What a recorded run is known to be."""
    if recorded_runs.is_quickstart(name):
        return QUICKSTART
    return dataclasses.replace(SMALL, warmup_steps=WARMUPS.get(name, SMALL.warmup_steps))


def facts_of_kind(kind: Kind) -> RunFacts:
    """What a run of that kind is known to be."""
    known = dict(total_steps=kind.total_steps, warmup_steps=kind.warmup_steps, decay=kind.schedule)
    return RunFacts(clip_norm=1.0, vocab_size=32_768, **known)


def begun(records: list[dict], facts: RunFacts) -> list[Finding]:
    """The findings that begin."""
    return [finding for finding in recorded_runs.replay(records, facts=facts) if not finding.over]


def counted(records: list[dict], facts: RunFacts) -> collections.Counter[tuple[str, str]]:
    """{(rule, "told"): times that it spoke, (rule, "judged"): records that it could judge}."""
    health, counts = Health(facts=facts), collections.Counter()
    for rule in health.rules:
        rule.check = counting(rule, counts)
    for record in records:
        counts.update((finding.kind, "told") for finding in health.observe(record) if not finding.over)
    return counts


def counting(rule, counts):
    """Returns the rule's check, which also counts the records that it could judge."""
    check = rule.check

    def counted_check(view):
        result = check(view)
        counts[rule.kind, "judged"] += result is not None
        return result

    return counted_check


def alarms(counts: collections.Counter, rule: str) -> str:
    """Two cells of the table: times that it spoke, and of how many records."""
    judged = counts[rule, "judged"]
    return f"{counts[rule, 'told']} | {judged:,}" if judged else "- | 0"


def clean_kinds(seeds) -> list[Kind]:
    """Every schedule and batch for each seed; every third run is long."""
    return [
        Kind(seed, schedule, batch, 600 if seed % 3 else 1500)
        for seed in seeds for schedule in SCHEDULES for batch in NOISE
    ]  # fmt: skip


def judged(fault: Fault, seed: int, batch: str) -> tuple[int | None, collections.Counter[str]]:
    """(records until it was told, None if it was not; what else was told)."""
    records, begins = faulty(fault, seed, batch=batch)
    found = begun(records, facts_of_kind(Kind(seed, **({"batch": batch} | fault.kind))))
    right = [finding.step for finding in found if finding.kind in fault.expected and finding.step >= begins]
    others = collections.Counter(finding.kind for finding in found if finding.kind not in fault.expected)
    return ((right[0] - begins) // EVERY if right else None), others


def fault_row(fault: Fault, seeds) -> str:
    """A line of the table."""
    cells, delays, others = [], [], collections.Counter()
    for batch in NOISE:
        results = [judged(fault, seed, batch) for seed in seeds]
        caught = [delay for delay, _ in results if delay is not None]
        delays += caught
        others.update(name for _, told in results for name in told)
        cells.append(str(len(caught)))
    delay = f"{statistics.median(delays):g}" if delays else "-"
    told = ", ".join(f"{name} {count}" for name, count in sorted(others.items())) or "-"
    columns = [fault.name, f"{fault.strength:g}", " or ".join(fault.expected), *cells, delay, told]
    return f"| {' | '.join(columns)} |"


def paragraph(text: str) -> str:
    """The text in lines of a page."""
    return textwrap.fill(" ".join(text.split()), 110)


ORIGIN = paragraph(f"""
This page shows how often the [health alerts](health.md) detect a problem, and how often they raise false alarms.
`tests/monitor/health_table.py` generates it. The synthetic curves (`tests/monitor/curves.py`) have seeds
{REPORTED[0]} to {REPORTED[-1]}. Thresholds were chosen on seeds {TUNED[0]} to {TUNED[-1]}, and three rules were
revised on seeds {SEEN[0]} to {SEEN[-1]}.
""")
RECORDED = f"""
The recorded runs (`tests/monitor/recorded_runs.py`) are ten clean runs of the quick start (`configs/quickstart.py`
until 2026-11-25, with AdamW; 489 steps on two cores) and ten of a small config (200 steps of 1,024 tokens,
2 layers of width 128). The small config was evaluated with records every {", ".join(map(str, CADENCES[:-1]))} and
{CADENCES[-1]} steps. `speed_seconds` was chosen after earlier recordings were seen. "Evaluated" is the number of
records for which a rule had enough data.
"""


STRENGTHS = f"""
The meaning of the strength depends on the fault. It is a factor (of the loss, the norm or the step time), a fraction
(of the step, the loss, the remaining decrease or the residual stream), MiB per record (memory), a value (layer,
logits), a number of records or steps (NaN, skipped), or the increase per validation. The batch columns show in how many
of {len(REPORTED)} runs an expected rule alerted. The noise of the loss is
{", ".join(f"{size:.1%} ({name})" for name, size in NOISE.items())}. The delay is the median in records. Weak faults
show the limits of the rules.
"""


def table() -> str:
    """The page."""
    false, runs, records = collections.Counter(), 0, 0
    for kind in clean_kinds(REPORTED):
        made = clean(kind)
        runs, records = runs + 1, records + len(made)
        false.update(counted(made, facts_of_kind(kind)))
    recorded, real, small = recorded_runs.runs(), collections.Counter(), collections.Counter()
    for name in recorded_runs.QUICKSTART:
        real.update(counted(recorded[name], QUICKSTART))
    for name in recorded_runs.SMALL:
        for steps in CADENCES:
            small.update(counted(recorded_runs.every(recorded[name], steps), SMALL))
    spoilt = []
    for name in sorted(set(recorded) - set(recorded_runs.QUICKSTART + recorded_runs.SMALL)):
        found = begun(recorded[name], facts_of_recorded(name))
        told = ", ".join(f"{finding.kind} at step {finding.step}" for finding in found) or "none"
        spoilt.append(f"| {name} | {told} |")
    rows = [fault_row(fault, REPORTED) for fault in FAULTS]
    false_alarms = [
        f"| {rule} | {alarms(false, rule)} | {alarms(real, rule)} | {alarms(small, rule)} |"
        for rule in RULES
        if any(counts[rule, "judged"] for counts in (false, real, small))
    ]
    return "\n".join(
        [
            "# Accuracy of health alerts",
            "",
            ORIGIN,
            "",
            "## False alarms",
            "",
            paragraph(
                f"The {runs} synthetic clean runs have {records:,} records and cover all schedules and batch sizes. "
                f"{RECORDED}"
            ),
            "",
            "| rule | synthetic | evaluated | quick start | evaluated | small config | evaluated |",
            "|---|---|---|---|---|---|---|",
            *false_alarms,
            "",
            "## Faults",
            "",
            paragraph(STRENGTHS),
            "",
            f"| fault | strength | rule | {' | '.join(NOISE)} | delay | other alerts |",
            "|---|---|---|" + "---|" * (len(NOISE) + 2),
            *rows,
            "",
            "## Recorded runs with a fault",
            "",
            "The learning rate is nearly zero (flat) or far too high (hot, hotter), or the machine is shared (busy).",
            "",
            "| run | alerts |",
            "|---|---|",
            *spoilt,
            "",
        ]
    )


if __name__ == "__main__":
    DOC.write_text(table())
    print(DOC)
