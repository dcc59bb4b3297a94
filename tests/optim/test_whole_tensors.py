"""Adafactor and LAMB against optax, tensor by tensor, and the same on every mesh."""

import functools

import jax
import numpy as np
import optax
import pytest
import tiny
from stacks import AXES, RATE, draw, losses, on_mesh, trained
from twins import twins

from jaxscale.core.optim.config import OptimConfig

REFERENCES = {
    "adafactor": {},
    "scaled": {"scale_by_parameter": True, "name": "adafactor"},
    "lamb": {},
}


@functools.cache
def reference(name, decays):
    """step(tensor, state, gradient) -> both anew, and the first state of a tensor: optax's, of one."""
    tx = optax_of_one(name, decays)

    @jax.jit
    def step(own, state, grad):
        updates, state = tx.update(grad, state, own)
        return optax.apply_updates(own, updates), state

    return step, tx.init


def optax_of_one(name, decays):
    if name == "lamb":
        return optax.lamb(RATE, 0.9, 0.95, 1e-8, weight_decay=0.1 * decays)
    adafactor = optax.adafactor(
        RATE, min_dim_size_to_factor=2, multiply_by_parameter_scale=name == "scaled", weight_decay_rate=None
    )
    decay = lambda updates, params: jax.tree.map(lambda u, p: u - RATE * 0.1 * decays * p, updates, params)
    return optax.chain(adafactor, optax.stateless(decay))


def tensors(name, value):
    """A stack as the tensors that it is of, matrices as such."""
    axes = (AXES["blocks"] | AXES)[name]
    count = sum(axis in ("layers", "experts") for axis in axes)
    for index in np.ndindex(value.shape[:count]):
        own = value[index]
        yield own.reshape(-1, own.shape[-1]) if axes[count] == "heads" else own.reshape(own.shape[0], -1).squeeze()


@functools.cache
def on_one(name):
    return trained(on_mesh({}), **({"name": name} | REFERENCES[name]))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
def test_each_tensor_of_a_stack_is_updated_as_optax_updates_it_alone(name):
    found = on_one(name)
    found = found["blocks"] | found
    wholes = [tree["blocks"] | tree for tree in (draw(0), *[draw(1 + number, 0.1) for number in range(3)])]
    for leaf in (*AXES["blocks"], "embedding"):
        decays = leaf not in ("norm", "embedding")
        for own, *grads, after in zip(*[tensors(leaf, whole[leaf]) for whole in (*wholes, found)], strict=True):
            step, init = reference(name, decays)
            state = init(own)
            for grad in grads:
                own, state = step(own, state, grad)
            np.testing.assert_allclose(after, own, atol=1e-5, err_msg=leaf)


ZERO3, ZERO1 = (dict(fsdp=8), "zero3"), (dict(data=2, fsdp=2, tensor=2), "zero1")
ZERO2 = (dict(fsdp=2, tensor=2, expert=2), "zero2")
PLACES = [ZERO3, ZERO1, ZERO2]
QUICK = [("lamb", *ZERO3), ("adafactor", *ZERO1), ("adafactor", *ZERO2), ("scaled", *ZERO1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "rules"),
    twins([(name, *place) for name in REFERENCES for place in PLACES], *QUICK),
)
def test_on_a_mesh_whole_tensors_are_looked_at(name, shape, rules):
    found, _ = trained(on_mesh(shape), rules, **({"name": name} | REFERENCES[name]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, on_one(name))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["adafactor", "lamb"])
def test_a_run_is_the_same_on_a_mesh(name):
    one = losses({"optim.name": name, "mesh.fsdp": 1}, 1)
    shared = {"mesh.fsdp": 2, "mesh.data": 2, "mesh.tensor": 2, "rules": "zero1"}
    np.testing.assert_allclose(losses({"optim.name": name} | shared, 8), one, rtol=1e-5)
    assert one[-1] < one[0]


def test_factored_moments_lie_with_the_axes_that_they_have_and_take_a_fraction():
    state = tiny.program({"optim.name": "adafactor"}, 8).abstract_state
    moments, whole = state.opt_state[1], state.params["blocks"]["attention"]["wq"]
    rows, cols = (tree["blocks"]["attention"]["wq"] for tree in (moments.rows, moments.cols))
    assert rows.shape == whole.shape[:2] and cols.shape == (whole.shape[0], *whole.shape[2:])
    assert tuple(rows.sharding.spec) == (None, "fsdp") and "fsdp" not in str(cols.sharding.spec)
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert size(state.opt_state) < 0.15 * size(state.params)


@pytest.mark.parametrize("setting", ["offload_moments", "offload_params"])
@pytest.mark.parametrize("name", ["adafactor", "lamb"])
def test_what_they_need_cannot_be_in_the_host_s_memory(name, setting):
    with pytest.raises(ValueError, match=f"{setting} does not support name='{name}', which needs"):
        OptimConfig(**{"name": name, setting: True})
