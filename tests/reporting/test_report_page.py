"""The page holds what the run tells, as text, in one file; axes and thinning keep what a reader looks for."""

import dataclasses
import html
import json
import pathlib
import re
import subprocess
import tomllib

import pytest
from made_run import BEGAN, CANARY, event, make_run, written_at

from jaxscale.kernels.hardware import CHIPS
from jaxscale.runtime.monitor.goodput import measure_goodput
from jaxscale.runtime.monitor.history import History, read_history
from jaxscale.tools.reporting.axes import Axis, axis_over, linear_ticks, log_ticks, size_ticks, smooth, thin_columns
from jaxscale.tools.reporting.canvas import Canvas, step_axis
from jaxscale.tools.reporting.event_text import event_message, incidents, marks
from jaxscale.tools.reporting.page import make_page
from jaxscale.tools.reporting.page_tables import goodput_table
from jaxscale.tools.reporting.page_text import escape, json_block, plain, tick_texts
from jaxscale.tools.reporting.plots import Plot, PlotLine, draw
from jaxscale.tools.reporting.sections import sources
from jaxscale.tools.reporting.status import status_of

ROOT = pathlib.Path(__file__).parents[2]
V5P = CHIPS["TPU v5"].price


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_history(make_run(tmp_path_factory.mktemp("runs") / "1b-web"))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (2.1, 3.4, [2.2, 2.4, 2.6, 2.8, 3, 3.2, 3.4]), (5, 5, [5])],
)
def test_ticks_are_round(low, high, ticks):
    assert linear_ticks(low, high) == pytest.approx(ticks)


def test_a_logarithmic_axis_has_powers_of_ten_or_their_parts():
    assert log_ticks(1e-3, 1e3, 7) == pytest.approx([1e-3, 1e-2, 0.1, 1, 10, 100, 1000])
    assert log_ticks(0.3, 6) == pytest.approx([0.5, 1, 2, 5])
    assert log_ticks(0.28, 1.25) == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.2])  # two would say too little
    assert len(log_ticks(1e-30, 1e30)) <= 8


def test_memory_has_ticks_at_multiples_of_a_power_of_two_and_small_numbers_one_notation():
    ticks = size_ticks(0, 1.3 * 2**30)
    assert tick_texts(ticks, "size") == ["0", "256 MiB", "512 MiB", "768 MiB", "1 GiB", "1.25 GiB"]
    assert tick_texts([0.0, 5e-5, 1e-4, 2.5e-4], "plain") == ["0", "5e-5", "1e-4", "2.5e-4"]
    assert tick_texts([0.001, 0.0015], "plain") == ["0.001", "0.0015"]


def test_a_steep_beginning_does_not_flatten_what_is_held_out_either(run):
    canvas = Canvas([run], step_axis([run]))
    page = sources(canvas)
    for plot, name in zip(canvas.data, ("validation/bits_per_byte", "train/web/loss")):
        steps, values = run.series(name)
        assert plot["y"][1] < 0.65 * values[0]
    assert page.count("are above the axis") == 2


def test_a_spike_does_not_flatten_the_curve_and_is_told():
    steps = list(range(1, 1001))
    values = [3.0 - step / 1000 for step in steps]
    values[500] = 1e6
    assert axis_over(values).high < 5
    drawn, _ = draw(Plot(title="Loss", lines=[PlotLine("loss", steps, values)]), Axis(0, 1000), 0)
    assert "One point is above the axis; the largest is 1M." in drawn


def test_thinning_keeps_the_highest_and_lowest_of_each_column():
    steps = list(range(10_000))
    values = [0.0] * 10_000
    values[4321], values[8765] = 9.0, -9.0
    points = thin_columns(steps, values, 100)
    assert len(points) <= 404 and (4321, 9.0) in points and (8765, -9.0) in points
    assert points == sorted(points) and points[0][0] == 0 and points[-1][0] == 9999


