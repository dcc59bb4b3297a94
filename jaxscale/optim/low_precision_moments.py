"""Moments that are kept in 16 or 8 bits between steps, and rounded up or down at random so that the mean is right.

Rounded to nearest, an average that moves by less than half of what tells two numbers apart stands still: with b2 =
0.999 a second moment in bfloat16 never falls. The random bits are a hash of the step and of the number's place, the
same on every mesh.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxscale.optim.offload import is_masked

FIELDS = ("mu", "nu", "trace")  # of optax's states: those that are moments
POSITIVE = "nu"
LONGEST_BLOCK = 256  # numbers that share a scale; bitsandbytes' own (arXiv:2110.02861 has 2048)
SHARED_BY = 16  # devices that may cut an axis, and still have whole blocks each
STREAM = ("embed", "expert_embed", "latent")  # axes that many devices cut: no block lies along one if it need not
STACK = ("layers", "experts")


class Blocks(NamedTuple):
    """A moment in 8 bits.

    A code stands for (code / its largest) ** 4 of its block's largest number, ** 8 of second moments: about 3% apart
    there, and 31% at one ten-thousandth of it, or of its root. Evenly spaced codes would make most numbers 0.
    """

    codes: jax.Array  # int8, or uint8 where no number is negative; shape and axes are the parameter's
    scales: jax.Array  # float32: of each block; along its axis there are as many as blocks, or that axis is left out


def stored(tx: optax.GradientTransformation, dtype: str, axes_tree: Any) -> optax.GradientTransformationExtraArgs:
    """`tx` with moments that rest as bfloat16 or int8 (see Blocks). Its update takes step, an int32[].

    axes_tree: a tree like the parameters, of logical axes.
    """
    if dtype == "float32":
        return optax.with_extra_args_support(tx)
    axes = jax.tree.leaves(axes_tree, is_leaf=lambda leaf: isinstance(leaf, tuple))

    def each(f, state):
        """The state with f(leaf, its axes, field, number of the leaf) for each moment."""

        def renew(name):
            leaves, treedef = jax.tree.flatten(getattr(state, name), is_leaf=lambda x: is_masked(x) or is_blocks(x))
            if not leaves:  # optax's stand-in for parameters
                return getattr(state, name)
            numbered = enumerate(zip(leaves, axes, strict=True))
            return treedef.unflatten([x if is_masked(x) else f(x, a, name, n) for n, (x, a) in numbered])

        return state._replace(**{name: renew(name) for name in FIELDS if name in state._fields})

    def pack(state, step):
        def one(x, axes, name, number):
            noise = random_bits(x.shape, step, number * len(FIELDS) + FIELDS.index(name))
            if dtype == "bfloat16":
                return to_bfloat16(x, noise)
            return to_blocks(x, block_dim(axes), noise, positive=name == POSITIVE)

        return each(one, state)

    def unpack(state):
        back = lambda x, axes, name, number: from_blocks(x, block_dim(axes)) if is_blocks(x) else x.astype(jnp.float32)
        return each(back, state)

    def update(updates, state, params=None, *, step: Any = None, **extra):
        new, state = tx.update(updates, unpack(state), params)
        return new, pack(state, step)

    return optax.GradientTransformationExtraArgs(lambda params: pack(tx.init(params), 0), update)


def is_blocks(leaf: Any) -> bool:
    """True for a moment in 8 bits."""
    return isinstance(leaf, Blocks)


def block_dim(axes: tuple[str, ...]) -> int:
    """The dimension along which the blocks of a parameter with these logical axes lie."""
    whole = [d for d, axis in enumerate(axes) if axis not in STREAM + STACK]
    return whole[-1] if whole else len(axes) - 1


def block_length(length: int) -> int:
    """The numbers of a block along an axis: all, unless a power of 2 leaves each of SHARED_BY devices whole blocks."""
    fitting = math.gcd(length // SHARED_BY, LONGEST_BLOCK) if length % SHARED_BY == 0 else 1
    return fitting if fitting >= SHARED_BY else length


def scale_axes(axes: tuple[str, ...], codes: Any, scales: Any, parts: Any, whole: str) -> tuple[str, ...]:
    """The logical axes of the scales of a moment. parts: into how many an axis is cut; whole: the axis to name where
    that does not divide the blocks."""
    d = block_dim(axes)
    if scales.ndim < codes.ndim:
        return axes[:d] + axes[d + 1 :]
    return axes[:d] + (axes[d] if scales.shape[d] % parts(axes[d]) == 0 else whole,) + axes[d + 1 :]


def random_bits(shape: tuple[int, ...], step: Any, salt: int) -> jax.Array:
    """uint32 of this shape: a hash (lowbias32, github.com/skeeto/hash-prospector) of step, salt and place."""
    seed = mixed(jnp.asarray(step).astype(jnp.uint32) ^ mixed(jnp.uint32(salt + 1)))
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for d in reversed(range(len(shape))):
        place += lax.broadcasted_iota(jnp.uint32, shape, d) * jnp.uint32(stride % 2**32)
        stride *= shape[d]
    return mixed(mixed(place) ^ seed)


def mixed(x: jax.Array) -> jax.Array:
    """The hash of each uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def to_bfloat16(x: jax.Array, noise: jax.Array) -> jax.Array:
    """One of the two neighbours of each float32, the nearer one more often."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (noise & jnp.uint32(0xFFFF))
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


def to_blocks(x: jax.Array, d: int, noise: jax.Array, *, positive: bool) -> Blocks:
    """x in 8 bits, with blocks along dimension d."""
    size_in_blocks = in_blocks(jnp.abs(x), d)
    most = jnp.max(size_in_blocks, axis=d + 1)
    above_zero = jnp.maximum(jnp.expand_dims(most, d + 1), jnp.finfo(jnp.float32).tiny)
    share = (size_in_blocks / above_zero).reshape(x.shape)
    top, squarings = (255.0, 3) if positive else (127.0, 2)
    level = share
    for _ in range(squarings):
        level = jnp.sqrt(level)
    low = jnp.minimum(jnp.floor(level * top), top - 1)
    below, above = raised(low / top, squarings), raised((low + 1) / top, squarings)
    chance = (noise >> 8).astype(jnp.float32) * 2.0**-24  # uniform in [0, 1)
    code = low + (chance * (above - below) < share - below)
    codes = code.astype(jnp.uint8) if positive else (jnp.sign(x) * code).astype(jnp.int8)
    return Blocks(codes, jnp.squeeze(most, d) if most.shape[d] == 1 else most)


def from_blocks(blocks: Blocks, d: int) -> jax.Array:
    """The float32 numbers that the codes stand for."""
    codes, positive = blocks.codes, blocks.codes.dtype == jnp.uint8
    scales = blocks.scales if blocks.scales.ndim == codes.ndim else jnp.expand_dims(blocks.scales, d)
    top, squarings = (255.0, 3) if positive else (127.0, 2)
    level = codes.astype(jnp.float32) / top
    shares = jnp.sign(level) * raised(level, squarings)
    return (in_blocks(shares, d) * jnp.expand_dims(scales, d + 1)).reshape(codes.shape)


def raised(x: jax.Array, squarings: int) -> jax.Array:
    """x ** 2 ** squarings"""
    for _ in range(squarings):
        x = x * x
    return x


def in_blocks(x: jax.Array, d: int) -> jax.Array:
    """[..., blocks, numbers of a block, ...] in the place of dimension d."""
    length = block_length(x.shape[d])
    return x.reshape(*x.shape[:d], x.shape[d] // length, length, *x.shape[d + 1 :])
