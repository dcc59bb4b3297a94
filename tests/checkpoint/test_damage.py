"""What was damaged after it was saved is never trained on, and one line says what and where it is."""

import os
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ckpt_states import abstract, assert_same_bits, data_files, flip_bit, refuse_to_open, restore_newest, stop_of

from jaxscale.runtime.checkpoint import restore
from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, short_reason, stop_if_unreachable
from jaxscale.system.exits import Exit, Stop


@pytest.mark.fault("F2")
def test_of_100_flipped_bits_all_are_found_and_none_is_trained_on(checkpoints):
    rng = np.random.default_rng(5)
    state = {"w": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32), "b": jnp.ones((8,), jnp.bfloat16)}
    shape = jax.eval_shape(lambda: state)
    checkpoints.save(1, state, {}, wait=True)
    refused = by_fingerprint = named = 0
    told = []
    attempt = lambda step: checkpoints.restore(step, shape)
    files = data_files(checkpoints.directory, 1)
    for trial in range(100):
        path = files[0 if trial % 4 else trial // 4 % len(files)]
        original = path.read_bytes()
        flip_bit(path, int(rng.integers(len(original) * 8)))
        try:
            assert_same_bits(
                restore_newest(checkpoints, attempt, told.append), state
            )  # a bit that no array is read from
            assert path.name in told.pop() and not told
            named += 1
        except Stop as error:
            assert error.code == Exit.CHECKPOINT_CORRUPT and "\n" not in str(error)
            refused += 1
            by_fingerprint += "bits of" in str(error)
        path.write_bytes(original)
    assert refused + named == 100 and by_fingerprint >= 50  # most read back as plausible numbers
    assert named, "no flip hit a byte that no array is read from: the list of files was not tried"
    assert_same_bits(restore_newest(checkpoints, attempt, told.append), state)
    assert not told


@pytest.mark.slow
@pytest.mark.fault("F20")
def test_a_flipped_bit_in_the_run_item_is_always_found(saved):
    path = saved.directory / "20" / "run" / "metadata"
    original = path.read_bytes()
    for bit in range(0, len(original) * 8, 41):
        flip_bit(path, bit)
        assert stop_of(saved.read_run, 20).code == Exit.CHECKPOINT_CORRUPT
        path.write_bytes(original)
    assert saved.read_run(20) == {"data": {"epoch": 2}}


@pytest.mark.parametrize("damage", ["truncated", "deleted", "no state", "no run", "no arrays"])
def test_what_cannot_be_read_is_one_line_with_the_way_out(saved, damage):
    folder = saved.directory / "20"
    if damage == "truncated":
        for path in data_files(saved.directory, 20):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "deleted":
        for path in data_files(saved.directory, 20):
            path.unlink()
    elif damage == "no arrays":
        (folder / "state" / "manifest.ocdbt").unlink()
    else:
        shutil.rmtree(folder / damage.removeprefix("no "))
    assert saved.latest_step() == 20  # a damaged newest step is not passed over in silence
    error = stop_of(saved.restore, 20, abstract())
    assert error.code == Exit.CHECKPOINT_CORRUPT
    assert "step 20" in str(error) and f"move {folder} away to resume from step 10" in str(error)
    assert len(str(error)) < 700


def test_a_storage_that_does_not_answer_is_not_a_damaged_checkpoint(saved):
    limits, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(free)
    caught = None
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # no file can be opened
    try:
        saved.read_run(20)
    except Stop as stop:
        caught = stop
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.code == Exit.STORAGE and "Too many open files" in str(caught) and "nothing was changed" in str(caught)


OfAClient = type("HttpError", (Exception,), {"__module__": "gcsfs.retry"})  # a plain Exception


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (PermissionError(13, "Permission denied"), True), (TimeoutError("late"), True),
        (OSError("Forbidden: https://storage.googleapis.com/b\nno access"), True), (OfAClient("503"), True),
        (ValueError("UNAVAILABLE: Error reading gs://b/x"), True), (ValueError("PERMISSION_DENIED: 403"), True),
        (FileNotFoundError(2, "No such file"), False), (OSError(5, "Input/output error"), False),
        (ValueError("DATA_LOSS: checksum"), False), (ValueError("NOT_FOUND: manifest"), False),
    ],
    ids=str,
)  # fmt: skip
def test_what_says_nothing_about_the_files_is_told_apart(error, trouble):
    outer = RuntimeError("could not restore")
    outer.__cause__ = error
    assert is_storage_error(outer) == trouble


