"""SIGTERM at every point of a run: 10, the lock is given back, and the same command goes on."""

import json
import signal
import threading

import pytest
import tiny

from jaxscale import main
from jaxscale.runtime.checkpoint.config import CheckpointConfig, ExportConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.periodic_export import Exporter, periodic_exports
from jaxscale.runtime.training.stopping import raise_on_sigterm
from jaxscale.system import faults
from jaxscale.system.exits import Exit, Stop, Terminated, verdict

STEPS = 8
VALUES = tiny.VALUES | dict(
    train_tokens=f"{STEPS} steps",
    mesh=dict(data=8, fsdp=1),  # which compiles sooner than a state that is cut
    optim=dict(name="sgd"),
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
    eval=dict(every_steps=4, num_rows=8),
    sample=dict(num_tokens=2),
    checkpoint=dict(save_every_steps=3),
    monitor=dict(tensorboard=False, progress="off", statistics_every_steps=0),
)
SOAK = pytest.mark.soak
# For JAXSCALE_TERM_AT, and the newest step that is saved then, where that is certain. Validations are one before the
# first step, a look after each step for its replicas, and those after steps 4 and 8.
POINTS = [
    pytest.param("restore:1", None, id="the first state", marks=SOAK),
    pytest.param("eval:1", None, id="the validation before the first step", marks=SOAK),
    pytest.param("compile:1", 1, id="the first step, while it compiles", marks=SOAK),
    pytest.param("data:3", 3, id="a wait for data", marks=SOAK),
    pytest.param("step:5", None, id="a step", marks=SOAK),
    pytest.param("save:1", None, id="a save", marks=SOAK),
    pytest.param(f"data:{STEPS}", STEPS, id="the last wait for data", marks=SOAK),
    pytest.param("eval:11", STEPS, id="the last validation", marks=SOAK),
    pytest.param("eval:12", STEPS, id="the last sample", marks=SOAK),
]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """command(point): the exit code of the run, which gets SIGTERM there; and its line."""
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text("def return import while class lambda " * (number + 2))
    values = VALUES | dict(data=dict(files=str(tmp_path / "*.txt")))
    (tmp_path / "tiny_config.py").write_text(f"def get_config():\n    return {values!r}\n")
    died = []
    before = signal.signal(signal.SIGTERM, lambda *_: died.append("by a signal"))

    def run(point=""):
        faults.passed.clear()
        monkeypatch.setenv("JAXSCALE_TERM_AT", point)
        try:
            code = main.main([f"--config={tmp_path / 'tiny_config.py'}", f"--workdir={tmp_path / 'run'}"])
            line = "done"
        except (Stop, Terminated) as error:
            code, line = verdict(error)
        assert not died
        return code, line

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.mark.fault("F37")
@pytest.mark.parametrize(("where", "saved"), POINTS)
def test_a_run_that_is_told_to_end_leaves_with_10_and_goes_on(command, tmp_path, where, saved):
    workdir = tmp_path / "run"
    code, line = command(where)
    assert code == Exit.PREEMPTED and line.startswith("stopped (preempted, exit 10): SIGTERM: "), line
    assert not (workdir / "lock").exists()
    newest = Checkpoints(workdir / "checkpoints", CheckpointConfig()).latest_step()
    assert saved is None or newest == saved
    events = [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()] if newest else []
    assert not events or (events[-1]["event"], events[-1]["code"]) == ("stopped", 10)
    assert command() == (0, "done")
    assert Checkpoints(workdir / "checkpoints", CheckpointConfig()).latest_step() == STEPS


@pytest.mark.fault("F37")
def test_an_export_that_is_waited_for_ends_with_the_run_that_is_told_to(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    children = []

    class Slow(Exporter):
        def command(self, step):
            return ["sleep", "60"]

        def abort(self):
            super().abort()
            children.append(self.child)

    told = lambda line: threading.Timer(0.3, signal.raise_signal, (signal.SIGTERM,)).start()
    with pytest.raises(Terminated), raise_on_sigterm():
        with periodic_exports(
            ExportConfig(every_steps=1), tmp_path, lambda *a, **k: None, told, primary=True, make_exporter=Slow
        ) as note:
            note("saved", 1)
    assert children[0].wait(10) == -signal.SIGKILL
