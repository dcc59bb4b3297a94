"""A model sharded over a mesh: parameter shardings, construction and losses. B batch  T position"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxscale.data.batch import Batch
from jaxscale.hardware import find_chip
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import BLOCKS, NO_LORA, LoraConfig
from jaxscale.models.layers import merge_model, split_model
from jaxscale.models.model import Model, make_model, target_scores, token_losses
from jaxscale.models.stages import StageFunctions
from jaxscale.ops.attention.context_exchange import ContextLoad, resolve_context_exchange
from jaxscale.ops.config import AttentionNeeds
from jaxscale.ops.kernels import XLA_KERNELS, Kernels, resolve_kernels, with_context_parallelism, with_recorder
from jaxscale.ops.project import with_matmul_precision
from jaxscale.ops.quantized import with_matmul_dtype
from jaxscale.ops.recorder import NO_RECORDER, Recorder
from jaxscale.sharding import expert_axis
from jaxscale.sharding.batch_axes import BatchAxes, make_batch_axes
from jaxscale.sharding.context_axis import ContextAxis, make_context_axis
from jaxscale.sharding.expert_axis import EXPERTS, ExpertExchange, ExpertWork, make_expert_axis, resolve_expert_exchange
from jaxscale.sharding.offload import device_zeros, fetch_outside_blocks, make_fetching_gather
from jaxscale.sharding.pipeline_axis import AXIS, NO_PIPELINE_AXIS, PipelineAxis, share_vocab_with_stages
from jaxscale.sharding.rules import RULES, Rules
from jaxscale.sharding.shardings import batch_sharding, check_divides, no_gather, tree_shardings
from jaxscale.sharding.stage_weights import stage_gradients, stage_weights
from jaxscale.sharding.tensor_axis import TensorAxis, make_tensor_axis
from jaxscale.system.exits import BadInput

MAX_UNROLLED_LAYERS = 24  # on a single CPU device, where they compile as fast as a loop (2026-11-25)


class ParallelRequest(NamedTuple):
    """Requested context attention and expert exchange, and sizes of rows. None: not known in advance."""

    context_attention: str = "auto"  # setting context.attention
    row_length: int | None = None
    rows: int | None = None  # of a device and microbatch
    expert_exchange: str = "auto"  # setting expert.exchange


DEFAULT_REQUEST = ParallelRequest()


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model without its parameter values: their shapes, axes and shardings, and kernels for the mesh."""

    cfg: AnyModelConfig
    mesh: Mesh
    rules: Rules
    lora: LoraConfig  # adapters among the parameters
    offloaded: bool  # parameters are in host memory; those of blocks are fetched layer by layer
    needs: AttentionNeeds
    kernels: Kernels  # for rows sharded as in training
    whole_row_kernels: Kernels  # without context parallelism
    batch_axes: BatchAxes
    context: ContextAxis
    tensor: TensorAxis
    pipeline: PipelineAxis = NO_PIPELINE_AXIS
    exchange: ExpertExchange = ExpertExchange()

    def init(
        self,
        key: jax.Array,
        *,
        tensor: TensorAxis | None = None,
        recorder: Recorder = NO_RECORDER,
        gathered: bool = False,
        training: bool = False,
    ) -> Model:
        """Returns a new model. tensor: axis of a model whose context devices are replicas; None: as in training.
        gathered: it will be merged with gathered weights. training: with expert capacities."""
        gather = self.batch_axes.gather if self.batch_axes.reduce_axes and not gathered else no_gather
        kernels = self.kernels if tensor is None else self.whole_row_kernels
        kernels = dataclasses.replace(kernels, use_capacity=training)
        return make_model(
            self.cfg,
            key=key,
            kernels=kernels if recorder is NO_RECORDER else with_recorder(kernels, recorder),
            gather=make_fetching_gather(gather) if self.offloaded else gather,
            tensor=tensor or self.tensor,
            lora=self.lora,
        )

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef[Model]:
        """The model's definition, to merge with parameters."""
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
        return tree_shardings(self.mesh, self.axes, self.rules.params)

    @property
    def specs(self) -> Any:
        """The PartitionSpec of each parameter."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings)

    @property
    def slots_fallback_reason(self) -> str:
        """Why grouped matmuls of experts do not use GPU kernels, or ''; '' for a model without experts."""
        return self.kernels.experts.fallback_reason if self.cfg.active_params != self.cfg.num_params else ""

    @property
    def position_multiple(self) -> int:
        """Required divisor of the row length."""
        return self.context.multiple * self.tensor.size

    @property
    def rows_sharding(self) -> NamedSharding:
        """The sharding of a [rows, T] array of a batch."""
        return batch_sharding(self.mesh, self.rules.params)

    def stage_weights(self, params: Any) -> Any:
        """Returns the parameters of the device's stage, gathered."""
        dtype = jnp.promote_types(self.cfg.compute_dtype, self.cfg.embed_dtype)
        return stage_weights(params, self.axes, self.batch_axes, self.pipeline, dtype, chunked=BLOCKS)

    def stage_gradients(self, grads: Any) -> Any:
        """Sums gradients of stage_weights() over all devices."""
        return stage_gradients(grads, self.axes, self.batch_axes, self.pipeline, chunked=BLOCKS)

    def stage_functions(self, aux_weights: Mapping[str, float], num_sources: int) -> StageFunctions:
        """Returns the functions that a stage runs on the result of stage_weights()."""
        init = functools.partial(self.init, gathered=True, training=True)
        graphdef = split_model(jax.eval_shape(init, jax.random.key(0)))[0]
        stacks = {name: self.shapes[name] for name in self.cfg.layer_stacks}
        return StageFunctions(graphdef, stacks, self.cfg.compute_dtype, aux_weights, num_sources)

    def differentiable(self, params: Any) -> Any:
        """Returns the values to differentiate: parameters, or device-side zeros for offloaded ones."""
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

        variables: differentiable(params), when taking a gradient. tensor, recorder, training: as for init.
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
        return merge_model(graphdef, self.batch_axes.cast_stacks(variables, self.axes, self.cfg.compute_dtype))

    @property
    def token_losses(self) -> Callable[[Any, Batch], jax.Array]:
        """(params, batch) -> nats_BT of a global batch."""
        rows = self.rows_sharding.spec
        return self.batch_axes.shard_map(self.with_model(token_losses), (self.specs, rows), rows)

    @property
    def target_scores(self) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
        """(params, batch) -> (nats_BT, True if no token is likelier) of a global batch."""
        rows = self.rows_sharding.spec
        return self.batch_axes.shard_map(self.with_model(target_scores), (self.specs, rows), (rows, rows))

    def with_model(self, f: Callable) -> Callable:
        """Returns f(model, batch) as a function of (params, batch) that gathers all positions of the result."""
        run = lambda params, batch: self.context.all_gather(f(self.merge(params), self.context.local(batch)))
        return with_matmul_precision(self.cfg.matmul_precision, run)


