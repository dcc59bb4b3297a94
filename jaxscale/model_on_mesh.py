"""RunConfig and mesh -> the model with its shardings."""

from jax.sharding import Mesh

from jaxscale.config import RunConfig
from jaxscale.device_checks import check_stages
from jaxscale.models.config import BLOCKS
from jaxscale.models.sharded import ParallelRequest, ShardedModel, shard_model
from jaxscale.sharding.pipeline_axis import NO_PIPELINE_AXIS, PipelineAxis, make_pipeline_axis
from jaxscale.sharding.rules import RULES, axis_size


def shard_run_model(cfg: RunConfig, mesh: Mesh, *, torus_at_once: bool, staged: bool = True) -> ShardedModel:
    """Returns the model on the mesh. Raises BadInput if the mesh does not divide its parameters.

    staged: split into pipeline stages, if there are any; otherwise the pipeline axis shards rows and weights.
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
    """Returns the pipeline stages of the model. Raises BadInput if it does not support them."""
    stages, model = mesh.shape["pipeline"], cfg.model
    check_stages(cfg, stages)
    head_layers = model.vocab_size * model.embed_dim / model.block_matrix_params
    blocks, before = model.layer_stacks.get(BLOCKS, 0), model.leading_layers
    return make_pipeline_axis(stages, cfg.pipeline, blocks, head_layers, before)


def parallel_request(cfg: RunConfig, mesh: Mesh) -> ParallelRequest:
    """Returns settings and sizes of the rows that the context axis shards."""
    shards = axis_size("act_batch", RULES[cfg.rules].params, mesh.shape)
    rows = max(1, cfg.rows_per_step // cfg.train.num_microbatches // shards)
    return ParallelRequest(cfg.context.attention, cfg.row_lengths.row, rows, cfg.expert.exchange)
