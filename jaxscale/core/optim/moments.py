"""Optimizer moments in bfloat16 or int8 with stochastic rounding, or in host memory.

Rounding to nearest discards changes below half a unit in the last place. With b2 = 0.999, a bfloat16 second moment
would never decrease. The random bits are a hash of the step and the element's index, independent of the mesh.

Offloaded moments and parameters are copied to the device, updated and copied back layer by layer. XLA starts copies as
early as possible, so copies of all layers at once would be in device memory together with the gradients.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxscale.core.optim.groups import STACK_AXES, is_masked

FIELDS = ("mu", "nu", "trace")  # names of the moments in optax's states
NON_NEGATIVE = "nu"
MAX_BLOCK = 256  # elements that share a scale, as in bitsandbytes (2048 in arXiv:2110.02861)
MAX_SHARDS = 16  # maximum number of shards of an axis for which each shard has whole blocks
SHARDED = ("embed", "expert_embed", "latent")  # axes that are often sharded and along which blocks are avoided
FACTORED_FIELDS = ("rows", "cols", "full")


class FactoredState(NamedTuple):
    """Second moments. Fields are trees like the parameters, with MaskedNodes where they do not apply."""

    count: jax.Array  # int32[]
    rows: Any  # means over the columns of matrices
    cols: Any  # means over the rows of matrices
    full: Any  # unfactored moments of other parameters


class QuantizedMoment(NamedTuple):
    """An 8-bit moment with one scale per block.

    A code represents (code / max code) ** 4 times the largest value of the block, or ** 8 for second moments. Adjacent
    values differ by about 3% near the largest value, and by 31% at 1e-4 of the largest value (1e-8 for second moments).
    Evenly spaced codes would round most values to 0.
    """

    codes: jax.Array  # int8, or uint8 for non-negative moments; has the shape and axes of the parameter
    scales: jax.Array  # float32 per block; without the blocked axis if that has a single block


def cast_moments(tx: optax.GradientTransformation, dtype: str, axes_tree: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` with moments stored in bfloat16 or int8 (QuantizedMoment). update() requires step, an int32[].

    axes_tree: a tree of logical axes with the structure of the parameters.
    """
    if dtype == "float32":
        return optax.with_extra_args_support(tx)
    axes = jax.tree.leaves(axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple))

    def map_moments(f, state):
        """Maps f(leaf, axes, field name, leaf index) over the moments of the state."""

        def map_field(name):
            leaves, treedef = jax.tree.flatten(getattr(state, name), is_leaf=lambda x: is_masked(x) or is_quantized(x))
            if not leaves:  # optax's placeholder for parameters
                return getattr(state, name)
            indexed = enumerate(zip(leaves, axes, strict=True))
            return treedef.unflatten([x if is_masked(x) else f(x, a, name, i) for i, (x, a) in indexed])

        return state._replace(**{name: map_field(name) for name in FIELDS if name in state._fields})

    def compress(state, step):
        def compress_leaf(x, axes, name, index):
            noise = random_bits(x.shape, step, index * len(FIELDS) + FIELDS.index(name))
            if dtype == "bfloat16":
                return to_bfloat16(x, noise)
            return quantize(x, block_dim(axes), noise, non_negative=name == NON_NEGATIVE)

        return map_moments(compress_leaf, state)

    def decompress(state):
        to_float32 = lambda x, axes, *_: dequantize(x, block_dim(axes)) if is_quantized(x) else x.astype(jnp.float32)
        return map_moments(to_float32, state)

    def update(updates, state, params=None, *, step: Any = None, **extra):
        new, state = tx.update(updates, decompress(state), params)
        return new, compress(state, step)

    return optax.GradientTransformationExtraArgs(lambda params: compress(tx.init(params), 0), update)


def is_quantized(leaf: Any) -> bool:
    """Returns True for a moment in int8."""
    return isinstance(leaf, QuantizedMoment)


def block_dim(axes: tuple[str, ...]) -> int:
    """Returns the dimension along which a parameter with these logical axes is divided into blocks."""
    unsharded = [d for d, axis in enumerate(axes) if axis not in SHARDED + STACK_AXES]
    return unsharded[-1] if unsharded else len(axes) - 1


