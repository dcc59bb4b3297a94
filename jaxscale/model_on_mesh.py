"""RunConfig and mesh -> the model with its shardings."""

from jax.sharding import Mesh

from jaxscale.config import RunConfig
from jaxscale.device_checks import check_stages
from jaxscale.models.config import BLOCKS
from jaxscale.models.sharded import ParallelRequest, ShardedModel, shard_model
from jaxscale.sharding.pipeline_axis import NO_PIPELINE_AXIS, PipelineAxis, make_pipeline_axis
from jaxscale.sharding.rules import RULES, axis_size


def shard_run_model(cfg: RunConfig, mesh: Mesh, *, torus_at_once: bool, staged: bool = True) -> ShardedModel:
    """The model on the mesh. Raises BadInput where the mesh does not divide its parameters.

    staged: in the stages of a pipeline, if there is one; else the devices of that axis share rows and weights.
    """
    return shard_model(
        cfg.model,
        mesh,
        cfg.rules,
        lora=cfg.lora,
        offloaded=cfg.optim.offload_params,
        prefix=cfg.row_lengths.prefix,
        reduce_dtype=cfg.train.reduce_dtype,
        torus_at_once=torus_at_once,
        request=parallel_request(cfg, mesh),
        pipeline=make_stages(cfg, mesh) if staged else NO_PIPELINE_AXIS,
    )


def make_stages(cfg: RunConfig, mesh: Mesh) -> PipelineAxis:
    """The stages of the model. Raises BadInput where they cannot be."""
    stages, model = mesh.shape["pipeline"], cfg.model
    check_stages(cfg, stages)
    head_layers = model.vocab_size * model.embed_dim / model.block_matrix_params
    blocks, before = model.layer_stacks.get(BLOCKS, 0), model.leading_layers
    return make_pipeline_axis(stages, cfg.pipeline, blocks, head_layers, before)


def parallel_request(cfg: RunConfig, mesh: Mesh) -> ParallelRequest:
    """The rows of a run, as devices of the context axis share them."""
    shards = axis_size("act_batch", RULES[cfg.rules].params, mesh.shape)
    rows = max(1, cfg.rows_per_step // cfg.train.num_microbatches // shards)
    return ParallelRequest(cfg.context.attention, cfg.row_lengths.row, rows, cfg.expert.exchange)
