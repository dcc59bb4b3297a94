"""Muon: orthogonalized momentum (kellerjordan.github.io/posts/muon), scaled to the RMS of AdamW's updates.

The iteration needs whole matrices, which an all-to-all over layers provides without an all-gather. A stack [L, m, n]
whose rows or columns are sharded over P devices becomes L / P whole matrices per device, by one all-to-all per sharded
dimension. Replicas (mesh.data) also divide the matrices. Results are sent back in the same way. If P does not divide
the number of matrices, stacks with the same matrix shape are concatenated (gate and up, or the layers of an unrolled
model) and padded with zeros.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jaxscale.core.optim.groups import Dims, is_masked

MatrixFn = Callable[[jax.Array], jax.Array]  # [b, m, n] -> [b, m, n], applied to each matrix independently


@dataclasses.dataclass(frozen=True)
class StackSharding:
    """Sharding of a stack of matrices: mesh axes of each dimension, and mesh axes along which it is replicated."""

    dims: Dims
    mesh_axes: tuple[tuple[str, ...], ...]
    replica_axes: tuple[str, ...]

    @property
    def sharded_dims(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Sharded dimensions of a matrix, each as (its index in the result of flatten(), its mesh axes)."""
        return tuple((1 + i, self.mesh_axes[d]) for i, d in enumerate(self.dims.unstacked) if self.mesh_axes[d])

    def flatten(self, x: jax.Array) -> jax.Array:
        """Returns [matrices, rows..., cols...]."""
        matrix_shape = [x.shape[d] for d in self.dims.unstacked]
        return x.transpose(self.dims.stack + self.dims.unstacked).reshape(-1, *matrix_shape)

    def unflatten(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Inverse of flatten(). shape: shape of the array before flatten()."""
        order = self.dims.stack + self.dims.unstacked
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape([shape[d] for d in order]).transpose(inverse)


def stack_sharding(dims: Dims, spec: PartitionSpec, mesh: Mesh, slow: Sequence[str] = ()) -> StackSharding:
    """Returns the StackSharding of a PartitionSpec. slow: mesh axes along which replicas repeat the work."""
    names = lambda entry: () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    entries = tuple(spec) + (None,) * (len(dims.stack + dims.unstacked) - len(spec))
    mesh_axes = tuple(tuple(name for name in names(entry) if mesh.shape[name] > 1) for entry in entries)
    used = {name for axes in mesh_axes for name in axes} | set(slow)
    replicas = tuple(name for name, size in mesh.shape.items() if size > 1 and name not in used)
    return StackSharding(dims, mesh_axes, replicas)


def map_whole_matrices(
    f: MatrixFn, arrays: Sequence[jax.Array], shardings: Sequence[StackSharding], mesh: Mesh
) -> list[jax.Array]:
    """Applies f to every matrix of these stacks. Each matrix is gathered on one device and then resharded."""
    run = lambda arrays: map_local_stacks(f, arrays, shardings, dict(mesh.shape))
    if mesh.size == 1:
        return run(list(arrays))
    specs = [PartitionSpec(*[axes or None for axes in sharding.mesh_axes]) for sharding in shardings]
    return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(list(arrays))


def map_local_stacks(
    f: MatrixFn, arrays: list[jax.Array], shardings: Sequence[StackSharding], mesh_shape: dict[str, int]
) -> list[jax.Array]:
    """Computes map_whole_matrices() inside shard_map, on local shards."""
    flat = [sharding.flatten(x) for x, sharding in zip(arrays, shardings)]
    groups: dict[tuple, list[int]] = {}
    for i, (x, sharding) in enumerate(zip(flat, shardings)):
        divides = x.shape[0] % num_workers(sharding, mesh_shape) == 0
        key = (x.shape[1:], len(sharding.dims.rows), sharding.sharded_dims, sharding.replica_axes)
        groups.setdefault((i,) if divides else key, []).append(i)
    results = list(arrays)
    for members in groups.values():
        stack = jnp.concatenate([flat[i] for i in members]) if len(members) > 1 else flat[members[0]]
        mapped = map_exchanged(f, stack, shardings[members[0]], mesh_shape)
        ends = [sum(flat[n].shape[0] for n in members[: i + 1]) for i in range(len(members) - 1)]
        for i, part in zip(members, jnp.split(mapped, ends)):
            results[i] = shardings[i].unflatten(part, arrays[i].shape)
    return results


def num_workers(sharding: StackSharding, mesh_shape: dict[str, int]) -> int:
    """Returns the number of devices that share the matrices of a stack."""
    num_shards = math.prod(mesh_shape[name] for _, names in sharding.sharded_dims for name in names)
    return num_shards * num_replicas(sharding, mesh_shape)


def num_replicas(sharding: StackSharding, mesh_shape: dict[str, int]) -> int:
    """Returns the number of devices with the same shard."""
    return math.prod(mesh_shape[name] for name in sharding.replica_axes)


def map_exchanged(f: MatrixFn, x: jax.Array, sharding: StackSharding, mesh_shape: dict[str, int]) -> jax.Array:
    """Applies f to whole matrices by an all-to-all. Takes and returns local shards, [b, rows..., cols...]."""
    number = x.shape[0]
    x = jnp.pad(x, [(0, -number % num_workers(sharding, mesh_shape)), *[(0, 0)] * (x.ndim - 1)])
    if sharding.replica_axes:
        count = x.shape[0] // num_replicas(sharding, mesh_shape)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(sharding.replica_axes) * count, count)
    for d, names in sharding.sharded_dims:
        x = lax.all_to_all(x, names, split_axis=0, concat_axis=d, tiled=True)
    num_row_dims = len(sharding.dims.rows)
    rows, cols = math.prod(x.shape[1 : 1 + num_row_dims]), math.prod(x.shape[1 + num_row_dims :])
    x = f(x.reshape(-1, rows, cols)).reshape(x.shape)
    for d, names in reversed(sharding.sharded_dims):
        x = lax.all_to_all(x, names, split_axis=d, concat_axis=0, tiled=True)
    if sharding.replica_axes:
        x = lax.all_gather(x, sharding.replica_axes, tiled=True)
    return x[:number]


Iterate = Callable[[jax.Array], jax.Array]
Coefficients = Sequence[tuple[float, float, float]]  # (a, b, c) of the polynomial a s + b s**3 + c s**5 of each step
PUBLISHED, EPS = ((3.4445, -4.7750, 2.0315),) * 5, 1e-7  # from kellerjordan.github.io/posts/muon
# Coefficients whose composed polynomial is closest to 1 for s in [l, 1], by the method of arXiv:2505.16932, section 3.
# l is 0.03 for 2 steps (values from 0.62 to 1.38), 0.01 for 3 steps (0.73 to 1.27) and 0.003 for 4 (0.80 to 1.20).
OPTIMAL: dict[int, Coefficients] = {
    2: ((7.3625, -20.7434, 15.1606), (2.9175, -2.1824, 0.4755)),
    3: ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526)),
    4: ((8.3837, -24.7659, 18.3571), (4.0434, -3.0114, 0.5695), (3.5056, -2.6267, 0.5257), (2.4901, -1.8343, 0.4368)),
}
MARGIN = 1.01  # factor on the bound of the norm, for rounding of bfloat16 matmuls
GRAM_RATIO = 1.5  # columns / rows above which matmuls of Gram matrices cost less than those of the matrix
RMS = 0.2  # of an update; close to AdamW's, so its learning rate and decay apply (arXiv:2502.16982, section 2.2)
MAX_BATCH_ELEMENTS = 2**24  # elements of the matrices that are iterated together, such as one of 4096 x 4096


def orthogonalize(
    shardings: Sequence[StackSharding], mesh: jax.sharding.Mesh, dtype: str, steps: int | None = None
) -> optax.GradientTransformation:
    """Replaces each m x n update by about 0.2 sqrt(max(m, n)) times the nearest orthogonal matrix.

    shardings: shardings of all parameters, in tree order. dtype: dtype of the all-to-all and the iteration. steps:
    number of iterations with optimal coefficients; None means 5 iterations with the published coefficients.
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
    """Returns the orthogonalized matrices, scaled such that a matrix of full rank has a root mean square of RMS."""
    iterate = newton_schulz if steps is None else functools.partial(polar_express, coefficients=OPTIMAL[steps])
    return RMS * math.sqrt(max(x_bmn.shape[1:])) * polar(x_bmn, iterate)


def polar(x_bmn: jax.Array, iterate: Iterate) -> jax.Array:
    """Returns U f(S) V' for each matrix U S V'. iterate: computes U f(S) V' for one matrix with columns >= rows."""
    number, rows, columns = x_bmn.shape
    if rows > columns:
        return polar(x_bmn.swapaxes(1, 2), iterate).swapaxes(1, 2)
    batch_size = max(1, MAX_BATCH_ELEMENTS // (rows * columns))
    if number <= batch_size:  # in a loop of one iteration XLA:CPU does not use its fast matmul and is 1.6x slower
        return jax.vmap(iterate)(x_bmn)
    return jax.lax.map(iterate, x_bmn, batch_size=batch_size)


def newton_schulz(x_mn: jax.Array, coefficients: Coefficients = PUBLISHED) -> jax.Array:
    """Orthogonalizes a matrix by Newton-Schulz iteration. Singular values, except tiny ones, become 0.68 to 1.14."""
    float32_mn = x_mn.astype(jnp.float32)
    x_mn = (float32_mn / (jnp.linalg.norm(float32_mn) + EPS)).astype(x_mn.dtype)
    for a, b, c in coefficients:
        gram_mm = einsum_f32("mn,kn->mk", x_mn, x_mn)
        x_mn = a * x_mn + einsum_f32("mk,kn->mn", b * gram_mm + c * einsum_f32("mk,kl->ml", gram_mm, gram_mm), x_mn)
    return x_mn


def polar_express(x_mn: jax.Array, coefficients: Coefficients) -> jax.Array:
    """Orthogonalizes a matrix in fewer steps, with separate coefficients for each step (arXiv:2505.16932).

    X is first divided by sqrt(|X X'|), a closer bound on the largest singular value than |X| (Frobenius norms). In
    float32, if X has many more columns than rows, the steps use only X X', and their product is applied to X once.
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
    """Returns an einsum in the dtype of the operands. Accumulates in float32, which XLA:CPU needs for fast matmuls."""
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32).astype(dtype or operands[0].dtype)
