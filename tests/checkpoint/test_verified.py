"""A checkpoint is called good after it was read back from its files, and not before."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ckpt_states import data_files, flip_bit, make_state, stop_of

from jaxscale.runtime.checkpoint import array_store, write
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.fingerprint import fingerprints, host_fingerprint
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import read_last_good
from jaxscale.runtime.checkpoint.verify import DamagedCheckpoint, first_difference, piece_sums, verify_leaves
from jaxscale.system.exits import Exit


def test_the_last_good_step_is_written_down_with_what_was_read(saved):
    good = read_last_good(saved.directory)
    assert good == {"step": 20, "verified": True, "health": "clean", "sha256": saved.read_record(20)["sha256"]}
    assert json.loads((saved.directory / "last_good.json").read_text()) == good


def test_what_was_not_read_back_is_not_called_verified(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(verify_saved=False))
    assert read_last_good(checkpoints.directory) is None
    checkpoints.save(3, {"w": jnp.ones(3)}, {}, health="suspect", wait=True)
    good = read_last_good(checkpoints.directory)
    assert (good["step"], good["verified"], good["health"]) == (3, False, "suspect")


def test_a_damaged_last_good_file_is_no_answer(saved):
    (saved.directory / "last_good.json").write_text("{")
    assert read_last_good(saved.directory) is None


def test_a_save_that_reads_back_wrong_is_moved_aside_and_fails(saved):
    notes = []
    saved.note = saved.saver.note = lambda kind, step=None, **facts: notes.append((kind, step, facts.get("cause")))
    saved.cfg = saved.saver.cfg = CheckpointConfig(max_failed_saves=1)
    original = saved.saver.may_commit
    flip = lambda: [
        flip_bit(path, 4000) for path in data_files(saved.directory, "30.orbax-checkpoint-tmp")[:1]
    ]  # a disk that lies
    saved.saver.may_commit = lambda: (original(), flip())
    error = stop_of(saved.save, 30, {"w": jnp.arange(5000.0)}, {}, wait=True)
    assert error.code == Exit.STORAGE and "step 20 is the newest complete one" in str(error)
    assert [(kind, step) for kind, step, _ in notes] == [("set_aside", 30), ("save_failed", 30)]
    assert "read back" in notes[1][2] or "differ from those that were saved" in notes[1][2]
    assert saved.all_steps() == [10, 20] and read_last_good(saved.directory)["step"] == 20
    assert any(path.name.startswith("damaged-30-") for path in saved.directory.iterdir())


@pytest.mark.fault("F2")
def test_reading_back_sees_what_restoring_sees(checkpoints):
    rng = np.random.default_rng(3)
    state = {"w": jnp.asarray(rng.normal(size=(40, 50)), jnp.float32), "k": 3, "x": 1.5, "on": True}
    checkpoints.save(1, state, {}, wait=True)
    leaves, folder = checkpoints.read_record(1)["leaves"], checkpoints.directory / "1"
    path = data_files(checkpoints.directory, 1)[0]
    original = path.read_bytes()
    for bit in rng.integers(0, 40 * 50 * 32, 20):
        flip_bit(path, int(bit))
        with pytest.raises(DamagedCheckpoint, match="w"):
            verify_leaves(folder, leaves)
        path.write_bytes(original)
    verify_leaves(folder, leaves)


@pytest.mark.parametrize("shares", [1, 3, 8, 40])
def test_processes_share_the_reading_by_pieces_and_not_by_arrays(checkpoints, shares):
    state = {"large": make_state().params["block"]["w"], "one": np.float32([3]), "n": 7}
    checkpoints.save(1, state, {}, wait=True)
    leaves, folder = checkpoints.read_record(1)["leaves"], checkpoints.directory / "1"
    found = [piece_sums(folder, leaves, share, shares) for share in range(shares)]
    assert first_difference(leaves, found) == ""
    numbers = [sum(numbers for _, numbers in sums.values()) for sums in found]
    assert sum(numbers) == 32 * 16 + 1 and max(numbers) <= 512 / shares + 65  # a piece more, of 64

    for name in ("large", "one"):
        wrong = leaves | {name: [*leaves[name][:2], 1]}
        assert first_difference(wrong, found) == f"{name}: its bits differ from those that were saved"
    missing = [sums for sums in found if "large" not in sums]
    assert first_difference(leaves, missing) == "large: 0 of its 512 numbers were read back"


def test_a_flip_in_any_piece_is_found_whichever_process_reads_it(checkpoints):
    state = make_state(width=256).params["block"]  # pieces too large to lie in the index, which is compressed
    checkpoints.save(1, {"w": state["w"], "v": np.arange(9.0)}, {}, wait=True)
    leaves, folder = checkpoints.read_record(1)["leaves"], checkpoints.directory / "1"
    files = {path: path.read_bytes() for path in data_files(checkpoints.directory, 1)}
    w = np.asarray(state["w"])
    for row, column in np.ndindex(4, 2):  # the eight pieces
        piece = w[8 * row : 8 * row + 8, 128 * column : 128 * column + 128].tobytes()
        path = next(path for path, content in files.items() if piece in content)
        flip_bit(path, 8 * files[path].index(piece) + 3)
        sums = [piece_sums(folder, leaves, share, 5) for share in range(5)]
        assert first_difference(leaves, sums) == "w: its bits differ from those that were saved"
        path.write_bytes(files[path])


def test_pieces_are_cut_so_that_no_process_holds_a_whole_array(checkpoints, monkeypatch):
    monkeypatch.setattr(write, "PIECE_BYTES", 1 << 20)
    checkpoints.save(1, {"w": jnp.ones((1024, 1024))}, {}, wait=True)
    array = array_store.ArrayReader(checkpoints.directory / "1").open("w")
    assert [array_store.box_bytes(array, box) for box in array_store.chunk_boxes(array)] == [1 << 20] * 4


def test_a_large_array_is_read_in_the_pieces_in_which_it_was_written(checkpoints):
    seen = []
    states = ({"sharded": make_state().params["block"]["w"]}, {"one": jnp.float32(3)})
    for step, state in enumerate(states):
        checkpoints.save(step, state, {}, wait=True)
        leaves = checkpoints.read_record(step)["leaves"]
        arrays = array_store.ArrayReader(checkpoints.directory / str(step))
        for name in state:
            assert array_store.compare_leaf(arrays, name, *leaves[name]) == ("", state[name].nbytes)
            array = arrays.open(name)
            seen.append([array_store.box_bytes(array, box) for box in array_store.chunk_boxes(array)])
    assert seen == [[256] * 8, [4]]  # 32 x 16 numbers on 4 x 2 devices, and never a whole row of pieces


def test_a_random_key_lies_in_the_files_with_one_axis_more(checkpoints):
    key = jax.random.key(7)
    checkpoints.save(1, {"w": jax.random.key_data(key)}, {}, wait=True)
    arrays = array_store.ArrayReader(checkpoints.directory / "1")
    assert array_store.compare_leaf(arrays, "w", [], "key<fry>", fingerprints([key])[0])[0] == ""
    assert "its shape is [2]" in array_store.compare_leaf(arrays, "w", [], "uint32", fingerprints([key])[0])[0]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "complex64", "int64", "float64"]
)
def test_numpy_and_the_devices_find_the_same_fingerprint(dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    values = np.random.default_rng(0).integers(0, 100, (7, 5, 4001)).astype(kind)  # more than one piece of words
    expected = fingerprints([values])[0]
    assert host_fingerprint(values) == host_fingerprint(np.asfortranarray(values)) == expected
    if not dtype.endswith("64") or dtype == "complex64":
        assert fingerprints([jnp.asarray(values)])[0] == expected


def test_numpy_finds_the_fingerprint_of_single_numbers_and_of_nothing():
    assert host_fingerprint(np.float32(3).reshape(())) == fingerprints([jnp.float32(3)])[0]
    assert host_fingerprint(np.zeros((0, 3), np.float32)) == 0
