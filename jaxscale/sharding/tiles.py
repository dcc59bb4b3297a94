"""What can be scattered well from a TPU's memory, where an array's last two dimensions lie in tiles of 8 x 128 numbers.

Tiles: openxla.org/xla/tiled_layout. What XLA:TPU does with which shape was read off compiled programs: jax 0.10.2 with
libtpu 0.0.42.1 and jax 0.12.0.1 with libtpu 0.0.50.1, v5e, v5p and v6e, 8 to 256 chips, 2026-11-22.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

SUBLANES, LANES = 8, 128
LARGEST_PRIME = 150  # among the factors of a number of tiles: 131 scatters on lines of up to 8 chips, 167 not on 8
TILES = 16  # multiples of it were scattered on lines of 2 to 16 chips


def has_tiles(mesh: Mesh) -> bool:
    """True where the devices are TPUs."""
    return mesh.devices.flat[0].platform == "tpu"


def to_scatter(x: jax.Array) -> jax.Array:
    """x in a shape that XLA:TPU scatters along the first dimension; `from_scatter` gives a part its own shape back.

    Some shapes it sums whole on every device, which sends twice the bytes. One is a matrix whose tiles across fall into
    no equal groups of a middling size: 151,936 columns are 1,187 tiles, a prime. It is padded by 15 tiles at most.
    Another are last dimensions of fewer rows than a tile has, as 4 heads: they become one.
    """
    if x.ndim > 2 and x.shape[-2] < SUBLANES:
        x = x.reshape(len(x), -1)
    if x.ndim == 2 and largest_prime_factor(-(-x.shape[1] // LANES)) > LARGEST_PRIME:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (TILES * LANES))))
    return x


def from_scatter(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A part of what `to_scatter` returned, with the dimensions after the first that it was given."""
    return x if x.shape[1:] == shape else x[:, : math.prod(shape)].reshape(-1, *shape)


def largest_prime_factor(n: int) -> int:
    """Of n >= 1; 1 has none and is returned."""
    factor, largest = 2, 1
    while n > 1:
        if n % factor:
            factor = factor + 1 if factor * factor <= n else n
        else:
            n, largest = n // factor, factor
    return largest
