"""What qualify runs, writes and refuses. Nothing here asserts a speed: clocks of a shared machine prove nothing."""

import json
import pathlib

import headless
import jax
import jax.numpy as jnp
import pytest

from jaxscale.cli import qualify as verb
from jaxscale.kernels.hardware import CHIPS
from jaxscale.runtime.hosts.watchdog import Watchdog
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.tools.planning.measured import read_measured
from jaxscale.tools.planning.placeholder_devices import open_machine
from jaxscale.tools.qualify import model, products, run, storage
from jaxscale.tools.qualify.axis_bandwidth import figure_of, meshes
from jaxscale.tools.qualify.products import beside_median, measure_devices, product_seconds
from jaxscale.tools.qualify.qualification_page import make_page, summary_lines
from jaxscale.tools.qualify.result import Floors, Machine, Probe, Reading, amount, phase_limits, reading_of

pytestmark = pytest.mark.slow

H100 = CHIPS["NVIDIA H100 80GB HBM3"]
TINY = """
import ml_collections

def get_config():
    c = ml_collections.ConfigDict()
    c.seq_len, c.batch_tokens, c.train_tokens = 16, "8 rows", "100 steps"
    c.mesh, c.rules, c.optim = dict(fsdp=-1), "zero3", dict(name="sgd")
    c.model = dict(name="llama", vocab_size=32, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8,
                   mlp_dim=16, attention="xla")
    c.data = dict(name="synthetic")
    return c
"""


def machine(tmp_path, **settings):
    given = dict(devices=tuple(jax.devices()), chip=None, floors=Floors(), folder=tmp_path, save_folder=tmp_path)
    return Machine(**given | dict(seconds=60.0) | settings)


@pytest.fixture(scope="module")
def qualified(tmp_path_factory):
    """The folder of a qualification by the verb, made once for this file."""
    folder = tmp_path_factory.mktemp("qualify")
    (folder / "tiny.py").write_text(TINY)
    flags = [
        f"--out={folder / 'out'}",
        f"--config={folder / 'tiny.py'}",
        "--only=step,storage",
        "--minutes=60",
    ]
    assert verb.main(flags) == 0
    return folder / "out"


def test_a_machine_is_qualified_from_end_to_end(qualified):
    found = json.loads((qualified / "qualify.json").read_text())
    assert found["devices"] == "8 x cpu" and found["chip"] is None and found["passed"] and not found["unfinished"]
    states = {probe["name"]: probe["state"] for probe in found["probes"]}
    assert list(states) == list(run.PROBES)
    assert {name for name, state in states.items() if state == "left out"} == set(run.PROBES) - {"step", "storage"}
    figures = {figure["name"]: figure for probe in found["probes"] for figure in probe["figures"]}
    assert all(figure["value"] > 0 for name, figure in figures.items() if "overlaps matmuls" not in name)
    for name in ("step throughput", "restore"):
        assert name in figures and figures[name]["passed"] is None
    assert 0 < figures["overlap: collective share of busy time"]["value"] <= 1
    assert not (qualified / "qualify-saves").exists()


def test_plan_is_left_the_step_and_the_rate_of_saves(qualified):
    (kept,) = [one for one in read_measured() if one.spec == "tiny"]
    assert kept.by == "jaxscale qualify" and kept.num_devices == 8 and kept.save_bytes_per_second > 0


@pytest.mark.skipif(headless.BROWSER is None, reason="no chromium")
def test_the_page_opens_and_asks_for_nothing(qualified, tmp_path):
    browser = headless.Browser(tmp_path / "profile")
    try:
        browser.open((qualified / "qualify.html").as_uri(), width=400)
        assert browser.ask("document.querySelector('.state').textContent").startswith("QUALIFIED, except products")
        assert browser.ask("document.querySelectorAll('section').length") == len(run.PROBES) + 1
        assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
        assert not browser.complaints() and all(url.startswith("file:") for url in browser.asked_for())
    finally:
        browser.close()


@pytest.mark.soak
def test_below_a_floor_it_is_not_qualified_and_says_by_how_much(tmp_path):
    found = run.qualify(machine(tmp_path, chip=H100), only=["products"], say=lambda line: None)
    assert {probe.state for probe in found.probes} == {"below", "left out"}, found.failures
    assert not found.passed
    (line,) = [line for line in found.failures if line.startswith("products: matmuls in bfloat16")]
    assert "of 989.4 TFLOP/s; required: at least 593.6 TFLOP/s" in line
    assert "NOT QUALIFIED: 4 findings" in summary_lines(found)[-1] and "NOT QUALIFIED" in make_page(found)
    low = Floors(products=1e-9, bandwidth=1e-9)
    assert run.qualify(machine(tmp_path, chip=H100, floors=low), only=["products"], say=lambda line: None).passed


