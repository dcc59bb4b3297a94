"""RunConfig -> mesh, model, optimizer and the step that is compiled.

It needs no data and no work folder, so that other tools can compile the very same; run.py adds those.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale import units
from jaxscale.config import Budget, RunConfig
from jaxscale.data.batch import Batch
from jaxscale.models import make_model, unembed
from jaxscale.models.layers import merge_model, split_model
from jaxscale.models.loss import summed_loss, token_losses
from jaxscale.ops.kernels import choose_kernels
from jaxscale.optim.groups import assign_groups, group_table
from jaxscale.optim.optimizers import freeze, make_optimizer, moment_axes
from jaxscale.optim.schedules import Schedule, make_schedule
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.place import batch_sharding, check_divides, make_constrain, replicated, tree_shardings
from jaxscale.sharding.rules import RULES, axis_size
from jaxscale.train.loss_scale import init_loss_scale, is_dynamic
from jaxscale.train.state import TrainState, init_state, state_axes
from jaxscale.train.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Program:
    """What a config compiles to on a mesh."""

    cfg: RunConfig
    mesh: Mesh
    attention: str  # the kernel that was chosen
    init: Callable[[], TrainState]  # jitted: the whole state is born sharded
    abstract_state: TrainState  # shapes, dtypes and shardings
    train_step: Callable  # jitted: (state, batch) -> (state, metrics); the state is donated
    token_losses: Callable  # pure: (params, batch) -> nats_BT
    next_logits: Callable  # pure: (params, tokens_BT, last) -> logits_BV
    schedule: Schedule
    batch_sharding: jax.sharding.NamedSharding
    batch_shards: int
    parameter_table: list[tuple[str, str, str, str, str]]

    @property
    def abstract_batch(self) -> Batch:
        """The batch that train_step is compiled for."""
        shape = (self.cfg.rows_per_step, self.cfg.seq_len)
        make = lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)
        return Batch(*[make(jnp.int32)] * 4, weights=make(jnp.float32))


def make_program(cfg: RunConfig, budget: Budget, devices: Sequence[jax.Device] | None = None) -> Program:
    """The model, optimizer and step of a config over `devices` (all unless given). Compiles nothing yet."""
    mesh = make_mesh(cfg.mesh, devices)
    platform = mesh.devices.flat[0].platform
    rules = RULES[cfg.rules]
    kernels = choose_kernels(platform, cfg.model.attention, one_device=mesh.size == 1)
    constrain = make_constrain(mesh, rules.params)
    precision = functools.partial(matmul_precision, cfg.model.matmul_precision)

    def make(key: jax.Array):
        return make_model(cfg.model, key=key, kernels=kernels, constrain=constrain)

    graphdef, shapes, axes = split_model(jax.eval_shape(make, jax.random.key(0)))
    check_layout(cfg, mesh, shapes, axes)
    groups = assign_groups(axes, cfg.optim.groups, cfg.optim.weight_decay, cfg.optim.weight_decay_all)
    schedule = make_schedule(
        decay=cfg.optim.decay,
        peak_lr=cfg.optim.peak_lr,
        min_lr=cfg.optim.min_lr,
        warmup_steps=budget.warmup_steps,
        total_steps=budget.total_steps,
        decay_fraction=cfg.optim.decay_fraction,
    )
    optimizer = make_optimizer(cfg.optim, schedule, groups)

    params_sharding = tree_shardings(mesh, axes, rules.params)
    grads_sharding = tree_shardings(mesh, axes, rules.grads)
    moments_sharding = tree_shardings(mesh, moment_axes(optimizer, shapes, axes), rules.moments)
    state_sharding = tree_shardings(mesh, state_axes((), ()), rules.params)
    state_sharding = state_sharding._replace(params=params_sharding, opt_state=moments_sharding)
    rows_sharding = batch_sharding(mesh, rules.params)

    def init() -> TrainState:
        params_key, run_key = jax.random.split(jax.random.key(cfg.seed))
        _, params, _ = split_model(make(params_key))
        scale = init_loss_scale(cfg.train.loss_scale, cfg.model.compute_dtype)
        return init_state(params, optimizer, scale, run_key)

    def loss_fn(params: Any, batch: Batch, key: jax.Array):
        return summed_loss(merge_model(graphdef, freeze(params, groups)), batch, key, cfg.train.aux_losses)

    def losses(params: Any, batch: Batch) -> jax.Array:
        with precision():
            return token_losses(merge_model(graphdef, params), batch)

    def next_logits(params: Any, tokens_BT: jax.Array, last: jax.Array) -> jax.Array:
        model = merge_model(graphdef, params)
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
        with precision():
            h_BTD = model.hidden(tokens_BT, positions_BT, jnp.ones_like(tokens_BT))
            h_BD = jax.lax.dynamic_index_in_dim(h_BTD, last, axis=1, keepdims=False)
            return unembed(model, h_BD)

    train_step = make_train_step(
        loss_fn,
        optimizer,
        schedule,
        num_microbatches=cfg.train.num_microbatches,
        guard_cfg=cfg.train.guard,
        scale_cfg=cfg.train.loss_scale,
        dynamic_scale=is_dynamic(cfg.train.loss_scale, cfg.model.compute_dtype),
        place_grads=lambda grads: jax.lax.with_sharding_constraint(grads, grads_sharding),
    )

    def precise_step(state: TrainState, batch: Batch):
        with precision():  # around the backward pass too
            return train_step(state, batch)

    abstract = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(init),
        state_sharding,
    )
    return Program(
        cfg=cfg,
        mesh=mesh,
        attention=kernels.attention,
        init=jax.jit(init, out_shardings=state_sharding),
        abstract_state=abstract,
        train_step=jax.jit(
            precise_step,
            in_shardings=(state_sharding, rows_sharding),
            out_shardings=(state_sharding, replicated(mesh)),
            donate_argnums=0,
        ),
        token_losses=losses,
        next_logits=next_logits,
        schedule=schedule,
        batch_sharding=rows_sharding,
        batch_shards=axis_size("act_batch", rules.params, mesh.shape),
        parameter_table=group_table(shapes, params_sharding, groups),
    )


def matmul_precision(name: str):
    """A context in which float32 products have this precision."""
    return (
        contextlib.nullcontext()
        if name == "default"
        else jax.default_matmul_precision({"tf32": "tensorfloat32", "highest": "highest"}[name])
    )


def check_layout(cfg: RunConfig, mesh: Mesh, shapes: Any, axes: Any) -> None:
    """Raises ValueError unless the mesh divides every array, and each microbatch's rows.

    XLA would compile uneven rows, and copy whole activations between devices at every layer.
    """
    rules = RULES[cfg.rules]
    uneven = check_divides(shapes, axes, rules.params, mesh.shape) + check_divides(
        shapes, axes, rules.moments, mesh.shape
    )
    if uneven:
        raise ValueError(
            f"model and mesh do not fit: {'; '.join(dict.fromkeys(uneven))}; choose a mesh axis that divides"
        )
    rows, parts = cfg.rows_per_step, cfg.train.num_microbatches
    shards = axis_size("act_batch", rules.params, mesh.shape)
    if rows // parts % shards:
        fitting = [part for part in units.divisors(rows) if rows // part % shards == 0]
        way_out = f"use {units.or_list(fitting)}" if fitting else "use fewer devices on data and fsdp"
        raise ValueError(
            f"train.num_microbatches={parts} leaves {rows // parts} rows for {shards} batch shards (mesh data x fsdp); "
            f"{way_out}, or a batch of {parts * shards} rows: batch_tokens={parts * shards * cfg.seq_len}"
        )
