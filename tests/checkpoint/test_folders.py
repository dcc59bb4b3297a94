"""Only whole checkpoints of ours count as steps, whatever else lies in the folder, and only ours are touched."""

import shutil

import jax.numpy as jnp
import pytest
from ckpt_states import abstract, assert_same_bits, data_files, make_state, restore_newest, stop_of

from jaxscale.runtime.checkpoint import folders
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import read_last_good
from jaxscale.system.exits import Exit


def test_only_steps_that_hold_a_checkpoint_count(saved):
    for name in ("99", "98.orbax-checkpoint-tmp-5", "097", "rewound-30", "²"):
        (saved.directory / name).mkdir()
    (saved.directory / "98.orbax-checkpoint-tmp-5" / "state").mkdir()
    (saved.directory / "96").mkdir()
    (saved.directory / "96" / "notes.txt").write_text("mine")
    (saved.directory / "95").write_text("a file")
    assert saved.all_steps() == [10, 20]
    assert Checkpoints(saved.directory / "nothing", CheckpointConfig()).latest_step() is None


def test_a_file_where_the_checkpoints_should_be_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="must be the folder of checkpoints, but is a file; move the file away"):
        Checkpoints(tmp_path / "checkpoints", CheckpointConfig()).latest_step()


@pytest.mark.fault("F19")
def test_what_a_killed_save_left_behind_goes_at_the_next_save(checkpoints):
    for name in ("5.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-removed", "4.orbax-checkpoint-tmp-1763"):
        leftover = checkpoints.directory / name / "state"
        leftover.mkdir(parents=True)
        (leftover / "half").write_text("x" * 100)
    (checkpoints.directory / "notes.txt").write_text("mine")
    checkpoints.save(7, {"w": jnp.ones(3)}, {}, wait=True)
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["7", "last_good.json", "notes.txt"]


MOVED = [("set_aside", 20), ("fallback", 20)]
GONE = [("alarm", 20)]


def damage(folder, how):
    """Does to the newest step (20) what crashes, people and disks do."""
    if how == "truncated file":
        for path in data_files(folder, 20):  # a small one may hold only what a later one replaced
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "deleted file":
        for path in data_files(folder, 20):
            path.unlink()
    elif how == "half deleted":
        shutil.rmtree(folder / "20" / "state")
        for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
            (folder / "20" / name).unlink()
    elif how == "empty folder":
        shutil.rmtree(folder / "20")
        (folder / "20").mkdir()
    elif how == "stray files":
        (folder / "20" / "state" / "stray").write_text("x")
        (folder / "21").write_text("a file")
        (folder / "22").mkdir()
        (folder / "22" / "notes.txt").write_text("mine")
    elif how == "old unfinished save":
        (folder / "20").rename(folder / "20.orbax-checkpoint-tmp")


@pytest.mark.fault("F19")
@pytest.mark.parametrize(
    ("how", "goes_on_from", "told"),
    [
        ("truncated file", 10, MOVED), ("deleted file", 10, MOVED), ("half deleted", 10, MOVED),
        ("empty folder", 10, GONE), ("stray files", 20, []), ("old unfinished save", 10, GONE),
    ],
)  # fmt: skip
def test_a_newest_step_that_is_not_whole_is_never_gone_on_from(saved, how, goes_on_from, told):
    damage(saved.directory, how)
    before = {path for path in saved.directory.rglob("*") if path.name in ("notes.txt", "21", "22", "stray")}
    notes, lines = [], []
    saved.note = lambda kind, step=None, **facts: notes.append((kind, step))
    state, step = restore_newest(saved, lambda step: (saved.restore(step, abstract()), step), lines.append)
    assert step == goes_on_from
    assert_same_bits(state, make_state(seed=step // 10))
    assert all(path.exists() for path in before)
    assert notes == told and len(lines) == bool(told)
    wanted = "resuming from step 10, 10 steps before it" if told == MOVED else "the last complete step"
    assert all(wanted in line for line in lines)
    names = [path.name for path in saved.directory.iterdir()]
    assert any(name.startswith("damaged-20-2") for name in names) == (told == MOVED)


@pytest.mark.fault("F19")
def test_where_a_person_wants_to_decide_nothing_is_moved(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "run")
    damage(tmp_path / "run", "deleted file")
    checkpoints = Checkpoints(tmp_path / "run", CheckpointConfig(on_corrupt="stop"))
    error = stop_of(restore_newest, checkpoints, lambda step: checkpoints.restore(step, abstract()))
    assert error.code == Exit.CHECKPOINT_CORRUPT and "to resume from step 10" in str(error)
    assert checkpoints.all_steps() == [10, 20]


@pytest.mark.fault("F19")
def test_where_no_step_can_be_read_it_never_begins_anew(saved):
    for step in (10, 20):
        shutil.rmtree(saved.directory / str(step) / "run")
    lines = []
    for _ in range(2):  # nor does the next start
        error = stop_of(restore_newest, saved, lambda step: step, lines.append)
        assert error.code == Exit.CHECKPOINT_CORRUPT and "no older step exists" in str(error)
    assert saved.all_steps() == [10, 20] and not lines  # to go back to one that is no better helps nobody


def test_without_a_checkpoint_it_begins(checkpoints):
    assert restore_newest(checkpoints, lambda step: (step, "new")) == (None, "new")


@pytest.mark.slow
def test_steps_are_moved_aside_and_can_be_saved_again(saved):
    saved.save(30, make_state(seed=3), {}, wait=True)
    assert saved.set_aside_after(10, "rewound") == [20, 30]
    assert saved.all_steps() == [10] and read_last_good(saved.directory) is None
    names = sorted(path.name.rsplit("-", 1)[0] for path in saved.directory.iterdir() if path.is_dir())
    assert names == ["10", "rewound-20", "rewound-30"]
    saved.save(20, make_state(seed=5), {}, wait=True)
    assert_same_bits(saved.restore(20, abstract()), make_state(seed=5))
    assert saved.set_aside(20, "rewound") != saved.directory  # a second one of the same second has its own name
    assert len([path for path in saved.directory.iterdir() if path.name.startswith("rewound-20")]) == 2


def test_the_newest_of_a_health_is_found(checkpoints):
    for step, health in ((1, "clean"), (2, "clean"), (3, "suspect")):
        checkpoints.save(step, {"w": jnp.ones(3)}, {}, health=health)
    checkpoints.wait()
    assert [checkpoints.newest(), checkpoints.newest(health="clean"), checkpoints.newest(before=2)] == [3, 2, 1]
    assert checkpoints.newest(before=1) is None and checkpoints.newest(before=3, health="suspect") is None
    assert checkpoints.read_record(3)["health"] == "suspect"


def test_a_leftover_of_a_removal_does_not_stop_the_next(checkpoints):
    checkpoints.save(1, {"w": jnp.ones(3)}, {}, wait=True)
    (checkpoints.directory / "1.orbax-checkpoint-tmp-removed").mkdir()
    folders.remove_step(checkpoints.directory, 1)
    assert [path.name for path in checkpoints.directory.iterdir()] == ["last_good.json"]
