"""Builds the mesh, sharded model, optimizer and compiled step of a RunConfig.

Needs no data and no work folder, so that other tools can compile the same program. runtime/run/opening.py adds them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxscale.config import RunConfig
from jaxscale.core.batch import Batch, EncoderInput
from jaxscale.core.mesh import make_mesh
from jaxscale.core.models.moe_balance import update_balance
from jaxscale.core.models.sharded import ShardedModel, shard_model
from jaxscale.core.optim.optimizer import Schedule, optim_schedule, trainable
from jaxscale.core.plan import ParallelPlan, ParallelSettings, resolve_plan
from jaxscale.core.recorder import clip_heads, make_max_logit_recorder, make_recorder
from jaxscale.core.setup import make_init, make_updates, state_shardings
from jaxscale.core.shardings import axis_size, replicated, with_shardings
from jaxscale.core.state import TrainState, is_dynamic
from jaxscale.core.statistics import StatisticsStep, make_statistics_step, statistics_groups
from jaxscale.core.step import make_gradient_norms, make_train_step
from jaxscale.kernels.compiler_options import fast_compile_options
from jaxscale.kernels.hardware import Device
from jaxscale.kernels.matmul.project import with_matmul_precision
from jaxscale.program.auto_dtype import for_device
from jaxscale.program.budget import BatchStage, Budget, remaining_stages
from jaxscale.program.device_checks import DEVICE_CHECKS
from jaxscale.program.fault_injection import make_gradients
from jaxscale.runtime.data.config import mixture_names
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class Program:
    """Compiled functions, shardings and shapes of a config on a mesh."""

    cfg: RunConfig
    model: ShardedModel
    init: Callable[[], TrainState]  # returns a sharded state
    abstract_state: TrainState  # shapes, dtypes and shardings
    abstract_grads: Any  # those of gradients reduced over all devices
    train_step: Callable  # jitted: (state, batch) -> (state, metrics); the state is donated
    gradient_norms: Callable  # jitted: (state, batch) -> {parameter name: gradient norm}
    statistics: StatisticsStep  # jitted; the state is not donated
    schedule: Schedule
    batch_sharding: NamedSharding
    batch_shards: int
    groups: Any  # tree with the ParamGroup of each parameter
    smaller: tuple["Program", ...] = ()  # for earlier batch stages with fewer tokens or shorter rows, in order

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens per row) of the batches that train_step accepts."""
        return self.cfg.rows_per_step, self.cfg.row_lengths.row

    @property
    def configs(self) -> list[RunConfig]:
        """Configs of the programs of all ramp stages, in order. The last one is cfg."""
        return [program.cfg for program in (*self.smaller, self)]

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.model.mesh

    @property
    def plan(self) -> ParallelPlan:
        """Shardings and implementations of the training step, with reasons."""
        return self.model.plan

    def with_cfg(self, cfg: RunConfig) -> "Program":
        """Returns a copy with another config and its plan, for estimates only. Compiled functions are unchanged."""
        plan = resolve_plan(cfg.model, self.mesh, parallel_settings(cfg))
        return dataclasses.replace(self, cfg=cfg, model=dataclasses.replace(self.model, cfg=cfg.model, plan=plan))

    def by_size(self, name: str) -> Callable:
        """Returns a function of (state, batch) that calls the named function of the program for the batch shape."""
        if not self.smaller:
            return getattr(self, name)
        functions = {program.shape: getattr(program, name) for program in (*self.smaller, self)}
        return lambda state, batch: functions[batch.tokens.shape](state, batch)

    @property
    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and sharding of train_step's batch."""
        rows, lengths = self.cfg.rows_per_step, self.cfg.row_lengths
        make = lambda length, dtype: jax.ShapeDtypeStruct((rows, length), dtype, sharding=self.batch_sharding)
        ids, encoder = make(lengths.row, jnp.int32), None
        if lengths.encoder is not None:
            encoder = EncoderInput(*[make(lengths.encoder, jnp.int32)] * 3)
        prefix = ids if lengths.prefix else None
        sources = ids if self.cfg.data.mixture else None
        weights = make(lengths.row, jnp.float32)
        return Batch(ids, ids, ids, ids, weights, sources=sources, prefix=prefix, encoder=encoder)


def make_program(cfg: RunConfig, budget: Budget, devices: Sequence[Device] | None = None) -> Program:
    """Returns the program of a config on `devices` (default: all), including programs for the stages of its ramps.

    Does not compile. Raises BadInput if the config or a stage does not fit the devices.
    """
    program = make_program_on(make_mesh(cfg.mesh, devices), cfg, budget)
    return add_stages(program, budget, remaining_stages(budget, cfg.seq_len))


