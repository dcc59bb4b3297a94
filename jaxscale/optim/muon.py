"""Muon: momentum of a matrix, orthogonalised (kellerjordan.github.io/posts/muon), as large as AdamW's updates are."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxscale.optim.offload import is_masked
from jaxscale.optim.whole_matrices import Place, on_whole_matrices

Iterate = Callable[[jax.Array], jax.Array]
Coefficients = Sequence[tuple[float, float, float]]  # (a, b, c) of each step: a s + b s**3 + c s**5
PUBLISHED, EPS = ((3.4445, -4.7750, 2.0315),) * 5, 1e-7  # those of the post
# The composed polynomials that are nearest to 1 for s in [l, 1], by the method of arXiv:2505.16932, section 3: l is
# 0.03 for 2 steps (0.62 to 1.38 there), 0.01 for 3 (0.73 to 1.27) and 0.003 for 4 (0.80 to 1.20).
OPTIMAL: dict[int, Coefficients] = {
    2: ((7.3625, -20.7434, 15.1606), (2.9175, -2.1824, 0.4755)),
    3: ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526)),
    4: ((8.3837, -24.7659, 18.3571), (4.0434, -3.0114, 0.5695), (3.5056, -2.6267, 0.5257), (2.4901, -1.8343, 0.4368)),
}
MARGIN = 1.01  # of the norm's bound, for products in bfloat16
GRAM_RATIO = 1.5  # columns / rows from which on products of Gram matrices cost less than those of the matrix
RMS = 0.2  # of an update, about AdamW's, so that its rate and decay carry over: arXiv:2502.16982, section 2.2
AT_ONCE = 2**24  # numbers of the matrices that are worked on at one time: one of 4096 x 4096


def orthogonalised(
    places: Sequence[Place], mesh: jax.sharding.Mesh, dtype: str, steps: int | None = None
) -> optax.GradientTransformation:
    """Updates become 0.2 sqrt(max(m, n)) times the nearest orthogonal matrix, about, each m x n matrix by itself.

    places: of all parameters, in the order of their tree. dtype: in which matrices are exchanged and iterated. steps:
    of the iteration with optimal coefficients; None: the published one.
    """
    scaled = functools.partial(scaled_polar, steps=steps)

    def update(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates, is_leaf=is_masked)
        chosen = [number for number, leaf in enumerate(leaves) if not is_masked(leaf)]
        narrow = [leaves[number].astype(dtype) for number in chosen]
        done = on_whole_matrices(scaled, narrow, [places[number] for number in chosen], mesh)
        for number, new in zip(chosen, done, strict=True):
            leaves[number] = new.astype(leaves[number].dtype)
        return treedef.unflatten(leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scaled_polar(x_bmn: jax.Array, steps: int | None = None) -> jax.Array:
    """RMS sqrt(max(m, n)) times the orthogonalised matrices: of root mean square RMS where they have full rank."""
    iterate = newton_schulz if steps is None else functools.partial(polar_express, coefficients=OPTIMAL[steps])
    return RMS * math.sqrt(max(x_bmn.shape[1:])) * polar(x_bmn, iterate)


def polar(x_bmn: jax.Array, iterate: Iterate) -> jax.Array:
    """U f(S) V' of each matrix U S V'. iterate: the same of one matrix with at least as many columns as rows."""
    number, rows, columns = x_bmn.shape
    if rows > columns:
        return polar(x_bmn.swapaxes(1, 2), iterate).swapaxes(1, 2)
    few = max(1, AT_ONCE // (rows * columns))
    if number <= few:  # a loop of one turn would keep XLA:CPU from its fast products: 1.6 times the time
        return jax.vmap(iterate)(x_bmn)
    return jax.lax.map(iterate, x_bmn, batch_size=few)


def newton_schulz(x_mn: jax.Array, coefficients: Coefficients = PUBLISHED) -> jax.Array:
    """The published iteration on one matrix: f(s) is 0.68 to 1.14 of all but the smallest s."""
    wide_mn = x_mn.astype(jnp.float32)
    x_mn = (wide_mn / (jnp.linalg.norm(wide_mn) + EPS)).astype(x_mn.dtype)
    for a, b, c in coefficients:
        gram_mm = product("mn,kn->mk", x_mn, x_mn)
        x_mn = a * x_mn + product("mk,kn->mn", b * gram_mm + c * product("mk,kl->ml", gram_mm, gram_mm), x_mn)
    return x_mn


def polar_express(x_mn: jax.Array, coefficients: Coefficients) -> jax.Array:
    """The same in fewer steps: their coefficients differ, and the largest s is near 1 at the start.

    sqrt(|X X'|) bounds the largest singular value far better than |X| (Frobenius norms), at no extra product. In
    float32 the steps of a matrix with many columns run on X X' alone: all are polynomials of it, so they commute.
    """
    dtype = x_mn.dtype
    gram_mm = product("mn,kn->mk", x_mn, x_mn, dtype=jnp.float32)
    bound = MARGIN * jnp.sqrt(jnp.linalg.norm(gram_mm)) + EPS
    x_mn = (x_mn.astype(jnp.float32) / bound).astype(dtype)
    gram_mm = (gram_mm / bound**2).astype(dtype)
    on_gram, polynomial = dtype == jnp.float32 and x_mn.shape[1] >= GRAM_RATIO * x_mn.shape[0], None
    for number, (a, b, c) in enumerate(coefficients):
        if number and not on_gram:
            gram_mm = product("mn,kn->mk", x_mn, x_mn)
        step_mm = b * gram_mm + c * product("mk,kl->ml", gram_mm, gram_mm)
        if not on_gram:
            x_mn = a * x_mn + product("mk,kn->mn", step_mm, x_mn)
            continue
        step_mm += a * jnp.eye(len(step_mm), dtype=dtype)
        polynomial = step_mm if polynomial is None else product("mk,kl->ml", step_mm, polynomial)
        if number + 1 < len(coefficients):
            gram_mm = product("mk,kl->ml", product("mk,kl->ml", step_mm, gram_mm), step_mm)
    return x_mn if polynomial is None else product("mk,kn->mn", polynomial, x_mn)


def product(spec: str, *pair: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Adds up in float32 whatever the operands are (XLA:CPU is fast with no other); the result is of their dtype."""
    return jnp.einsum(spec, *pair, preferred_element_type=jnp.float32).astype(dtype or pair[0].dtype)
