"""RunConfig -> mesh, model, optimizer and the step that is compiled.

It needs no data and no work folder, so that other tools can compile the very same; run.py adds those.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import units
from jaxscale.config import Budget, RunConfig
from jaxscale.data.batch import Batch, EncoderInput
from jaxscale.data.mixture import mixture_names
from jaxscale.models import attention_needs, layer_stacks, make_model
from jaxscale.models.layers import merge_model, split_model
from jaxscale.models.lora import is_adapter
from jaxscale.models.loss import summed_loss, target_scores, token_losses
from jaxscale.ops.kernels import Kernels, choose_kernels, make_taps, with_taps
from jaxscale.ops.precision import matmul_precision
from jaxscale.ops.quantized import with_matmul_dtype
from jaxscale.ops.taps import BLIND, Blind
from jaxscale.optim.groups import assign_groups, group_table
from jaxscale.optim.optimizers import learning, make_optimizer, moment_axes, optim_schedule, with_frozen
from jaxscale.optim.schedules import Schedule
from jaxscale.sharding.batch_axes import make_batch_axes
from jaxscale.sharding.compiler_options import CompilerOptions, check_options, compiler_options
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.offload import call_in, check_host_memory, fetching, on_host, stand_ins
from jaxscale.sharding.place import (
    batch_sharding,
    check_divides,
    is_axes,
    replicated,
    tree_shardings,
    whole_already,
)
from jaxscale.sharding.rules import RULES, axis_size
from jaxscale.sharding.tensor_axis import make_tensor_axis
from jaxscale.system import faults
from jaxscale.system.exits import BadInput
from jaxscale.training.accumulate import Reduction, accumulate
from jaxscale.training.ema import init_ema
from jaxscale.training.loss_scale import init_loss_scale, is_dynamic
from jaxscale.training.state import TrainState, init_state, state_axes
from jaxscale.training.statistics import StatisticsStep, joined, make_statistics_step, parameter_groups
from jaxscale.training.step import gradients_at, make_train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """What a config compiles to on a mesh."""

    cfg: RunConfig
    mesh: Mesh
    attention: str  # the kernel that was chosen
    why_plain: str  # what kept it from the platform's own attention, or ""
    init: Callable[[], TrainState]  # jitted: the whole state is born sharded
    abstract_state: TrainState  # shapes, dtypes and shardings
    abstract_grads: Any  # the same, of gradients summed over all devices
    train_step: Callable  # jitted: (state, batch) -> (state, metrics); the state is donated
    gradient_norms: Callable  # jitted: (state, batch) -> {name: norm} of each gradient; compiled if it is ever called
    statistics: StatisticsStep  # jitted, the state is not donated; compiled if it is ever called
    token_losses: Callable  # pure: (params, batch) -> nats_BT
    target_scores: Callable  # pure: (params, batch) -> (nats_BT, whether no token is likelier)
    schedule: Schedule
    batch_sharding: jax.sharding.NamedSharding
    batch_shards: int
    parameter_table: list[tuple[str, str, str, str, str]]
    compiler_options: CompilerOptions  # that train_step is compiled with

    @property
    def abstract_batch(self) -> Batch:
        """The batch that train_step is compiled for."""
        rows, lengths = self.cfg.rows_per_step, self.cfg.row_lengths
        make = lambda length, dtype: jax.ShapeDtypeStruct((rows, length), dtype, sharding=self.batch_sharding)
        ids, encoder = make(lengths.row, jnp.int32), None
        if lengths.encoder is not None:
            encoder = EncoderInput(*[make(lengths.encoder, jnp.int32)] * 3)
        prefix = ids if lengths.prefix else None
        sources = ids if self.cfg.data.mixture else None
        weights = make(lengths.row, jnp.float32)
        return Batch(ids, ids, ids, ids, weights, sources=sources, prefix=prefix, encoder=encoder)


def make_program(cfg: RunConfig, budget: Budget, devices: Sequence[jax.Device] | None = None) -> Program:
    """The model, optimizer and step of a config over `devices` (all unless given). Compiles nothing yet."""
    mesh = make_mesh(cfg.mesh, devices)
    device = mesh.devices.flat[0]
    platform = device.platform
    options = compiler_options(platform, device.device_kind, cfg.compiler, os.environ)
    check_options(cfg.compiler, device)
    rules = RULES[cfg.rules]
    needs = attention_needs(cfg.model, prefix=cfg.row_lengths.prefix)
    kernels = choose_kernels(platform, cfg.model.attention, needs, device)
    kernels = with_matmul_dtype(kernels, cfg.model.matmul_dtype)
    batch_axes = make_batch_axes(mesh, rules, cfg.train.reduce_dtype)
    gather = batch_axes.gather if batch_axes.axes else whole_already
    away = cfg.optim.offload_params
    gather = fetching(gather) if away else gather
    tensor = make_tensor_axis(mesh)
    precision = functools.partial(matmul_precision, cfg.model.matmul_precision)

    def make(key: jax.Array, kernels: Kernels = kernels):
        return make_model(cfg.model, key=key, kernels=kernels, gather=gather, tensor=tensor, lora=cfg.lora)

    graphdef, shapes, axes = split_model(jax.eval_shape(make, jax.random.key(0)))
    check_layout(cfg, mesh, shapes, axes)
    learns = is_adapter if cfg.lora.on else lambda name: True
    groups = assign_groups(axes, cfg.optim.groups, cfg.optim.weight_decay, cfg.optim.weight_decay_all, learns)
    schedule = optim_schedule(cfg.optim, warmup_steps=budget.warmup_steps, total_steps=budget.total_steps)
    is_stacked = jax.tree.map(lambda names: names[:1] == ("layers",), axes, is_leaf=is_axes)
    optimizer = make_optimizer(cfg.optim, schedule, groups, is_stacked)

    params_sharding = tree_shardings(mesh, axes, rules.params)
    # summed over devices, they are cut as the moments are
    grads_sharding = learning(tree_shardings(mesh, axes, rules.moments), groups)
    moments_sharding = tree_shardings(mesh, moment_axes(optimizer, shapes, axes), rules.moments)
    state_sharding = tree_shardings(mesh, state_axes((), ()), rules.params)
    ema_sharding = init_ema(cfg.train.ema, grads_sharding)  # nothing but the step reads it
    state_sharding = state_sharding._replace(params=params_sharding, opt_state=moments_sharding, ema=ema_sharding)
    resting_sharding = at_rest(cfg, state_sharding, mesh)  # between two steps
    rows_sharding = batch_sharding(mesh, rules.params)

    def init() -> TrainState:
        params_key, run_key = jax.random.split(jax.random.key(cfg.seed))
        _, params, _ = split_model(make(params_key))
        scale = init_loss_scale(cfg.train.loss_scale, cfg.model.compute_dtype)
        return init_state(
            params,
            optimizer,
            scale,
            run_key,
            init_ema(cfg.train.ema, learning(params, groups)),
            cfg.train.guard.window_steps,
        )

    reduction = Reduction(
        batch_axes.num_shards,
        batch_axes.first_row,
        lambda grads: batch_axes.reduce_each(grads, axes),
        lambda grads: batch_axes.reduce_last(grads, axes),
        batch_axes.sum,
    )
    num_microbatches, num_sources = cfg.train.num_microbatches, len(mixture_names(cfg.data.mixture))

    def learnable(params: Any):
        """What gradients are taken by: the parameters, or what stands in for them."""
        return stand_ins(params) if away else params

    def model_of(params: Any, learned: Any, taps: Blind = BLIND):
        """The model with these parameters, and learnable(params)."""
        tapped = lambda key: make(key, with_taps(kernels, taps))
        definition = graphdef if taps is BLIND else split_model(jax.eval_shape(tapped, jax.random.key(0)))[0]
        return merge_model(definition, call_in(params, learned) if away else learned)

    def gradients(params: Any, batch: Batch, key: jax.Array, scale: jax.Array, *, watched: bool = False):
        every = learnable(params)

        def loss_fn(learned: Any, batch: Batch, keys_B: jax.Array):
            taps = make_taps(kernels, needs, tensor) if watched else BLIND
            model = model_of(params, with_frozen(learned, every), taps)
            total, parts = summed_loss(model, batch, keys_B, cfg.train.aux_losses, num_sources)
            return total, parts | taps.parts()

        learned = learning(every, groups)  # the clip norm is that of what learns
        means, grads = accumulate(
            loss_fn, learned, batch, key, num_microbatches=num_microbatches, scale=scale, reduction=reduction
        )
        return joined(means, batch_axes, tensor), grads

    def losses(params: Any, batch: Batch) -> jax.Array:
        with precision():
            return token_losses(model_of(params, learnable(params)), batch)

    def scores(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with precision():
            return target_scores(model_of(params, learnable(params)), batch)

    specs = lambda shardings: jax.tree.map(lambda sharding: sharding.spec, shardings)
    params_specs, rows_spec = specs(params_sharding), rows_sharding.spec
    in_specs, out_specs = (params_specs, rows_spec, P(), P()), (P(), specs(grads_sharding))
    spread_gradients = batch_axes.spread(gradients, in_specs, out_specs)
    spoil = gradient_spoiler()
    train_step = make_train_step(
        spread_gradients,
        optimizer,
        schedule,
        guard_cfg=cfg.train.guard,
        scale_cfg=cfg.train.loss_scale,
        dynamic_scale=is_dynamic(cfg.train.loss_scale, cfg.model.compute_dtype),
        clip_norm=cfg.optim.clip_norm,
        ema_cfg=cfg.train.ema,
        count_gated=cfg.data.gate.on,
        spoil=spoil,
    )

    def gradient_norms(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        with precision():
            _, grads = gradients_at(spread_gradients, state, batch, spoil)
        return {leaf_name(path): optax.tree.norm(grad) for path, grad in jax.tree_util.tree_leaves_with_path(grads)}

    statistics_step = make_statistics_step(
        batch_axes.spread(functools.partial(gradients, watched=True), in_specs, out_specs),
        optimizer,
        parameter_groups(axes, layer_stacks(cfg.model)),
        spoil=spoil,
    )

    def statistics(state: TrainState, batch: Batch):
        with precision():
            return statistics_step(state, batch)

    def precise_step(state: TrainState, batch: Batch):
        with precision():  # around the backward pass too
            return train_step(state, batch)

    placed = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    return Program(
        cfg=cfg,
        mesh=mesh,
        attention=kernels.attention,
        why_plain=kernels.why_plain,
        init=jax.jit(init, out_shardings=resting_sharding),
        abstract_state=jax.tree.map(placed, jax.eval_shape(init), resting_sharding),
        abstract_grads=jax.tree.map(placed, learning(shapes, groups), grads_sharding),
        train_step=jax.jit(
            precise_step,
            in_shardings=(resting_sharding, rows_sharding),
            out_shardings=(resting_sharding, replicated(mesh)),
            donate_argnums=0,
            compiler_options=options.values or None,
        ),
        gradient_norms=jax.jit(
            gradient_norms, in_shardings=(resting_sharding, rows_sharding), out_shardings=replicated(mesh)
        ),
        statistics=jax.jit(
            statistics,
            in_shardings=(resting_sharding, rows_sharding),
            out_shardings=replicated(mesh),
            compiler_options=options.values or None,
        ),
        token_losses=batch_axes.spread(losses, (params_specs, rows_spec), rows_spec),
        target_scores=batch_axes.spread(scores, (params_specs, rows_spec), (rows_spec, rows_spec)),
        schedule=schedule,
        batch_sharding=rows_sharding,
        batch_shards=axis_size("act_batch", rules.params, mesh.shape),
        parameter_table=group_table(shapes, params_sharding, groups),
        compiler_options=options,
    )


def leaf_name(path: Any) -> str:
    """'blocks/mlp/up', as checkpoints name it behind 'params/'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def gradient_spoiler() -> Callable[[Any, jax.Array], Any]:
    """(gradients, steps done) -> the gradients, one of them NaN where a test asks for that."""
    fault = faults.spoilt_gradient()
    if fault is None:
        return lambda grads, step: grads

    def spoil(grads: Any, step: jax.Array) -> Any:
        at = lambda path, grad: (
            jnp.where(step + 1 == fault.step, jnp.nan, grad) if leaf_name(path) == fault.leaf else grad
        )
        return jax.tree_util.tree_map_with_path(at, grads)

    return spoil


