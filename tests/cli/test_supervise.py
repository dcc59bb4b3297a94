"""A supervisor starts again what may be mended, gives up on a crash loop, and leaves nothing running."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxscale.cli import supervise
from jaxscale.cli.supervise import read_progress
from jaxscale.system.exits import BadInput, Exit, codes_help, may_start_again, meaning

# In the place of a training: does what the next line of WORKDIR/../plan says ("saves=7": commits step 7), and ends.
STAND_IN = """
import json, os, pathlib, signal, sys, threading, time
workdir = pathlib.Path(sys.argv[1].removeprefix("--workdir="))
plan = workdir.parent / "plan"
now, _, rest = plan.read_text().partition("\\n")
plan.write_text(rest)
for word in now.split():
    kind, _, value = word.partition("=")
    if kind == "logs":
        with (workdir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(dict(step=int(value), tokens_hash="x", step_seconds=0.01, at=time.time())) + "\\n")
    elif kind == "saves":
        record = workdir / "checkpoints" / value / "run" / "metadata"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text("{}")
    elif kind == "begins":  # goes on from a local copy of this step
        (workdir / "local_copies.json").write_text('{"starts": {}, "begun": ' + value + "}")
    elif kind == "sleeps":
        time.sleep(float(value))
    elif kind == "dies":
        os.kill(os.getpid(), int(value))
    elif kind == "exits":
        sys.exit(int(value))
    elif kind == "waits":  # as the trainer: the first signal saves, the second leaves at once. Tells the supervisor so
        def leave(number, frame):
            signal.signal(number, signal.SIG_DFL)
            time.sleep(0.5)
            (workdir / "told").write_text(signal.Signals(number).name)
            os._exit(10)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)
        (workdir / "pid").write_text(str(os.getpid()))
        def tell():
            for number in filter(None, value.split(",")):
                os.kill(os.getppid(), int(number))
                time.sleep(0.1)
        threading.Thread(target=tell).start()
        time.sleep(60)
    elif kind == "moves":
        workdir.rename(value)
    elif kind == "leaves":  # a process behind, in the same group
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        (workdir / "left").write_text(str(child))
"""


class Training:
    """A work folder, and a plan of what each start of the command does."""

    def __init__(self, folder, *plan):
        self.folder, self.workdir = folder, folder / "run"
        self.workdir.mkdir()
        (folder / "plan").write_text("".join(f"{line}\n" for line in plan))
        (folder / "train.py").write_text(STAND_IN)
        self.command = [sys.executable, "-S", str(folder / "train.py"), f"--workdir={self.workdir}"]

    def supervise(self, *flags):
        """The exit code; there are no pauses."""
        return supervise.main(["--backoff_seconds=0", *flags, "--", *self.command])

    def start(self, *flags):
        """The supervisor as a process of its own, which may be killed."""
        env = os.environ | {"PYTHONPATH": str(pathlib.Path(supervise.__file__).parent.parent.parent)}
        command = [sys.executable, "-m", "jaxscale.cli", "supervise", *flags, "--", *self.command]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    def ledger(self, event=None):
        lines = (self.workdir / "supervise.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if event in (None, line["event"])]

    def wait_for(self, name):
        """The content of a file in the work folder, once it is there."""
        deadline = time.monotonic() + 60
        while not (self.workdir / name).exists() or not (self.workdir / name).read_text():
            assert time.monotonic() < deadline, name
            time.sleep(0.01)
        return (self.workdir / name).read_text()

    def left(self):
        """How many starts of the plan were not used."""
        return len((self.folder / "plan").read_text().splitlines())


def gone(pid):
    """Waits until no process has this number."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stat = pathlib.Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":  # dead, and its new parent has not looked yet
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_only_the_codes_that_may_be_mended_start_again():
    again = {code for code in range(-64, 256) if may_start_again(code)}
    assert {code for code in again if 0 <= code < 128} == {10, 13, 14, 15}
    assert {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM, 137, 143} <= again
    assert not again & {-signal.SIGINT, 130, -signal.SIGPIPE, 141, 128, 255}


def test_every_code_has_a_meaning_and_an_advice():
    assert len(codes_help().splitlines()) == len(Exit)
    assert [meaning(code) for code in (13, -9, 137, 42)] == [
        "exit 13, another process was lost", "killed by SIGKILL", "exit 137, SIGKILL",
        "exit 42, not an exit code of jaxscale",
    ]  # fmt: skip


