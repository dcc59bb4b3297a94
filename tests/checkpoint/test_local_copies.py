"""Local copies: which one a start goes on from, and that none comes back that the run has left behind."""

import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckpt_states import assert_same_bits, flip_bit, shardings, stop_of

from jaxscale.runtime.checkpoint import lineage
from jaxscale.runtime.checkpoint.config import CheckpointConfig, LocalConfig
from jaxscale.runtime.checkpoint.fingerprint import take_snapshot
from jaxscale.runtime.checkpoint.local_copy import (
    LocalCopy,
    LocalSaver,
    LocalStore,
    array_from_pieces,
    read_description,
    read_pieces,
    write_copy,
)
from jaxscale.runtime.checkpoint.record import describe_leaf
from jaxscale.runtime.checkpoint.tiers import TieredCheckpoints, whole_copies
from jaxscale.runtime.checkpoint.verify import DamagedCheckpoint
from jaxscale.runtime.hosts.exchange import Exchange
from jaxscale.system.exits import BadInput, Exit


def state_of(number, mesh_shape=(4, 2)):
    """A state that is cut over a mesh, with scalars and two bytes an element, different for each number."""
    made = {
        "w": np.arange(32 * 16, dtype=np.float32).reshape(32, 16) + number,
        "b": np.full((4,), number, jnp.bfloat16),
        "step": np.int32(number),
        "on": np.array([True, False, True]),
    }
    return jax.device_put(made, shardings(mesh_shape, made))


def abstract(mesh_shape=(4, 2)):
    leaf = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    return jax.tree.map(leaf, state_of(0, mesh_shape))


@pytest.fixture
def opened(tmp_path):
    """opened() -> the checkpoints of the run in tmp_path/run, as a start of it opens them; closed at the end."""
    made = []

    def open_one(folder="local", run="run", **settings):
        where = None if folder is None else str(tmp_path / folder)
        cfg = CheckpointConfig(local=LocalConfig(folder=where, every_steps=1), **settings)
        (tmp_path / run).mkdir(exist_ok=True)
        events = []
        made.append(
            TieredCheckpoints(tmp_path / run / "checkpoints", cfg, note=lambda *event, **facts: events.append(facts))
        )
        made[-1].events = events
        return made[-1]

    yield open_one
    for one in made:
        one.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 96 KiB that only root can make."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "none", folder], capture_output=True)
    if made.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def start(tiers, say=lambda line: None):
    """(the step that a start goes on from, its state): as runtime/run/opening.py does it."""
    step = tiers.newest_readable(say)
    while True:
        try:
            state = None if step is None else tiers.restore(step, abstract())
        except Exception as error:
            step = tiers.fall_back(step, error, say)
            continue
        tiers.begin(step or 0)
        return step, state


def copy(tiers, step, good=True):
    """Copies the state after a step as the loop does; whether the copy is there."""
    local = tiers.local
    for offered in (step - 1, step):  # the first that a start is asked about only starts the clock
        if local.offer(offered, state_of(offered), lambda now: {"data": {"step": now}}, "clean"):
            local.confirm(offered, good and offered == step)
            local.jobs.join()
    return any(found == step for _, found, *_ in tiers.store.files())


def kill(tiers):
    """What a kill leaves behind: threads that end, and everything where it is."""
    tiers.end_local()


