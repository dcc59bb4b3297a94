"""RunConfig -> mesh, sharded model, optimizer and the compiled step.

Needs no data and no work folder, so that other tools can compile the same program; runtime/run/opening.py adds those.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.config import RunConfig
from jaxscale.core.accumulate import Reduction, accumulate
from jaxscale.core.balance import is_balance_param, update_balance
from jaxscale.core.batch import Batch, EncoderInput
from jaxscale.core.ema import init_ema
from jaxscale.core.mesh import crossed_groups, make_mesh
from jaxscale.core.models.lora import is_adapter
from jaxscale.core.models.lora_mup_config import learning_rate_multiplier, mup_scales
from jaxscale.core.models.model import summed_loss
from jaxscale.core.models.sharded import ShardedModel, shard_model
from jaxscale.core.optim.groups import assign_groups, group_table
from jaxscale.core.optim.optimizer import ParamLayout, combine, make_optimizer, moment_axes, optim_schedule, trainable
from jaxscale.core.optim.schedules import Schedule
from jaxscale.core.pipeline_step import Pipeline, accumulate_pipelined
from jaxscale.core.plan import ParallelPlan, ParallelSettings, resolve_plan
from jaxscale.core.qk_clip import make_qk_clip
from jaxscale.core.recorder import NO_RECORDER, Recorder, make_max_logit_recorder, make_recorder
from jaxscale.core.rules import axis_size
from jaxscale.core.shardings import is_axes, replicated, tree_shardings, with_shardings
from jaxscale.core.state import TrainState, is_dynamic, state_axes
from jaxscale.core.statistics import StatisticsStep, make_statistics_step, reduce_intermediates, statistics_groups
from jaxscale.core.step import Gradients, gradients_of_state, make_gradient_norms, make_train_step
from jaxscale.kernels.compiler_options import fast_compile_options
from jaxscale.kernels.hardware import Device
from jaxscale.kernels.host_memory import on_host
from jaxscale.kernels.matmul.project import with_matmul_precision
from jaxscale.program.auto_dtype import for_device
from jaxscale.program.budget import BatchStage, Budget, remaining_stages
from jaxscale.program.device_checks import DEVICE_CHECKS, OFFLOADED
from jaxscale.program.fault_injection import corrupt_gradients
from jaxscale.program.first_state import make_init
from jaxscale.runtime.data.config import mixture_names
from jaxscale.system.exits import BadInput

LocalGradients = Callable[[Any, Batch, jax.Array, jax.Array], tuple[dict[str, jax.Array], Any]]  # of one device


@dataclasses.dataclass(frozen=True)
class Program:
    """Compiled functions, shardings and shapes of a config on a mesh."""

    cfg: RunConfig
    model: ShardedModel
    init: Callable[[], TrainState]  # returns a sharded state
    abstract_state: TrainState  # shapes, dtypes and shardings
    abstract_grads: Any  # of gradients reduced over all devices
    train_step: Callable  # jitted: (state, batch) -> (state, metrics); the state is donated
    gradient_norms: Callable  # jitted: (state, batch) -> {name: norm} of each gradient
    statistics: StatisticsStep  # jitted; the state is not donated
    schedule: Schedule
    batch_sharding: NamedSharding
    batch_shards: int
    parameter_table: list[tuple[str, str, str, str, str]]
    smaller: tuple["Program", ...] = ()  # for earlier batch stages with fewer tokens or shorter rows, in order

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens in a row) of the batches that train_step takes."""
        return self.cfg.rows_per_step, self.cfg.row_lengths.row

    @property
    def configs(self) -> list[RunConfig]:
        """Configs of the programs of all batch stages, in order; the last is cfg."""
        return [program.cfg for program in (*self.smaller, self)]

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.model.mesh

    @property
    def plan(self) -> ParallelPlan:
        """Layout and implementations of the training step, with the reasons."""
        return self.model.plan

    def with_cfg(self, cfg: RunConfig) -> "Program":
        """Returns the program for estimates of another config, with its plan. Its functions are those of the first."""
        plan = resolve_plan(cfg.model, self.mesh, parallel_settings(cfg))
        return dataclasses.replace(self, cfg=cfg, model=dataclasses.replace(self.model, cfg=cfg.model, plan=plan))

    def by_size(self, name: str) -> Callable:
        """Returns (state, batch) -> ..., which calls the function of this name of the program for the batch's shape."""
        if not self.smaller:
            return getattr(self, name)
        functions = {program.shape: getattr(program, name) for program in (*self.smaller, self)}
        return lambda state, batch: functions[batch.tokens.shape](state, batch)

    @property
    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and sharding of the batch of train_step."""
        rows, lengths = self.cfg.rows_per_step, self.cfg.row_lengths
        make = lambda length, dtype: jax.ShapeDtypeStruct((rows, length), dtype, sharding=self.batch_sharding)
        ids, encoder = make(lengths.row, jnp.int32), None
        if lengths.encoder is not None:
            encoder = EncoderInput(*[make(lengths.encoder, jnp.int32)] * 3)
        prefix = ids if lengths.prefix else None
        sources = ids if self.cfg.data.mixture else None
        weights = make(lengths.row, jnp.float32)
        return Batch(ids, ids, ids, ids, weights, sources=sources, prefix=prefix, encoder=encoder)


@dataclasses.dataclass(frozen=True)
class Updates:
    """The optimizer and its schedule and parameter groups."""

    optimizer: optax.GradientTransformationExtraArgs
    schedule: Schedule
    groups: Any  # a ParamGroup for each parameter


@dataclasses.dataclass(frozen=True)
class StepShardings:
    """Shardings of the inputs and outputs of a step."""

    state: TrainState  # between steps; offloaded parts are in host memory
    grads: Any  # of trainable parameters, reduced: the sharding of the moments
    rows: NamedSharding  # of a [rows, T] array of a batch
    whole: NamedSharding  # replicated: metrics


def make_program(cfg: RunConfig, budget: Budget, devices: Sequence[Device] | None = None) -> Program:
    """Returns the program of a config over `devices` (default: all), with one for each batch stage of its budget.

    Compiles nothing yet. Raises BadInput for a config or a stage that does not fit the devices.
    """
    program = make_program_on(make_mesh(cfg.mesh, devices), cfg, budget)
    return add_stages(program, budget, remaining_stages(budget, cfg.seq_len))


def add_stages(program: Program, budget: Budget, stages: Sequence[BatchStage]) -> Program:
    """Adds a smaller program for each of these batch stages that has none. Raises BadInput naming the stage."""
    cfg, programs = program.cfg, {program.shape: program for program in (*program.smaller, program)}
    for stage in reversed(stages):
        stage_cfg = cfg.with_batch(stage.tokens, stage.row_tokens, program.batch_shards)
        if (shape := (stage_cfg.rows_per_step, stage_cfg.row_lengths.row)) in programs:
            continue
        try:
            programs[shape] = make_program_on(program.mesh, stage_cfg, budget.without_ramps, data_row=cfg.seq_len)
        except BadInput as error:
            rows = stage_cfg.seq_len
            name = "batch_ramp" if rows == cfg.seq_len else f"seq_len_ramp, rows of {rows} tokens"
            raise BadInput(
                f"{name}, batches of {stage_cfg.rows_per_step} rows: {error}; a run that resumes at batch {stage.stop} "
                "or later needs none of these"
            ) from None
    smaller = [other for shape, other in programs.items() if shape != program.shape]
    smaller.sort(key=lambda other: (other.cfg.tokens_per_step, other.cfg.seq_len))
    return dataclasses.replace(program, smaller=tuple(smaller))


def make_program_on(mesh: Mesh, cfg: RunConfig, budget: Budget, data_row: int | None = None) -> Program:
    """Returns the program of the last batch stage of a budget, on a mesh.

    data_row: tokens in a row of the data if the batches have shorter rows cut from those.
    """
    cfg = for_device(cfg, mesh.devices.flat[0])
    plan = resolve_plan(cfg.model, mesh, parallel_settings(cfg))
    model = shard_model(cfg.model, plan, cfg.lora)
    unstaged, options = model.unstaged, plan.compiler_options
    for check in DEVICE_CHECKS:
        check(cfg, model)
    updates = make_updates(cfg, budget, model)
    shardings = plan_shardings(cfg, model, updates)
    init, abstract_state = make_init(cfg, model, updates.optimizer, updates.groups, shardings.state)
    qk_clip = make_qk_clip(cfg.optim.qk_clip, cfg.model.layer_stacks)
    recorder = make_max_logit_recorder if qk_clip else None
    gradients = make_gradients(cfg, model, updates.groups, shardings, recorder=recorder)
    train_step = make_train_step(
        gradients,
        updates.optimizer,
        updates.schedule,
        cfg.train,
        dynamic_scale=is_dynamic(cfg.train.loss_scale, cfg.model.compute_dtype),
        clip_norm=cfg.optim.clip_norm,
        count_gated=cfg.data.gate.on,
        update_balance=make_balance_update(cfg),
        data_row=data_row,
        qk_clip=qk_clip,
    )
    statistics = make_statistics_step(
        make_gradients(cfg, unstaged, updates.groups, plan_shardings(cfg, unstaged, updates), recorder=make_recorder),
        updates.optimizer,
        statistics_groups(model.axes, cfg.model.layer_stacks),
    )
    precise = functools.partial(with_matmul_precision, cfg.model.matmul_precision)
    jit = functools.partial(
        jax.jit, in_shardings=(shardings.state, shardings.rows), compiler_options=options.values or None
    )
    rare = fast_compile_options(mesh.devices.flat[0].platform) | options.values
    return Program(
        cfg=cfg,
        model=model,
        init=init,
        abstract_state=abstract_state,
        abstract_grads=with_shardings(trainable(model.shapes, updates.groups), shardings.grads),
        train_step=jit(precise(train_step), out_shardings=(shardings.state, shardings.whole), donate_argnums=0),
        gradient_norms=jit(precise(make_gradient_norms(gradients)), out_shardings=shardings.whole),
        statistics=jit(precise(statistics), out_shardings=shardings.whole, compiler_options=rare or None),
        schedule=updates.schedule,
        batch_sharding=shardings.rows,
        batch_shards=axis_size("act_batch", plan.rules.params, mesh.shape),
        parameter_table=group_table(model.shapes, model.shardings, updates.groups),
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


def make_updates(cfg: RunConfig, budget: Budget, model: ShardedModel) -> Updates:
    """Returns the optimizer, schedule and parameter groups of a run with this budget."""
    is_trainable = is_adapter if cfg.lora.on else lambda name: not is_balance_param(name)
    optim, eps_scale = cfg.optim, mup_scales(cfg.model).eps
    if eps_scale != 1.0:
        optim = dataclasses.replace(optim, eps=optim.eps * eps_scale)
    multiplier = functools.partial(learning_rate_multiplier, cfg.model, optim.name)
    groups = assign_groups(
        model.axes, optim.groups, optim.weight_decay, optim.weight_decay_all, is_trainable, multiplier
    )
    schedule = optim_schedule(optim, **budget.schedule_steps)
    is_stacked = jax.tree.map(lambda names: names[:1] == ("layers",), model.axes, is_leaf=is_axes)
    shardings = tree_shardings(model.mesh, model.axes, model.plan.rules.moments)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    slow = tuple(axis for axis, number in crossed_groups(model.mesh)[1].items() if number > 1)
    layout = ParamLayout(model.axes, specs, model.mesh, slow)
    return Updates(make_optimizer(optim, schedule, groups, is_stacked, layout), schedule, groups)


def make_balance_update(cfg: RunConfig) -> Callable[[Any, Any], Any] | None:
    """Returns the update of router loads and biases; None without experts or for adapters."""
    experts = getattr(cfg.model, "experts", None)
    return None if experts is None or cfg.lora.on else functools.partial(update_balance, rate=experts.bias_rate)


def plan_shardings(cfg: RunConfig, model: ShardedModel, updates: Updates) -> StepShardings:
    """Returns shardings of state, gradients and batch by the rule tables; offloaded parts are in host memory."""
    mesh, rules = model.mesh, model.plan.rules
    grads = trainable(tree_shardings(mesh, model.axes, rules.moments), updates.groups)
    num_shards = lambda axis: axis_size(axis, rules.moments, mesh.shape)
    opt_axes = moment_axes(updates.optimizer, model.shapes, model.axes, num_shards)
    state = tree_shardings(mesh, state_axes((), ()), rules.params)._replace(
        params=model.shardings,
        opt_state=tree_shardings(mesh, opt_axes, rules.moments),
        ema=init_ema(cfg.train.ema, grads),  # like the moments, because only the step reads it
    )
    for setting, field in OFFLOADED.items():
        if getattr(cfg.optim, setting):
            state = state._replace(**{field: on_host(getattr(state, field), exclude=is_balance_param)})
    return StepShardings(state, grads, model.rows_sharding, replicated(mesh))


def make_gradients(
    cfg: RunConfig,
    model: ShardedModel,
    groups: Any,
    shardings: StepShardings,
    *,
    recorder: Callable[..., Recorder] | None = None,
) -> Gradients:
    """Returns (state, batch) -> (means of each named loss, gradients), where each device computes on its rows.

    recorder: makes a recorder for each trace, whose intermediates are added to the means.
    """
    plan, num_sources = model.plan, len(mixture_names(cfg.data.mixture))
    axes = plan.batch_axes
    reduction = Reduction(
        axes.num_shards * plan.context.size,
        axes.first_row,
        lambda grads: axes.reduce_microbatch(grads, model.axes),
        lambda grads: axes.reduce_accumulated(grads, model.axes),
        axes.sum,
    )
    if plan.stage_schedule is not None:
        return on_mesh(model, shardings, stage_gradients(cfg, model, groups, reduction))

    def gradients(params: Any, batch: Batch, key: jax.Array, scale: jax.Array):
        variables = model.differentiable(params)

        def loss_fn(trained: Any, batch: Batch, keys_B: jax.Array):
            recording = NO_RECORDER
            if recorder is not None:
                recording = recorder(plan.attention.name, plan.needs, plan.tensor, plan.context)
            module = model.merge(params, combine(trained, variables), recorder=recording, training=True)
            total, sums = summed_loss(module, batch, keys_B, cfg.train.aux_losses, num_sources)
            return total, sums | recording.sown()

        means, grads = accumulate(
            loss_fn,
            trainable(variables, groups),  # frozen parameters do not enter the gradient norm
            plan.context.local(batch),
            key,
            num_microbatches=plan.num_microbatches,
            scale=scale,
            reduction=reduction,
        )
        return reduce_intermediates(means, axes, plan.tensor), grads

    return on_mesh(model, shardings, gradients)


def stage_gradients(cfg: RunConfig, model: ShardedModel, groups: Any, reduction: Reduction) -> LocalGradients:
    """Returns the gradients of make_gradients() on one device, computed by the stages of a pipeline."""
    plan, schedule = model.plan, model.plan.stage_schedule
    assert schedule is not None, "the plan has stages"
    functions = model.stage_functions(cfg.train.aux_losses, len(mixture_names(cfg.data.mixture)))
    pipeline = Pipeline(functions, plan.pipeline, schedule, groups)
    reduction = reduction._replace(total_grads=model.stage_gradients)

    def gradients(params: Any, batch: Batch, key: jax.Array, scale: jax.Array):
        weights, local_batch = model.stage_weights(params), plan.context.local(batch)
        return accumulate_pipelined(pipeline, weights, local_batch, key, scale=scale, reduction=reduction)

    return gradients


def on_mesh(model: ShardedModel, shardings: StepShardings, gradients: LocalGradients) -> Gradients:
    """Applies shard_map to the gradients of one device, and takes their arguments from a state."""
    grads_specs = jax.tree.map(lambda sharding: sharding.spec, shardings.grads)
    in_specs, out_specs = (model.specs, shardings.rows.spec, P(), P()), (P(), grads_specs)
    return corrupt_gradients(gradients_of_state(model.plan.batch_axes.shard_map(gradients, in_specs, out_specs)))
