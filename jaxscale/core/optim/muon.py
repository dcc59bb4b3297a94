"""Muon: orthogonalized momentum (kellerjordan.github.io/posts/muon), scaled to the RMS of AdamW's updates."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxscale.core.optim.groups import is_masked
from jaxscale.core.optim.whole_matrices import StackSharding, map_whole_matrices

Iterate = Callable[[jax.Array], jax.Array]
Coefficients = Sequence[tuple[float, float, float]]  # (a, b, c) of each step: a s + b s**3 + c s**5
PUBLISHED, EPS = ((3.4445, -4.7750, 2.0315),) * 5, 1e-7  # from the post
# The composed polynomials that are nearest to 1 for s in [l, 1], by the method of arXiv:2505.16932, section 3: l is
# 0.03 for 2 steps (range 0.62 to 1.38), 0.01 for 3 (0.73 to 1.27) and 0.003 for 4 (0.80 to 1.20).
OPTIMAL: dict[int, Coefficients] = {
    2: ((7.3625, -20.7434, 15.1606), (2.9175, -2.1824, 0.4755)),
    3: ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526)),
    4: ((8.3837, -24.7659, 18.3571), (4.0434, -3.0114, 0.5695), (3.5056, -2.6267, 0.5257), (2.4901, -1.8343, 0.4368)),
}
MARGIN = 1.01  # on the bound of the norm, for bfloat16 matmuls
GRAM_RATIO = 1.5  # columns / rows from which matmuls of Gram matrices cost less than those of the matrix
RMS = 0.2  # of an update, close to AdamW's, so that its rate and decay carry over: arXiv:2502.16982, section 2.2
MAX_BATCH_ELEMENTS = 2**24  # of the matrices iterated together: one of 4096 x 4096


def orthogonalize(
    shardings: Sequence[StackSharding], mesh: jax.sharding.Mesh, dtype: str, steps: int | None = None
) -> optax.GradientTransformation:
    """Replaces each m x n update by about 0.2 sqrt(max(m, n)) times the nearest orthogonal matrix.

    shardings: of all parameters, in tree order. dtype: of the all-to-all and the iteration. steps: iterations with
    optimal coefficients; None: the published coefficients.
    """
    fn = functools.partial(scaled_polar, steps=steps)

    def update(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates, is_leaf=is_masked)
        selected = [i for i, leaf in enumerate(leaves) if not is_masked(leaf)]
        cast = [leaves[i].astype(dtype) for i in selected]
        results = map_whole_matrices(fn, cast, [shardings[i] for i in selected], mesh)
        for i, new in zip(selected, results, strict=True):
            leaves[i] = new.astype(leaves[i].dtype)
        return treedef.unflatten(leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scaled_polar(x_bmn: jax.Array, steps: int | None = None) -> jax.Array:
    """Returns RMS sqrt(max(m, n)) times the orthogonalized matrices, whose root mean square is RMS at full rank."""
    iterate = newton_schulz if steps is None else functools.partial(polar_express, coefficients=OPTIMAL[steps])
    return RMS * math.sqrt(max(x_bmn.shape[1:])) * polar(x_bmn, iterate)


def polar(x_bmn: jax.Array, iterate: Iterate) -> jax.Array:
    """Returns U f(S) V' for each matrix U S V'. iterate: computes it for one matrix with columns >= rows."""
    number, rows, columns = x_bmn.shape
    if rows > columns:
        return polar(x_bmn.swapaxes(1, 2), iterate).swapaxes(1, 2)
    batch_size = max(1, MAX_BATCH_ELEMENTS // (rows * columns))
    if number <= batch_size:  # inside a loop of one iteration XLA:CPU does not use its fast matmul: 1.6x slower
        return jax.vmap(iterate)(x_bmn)
    return jax.lax.map(iterate, x_bmn, batch_size=batch_size)


def newton_schulz(x_mn: jax.Array, coefficients: Coefficients = PUBLISHED) -> jax.Array:
    """Runs the published iteration on one matrix: f(s) is 0.68 to 1.14 for all but the smallest s."""
    float32_mn = x_mn.astype(jnp.float32)
    x_mn = (float32_mn / (jnp.linalg.norm(float32_mn) + EPS)).astype(x_mn.dtype)
    for a, b, c in coefficients:
        gram_mm = einsum_f32("mn,kn->mk", x_mn, x_mn)
        x_mn = a * x_mn + einsum_f32("mk,kn->mn", b * gram_mm + c * einsum_f32("mk,kl->ml", gram_mm, gram_mm), x_mn)
    return x_mn


def polar_express(x_mn: jax.Array, coefficients: Coefficients) -> jax.Array:
    """Orthogonalizes one matrix in fewer steps, with coefficients that differ by step and the largest s near 1.

    sqrt(|X X'|) bounds the largest singular value far better than |X| (Frobenius norms), at no extra matmul. In
    float32 the steps of a matrix with many columns run on X X' alone: all are polynomials of it, so they commute.
    """
    dtype = x_mn.dtype
    gram_mm = einsum_f32("mn,kn->mk", x_mn, x_mn, dtype=jnp.float32)
    bound = MARGIN * jnp.sqrt(jnp.linalg.norm(gram_mm)) + EPS
    x_mn = (x_mn.astype(jnp.float32) / bound).astype(dtype)
    gram_mm = (gram_mm / bound**2).astype(dtype)
    on_gram, polynomial = dtype == jnp.float32 and x_mn.shape[1] >= GRAM_RATIO * x_mn.shape[0], None
    for number, (a, b, c) in enumerate(coefficients):
        if number and not on_gram:
            gram_mm = einsum_f32("mn,kn->mk", x_mn, x_mn)
        step_mm = b * gram_mm + c * einsum_f32("mk,kl->ml", gram_mm, gram_mm)
        if not on_gram:
            x_mn = a * x_mn + einsum_f32("mk,kn->mn", step_mm, x_mn)
            continue
        step_mm += a * jnp.eye(len(step_mm), dtype=dtype)
        polynomial = step_mm if polynomial is None else einsum_f32("mk,kl->ml", step_mm, polynomial)
        if number + 1 < len(coefficients):
            gram_mm = einsum_f32("mk,kl->ml", einsum_f32("mk,kl->ml", step_mm, gram_mm), step_mm)
    return x_mn if polynomial is None else einsum_f32("mk,kn->mn", polynomial, x_mn)


def einsum_f32(spec: str, *operands: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Einsum that accumulates in float32 (the only fast one on XLA:CPU) and returns the dtype of the operands."""
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32).astype(dtype or operands[0].dtype)