@functools.lru_cache(maxsize=16)
def abstract_params(cfg: AnyModelConfig, lora: LoraConfig) -> tuple[Any, Any]:
    """Returns (shapes, logical axes) of the parameters, independent of mesh and kernels."""
    make = lambda key: make_model(cfg, key=key, kernels=XLA_KERNELS, lora=lora)
    return split_model(jax.eval_shape(make, jax.random.key(0)))[1:]


def shard_model(
    cfg: AnyModelConfig,
    mesh: Mesh,
    rules: str | Rules,
    *,
    lora: LoraConfig = NO_LORA,
    offloaded: bool = False,
    prefix: bool = False,
    reduce_dtype: Any = jnp.float32,
    torus_at_once: bool = False,
    request: ParallelRequest = DEFAULT_REQUEST,
    pipeline: PipelineAxis = NO_PIPELINE_AXIS,
) -> ShardedModel:
    """Returns the model on a mesh. Raises BadInput if the mesh does not divide its parameters.

    lora: adapters, part of the parameters until they are merged. prefix: rows have a bidirectional prefix.
    reduce_dtype: in which gradients are summed. torus_at_once: a collective over several torus dimensions is one
    operation, which XLA must support (compiler_options.offloads_torus); otherwise one per dimension. pipeline: stages,
    for training; with one stage the pipeline axis shards rows and weights like data and fsdp.
    """
    rules = RULES[rules] if isinstance(rules, str) else rules
    if mesh.shape[AXIS] > 1:
        rules = pipeline.rules(rules)
    device, needs = mesh.devices.flat[0], cfg.attention_needs(prefix=prefix)
    kernels = with_matmul_dtype(resolve_kernels(device.platform, cfg.attention, needs, device), cfg.matmul_dtype)
    exchange = resolve_expert_exchange(request.expert_exchange, expert_work(cfg, mesh, request))
    axis = make_expert_axis(mesh, exchange)
    kernels = dataclasses.replace(kernels, expert_axis=axis, scan_layers=scans_layers(cfg, mesh))
    ungathered = (EXPERTS,) if exchange.form == "send" else ()
    batch_axes = make_batch_axes(mesh, rules, reduce_dtype, torus_at_once=torus_at_once, ungathered=ungathered)
    load = context_work(cfg, mesh, request)
    sharing = resolve_context_exchange(request.context_attention, kernels.attention, needs, load)
    context = make_context_axis(mesh, zigzag=sharing.form != "ulysses", torus_at_once=torus_at_once)
    tensor = share_vocab_with_stages(make_tensor_axis(mesh, torus_at_once=torus_at_once, context=context), pipeline)
    shared_kernels = with_context_parallelism(kernels, sharing, needs, context, device)
    parallel = batch_axes, context, tensor, pipeline, exchange
    model = ShardedModel(cfg, mesh, rules, lora, offloaded, needs, shared_kernels, kernels, *parallel)
    check_fits(model, rules.params)
    return model


