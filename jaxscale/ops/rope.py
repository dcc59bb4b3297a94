"""Rotary position embedding (arXiv:2104.09864), each head's halves turned against each other as in Llama checkpoints.

B batch  T position  N heads  H head dim  h half of H
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.ops.config import RopeScaling


class Rotation(NamedTuple):
    """Of every position's angles, float32 [B, T, H]. Made once, it serves every layer.

    What is multiplied with a head and, the sine, with the head that has its halves changed about.
    """

    cos_BTH: jax.Array  # the same for both halves
    sin_BTH: jax.Array  # negative for the first half


def frequencies(head_dim: int, base: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle per position of each pair, float64 [h, radians]."""
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even: rotary positions turn pairs of dimensions")
    if scaling is not None and scaling.name == "dynamic":
        base = stretched_base(head_dim, base, scaling)
    freq_h = base ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None or scaling.name == "dynamic":
        return freq_h
    if scaling.name == "linear":
        return freq_h / scaling.factor
    if scaling.name == "longrope":
        return freq_h / np.asarray(factors_by_length(scaling))
    kept_h = kept_by_yarn(head_dim, base, scaling) if scaling.name == "yarn" else kept_by_llama3(freq_h, scaling)
    return freq_h * (kept_h + (1 - kept_h) / scaling.factor)