def test_a_mean_over_neighbours_keeps_a_straight_line_at_its_beginning():
    assert smooth([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1, steep=True)[:5] == pytest.approx([1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (2.3456, "2.346"),
        (3e-4, "0.0003"),
        (2.5e-7, "2.5e-7"),
        (9999.9, "10K"),
        (12_345, "12.3K"),
        (None, "n/a"),
    ],
)
def test_numbers_are_short(number, text):
    assert plain(number) == text


def test_one_door_for_text():
    assert escape("<b>&\"'\x1b[31m\x00\u202e") == "&lt;b&gt;&amp;&quot;&#x27;"
    block = json_block({"a": "</script><!--&\u2028\u2029"})
    assert not set(block) & set("<>&\u2028\u2029") and json.loads(block) == {"a": "</script><!--&\u2028\u2029"}
    with pytest.raises(ValueError):
        json_block(float("nan"))


def test_secrets_of_the_environment_are_not_in_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "abcdefgh12345678")
    folder = make_run(tmp_path / "r", last=20)
    (folder / "sample.txt").write_text("key abcdefgh12345678 and hf_" + "a" * 30)
    page = make_page([read_history(folder)], now=BEGAN)
    assert "abcdefgh12345678" not in page and "hf_aaaa" not in page and "[redacted]" in page


@pytest.mark.parametrize("name", ["changed", "allowed_changes"])  # the second is how older runs have it
def test_each_change_on_the_way_is_told_with_what_followed(tmp_path, name):
    folder = make_run(tmp_path / "r", last=20)
    config = json.loads((folder / "config.json").read_text())
    del config["changed"]
    change = {"step": 488, "name": "train_tokens", "old": 1_000_000, "new": 2_000_000, "learning_rate": [1e-4, 1.1e-3]}
    (folder / "config.json").write_text(json.dumps(config | {name: [change]}))
    page = make_page([read_history(folder)], now=BEGAN)
    assert "No setting was changed" not in page and "train_tokens" in page
    assert "learning rate changed from 0.0001 to 0.0011" in page


def test_every_place_of_a_run_that_holds_text_is_escaped(tmp_path):
    folder = make_run(tmp_path / "<img src=x>", last=60)
    poison = "</script><img src=x onerror=alert(1)>"
    config = json.loads((folder / "config.json").read_text())
    config |= {"versions": {poison: poison}, "git_commit": poison, "ancestry": [{"path": poison, "step": poison}]}
    config["changed"] = [
        {"step": poison, "name": poison, "old": poison, "new": poison, "alters": poison, "learning_rate": [poison, 1]}
    ]
    config["config"]["model"]["name"] = config["config"]["data"]["name"] = config["devices"]["kind"] = poison
    config["config"]["data"]["mixture"] = {poison: 1.0}
    (folder / "config.json").write_text(json.dumps(config))
    row = {"step": 70, "loss": 1.0, f"train/{poison.replace('/', '')}/loss": 1.0, f"stats/{poison}/{poison}": 1.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row | {f"device/{poison}": 3.0}) + "\n")
    kinds = "started resumed restored saved save_failed fallback set_aside skipped spike alarm alert lr_cut rewind"
    facts = dict.fromkeys("cause why what to seen holder verdict factor until name moved_to".split(), poison)
    facts |= {
        "causes": [{"what": poison}],
        "advice": [poison],
        "changed": [{"name": poison}],
        "ancestor": {poison: poison},
    }
    events = [
        event(1, kind, 1, **facts)
        for kind in f"{kinds} stopped lock_stolen hang replicas_differ branch {poison}".split()
    ]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    (folder / "supervise.jsonl").write_text(
        json.dumps({"event": "end", "number": poison, "meaning": poison, "goodput": 1.0, "why": poison})
    )
    for page in (make_page([one := read_history(folder)], now=BEGAN), make_page([one, one], now=BEGAN)):
        assert "<img" not in page and page.count("</script>") == 2 and page.count("<script") == 2
        assert "&lt;img src=x" in page


def test_the_page_is_one_file_that_asks_for_nothing(run):
    page = make_page([run], now=BEGAN)
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" in page
    assert not re.search(r"(?:src|href)=[\"'](?!#)", page.replace(escape(CANARY), "")) and "@import" not in page
    assert "connect-src" not in page and "connect-src 'self'" in make_page([run], now=BEGAN, version="x")


