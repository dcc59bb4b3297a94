"""verify sees every flipped bit, and says in which leaf and which file."""

import errno
import json
import pathlib
import random
import types

import kept_run
import numpy as np
import pytest
import tensorstore
from ckpt_states import refuse_to_open

from jaxscale.runtime.checkpoint import array_store
from jaxscale.runtime.checkpoint.array_store import index_damages, leaf_files
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.folders import COMMITTED
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.retention import list_steps
from jaxscale.runtime.checkpoint.transfer import copy_step
from jaxscale.runtime.checkpoint.verify import verify_folder
from jaxscale.system.exits import Exit, Stop


def found(checkpoints, step):
    return verify_folder(checkpoints.directory / str(step)).damages


def test_a_step_that_is_whole_has_no_damage_and_every_leaf_is_read(kept):
    verdict = verify_folder(kept.directory / "20")
    record = kept.read_record(20)
    assert verdict.damages == () and verdict.num_leaves == len(record["leaves"]) == 11
    arrays = array_store.ArrayReader(kept.directory / "20")
    assert verdict.num_bytes == sum(arrays.open(name).read().result().nbytes for name in record["leaves"])


@pytest.mark.fault("F2")
def test_a_flipped_bit_of_an_array_is_named_with_its_leaf_and_file(run):
    file, begin, size = kept_run.location(run, 20, "params.wide")
    kept_run.flip_bit(run.directory / "20" / file, (begin + size // 2) * 8 + 3)
    (damage,) = found(run, 20)
    assert damage.what == "params/wide" and file in damage.files
    assert str(damage).startswith("params/wide: its bits differ from those that were saved (in state/")
    assert found(run, 10) == ()


@pytest.mark.slow
@pytest.mark.fault("F2")
def test_100_of_100_flipped_bits_in_data_files_are_found(run):
    chance = random.Random(0)
    files = [path for path in kept_run.files_of(run, 20, "state") if path.parent.name == "d"]
    for _ in range(100):
        path = chance.choices(files, [path.stat().st_size for path in files])[0]
        bit = chance.randrange(path.stat().st_size * 8)
        kept_run.flip_bit(path, bit)
        assert found(run, 20), (path, bit)
        kept_run.flip_bit(path, bit)
    assert found(run, 20) == ()


@pytest.mark.slow
@pytest.mark.fault("F2")
def test_100_of_100_flipped_bits_anywhere_in_a_copy_are_found(kept, tmp_path):
    copy_step(kept, 20, tmp_path / "copy")
    copied = Checkpoints(tmp_path / "copy" / "checkpoints", CheckpointConfig())
    assert found(copied, 20) == ()
    committed = copied.directory / "20" / COMMITTED  # what lies in it means nothing; that it is there does
    chance, paths = random.Random(1), [path for path in kept_run.files_of(copied, 20) if path != committed]
    for _ in range(100):
        path = chance.choice(paths)  # each file as likely as another: the small ones matter too
        bit = chance.randrange(path.stat().st_size * 8)
        kept_run.flip_bit(path, bit)
        assert found(copied, 20), (path, bit)
        kept_run.flip_bit(path, bit)


@pytest.mark.fault("F20")
def test_every_flip_in_the_record_is_found(run):
    path = run.directory / "20" / "run" / "metadata"
    for bit in range(0, path.stat().st_size * 8, 199):
        kept_run.flip_bit(path, bit)
        (damage,) = found(run, 20)
        assert damage.what == "run/metadata" and "\n" not in str(damage)
        kept_run.flip_bit(path, bit)


@pytest.mark.fault("F19")
@pytest.mark.parametrize("damage", ["truncated", "deleted", "no state", "no tree", "no index", "another index"])
def test_what_cannot_be_read_is_one_line_each(run, damage):
    folder = run.directory / "20"
    for path in kept_run.files_of(run, 20, "state"):
        if path.parent.name == "d" and damage == "truncated":
            path.write_bytes(path.read_bytes()[:50])
        elif (
            (path.parent.name == "d" and damage == "deleted")
            or damage == "no state"
            or (path.name == "_METADATA" and damage == "no tree")
            or (path == folder / "state" / "manifest.ocdbt" and damage.endswith("index"))
        ):
            path.unlink()
    if damage == "another index":
        (folder / "state" / "manifest.ocdbt").write_bytes(
            (run.directory / "10" / "state" / "manifest.ocdbt").read_bytes()
        )
    damages = found(run, 20)
    assert damages and all("\n" not in str(line) and len(str(line)) < 500 for line in damages)
    assert all(str(run.directory / "20") in str(line) or line.what for line in damages)


@pytest.mark.parametrize("part", ["record", "array", "tree", "index", "file"])
@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), TimeoutError(errno.ETIMEDOUT, "timed out")]
)
def test_what_may_not_or_cannot_be_reached_is_storage_and_not_damage(kept, monkeypatch, part, error):
    def fail(*_, **__):
        raise error

    if part == "array":
        monkeypatch.setattr(tensorstore, "open", fail)
    elif part == "index":
        monkeypatch.setattr(tensorstore, "KvStore", types.SimpleNamespace(open=fail))
    elif part == "file":
        monkeypatch.setattr(pathlib.Path, "open", fail)
    else:
        name = {"record": "metadata", "tree": "_METADATA"}[part]
        refuse_to_open(monkeypatch, lambda path: path.name == name, error)
    with pytest.raises(Stop, match="cannot be read: .*; it was not verified") as caught:
        found(kept, 20)
    assert caught.value.code == Exit.STORAGE


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"use_zarr3": false', '"use_zarr3": null'),
        ('"skip_deserialize": false', '"skip_deserialize": true'),
        ('"key": "wide"', '"key": "wade"'),
        ('"key_type": 2', '"key_type": 3'),
        ('"jax.Array"', '"jax.Arraz"'),
        ('"tree_metadata"', '"tree_metadatb"'),
    ],
)
def test_a_changed_description_of_the_tree_is_found(run, old, new):
    path = run.directory / "20" / "state" / "_METADATA"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert found(run, 20)[0].what == "state/_METADATA"