def add_stages(program: Program, budget: Budget, stages: Sequence[BatchStage]) -> Program:
    """Adds a program for each ramp stage whose batch shape has none. Raises BadInput if a stage does not fit."""
    cfg, programs = program.cfg, {program.shape: program for program in (*program.smaller, program)}
    for stage in reversed(stages):
        stage_cfg = cfg.with_batch(stage.tokens, stage.row_tokens, program.batch_shards)
        if (shape := (stage_cfg.rows_per_step, stage_cfg.row_lengths.row)) in programs:
            continue
        try:
            programs[shape] = make_program_on(program.mesh, stage_cfg, budget.without_ramps, data_row=cfg.seq_len)
        except BadInput as error:
            rows = stage_cfg.seq_len
            name = "batch_ramp" if rows == cfg.seq_len else f"seq_len_ramp with rows of {rows} tokens"
            raise BadInput(
                f"{name} needs batches of {stage_cfg.rows_per_step} rows: {error}; a run that resumes at batch "
                f"{stage.stop} or later does not need them"
            ) from None
    smaller = [other for shape, other in programs.items() if shape != program.shape]
    smaller.sort(key=lambda other: (other.cfg.tokens_per_step, other.cfg.seq_len))
    return dataclasses.replace(program, smaller=tuple(smaller))


def make_program_on(mesh: Mesh, cfg: RunConfig, budget: Budget, data_row: int | None = None) -> Program:
    """Returns the program of a config on a mesh, without programs for earlier ramp stages.

    data_row: length of the sequences in the data, if seq_len_ramp splits them into the shorter sequences of the batch.
    """
    cfg = for_device(cfg, mesh.devices.flat[0])
    plan = resolve_plan(cfg.model, mesh, parallel_settings(cfg))
    model = shard_model(cfg.model, plan, cfg.lora)
    unstaged, options = model.unstaged, plan.compiler_options
    for check in DEVICE_CHECKS:
        check(cfg, model)
    updates = make_updates(cfg.optim, model, optim_schedule(cfg.optim, **budget.schedule_steps))
    shardings = state_shardings(cfg.train, cfg.optim, model, updates)
    init, abstract_state = make_init(cfg.train, model, updates, shardings, cfg.seed)
    qk_clip = None
    if cfg.optim.qk_clip is not None:
        qk_clip = functools.partial(clip_heads, limit=cfg.optim.qk_clip, stacks=tuple(cfg.model.layer_stacks))
    gradients = make_gradients(
        model=model,
        groups=updates.groups,
        aux_weights=cfg.train.aux_losses,
        num_sources=len(mixture_names(cfg.data.mixture)),
        make_recorder=make_max_logit_recorder if qk_clip else None,
    )
    train_step = make_train_step(
        gradients,
        updates,
        cfg.train,
        dynamic_scale=is_dynamic(cfg.train.loss_scale, cfg.model.compute_dtype),
        count_gated=cfg.data.gate.on,
        update_balance=make_balance_update(cfg),
        data_row=data_row,
        qk_clip=qk_clip,
    )
    statistics = make_statistics_step(
        dataclasses.replace(gradients, model=unstaged, make_recorder=make_recorder),
        updates.optimizer,
        statistics_groups(model.axes, cfg.model.layer_stacks),
    )
    precise = functools.partial(with_matmul_precision, cfg.model.matmul_precision)
    jit = functools.partial(
        jax.jit, in_shardings=(shardings, model.rows_sharding), compiler_options=options.values or None
    )
    rare, metrics = fast_compile_options(mesh.devices.flat[0].platform) | options.values, replicated(mesh)
    return Program(
        cfg=cfg,
        model=model,
        init=init,
        abstract_state=abstract_state,
        abstract_grads=with_shardings(trainable(model.shapes, updates.groups), gradients.shardings),
        train_step=jit(precise(train_step), out_shardings=(shardings, metrics), donate_argnums=0),
        gradient_norms=jit(precise(make_gradient_norms(gradients)), out_shardings=metrics),
        statistics=jit(precise(statistics), out_shardings=metrics, compiler_options=rare or None),
        schedule=updates.schedule,
        batch_sharding=model.rows_sharding,
        batch_shards=axis_size("act_batch", plan.rules.params, mesh.shape),
        groups=updates.groups,
    )


def parallel_settings(cfg: RunConfig) -> ParallelSettings:
    """Returns the settings of a run that determine its plan."""
    return ParallelSettings(
        rules=cfg.rules,
        rows=cfg.rows_per_step,
        row_length=cfg.row_lengths.row,
        num_microbatches=cfg.train.num_microbatches,
        prefix=cfg.row_lengths.prefix,
        reduce_dtype=cfg.train.reduce_dtype,
        offload_params=cfg.optim.offload_params,
        context_attention=cfg.context.attention,
        expert_exchange=cfg.expert.exchange,
        pipeline=cfg.pipeline,
        compiler=cfg.compiler,
    )


def make_balance_update(cfg: RunConfig) -> Callable[[Any, Any], Any] | None:
    """Returns the function that updates router loads and biases. None without experts, and with adapters."""
    experts = getattr(cfg.model, "experts", None)
    return None if experts is None or cfg.lora.on else functools.partial(update_balance, rate=experts.bias_rate)
