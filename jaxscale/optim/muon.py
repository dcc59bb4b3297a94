"""Muon: momentum of a matrix, orthogonalised (kellerjordan.github.io/posts/muon), as large as AdamW's updates are."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from jaxscale.optim.exchange import Place, on_whole_matrices
from jaxscale.optim.streamed import is_masked

COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # those of the post
RMS = 0.2  # of an update, about AdamW's, so that its rate and decay carry over: arXiv:2502.16982, section 2.2
AT_ONCE = 2**24  # numbers of the matrices that are worked on at one time: one of 4096 x 4096


def orthogonalised(places: Sequence[Place], mesh: jax.sharding.Mesh, dtype: str) -> optax.GradientTransformation:
    """Updates become 0.2 sqrt(max(m, n)) times the nearest orthogonal matrix, about, each m x n matrix by itself.

    places: of all parameters, in the order of their tree. dtype: in which matrices are exchanged and iterated.
    """

    def update(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates, is_leaf=is_masked)
        chosen = [number for number, leaf in enumerate(leaves) if not is_masked(leaf)]
        narrow = [leaves[number].astype(dtype) for number in chosen]
        done = on_whole_matrices(scaled_polar, narrow, [places[number] for number in chosen], mesh)
        for number, new in zip(chosen, done, strict=True):
            leaves[number] = new.astype(leaves[number].dtype)
        return treedef.unflatten(leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scaled_polar(x_bmn: jax.Array) -> jax.Array:
    """RMS sqrt(max(m, n)) times the orthogonalised matrices: of root mean square RMS where they have full rank."""
    return RMS * math.sqrt(max(x_bmn.shape[1:])) * polar(x_bmn)


def polar(x_bmn: jax.Array, coefficients: tuple = COEFFICIENTS, steps: int = STEPS) -> jax.Array:
    """U f(S) V' of each matrix U S V', f(s) being near 1 (0.68 to 1.14 of all but the smallest s)."""
    number, *shape = x_bmn.shape
    few = max(1, AT_ONCE // math.prod(shape))
    iterate = lambda x_mn: newton_schulz(x_mn, coefficients, steps)
    if number <= few:  # a loop of one turn would keep XLA:CPU from its fast products: 1.6 times the time
        return jax.vmap(iterate)(x_bmn)
    return jax.lax.map(iterate, x_bmn, batch_size=few)


def newton_schulz(x_mn: jax.Array, coefficients: tuple, steps: int) -> jax.Array:
    """The iteration on one matrix. Products take x's dtype and add up in float32: XLA:CPU is fast with no other."""
    if x_mn.shape[0] > x_mn.shape[1]:
        return newton_schulz(x_mn.T, coefficients, steps).T
    product = lambda spec, *pair: jnp.einsum(spec, *pair, preferred_element_type=jnp.float32).astype(x_mn.dtype)
    wide_mn = x_mn.astype(jnp.float32)
    x_mn = (wide_mn / (jnp.linalg.norm(wide_mn) + EPS)).astype(x_mn.dtype)
    a, b, c = coefficients
    for _ in range(steps):
        gram_mm = product("mn,kn->mk", x_mn, x_mn)
        x_mn = a * x_mn + product("mk,kn->mn", b * gram_mm + c * product("mk,kl->ml", gram_mm, gram_mm), x_mn)
    return x_mn
