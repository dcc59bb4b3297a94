"""Checkpoints that are not needed go, and no other."""

import errno
import pathlib

import jax.numpy as jnp
import pytest
from ckpt_states import refuse_to_open

from jaxscale.runtime.checkpoint import retention
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.retention import RetentionFacts, retained_steps
from jaxscale.system.exits import Exit, Stop


def test_old_steps_go_and_foreign_folders_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2, keep_every_steps=4))
    (tmp_path / "1000").mkdir()
    (tmp_path / "5").mkdir()
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "notes.txt").write_text("mine")
    for step in range(1, 8):
        checkpoints.save(step, {"w": jnp.ones(3)}, {})
    checkpoints.close()
    assert checkpoints.all_steps() == [4, 6, 7]
    assert (tmp_path / "0" / "notes.txt").exists() and (tmp_path / "1000").exists()
    again = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))  # another process, another rule
    again.save(8, {"w": jnp.ones(3)}, {})
    again.close()
    assert again.all_steps() == [8]


def facts(**losses):
    """{step: Facts} from s1=0.5 (clean) or s1=None (suspect)."""
    found = {
        int(name[1:]): RetentionFacts("clean" if loss is not None else "suspect", loss) for name, loss in losses.items()
    }
    return lambda step: found.get(step, RetentionFacts("clean", None))


@pytest.mark.parametrize(
    ("settings", "more", "kept"),
    [
        (dict(keep_last=2), {}, {5, 6}),
        (dict(keep_last=9), {}, {1, 2, 3, 4, 5, 6}),
        (dict(keep_last=2, keep_every_steps=3), {}, {3, 5, 6}),
        (dict(keep_last=1, keep_best=2), dict(facts=facts(s1=0.5, s2=0.9, s3=0.1, s4=0.7)), {1, 3, 6}),
        (dict(keep_last=1, keep_best=1), dict(facts=facts(s2=0.5, s4=0.5)), {4, 6}),  # of equal ones the newer
        (dict(keep_last=1), dict(pinned={2, 77}), {2, 6}),
        (dict(keep_last=1), dict(last_good=4), {4, 6}),
        (dict(keep_last=2), dict(facts=facts(s4=None, s5=None, s6=None)), {3, 5, 6}),  # the newest clean one
        (dict(keep_last=1), dict(facts=lambda step: RetentionFacts(None, None)), {6}),  # none can be read
    ],
)
def test_kept_steps(settings, more, kept):
    assert set(retained_steps({1, 2, 3, 4, 5, 6}, CheckpointConfig(**settings), **more)) == kept


def test_the_best_the_pinned_and_the_newest_clean_one_outlive_the_others(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0), (6, 5.0)):
        if step == 4:
            (tmp_path / "pinned").mkdir()
            (tmp_path / "pinned" / "3").touch()
        metrics = {} if loss is None else {"validation/loss": loss}
        checkpoints.save(step, {"w": jnp.ones(3)}, {}, health="suspect" if step > 5 else "clean", metrics=metrics)
    checkpoints.close()
    assert checkpoints.all_steps() == [2, 3, 5, 6]
    again = Checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))  # another process reads it from the files
    again.save(7, {"w": jnp.ones(3)}, {}, wait=True)
    assert again.all_steps() == [2, 3, 7]


STALE = OSError(errno.ESTALE, "Stale file handle")


def trouble(*arguments):
    raise STALE


def steps_after(checkpoints, *steps, **how):
    for step in steps:
        checkpoints.save(step, {"w": jnp.ones(3)}, {}, wait=True, **how)
    return checkpoints.all_steps()


def test_pins_that_cannot_be_listed_keep_every_step(tmp_path, monkeypatch):
    alarms = []
    note = lambda kind, step=None, **facts: kind == "alarm" and alarms.append(facts["cause"])
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1), note=note)
    assert steps_after(checkpoints, 1) == [1]
    (tmp_path / "pinned").mkdir()
    real = pathlib.Path.iterdir
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "iterdir", lambda self: trouble() if self.name == "pinned" else real(self))
        patch.setattr(pathlib.Path, "is_dir", lambda self: self.name != "pinned" and self.exists())  # as gcsfs has it
        assert steps_after(checkpoints, 2) == [1, 2]
    assert "after the save: Stale file handle" in alarms[0]
    assert steps_after(checkpoints, 3) == [3]


def test_a_step_of_which_nothing_can_be_learnt_now_stays_until_it_can(tmp_path, monkeypatch):
    steps_after(Checkpoints(tmp_path, CheckpointConfig(keep_last=1)), 1)
    alarms = []
    note = lambda kind, step=None, **facts: kind == "alarm" and alarms.append(facts["cause"])
    again = Checkpoints(tmp_path, CheckpointConfig(keep_last=1), note=note)
    with monkeypatch.context() as patch:
        refuse_to_open(patch, lambda path: path.match("1/run/metadata"), STALE)
        assert steps_after(again, 2, health="suspect") == [1, 2]
        refuse_to_open(patch, lambda path: path.match("2/run/metadata"), STALE)
        with pytest.raises(Stop, match="step 2 cannot be reached: .*Stale file handle") as stop:
            again.newest(health="clean")
    assert stop.value.code == Exit.STORAGE
    assert "step 1 is kept, because its record cannot be read: " in alarms[0] and "Stale file handle" in alarms[0]
    assert steps_after(again, 3, health="suspect") == [1, 3]  # it is the newest clean one
    (tmp_path / "1" / "run" / "metadata").write_text("{")
    assert retention.read_facts(tmp_path / "1") == retention.UNKNOWN


def test_the_last_step_that_was_read_back_outlives_those_that_were_not(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    steps_after(checkpoints, 1)
    refuse_to_open(monkeypatch, lambda path: path.match("[23]/state/*"), STALE)
    assert steps_after(checkpoints, 2, 3) == [1, 3]
