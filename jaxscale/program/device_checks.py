"""Checks a config against its devices before compilation.

Checks without devices are in config.CHECKS. shard_model() checks that the mesh divides the parameters.
"""

import math

from jaxscale import units
from jaxscale.config import RunConfig
from jaxscale.core.axes.pipeline_axis import NO_PIPELINE_AXIS
from jaxscale.core.models.sharded import ShardedModel, check_fits
from jaxscale.core.setup import OFFLOADED
from jaxscale.core.shardings import RULES, axis_size, check_divides
from jaxscale.kernels.compiler_options import check_options
from jaxscale.kernels.host_memory import check_host_memory
from jaxscale.system.exits import BadInput


def check_options_known(cfg: RunConfig, model: ShardedModel) -> None:
    """Raises BadInput for a compiler option that XLA does not support."""
    check_options(cfg.compiler, model.mesh.devices.flat[0])


def check_moments(cfg: RunConfig, model: ShardedModel) -> None:
    """Raises BadInput unless the mesh divides all optimizer arrays. shard_model() checks the parameters."""
    check_fits(model, model.plan.rules.moments)


def check_offload(cfg: RunConfig, model: ShardedModel) -> None:
    """Raises BadInput if the config offloads arrays to host memory that the devices cannot access."""
    for setting in OFFLOADED:
        if getattr(cfg.optim, setting):
            check_host_memory(f"optim.{setting}=true", model.mesh)


def check_positions(cfg: RunConfig, model: ShardedModel) -> None:
    """Raises BadInput unless the mesh divides the positions of a sequence."""
    multiple, lengths = model.plan.position_multiple, cfg.row_lengths
    sharing = " and ".join(
        f"{'twice ' * (number > size)}mesh.{axis}={size}"
        for axis, size, number in (
            ("context", model.plan.context.size, model.plan.context.multiple),
            ("tensor", model.plan.tensor.size, model.plan.tensor.size),
        )
        if size > 1
    )
    if " and " in sharing:
        sharing = f"{multiple} ({sharing})"
    made_rows = lengths.row != cfg.seq_len or lengths.encoder is not None
    if made_rows and any((length or 0) % multiple for length in lengths[:2]):
        raise BadInput(
            f"data.objective makes sequences of {' and '.join(str(length) for length in lengths[:2] if length)} "
            f"tokens, but each length must be a multiple of {sharing}, over which positions are sharded; use "
            f"data.objective.multiple_of={multiple}, or a different mesh"
        )
    if not made_rows and cfg.seq_len % multiple:
        fitting = cfg.seq_len // multiple * multiple
        raise BadInput(
            f"seq_len={cfg.seq_len} is not a multiple of {sharing}, over which positions are sharded; "
            f"use seq_len={fitting or multiple}, or a different mesh"
        )


def check_microbatches(cfg: RunConfig, model: ShardedModel) -> None:
    """Raises BadInput unless the mesh divides the number of sequences in each microbatch.

    Otherwise XLA would compile a program that copies whole activations between devices in every layer.
    """
    rows, parts = cfg.rows_per_step, cfg.train.num_microbatches
    shards = axis_size("act_batch", model.plan.rules.params, model.mesh.shape)
    if rows // parts % shards:
        valid = [part for part in units.divisors(rows) if rows // part % shards == 0]
        fix = f"use {units.or_list(valid)}" if valid else "reduce mesh.data or mesh.fsdp"
        raise BadInput(
            f"train.num_microbatches={parts} leaves {rows // parts} sequences for {shards} batch shards (data x fsdp); "
            f"{fix}, or a batch of {parts * shards} sequences ({parts * shards * cfg.seq_len} tokens)"
        )


def check_vocabulary(cfg: RunConfig, model: ShardedModel) -> None:
    """Raises BadInput unless pipeline x tensor divides the vocabulary, if it is sharded over both axes."""
    parts = model.plan.pipeline.size * model.plan.tensor.size
    if model.plan.pipeline.shards_vocab and cfg.model.vocab_size % parts:
        raise BadInput(
            f"model.vocab_size={cfg.model.vocab_size} must be a multiple of {parts} (tensor x pipeline), over which "
            "the vocabulary is sharded; use pipeline.head='whole', or a larger vocabulary"
        )


def check_capacity(cfg: RunConfig, model: ShardedModel) -> None:
    """Raises BadInput for an expert capacity with context parallelism, where no device has a whole sequence."""
    factor = getattr(getattr(cfg.model, "experts", None), "capacity_factor", 0.0)
    if factor and model.plan.context.size > 1:
        raise BadInput(
            f"mesh.context={model.plan.context.size} does not support model.experts.capacity_factor={factor}, "
            "because expert capacity applies to whole sequences; set capacity_factor=0, or mesh.context=1"
        )


def check_statistics(cfg: RunConfig, model: ShardedModel) -> None:
    """Raises BadInput if the non-pipelined statistics program cannot shard the batch or the optimizer state."""
    if not cfg.monitor.statistics_every_steps:
        return
    shards = math.prod(model.mesh.shape[axis] for axis in ("pipeline", "data", "fsdp"))
    if cfg.rows_per_step % shards:
        raise BadInput(
            f"monitor.statistics_every_steps requires that {shards} (mesh pipeline x data x fsdp) divides the batch of "
            f"{cfg.rows_per_step} sequences; use a multiple of {shards} sequences, or set the interval to 0"
        )
    moments = NO_PIPELINE_AXIS.rules(RULES[cfg.rules]).moments
    if uneven := check_divides(model.shapes, model.axes, moments, model.mesh.shape):
        raise BadInput(
            f"monitor.statistics_every_steps requires a mesh that divides all arrays, but {'; '.join(uneven)}; use "
            "a different mesh, or set the interval to 0"
        )


def check_ring(cfg: RunConfig, model: ShardedModel) -> None:
    """Raises BadInput for optim.qk_clip with ring attention, where no device has all keys of a sequence."""
    if cfg.optim.qk_clip is not None and model.plan.context_exchange.name == "ring":
        raise BadInput(
            f"optim.qk_clip={cfg.optim.qk_clip:g} needs all keys of a sequence on each device, but ring attention with "
            f"mesh.context={model.plan.context.size} shards the keys; use context.attention='gather' or 'ulysses', or "
            "optim.qk_clip=null"
        )


DEVICE_CHECKS = (
    check_options_known, check_moments, check_positions, check_microbatches, check_offload, check_statistics,
    check_vocabulary, check_capacity, check_ring,
)  # fmt: skip
