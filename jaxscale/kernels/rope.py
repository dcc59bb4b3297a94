"""Rotary position embedding (arXiv:2104.09864) of the two halves of each head, as in Llama checkpoints.

B batch  T position  N heads  H head dim  h half of H
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.kernels.config import RopeScaling


class Rotation(NamedTuple):
    """Cosine and sine of the angles at each position, float32 [B, T, H], computed once for all layers.

    A rotated head is x * cos + swap_halves(x) * sin.
    """

    cos_BTH: jax.Array  # equal in both halves
    sin_BTH: jax.Array  # negated in the first half


def frequencies(head_dim: int, base: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Returns the angle per position of each pair of dimensions in radians, float64 [h]."""
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even, because RoPE rotates pairs of dimensions")
    if scaling is not None and scaling.name == "dynamic":
        base = dynamic_ntk_base(head_dim, base, scaling)
    freq_h = base ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None or scaling.name == "dynamic":
        return freq_h
    if scaling.name == "linear":
        return freq_h / scaling.factor
    if scaling.name == "longrope":
        return freq_h / np.asarray(longrope_factors(scaling))
    unscaled_h = yarn_ramp(head_dim, base, scaling) if scaling.name == "yarn" else llama3_ramp(freq_h, scaling)
    return freq_h * (unscaled_h + (1 - unscaled_h) / scaling.factor)


