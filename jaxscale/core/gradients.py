"""Loss and gradients of a batch: each device computes those of its rows, in microbatches, and they are summed."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxscale.core.accumulate import Reduction, accumulate
from jaxscale.core.batch import Batch
from jaxscale.core.models.model import summed_loss
from jaxscale.core.models.sharded import ShardedModel
from jaxscale.core.optim.optimizer import combine, trainable
from jaxscale.core.pipeline_step import Pipeline, accumulate_pipelined
from jaxscale.core.recorder import NO_RECORDER, SOWN, Intermediates, Recorder
from jaxscale.core.shardings import tree_shardings
from jaxscale.core.state import TrainState

Metrics = dict[str, Any]  # means of each named loss, and intermediates under SOWN


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Gradients:
    """Computes (means of each named loss, gradients of the mean loss) for a state and a batch.

    groups: a ParamGroup for each parameter; frozen ones have no gradient. aux_weights: of auxiliary losses, by name.
    num_sources: of the data mixture that the rows come from. make_recorder: makes a recorder for each trace, whose
    intermediates are added to the means.
    """

    model: ShardedModel
    groups: Any
    aux_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    num_sources: int = 0
    make_recorder: Callable[..., Recorder] | None = None

    def __call__(self, state: TrainState, batch: Batch) -> tuple[Metrics, Any]:
        """Returns (means, gradients), of the whole batch."""
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        on_device = self.on_device if self.model.plan.stage_schedule is None else self.on_stage
        in_specs = self.model.specs, self.model.rows_sharding.spec, P(), P()
        out_specs = P(), jax.tree.map(lambda sharding: sharding.spec, self.shardings)
        run = self.model.plan.batch_axes.shard_map(on_device, in_specs, out_specs)
        return run(state.params, batch, key, state.loss_scale.value)

    @property
    def shardings(self) -> Any:
        """The sharding of each gradient, that of its moments."""
        return trainable(tree_shardings(self.model.mesh, self.model.axes, self.model.plan.rules.moments), self.groups)

    def on_device(self, params: Any, batch: Batch, key: jax.Array, scale: jax.Array) -> tuple[Metrics, Any]:
        """Returns (means, gradients), from this device's rows and parameters and all other devices'."""
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
            trainable(variables, self.groups),  # frozen parameters do not enter the gradient norm
            plan.context.local(batch),
            key,
            num_microbatches=plan.num_microbatches,
            scale=scale,
            reduction=self.reduction(lambda grads: plan.batch_axes.reduce_accumulated(grads, self.model.axes)),
        )
        return self.reduce_intermediates(means), grads

    def on_stage(self, params: Any, batch: Batch, key: jax.Array, scale: jax.Array) -> tuple[Metrics, Any]:
        """Returns (means, gradients), computed by the stages of a pipeline."""
        plan, schedule = self.model.plan, self.model.plan.stage_schedule
        assert schedule is not None, "the plan has stages"
        functions = self.model.stage_functions(self.aux_weights, self.num_sources)
        return accumulate_pipelined(
            Pipeline(functions, plan.pipeline, schedule, self.groups),
            self.model.stage_weights(params),
            plan.context.local(batch),
            key,
            scale=scale,
            reduction=self.reduction(self.model.stage_gradients),
        )

    def reduction(self, total_grads: Callable[[Any], Any]) -> Reduction:
        """Returns the reductions over the devices. total_grads: of accumulated gradients."""
        plan, axes = self.model.plan, self.model.plan.batch_axes
        return Reduction(
            axes.num_shards * plan.context.size,
            axes.first_row,
            lambda grads: axes.reduce_microbatch(grads, self.model.axes),
            total_grads,
            axes.sum,
        )

    def reduce_intermediates(self, means: Metrics) -> Metrics:
        """Reduces intermediates over devices and microbatches, from [microbatches, layers] to [layers]."""
        if SOWN not in means:
            return means
        axes, tensor = self.model.plan.batch_axes, self.model.plan.tensor
        sums = lambda x: tensor.sum(axes.sum(x.sum(axis=0)))
        maxima = lambda x: tensor.max(axes.max(x.max(axis=0)))
        reduce = lambda stack: Intermediates(jax.tree.map(sums, stack.sums), jax.tree.map(maxima, stack.maxima))
        return means | {SOWN: tuple(map(reduce, means[SOWN]))}