def test_what_may_be_mended_is_started_again_until_it_is_done(tmp_path):
    plan = ("saves=1 exits=10", "saves=2 exits=13", "saves=3 exits=14", "saves=4 exits=15", "saves=5 dies=9", "dies=11")
    training = Training(tmp_path, *plan, "saves=9 exits=0")
    assert training.supervise() == 0 and training.left() == 0
    ends = training.ledger("end")
    assert [end["code"] for end in ends] == [10, 13, 14, 15, -9, -11, 0]
    assert [end["steps_won"] for end in ends] == [1, 1, 1, 1, 1, 0, 4]


@pytest.mark.cases(4)
@pytest.mark.parametrize("end", [1, 2, 3, 11, 12, 16, 17, 18, 19, 130])
def test_what_a_person_has_to_mend_ends_with_its_own_code(tmp_path, end):
    training = Training(tmp_path, f"saves=1 exits={end}", "exits=0")
    assert training.supervise() == end and training.left() == 1


@pytest.mark.fault("F28")
def test_a_crash_loop_ends_with_the_reason_and_the_last_good_step_stays(tmp_path, capfd):
    training = Training(tmp_path, "saves=7 exits=13", *["logs=9 dies=9"] * 5, "exits=0")
    assert training.supervise("--max_fruitless=4") == Exit.ERROR and training.left() == 2
    told = capfd.readouterr().err
    assert "gave up: crash loop: 4 consecutive starts without a new checkpoint; the newest is step 7" in told
    assert "they ended with: killed by SIGKILL, killed by SIGKILL, killed by SIGKILL, killed by SIGKILL\n" in told
    assert read_progress(training.workdir).newest == 7
    (last,) = training.ledger("gave_up")
    assert (last["code"], last["steps_won"], last["steps_lost"]) == (1, 7, 8)


def test_pauses_grow_while_starts_end_quickly_and_never_beyond_the_longest():
    policy = supervise.SuperviseFlags(backoff_seconds=5, max_backoff_seconds=60)
    assert [policy.pause(n, 0.0) for n in (0, 1, 2, 3, 4, 5, 99)] == [5, 5, 10, 20, 40, 60, 60]
    assert policy.pause(3, 0.99) == pytest.approx(20 * 0.505)


@pytest.mark.slow
def test_starts_are_counted_since_the_last_new_checkpoint(tmp_path, capfd):
    advances = [plan for n in range(1, 5) for plan in (f"saves={n} exits=10", "dies=9")]
    training = Training(tmp_path, *advances, "dies=9", "exits=0")
    assert training.supervise("--max_fruitless=2") == Exit.ERROR and training.left() == 1
    told = capfd.readouterr().err
    assert told.count("restarting in") == 8 and told.count("(start 1 of at most 2 without a new checkpoint)") == 4
    assert "gave up: crash loop: 2 consecutive starts" in told


def test_a_run_that_advances_by_local_copies_alone_is_no_crash_loop(tmp_path, capfd):
    advances = [f"begins={step} dies=9" for step in (0, 40, 80, 120, 160)]
    loops = ["begins=160 dies=9", "begins=150 dies=9", "begins=160 dies=9"]  # a host was lost: no further than before
    training = Training(tmp_path, *advances, *loops, "exits=0")
    assert training.supervise("--max_fruitless=3") == Exit.ERROR and training.left() == 1
    assert "gave up: crash loop: 3 consecutive starts" in capfd.readouterr().err


def test_a_step_that_is_saved_again_after_a_rewind_is_new(tmp_path):
    training = Training(tmp_path, "saves=8 exits=13")
    training.supervise("--max_fruitless=1")
    before = read_progress(training.workdir)
    record = training.workdir / "checkpoints" / "8" / "run" / "metadata"
    os.utime(record, (1, 1))
    assert not before.advanced(before) and read_progress(training.workdir).advanced(before)