def test_a_copy_comes_back_on_its_mesh_bit_for_bit_and_no_flipped_bit_is_missed(tmp_path):
    state = state_of(7)
    snapshot = take_snapshot(state)
    leaves = {name: [*describe_leaf(leaf), snapshot.fingerprints()[name]] for name, leaf in state.items()}
    path = tmp_path / "copy"
    write_copy(path, snapshot.leaves, {"record": {"leaves": leaves}})
    size = path.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["copy"]
    about = read_description(path)
    pieces = read_pieces(path, about)
    assert_same_bits({name: array_from_pieces(pieces[name], leaf) for name, leaf in state.items()}, state)
    held = [
        (offset, np.dtype(dtype).itemsize * int(np.prod(shape))) for _, _, shape, dtype, offset, _ in about["pieces"]
    ]
    rng, missed = np.random.default_rng(0), []
    described = range(size - 200, size)
    for byte in [int(rng.integers(offset, offset + count)) for offset, count in held] + list(described)[::17]:
        flip_bit(path, 8 * byte + 3)
        try:
            read_pieces(path, read_description(path))
            missed.append(byte)
        except DamagedCheckpoint:
            pass
        flip_bit(path, 8 * byte + 3)
    assert missed == []
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="has no end"):
        read_description(path)


def test_the_newest_good_copy_wins_whichever_tier_has_it(opened):
    first = opened()
    assert start(first) == (None, None)
    first.save(10, state_of(10), {"data": {"step": 10}}, wait=False)
    first.wait()
    assert copy(first, 14) and copy(first, 17)
    kill(first)

    second = opened()
    step, state = start(second)
    assert step == 17
    assert_same_bits(state, state_of(17))
    second.save(20, state_of(20), {"data": {"step": 20}})
    second.wait()
    kill(second)

    third = opened()
    step, state = start(third)  # 20, of the work folder, is newer than the copies of 17 and 14
    assert step == 20
    assert_same_bits(state, state_of(20))


def test_the_data_position_comes_with_a_local_copy(opened):
    first = opened()
    start(first)
    copy(first, 5)
    kill(first)
    second = opened()
    assert second.newest_readable(lambda line: None) == 5
    assert second.read_run(5) == {"data": {"step": 5}} and second.read_record(5)["health"] == "clean"


@pytest.mark.fault("F41")
def test_a_damaged_local_copy_is_told_and_the_one_before_it_taken(opened):
    first = opened()
    start(first)
    first.save(10, state_of(10), {})
    first.wait()
    copy(first, 14)
    copy(first, 17)
    kill(first)
    files = {step: path for _, step, _, path in first.store.files()}
    assert sorted(files) == [14, 17]
    flip_bit(files[17], 8 * 300)
    second, said = opened(), []
    step, state = start(second, said.append)
    assert step == 14
    assert_same_bits(state, state_of(14))
    (line,) = [line for line in said if "WARNING" in line]
    assert f"the local copy of step 17 is skipped: {files[17]}: the bits of" in line
    assert any("step 17" in facts.get("cause", "") for facts in second.events)
    kill(second)

    copy_of_14 = next(path for _, step, _, path in second.store.files() if step == 14)
    flip_bit(copy_of_14, 8 * 300)
    step, state = start(opened())
    assert step == 10  # of the work folder
    assert_same_bits(state, state_of(10))


@pytest.mark.fault("F41")
@pytest.mark.parametrize("lost", ["a bit", "all"])
def test_what_a_host_has_lost_is_brought_from_its_neighbour(opened, tmp_path, lost):
    first = opened()
    start(first)
    copy(first, 14)
    kill(first)
    shutil.copytree(first.store.folder, tmp_path / "neighbour")
    there, second = Exchange(tmp_path / "neighbour", "127.0.0.1"), opened()
    second.find_local_copies(print)
    offer = second.offers[0]._replace(remote_addresses=[list(there.address)])
    if lost == "all":
        shutil.rmtree(second.store.folder)
        offer = offer._replace(is_local=False)
    else:
        flip_bit(next(path for *_, path in second.store.files()), 8 * 300)
    about, pieces, passed_over = second.load(offer)
    there.close()
    assert about["record"]["step"] == 14 and (passed_over is None) == (lost == "all")
    assert lost == "all" or "the bits of" in passed_over
    state = state_of(14)
    assert_same_bits({name: array_from_pieces(pieces[name], leaf) for name, leaf in state.items()}, state)
    step, state = start(opened())  # and it lies in the host's own folder again
    assert step == 14
    assert_same_bits(state, state_of(14))


