"""The drawings of the pages show the tables that run, each pass once and where it belongs."""

import collections
import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from shell_blocks import ROOT

from jaxscale.core.axes.context_axis import ContextAxis
from jaxscale.core.axes.pipeline_schedules import IDLE, make_schedule
from jaxscale.tools.planning.schedule_times import simulated_seconds

sys.path[:0] = [str(ROOT / "docs")]
from generators import svg, timelines, zigzag  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
TOLD = re.compile(r"stage (\d+), tick (\d+): microbatch (\d+) ([\w ]+) through chunk (\d+), slot (\d+)")


def marks(page, kind):
    """The marks of a drawing of one kind."""
    return [mark for mark in ET.fromstring(page).iter(f"{SVG}g") if mark.get("class", "").split()[0] == kind]


@pytest.mark.parametrize("name", timelines.SHOWN)
def test_a_drawing_has_a_mark_for_each_pass_of_the_table_and_ends_with_the_simulated_step(name):
    page, schedule = timelines.timeline(name), make_schedule(*timelines.SHOWN[name])
    assert "\n" not in page.strip()  # else Markdown would end the figure
    drawn = collections.Counter()
    for mark in marks(page, "pass"):
        s, t, m, kind, v, slot = TOLD.fullmatch(mark.find(f"{SVG}title").text).groups()
        of = schedule.forward if kind == "forward" else schedule.backward
        assert [int(table[int(t), int(s)]) for table in of[:3]] == [int(m), int(v), int(slot)]
        for other, which in (("of inputs", schedule.inputs_only), ("of weights", schedule.weights_only)):
            assert (kind == other) == (kind != "forward" and which[int(t), int(s)])
        assert mark.get("class") == f"pass {kind}" and mark.find(f"{SVG}text").text == m
        assert mark.find(f"{SVG}rect").get("fill") == timelines.INKS[kind][int(v) % 2].fill
        drawn[s, t, kind] += 1
    passes = sum(int((of.microbatch != IDLE).sum()) for of in (schedule.forward, schedule.backward))
    twice = 1 + 2 + 3 if name == "zero_bubble" else 0
    assert set(drawn.values()) == {1} and len(drawn) == passes == 2 * 4 * 8 * schedule.num_chunks + twice
    halves = sum(int((of.microbatch != IDLE).any(1).sum()) for of in (schedule.forward, schedule.backward))
    assert len(marks(page, "idle")) == 4 * halves - passes
    seconds = simulated_seconds(schedule, timelines.chunk_costs(schedule))
    boxes = [mark.find(f"{SVG}rect") for kind in ("pass", "idle") for mark in marks(page, kind)]
    ends = [float(box.get("x")) + float(box.get("width")) for box in boxes]
    assert max(ends) == pytest.approx(timelines.LEFT + seconds * timelines.UNIT, abs=1)
    assert f"{schedule.bubble:.1%}" in page and f"at most {schedule.num_slots} passes" in page


def test_a_drawing_is_told_in_words_and_written_on_in_what_can_be_read():
    root = ET.fromstring(timelines.timeline("1f1b")).find(f".//{SVG}svg")
    names = root.get("aria-labelledby").split()
    title, told = (root.find(f"{SVG}{tag}") for tag in ("title", "desc"))
    assert [title.get("id"), told.get("id")] == names and title.text == "1F1B: 4 stages, 8 microbatches"
    assert told.text.startswith("Stage 0: forward 0, forward 1, forward 2, forward 3, idle, forward 4, ")
    for kind in timelines.INKS.values():
        assert all(contrast(ink) >= 4.5 for ink in kind)  # WCAG 2.2, 1.4.3


def contrast(ink: svg.Ink) -> float:
    """Of a fill and what is written on it, by WCAG's relative luminance."""

    def luminance(colour):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = np.array([int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted(map(luminance, ink))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
def test_bubbles_and_slots_of_the_page_are_those_of_the_tables():
    rows = [row.strip("| ").split(" | ") for row in timelines.bubbles().splitlines()[2:]]
    assert len(rows) == len(timelines.COMPARED) == len(set(timelines.COMPARED))
    for (P, V, M), row in zip(timelines.COMPARED, rows, strict=True):
        one, zero, gpipe = (make_schedule(name, P, V, M) for name in ("1f1b", "zero_bubble", "gpipe"))
        assert row[0] == f"{P}, {V}, {M}" and row[1] == f"{one.bubble:.1%}" == row[2].split(" = ")[1]
        assert row[3] == f"{zero.bubble:.1%}"
        assert row[4].split()[0] == str(one.num_slots) and row[5].split()[0] == str(gpipe.num_slots) == str(M * V)


def test_the_triangle_is_coloured_by_the_table_that_cuts_rows():
    seen = re.compile(r"device (\d): queries of chunk (\d) see keys of chunk (\d)")
    told = [mark.find(f"{SVG}title").text for mark in marks(zigzag.drawing(), "seen")]
    drawn = [tuple(map(int, seen.fullmatch(text).groups())) for text in told]
    wanted = []
    for axis in (ContextAxis(4), ContextAxis(4, zigzag=False)):
        long = 8 // axis.multiple
        of = {start + n: d for d, starts in enumerate(axis.chunk_starts(long)) for start in starts for n in range(long)}
        wanted += [(of[i], i, j) for i in range(8) for j in range(i + 1)]
    assert sorted(drawn) == sorted(wanted)
    np.testing.assert_allclose(zigzag.work(ContextAxis(4)), 1 / 4)
    assert zigzag.work(ContextAxis(4, zigzag=False)).max() == 7 / 16