def test_the_head_tells_state_time_and_cost(run):
    status = status_of(run, written_at(4200) + 4, price=4.2)
    assert status.state.name == "running" and status.starts == 2 and status.chips == 64
    assert status.wall_seconds == pytest.approx(2830 * 1.9 * 1.06 + (4200 - 2840) * 1.9 * 1.06, rel=1e-3)
    assert status.cost == pytest.approx(4.2 * 64 * status.wall_seconds / 3600)
    assert status.left_seconds == pytest.approx(1800 * 1.9 * 1.06, rel=0.01)
    assert status_of(run, written_at(4200) + 4000).state.name == "silent"


@pytest.mark.parametrize(
    ("kind", "price", "cost", "told"),
    [
        ("TPU v5", None, "4.20", f"TPU v5p at $4.20 per chip-hour, list price of {V5P.date} ({V5P.source})"),
        ("TPU v5", 2.5, "2.50", "TPU v5p at $2.50 per chip-hour, from --price."),
        ("TPU7x", 8.0, "4.00", "TPU7x at $8.00 per chip-hour"),  # two of JAX's devices are one chip
        ("cpu", None, None, "no price known for cpu. Set your price per chip-hour with --price=DOLLARS."),
        ("cpu", 0.1, "0.10", "cpu at $0.10 per chip-hour, from --price"),
    ],
)
def test_the_cost_rests_on_a_price_that_is_named_with_its_date_or_is_said_to_be_unknown(
    tmp_path, kind, price, cost, told
):
    events = [event(0, "started", 0), event(0, "stopped", 10, seconds=3600, code=10, why="x")]
    config = {"devices": {"kind": kind, "number": 1}, "budget": {"total_steps": 20}}
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "loss": 1.0, "step_seconds": 360.0}\n')
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = read_history(tmp_path)
    for page in (make_page([run], now=BEGAN, price=price), make_page([run, run], now=BEGAN, price=price)):
        text = html.unescape(page)
        assert told in text and (cost is None or f"${cost}" in text) and ("no price" in text) == (cost is None)
    assert cost is None or f"${2 * float(cost):.2f} at the end" in html.unescape(
        make_page([run], now=BEGAN, price=price)
    )


def test_where_the_time_went_sums_to_the_wall_time(run):
    assert "wall time" in goodput_table([run]) and status_of(run, BEGAN).starts == 2
    found = measure_goodput(run.rows, run.events)
    wall = (4200 * 1.9 * 1.06) - found.seconds["idle"]
    assert status_of(run, BEGAN).wall_seconds == pytest.approx(wall, rel=0.01) and found.seconds["idle"] > 0


@pytest.mark.parametrize(
    ("code", "step", "state", "told"),
    [
        (0, 100, "finished", "completed all steps"),
        (0, 60, "stopped", "stopped on request before"),
        (10, 60, "stopped", "exit 10, saved and exited on a signal"),
        (130, 60, "stopped", "exit 130, SIGINT"),
        (17, 60, "failed", "exit 17, training diverged"),
    ],
)
def test_an_end_is_told_with_what_its_code_means(tmp_path, code, step, state, told):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 1.0}))
    (tmp_path / "config.json").write_text(json.dumps({"budget": {"total_steps": 100}}))
    ends = [event(0, "started", 0), event(step, "stopped", None, code=code, why="done")]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in ends))
    status = status_of(read_history(tmp_path), BEGAN)
    assert status.state.name == state and told in status.state.words