def test_a_copy_of_another_mesh_is_told_and_passed_over(opened):
    first = opened()
    start(first)
    first.save(10, state_of(10), {})
    first.wait()
    copy(first, 14)
    kill(first)
    second, said = opened(), []
    assert second.newest_readable(said.append) == 14
    stop = stop_of(second.restore, 14, abstract((2, 4)))
    assert stop.code == Exit.CHECKPOINT_CORRUPT and "saved on a different mesh" in str(stop)
    assert second.fall_back(14, stop, said.append) == 10
    assert_same_bits(second.restore(10, abstract((2, 4))), state_of(10, (2, 4)))


@pytest.mark.fault("F42")
@pytest.mark.parametrize("local", ["local", None], ids=["copying", "not copying meanwhile"])
def test_no_state_that_the_run_went_back_from_comes_back(opened, tmp_path, local):
    first = opened()
    start(first)
    first.save(10, state_of(10), {})
    first.wait()
    copy(first, 17)
    kill(first)
    shutil.copytree(first.store.folder, tmp_path / "away")  # a host that is not there while the run goes back

    second = opened(local)
    second.set_aside_after(10, "rewound")
    step, _ = start(second)
    assert step == 10
    kill(second)
    shutil.copytree(tmp_path / "away", first.store.folder, dirs_exist_ok=True)
    assert start(opened())[0] == 10


@pytest.mark.fault("F42")
def test_copies_of_another_run_of_a_deleted_one_and_of_a_removed_step_are_not_taken(opened, tmp_path):
    first = opened()
    start(first)
    first.save(10, state_of(10), {})
    first.wait()
    copy(first, 17)
    kill(first)
    assert start(opened(run="other")) == (None, None)  # in the same local folder

    moved = tmp_path / "put away"
    (tmp_path / "run" / "checkpoints" / "10").rename(moved)  # as the way out of a damaged step has it
    (tmp_path / "run" / "checkpoints" / "last_good.json").unlink()
    second, said = opened(), []
    assert second.newest_readable(said.append) is None
    assert "step 17 is skipped: it depends on step 10, which no longer exists" in said[0]
    moved.rename(tmp_path / "run" / "checkpoints" / "10")
    kill(second)

    shutil.rmtree(tmp_path / "run")
    assert start(opened()) == (None, None)


def test_a_copy_counts_only_when_the_metrics_of_its_step_called_for_nothing(opened):
    first = opened()
    start(first)
    assert copy(first, 5) and not copy(first, 9, good=False)
    kill(first)
    assert start(opened())[0] == 5


@pytest.mark.parametrize("burst", [1, 2, 8, 30])
def test_steps_that_are_dispatched_in_bursts_do_not_put_a_copy_off(tmp_path, burst):
    """Each step takes 0.3 s of the devices, of which the loop sees bursts: several at once, then a wait."""
    now, taken, asked = [0.0], [], []
    cfg, store = LocalConfig(folder=str(tmp_path), every_seconds=5.0), LocalStore(str(tmp_path), tmp_path / "run")
    saver = LocalSaver(cfg, store, "0" * 16, newest=None, base=lambda: -1, note=None, clock=lambda: now[0])
    following = 0
    for step in range(1, 400):
        now[0] = 0.3 * (step - step % burst) + 1e-5 * (step % burst)
        if step >= following:
            asked.append(step)
            wanted, wait, _ = saver.decide(step)
            following = step + wait
            taken += [now[0]] * wanted
    saver.close()
    gaps = np.diff([0.3, *taken])
    assert len(taken) > 5 and gaps.max() <= 5.0 + 0.3 * burst + 0.3
    assert burst > 1 or len(asked) < 8 * len(taken)


