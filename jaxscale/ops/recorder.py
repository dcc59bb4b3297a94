"""Intermediates of a model: what the statistics program records of activations as they pass. A training step has no
recorder and no trace of one, but for the largest scores that a clip of them needs (optim.qk_clip).

A model hands each array to sow(), which returns it as it is. Numbers of a layer leave the function that computes it,
which may be a loop or be run again for the backward pass, as results beside the residual stream: run_stack() of
models.layers takes them from end_layer() and hands those of all its layers to end_stack(). A recorder that carries
something into each layer, as a cache of keys does (sampling/cache.py), has it from layers() by the same way.

B batch  T position  D embed  L layers of a stack
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.ops.attention.xla import Scope, as_scope
from jaxscale.sharding.tensor_axis import TensorAxis

ATTENTION, ACROSS, MLP, ACTIVATION = "attention", "across", "mlp", "activation"  # what is recorded of a layer
POSITIONS = "positions"  # how many hold text: what the sums are divided by
SCORES = "scores"  # the largest of each head
SOWN = "sown"  # under this name a loss returns the intermediates, beside its named sums


class Intermediates(NamedTuple):
    """Of a layer on this device, float32[]; of a stack of layers, float32[L]."""

    sums: dict[str, jax.Array]  # over the positions with text, of the mean square of an array's entries
    maxima: dict[str, jax.Array]  # largest scores of attention; float32[L, N] where they are of each head


class Recorder:
    """Records nothing."""

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """`attend`, with its queries and keys recorded."""
        return attend

    def wrap_latent(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """`attend` of latent attention, whose keys and values are not expanded yet (models/latent.py)."""
        return attend

    def sow(self, name: str, x_BTD: jax.Array) -> jax.Array:
        """x_BTD, of the device's own positions."""
        return x_BTD

    def layers(self) -> Any:
        """What each layer of the next stack is given: a tree with a leading axis of layers, or None."""
        return None

    def begin_layer(self, held: Any) -> None:
        """Takes what layers() has for the layer that begins."""

    def end_layer(self, x_BTD: jax.Array) -> Any:
        """The intermediates of the layer; x_BTD: the residual stream after it."""
        return None

    def end_stack(self, seen: Any) -> None:
        """Takes the intermediates of each layer of a stack."""

    def parts(self) -> dict[str, tuple[Intermediates, ...]]:
        """The intermediates of all stacks, in their order, under the name SOWN; {} where nothing is recorded."""
        return {}


NO_RECORDER = Recorder()


class StatisticsRecorder(Recorder):
    """Records one trace of one model. Nothing that is recorded has a gradient.

    largest: (q, k, segments, causal=, bias_NTS=, scale=) -> float32[], of the device's own rows and heads; name: of
    that number. Attention also tells which positions of a layer hold text: padding is left out.
    """

    def __init__(self, name: str, largest: Callable[..., jax.Array], tensor: TensorAxis):
        self.name, self.largest, self.tensor = name, largest, tensor
        self.layer, self.stacks = Intermediates({}, {}), []
        self.text_BT: jax.Array | None = None

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """`attend`, with its queries and keys recorded."""

        def seen_attend(q_BTNH, k_BSKH, v_BSKH, segments: jax.Array | Scope, **how):
            self.text_BT = self.tensor.local(as_scope(segments).segment_ids_BT > 0)
            found = self.largest(lax.stop_gradient(q_BTNH), lax.stop_gradient(k_BSKH), segments, **how)
            self.layer.maxima[self.name] = jnp.maximum(self.layer.maxima.get(self.name, -jnp.inf), found)
            return attend(q_BTNH, k_BSKH, v_BSKH, segments, **how)

        return seen_attend

    def sow(self, name: str, x_BTD: jax.Array) -> jax.Array:
        """x_BTD, of the device's own positions."""
        assert self.text_BT is not None, "a layer's attention comes before anything else that is recorded of it"
        mean_BT = jnp.mean(jnp.square(lax.stop_gradient(x_BTD).astype(jnp.float32)), axis=-1)
        self.layer.sums[name] = jnp.sum(mean_BT, where=self.text_BT)
        return x_BTD

    def end_layer(self, x_BTD: jax.Array) -> Intermediates:
        """The intermediates of the layer; x_BTD: the residual stream after it."""
        self.sow(ACTIVATION, x_BTD)
        assert self.text_BT is not None  # as sow() has found
        self.layer.sums[POSITIONS] = jnp.sum(self.text_BT, dtype=jnp.float32)
        seen, self.layer, self.text_BT = self.layer, Intermediates({}, {}), None
        return seen

    def end_stack(self, seen: Intermediates) -> None:
        """Takes the intermediates of each layer of a stack."""
        self.stacks.append(seen)

    def parts(self) -> dict[str, tuple[Intermediates, ...]]:
        """The intermediates of all stacks, in their order, under the name SOWN."""
        return {SOWN: tuple(self.stacks)}


class ScoreRecorder(Recorder):
    """Records the largest score of each head, and nothing else. It has no gradient.

    largest: (q, k, segments, causal=, scale=) -> float32[N], of the device's own rows and heads.
    """

    def __init__(self, largest: Callable[..., jax.Array], tensor: TensorAxis):
        self.largest, self.tensor = largest, tensor
        self.layer_N: jax.Array | None = None
        self.stacks: list[Intermediates] = []

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """`attend`, with its queries and keys recorded."""

        def seen_attend(q_BTNH, k_BSKH, v_BSKH, segments: jax.Array | Scope, **how):
            self.layer_N = self.largest(lax.stop_gradient(q_BTNH), lax.stop_gradient(k_BSKH), segments, **how)
            return attend(q_BTNH, k_BSKH, v_BSKH, segments, **how)

        return seen_attend

    def end_layer(self, x_BTD: jax.Array) -> Intermediates:
        """The largest scores of the layer, of all heads: those of other devices are -inf."""
        found_N, self.layer_N = self.layer_N, None
        assert found_N is not None, "a layer ends without attention"
        return Intermediates({}, {SCORES: self.tensor.pad_remote(found_N, -jnp.inf)})

    def end_stack(self, seen: Intermediates) -> None:
        """Takes the scores of each layer of a stack."""
        self.stacks.append(seen)

    def parts(self) -> dict[str, tuple[Intermediates, ...]]:
        """Those of all stacks, in their order, under the name SOWN."""
        return {SOWN: tuple(self.stacks)}
