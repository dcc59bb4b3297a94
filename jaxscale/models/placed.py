"""A model on a mesh for use after training: where its parameters live, and how it is built from them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxscale.models import AnyModelConfig, attention_needs, make_model
from jaxscale.models.layers import merge_model, split_model
from jaxscale.models.lora import NO_LORA, LoraConfig
from jaxscale.ops.attention import AttentionNeeds
from jaxscale.ops.kernels import Kernels, choose_kernels, with_taps
from jaxscale.ops.quantized import with_matmul_dtype
from jaxscale.ops.taps import BLIND, Blind
from jaxscale.sharding.batch_axes import BatchAxes, make_batch_axes
from jaxscale.sharding.offload import call_in, fetching, stand_ins
from jaxscale.sharding.place import check_divides, tree_shardings, whole_already
from jaxscale.sharding.rules import RULES, Rules
from jaxscale.sharding.tensor_axis import TensorAxis, make_tensor_axis
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class PlacedModel:
    """A model's arrays before there are any, and the kernels that suit the mesh."""

    cfg: AnyModelConfig
    mesh: Mesh
    rules: Rules
    batch_axes: BatchAxes
    shapes: Any  # of the parameters, jax.ShapeDtypeStruct
    axes: Any  # their logical axes
    needs: AttentionNeeds
    kernels: Kernels
    away: bool  # whether parameters come in the host's memory, those of the blocks to be fetched one by one
    lora: LoraConfig  # of the adapters among the parameters

    @functools.cached_property
    def shardings(self) -> Any:
        """The sharding of each parameter."""
        return tree_shardings(self.mesh, self.axes, self.rules.params)

    @property
    def specs(self) -> Any:
        """The PartitionSpec of each parameter."""
        return jax.tree.map(lambda sharding: sharding.spec, self.shardings)

    def build(self, tensor: TensorAxis | None = None, taps: Blind = BLIND) -> Callable[[Any], nnx.Module]:
        """params -> the model, in a function that each device of the mesh computes on its own parts.

        tensor: how the devices of that axis share a row; none: as in training. taps: what looks at it.
        """
        gather = self.batch_axes.gather if self.batch_axes.axes else whole_already
        gather = fetching(gather) if self.away else gather
        tensor = tensor or make_tensor_axis(self.mesh)
        kernels = self.kernels if taps is BLIND else with_taps(self.kernels, taps)
        how = dict(kernels=kernels, gather=gather, tensor=tensor, lora=self.lora)
        make = lambda key: make_model(self.cfg, key=key, **how)
        graphdef = split_model(jax.eval_shape(make, jax.random.key(0)))[0]
        if self.away:
            return lambda params: merge_model(graphdef, call_in(params, stand_ins(params)))
        return functools.partial(merge_model, graphdef)


def place_model(
    cfg: AnyModelConfig, mesh: Mesh, rules: str | Rules, *, lora: LoraConfig = NO_LORA, away: bool = False
) -> PlacedModel:
    """Where this model's parameters live on a mesh. Raises BadInput where the mesh does not divide them.

    lora: of the adapters that the model was trained with: they are among its parameters until they are merged.
    """
    rules = RULES[rules] if isinstance(rules, str) else rules
    device, needs = mesh.devices.flat[0], attention_needs(cfg)
    kernels = choose_kernels(device.platform, cfg.attention, needs, device)
    kernels = with_matmul_dtype(kernels, cfg.matmul_dtype)
    make = lambda key: make_model(cfg, key=key, kernels=kernels, lora=lora)
    _, shapes, axes = split_model(jax.eval_shape(make, jax.random.key(0)))
    if uneven := check_divides(shapes, axes, rules.params, mesh.shape):
        told = "; ".join(dict.fromkeys(uneven))
        raise BadInput(f"model and mesh do not fit: {told}; choose a mesh axis that divides")
    return PlacedModel(cfg, mesh, rules, make_batch_axes(mesh, rules), shapes, axes, needs, kernels, away, lora)
