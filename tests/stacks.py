"""Parameters of every kind that a stack of layers has, a few steps of an optimizer on them, and short tiny runs."""

import functools

import jax
import numpy as np
import optax
import tiny

from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.optim.config import OptimConfig
from jaxscale.core.optim.groups import assign_groups
from jaxscale.core.optim.optimizer import ParamLayout, make_optimizer
from jaxscale.core.shardings import RULES, is_axes, tree_shardings

AXES = {
    "blocks": {
        "wq": ("layers", "embed", "heads", "head_dim"),
        "wo": ("layers", "heads", "head_dim", "embed"),
        "gate": ("layers", "embed", "mlp"),
        "up": ("layers", "embed", "mlp"),
        "experts": ("layers", "experts", "mlp", "expert_embed"),
        "router": ("layers", "embed", "router"),
        "norm": ("layers", "norm"),
    },
    "embedding": ("vocab", "embed"),
}
SIZES = dict(layers=3, embed=8, heads=4, head_dim=6, mlp=16, experts=2, expert_embed=8, router=2, norm=8, vocab=512)
RATE = 0.01


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    make = lambda axes: scale * rng.normal(size=[SIZES[axis] for axis in axes]).astype(np.float32)
    return jax.tree.map(make, AXES, is_leaf=is_axes)


def on_mesh(shape):
    """The mesh of 8 devices with these axes; of one, without."""
    return make_mesh(MeshConfig(**({"fsdp": 1} | shape)), jax.devices()[: 8 if shape else 1])


def some(tree, leaves):
    """The tree with these leaves of its blocks alone; with all of them, where none are named."""
    return tree | {"blocks": {name: tree["blocks"][name] for name in leaves or tree["blocks"]}}


def ours(mesh, rules="zero3", leaves=(), **settings):
    """(the optimizer, shardings of the moments) on a mesh."""
    cfg = OptimConfig(**{"clip_norm": 0.0, **settings})
    axes = some(AXES, leaves)
    shardings = tree_shardings(mesh, axes, RULES[rules].moments)
    layout = ParamLayout(axes, jax.tree.map(lambda place: place.spec, shardings), mesh)
    groups = assign_groups(axes, (), cfg.weight_decay, cfg.weight_decay_all)
    return make_optimizer(cfg, lambda step: RATE, groups, layout=layout), shardings


@functools.cache
def compiled_update(mesh, rules, leaves, settings):
    """(step(params, state, grads), shardings of parameters and gradients, the first state)."""
    optimizer, shardings = ours(mesh, rules, leaves, **dict(settings))

    @functools.partial(jax.jit, out_shardings=(shardings, None))
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params, step=0)
        return optax.apply_updates(params, updates), state

    params = jax.device_put(some(draw(0), leaves), shardings)
    state = optimizer.init(params)
    return step.lower(params, state, params).compile(), shardings, state


def trained(mesh, rules="zero3", steps=3, leaves=(), **settings):
    """(the parameters after some steps, the compiled update)."""
    compiled, shardings, state = compiled_update(mesh, rules, leaves, tuple(settings.items()))
    params = jax.device_put(some(draw(0), leaves), shardings)
    for number in range(steps):
        params, state = compiled(params, state, jax.device_put(some(draw(1 + number, 0.1), leaves), shardings))
    return tiny.host(params), compiled.as_text()


def losses(overrides, num_devices, steps=4):
    """Of the tiny run, on the same batch all the time."""
    program = tiny.program(overrides, num_devices)
    state, found, batch = program.init(), [], tiny.on_mesh(program, tiny.packed_batch(0))
    for _ in range(steps):
        state, metrics = program.train_step(state, batch)
        found.append(float(metrics["loss"]))
    return found
