"""A model sharded over a mesh: construction, losses and pipeline stages.

B batch  T position  D embed
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxscale.core.axes.pipeline_axis import stage_gradients, stage_weights
from jaxscale.core.axes.tensor_axis import TensorAxis
from jaxscale.core.batch import Batch
from jaxscale.core.models.config import BLOCKS, ModelConfig
from jaxscale.core.models.layers import StackedModel, gather_params, in_row_parts, merge_model, split_model
from jaxscale.core.models.lora_mup_config import NO_LORA, LoraConfig
from jaxscale.core.models.model import Model, loss_from_hidden, make_model, target_scores, token_losses
from jaxscale.core.models.moe_balance import moe_sums
from jaxscale.core.plan import ParallelPlan, without_stages
from jaxscale.core.recorder import NO_RECORDER, Recorder
from jaxscale.core.shardings import batch_sharding, check_divides, no_gather, tree_shardings
from jaxscale.kernels.attention.xla import make_mask_spec
from jaxscale.kernels.config import Choice
from jaxscale.kernels.host_memory import device_zeros, fetch_outside_blocks, make_fetching_gather
from jaxscale.kernels.matmul.project import with_matmul_precision
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class StageFunctions:
    """Model functions of a pipeline stage, on weights gathered except over tensor. ends: weights outside of layers."""

    graphdef: nnx.GraphDef
    stacks: dict[str, Any]  # {name of a stack: tree with the structure of the parameters}
    compute_dtype: Any
    aux_weights: Mapping[str, float]
    num_sources: int

    @property
    def num_layers(self) -> int:
        """Number of layers in the stack `blocks`."""
        return jax.tree.leaves(self.stacks[BLOCKS])[0].shape[0]

    def embed(self, ends: Any, rows: Batch, keys_B: jax.Array) -> jax.Array:
        """Returns the residual stream of local positions before the first layer."""
        segments = make_mask_spec(rows.segment_ids, rows.prefix)
        return self.model(ends).embed_tokens(rows.tokens, rows.positions, segments, keys_B)

    def run_layer(
        self,
        params: Any,
        ends: Any,
        x_BTD: jax.Array,
        rows: Batch,
        keys_B: jax.Array,
        number: jax.Array,
        stack: str = BLOCKS,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (x_BTD after a layer, contributions to the named sums). Only layers with experts contribute.

        params: weights of the layer. number: index of the layer in the stack.
        """
        model = self.model(ends | {stack: params})
        graphdef, weights = nnx.split(getattr(model, stack))
        block = nnx.merge(graphdef, gather_params(weights, no_gather, self.compute_dtype, stacked=True))
        layer_input = jax.tree.map(lambda x: jnp.asarray(x)[number], model.layer_inputs(keys_B, stack))
        shared = model.shared_inputs(rows.positions, make_mask_spec(rows.segment_ids, rows.prefix))
        result = in_row_parts(block, model.cfg, model.plan)(x_BTD, layer_input, *shared)
        if not isinstance(result, tuple):
            return result, {}
        moe_loss, parts = moe_sums(pad_layers(result[1], number, self.num_layers), self.aux_weights)
        return result[0], parts | {"objective": moe_loss}

    def loss(self, ends: Any, x_BTD: jax.Array, rows: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (objective, named parts), summed over tokens, given the residual stream after the last layer."""
        model = self.model(ends)
        return loss_from_hidden(model, model.last_hidden(x_BTD), rows, self.aux_weights, self.num_sources)

    def model(self, params: dict[str, Any]) -> StackedModel:
        """Returns the model with these parameters."""
        model = merge_model(self.graphdef, self.stacks | params)
        assert isinstance(model, StackedModel), "settings reject a pipeline for an encoder-decoder"
        return model


def pad_layers(metrics: Any, number: jax.Array, num_layers: int) -> Any:
    """Returns the metrics of one layer, stacked with zeros for the other layers."""
    return jax.tree.map(lambda x: jnp.zeros((num_layers, *x.shape), x.dtype).at[number].set(x), metrics)


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model without parameter values: the shapes, logical axes and shardings of parameters, and the plan."""

    cfg: ModelConfig
    plan: ParallelPlan
    lora: LoraConfig = NO_LORA  # settings of adapters among the parameters

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.plan.mesh

    @property
    def offloaded(self) -> bool:
        """True if parameters are in host memory. Parameters of blocks are copied to the device layer by layer."""
        return self.plan.settings.offload_params

    @functools.cached_property
    def unstaged(self) -> "ShardedModel":
        """The model without pipeline stages, which is used for everything except training."""
        plan = without_stages(self.cfg, self.plan)
        return self if plan is self.plan else shard_model(self.cfg, plan, self.lora)

    def init(
        self,
        key: jax.Array,
        *,
        tensor: TensorAxis | None = None,
        recorder: Recorder = NO_RECORDER,
        gathered: bool = False,
        training: bool = False,
    ) -> Model:
        """Returns a new model. tensor: overrides the tensor axis, for a model that is replicated over the context axis.

        gathered: whether weights are already gathered. training: whether expert capacities apply.
        """
        plan = self.plan
        if tensor is not None:
            plan = plan.replace(tensor=tensor, attend=plan.whole_row_attend, context_exchange=Choice())
        gather = plan.batch_axes.gather if plan.batch_axes.reduce_axes and not gathered else no_gather
        gather = make_fetching_gather(gather) if self.offloaded else gather
        plan = plan.replace(gather=gather, use_capacity=training).with_recorder(recorder)
        return make_model(self.cfg, key=key, plan=plan, lora=self.lora)

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef[Model]:
        """The graphdef of the model, to merge with parameters."""
        return split_model(jax.eval_shape(self.init, jax.random.key(0)))[0]

    @property
    def shapes(self) -> Any:
        """The jax.ShapeDtypeStruct of each parameter."""
        return abstract_params(self.cfg, self.lora)[0]

    @property
    def axes(self) -> Any:
        """The logical axes of each parameter."""
        return abstract_params(self.cfg, self.lora)[1]

    @functools.cached_property
    def shardings(self) -> Any:
        """The sharding of each parameter."""
        return tree_shardings(self.mesh, self.axes, self.plan.rules.params)

    @property
    def specs(self) -> Any:
        """The PartitionSpec of each parameter."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings)

    @property
    def rows_sharding(self) -> NamedSharding:
        """The sharding of a [rows, T] array of a batch."""
        return batch_sharding(self.mesh, self.plan.rules.params)

    def stage_weights(self, params: Any) -> Any:
        """Returns the parameters of the device's stage, gathered."""
        dtype = jnp.promote_types(self.cfg.compute_dtype, self.cfg.embed_dtype)
        return stage_weights(params, self.axes, self.plan.batch_axes, self.plan.pipeline, dtype, chunked=BLOCKS)

    def stage_gradients(self, grads: Any) -> Any:
        """Returns the gradients of stage_weights() summed over all devices."""
        return stage_gradients(grads, self.axes, self.plan.batch_axes, self.plan.pipeline, chunked=BLOCKS)

    def stage_functions(self, aux_weights: Mapping[str, float], num_sources: int) -> StageFunctions:
        """Returns the functions of a pipeline stage, which take the result of stage_weights()."""
        init = functools.partial(self.init, gathered=True, training=True)
        graphdef = split_model(jax.eval_shape(init, jax.random.key(0)))[0]
        stacks = {name: self.shapes[name] for name in self.cfg.layer_stacks}
        return StageFunctions(graphdef, stacks, self.cfg.compute_dtype, aux_weights, num_sources)

    def differentiable(self, params: Any) -> Any:
        """Returns the values to differentiate: the parameters, or zeros on the device if parameters are offloaded."""
        return device_zeros(params) if self.offloaded else params

    def merge(
        self,
        params: Any,
        variables: Any = None,
        *,
        tensor: TensorAxis | None = None,
        recorder: Recorder = NO_RECORDER,
        training: bool = False,
    ) -> Model:
        """Returns the model with these parameters, inside shard_map.

        variables: the result of differentiable(params), if gradients are computed. Other arguments: see init().
        """
        training = training and self.cfg.experts is not None and self.cfg.experts.capacity_factor > 0
        if tensor is not None or recorder is not NO_RECORDER or training:
            init = functools.partial(self.init, tensor=tensor, recorder=recorder, training=training)
            graphdef = split_model(jax.eval_shape(init, jax.random.key(0)))[0]
        else:
            graphdef = self.graphdef
        variables = self.differentiable(params) if variables is None else variables
        if self.offloaded:
            return merge_model(graphdef, fetch_outside_blocks(params, variables, self.cfg.layer_stacks))
        return merge_model(graphdef, self.plan.batch_axes.cast_stacks(variables, self.axes, self.cfg.compute_dtype))

    @property
    def token_losses(self) -> Callable[[Any, Batch], jax.Array]:
        """Function (params, batch) -> cross-entropy in nats, [B, T], of a global batch."""
        rows = self.rows_sharding.spec
        return self.plan.batch_axes.shard_map(self.with_model(token_losses), (self.specs, rows), rows)

    @property
    def target_scores(self) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
        """Function (params, batch) -> (nats, True if no other token is more likely) for each target of a batch."""
        rows = self.rows_sharding.spec
        return self.plan.batch_axes.shard_map(self.with_model(target_scores), (self.specs, rows), (rows, rows))

    def with_model(self, f: Callable) -> Callable:
        """Converts f(model, batch) to a function of (params, batch), and all-gathers its result over positions."""
        run = lambda params, batch: self.plan.context.all_gather(f(self.merge(params), self.plan.context.local(batch)))
        return with_matmul_precision(self.cfg.matmul_precision, run)


@functools.lru_cache(maxsize=16)
def abstract_params(cfg: ModelConfig, lora: LoraConfig) -> tuple[Any, Any]:
    """Returns (shapes, logical axes) of the parameters, which do not depend on the mesh or the kernels."""
    make = lambda key: make_model(cfg, key=key, lora=lora)
    return split_model(jax.eval_shape(make, jax.random.key(0)))[1:]


def shard_model(cfg: ModelConfig, plan: ParallelPlan, lora: LoraConfig = NO_LORA) -> ShardedModel:
    """Returns the model with this plan. Raises BadInput if the mesh does not divide the parameters.

    lora: settings of adapters, which are separate parameters until they are merged.
    """
    model = ShardedModel(cfg, plan, lora)
    check_fits(model, plan.rules.params)
    return model


def check_fits(model: ShardedModel, *tables: Any) -> None:
    """Raises BadInput unless the mesh divides every parameter under each of these sharding rules."""
    uneven = [line for table in tables for line in check_divides(model.shapes, model.axes, table, model.mesh.shape)]
    if uneven:
        raise BadInput(
            f"the mesh does not divide the model: {'; '.join(dict.fromkeys(uneven))}; use a mesh that divides it"
        )
