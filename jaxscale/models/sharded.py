"""A model sharded over a mesh, for training, evaluation and sampling alike: where its parameters live, how it is built
from them, and its losses. B batch  T position
"""

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
from jaxscale.models.stages import Pieces
from jaxscale.ops.attention.sharing import SharedWork, choose_sharing
from jaxscale.ops.config import AttentionNeeds
from jaxscale.ops.kernels import PLAIN, Kernels, choose_kernels, share_rows, with_recorder
from jaxscale.ops.project import with_precision
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

MOST_APART = 24  # layers of a stack, each compiled on its own on a CPU: so many compile as fast as a loop (2026-11-25)


class SharedRows(NamedTuple):
    """Of rows whose positions devices share. None: not known before they come."""

    wish: str = "auto"  # as context.attention has it
    length: int | None = None
    rows: int | None = None  # of a device, at a time
    exchange: str = "auto"  # of experts, as expert.exchange has it


ANY_ROWS = SharedRows()


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model without its parameters: their shapes, axes and shardings, and the kernels that suit the mesh."""

    cfg: AnyModelConfig
    mesh: Mesh
    rules: Rules
    lora: LoraConfig  # of the adapters among the parameters
    offloaded: bool  # parameters come in the host's memory; those of the blocks are fetched one by one
    needs: AttentionNeeds
    kernels: Kernels  # for rows as training shares them
    whole_row_kernels: Kernels  # the same where context is not in use
    batch_axes: BatchAxes
    context: ContextAxis
    tensor: TensorAxis
    pipeline: PipelineAxis = NO_PIPELINE_AXIS
    exchange: ExpertExchange = ExpertExchange()  # how tokens and experts meet

    def init(
        self,
        key: jax.Array,
        *,
        tensor: TensorAxis | None = None,
        recorder: Recorder = NO_RECORDER,
        whole: bool = False,
        learns: bool = False,
    ) -> Model:
        """A new model. tensor: how the devices of that axis share a row, those of context being copies; None: as in
        training. whole: it will be given weights that are whole already. learns: with the limits of a training step."""
        gather = self.batch_axes.gather if self.batch_axes.reduce_axes and not whole else no_gather
        kernels = self.kernels if tensor is None else self.whole_row_kernels
        kernels = dataclasses.replace(kernels, limits=learns)
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
        """The model's definition, which its parameters complete."""
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
    def why_slots(self) -> str:
        """What kept the products of experts from a GPU's kernels, or ''; '' of a model without experts."""
        return self.kernels.experts.why_slots if self.cfg.active_params != self.cfg.num_params else ""

    @property
    def position_multiple(self) -> int:
        """What must divide the positions of a row, which devices share."""
        return self.context.multiple * self.tensor.size

    @property
    def rows_sharding(self) -> NamedSharding:
        """The sharding of a [rows, T] array of a batch."""
        return batch_sharding(self.mesh, self.rules.params)

    def stage_weights(self, params: Any) -> Any:
        """The parameters of the device's own stage, as its products read them."""
        dtype = jnp.promote_types(self.cfg.compute_dtype, self.cfg.embed_dtype)
        return stage_weights(params, self.axes, self.batch_axes, self.pipeline, dtype, chunked=BLOCKS)

    def stage_gradients(self, grads: Any) -> Any:
        """Gradients of stage_weights(), summed over all devices."""
        return stage_gradients(grads, self.axes, self.batch_axes, self.pipeline, chunked=BLOCKS)

    def pieces(self, aux_weights: Mapping[str, float], num_sources: int) -> Pieces:
        """What a stage runs, on weights that stage_weights() has brought together."""
        init = functools.partial(self.init, whole=True, learns=True)
        graphdef = split_model(jax.eval_shape(init, jax.random.key(0)))[0]
        stacks = {name: self.shapes[name] for name in self.cfg.layer_stacks}
        return Pieces(graphdef, stacks, self.cfg.compute_dtype, aux_weights, num_sources)

    def differentiable(self, params: Any) -> Any:
        """What to differentiate with respect to: the parameters, or device-side zeros for offloaded ones."""
        return device_zeros(params) if self.offloaded else params

    def merge(
        self,
        params: Any,
        variables: Any = None,
        *,
        tensor: TensorAxis | None = None,
        recorder: Recorder = NO_RECORDER,
        learns: bool = False,
    ) -> Model:
        """The model with these parameters, in a function that each device of the mesh computes on its own shards.

        variables: differentiable(params), where a gradient is taken. tensor, recorder, learns: as for init.
        """
        learns = learns and self.cfg.experts is not None and self.cfg.experts.capacity_factor > 0
        if tensor is not None or recorder is not NO_RECORDER or learns:
            init = functools.partial(self.init, tensor=tensor, recorder=recorder, learns=learns)
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
        """(params, batch) -> (nats_BT, whether no token is likelier) of a global batch."""
        rows = self.rows_sharding.spec
        return self.batch_axes.shard_map(self.with_model(target_scores), (self.specs, rows), (rows, rows))

    def with_model(self, f: Callable) -> Callable:
        """f(model, batch) as a function of (params, batch); what it returns has all positions."""
        run = lambda params, batch: self.context.all_gather(f(self.merge(params), self.context.local(batch)))
        return with_precision(self.cfg.matmul_precision, run)


