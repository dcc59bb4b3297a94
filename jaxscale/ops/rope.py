"""Rotary position embedding (arXiv:2104.09864), each head's halves turned against each other as in Llama checkpoints.

B batch  T position  N heads  H head dim  h half of H
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.ops.config import RopeScaling


class Rotation(NamedTuple):
    """Cosine and sine of every position's angles, float32 [B, T, h]. Made once, it serves every layer."""

    cos_BTh: jax.Array
    sin_BTh: jax.Array


def frequencies(head_dim: int, base: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle per position of each pair, float64 [h, radians]. llama3 is the rule published with Llama 3.1."""
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even: rotary positions turn pairs of dimensions")
    freq_h = base ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return freq_h
    if scaling.name == "linear":
        return freq_h / scaling.factor
    turns_h = scaling.original_max_len * freq_h / (2 * math.pi)  # full turns within the original context
    kept_h = (turns_h - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_h = np.clip(kept_h, 0.0, 1.0)
    return freq_h * (kept_h + (1 - kept_h) / scaling.factor)


def make_rotation(positions_BT: jax.Array, head_dim: int, base: float, scaling: RopeScaling | None = None) -> Rotation:
    """The rotation of each position; angles are float32, exact for positions below 2**24."""
    freq_11h = jnp.asarray(frequencies(head_dim, base, scaling), jnp.float32)[None, None, :]
    angle_BTh = positions_BT.astype(jnp.float32)[:, :, None] * freq_11h
    return Rotation(jnp.cos(angle_BTh), jnp.sin(angle_BTh))


@jax.custom_vjp
def rotate(x_BTNH: jax.Array, rotation: Rotation) -> jax.Array:
    """x with each head's halves turned by the rotation; computed in float32, returned in x.dtype."""
    cos_BT1h, sin_BT1h = rotation.cos_BTh[:, :, None, :], rotation.sin_BTh[:, :, None, :]
    first_BTNh, second_BTNh = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = (first_BTNh * cos_BT1h - second_BTNh * sin_BT1h, second_BTNh * cos_BT1h + first_BTNh * sin_BT1h)
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)


def _rotate_forward(x_BTNH, rotation):
    return rotate(x_BTNH, rotation), rotation


def _rotate_backward(rotation, dy_BTNH):
    back = Rotation(rotation.cos_BTh, -rotation.sin_BTh)  # a rotation's transpose turns the other way
    return rotate(dy_BTNH, back), None  # positions are integers: the angles need no gradient


rotate.defvjp(_rotate_forward, _rotate_backward)


def stretched(rotation: Rotation, factor: float) -> Rotation:
    """The rotation that also makes its vectors longer, without a rounding of its own."""
    return Rotation(*(factor * part_BTh for part_BTh in rotation))
