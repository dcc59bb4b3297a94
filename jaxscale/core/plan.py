"""The parallel plan: shardings of a model and the implementation of each part, with reasons.

resolve_plan() makes all of these decisions. Models, training, evaluation, sampling, planning and preflight use them.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxscale import units
from jaxscale.core.axes import expert_axis, pipeline_axis
from jaxscale.core.axes.batch_axes import BatchAxes, make_batch_axes
from jaxscale.core.axes.context_axis import NO_CONTEXT_AXIS, ContextAxis, make_context_axis
from jaxscale.core.axes.expert_axis import NO_EXPERT_AXIS, ExpertAxis, ExpertWork, resolve_expert_exchange
from jaxscale.core.axes.pipeline_axis import NO_PIPELINE_AXIS, PipelineAxis, make_pipeline_axis
from jaxscale.core.axes.pipeline_schedules import Schedule, ScheduleSize
from jaxscale.core.axes.tensor_axis import NO_TENSOR_AXIS, TensorAxis, make_tensor_axis
from jaxscale.core.config import PipelineConfig
from jaxscale.core.mesh import crossed_groups
from jaxscale.core.models.config import BLOCKS, DENSE, MLP_GATE, MLP_UP, ModelConfig, saved_names
from jaxscale.core.recorder import NO_RECORDER, Recorder
from jaxscale.core.shardings import RULES, Gather, Rules, axis_size, no_gather
from jaxscale.kernels.attention import Attend, resolve_attention, windowed_or_full, xla
from jaxscale.kernels.collectives import Communication
from jaxscale.kernels.config import NO_COMPILER_OPTIONS, AttentionName, AttentionNeeds, Choice, CompilerOptions
from jaxscale.kernels.hardware import Device, find_chip
from jaxscale.kernels.matmul.project import Project, cpu_project, einsum_project, quantized_project
from jaxscale.kernels.matmul.slots import ExpertKernels
from jaxscale.kernels.rope import Rotation, rotate, rotate_on_tpu
from jaxscale.system.exits import BadInput

MAX_UNROLLED_LAYERS = 24  # on a single CPU device, up to which unrolled layers compile as fast as a loop (2026-11-25)
NO_MESH = Mesh(np.empty((), object), ())


class ParallelSettings(NamedTuple):
    """Settings of a run that determine its plan. The defaults are those of inference."""

    rules: str = "zero3"
    rows: int | None = None  # rows of a step on all devices; None: unknown
    row_length: int | None = None
    num_microbatches: int = 1
    prefix: bool = False  # rows have a bidirectional prefix
    reduce_dtype: Any = jnp.float32  # dtype in which gradients are summed
    offload_params: bool = False
    context_attention: str = "auto"
    expert_exchange: str = "auto"
    pipeline: PipelineConfig | None = None  # None: no stages; the pipeline axis shards rows and weights
    compiler: Mapping[str, Any] | None = None  # compiler options in addition to the defaults; None: not even defaults


DEFAULT_SETTINGS = ParallelSettings()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ParallelPlan:
    """Shardings and kernels of a model. The defaults are for a single device and use XLA operations."""

    mesh: Mesh = NO_MESH
    rules: Rules = RULES["zero3"]
    needs: AttentionNeeds = AttentionNeeds(head_dim=1, dtype="float32")
    settings: ParallelSettings = DEFAULT_SETTINGS
    num_microbatches: int = 1
    compiler_options: CompilerOptions = NO_COMPILER_OPTIONS
    # Mesh axes. batch_axes: data, fsdp, and other axes if they shard rows or gathered weights.
    batch_axes: BatchAxes = BatchAxes(NO_MESH, RULES["zero3"], (), (), Communication(jnp.dtype("float32"), (), False))
    tensor: TensorAxis = NO_TENSOR_AXIS
    context: ContextAxis = NO_CONTEXT_AXIS
    expert: ExpertAxis = NO_EXPERT_AXIS  # axis of the all-to-all, if tokens are sent
    pipeline: PipelineAxis = NO_PIPELINE_AXIS
    # Choices
    attention: Choice = Choice("xla", "xla")
    context_exchange: Choice = Choice()  # exchange of keys and values
    expert_exchange: Choice = Choice()  # exchange of tokens and experts
    grouped_matmul: Choice = Choice()
    # Implementations. Alternatives compute the same values at different speeds.
    attend: Attend = xla.make_attend()
    whole_row_attend: Attend = xla.make_attend()  # without context parallelism
    project: Project = einsum_project
    rotate: Callable[[jax.Array, Rotation], jax.Array] = rotate
    expert_kernels: ExpertKernels = ExpertKernels()
    scan_layers: bool = True  # False: layers are unrolled
    # Fields of one instance of the model
    gather: Gather = no_gather
    recorder: Recorder = NO_RECORDER  # recorder of intermediates
    use_capacity: bool = False  # True in training: experts have the capacity of the model's settings, if any

    def replace(self, **changes: Any) -> "ParallelPlan":
        """Returns the plan with these fields replaced."""
        return dataclasses.replace(self, **changes)

    def with_recorder(self, recorder: Recorder) -> "ParallelPlan":
        """Returns the plan with a recorder of intermediates. Computed values do not change."""
        if recorder is NO_RECORDER:
            return self
        return self.replace(recorder=recorder, attend=recorder.wrap_attention(self.attend))

    @functools.cached_property
    def stage_schedule(self) -> Schedule | None:
        """The schedule of the pipeline stages, or None."""
        if self.settings.pipeline is None or self.pipeline.size == 1:
            return None
        return self.pipeline.schedule(self.settings.pipeline.schedule, self.num_microbatches)

    @property
    def schedule_size(self) -> ScheduleSize:
        """Numbers of ticks and buffers of the schedule, without its tables."""
        name = self.settings.pipeline.schedule if self.settings.pipeline and self.pipeline.size > 1 else "1f1b"
        return ScheduleSize(name, self.pipeline.size, self.pipeline.num_chunks, self.num_microbatches)

    @property
    def position_multiple(self) -> int:
        """Required divisor of the sequence length."""
        return self.context.multiple * self.tensor.size

    def describe(self) -> list[str]:
        """Returns a description of each automatic choice, with its reason."""
        lines = []
        if self.context_exchange.name:
            from jaxscale.kernels.attention.context_parallel import describe

            lines.append(f"context: {describe(self.context_exchange)}")
        if line := expert_axis.describe(self.expert_exchange):
            lines.append(f"expert: {line}")
        if self.grouped_matmul.reason:
            lines.append(f"experts: grouped matmuls run in slots: {self.grouped_matmul.reason}")
        return lines


UNSHARDED = ParallelPlan()


def single_device_plan(
    platform: str, attention: AttentionName, needs: AttentionNeeds, device: Device | None = None
) -> ParallelPlan:
    """Returns the plan for one device of a platform, "cpu", "gpu" or "tpu". device: None if unknown.

    Raises BadInput if the platform does not support the attention kernel.
    """
    from jaxscale.kernels.matmul.grouped import resolve_expert_kernels

    attend, attention_choice = resolve_attention(attention, platform, needs, device)
    expert_kernels, grouped_matmul = resolve_expert_kernels(platform, device, needs.dtype)
    return ParallelPlan(
        needs=needs,
        attention=attention_choice,
        grouped_matmul=grouped_matmul,
        attend=attend,
        whole_row_attend=attend,
        project=cpu_project if platform == "cpu" else einsum_project,
        rotate=rotate_on_tpu if platform == "tpu" else rotate,
        expert_kernels=expert_kernels,
    )


def resolve_plan(
    cfg: ModelConfig,
    mesh: Mesh,
    settings: ParallelSettings = DEFAULT_SETTINGS,
    environment: Mapping[str, str] = os.environ,
) -> ParallelPlan:
    """Returns the plan of a model on a mesh. Raises BadInput for settings that the model or the devices do not support.

    environment: environment variables. The plan does not change XLA options that they set.
    """
    device, needs = mesh.devices.flat[0], cfg.attention_needs(prefix=settings.prefix)
    single = single_device_plan(device.platform, cfg.attention, needs, device)
    attention = single.attention.name
    tokens = resolve_expert_exchange(settings.expert_exchange, expert_work(cfg, mesh, settings))
    keys = resolve_context(cfg, mesh, settings, attention, needs)
    layer_loops = keys.name == "ring" or tokens.name == "send"
    options = resolve_compiler_options(cfg, mesh, settings.compiler, environment, single.grouped_matmul, layer_loops)
    # A single collective over several dimensions of a torus needs these options. Without them, each dimension has one.
    torus = dict(torus_at_once=options.offloads_torus)
    pipeline = resolve_pipeline(cfg, mesh, settings)
    rules = RULES[settings.rules]
    if mesh.shape[pipeline_axis.AXIS] > 1:
        rules = pipeline.rules(rules)
    ungathered = (expert_axis.EXPERTS,) if tokens.name == "send" else ()
    context = make_context_axis(mesh, zigzag=keys.name != "ulysses", **torus)
    tensor = make_tensor_axis(mesh, context=context, **torus)
    return single.replace(
        mesh=mesh,
        rules=rules,
        settings=settings,
        num_microbatches=settings.num_microbatches,
        compiler_options=options,
        batch_axes=make_batch_axes(mesh, rules, settings.reduce_dtype, ungathered=ungathered, **torus),
        tensor=pipeline_axis.share_vocab_with_stages(tensor, pipeline),
        context=context,
        expert=ExpertAxis(mesh.shape[expert_axis.AXIS]) if tokens.name == "send" else NO_EXPERT_AXIS,
        pipeline=pipeline,
        context_exchange=keys,
        expert_exchange=tokens,
        grouped_matmul=single.grouped_matmul if cfg.experts is not None else Choice(),
        attend=context_parallel_attend(single.attend, attention, keys, needs, context, device),
        project=quantized_project(single.project, cfg.matmul_dtype),
        scan_layers=scans_layers(cfg, mesh),
    )


def without_stages(cfg: ModelConfig, plan: ParallelPlan) -> ParallelPlan:
    """Returns the plan for evaluation, sampling and statistics, where the pipeline axis shards the batch and weights.

    The number of microbatches is reduced to fit the larger number of batch shards.
    """
    if plan.pipeline.size == 1:
        return plan
    unstaged, rows = resolve_plan(cfg, plan.mesh, plan.settings._replace(pipeline=None)), plan.settings.rows
    num_shards = unstaged.batch_axes.num_shards
    valid = [n for n in units.divisors(plan.num_microbatches) if rows is not None and rows // n % num_shards == 0]
    return unstaged.replace(num_microbatches=max(valid, default=1), compiler_options=plan.compiler_options)


def resolve_compiler_options(
    cfg: ModelConfig,
    mesh: Mesh,
    extra: Mapping[str, Any] | None,
    environment: Mapping[str, str],
    grouped_matmul: Choice,
    layer_loops: bool,
) -> CompilerOptions:
    """Returns the compiler options of the training step.

    extra: options set by the user; None disables all options. layer_loops: whether layers contain loops.
    """
    if extra is None:
        return NO_COMPILER_OPTIONS
    from jaxscale.kernels.compiler_options import compiler_options

    device, saved, has_experts = mesh.devices.flat[0], saved_names(cfg), cfg.experts is not None
    has_branches = cfg.attention_needs().window_layers is not None
    saves_products = saved is None or not saved.isdisjoint((MLP_GATE, MLP_UP))
    return compiler_options(
        device.platform,
        device.device_kind,
        extra,
        environment,
        prefetch_weights=not (layer_loops or has_branches or has_experts),
        over_network=crossed_groups(mesh)[1]["fsdp"] > 1 and mesh.shape[pipeline_axis.AXIS] == 1,
        saves_expert_outputs=has_experts and not grouped_matmul.reason and saves_products,
    )


def resolve_pipeline(cfg: ModelConfig, mesh: Mesh, settings: ParallelSettings) -> PipelineAxis:
    """Returns the pipeline stages of the model. Raises BadInput if the model does not support stages."""
    stages, pipeline = mesh.shape[pipeline_axis.AXIS], settings.pipeline
    if stages == 1 or pipeline is None:
        return NO_PIPELINE_AXIS
    check_stages(cfg, settings, pipeline, stages)
    head_layers = cfg.vocab_size * cfg.embed_dim / cfg.block_matrix_params
    return make_pipeline_axis(stages, pipeline, cfg.layer_stacks.get(BLOCKS, 0), head_layers, cfg.leading_layers)


def check_stages(cfg: ModelConfig, settings: ParallelSettings, pipeline: PipelineConfig, stages: int) -> None:
    """Raises BadInput for settings that a pipeline with this number of stages does not support."""
    chunks, parts = pipeline.chunks, settings.num_microbatches
    layers = cfg.layer_stacks.get(BLOCKS, 0)
    moe_layers = f" (of which {layers} have experts)" * (layers < cfg.num_layers)
    unsupported = {
        f"model.name={cfg.name!r}, which has two stacks of layers; use a model with one stack": bool(
            cfg.layer_stacks.keys() - {DENSE, BLOCKS}
        ),
        f"model.remat={cfg.remat!r}, because stages save layer inputs and recompute everything else; set "
        "model.remat='full'": cfg.remat != "full",
        f"model.remat_offload={','.join(cfg.remat_offload)}, because stages save layer inputs on the device; "
        "remove it": bool(cfg.remat_offload),
        "model.scan_layers=false, because stages scan layers; set it to true": not cfg.scan_layers,
        "optim.offload_params=true, because stages need their weights for the whole step; set it to false, or use "
        "optim.offload_moments": settings.offload_params,
        f"model.num_layers={cfg.num_layers}{moe_layers} with pipeline.chunks={chunks}, because each of "
        f"{stages * chunks} chunks needs a layer; use fewer stages or chunks": layers < stages * chunks,
        f"train.num_microbatches={parts} with pipeline.chunks={chunks}, which processes microbatches in groups of "
        f"{stages}; use a multiple of {stages}, or chunks=1": chunks > 1 and parts % stages > 0,
    }
    for what, applies in unsupported.items():
        if applies:
            raise BadInput(f"mesh.pipeline={stages} cannot be combined with {what}")


def context_parallel_attend(
    attend: Attend, attention: str, exchange: Choice, needs: AttentionNeeds, context: ContextAxis, device: Device
) -> Attend:
    """Returns attention over positions on all devices of the context axis. attend: kernel for one device."""
    if not exchange.name:
        return attend
    from jaxscale.kernels.attention.context_parallel import make_context_attention

    settings = dict(needs=needs, context=context, device_kind=device.device_kind)
    make_attend = functools.partial(make_context_attention, exchange.name, attention, **settings)
    if needs.window_layers is None or exchange.name == "ulysses":  # ulysses wraps the kernel for one device
        return make_attend(attend, window=needs.window)
    windowed, full = make_attend(None, window=needs.window), make_attend(None, window=None)
    return windowed_or_full(windowed, full, needs.window_layers)


def scans_layers(cfg: ModelConfig, mesh: Mesh) -> bool:
    """Returns True if layers are scanned. A single CPU device unrolls a few layers, because slicing weights and writing
    gradients in a scan take up to half of a step (4 layers in bfloat16, 2 cores, jax 0.10.2, 2026-11-25)."""
    return mesh.size > 1 or mesh.devices.flat[0].platform != "cpu" or cfg.num_layers > MAX_UNROLLED_LAYERS


def local_rows(mesh: Mesh, settings: ParallelSettings) -> int | None:
    """Returns the number of sequences per device and microbatch, or None if unknown."""
    if settings.rows is None:
        return None
    shards = axis_size("act_batch", RULES[settings.rules].params, mesh.shape)
    return max(1, settings.rows // settings.num_microbatches // shards)


def resolve_context(
    cfg: ModelConfig, mesh: Mesh, settings: ParallelSettings, attention: str, needs: AttentionNeeds
) -> Choice:
    """Returns how keys and values are exchanged over the context axis. attention: name of the attention kernel."""
    if mesh.shape["context"] == 1:
        return Choice(settings.context_attention)
    from jaxscale.kernels.attention.context_parallel import ContextLoad, resolve_context_exchange

    chip = find_chip(mesh.devices.flat[0].device_kind)
    load = ContextLoad(
        devices=mesh.shape["context"],
        kv_heads=cfg.key_width // cfg.head_dim // mesh.shape["tensor"],
        rows=local_rows(mesh, settings),
        row_length=settings.row_length,
        memory_bytes=chip and chip.hbm_bytes,
        in_pipeline=mesh.shape[pipeline_axis.AXIS] > 1,
    )
    return resolve_context_exchange(settings.context_attention, attention, needs, load)


def expert_work(cfg: ModelConfig, mesh: Mesh, settings: ParallelSettings) -> ExpertWork:
    """Returns the sizes that determine the exchange between tokens and experts."""
    experts, shape = cfg.experts, mesh.shape
    if experts is None:
        return ExpertWork(1, 0, 0)
    chip, item = find_chip(mesh.devices.flat[0].device_kind), jnp.dtype(cfg.compute_dtype).itemsize
    rows = local_rows(mesh, settings)
    tokens = None if rows is None or settings.row_length is None else rows * settings.row_length
    return ExpertWork(
        devices=shape[expert_axis.AXIS],
        layer_bytes=3 * experts.number * cfg.embed_dim * experts.mlp_dim * item // shape["tensor"],
        row_bytes=cfg.embed_dim * item,
        rows=None if tokens is None else tokens // shape["context"] * experts.chosen,
        memory_bytes=chip and chip.hbm_bytes,
    )
