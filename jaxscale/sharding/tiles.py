"""What can be scattered well from a TPU's memory, where an array's last two dimensions lie in tiles of 8 x 128 numbers.

Tiles: openxla.org/xla/tiled_layout. What XLA:TPU does with which shape was read off compiled programs: jax 0.10.2 with
libtpu 0.0.42.1 and jax 0.12.0.1 with libtpu 0.0.50.1, v5e, v5p and v6e, 8 to 512 chips, 2026-11-22.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale.units import divisors

LANES, SUBLANES = 128, 8  # of a tile, which the last two axes are filled up to
# It seems to take equal groups of tiles in turn, where some are neither too small nor too large. Summed whole were
# matrices whose groups are of at least 307 tiles on lines of 2 chips, 251 on lines of 4 and 167 on lines of 8. So were
# groups of 113 to 131 on v5p:8x8x8, which is left so: to pad GPT-2's 3 x 131 tiles moves 4% more in HBM on v5e:2x4.
SMALLEST_GROUP, LARGEST_GROUP = 16, 150  # multiples of 16 tiles: all on lines of 2 to 8, not all on lines of 16 v5e


def on_tpu(mesh: Mesh) -> bool:
    """True where the devices are TPUs."""
    return mesh.devices.flat[0].platform == "tpu"


def to_scatter(x: jax.Array) -> jax.Array:
    """x in a shape that XLA:TPU scatters along the first dimension; `from_scatter` gives a part its own shape back.

    Some shapes it sums whole on every device, which sends twice the bytes. One is a matrix whose tiles across fall into
    no equal groups of a middling size: 151,936 columns are 1,187 tiles, a prime. It is padded by 15 tiles at most.
    Another are last dimensions of fewer rows than a tile has, as 4 heads: they become one. (Of one head it is an error
    of the compiler's on v5e:8x8, "not implemented for 2nd-minor compaction".)
    """
    if x.ndim > 2 and x.shape[-2] < SUBLANES:
        x = x.reshape(len(x), -1)
    if x.ndim == 2 and not falls_into_groups(-(-x.shape[1] // LANES)):
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (SMALLEST_GROUP * LANES))))
    return x


def from_scatter(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A part of what `to_scatter` returned, with the dimensions after the first that it was given."""
    return x if x.shape[1:] == shape else x[:, : math.prod(shape)].reshape(-1, *shape)


def falls_into_groups(tiles: int) -> bool:
    """True where that many tiles can be taken in equal groups, or at once."""
    fits = lambda group: SMALLEST_GROUP <= group <= LARGEST_GROUP
    return tiles <= LARGEST_GROUP or any(map(fits, divisors(tiles)))