def llama3_ramp(freq_h: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Returns the weight of each unscaled frequency, from 1 for high to 0 for low frequencies, as in Llama 3.1."""
    turns_h = scaling.original_max_len * freq_h / (2 * math.pi)  # full rotations within the original context
    unscaled_h = (turns_h - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return np.clip(unscaled_h, 0.0, 1.0)


def yarn_ramp(head_dim: int, base: float, scaling: RopeScaling) -> np.ndarray:
    """Returns the weight of each unscaled frequency in YaRN, linear in its index (arXiv:2309.00071, section 3.2)."""

    def pair_index(turns: float) -> float:
        """Returns the index of the pair with this number of rotations within the original context."""
        return head_dim * math.log(scaling.original_max_len / (2 * math.pi * turns)) / (2 * math.log(base))

    begin, end = pair_index(scaling.beta_fast), pair_index(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, head_dim - 1)
    end += 0.001 * (begin == end)  # a step function, as in transformers
    return 1.0 - np.clip((np.arange(head_dim // 2) - begin) / (end - begin), 0.0, 1.0)


def dynamic_ntk_base(head_dim: int, base: float, scaling: RopeScaling) -> float:
    """Returns the RoPE base for sequences of longest_row tokens with dynamic NTK scaling.

    transformers uses the longest sequence in each batch instead, so results depend on the other sequences.
    """
    assert scaling.longest_row is not None  # dynamic is in BY_LENGTH
    ratio = scaling.factor * scaling.longest_row / scaling.original_max_len - (scaling.factor - 1)
    return base * ratio ** (head_dim / (head_dim - 2))


def longrope_factors(scaling: RopeScaling) -> tuple[float, ...]:
    """Returns the longrope divisors for longest_row tokens. transformers uses the longest sequence in each batch."""
    assert scaling.longest_row is not None  # longrope is in BY_LENGTH
    return scaling.long_factor if scaling.longest_row > scaling.original_max_len else scaling.short_factor


def attention_factor(scaling: RopeScaling | None) -> float:
    """Returns the factor for queries and keys, 1 except with yarn (arXiv:2309.00071, section 3.4) and longrope."""
    if scaling is None or scaling.name not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.name == "longrope":
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_len))
    if scaling.mscale is None or scaling.mscale_all_dim is None:  # both or neither are set
        return yarn_mscale(scaling, 1.0)
    return yarn_mscale(scaling, scaling.mscale) / yarn_mscale(scaling, scaling.mscale_all_dim)


def yarn_mscale(scaling: RopeScaling, weight: float) -> float:
    """Returns YaRN's attention temperature for longer contexts (arXiv:2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(scaling.factor) + 1.0


def latent_logit_scale(scaling: RopeScaling | None) -> float:
    """Returns the factor for logits of latent attention, which is 1 without mscale_all_dim."""
    if scaling is None or scaling.name != "yarn" or scaling.mscale_all_dim is None or scaling.attention_factor:
        return 1.0
    return yarn_mscale(scaling, scaling.mscale_all_dim) ** 2


def make_rotation(positions_BT: jax.Array, head_dim: int, base: float, scaling: RopeScaling | None = None) -> Rotation:
    """Returns the rotation of each position, times attention_factor(). Positions below 2**24 are exact in float32."""
    freq_11h = jnp.asarray(frequencies(head_dim, base, scaling), jnp.float32)[None, None, :]
    angle_BTh = positions_BT.astype(jnp.float32)[:, :, None] * freq_11h
    cos_BTh, sin_BTh = jnp.cos(angle_BTh), jnp.sin(angle_BTh)
    if (factor := attention_factor(scaling)) != 1.0:
        cos_BTh, sin_BTh = factor * cos_BTh, factor * sin_BTh
    rotation = Rotation(jnp.concatenate([cos_BTh, cos_BTh], -1), jnp.concatenate([-sin_BTh, sin_BTh], -1))
    return Rotation(*lax.optimization_barrier(rotation))  # without it XLA:TPU recomputes the rotation in each layer


def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates the halves of each head, in float32. Returns x.dtype."""
    return _rotate(rotate_halves, x_BTNH, rotation)


def rotate_on_tpu(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Returns a result bitwise equal to rotate(), in one pass over x for bfloat16.

    Whole heads fill the lanes of a TPU, but halves do not. With halves, XLA:TPU keeps x in float32, which doubles the
    time of the preceding projection. For the queries of a 7B model and 12 sequences of 4096 on v6e, XLA's estimate is
    8.3 million cycles instead of 12.4 million (jax 0.12.0.1, libtpu 0.0.51, 2026-11-23).
    """
    return _rotate(rotate_halves if x_BTNH.dtype == jnp.float32 else rotate_by_matmul, x_BTNH, rotation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(rotate_fn, x_BTNH, rotation):
    return rotate_fn(x_BTNH, rotation)


def _rotate_forward(rotate_fn, x_BTNH, rotation):
    return rotate_fn(x_BTNH, rotation), rotation


def _rotate_backward(rotate_fn, rotation, dy_BTNH):
    inverse = Rotation(rotation.cos_BTH, -rotation.sin_BTH)  # the transpose
    return rotate_fn(dy_BTNH, inverse), None  # angles need no gradient, because positions are integers


_rotate.defvjp(_rotate_forward, _rotate_backward)


def rotate_halves(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates heads by slicing their halves."""
    half = x_BTNH.shape[-1] // 2
    cos_BT1h, sin_BT1h = rotation.cos_BTH[:, :, None, :half], rotation.sin_BTH[:, :, None, half:]
    first_BTNh, second_BTNh = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    halves = (first_BTNh * cos_BT1h - second_BTNh * sin_BT1h, second_BTNh * cos_BT1h + first_BTNh * sin_BT1h)
    return jnp.concatenate(halves, axis=-1).astype(x_BTNH.dtype)


def rotate_by_matmul(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates whole heads. Their halves are swapped by an exact matmul with a permutation matrix."""
    H = x_BTNH.shape[-1]
    swap_HH = jnp.asarray(np.roll(np.eye(H), H // 2, axis=1), x_BTNH.dtype)
    swapped_BTNH = jnp.einsum("BTNH,HI->BTNI", x_BTNH, swap_HH, preferred_element_type=jnp.float32)
    cos_part_BTNH = x_BTNH.astype(jnp.float32) * rotation.cos_BTH[:, :, None]
    return (cos_part_BTNH + swapped_BTNH * rotation.sin_BTH[:, :, None]).astype(x_BTNH.dtype)


def scale_rotation(rotation: Rotation, factor: float) -> Rotation:
    """Returns a rotation that also multiplies by a factor, without a separate rounding."""
    return Rotation(*(factor * part_BTH for part_BTH in rotation))