def test_the_seconds_of_the_ledger_add_up_to_the_wall(tmp_path):
    plan = ("sleeps=0.3 saves=2 exits=13", "sleeps=0.2 logs=5 dies=9", "sleeps=0.2 saves=8 exits=0")
    training = Training(tmp_path, *plan)
    began = time.monotonic()
    assert training.supervise() == 0
    wall = time.monotonic() - began
    (last,) = training.ledger("leave")
    parts = sum(last[f"{name}_seconds"] for name in ("up", "waiting", "keeping"))
    assert parts == pytest.approx(last["wall_seconds"], rel=0.01) and last["wall_seconds"] <= wall
    assert (last["steps_won"], last["steps_lost"], last["lost_seconds"]) == (8, 3, 0.03)
    assert last["goodput"] == pytest.approx((last["up_seconds"] - 0.03) / last["wall_seconds"], abs=1e-3)


@pytest.fixture
def nothing_ignored():
    """Signals as a terminal leaves them: under nohup some are ignored, and a supervisor leaves those alone."""
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in supervise.FORWARDED_SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.cases(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_goes_on_to_the_training_which_saves_and_both_leave(tmp_path, number, nothing_ignored):
    training = Training(tmp_path, f"waits={int(number)}", "exits=0")
    assert training.supervise() == Exit.PREEMPTED
    assert (training.workdir / "told").read_text() == signal.Signals(supervise.FORWARDED_SIGNALS[number]).name
    assert training.left() == 1 and training.ledger("leave")[0]["code"] == 10


def test_a_second_signal_is_passed_on_too(tmp_path):
    training = Training(tmp_path, f"waits={int(signal.SIGTERM)},{int(signal.SIGTERM)}", "exits=0")
    assert training.supervise() == 128 + signal.SIGTERM
    assert not (training.workdir / "told").exists()


def test_a_signal_during_a_pause_ends_it(tmp_path):
    training = Training(tmp_path, "saves=1 exits=13", "exits=0")

    def when_it_pauses():
        while "pause" not in training.wait_for("supervise.jsonl"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=when_it_pauses)
    thread.start()
    assert training.supervise("--backoff_seconds=200") == Exit.PEER_LOST
    thread.join()
    assert training.left() == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a Linux kernel's promise")
def test_the_training_dies_with_a_supervisor_that_is_killed(tmp_path):
    training = Training(tmp_path, "waits")
    with training.start() as process:
        pid = int(training.wait_for("pid"))
        process.kill()
        process.wait(20)
        assert gone(pid)


def test_what_an_attempt_leaves_behind_is_gone_before_the_next(tmp_path):
    training = Training(tmp_path, "leaves exits=13", "exits=0")
    assert training.supervise() == 0
    assert gone(int((training.workdir / "left").read_text()))


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    missing = tmp_path / "none"
    assert supervise.main(["--", sys.executable, "-S", "-c", "raise SystemExit(2)", f"--workdir={missing}"]) == 2
    assert not missing.exists()


@pytest.mark.fault("F34")
def test_a_folder_that_was_moved_under_its_run_is_not_begun_anew(tmp_path, capsys):
    training = Training(tmp_path, f"moves={tmp_path / 'away'} exits=14", "exits=0")
    assert training.supervise() == 1 and training.left() == 1
    assert f"gave up: {training.workdir} was moved or deleted" in capsys.readouterr().err
    assert not training.workdir.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no training command"),
        (["--config=x.py"], "it is a flag of the training command, after --: jaxscale supervise -- --config=FILE"),
        (["--max_fruitless=no", "--", "x", "--workdir=w"], "--max_fruitless=no must be a whole number"),
        (["--max_fruitles=3", "--", "x"], "did you mean --max_fruitless?"),
        (["--", "python"], "has neither --workdir nor --config"),
        (["--", "no-such-program", "--workdir=w"], "no-such-program is not an executable"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(arguments, told):
    with pytest.raises(ValueError) as error:
        supervise.main(arguments)
    assert told in str(error.value) and isinstance(error.value, BadInput) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        (["p", "--workdir=a b"], "a b"),
        (["p", "--workdir", "x", "--config=c.py"], "x"),
        (["p", "--config=configs/auto.py:depth=4"], "runs/auto-depth4"),
    ],
)
def test_the_work_folder_is_that_of_the_command(command, folder):
    assert supervise.workdir_of(command) == folder


def test_each_of_several_processes_keeps_a_ledger_of_its_own():
    place = ["--coordinator=localhost:4000", "--num_processes=4"]
    ledgers = [
        supervise.default_ledger("w", supervise.process_info_of(["p", *place, f"--process_id={number}"]))
        for number in (0, 3)
    ]
    assert ledgers == ["w/supervise.jsonl", "w/supervise-3.jsonl"]