@pytest.mark.soak
def test_a_probe_that_fails_is_told_ends_no_other_and_gives_exit_3(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    flags = [f"--out={tmp_path / 'out'}", "--only=storage,products", f"--saves={tmp_path / 'file'}", "--minutes=60"]
    assert verb.main(flags) == 3
    printed = capsys.readouterr().out
    found = {one["name"]: one for one in json.loads((tmp_path / "out" / "qualify.json").read_text())["probes"]}
    assert found["products"]["state"] == "measured" and found["storage"]["state"] == "failed"
    assert "NOT QUALIFIED: 1 finding" in printed and found["storage"]["problem"] in printed
    assert "Traceback" in found["storage"]["traceback"] and "Traceback" not in printed


@pytest.mark.soak
def test_a_slow_device_is_named(tmp_path):
    slow = jax.devices()[3]  # beside two others
    work = lambda device: sum(product_seconds(device, 1) for _ in range(20 if device == slow else 1))
    found = measure_devices(machine(tmp_path, devices=tuple(jax.devices()[2:5])), work)
    assert found.state == "below" and f"CPU {slow.id} on" in found.failures[0] and "is slow" in found.failures[0]


def test_devices_are_held_against_their_median():
    row = lambda number, seconds: (f"TPU {number} at (0, {number}) on host-{number // 2}", number // 2, seconds)
    even = beside_median([row(0, 1.0), row(1, 1.1), row(2, 0.9), row(3, 1.2)], 1.25)
    assert [figure.passed for figure in even] == [None, True]
    uneven = beside_median([row(0, 1.0), row(1, 1.0), row(2, 1.4), row(3, 1.0)], 1.25)
    assert uneven[1].name == "TPU 2 at (0, 2) on host-1 (process 1) is slow" and uneven[1].value == pytest.approx(1.4)
    assert uneven[1].passed is False


def test_no_probe_begins_when_the_time_is_used_up(tmp_path):
    times = iter(range(0, 10_000, 70))
    found = run.qualify(machine(tmp_path), only=["products"], say=lambda line: None, clock=lambda: next(times))
    assert {probe.state for probe in found.probes} == {"left out"} and found.passed
    assert "time limit reached after 1m10s" in found.probes[0].notes[0]


def test_every_probe_is_a_phase_of_the_watchdog(tmp_path):
    dog = Watchdog(tmp_path, phase_limits(60.0), setting="--minutes")
    for name in (*run.PROBES, "save"):
        line = dog.overdue_message(dog.phase(name))
        assert line == f"process 0: {name} has made no progress for 60 s (--minutes)"


def test_the_time_to_go_follows_the_pace_so_far():
    assert run.to_go([], ["products", "devices"], 0.0) == "about 40.0s left"
    assert run.to_go(["products"], ["devices"], 60.0) == "about 1m00s left"


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("v5p:4x4x8", {"data": "x", "fsdp": "y", "expert": "z"}), ("v5e:8x8", {"data": "x", "fsdp": "y"}),
        ("2*v6e:4x4", {"pipeline": "", "data": "x", "fsdp": "y"}), ("h100:2x8", {"pipeline": "", "data": ""}),
        ("h100:8", {"fsdp": ""}), ("tpu7x:2x2x1", {"data": "x", "fsdp": "y", "context": ""}),
    ],
)  # fmt: skip
def test_each_dimension_of_the_links_is_an_axis_that_is_held_against_its_own_share(name, axes, tmp_path):
    topology = open_machine(name)
    mesh = meshes(topology.devices)[-1]
    assert [axis for axis in mesh.axis_names if mesh.shape[axis] > 1] == list(axes)
    for axis, dimension in axes.items():
        link = "between slices" if axis == "pipeline" else "within one slice"
        row = dict(axis=axis, devices=mesh.shape[axis], collective="all-gather", bytes=2**28, link=link, seconds=1.0)
        row |= dict(seconds_range=[0.5, 2.0], bytes_per_s=1e9, table_bytes_per_s=600e9)
        figure = figure_of(
            row, mesh, machine(tmp_path, devices=tuple(topology.devices), chip=topology.chip), judged=True
        )
        assert (f"along {dimension} of the torus" in figure.name) == bool(dimension)
        assert (figure.low, figure.high) == (0.5e9, 2e9)
        if dimension:  # a link of two directions of three or two dimensions; half of it at an edge
            assert figure.against in (pytest.approx(600e9 / topology.chip.ici_dims * part) for part in (1, 0.5))
        elif axis == "context":
            assert figure.against is None and figure.passed is None  # inside a chip: no datasheet has it
        else:
            assert figure.against == 600e9 and figure.least == pytest.approx(0.4 * 600e9)


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (6.12e14, "FLOP/s", "612 TFLOP/s"), (3.35e12, "bytes/s", "3.35 TB/s"), (0.0042, "s", "4.2 ms"),
        (0.413, "share", "41.3%"), (0.0031, "share", "0.31%"), (2e-5, "share", "2e-05"), (1.25, "times", "1.25 times"),
        (12345.6, "tokens/s", "12,346 tokens/s"), (17.2e9, "bytes", "17.2 GB"),
    ],
)  # fmt: skip
def test_amounts_are_written_with_their_units(value, unit, said):
    assert amount(value, unit) == said


