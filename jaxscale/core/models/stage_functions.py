"""Functions of the parameters that the stages of a pipeline run.

B batch  T position  D embed
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.core.batch import Batch
from jaxscale.core.models.config import BLOCKS
from jaxscale.core.models.layers import StackedModel, gather_params, in_row_parts, merge_model
from jaxscale.core.models.model import loss_from_hidden
from jaxscale.core.models.moe_balance import moe_sums
from jaxscale.core.shardings import no_gather
from jaxscale.kernels.attention.xla import make_mask_spec


@dataclasses.dataclass(frozen=True)
class StageFunctions:
    """Functions of gathered parameters, or of shards over the tensor axis.

    ends: the parameters outside of layers.
    """

    graphdef: nnx.GraphDef
    stacks: dict[str, Any]  # {name of a stack: tree with the structure of its parameters}
    compute_dtype: Any
    aux_weights: Mapping[str, float]
    num_sources: int

    @property
    def num_layers(self) -> int:
        """Number of layers in the stack `blocks`."""
        return jax.tree.leaves(self.stacks[BLOCKS])[0].shape[0]

    def embed(self, ends: Any, rows: Batch, keys_B: jax.Array) -> jax.Array:
        """Returns the residual stream before the first layer, of local positions."""
        segments = make_mask_spec(rows.segment_ids, rows.prefix)
        return self.model(ends).embed_tokens(rows.tokens, rows.positions, segments, keys_B)

    def run_layer(
        self,
        params: Any,
        ends: Any,
        x_BTD: jax.Array,
        rows: Batch,
        keys_B: jax.Array,
        number: jax.Array,
        stack: str = BLOCKS,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (x_BTD after layer `number` of its stack, additions to the named sums: {} except for experts).
        params: its weights."""
        model = self.model(ends | {stack: params})
        graphdef, weights = nnx.split(getattr(model, stack))
        block = nnx.merge(graphdef, gather_params(weights, no_gather, self.compute_dtype, stacked=True))
        layer_input = jax.tree.map(lambda x: jnp.asarray(x)[number], model.layer_inputs(keys_B, stack))
        shared = model.shared_inputs(rows.positions, make_mask_spec(rows.segment_ids, rows.prefix))
        result = in_row_parts(block, model.cfg, model.plan)(x_BTD, layer_input, *shared)
        if not isinstance(result, tuple):
            return result, {}
        moe_loss, parts = moe_sums(pad_layers(result[1], number, self.num_layers), self.aux_weights)
        return result[0], parts | {"objective": moe_loss}

    def loss(self, ends: Any, x_BTD: jax.Array, rows: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns (objective, its named parts) from the residual stream after the last layer, summed over tokens."""
        model = self.model(ends)
        return loss_from_hidden(model, model.last_hidden(x_BTD), rows, self.aux_weights, self.num_sources)

    def model(self, params: dict[str, Any]) -> StackedModel:
        """Returns the model with these parameters."""
        model = merge_model(self.graphdef, self.stacks | params)
        assert isinstance(model, StackedModel), "settings reject a pipeline for an encoder-decoder"
        return model


def pad_layers(metrics: Any, number: jax.Array, num_layers: int) -> Any:
    """Returns the metrics of one layer with a leading axis of layers; zeros for the other layers."""
    return jax.tree.map(lambda x: jnp.zeros((num_layers, *x.shape), x.dtype).at[number].set(x), metrics)
