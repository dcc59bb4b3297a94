"""A run whose rows are shared by the devices of mesh.context is the run of one device."""

import jax
import numpy as np
import pytest
import tiny

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.sampling.config import Sampling
from jaxscale.runtime.sampling.generator import Engine, Generator
from jaxscale.runtime.training.statistics_runner import flatten_statistics
from jaxscale.system.exits import BadInput

BATCH = tiny.packed_batch(0, seq_len=32)
BASE = {"seq_len": 32, "batch_tokens": 16 * 32, "model.attention": "blockwise", "optim.name": "sgd", "optim.b1": 1e-30}
SHARED = BASE | {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2, "train.num_microbatches": 2}
PAIRS = SHARED | {"mesh.tensor": 1}  # on 4 devices
GPT2 = tiny.GPT2 | {"dropout": 0.3}


def step(model, overrides, num_devices):
    """(metrics of a step, gradients), on the host: the momentum of 1e-30 holds the gradient and nothing else."""
    cfg = schema.from_dict(RunConfig, schema.merge(tiny.VALUES | {"model": model}, overrides))
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:num_devices])
    state, metrics = program.train_step(program.init(), tiny.on_mesh(program, BATCH))
    return tiny.host((metrics, jax.tree.leaves(state.opt_state)))


WAYS = {  # (model, how many devices share it)
    "two devices": (tiny.LLAMA, {"mesh.tensor": 1, "mesh.fsdp": 1, "train.num_microbatches": 1}),
    "gather": (tiny.LLAMA, {"mesh.tensor": 1}),
    "gather, tensor": (tiny.LLAMA, {}),
    "ulysses": (tiny.LLAMA, {"context.attention": "ulysses", "mesh.tensor": 1, "mesh.fsdp": 4}),
    "ring": (tiny.LLAMA, {"context.attention": "ring"}),
    "windows in some layers": (tiny.RELATIVE, {"mesh.tensor": 1, "mesh.fsdp": 4}),
    "dropout": (GPT2, {}),
    "a window in stages": (tiny.LLAMA | {"attention_window": 5, "remat": "full"}, {"mesh.pipeline": 2, "mesh.fsdp": 1}),
}
QUICK = ("two devices",)


@pytest.mark.parametrize(
    "way", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in WAYS]
)
def test_losses_gradients_and_tokens_seen_are_those_of_one_device(way):
    model, changes = WAYS[way]
    microbatches = {"train.num_microbatches": changes.get("train.num_microbatches", 2)}
    one, one_grads = step(model, BASE | microbatches, 1)
    many, many_grads = step(model, SHARED | changes, {"two devices": 2, "gather": 4}.get(way, 8))
    np.testing.assert_array_equal(many["tokens_seen"], one["tokens_seen"])
    assert one.keys() == many.keys() and many["real_tokens"] == one["real_tokens"]
    for name in ("loss", "objective", "grad_norm"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-5)
    for got, right in zip(many_grads, one_grads, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5 * max(np.abs(right).max(), 1e-2))


@pytest.fixture(scope="module")
def programs():
    return tiny.program(BASE | {"train.num_microbatches": 2}, 1), tiny.program(PAIRS, 4)


@pytest.mark.slow
def test_the_first_state_and_the_batch_do_not_know_who_shares_rows(programs):
    tiny.assert_same_bits(*(tiny.host(program.init()) for program in programs))
    assert programs[1].batch_shards == 2 and programs[1].batch_sharding.shard_shape((16, 32)) == (8, 32)


def test_evaluation_has_the_loss_of_every_target_in_its_place(programs):
    found = [
        tiny.host(jax.jit(program.model.token_losses)(program.init().params, tiny.on_mesh(program, BATCH)))
        for program in programs
    ]
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.soak
def test_statistics_are_those_of_one_device(programs):
    one, many = (
        flatten_statistics(jax.device_get(program.statistics(program.init(), tiny.on_mesh(program, BATCH))))
        for program in programs
    )
    assert list(one) == list(many) and any(name.startswith("stats/attention_logit_max/") for name in one)
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_a_text_is_that_of_one_device(programs):
    texts = []
    for program in programs:
        engine = Engine(program.model, batch=2, longest=24)
        generator = Generator(engine, program.init().params)
        texts.append(np.stack(list(generator.generate([[1, 2, 3], [7] * 5], Sampling(temperature=0.0), 6))).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "changes, told",
    [
        (
            {"seq_len": 20, "batch_tokens": 320},
            "seq_len=20 is not a multiple of 8 .twice mesh.context=2 and mesh.ten",
        ),
        ({"context.attention": "ulysses"}, "1 key-value heads per device cannot be split over 2"),
    ],
)
def test_a_row_that_cannot_be_shared_so_is_refused_before_compiling(changes, told):
    with pytest.raises(BadInput, match=told):
        tiny.program(SHARED | changes, 8)