def test_what_is_no_number_passes_no_floor():
    figure = reading_of((float("nan"),) * 3, "a", "FLOP/s", 1e12, 0.6, "datasheet")
    assert figure.passed is False and Probe(name="products", figures=(figure,)).state == "below"
    assert Reading(name="a", value=float("nan"), unit="share", most=0.1).passed is False


def test_the_result_is_strict_json_though_a_figure_is_no_number(tmp_path):
    figure = Reading(name="softcap: value", value=float("nan"), unit="share", most=0.1, high=float("inf"))
    found = run.describe(machine(tmp_path), ("here",), (Probe(name="kernels", figures=(figure,)),), 1.0, ())
    run.write(found, tmp_path)
    refuse = lambda word: pytest.fail(f"{word} is no JSON")
    row = json.loads((tmp_path / "qualify.json").read_text(), parse_constant=refuse)["probes"][0]["figures"][0]
    assert (row["value"], row["high"], row["passed"]) == ("nan", "inf", False)


def test_saves_that_a_killed_qualification_left_are_removed_first(tmp_path):
    left = tmp_path / storage.FOLDER / "timed" / "0"  # with the same bits it would be taken for saved, in no time
    left.mkdir(parents=True)
    with storage.empty_folder(tmp_path) as folder:
        assert folder == tmp_path / storage.FOLDER and not folder.exists()
        left.mkdir(parents=True)
    assert not folder.exists()


def test_mfu_is_counted_two_ways_which_the_page_of_the_h200_has(tmp_path):
    topology = open_machine("h200:8")
    one = machine(tmp_path, devices=tuple(topology.devices[:1]), chip=topology.chip)
    name, cfg = next(model.candidates(one))
    assert (name, cfg.model.num_params) == ("1B", 1_126_262_784)
    seconds = cfg.tokens_per_step / 60_482
    figures = {figure.name: figure.value for figure in model.speed_figures(cfg, [seconds], None, one)}
    shares = [f"{figures[name]:.1%}" for name in ("MFU", model.BY_6N)]
    assert shares == ["45.6%", "41.3%"]
    page = pathlib.Path("docs/qualify.md").read_text()
    assert all(text in page for text in (*shares, "60,482 tokens/s", "1,126,262,784"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only=speed"], "--only=speed is not a probe; use any of products, devices, links, kernels, step, storage"),
        (["--minutes=0"], "--minutes=0 must be a number above 0"),
        (["--mfu_floor=half"], "--mfu_floor=half must be a number above 0"),
        (["--config.seq_len=8"], "requires a config; also set --config=FILE"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags, said):
    with pytest.raises(BadInput, match=said.replace("?", r"\?")):
        verb.main(flags)


def test_random_operands_are_multiplied_as_they_say():
    found, flops = products.time_products(jax.devices()[0], 64, "int8", 1)
    assert flops == products.QUEUED * 2 * 64**3 and found.low == found.high
    a = jnp.arange(-8, 8, dtype=jnp.int8).reshape(4, 4)
    assert (products.multiply(a, a) == a.astype(jnp.int32) @ a.astype(jnp.int32).T).all()


def test_a_config_that_does_not_fit_the_devices_is_refused_before_any_probe(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    flags = [f"--out={tmp_path / 'out'}", f"--config={tmp_path / 'tiny.py'}", "--config.mesh.tensor=3", "--only=step"]
    with pytest.raises(Stop, match="needs a multiple of 3 devices") as stopped:
        verb.main(flags)
    assert stopped.value.code == Exit.BAD_INPUT and not (tmp_path / "out").exists()


def test_the_floor_of_mfu_is_of_the_architecture_that_it_was_published_for():
    usual = lambda name: verb.QualifyFlags().floors(next(c for c in CHIPS.values() if c.name.startswith(name))).mfu
    assert [usual(name) for name in ("H100", "H200", "T4", "TPU v5p")] == [0.38, 0.38, None, None]
    assert verb.QualifyFlags(mfu_floor=0.5).floors(None).mfu == 0.5 and verb.QualifyFlags().floors(None).mfu is None
