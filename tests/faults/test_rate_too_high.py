"""A learning rate a thousand times too high climbs every rung of the ladder, ends with 17, and can be replayed."""

import pytest
import tiny

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.run.options import RunOptions
from jaxscale.system.exits import Exit, Stop

VALUES = {
    "monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0,
    "checkpoint.save_every_steps": 1, "checkpoint.keep_last": 200, "checkpoint.verify_saved": False,
    "train_tokens": "120 steps", "optim.warmup_tokens": "40 steps",
    "optim.peak_lr": 1000 * tiny.VALUES["optim"]["peak_lr"],
    "train.guard.window_steps": 20, "train.guard.max_skipped_in_row": 1, "train.guard.spike_ratio": 1.2,
    "train.recovery.steps": ("cut_lr", "rewind"), "train.recovery.cut_steps": 5, "train.recovery.max_rewinds": 1,
    "train.recovery.rewind_margin_steps": 2,
}  # fmt: skip


def ended(folder, **wishes):
    """The line and the events with which the run ended, if it was by exit 17."""
    with pytest.raises(Stop) as stop:
        train_to_completion(open_run(tiny.config(VALUES), str(folder), lambda line: None, options=RunOptions(**wishes)))
    assert stop.value.code == Exit.NON_FINITE and "\n" not in str(stop.value)
    return str(stop.value), [e for e in read_events(folder) if e["event"] in ("skipped", "lr_cut", "rewind")]


@pytest.mark.fault("F11")
@pytest.mark.soak
def test_each_rung_is_on_record_the_end_is_17_and_a_replay_repeats_every_saved_leaf(tmp_path):
    line, events = ended(tmp_path / "old")
    kinds = [event["event"] for event in events]
    assert kinds[0] == kinds[-1] == "skipped" and kinds.count("rewind") == 1
    assert "lr_cut" in kinds[: kinds.index("rewind")], "the rate is cut before anything is given up"
    assert "1 rewinds" in line and "lower optim.peak_lr" in line and "the window's median" in line
    line, repeated = ended(tmp_path / "new", replay=str(tmp_path / "old"))
    assert "lower optim.peak_lr" in line and not [event for event in repeated if event["event"] == "rewind"]
    decided = lambda events: [(e["event"], e["step"], e.get("factor"), e.get("until")) for e in events]
    after = decided(events)[kinds.index("rewind") + 1 :]
    assert "lr_cut" in [kind for kind, *_ in after]
    to = events[kinds.index("rewind")]["to"]
    kept = [one for one in decided(events[: kinds.index("rewind")]) if one[1] <= to]
    assert decided(repeated)[: len(kept + after)] == kept + after
    saved = []
    for name in ("old", "new"):
        checkpoints = Checkpoints(tmp_path / name / "checkpoints", CheckpointConfig())
        saved.append({step: checkpoints.read_record(step)["leaves"] for step in checkpoints.all_steps()})
    for step, leaves in saved[0].items():
        assert saved[1][step] == leaves, f"step {step}: {[n for n in leaves if leaves[n] != saved[1][step][n]]}"
    assert "guard/order" in leaves