def at_rest(cfg: RunConfig, state: TrainState, mesh: Mesh) -> TrainState:
    """Where the state's arrays live between two steps: as `state` says, or in the host's memory.

    Raises BadInput where the config wants host memory and the devices have none.
    """
    for setting, field in (("offload_moments", "opt_state"), ("offload_params", "params")):
        if getattr(cfg.optim, setting):
            check_host_memory(f"optim.{setting}=true", mesh)
            state = state._replace(**{field: on_host(getattr(state, field))})
    return state


def check_layout(cfg: RunConfig, mesh: Mesh, shapes: Any, axes: Any) -> None:
    """Raises BadInput unless the mesh divides every array, and each microbatch's rows.

    XLA would compile uneven rows, and copy whole activations between devices at every layer.
    """
    rules = RULES[cfg.rules]
    uneven = check_divides(shapes, axes, rules.params, mesh.shape) + check_divides(
        shapes, axes, rules.moments, mesh.shape
    )
    if uneven:
        raise BadInput(
            f"model and mesh do not fit: {'; '.join(dict.fromkeys(uneven))}; choose a mesh axis that divides"
        )
    tensor, lengths = mesh.shape["tensor"], cfg.row_lengths
    made_rows = lengths.row != cfg.seq_len or lengths.encoder is not None
    if made_rows and any((length or 0) % tensor for length in lengths[:2]):
        raise BadInput(
            f"data.objective makes rows of {' and '.join(str(length) for length in lengths[:2] if length)} tokens, no "
            f"multiples of mesh.tensor={tensor}, which shares the positions of a row; use data.objective.multiple_of="
            f"{tensor}, or another mesh"
        )
    if not made_rows and cfg.seq_len % tensor:
        fitting = cfg.seq_len // tensor * tensor
        raise BadInput(
            f"seq_len={cfg.seq_len} is not a multiple of mesh.tensor={tensor}, which shares the positions of a row; "
            f"use seq_len={fitting or tensor}, or another mesh"
        )
    rows, parts = cfg.rows_per_step, cfg.train.num_microbatches
    shards = axis_size("act_batch", rules.params, mesh.shape)
    if rows // parts % shards:
        fitting = [part for part in units.divisors(rows) if rows // part % shards == 0]
        way_out = f"use {units.or_list(fitting)}" if fitting else "use fewer devices on data and fsdp"
        raise BadInput(
            f"train.num_microbatches={parts} leaves {rows // parts} rows for {shards} batch shards (mesh data x fsdp); "
            f"{way_out}, or a batch of {parts * shards} rows: batch_tokens={parts * shards * cfg.seq_len}"
        )