@functools.lru_cache(maxsize=16)
def abstract_params(cfg: AnyModelConfig, lora: LoraConfig) -> tuple[Any, Any]:
    """(shapes, logical axes) of the parameters, which neither mesh nor kernels change."""
    make = lambda key: make_model(cfg, key=key, kernels=PLAIN, lora=lora)
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
    shared: SharedRows = ANY_ROWS,
    pipeline: PipelineAxis = NO_PIPELINE_AXIS,
) -> ShardedModel:
    """The model on a mesh. Raises BadInput where the mesh does not divide its parameters.

    lora: of the adapters that the model is trained with: they are among its parameters until they are merged.
    prefix: rows have a prefix that is attended to in both directions. reduce_dtype: in which gradients are summed.
    torus_at_once: a collective along several dimensions of a torus is one operation, which XLA must be able to run
    (compiler_options.offloads_torus); else it takes one dimension after the other. shared: how those of the context
    axis share rows. pipeline: its stages, to train; with one stage the devices of that axis share rows and weights like
    those of data and fsdp.
    """
    rules = RULES[rules] if isinstance(rules, str) else rules
    if mesh.shape[AXIS] > 1:
        rules = pipeline.rules(rules)
    device, needs = mesh.devices.flat[0], cfg.attention_needs(prefix=prefix)
    kernels = with_matmul_dtype(choose_kernels(device.platform, cfg.attention, needs, device), cfg.matmul_dtype)
    exchange = resolve_expert_exchange(shared.exchange, expert_work(cfg, mesh, shared))
    axis = make_expert_axis(mesh, exchange)
    kernels = dataclasses.replace(kernels, expert_axis=axis, loop_layers=loops_layers(cfg, mesh))
    ungathered = (EXPERTS,) if exchange.form == "send" else ()
    batch_axes = make_batch_axes(mesh, rules, reduce_dtype, torus_at_once=torus_at_once, ungathered=ungathered)
    sharing = choose_sharing(shared.wish, kernels.attention, needs, shared_work(cfg, mesh, shared))
    context = make_context_axis(mesh, zigzag=sharing.form != "ulysses", torus_at_once=torus_at_once)
    tensor = share_vocab_with_stages(make_tensor_axis(mesh, torus_at_once=torus_at_once, context=context), pipeline)
    shared_kernels = share_rows(kernels, sharing, needs, context, device)
    model = ShardedModel(
        cfg,
        mesh,
        rules,
        lora,
        offloaded,
        needs,
        shared_kernels,
        kernels,
        batch_axes,
        context,
        tensor,
        pipeline,
        exchange,
    )
    check_fits(model, rules.params)
    return model


def loops_layers(cfg: AnyModelConfig, mesh: Mesh) -> bool:
    """Whether one compiled layer runs for all of a stack. Not for a few layers on one CPU device: a loop takes each
    layer's weights out of the stack and puts their gradients back into it, which there is up to half of a step in
    bfloat16 and a tenth in float32 (4 layers, 2 cores, jax 0.10.2, 2026-11-25)."""
    return mesh.size > 1 or mesh.devices.flat[0].platform != "cpu" or cfg.num_layers > MOST_APART


def shared_work(cfg: AnyModelConfig, mesh: Mesh, shared: SharedRows) -> SharedWork:
    """What chooses how devices of the context axis meet each other's keys."""
    chip = find_chip(mesh.devices.flat[0].device_kind)
    return SharedWork(
        devices=mesh.shape["context"],
        kv_heads=cfg.key_width // cfg.head_dim // mesh.shape["tensor"],
        rows=shared.rows,
        row_length=shared.length,
        memory_bytes=chip and chip.hbm_bytes,
        in_pipeline=mesh.shape[AXIS] > 1,
    )


def expert_work(cfg: AnyModelConfig, mesh: Mesh, shared: SharedRows) -> ExpertWork:
    """What chooses how tokens and experts meet."""
    experts, shape = cfg.experts, mesh.shape
    if experts is None:
        return ExpertWork(1, 0, 0)
    chip, item = find_chip(mesh.devices.flat[0].device_kind), jnp.dtype(cfg.compute_dtype).itemsize
    tokens = None if shared.rows is None or shared.length is None else shared.rows * shared.length
    return ExpertWork(
        devices=shape[expert_axis.AXIS],
        layer_bytes=3 * experts.number * cfg.embed_dim * experts.mlp_dim * item // shape["tensor"],
        row_bytes=cfg.embed_dim * item,
        rows=None if tokens is None else tokens // shape["context"] * experts.chosen,
        memory_bytes=chip and chip.hbm_bytes,
    )


def check_fits(model: ShardedModel, *tables: Any) -> None:
    """Raises BadInput unless the mesh divides every parameter as each of these rule tables places it."""
    uneven = [line for table in tables for line in check_divides(model.shapes, model.axes, table, model.mesh.shape)]
    if uneven:
        raise BadInput(
            f"model and mesh do not fit: {'; '.join(dict.fromkeys(uneven))}; choose a mesh axis that divides"
        )
