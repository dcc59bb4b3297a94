"""In a bucket nothing stops TensorStore in a process that froze while it wrote arrays, and wakes in a step of another.

What arrives late lies beside what counts, or is found by the fingerprints: no array is ever another than the saved one.
"""

import jax
import numpy as np
import pytest
import tiny
from ckpt_states import restore_newest
from gcs_emulator import Emulator

from jaxscale.runtime.checkpoint import write
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import named_leaves, nest
from jaxscale.runtime.checkpoint.write import import_orbax

pytest.importorskip("gcsfs", reason="gcsfs is not installed")


def arrays(seed):
    return {"w": jax.numpy.asarray(np.random.default_rng(seed).normal(size=(30, 20)).astype("float32"))}


def arrive_late(folder):
    """Other arrays under the same names."""
    saved = import_orbax().args.PyTreeSave(nest(named_leaves(arrays(2))))
    write.array_handler().save(write.epath(folder / "state"), args=saved)


@pytest.mark.slow
@pytest.mark.fault("F32")
@pytest.mark.parametrize("when", ["before the commit", "after it"])
def test_pieces_of_a_frozen_process_that_arrive_late_change_no_array(monkeypatch, when):
    with Emulator() as gcs:
        for name, value in gcs.environment().items():
            monkeypatch.setenv(name, value)
        lines, events, commit, late = [], [], write.commit, [when == "before the commit"]

        def commit_after_late_pieces(directory, step, *rest):
            if late and late.pop():
                arrive_late(directory / str(step))
            commit(directory, step, *rest)

        monkeypatch.setattr(write, "commit", commit_after_late_pieces)
        note = lambda kind, step=None, **facts: events.append(kind)
        there = Checkpoints("gs://bucket/run/checkpoints", CheckpointConfig(), note=note)
        there.save(4, arrays(1), {}, wait=True)
        if when == "after it":
            arrive_late(there.directory / "4")
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays(1))
        found = restore_newest(there, lambda step: there.restore(step, like), say=lines.append)
        tiny.assert_same_bits(found, arrays(1))
        if when == "after it":
            assert events == ["saved", "alarm"] and "every array is bitwise correct" in lines[0]
        else:
            assert events == ["set_aside", "save_failed", "saved"] and not lines