def test_a_bucket_that_cannot_be_asked_is_one_line_of_a_start():
    def ask():
        raise OfAClient("Service Unavailable, 503")

    error = stop_of(stop_if_unreachable, ask, "gs://bucket/run")
    assert error.code == Exit.STORAGE
    assert str(error).startswith("gs://bucket/run cannot be reached: HttpError: Service Unavailable, 503; restart")
    with pytest.raises(KeyError):  # our own mistakes keep their traceback
        stop_if_unreachable(lambda: {}["x"], "gs://bucket/run")
    with pytest.raises(OfAClient):
        stop_if_unreachable(ask, "/disk/run")


def test_a_record_that_a_client_cannot_fetch_is_no_damage(saved, monkeypatch):
    refuse_to_open(monkeypatch, lambda path: path.name == "metadata", OfAClient("Service Unavailable, 503"))
    for action in (lambda: saved.read_run(20), lambda: saved.restore(20, abstract())):
        error = stop_of(action)
        assert error.code == Exit.STORAGE and "nothing was changed" in str(error)


@pytest.mark.parametrize("what", ["record", "fit", "arrays"])
def test_whatever_one_process_cannot_read_is_told_to_the_others(saved, monkeypatch, what):
    told = []
    monkeypatch.setattr(
        restore, "gathered", lambda key, mine, seconds, made_of: told.append(mine) or made_of([None, mine])
    )
    if what == "record":
        (saved.directory / "20" / "run" / "metadata").write_text("{")
    elif what == "arrays":
        shutil.rmtree(saved.directory / "20" / "state")
    wanted = abstract() if what != "fit" else abstract(width=8)
    error = stop_of(saved.restore, 20, wanted)
    assert told[0] and "process 1: " in str(error)
    assert error.code == (Exit.CONFIG_MISMATCH if what == "fit" else Exit.CHECKPOINT_CORRUPT)


def test_without_an_older_step_the_line_says_so(checkpoints):
    checkpoints.save(5, {"w": jnp.ones(3)}, {})
    checkpoints.wait()
    (checkpoints.directory / "5" / "run" / "metadata").write_text("{")
    assert "no older step exists" in str(stop_of(checkpoints.read_run, 5))


NOISY = """
import pathlib, resource, sys, time
import jax, jax.numpy as jnp, numpy as np
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.system.exits import Stop
checkpoints = Checkpoints(sys.argv[1], CheckpointConfig())
state = {name: jnp.asarray(np.random.default_rng(0).normal(size=300_000), jnp.float32) for name in "abcdefgh"}
checkpoints.save(1, state, {})
checkpoints.wait()
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
try:
    checkpoints.save(2, state, {})
    checkpoints.wait()
except Stop as error:
    print(int(error.code))
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
for path in pathlib.Path(sys.argv[1], "1", "state").rglob("d/*"):
    path.write_bytes(path.read_bytes()[:100])
for _ in range(2):
    try:
        checkpoints.restore(1, jax.eval_shape(lambda: state))
    except Stop as error:
        print(int(error.code))
checkpoints.close()
"""


@pytest.mark.slow
def test_failures_print_nothing_but_their_one_line(tmp_path):
    command = [sys.executable, "-c", NOISY, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.stdout.split()) == ("", ["14", "19", "19"])


def test_a_path_with_dots_is_not_taken_for_a_permission():
    assert short_reason(OSError(5, "Input/output error", "/mnt/storage.fast.disk/x")).startswith("Input/output error: ")
    refusal = OSError("Forbidden: trainer@x.iam does not have storage.objects.create access to the object")
    assert short_reason(refusal) == "this machine's account lacks the permission storage.objects.create (403)"
