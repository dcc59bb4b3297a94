"""A frame says what the folder says, fits its terminal, and writes nothing into the folder."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from jaxscale.cli import watch
from jaxscale.cli.watch import columns_of, cut, event_lines, frame, sparkline
from jaxscale.runtime.monitor.goodput import iso_time
from jaxscale.runtime.monitor.history import History
from jaxscale.runtime.monitor.records import Follower

NOW = 1_790_000_000.0
CONFIG = {
    "config": {"model": {"name": "llama", "num_layers": 2, "embed_dim": 64}, "monitor": {"log_every_steps": 10}},
    "budget": {"total_steps": 1000, "batch_tokens": 4096},
    "devices": {"kind": "TPU v5p", "number": 8},
}


def training(step, **changes):
    return {
        "step": step, "loss": 4.0 - step / 500, "tokens_per_second": 12_300.0, "step_seconds": 0.5,
        "data_wait_seconds": 0.01, "mfu": 0.431, "learning_rate": 3e-4, "grad_norm": 0.9, "skipped_total": 0,
        "host_peak_bytes": 2**30, "device_peak_bytes": 60 * 2**30, "device_bytes_limit": 80 * 2**30,
        "device/utilisation": 0.98, "device/power_watts": 601.2, "device/temperature_c": 61.0,
        "goodput/wall_seconds": 20.0 + step * 0.6, "goodput/step_seconds": step * 0.5, "goodput/compile_seconds": 20.0,
        "goodput/data_seconds": step * 0.1,
    } | changes  # fmt: skip


def event(kind, at, step=None, **facts):
    return {"time": iso_time(NOW + at), "event": kind, "step": step, **facts}


STARTED = event("started", -500, 0, process_began=iso_time(NOW - 520), devices=CONFIG["devices"])
RECORDS = [training(step) for step in range(10, 510, 10)]
RECORDS.insert(20, {"step": 200, "validation/loss": 3.7, "validation_seconds": 1.0})


def seen(records=RECORDS, events=(STARTED,), written_at=NOW - 1, **changes):
    rows = tuple(row for record in records if (row := watch.clean_record(record)))
    known = dict(workdir="runs/a", config=CONFIG, rows=rows, events=tuple(events), written_at=written_at)
    return History(**known | changes)


def text(of, width=80, height=24, **settings):
    return "\n".join(line.text for line in frame(of, NOW, width, height, **settings))


def test_a_frame_says_how_the_run_is():
    found = text(seen(events=[STARTED, event("saved", -10, 500, seconds=1.25, verified=True)]))
    for told in (
        "jaxscale watch  runs/a", "running", "llama (2 layers, 64 wide), 8 x TPU v5p", " 50% ", "step 500 of 1,000",
        "eta 5m00s", "loss        3.000", "3.000 to 3.980", "validation  3.700", "at step 200", "learn. rate 3.00e-04",
        "tokens/s    12.3K", "0.5 s  MFU 43.1%  data wait 2.0%", "device 60.0 GiB of 80.0 GiB (75%)",
        "busy 98%  601 W  61 C", "goodput     78.1% of 5m20s", "data 15.6%  compile 6.2%",
        "step 500: checkpoint saved, 1.2s",
    ):  # fmt: skip
        assert told in found, (told, found)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 12), (132, 50), (40, 5), (20, 3), (300, 90)])
@pytest.mark.parametrize("unicode", [True, False])
def test_a_frame_fits_every_terminal(width, height, unicode):
    events = [STARTED, *(event("alarm", n, n, cause=f"数据 {n} \x1b[2J " + "long " * 50) for n in range(200))]
    lines = frame(seen(events=events, workdir="w/" * 300, problems=("x" * 500,)), NOW, width, height, unicode=unicode)
    assert len(lines) <= height and max(columns_of(line.text) for line in lines) <= width
    assert not any("\x1b" in line.text or "\n" in line.text for line in lines)
    if not unicode:
        assert not re.search("[█▁▂▃▄▅▆▇·]", "".join(line.text for line in lines))


@pytest.mark.parametrize(
    ("of", "told", "colour"),
    [
        (seen(), "running", "green"),
        (seen(written_at=NOW - 1000), "silent for 16m40s", "red"),
        (seen(records=[], events=[], written_at=None, config={}), "no start or step was logged yet", "yellow"),
        (
            seen(events=[STARTED, event("stopped", -1, code=0)]),
            "stopped on request before its last step",
            "yellow",
        ),
        (
            seen(records=[training(1000)], events=[STARTED, event("stopped", -1, code=0)]),
            "completed all steps",
            "green",
        ),
        (seen(events=[STARTED, event("stopped", -1, code=17, why="x")]), "exit 17, training diverged", "red"),
        (
            seen(events=[STARTED, event("stopped", -1, code=10, why="x")]),
            "exit 10, saved and exited on a signal",
            "yellow",
        ),
        (seen(events=[STARTED, event("stopped", -1, code=130)]), "exit 130, SIGINT", "yellow"),
        (seen(records=[], written_at=NOW - 500), "starting for 8m20s", "yellow"),  # it compiles
        (seen(records=[], events=[event("started", -4000, 0)], written_at=NOW - 4000), "silent for 1h06m", "red"),
        (seen(records=[], events=[event("started", -60, 0)], written_at=NOW - 60), "starting for 1m00s", "yellow"),
    ],
)
def test_the_state_of_a_run_is_told_from_its_last_event_and_its_age(of, told, colour):
    line = frame(of, NOW, 100, 24)[0]
    assert told in line.text and line.colour == colour


def test_a_slow_run_is_not_called_silent_between_its_records():
    slow = [training(step, step_seconds=60.0, **{"goodput/wall_seconds": step * 60.0}) for step in (10, 20, 30)]
    assert "running" in text(seen(records=slow, written_at=NOW - 900))


def test_a_loss_that_is_not_finite_is_red_and_said():
    broken = [*RECORDS, training(510, loss=None, nonfinite=["loss"], grad_norm=None, tokens_per_second=None)]
    (line,) = [line for line in frame(seen(records=broken), NOW, 80, 24) if line.text.startswith("loss")]
    assert "not finite" in line.text and line.colour == "red"


def test_records_with_nothing_but_steps_and_odd_values_are_shown():
    odd = [{"step": 3, "loss": "high"}, {"step": 4, "loss": 1e308}, {"step": 5, "loss": -1e308}, {"loss": 1.0}, {}]
    assert "loss" in text(seen(records=odd, config={"budget": None, "config": None, "devices": None}))


def test_a_curve_shows_where_it_falls_and_where_nothing_is_known():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁" and sparkline([1, None, 1], 10) == "▁ ▁"
    assert sparkline(range(8), 8, unicode=False) == "_.-~=+*#"
    assert sparkline([], 5) == "" and len(sparkline(range(7), 5)) == 5


def test_text_is_cut_by_the_columns_that_it_takes():
    assert cut("数据数据", 5) == "数据" and columns_of("数据a") == 5 and cut("abc", 0) == ""


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (event("rewind", 0, 90, to=60, why="replicas"), "step 90: rewound to step 60, 30 steps discarded"),
        (event("saved", 0, 5, seconds=2.0, verified=False), "step 5: checkpoint saved, 2.0s; NOT verified: 5"),
        (event("alert", 0, 7, what="loss_spike", seen="it rose"), "step 7: loss spike: it rose"),
        (event("alert", 0, 9, what="loss_spike", over=True, seen="it fell"), "step 9: loss spike ended: it fell"),
        (event("save_failed", 0, 7, cause="no room"), "step 7: checkpoint save failed: no room"),
        (event("stopped", 0, code=15), "exit 15, no progress for too long"),
        (event("stopped", 0, code=130), "exit 130, SIGINT"),
    ],
)
def test_events_are_told_in_the_words_of_the_report(of, words):
    (line,) = event_lines([of], 3, NOW)
    assert line.text[8:].startswith(f"  {words}") and (line.colour == "red") == (
        not (of.get("over") or of.get("code") == 130)
    )


def write(folder, records, events=(STARTED,)):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return folder


def test_a_file_is_followed_over_torn_lines_and_over_one_that_takes_its_place(tmp_path):
    file = tmp_path / "metrics.jsonl"
    follow = Follower(file)
    assert follow.poll() == ([], False)
    file.write_text('{"step": 1}\n{"st')
    assert follow.poll() == ([{"step": 1}], True)
    with file.open("a") as opened:
        opened.write('ep": 2}\nrubbish\n[1]\n' + "[" * 100_000 + '\n{"step": 3}\n')
    assert follow.poll() == ([{"step": 2}, {"step": 3}], False) and follow.damaged == 3
    assert follow.poll() == ([], False)
    (tmp_path / "new").write_text('{"step": 1}\n{"step": 9}\n{"step": 10}\n{"step": 11}\n{"step": 12}\n')
    (tmp_path / "new").replace(file)
    assert follow.poll() == ([{"step": n} for n in (1, 9, 10, 11, 12)], True)
    file.unlink()
    assert follow.poll() == ([], True)


def test_a_damaged_config_is_a_problem_of_the_frame_and_a_missing_one_is_not(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "started", "step": 0}\n')
    assert watch.RunReader(str(tmp_path)).read().problems == ()
    (tmp_path / "config.json").write_text("{")
    (problem,) = watch.RunReader(str(tmp_path)).read().problems
    assert problem.startswith("the run cannot be read:") and "config.json is not valid JSON" in problem


def test_a_long_file_is_read_from_near_its_end(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)))
    found, _ = Follower(tmp_path / "metrics.jsonl", first_bytes=100).poll()
    assert 5 <= len(found) <= 9 and found[-1] == {"step": 999} and found[0]["step"] > 980


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--workdir must be given"),
        (["--workdir=/nowhere/at/all"], "is not a folder"),
        (["--workdir=.", "--every=0"], "--every=0 must be a whole number, 1 or more"),
        (
            ["--workdir=.", "--config=x.py"],
            "--config=x.py is not a flag of this command; everything is read from the work folder",
        ),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(arguments, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        watch.main(arguments)


COMMAND = [sys.executable, "-c", "from jaxscale.cli import main; main()", "watch"]


def test_once_prints_a_plain_frame_without_jax_and_leaves_the_folder_as_it_is(tmp_path):
    folder = write(tmp_path / "run", RECORDS)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in [folder, *folder.iterdir()])
    done = subprocess.run([*COMMAND, f"--workdir={folder}", "--once"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    assert "step 500 of 1,000" in done.stdout and "goodput" in done.stdout and len(done.stdout.splitlines()) < 24
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in [folder, *folder.iterdir()])
    code = "import sys, jaxscale.cli.watch; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments, columns=80, lines=24, **environment):
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        env |= {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"} | environment
        self.process = subprocess.Popen([*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=env)
        os.close(slave)
        self.text = ""

    def resize(self, columns, lines):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, told, seconds=30):
        end = time.monotonic() + seconds
        while told not in self.text and time.monotonic() < end:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:  # the other end is closed
                    break
        assert told in self.text, self.text[-3000:]
        found, self.text = self.text, self.text.partition(told)[2]
        return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_drawn_again_as_files_grow_and_sizes_change_and_is_left_as_it_was(tmp_path, number):
    folder = write(tmp_path / "run", RECORDS)
    terminal = Terminal(f"--workdir={folder}", "--every=1")
    try:
        drawn = terminal.wait_for("step 500 of 1,000")
        assert drawn.startswith("\x1b[?1049h\x1b[?25l") and "\x1b[" in drawn
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(training(510)) + "\n")
        terminal.wait_for("step 510 of 1,000")
        terminal.resize(120, 30)
        wide = terminal.wait_for("step 510 of 1,000")
        assert max(len(part) for part in re.split(r"\x1b\[\w+|\r\n", wide)) > 80
        terminal.process.send_signal(number)
        terminal.wait_for("\x1b[?25h\x1b[?1049l")
        assert terminal.process.wait(20) == 0 and "Traceback" not in terminal.text
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


@pytest.mark.parametrize(
    ("environment", "colours"), [({}, True), ({"NO_COLOR": "1"}, False)], ids=["colour", "NO_COLOR"]
)
def test_colours_are_for_terminals_that_want_them(tmp_path, environment, colours):
    terminal = Terminal(f"--workdir={write(tmp_path / 'run', RECORDS)}", "--once", **environment)
    try:
        drawn = terminal.wait_for("goodput")
        assert ("\x1b[3" in drawn) == colours and "\x1b[?1049h" not in drawn and terminal.process.wait(20) == 0
    finally:
        os.close(terminal.master)
        terminal.process.kill()
        terminal.process.wait()


def test_the_newest_save_counts_as_done_and_an_event_of_another_day_has_its_date():
    busy = event("alert", -50, 500, what="busy_machine", seen="the machine was busy with other work")
    events = [STARTED, event("saved", -86_400 * 3, 507, seconds=1.0, verified=True), busy]
    told = text(seen(events=events))
    assert "step 507 of 1,000" in told and re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d  step 507: checkpoint saved", told)
    assert "step 500: busy machine: the machine was busy" in told
    assert "red" not in [line.colour for line in frame(seen(events=events), NOW, 80, 24)]
