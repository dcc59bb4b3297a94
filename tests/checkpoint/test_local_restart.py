"""Four processes with a local folder each are killed and lose folders, and end bit for bit like a run that was not."""

import re
import shutil

import processes
import pytest
import tiny
from ckpt_states import flip_bit

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints

pytestmark = [pytest.mark.soak]

COUNT, STEPS, SAVE_EVERY = 4, 40, 10
VALUES = dict(
    seq_len=16,
    batch_tokens="16 rows",
    train_tokens=f"{STEPS} steps",
    model=tiny.LLAMA | dict(num_layers=1),
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="2 steps"),
    data=dict(name="synthetic"),
    checkpoint=dict(save_every_steps=SAVE_EVERY, local=dict(folder="$LOCAL", every_steps=2)),
    monitor=dict(log_every_steps=1, tensorboard=False, progress="lines"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "tiny.py").write_text(f"def get_config():\n    return {VALUES!r}\n")
    return folder


def run(home, workdir, crash="", process=0):
    """(exit codes, what the first process said) of a start; each process has a host's folder of its own."""
    env = {"JAXSCALE_CRASH_AT": crash, "JAXSCALE_ONLY_PROCESS": str(process)}
    own = lambda number: {"env": env | {"LOCAL": str(local(workdir, number))}}
    flags = [f"--config={home / 'tiny.py'}", f"--workdir={workdir}"]
    with processes.Processes(COUNT, 1, workdir.parent, flags, own=own) as running:
        return running.codes(), running.log(0)


def local(workdir, number):
    return workdir.parent / f"host{number}"


def copies(workdir, host):
    """{(owner, step): file} of the whole copies in a host's folder."""
    found = local(workdir, host).glob("*/*/*-" + "[0-9a-f]" * 16)
    return {(int(path.parent.name), int(path.name.partition("-")[0])): path for path in found}


def newest_whole(workdir):
    """The newest step of which each process's part is on some host; the last one may have been under way."""
    owners = {}
    for owner, step in (key for host in range(COUNT) for key in copies(workdir, host)):
        owners.setdefault(step, set()).add(owner)
    return max(step for step, found in owners.items() if len(found) == COUNT)


def went_on_from(said):
    return int(re.search(r"resuming from step (\d+)", said)[1])


def last_leaves(workdir):
    """{leaf: [shape, dtype, fingerprint]} of the last step."""
    return Checkpoints(workdir / "checkpoints", CheckpointConfig()).read_record(STEPS)["leaves"]


def newest_slow(workdir):
    return Checkpoints(workdir / "checkpoints", CheckpointConfig()).latest_step() or 0


@pytest.fixture(scope="module")
def straight(home, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight") / "run"
    codes, said = run(home, workdir)
    assert codes == [0] * COUNT, said
    return last_leaves(workdir)


@pytest.mark.fault("F1")
@pytest.mark.fault("F7")
def test_killed_at_every_point_of_a_local_copy_it_goes_on_from_a_newer_step_each_time(home, straight, tmp_path):
    workdir, before = tmp_path / "run", -1
    crashes = ["pieces:2", "renamed:2", "everywhere:2"]
    for process, crash in enumerate(crashes):
        codes, said = run(home, workdir, f"local/{crash}", process % COUNT)
        assert codes[process % COUNT] == -9 and set(codes) == {-9, 13}, said
        if before >= 0:
            assert "is restored from the local copies" in said and went_on_from(said) > before, said
            before = went_on_from(said)
        before = max(before, 0)
    codes, said = run(home, workdir)
    assert codes == [0] * COUNT and went_on_from(said) > before, said
    assert last_leaves(workdir) == straight
    assert not any(copies(workdir, host) for host in range(COUNT))


@pytest.mark.fault("F41")
def test_a_replaced_host_and_a_flipped_bit_cost_nothing_and_two_neighbours_the_steps_since_the_save(
    home, straight, tmp_path
):
    workdir = tmp_path / "run"
    assert run(home, workdir, "step:16", 1)[0] == [13, -9, 13, 13]
    newest = newest_whole(workdir)
    assert newest > newest_slow(workdir) and {owner for owner, _ in copies(workdir, 0)} == {0, 3}
    shutil.rmtree(local(workdir, 2))  # another machine: its own part is on host 3, and part 1 is on host 1 alone
    flip_bit(copies(workdir, 3)[3, newest], 8 * 300)  # a good one is on host 0
    codes, said = run(home, workdir, "step:14", 3)  # of this start: behind the save of step 20, before that of 30
    assert codes == [13, 13, 13, -9], said
    assert went_on_from(said) == newest and "is restored from the local copies" in said
    assert re.search(rf"WARNING: step {newest} is restored from a neighbour's copy: process 3: .* the bits of", said)

    newest = newest_whole(workdir)
    slow = newest_slow(workdir)
    assert newest > slow
    for host in (1, 2):
        shutil.rmtree(local(workdir, host))
    codes, said = run(home, workdir)
    assert codes == [0] * COUNT, said
    assert f"the local copy of step {newest} is skipped: no host has the part of process 1" in said
    assert went_on_from(said) == slow and last_leaves(workdir) == straight
