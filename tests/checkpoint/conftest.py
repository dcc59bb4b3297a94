"""Folders of checkpoints: empty, with two steps in them, and a whole run of three."""

import shutil

import kept_run
import pytest
from ckpt_states import make_state

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints


@pytest.fixture
def checkpoints(tmp_path):
    with_room = Checkpoints(tmp_path, CheckpointConfig())
    yield with_room
    with_room.close()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with steps 10 and 20 of two different states, to be copied and not touched."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("two_steps"), CheckpointConfig())
    checkpoints.save(10, make_state(seed=1), {"data": {"epoch": 1}, "pair": (1, 2)})
    checkpoints.save(20, make_state(seed=2), {"data": {"epoch": 2}})
    checkpoints.close()
    return checkpoints.directory


@pytest.fixture
def saved(two_steps, checkpoints):
    """Checkpoints in a copy of two_steps."""
    shutil.copytree(two_steps, checkpoints.directory, dirs_exist_ok=True)
    return checkpoints


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """A run with steps 10, 20 and 30, not to be changed."""
    return kept_run.make_run(tmp_path_factory.mktemp("kept") / "run")


@pytest.fixture
def run(kept, tmp_path):
    """A copy of it that a test may spoil."""
    return kept_run.copy_of(kept, tmp_path / "run")