def test_a_host_keeps_two_copies_and_none_after_the_last_save(opened):
    tiers = opened()
    start(tiers)
    for step in (3, 6, 9, 12):
        copy(tiers, step)
    assert sorted(step for _, step, *_ in tiers.store.files()) == [9, 12]
    tiers.save(20, state_of(20), {}, wait=True)
    assert not tiers.store.folder.exists()


@pytest.mark.fault("F4")
def test_a_full_local_folder_is_told_and_costs_nothing_but_the_copy(opened, tmp_path, small_disk):
    first = opened(small_disk)
    start(first)
    assert copy(first, 5)
    (small_disk / "fill").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    assert not copy(first, 8) and not copy(first, 11)
    (told,) = [facts["cause"] for facts in first.events if "local copy" in facts.get("cause", "")]
    assert re.fullmatch(r"no local copy: No space left on device: needs 2\.\d KiB, has 0 B", told)
    assert [file for *_, file in first.store.files()] and first.local.thread.is_alive()
    kill(first)
    second = opened(small_disk)
    assert start(second)[0] == 5
    (small_disk / "fill").unlink()
    assert copy(second, 14)
    second.save(20, state_of(20), {}, wait=True)


def test_a_folder_that_cannot_be_used_is_named(opened, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(BadInput, match="checkpoint.local.folder=.*taken cannot be used on this host"):
        opened("taken").newest_readable(print)
    for folder in ("gs://bucket/local", " "):
        with pytest.raises(BadInput, match="must be a local folder of the host"):
            LocalConfig(folder=folder)


def test_a_step_counts_where_every_part_of_it_is_left_somewhere():
    part = lambda owner, step=7, **more: list(
        vars(LocalCopy(**dict(step=step, token="t", state_digest="m", base=5, owner=owner, parts=3) | more)).values()
    )
    hosts = lambda *lists: [{"copies": list(copies)} for copies in lists]
    choose = lambda found, starts, newest=5: [
        [list(map(list, whole)), lines] for whole, lines in [whole_copies(found, starts, newest)]
    ][0]
    key = (7, "t", "m")
    open_start = {"t": None}
    # the third host was replaced, and the second holds a copy for it
    found = hosts([part(0)], [part(1), part(2)], [])
    assert choose(found, open_start) == [[[key, {0: [0], 1: [1], 2: [1]}]], []]
    assert choose(hosts([part(0)], [], []), open_start)[1] == [
        "the local copy of step 7 is skipped: no host has the part of process 1"
    ]
    other = hosts([part(0)], [part(1), part(2, state_digest="other bits")], [])
    assert choose(other, open_start)[0] == [] and len(choose(other, open_start)[1]) == 2
    assert choose(found, open_start, newest=7) == [[], []]  # the work folder has it, verified
    assert choose(found, open_start, newest=4)[1][0].endswith("it depends on step 5, which no longer exists")
    assert choose(found, {"t": 6}) == choose(found, {"u": None}) == [[], []]
    assert "it was saved by 3 processes, but there are 2 now" in choose(found[:2], open_start)[1][0]


def test_a_later_start_shortens_what_counts_of_the_earlier_ones(tmp_path):
    lineage.invalidate_after(tmp_path, 3)
    assert not (tmp_path / lineage.FILE).exists()  # a run that never copied has no such file
    one, two = lineage.record_start(tmp_path, 0), lineage.record_start(tmp_path, 8)
    lineage.invalidate_after(tmp_path, 5)
    three = lineage.record_start(tmp_path, 6)
    assert lineage.read_starts(tmp_path) == {one: 5, two: 5, three: None}
    assert lineage.read_start_step(tmp_path) == 6
    lineage.invalidate_after(tmp_path, 4)
    assert lineage.read_start_step(tmp_path) == 4
    assert lineage.is_in_history({one: 5}, one, 5) and not lineage.is_in_history({one: 5}, one, 6)
    (tmp_path / lineage.FILE).write_text(json.dumps({"starts": [one]}))
    assert lineage.read_starts(tmp_path) == {}
