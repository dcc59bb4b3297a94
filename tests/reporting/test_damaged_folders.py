"""Whatever a work folder holds, the page and the terminal's frame are made, and what is damaged is told."""

import json
import os
import random
import sys
import time

import pytest
from made_run import BEGAN, make_run, written_at

from jaxscale.cli.watch import RunReader, frame_text
from jaxscale.runtime.monitor.history import read_history
from jaxscale.tools.reporting.card import make_card
from jaxscale.tools.reporting.page import make_page

ODD = (
    None, True, -1, 0, 3.5, 1e300, 2**70, 10**400, float("nan"), float("-inf"), "x", "", "</script>", [], [1], {},
    {"a": 1}, [[1, 2]], ["a", None], "2026-01-01T00:00:00+00:00", "0000-00-00", "0001-01-01", {"number": 3},
    [{"what": 1}], {"x": None},
)  # fmt: skip
NAMES = """step loss validation/loss tokens_seen batch_index goodput/wall_seconds goodput/step_seconds step_seconds mfu
stats/a/0 stats/a/1 stats/a/2 stats/a/3 train/web/loss time event causes advice seen what over code why changed devices
kind number to skip_batches process_began left goodput model name data mixture max_epochs seq_len budget total_steps
batch_tokens config monitor log_every_steps stages rows peak versions ancestry changed validation_seconds
device/power_watts nonfinite rewind text seconds bytes steps_won factor until grad_norm learning_rate skipped_total
tokens_per_second data_wait_seconds host_peak_bytes device_peak_bytes device_bytes_limit device_bytes_in_use steps
first_layer counts train/experts_busiest train/experts_dead""".split()
KINDS = """started resumed restored saved skipped spike alarm lr_cut rewind stopped hang branch profile alert other
end leave""".split()
HUGE = ("goodput/step_seconds", "goodput/data_seconds")
FILES = ("metrics.jsonl", "abandoned.jsonl", "events.jsonl", "samples.jsonl", "experts.jsonl", "supervise.jsonl")


def odd(rng, depth=0):
    """A value of any kind, at times nested."""
    if depth < 2 and rng.random() < 0.3:
        return {rng.choice(NAMES): odd(rng, depth + 1) for _ in range(3)}
    return rng.choice(ODD)


def record(rng, number):
    """A line that may be anything, and looks like one of ours now and then."""
    found = {rng.choice(NAMES): odd(rng) for _ in range(rng.randrange(8))}
    if rng.random() < 0.8:
        found |= {"step": number, "event": rng.choice(KINDS), "time": f"2026-01-01T00:00:{number:02}+00:00"}
    return found


def frame(folder):
    return frame_text(RunReader(str(folder)).read(), os.terminal_size((80, 24)), sys.stdout, colour=False)


@pytest.mark.parametrize("seed", range(30))
def test_a_folder_of_odd_values_makes_a_page_and_a_frame(tmp_path, seed):
    rng = random.Random(seed)
    for name in FILES:
        (tmp_path / name).write_text("".join(json.dumps(record(rng, n)) + "\n" for n in range(12)))
    config = {name: odd(rng) for name in "config budget devices peak versions ancestry mixture git_commit".split()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = make_page([read_history(tmp_path)], now=BEGAN, price=1.0)
    assert page.endswith("</html>\n") and page.count("</script>") == 2
    lines = frame(tmp_path).splitlines()
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"step": 2, "loss": 1.0, "grad_norm": "1", "skipped": 1}'),
        ("metrics.jsonl", '{"step": 2, "loss": 1.0, "grad_norm": 1e308}\n{"step": 3, "loss": 1, "grad_norm": 5e-324}'),
        ("metrics.jsonl", '{"step": 2, "loss": 1.0, "stats/grad_norm/0": 1e308, "stats/grad_norm/1": 1e-320}'),
        ("metrics.jsonl", json.dumps({"step": 2, "goodput/wall_seconds": 9} | dict.fromkeys(HUGE, 1e308))),
        ("config.json", '{"budget": {"total_steps": 1e400}}'),
        ("config.json", '{"budget": {"batch_tokens": 1e-300}}'),
        ("events.jsonl", '{"event": "started", "time": "9999-12-31T23:59:59-14:00", "step": 0}'),
    ],
)  # fmt: skip
def test_numbers_that_no_run_has_make_a_page_a_card_and_a_frame(tmp_path, name, text):
    row = {"loss": 1.0, "grad_norm": 1.0, "stats/grad_norm/0": 1.0, "step_seconds": 1.0}
    rows = [row | {"step": step} for step in (0, 1)]
    events = [{"event": "started", "time": "2026-01-01T00:00:00+00:00", "step": 0}]
    band = dict(tokens=[1e50, 1e99], low=[1, 1], middle=[1, 1], high=[2, 2])
    found = {"config.json": "{}", "forecast.json": json.dumps(band)}
    found |= {
        file: "".join(map("{}\n".format, map(json.dumps, lines)))
        for file, lines in (("metrics.jsonl", rows), ("events.jsonl", events))
    }
    found[name] = text if name == "config.json" else f"{found[name]}{text}\n"
    for file, content in found.items():
        (tmp_path / file).write_text(content)
    assert make_page([read_history(tmp_path)], now=BEGAN).endswith("</html>\n")
    assert make_card([read_history(tmp_path)], now=BEGAN) and frame(tmp_path)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.503, 0.98, 0.9999])
def test_files_that_end_anywhere_are_shown_as_far_as_they_go(tmp_path, part):
    folder = make_run(tmp_path / "run", last=1000)
    whole = read_history(folder)
    for file in folder.iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: int(part * len(content))])
    found = read_history(folder)
    assert part - 0.02 <= found.last_step / whole.last_step <= part + 0.02
    told = "\n".join(found.problems)
    assert "config.json is damaged" in told and (part < 0.1 or "the last line is incomplete" in told)
    assert f"step {found.reached_step:,}" in frame(folder) and make_page([found], now=BEGAN).endswith("</html>\n")


def test_a_folder_in_which_a_run_has_just_begun(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    page = make_page([read_history(tmp_path)], now=time.time())
    assert "No loss was logged yet." in page and "No samples yet" in page
    assert "no start or step was logged yet" in frame(tmp_path) and "no metrics yet" in frame(tmp_path)


@pytest.mark.soak
def test_a_million_lines_are_one_small_page(tmp_path):
    base = make_run(tmp_path / "run", last=1000)
    row = {"grad_norm": 0.3456789, "step_seconds": 1.234567, "tokens_per_second": 123456.789, "tokens_seen": 1}
    with (base / "metrics.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            file.write(json.dumps(row | {"step": step, "loss": 9.0 if step == 777_777 else 2.0}) + "\n")
    began = time.monotonic()
    found = read_history(base)
    page = make_page([found], now=written_at(1000))
    seconds = time.monotonic() - began
    print(f"{seconds:.1f} s, {len(page) / 1e6:.1f} MB, {(base / 'metrics.jsonl').stat().st_size / 1e6:.0f} MB read")
    assert found.lines == 1_000_000 and found.last_step == 1_000_000 and max(found.series("loss")[1]) == 9.0
    assert len(page) < 8e6 and seconds < 180
    assert "1,000,000" in frame(base)
