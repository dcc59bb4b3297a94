"""Four processes on this machine, each a stage of a pipeline: a lost one is named, and the run goes on bit for bit."""

import json
import re

import numpy as np
import processes
import pytest
import tiny

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.system.exits import Exit

VALUES = dict(
    seq_len=16,
    batch_tokens="16 rows",
    train_tokens="24 steps",
    mesh=dict(pipeline=4),
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=5, remat="full"),
    train=dict(num_microbatches=8),
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps"),
    eval=dict(every_steps=12, num_rows=8),
    checkpoint=dict(save_every_steps=4),
    monitor=dict(log_every_steps=1, tensorboard=False, progress="lines"),
)


def losses(workdir):
    """{step: loss} as written."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.fault("F7")
@pytest.mark.soak
def test_a_stage_that_is_lost_is_named_and_the_run_goes_on_as_if_it_had_not_been(tmp_path):
    words, rng = "def return import while class lambda yield self None True for in".split(), np.random.default_rng(0)
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(" ".join(rng.choice(words, 8 + number)))
    values = VALUES | dict(data=dict(files=str(tmp_path / "*.txt")))
    (tmp_path / "staged.py").write_text(f"def get_config():\n    return {values!r}\n")

    def start(workdir, *flags):
        flags = [f"--config={tmp_path / 'staged.py'}", f"--workdir={workdir}", *flags]
        return processes.Processes(4, 1, tmp_path, flags)

    straight, workdir = tmp_path / "straight", tmp_path / "run"
    with start(straight) as running:
        assert running.codes() == [0] * 4, running.log(0)
    with start(workdir) as running:
        running.wait_for("step 14/")
        running.running[2].kill()
        assert running.codes() == [Exit.PEER_LOST, Exit.PEER_LOST, -9, Exit.PEER_LOST]
        for number in (0, 1, 3):
            assert re.search(r"stopped \(peer_lost, exit 13\): process 2 of 4 .* was lost", running.log(number))
    with start(workdir) as running:
        assert running.codes() == [0] * 4, running.log(0)
    found, wanted = losses(workdir), losses(straight)
    assert max(wanted) == 24 and found == wanted  # to the last digit
    one, other = (Checkpoints(folder / "checkpoints", CheckpointConfig()) for folder in (workdir, straight))
    assert one.read_run(24)["data"] == other.read_run(24)["data"]
