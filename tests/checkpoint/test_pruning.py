"""What prune would keep is what training keeps."""

import dataclasses
import pathlib

import numpy as np
import pytest
from ckpt_states import refuse_to_open
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.retention import (
    RetentionFacts,
    StepFacts,
    delete_step,
    last_good_step,
    list_steps,
    pin,
    retained_steps,
    retention_reasons,
    unpin,
)
from jaxscale.system.exits import Exit, Stop

STALE = type("HttpError", (Exception,), {"__module__": "gcsfs.retry"})("503")


def facts(step, health=None, loss=None, pinned=False):
    return StepFacts(step, None, 1, health, loss, False, pinned)


@pytest.mark.slow
@given(st.sets(st.integers(0, 60), max_size=20), st.integers(1, 6), st.integers(0, 20))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_without_marks_it_keeps_the_steps_that_training_keeps(steps, keep_last, every):
    kept = retention_reasons(
        [facts(step) for step in sorted(steps)], None, CheckpointConfig(keep_last=keep_last, keep_every_steps=every)
    )
    cfg = CheckpointConfig(keep_last=keep_last, keep_every_steps=every)
    assert kept == retained_steps(steps, cfg, lambda step: RetentionFacts(None, None))


def test_what_training_would_keep_after_a_save_is_what_prune_keeps(tmp_path):
    cfg = CheckpointConfig(keep_last=2, keep_every_steps=4)
    trained = Checkpoints(tmp_path, cfg)
    for step in range(1, 8):
        trained.save(step, {"w": np.ones(3, np.float32)}, {})
        trained.wait()
    trained.close()
    found = list_steps(trained.directory)
    assert (
        set(retention_reasons(found, None, CheckpointConfig(keep_last=2, keep_every_steps=4)))
        == set(trained.all_steps())
        == {4, 6, 7}
    )


def test_every_step_that_stays_says_why():
    found = [
        facts(10, "clean", 3.0), facts(20, "clean", 2.0), facts(25, "suspect", 2.5, pinned=True), facts(30, "suspect"),
        facts(40, "suspect", 4.0), facts(50, "suspect", 5.0),
    ]  # fmt: skip
    kept = retention_reasons(found, 30, CheckpointConfig(keep_last=1, keep_every_steps=40, keep_best=1))
    assert kept == {20: "best 1", 25: "pinned", 30: "last good", 40: "every 40", 50: "newest 1"}
    assert retention_reasons(found, 7, CheckpointConfig(keep_last=1, keep_every_steps=0))[20] == "newest clean"


def test_deleting_a_step_that_is_gone_already_is_fine_and_others_stay(run):
    delete_step(run.directory, 10)
    delete_step(run.directory, 10)
    assert run.all_steps() == [20, 30]
    assert not list(pathlib.Path(run.directory).glob("*removed*"))


def test_a_pin_is_a_file_and_says_whether_it_was_there(run):
    assert pin(run.directory, 10) and not pin(run.directory, 10)
    assert [found.step for found in list_steps(run.directory) if found.pinned] == [10]
    assert unpin(run.directory, 10) and not unpin(run.directory, 10)


def test_what_cannot_be_read_stays_and_an_old_record_counts_as_clean(run, monkeypatch):
    found = [facts(10), dataclasses.replace(facts(20), problem="damaged"), facts(30, "suspect")]
    kept = retention_reasons(found, None, CheckpointConfig(keep_last=1))
    assert kept == {10: "newest clean", 20: "its record cannot be read", 30: "newest 1"}
    (run.directory / "last_good.json").write_text("{")
    assert last_good_step(run.directory) is None
    refuse_to_open(monkeypatch, lambda path: path.name == "metadata", STALE)
    assert all(fact.problem.endswith("metadata cannot be read: HttpError") for fact in list_steps(run.directory))
    refuse_to_open(monkeypatch, lambda path: path.name == "last_good.json", STALE)
    with pytest.raises(Stop, match="last_good.json cannot be read: .*nothing was deleted") as stop:
        last_good_step(run.directory)
    assert stop.value.code == Exit.STORAGE