def block_length(length: int) -> int:
    """Returns the block length: a power of 2 for which each of MAX_SHARDS shards has whole blocks, else `length`."""
    block = math.gcd(length // MAX_SHARDS, MAX_BLOCK) if length % MAX_SHARDS == 0 else 1
    return block if block >= MAX_SHARDS else length


def scale_axes(axes: tuple[str, ...], codes: Any, scales: Any, axis_size: Any, unsharded: str) -> tuple[str, ...]:
    """Returns the logical axes of a moment's scales.

    axis_size: returns the number of shards of an axis. unsharded: replaces an axis whose shards split a block.
    """
    d = block_dim(axes)
    if scales.ndim < codes.ndim:
        return axes[:d] + axes[d + 1 :]
    return axes[:d] + (axes[d] if scales.shape[d] % axis_size(axes[d]) == 0 else unsharded,) + axes[d + 1 :]


def random_bits(shape: tuple[int, ...], step: Any, salt: int) -> jax.Array:
    """Returns uint32[shape], a hash of step, salt and index (lowbias32, github.com/skeeto/hash-prospector)."""
    seed = lowbias32(jnp.asarray(step).astype(jnp.uint32) ^ lowbias32(jnp.uint32(salt + 1)))
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for d in reversed(range(len(shape))):
        index += lax.broadcasted_iota(jnp.uint32, shape, d) * jnp.uint32(stride % 2**32)
        stride *= shape[d]
    return lowbias32(lowbias32(index) ^ seed)


def lowbias32(x: jax.Array) -> jax.Array:
    """Returns a hash of each uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def to_bfloat16(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Rounds each float32 stochastically to one of the two adjacent bfloat16 values."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (noise & jnp.uint32(0xFFFF))
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


def quantize(x: jax.Array, d: int, noise: jax.Array, *, non_negative: bool) -> QuantizedMoment:
    """Quantizes x to 8 bits with stochastic rounding, in blocks along dimension d."""
    abs_blocks = split_blocks(jnp.abs(x), d)
    scales = jnp.max(abs_blocks, axis=d + 1)
    divisor = jnp.maximum(jnp.expand_dims(scales, d + 1), jnp.finfo(jnp.float32).tiny)
    fraction = (abs_blocks / divisor).reshape(x.shape)
    max_code, squarings = (255.0, 3) if non_negative else (127.0, 2)
    root = fraction
    for _ in range(squarings):
        root = jnp.sqrt(root)
    low = jnp.minimum(jnp.floor(root * max_code), max_code - 1)
    below, above = square_repeatedly(low / max_code, squarings), square_repeatedly((low + 1) / max_code, squarings)
    uniform = (noise >> 8).astype(jnp.float32) * 2.0**-24  # in [0, 1)
    code = low + (uniform * (above - below) < fraction - below)
    codes = code.astype(jnp.uint8) if non_negative else (jnp.sign(x) * code).astype(jnp.int8)
    return QuantizedMoment(codes, jnp.squeeze(scales, d) if scales.shape[d] == 1 else scales)


def dequantize(moment: QuantizedMoment, d: int) -> jax.Array:
    """Returns the float32 values of a moment with blocks along dimension d."""
    codes, non_negative = moment.codes, moment.codes.dtype == jnp.uint8
    scales = moment.scales if moment.scales.ndim == codes.ndim else jnp.expand_dims(moment.scales, d)
    max_code, squarings = (255.0, 3) if non_negative else (127.0, 2)
    root = codes.astype(jnp.float32) / max_code
    fractions = jnp.sign(root) * square_repeatedly(root, squarings)
    return (split_blocks(fractions, d) * jnp.expand_dims(scales, d + 1)).reshape(codes.shape)


def square_repeatedly(x: jax.Array, squarings: int) -> jax.Array:
    """Returns x ** 2 ** squarings."""
    for _ in range(squarings):
        x = x * x
    return x


def split_blocks(x: jax.Array, d: int) -> jax.Array:
    """Reshapes dimension d to [number of blocks, block length]."""
    length = block_length(x.shape[d])
    return x.reshape(*x.shape[:d], x.shape[d] // length, length, *x.shape[d + 1 :])


HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def offload_moments(tx: optax.GradientTransformation, is_stacked: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` with moments in host memory. If update() is called with ok=False, moments do not change.

    tx: an elementwise transformation, such as Adam, whose state is a tuple of scalars and of trees like the parameters.
    is_stacked: a tree like the parameters, True for parameters with a leading layer axis.
    """

    def update(updates, state: Any, params=None, *, ok: Any = None, **extra):
        grads, treedef = jax.tree.flatten(updates)
        is_moment = [jax.tree.structure(field) == treedef for field in state]
        old = list(zip(*[treedef.flatten_up_to(field) for field, flag in zip(state, is_moment) if flag]))

        def update_param(grad, moments):
            """Returns (update, new moments in host memory, new scalars)."""
            on_device = iter(jax.device_put(moments, DEVICE))
            before = type(state)(*[next(on_device) if flag else field for field, flag in zip(state, is_moment)])
            param_update, after = cast(tuple[Any, Any], tx.update(grad, before))
            fields = [jnp.where(ok, new, old) for new, old in zip(after, before)]
            on_host = jax.device_put([leaf for leaf, flag in zip(fields, is_moment) if flag], HOST)
            return param_update, on_host, [leaf for leaf, flag in zip(fields, is_moment) if not flag]

        def update_layers(grads, moments):
            """Applies update_param() layer by layer, overwriting the arrays in place."""

            def layer(i, arrays):
                at = lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
                put = lambda array, part: jax.lax.dynamic_update_index_in_dim(array, part, i, 0)
                grads, moments, _ = arrays
                layer_update, new, scalars = update_param(at(grads), [at(leaf) for leaf in moments])
                return put(grads, layer_update), [put(leaf, part) for leaf, part in zip(moments, new)], scalars

            scalars = [field for field, flag in zip(state, is_moment) if not flag]
            return jax.lax.fori_loop(0, grads.shape[0], layer, (grads, list(moments), scalars))

        flags = flags_like(updates, is_stacked)
        leaves = zip(grads, old, flags, strict=True)
        results = [(update_layers if flag else update_param)(*leaf) for *leaf, flag in leaves]
        new_updates, moments, scalars = zip(*results)
        trees = iter([treedef.unflatten(leaves) for leaves in zip(*moments)])
        new_scalars = iter(scalars[0])
        fields = [next(trees) if flag else next(new_scalars) for flag in is_moment]
        return treedef.unflatten(new_updates), type(state)(*fields)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def offload_params(
    make_tx: Callable[[Any], optax.GradientTransformation], groups: Any, is_stacked: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation of parameters in host memory, whose updates are the new parameters.

    If ok is False, the updates are the old parameters. make_tx: function from a ParamGroup to an elementwise
    transformation without moments. groups: a tree of ParamGroup like the parameters. is_stacked: see offload_moments().
    """

    def update(updates, state: Any, params=None, *, ok: Any = None, **extra):
        def update_param(grad, param, group):
            on_device, tx = jax.device_put(param, DEVICE), make_tx(group)
            param_update, _ = tx.update(grad, tx.init(on_device), on_device, **extra)
            new: Any = optax.apply_updates(on_device, param_update)
            return jax.device_put(jnp.where(ok, new, on_device), HOST)

        def update_layers(grads, params, group):
            def layer(i, params):
                at = lambda array: jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
                return jax.lax.dynamic_update_index_in_dim(params, update_param(at(grads), at(params), group), i, 0)

            return jax.lax.fori_loop(0, grads.shape[0], layer, params)

        def new_param(grad, param, group, flag):
            return grad if is_masked(grad) else (update_layers if flag else update_param)(grad, param, group)

        return jax.tree.map(new_param, updates, params, groups, is_stacked, is_leaf=is_masked), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def flags_like(updates: Any, flags: Any) -> list[bool]:
    """Returns the flags of the parameters whose updates are not masked by optax."""
    leaves = jax.tree.leaves(updates, is_leaf=is_masked)
    return [flag for flag, leaf in zip(jax.tree.leaves(flags), leaves, strict=True) if not is_masked(leaf)]
