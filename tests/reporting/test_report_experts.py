"""The page has the experts of a mixture: by step, by layer and window, and by expert."""

import json
import random
import re

import pytest
from headless import BROWSER, Browser

from jaxscale.cli.watch import frame
from jaxscale.runtime.monitor.history import read_history
from jaxscale.runtime.monitor.run_files import read_expert_counts
from jaxscale.tools.reporting.page import make_page

NAMES = ("experts_busiest", "experts_effective", "experts_idle", "router_entropy", "router_bias_to_scores",
         "expert_rounds")  # fmt: skip


def made(folder, layers, experts, windows=3, first_layer=0):
    """A work folder: the last expert of the first layer is dead, the first one of the last has twice its part."""
    folder.mkdir(exist_ok=True)
    draw, counts = random.Random(0), []
    for window in range(1, windows + 1):
        table = [[draw.randrange(90, 110) for _ in range(experts)] for _ in range(layers)]
        table[0][-1], table[-1][0] = 0, 200
        counts.append({"step": 100 * window, "steps": 100, "first_layer": first_layer, "counts": table})
    rows = [{"step": 10 * n, "loss": 3.0} | {f"train/{name}": 1.0 + n / 100 for name in NAMES} for n in range(1, 31)]
    for name, records in (("experts.jsonl", counts), ("metrics.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text("{}")
    return folder


def part_of(page):
    return page[page.index('<h2 id="experts"') :].partition("</section>")[0]


def figures(page):
    """{title: HTML} of the section's figures."""
    return {re.search("<b>(.*?)</b>", one)[1]: one for one in re.findall("<figure.*?</figure>", part_of(page))}


def cells(figure):
    """How many rectangles of each colour; neighbours of one colour are one."""
    found = re.findall(r'<path class="(\w+)" d="([^"]*)"', figure)
    return {colour: drawn.count("M") for colour, drawn in found}


def test_each_layer_has_a_row_and_each_expert_a_column_also_of_hundreds(tmp_path):
    page = make_page([read_history(made(tmp_path / "run", 58, 256, first_layer=3))], now=0.0)
    drawn = figures(page)
    assert [title for title in drawn if "Experts" in title or "expert" in title] == [
        "Busiest expert", "Effective number of experts", "Experts without tokens", "Busiest expert by layer",
        "Tokens per expert in steps 201 to 300",
    ]  # fmt: skip
    by_expert = drawn["Tokens per expert in steps 201 to 300"]
    assert cells(by_expert)["empty"] == 1 and ">no token<" in by_expert.replace("</i> ", "</i>>").replace(
        "</span>", "<"
    )
    assert "1 expert without tokens: 255 of layer 3." in by_expert and '<span class="xn">expert</span>' in by_expert
    heats = [
        plot["heat"]
        for plot in json.loads(re.search('"plot-data"[^>]*>(.*?)</script>', page)[1])["plots"]
        if "heat" in plot
    ]
    assert [len(heat["x"]) for heat in heats] == [3, 256] and {len(heat["v"]) for heat in heats} == {58}
    assert heats[1]["names"][0] == "layer 3" and heats[1]["names"][-1] == "layer 60"
    assert heats[1]["v"][-1][0] == pytest.approx(2.0, rel=0.02) and heats[1]["v"][0][-1] == 0
    assert heats[0]["v"][-1] == pytest.approx([2.0] * 3, rel=0.02)
    assert len(page) < 1_000_000


def test_few_layers_are_lines_and_an_even_spread_is_in_the_middle_of_the_colours(tmp_path):
    drawn = figures(make_page([read_history(made(tmp_path / "run", 2, 8))], now=0.0))
    assert "heat" not in drawn["Busiest expert by layer"] and "layer 1" in drawn["Busiest expert by layer"]
    colours = cells(drawn["Tokens per expert in steps 201 to 300"])
    assert set(colours) == {"empty", "h5", "h6", "h8"}, "a tenth more or less, none, and twice"


def test_the_terminals_frame_has_a_line_of_them(tmp_path):
    lines = [line.text for line in frame(read_history(made(tmp_path / "run", 2, 8)), 0.0, 80, 24)]
    assert "experts     busiest 1.3 times the mean  effective 1.3  rounds 1" in lines
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert not any(line.text.startswith("experts") for line in frame(read_history(tmp_path / "run"), 0.0, 80, 24))


def test_runs_beside_each_other_have_their_own_tables_and_runs_without_experts_no_section(tmp_path):
    one, other = (read_history(made(tmp_path / name, 4, 8)) for name in "ab")
    page = part_of(make_page([one, other], now=0.0))
    assert page.count("<b>Tokens per expert") == 2 and page.count("<h3>") == 2 and page.count("<b>Busiest expert<") == 1
    (tmp_path / "a" / "experts.jsonl").unlink()
    alone = part_of(make_page([read_history(tmp_path / "a")], now=0.0))
    assert "monitor.statistics_every_steps=100" in alone and "Tokens of each expert" not in alone
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert 'id="experts"' not in make_page([read_history(tmp_path / "a")], now=0.0)


def test_a_step_counts_once_and_what_is_no_table_is_left_out(tmp_path):
    good = {"step": 10, "steps": 5, "first_layer": 0, "counts": [[1, 3], [2, 2]]}
    tables = ([[1], [2, 3]], [], [[1, -1]], [[1.5]], [[True]], [[]], {}, None)
    bad = [{"step": 30}, good | {"step": None}, *(good | {"counts": table} for table in tables)]
    lost = [good | {"step": 20}, good | {"step": 30, "counts": [[9, 9]]}]
    records = [good, *lost, *bad, good | {"step": 20, "steps": 2}, good | {"step": 40, "counts": [[0, 0], [4, 0]]}]
    (tmp_path / "experts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"st')
    problems = []
    found = read_expert_counts(tmp_path, problems)
    assert [(one.step, one.steps, one.busiest) for one in found.windows] == [
        (10, 5, (1.5, 1.0)), (20, 2, (1.5, 1.0)), (40, 5, (None, 2.0)),
    ]  # fmt: skip
    assert found.counts == ((0, 0), (4, 0)) and len(problems) == 1 and "incomplete" in problems[0]
    assert read_expert_counts(tmp_path / "none", []) is None


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium here to open the page in")
def test_the_crosshair_of_experts_is_not_that_of_steps_and_a_zoom_leaves_them_as_they_are(tmp_path):
    (tmp_path / "page.html").write_text(make_page([read_history(made(tmp_path / "run", 6, 16))], now=0.0))
    browser = Browser(tmp_path / "profile")
    try:
        browser.open((tmp_path / "page.html").as_uri(), height=4000)
        told = "[...document.querySelectorAll('.heat .readout')].map(one => one.textContent)"
        box = browser.ask(
            "(b => [b.left, b.top, b.width])([...document.querySelectorAll('.heat .area')][1].getBoundingClientRect())"
        )
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] * 15.5 / 16, y=box[1] + 50)
        by_layer, by_expert = browser.ask(told)
        assert by_layer == "" and by_expert.startswith("expert 15: lowest 0 (layer 0), highest ")
        shape = "[...document.querySelectorAll('.heat svg')].map(one => one.firstChild.getAttribute('transform'))"
        browser.drag(box[0] + 20, box[0] + 200, box[1] + 50)
        assert browser.ask(shape) == [None, None] and not browser.ask("location.hash")
        browser.ask("document.querySelectorAll('.heat .area')[1].focus()")
        browser.press("ArrowRight")
        assert browser.ask(told)[1].startswith("expert ")
        loss = browser.ask("(b => [b.left, b.top, b.width])(document.querySelector('.area').getBoundingClientRect())")
        browser.drag(loss[0] + 50, loss[0] + 300, loss[1] + 50)
        assert browser.ask(shape)[0] is not None and browser.ask(shape)[1] is None and browser.complaints() == []
    finally:
        browser.close()
