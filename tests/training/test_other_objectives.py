"""Each objective trains the model that is made for it, on one device as on eight.

B batch  T position
"""

import functools

import jax
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.core.step import hash_tokens
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.stacking import tokens_hash
from jaxscale.runtime.hosts.meshes import put_rows

TEXT = "".join(f"{i} sheep and {i + 1} goats went up the hill. " for i in range(40))
MASK, MODES, SENTINELS, VOCAB = 257, dict(R=258, S=259, X=260), 264, 296
SPANS = dict(first_sentinel_id=SENTINELS, num_sentinels=32, multiple_of=2)
CASES = {
    "masked_lm": (tiny.ENCODER, dict(name="masked_lm", mask_id=MASK)),
    "span_corruption": (tiny.T5, dict(name="span_corruption", **SPANS)),
    "prefix_lm": (tiny.LLAMA, dict(name="prefix_lm")),
    "span_corruption in one row": (tiny.GPT2, dict(name="span_corruption", layout="one_row", **SPANS)),
    "ul2": (tiny.T5 | dict(mlp="relu", tied_embeddings=True), dict(name="ul2", mode_ids=MODES, **SPANS)),
    "ul2 in one row": (tiny.GPT2 | dict(max_seq_len=64), dict(name="ul2", layout="one_row", mode_ids=MODES, **SPANS)),
}
MESHES = {"one": {}, "fsdp and tensor": {"mesh.fsdp": 4, "mesh.tensor": 2}, "data": {"mesh.data": 8, "mesh.fsdp": 1}}
MESHES["parameters on the host"] = MESHES["fsdp and tensor"] | {"optim.offload_params": True}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "hill.jsonl"
    path.write_text("".join(f'{{"text": "{TEXT[at : at + 90]}"}}\n' for at in range(0, len(TEXT), 90)))
    return str(path)


@functools.cache
def parts(case, mesh, text_file):
    """(program, batches) of a tiny run."""
    model, objective = CASES[case]
    data = dict(name="files", files=text_file, objective=objective, val_fraction=0.0)
    cfg = tiny.config({"model": model | {"vocab_size": VOCAB}, "data": data} | MESHES[mesh])
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[: 1 if mesh == "one" else 8])
    corpus = open_data(cfg.data, seq_len=cfg.seq_len, vocab_size=VOCAB, seed=1, say=lambda text: None)
    return program, corpus.batches(cfg.rows_per_step)


def losses(case, mesh, steps, text_file):
    """The loss of each step."""
    program, batches = parts(case, mesh, text_file)
    state, found = program.init(), []
    for n in range(steps):
        state, metrics = program.train_step(state, tiny.on_mesh(program, batches.batch(n)))
        found.append(float(metrics["loss"]))
    return found


DEFAULT = ("masked_lm",)  # the others compile for longer than they tell
SLOW = tuple(case for case in CASES if case not in DEFAULT)


def check_learning(case, text_file):
    found = losses(case, "one", 30, text_file)
    assert np.mean(found[-5:]) < 0.85 * np.mean(found[:2]), found
    program, batches = parts(case, "one", text_file)
    batch = tiny.host(batches.batch(0))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), program.abstract_batch)
    assert jax.tree.structure(batch) == jax.tree.structure(program.abstract_batch)


@pytest.mark.slow
@pytest.mark.parametrize("case", DEFAULT)
def test_the_loss_falls(case, text_file):
    check_learning(case, text_file)


@pytest.mark.soak
@pytest.mark.parametrize("case", SLOW)
def test_the_loss_of_the_other_layouts_falls(case, text_file):
    check_learning(case, text_file)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["fsdp and tensor", "parameters on the host"])
def test_eight_devices_train_as_one_does(text_file, mesh):
    one, many = (losses("span_corruption", mesh, 3, text_file) for mesh in ("one", mesh))
    np.testing.assert_allclose(many, one, rtol=1e-5)  # float32 sums taken in another order


def test_the_tensor_axis_must_divide_the_encoders_row_too():
    objective = SPANS | dict(name="span_corruption", multiple_of=1, noise_density=0.7)
    more = {"model": tiny.T5 | dict(vocab_size=VOCAB, num_heads=4), "data.objective": objective, "mesh.fsdp": 2}
    cfg = tiny.config(more | {"mesh.tensor": 4})
    assert cfg.row_lengths[:2] == (cfg.seq_len, 10)
    with pytest.raises(ValueError, match=r"sequences of 16 and 10 tokens.*use data.objective.multiple_of=4"):
        make_program(cfg, resolve_budget(cfg, None), jax.devices()[:8])
    cfg = tiny.config(more | {"mesh.tensor": 4, "data.objective": objective | dict(multiple_of=4)})
    assert make_program(cfg, resolve_budget(cfg, None), jax.devices()[:8]).cfg.row_lengths[:2] == (16, 12)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["fsdp and tensor", "data"])
@pytest.mark.parametrize("case", CASES)
def test_eight_devices_train_as_one_does_whatever_the_objective(case, mesh, text_file):
    one, many = (losses(case, which, 3, text_file) for which in ("one", mesh))
    np.testing.assert_allclose(many, one, rtol=1e-5)


@pytest.mark.slow
def test_the_hash_of_a_batch_with_an_encoder_is_that_of_the_host(text_file):
    program, batches = parts("span_corruption", "fsdp and tensor", text_file)
    batch = batches.batch(2)
    placed = put_rows(batch, list(range(tiny.ROWS)), tiny.ROWS, program.batch_sharding)
    high, low = np.asarray(hash_tokens(placed))
    assert f"{high:08x}{low:08x}" == tokens_hash(batch)


def test_validation_is_the_same_every_time_and_knows_its_sources(text_file):
    objective = CASES["span_corruption"][1]
    data = dict(name="files", files={"a": text_file, "b": text_file}, objective=objective, val_fraction=0.3)
    cfg = tiny.config({"model": tiny.T5 | {"vocab_size": VOCAB}, "data": data})
    open_one = lambda seed: open_data(cfg.data, seq_len=16, vocab_size=VOCAB, seed=seed, say=lambda text: None)
    first, second = (list(open_one(seed).valid_batches(12, 8)) for seed in (1, 2))
    for (batch, sources, sizes), (again, *_) in zip(first, second, strict=True):
        tiny.assert_same_bits(tiny.host(batch), tiny.host(again))
        assert batch.targets.shape == sources.shape == sizes.shape == (8, cfg.row_lengths.row)
        assert not sizes.any()  # text out of its order: no bits per byte
    assert {0, 1} == {int(source) for _, sources, _ in first for source in np.unique(sources)}
    assert not first[-1][0].weights[4:].any()  # rows that fill up the last batch
