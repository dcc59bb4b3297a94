"""Loss and gradients of a batch, summed over microbatches and devices.

The gradient equals that of a single pass over the whole batch. B batch (of this device)  T position
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxscale.core.batch import Batch
from jaxscale.core.models.model import summed_loss
from jaxscale.core.models.sharded import ShardedModel
from jaxscale.core.optim.optimizer import combine, trainable
from jaxscale.core.recorder import NO_RECORDER, SOWN, Intermediates, Recorder
from jaxscale.core.shardings import tree_shardings
from jaxscale.core.state import TrainState

Metrics = dict[str, Any]  # means of each named loss, and intermediates under SOWN
# (parameters, rows, a random key per row) -> (sum to minimize, named sums)
LossFn = Callable[[Any, Batch, jax.Array], tuple[jax.Array, dict[str, Any]]]
identity = lambda tree: tree


class Reduction(NamedTuple):
    """Reductions over the devices that share a batch, as functions on trees. The defaults are for one device."""

    num_shards: int = 1  # number of devices that shard the tokens of the batch
    first_row: Callable[[int], jax.Array | int] = lambda num_rows: 0  # batch index of the first row on this device
    microbatch_grads: Callable[[Any], Any] = identity  # applied to the gradients of each microbatch
    total_grads: Callable[[Any], Any] = identity  # applied to the gradients summed over microbatches
    scalars: Callable[[Any], Any] = identity  # applied to losses and counts


ONE_DEVICE = Reduction()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Gradients:
    """Computes the means of named losses, and the gradients of the mean loss, for a state and a batch.

    groups: tree with the ParamGroup of each parameter; frozen parameters have no gradient. aux_weights: {auxiliary
    loss: weight}. num_sources: number of sources in the data mixture. make_recorder: returns a new recorder for each
    trace; the recorded intermediates are added to the means.
    """

    model: ShardedModel
    groups: Any
    aux_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    num_sources: int = 0
    make_recorder: Callable[..., Recorder] | None = None

    def compute(self, state: TrainState, batch: Batch) -> tuple[Metrics, Any]:
        """Returns (means, gradients) of the whole batch."""
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        on_device = self.on_device if self.model.plan.stage_schedule is None else self.on_stage
        in_specs = self.model.specs, self.model.rows_sharding.spec, P(), P()
        out_specs = P(), jax.tree.map(lambda sharding: sharding.spec, self.shardings)
        run = self.model.plan.batch_axes.shard_map(on_device, in_specs, out_specs)
        return run(state.params, batch, key, state.loss_scale.value)

    @property
    def shardings(self) -> Any:
        """The sharding of each gradient, which equals that of its moments."""
        return trainable(tree_shardings(self.model.mesh, self.model.axes, self.model.plan.rules.moments), self.groups)

    def on_device(self, params: Any, batch: Batch, key: jax.Array, scale: jax.Array) -> tuple[Metrics, Any]:
        """Returns (means, gradients) of the whole batch. Called inside shard_map. params, batch: local shards."""
        plan, variables = self.model.plan, self.model.differentiable(params)

        def loss_fn(trained: Any, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, Metrics]:
            recorder = NO_RECORDER
            if self.make_recorder is not None:
                recorder = self.make_recorder(plan.attention.name, plan.needs, plan.tensor, plan.context)
            model = self.model.merge(params, combine(trained, variables), recorder=recorder, training=True)
            total, sums = summed_loss(model, batch, keys_B, self.aux_weights, self.num_sources)
            return total, sums | recorder.sown()

        means, grads = accumulate(
            loss_fn,
            trainable(variables, self.groups),  # excludes frozen parameters from the gradient norm
            plan.context.local(batch),
            key,
            num_microbatches=plan.num_microbatches,
            scale=scale,
            reduction=self.reduction(lambda grads: plan.batch_axes.reduce_accumulated(grads, self.model.axes)),
        )
        return self.reduce_intermediates(means), grads

    def on_stage(self, params: Any, batch: Batch, key: jax.Array, scale: jax.Array) -> tuple[Metrics, Any]:
        """Returns (means, gradients) of the whole batch, with pipeline parallelism. Called inside shard_map."""
        from jaxscale.core.pipeline_step import Pipeline

        plan, schedule = self.model.plan, self.model.plan.stage_schedule
        assert schedule is not None, "the plan has stages"
        functions = self.model.stage_functions(self.aux_weights, self.num_sources)
        pipeline = Pipeline(functions, plan.pipeline, schedule, self.groups)
        weights, batch = self.model.stage_weights(params), plan.context.local(batch)
        reduction = self.reduction(self.model.stage_gradients)
        per_token, keys_B = per_token_scale(scale, batch, reduction), row_keys(key, batch, reduction)
        microbatches = jax.tree.map(lambda field: split_microbatches(field, plan.num_microbatches), (batch, keys_B))
        sums, grads = pipeline.sums(weights, microbatches, per_token)
        return reduce_and_divide(sums, grads, per_token, reduction)

    def reduction(self, total_grads: Callable[[Any], Any]) -> Reduction:
        """Returns the reductions over the devices. total_grads: reduction of accumulated gradients."""
        plan, axes = self.model.plan, self.model.plan.batch_axes
        return Reduction(
            axes.num_shards * plan.context.size,
            axes.first_row,
            lambda grads: axes.reduce_microbatch(grads, self.model.axes),
            total_grads,
            axes.sum,
        )

    def reduce_intermediates(self, means: Metrics) -> Metrics:
        """Reduces intermediates from [microbatches, layers] on each device to [layers]."""
        if SOWN not in means:
            return means
        axes, tensor = self.model.plan.batch_axes, self.model.plan.tensor
        sums = lambda x: tensor.sum(axes.sum(x.sum(axis=0)))
        maxima = lambda x: tensor.max(axes.max(x.max(axis=0)))
        reduce = lambda stack: Intermediates(jax.tree.map(sums, stack.sums), jax.tree.map(maxima, stack.maxima))
        return means | {SOWN: tuple(map(reduce, means[SOWN]))}


def accumulate(
    loss_fn: LossFn,
    params: Any,
    batch: Batch,
    key: jax.Array,
    *,
    num_microbatches: int,
    scale: jax.Array | float = 1.0,
    reduction: Reduction = ONE_DEVICE,
) -> tuple[dict[str, jax.Array], Any]:
    """Returns (mean of each named loss over the target tokens, gradient of the mean loss), all in float32.

    Losses, gradients and token weights are summed over microbatches and devices, then divided once, so that padding
    does not bias the mean. `reduction` sums over devices what loss_fn has not summed. Intermediates under SOWN have a
    leading dimension of microbatches. batch: sequences of this device. scale: loss scale for float16.
    """
    scale, keys_B = per_token_scale(scale, batch, reduction), row_keys(key, batch, reduction)

    def scaled_loss(params, rows, keys_B):
        total, sums = loss_fn(params, rows, keys_B)
        return total * scale, sums | {"objective": total, "real_tokens": jnp.sum(rows.weights)}

    def microbatch_sums(rows, keys_B):
        (_, sums), grads = jax.value_and_grad(scaled_loss, has_aux=True)(params, rows, keys_B)
        sown = {name: sums.pop(name) for name in (SOWN,) if name in sums}
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        with jax.named_scope("reduce_gradients"):
            return (sums, reduction.microbatch_grads(grads)), sown

    if num_microbatches == 1:
        (sums, grads), sown = microbatch_sums(batch, keys_B)
        sown = jax.tree.map(lambda array: array[None], sown)
    else:
        microbatches = jax.tree.map(lambda field: split_microbatches(field, num_microbatches), (batch, keys_B))
        shapes, _ = jax.eval_shape(microbatch_sums, *jax.tree.map(lambda field: field[0], microbatches))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(totals, rows):
            # XLA unrolls a loop of two microbatches and would keep the activations of both in memory (libtpu 0.0.51).
            totals, rows = jax.lax.optimization_barrier((totals, rows))
            sums, sown = microbatch_sums(*rows)
            return jax.tree.map(jnp.add, totals, sums), sown

        (sums, grads), sown = jax.lax.scan(add, zeros, microbatches)
    means, grads = reduce_and_divide(sums, grads, scale, reduction)
    return means | sown, grads


def per_token_scale(scale: jax.Array | float, batch: Batch, reduction: Reduction) -> jax.Array | float:
    """Returns the loss scale divided by the number of positions, so that sums fit float16. Exact for powers of 2."""
    return scale / (batch.weights.size * reduction.num_shards)


def row_keys(key: jax.Array, batch: Batch, reduction: Reduction) -> jax.Array:
    """Returns a random key for each sequence. It depends on the index in the batch, not on devices or microbatches."""
    num_rows = batch.weights.shape[0]
    row_key = lambda row: jax.random.fold_in(key, row)
    return jax.vmap(row_key)(reduction.first_row(num_rows) + jnp.arange(num_rows))


def reduce_and_divide(
    sums: dict[str, jax.Array], grads: Any, scale: jax.Array | float, reduction: Reduction
) -> tuple[dict[str, jax.Array], Any]:
    """Sums local losses and gradients over all devices. Returns (means, gradients of the mean loss)."""
    with jax.named_scope("reduce_gradients"):
        sums, grads = reduction.scalars(sums), reduction.total_grads(grads)
    total_weight = sums.pop("real_tokens")
    tokens = jnp.maximum(total_weight, 1.0)
    # integers are counts, not sums over tokens
    mean = lambda value: value if jnp.issubdtype(value.dtype, jnp.integer) else value / tokens
    means = {name: mean(value) for name, value in sums.items()}
    return means | {"real_tokens": total_weight}, jax.tree.map(lambda grad: grad / (scale * tokens), grads)


def split_microbatches(rows: jax.Array, number: int) -> jax.Array:
    """Reshapes [B, ...] to [number, B / number, ...]. Sequence i of a batch is in microbatch i % number on any mesh."""
    return jnp.swapaxes(rows.reshape(rows.shape[0] // number, number, *rows.shape[1:]), 0, 1)