def test_a_leaf_of_another_dtype_or_shape_is_found_even_with_the_same_bits(run):
    for change in ({"params/half": [[7, 3], "float16"]}, {"params/wide": [[40, 96], "float32"]}):
        leaves = run.read_record(20)["leaves"]
        name, described = next(iter(change.items()))
        kept_run.reseal(run, 20, leaves=leaves | {name: [*described, leaves[name][2]]})
        assert [damage.what for damage in found(run, 20)] == [name]
        kept_run.reseal(run, 20, leaves=leaves)


@pytest.mark.slow
def test_the_file_of_a_leaf_is_found_in_an_index_of_several_levels(tmp_path):
    config = {"max_decoded_node_bytes": 500, "max_inline_value_bytes": 10}
    spec = {"driver": "ocdbt", "base": array_store.kvstore_spec(tmp_path / "state"), "config": config}
    store = tensorstore.KvStore.open(spec).result()
    for number in range(60):
        store[f"params.w{number:02d}/0.0"] = bytes([number]) * 100
        store[f"params.w{number:02d}/.zarray"] = b"described at length, as Orbax does"
    located = leaf_files(tmp_path)
    for number in range(60):
        (file,) = located[f"params.w{number:02d}"]
        assert bytes([number]) * 100 in (tmp_path / file).read_bytes()
    assert list(index_damages(tmp_path)) == []
    for path in sorted((tmp_path / "state" / "d").iterdir())[:40]:  # of 120 versions, the last of which alone is used
        whole = path.read_bytes()
        value = 100 if whole.count(whole[:1], 0, 100) == 100 else 34  # bytes of it; behind it lies a node of the index
        kept_run.flip_bit(path, (value + 20) * 8)
        assert list(index_damages(tmp_path)), path
        path.write_bytes(whole)


def test_the_list_of_steps_tells_what_training_recorded(run):
    kept_run.reseal(run, 10, health="suspect", metrics={"validation/loss": 3.25})
    kept_run.reseal(run, 20, health="clean", metrics={"validation/loss": 3.0})
    good = {"step": 20, "verified": True, "health": "clean", "sha256": run.read_record(20)["sha256"]}
    (run.directory / "last_good.json").write_text(json.dumps(good))
    (run.directory / "pinned").mkdir()
    (run.directory / "pinned" / "10").write_text("")
    (run.directory / "30" / "run" / "metadata").write_text("{}")
    (run.directory / "40").mkdir()  # empty: no step
    old, good, bad = list_steps(run.directory)
    assert (old.step, old.health, old.validation_loss, old.verified, old.pinned) == (10, "suspect", 3.25, False, True)
    assert (good.step, good.health, good.validation_loss, good.verified, good.pinned) == (20, "clean", 3.0, True, False)
    assert good.saved.startswith("20") and good.saved.endswith("Z")
    assert good.num_bytes == sum(path.stat().st_size for path in kept_run.files_of(run, 20))
    assert bad.step == 30 and bad.health is None and "sha256" in bad.problem


def test_pieces_are_asked_for_ahead_within_the_limit_and_come_in_order(kept):
    array = array_store.ArrayReader(kept.directory / "10").open("params/wide")
    parts = array_store.chunk_boxes(array)
    assert len(parts) == 8
    for limit in (0, 5000, 10**9):
        whole = np.empty(array.shape, np.float32)
        for part, piece in zip(parts, array_store.read_ahead(((array, part) for part in parts), limit)):
            whole[part] = piece
        np.testing.assert_array_equal(whole, array.read().result())