def scans_layers(cfg: AnyModelConfig, mesh: Mesh) -> bool:
    """True if a stack is one compiled loop. False for a few layers on one CPU device: slicing weights from the stack
    and writing gradients back takes up to half of a step in bfloat16 and a tenth in float32 there (4 layers, 2
    cores, jax 0.10.2, 2026-11-25)."""
    return mesh.size > 1 or mesh.devices.flat[0].platform != "cpu" or cfg.num_layers > MAX_UNROLLED_LAYERS


def context_work(cfg: AnyModelConfig, mesh: Mesh, request: ParallelRequest) -> ContextLoad:
    """Returns the sizes that determine the attention over the context axis."""
    chip = find_chip(mesh.devices.flat[0].device_kind)
    return ContextLoad(
        devices=mesh.shape["context"],
        kv_heads=cfg.key_width // cfg.head_dim // mesh.shape["tensor"],
        rows=request.rows,
        row_length=request.row_length,
        memory_bytes=chip and chip.hbm_bytes,
        in_pipeline=mesh.shape[AXIS] > 1,
    )


def expert_work(cfg: AnyModelConfig, mesh: Mesh, request: ParallelRequest) -> ExpertWork:
    """Returns the sizes that determine the exchange between tokens and experts."""
    experts, shape = cfg.experts, mesh.shape
    if experts is None:
        return ExpertWork(1, 0, 0)
    chip, item = find_chip(mesh.devices.flat[0].device_kind), jnp.dtype(cfg.compute_dtype).itemsize
    tokens = None if request.rows is None or request.row_length is None else request.rows * request.row_length
    return ExpertWork(
        devices=shape[expert_axis.AXIS],
        layer_bytes=3 * experts.number * cfg.embed_dim * experts.mlp_dim * item // shape["tensor"],
        row_bytes=cfg.embed_dim * item,
        rows=None if tokens is None else tokens // shape["context"] * experts.chosen,
        memory_bytes=chip and chip.hbm_bytes,
    )


def check_fits(model: ShardedModel, *tables: Any) -> None:
    """Raises BadInput unless the mesh divides every parameter under each of these rule tables."""
    uneven = [line for table in tables for line in check_divides(model.shapes, model.axes, table, model.mesh.shape)]
    if uneven:
        raise BadInput(
            f"model and mesh do not fit: {'; '.join(dict.fromkeys(uneven))}; choose a mesh axis that divides"
        )
