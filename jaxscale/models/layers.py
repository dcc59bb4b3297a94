"""What all models share: parameters with logical axes, and a stack of layers that is scanned or unrolled."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.models.config import ModelConfig
from jaxscale.models.lora import join_adapters
from jaxscale.models.remat import remat_policy
from jaxscale.ops.taps import BLIND, Blind
from jaxscale.sharding.shardings import Gather, whole_already
from jaxscale.sharding.tensor_axis import ONE, TensorAxis


def param(
    rngs: nnx.Rngs, shape: Sequence[int], axes: tuple[str, ...], *, fan_in: int | None = None, std: float | None = None
) -> nnx.Param:
    """A float32 parameter with its logical axes: normal with std (1 / sqrt(fan_in) unless given)."""
    assert len(shape) == len(axes), f"{shape} has not the axes {axes}"
    std = fan_in**-0.5 if std is None else std
    return nnx.Param(std * jax.random.normal(rngs.params(), tuple(shape), jnp.float32), axes=axes)


def constant(shape: Sequence[int], axes: tuple[str, ...], value: float) -> nnx.Param:
    """A float32 parameter that starts as a constant: scales as 1, biases as 0."""
    return nnx.Param(jnp.full(tuple(shape), value, jnp.float32), axes=axes)


def make_stack(make_block: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs, num_layers: int, scan: bool) -> nnx.Module:
    """Blocks with independent random keys: one module of stacked parameters, or a list. Layer l is the same in both."""
    keys = jax.random.split(rngs.params(), num_layers)
    if not scan:
        return nnx.List([make_block(nnx.Rngs(params=key)) for key in keys])
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make_block(nnx.Rngs(params=0))))
    stacked = jax.vmap(lambda key: nnx.state(make_block(nnx.Rngs(params=key)), nnx.Param))(keys)
    boxed = jax.tree.map(
        lambda leaf: nnx.Param(leaf.get_value(), axes=("layers", *leaf.axes)),
        stacked,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return nnx.merge(graphdef, boxed)


def run_stack(
    blocks: nnx.Module,
    apply: Callable,
    x: jax.Array,
    per_layer: Any,
    cfg: ModelConfig,
    gather: Gather,
    taps: Blind = BLIND,
) -> jax.Array:
    """x after all blocks: apply(block, x, layer_input) -> x, each under the remat policy of the config.

    per_layer: a tree with a leading axis of num_layers (random keys, say), or None. gather: brings the weights of one
    block together just before it runs, and again before its backward pass. taps: given what they saw of each layer, and
    what they ask to have in it.
    """

    def wrap(f: Callable) -> Callable:
        if cfg.remat == "none" and gather is whole_already:
            return f
        policy = remat_policy(cfg.remat, cfg.remat_save, cfg.remat_offload)
        return jax.checkpoint(f, policy=policy, prevent_cse=not cfg.scan_layers)

    def run_layer(graphdef: nnx.GraphDef, params: Any, x: jax.Array, extra: Any, held: Any) -> tuple[jax.Array, Any]:
        taps.begin_layer(held)
        whole = gather_params(params, gather, cfg.compute_dtype, stacked=cfg.scan_layers)
        x = apply(nnx.merge(graphdef, whole), x, extra)
        return x, taps.end_layer(x)

    held = taps.layers()
    if not cfg.scan_layers:
        seen = []
        for layer, block in enumerate(blocks):
            graphdef, params = nnx.split(block)
            run = wrap(functools.partial(run_layer, graphdef))
            x, of_layer = run(params, x, *jax.tree.map(operator.itemgetter(layer), (per_layer, held)))
            seen.append(of_layer)
        taps.end_stack(jax.tree.map(lambda *layers: jnp.stack(layers), *seen))
        return x
    graphdef, params = nnx.split(blocks)
    run = wrap(functools.partial(run_layer, graphdef))
    x, seen = jax.lax.scan(lambda x, layer: run(layer[0], x, *layer[1:]), x, (params, per_layer, held))
    taps.end_stack(seen)
    return x


@jax.named_scope("gather_weights")
def gather_params(params: Any, gather: Gather, dtype: Any, *, stacked: bool) -> Any:
    """A block's parameters as every device needs them. stacked: their axes begin with that of the layers, now gone."""
    whole = lambda leaf: leaf.replace(gather(leaf.get_value(), leaf.axes[stacked:], dtype))
    return join_adapters(jax.tree.map(whole, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


@jax.custom_vjp
def settle_together(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, w) as they are; going backward, neither gradient is used before both are there.

    For a weight whose gradient nobody waits for: XLA would sum it over the devices at the end of the backward pass,
    and keep it whole until then (0.5 GiB for the output projection of a 7B, libtpu 0.0.51 for v5e, 2026-11-21).
    """
    return x, w


settle_together.defvjp(lambda x, w: ((x, w), None), lambda _, grads: jax.lax.optimization_barrier(grads))


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, dict, dict]:
    """(graphdef, params, axes): nested plain dicts of arrays and of tuples of logical axes, alike in shape.

    nnx.merge(graphdef, params) is the model again; a checkpoint and optax see nothing but dicts.
    """
    graphdef, state = nnx.split(model, nnx.Param)
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    axes = jax.tree.map(lambda leaf: tuple(leaf.axes), state, is_leaf=is_variable)
    return graphdef, string_keys(nnx.to_pure_dict(state)), string_keys(nnx.to_pure_dict(axes))


def merge_model(graphdef: nnx.GraphDef, params: dict) -> nnx.Module:
    """The model with these parameters: the inverse of split_model."""
    return nnx.merge(graphdef, integer_keys(params))


def string_keys(tree: Any) -> Any:
    """Layer numbers of unrolled blocks as text, since a checkpoint's names are text."""
    return {str(key): string_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def integer_keys(tree: Any) -> Any:
    """The inverse of string_keys."""
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: integer_keys(value) for key, value in tree.items()}


def split_keys(keys_B: jax.Array, number: int) -> jax.Array:
    """`number` new random keys of each row, [number, B]."""
    return jnp.swapaxes(jax.vmap(lambda key: jax.random.split(key, number))(keys_B), 0, 1)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None, tensor: TensorAxis = ONE) -> jax.Array:
    """x [B, T, ...] with a part `rate` of its entries zero and the rest scaled up; as it is without keys or at rate 0.

    Each row has a key of its own, so that no number depends on which device or microbatch a row is in, nor on how its
    positions are shared.
    """
    if keys_B is None or rate == 0.0:
        return x
    shape = (x.shape[1] * tensor.size, *x.shape[2:])
    kept = tensor.own(jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys_B))
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def with_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x plus a bias along its last axes, in x's dtype."""
    return x + bias.astype(x.dtype).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