def kept_by_llama3(freq_h: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """How much of each rotation stays as it is, from 1 of fast ones to 0 of slow ones: published with Llama 3.1."""
    turns_h = scaling.original_max_len * freq_h / (2 * math.pi)  # full turns within the original context
    kept_h = (turns_h - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return np.clip(kept_h, 0.0, 1.0)


def kept_by_yarn(head_dim: int, base: float, scaling: RopeScaling) -> np.ndarray:
    """The same by YaRN (arXiv:2309.00071, section 3.2), with a ramp that is linear in the pair's number."""

    def pair_with(turns: float) -> float:
        """The number of the pair that turns so often within the original context."""
        return head_dim * math.log(scaling.original_max_len / (2 * math.pi * turns)) / (2 * math.log(base))

    begin, end = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, head_dim - 1)
    end += 0.001 * (begin == end)  # a step, where transformers has it
    return 1.0 - np.clip((np.arange(head_dim // 2) - begin) / (end - begin), 0.0, 1.0)


def stretched_base(head_dim: int, base: float, scaling: RopeScaling) -> float:
    """RoPE's theta for rows of longest_row tokens by dynamic NTK scaling: `base` itself up to original_max_len.

    transformers takes the longest row of each batch instead, so that one row is computed in another way beside others.
    """
    assert scaling.longest_row is not None  # dynamic is one of BY_LENGTH
    longer = scaling.factor * scaling.longest_row / scaling.original_max_len - (scaling.factor - 1)
    return base * longer ** (head_dim / (head_dim - 2))


def factors_by_length(scaling: RopeScaling) -> tuple[float, ...]:
    """longrope's divisors for rows of longest_row tokens. transformers chooses by the longest row of each batch."""
    assert scaling.longest_row is not None  # longrope is one of BY_LENGTH
    return scaling.long_factor if scaling.longest_row > scaling.original_max_len else scaling.short_factor


def attention_factor(scaling: RopeScaling | None) -> float:
    """What queries and keys are multiplied with: 1, but for yarn (arXiv:2309.00071, section 3.4) and longrope."""
    if scaling is None or scaling.name not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.name == "longrope":
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_len))
    if scaling.mscale is None or scaling.mscale_all_dim is None:  # given both, or neither
        return temperature(scaling, 1.0)
    return temperature(scaling, scaling.mscale) / temperature(scaling, scaling.mscale_all_dim)


def temperature(scaling: RopeScaling, weight: float) -> float:
    """YaRN's factor, by which scores fall off less in longer contexts (arXiv:2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(scaling.factor) + 1.0


def score_factor(scaling: RopeScaling | None) -> float:
    """What latent attention multiplies all scores with, of both parts of a head: 1 without mscale_all_dim."""
    if scaling is None or scaling.name != "yarn" or scaling.mscale_all_dim is None or scaling.attention_factor:
        return 1.0
    return temperature(scaling, scaling.mscale_all_dim) ** 2


def make_rotation(positions_BT: jax.Array, head_dim: int, base: float, scaling: RopeScaling | None = None) -> Rotation:
    """The rotation of each position, times attention_factor; angles are float32, exact for positions below 2**24."""
    freq_11h = jnp.asarray(frequencies(head_dim, base, scaling), jnp.float32)[None, None, :]
    angle_BTh = positions_BT.astype(jnp.float32)[:, :, None] * freq_11h
    cos_BTh, sin_BTh = jnp.cos(angle_BTh), jnp.sin(angle_BTh)
    if (longer := attention_factor(scaling)) != 1.0:
        cos_BTh, sin_BTh = longer * cos_BTh, longer * sin_BTh
    rotation = Rotation(jnp.concatenate([cos_BTh, cos_BTh], -1), jnp.concatenate([-sin_BTh, sin_BTh], -1))
    return Rotation(*lax.optimization_barrier(rotation))  # XLA:TPU would make it anew in each layer, to save its memory


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """x with each head's halves turned by the rotation; computed in float32, returned in x.dtype."""
    return _rotate(by_halves, x_BTNH, rotation)


def rotate_on_tpu(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """What rotate returns, bit for bit, in one pass over x where it is bfloat16.

    A TPU's lanes are filled by whole heads, and by halves in part. Halves also let XLA:TPU leave x in float32, which
    takes the product before them twice as long. Estimated by it for the queries of a 7B, product and rotation together,
    12 rows of 4096 on v6e: 8.3 million cycles instead of 12.4 (jax 0.12.0.1, libtpu 0.0.51, 2026-11-23).
    """
    return _rotate(by_halves if x_BTNH.dtype == jnp.float32 else by_product, x_BTNH, rotation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(turn, x_BTNH, rotation):
    return turn(x_BTNH, rotation)


def _rotate_forward(turn, x_BTNH, rotation):
    return turn(x_BTNH, rotation), rotation


def _rotate_backward(turn, rotation, dy_BTNH):
    back = Rotation(rotation.cos_BTH, -rotation.sin_BTH)  # a rotation's transpose turns the other way
    return turn(dy_BTNH, back), None  # positions are integers: the angles need no gradient


_rotate.defvjp(_rotate_forward, _rotate_backward)


def by_halves(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """The rotation of each half by itself."""
    half = x_BTNH.shape[-1] // 2
    cos_BT1h, sin_BT1h = rotation.cos_BTH[:, :, None, :half], rotation.sin_BTH[:, :, None, half:]
    first_BTNh, second_BTNh = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = (first_BTNh * cos_BT1h - second_BTNh * sin_BT1h, second_BTNh * cos_BT1h + first_BTNh * sin_BT1h)
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


def by_product(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """The rotation of whole heads. Their halves change places in a product with ones and zeros, which is exact."""
    H = x_BTNH.shape[-1]
    swap_HH = jnp.asarray(np.roll(np.eye(H), H // 2, axis=1), x_BTNH.dtype)
    swapped_BTNH = jnp.einsum("BTNH,HI->BTNI", x_BTNH, swap_HH, preferred_element_type=jnp.float32)
    turned_BTNH = x_BTNH.astype(jnp.float32) * rotation.cos_BTH[:, :, None]
    return (turned_BTNH + swapped_BTNH * rotation.sin_BTH[:, :, None]).astype(x_BTNH.dtype)


def stretched(rotation: Rotation, factor: float) -> Rotation:
    """The rotation that also makes its vectors longer, without a rounding of its own."""
    return Rotation(*(factor * part_BTH for part_BTH in rotation))
