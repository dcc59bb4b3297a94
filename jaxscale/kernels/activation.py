"""Activations of feed-forward layers, computed in float32 and returned in the input's dtype."""

import jax
import jax.numpy as jnp

F32 = jnp.float32


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up (arXiv:2002.05202). The custom backward pass saves only gate and up, in their dtypes."""
    return (jax.nn.silu(gate.astype(F32)) * up.astype(F32)).astype(gate.dtype)


def _swiglu_forward(gate, up):
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(saved, dy):
    gate, up = saved
    gate32, dy32 = gate.astype(F32), dy.astype(F32)
    sigmoid = jax.nn.sigmoid(gate32)
    dgate = dy32 * up.astype(F32) * sigmoid * (1 + gate32 * (1 - sigmoid))
    return dgate.astype(gate.dtype), (dy32 * gate32 * sigmoid).astype(up.dtype)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@jax.custom_vjp
def geglu_tanh(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns gelu(gate) * up (arXiv:2002.05202) with tanh GELU. The backward pass saves only gate and up."""
    return (jax.nn.gelu(gate.astype(F32), approximate=True) * up.astype(F32)).astype(gate.dtype)


def _geglu_forward(gate, up):
    return geglu_tanh(gate, up), (gate, up)


def _geglu_backward(saved, dy):
    gate, up = saved
    gelu32, vjp = jax.vjp(lambda gate32: jax.nn.gelu(gate32, approximate=True), gate.astype(F32))
    dy32 = dy.astype(F32)
    (dgate,) = vjp(dy32 * up.astype(F32))
    return dgate.astype(gate.dtype), (dy32 * gelu32).astype(up.dtype)


geglu_tanh.defvjp(_geglu_forward, _geglu_backward)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Returns GELU in its tanh form, as in GPT-2 (arXiv:1606.08415)."""
    return jax.nn.gelu(x.astype(F32), approximate=True).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """Returns GELU with the exact normal CDF (arXiv:1606.08415)."""
    return jax.nn.gelu(x.astype(F32), approximate=False).astype(x.dtype)