def test_incidents_are_words_and_saves_in_a_row_one_line(run):
    found, older = incidents(run.events)
    lines = [one.what for one in found]
    assert older == 0 and "4 checkpoints saved, 13.8 GiB" in lines
    assert any(line.startswith("rewound to step 2200, 140 steps discarded") for line in lines)
    (alert,) = [one for one in found if "likely" in one.what]
    assert alert.is_trouble and alert.what == (
        "data starvation: data wait is 31% of the step over 50 reports; likely: a slow disk or network (0.6 s at the "
        "median, 0.004 s before); try: look at the data's storage; raise data.workers"
    )
    (over,) = [one for one in found if one.step == "3,170"]
    assert not over.is_trouble and over.what == "data starvation ended: data wait is 0.2% of the step"
    drawn = {mark.step: mark for mark in marks(run.events)}
    assert drawn[3100].kind == "trouble" and "data wait is 31%" in drawn[3100].text and 3170 not in drawn
    busy = event(1, "alert", 4000, what="busy_machine", seen="the machine was busy with other work")
    late = event(1, "alarm", 4000, cause="the previous save was still in progress", waited=0.015)
    assert not any(one.is_trouble for one in incidents([busy, late])[0]) and marks([busy, late]) == []
    assert event_message(late) == "the previous save was still in progress; waited 15ms"
    assert len(marks([late | {"waited": 30.0}])) == 1
    assert event_message({"event": "new_kind", "step": 1, "x": 2}) == "new_kind: x 2"


def test_what_is_absent_is_said_and_what_is_abandoned_is_grey(run, tmp_path):
    page = make_page([run], now=BEGAN)
    assert page.count('class="gone c7"') >= 3 and 'class="band c' in page and "Activations" in page
    bare = read_history(make_run(tmp_path / "bare", last=50, plain=True))
    rows = tuple({k: v for k, v in row.items() if not k.startswith(("stats/", "goodput/"))} for row in bare.rows)
    page = make_page([type(bare)(workdir="bare", rows=rows)], now=BEGAN)
    assert "monitor.statistics_every_steps" in page and "No goodput was recorded" in page and 'class="band"' not in page


def test_a_value_that_is_not_finite_is_told_where_its_line_goes_on_without_it(tmp_path):
    rows = [{"step": n, "loss": None if n == 3 else 2.0, "grad_norm": 1.0, "evals/wiki/acc": 0.5} for n in range(1, 6)]
    rows[2]["nonfinite"] = ["loss"]
    page = make_page([History(workdir="x", rows=tuple(rows))], now=BEGAN)
    assert page.count("1 non-finite value not shown") == 1 and "n/a per second" not in page
    assert 'd="M0 5H20"/></svg>wiki</span>' in page  # an evaluator that is alone is named as well


def test_two_runs_share_the_axes_and_their_differences_are_listed(run, tmp_path):
    other = read_history(make_run(tmp_path / "1b-hot", last=600, peak_lr=6e-4, plain=True))
    page = make_page([run, other], now=BEGAN)
    assert "<h1>2 runs</h1>" in page and "optim.peak_lr" in page and "model.num_layers" not in page
    assert 'class="line c0"' in page and 'class="line c1"' in page
    same = make_page([run, dataclasses.replace(run, label="again")], now=BEGAN)
    assert page.index("Settings that differ") < page.index("optim.peak_lr") < page.index("Training loss")
    assert "Settings, machines and versions are the same" in same and "differ in tokens per step" not in same
    config = run.config | {"budget": run.config["budget"] | {"batch_tokens": 4096}}
    assert "differ in tokens per step" in make_page(
        [run, dataclasses.replace(run, config=config, label="b")], now=BEGAN
    )


@pytest.mark.parametrize(
    "broken",
    [{"config": 3, "budget": [], "devices": "x", "versions": 1, "ancestry": 5, "changed": 7, "peak": 1}, {}],
)
def test_a_config_of_another_shape_and_no_rows_still_make_a_page(broken):
    assert "<h1>x</h1>" in make_page([History(workdir="x", config=broken)], now=BEGAN)


def test_a_wheel_holds_every_file_of_the_package_that_is_no_module():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    named = {f"{package.replace('.', '/')}/{name}" for package, names in settings.items() for name in names}
    tracked = subprocess.run(["git", "ls-files", "jaxscale"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name for name in tracked.stdout.split() if not (ROOT / name).is_symlink()}  # setuptools follows the link
    assert named == {name for name in files if not name.endswith(".py")}
