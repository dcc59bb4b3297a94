"""What all models share: settings, parameters with logical axes, and a stack of layers that is scanned or unrolled."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.models.lora import join_adapters
from jaxscale.models.remat import RematName, check_remat, remat_policy
from jaxscale.ops.attention import AttentionName
from jaxscale.ops.quantized import MatmulDtype
from jaxscale.ops.taps import BLIND, Blind
from jaxscale.schema import setting
from jaxscale.sharding.place import Gather, whole_already
from jaxscale.sharding.tensor_axis import ONE, TensorAxis
from jaxscale.system.exits import BadInput

Dtype = Literal["float32", "bfloat16", "float16"]
MOST_LAYERS = 10_000  # ten times the deepest that was published (arXiv:2203.00555): beyond is a slip of the keyboard


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings that every model has."""

    vocab_size: int = setting(help="rows of the embedding table: at least the tokenizer's largest id + 1")
    num_layers: int = setting(help="transformer blocks")
    embed_dim: int = setting(help="width of the residual stream")
    num_heads: int = setting(help="query heads")
    norm_eps: float = setting(1e-5, "added to the variance in norms")
    logit_softcap: float | None = setting(
        None, "c: logits become c * tanh(logits / c) (arXiv:2408.00118); none: as they are"
    )
    compute_dtype: Dtype = setting(
        "bfloat16", "matrix products and activations; parameters, norms and sums are float32"
    )
    embed_compute_dtype: Dtype | None = setting(
        None, "embedding and logits; float32 is a fallback for instability; none: as compute_dtype"
    )
    matmul_precision: Literal["default", "tf32", "highest"] = setting(
        "default", "of float32 products; tf32 only on GPUs"
    )
    matmul_dtype: MatmulDtype = setting(
        "none", "to which the operands of the blocks' projections are rounded, forward and backward; none: as they are"
    )
    attention: AttentionName = setting("auto", "kernel; auto prints what it chose")
    scan_layers: bool = setting(True, "one compiled layer run num_layers times; false: unrolled, slower to compile")
    remat: RematName = setting(
        "none",
        "what the backward pass computes again: nothing (none); all (full); all but attention's result (attention), "
        "its inputs too (qkv), all products (minimal), products without attention (dots), or but remat_save (save)",
        may_change=True,
    )
    remat_save: tuple[str, ...] = setting(
        (), "names of the activations that are kept, for remat='save'", may_change=True, read_if="model.remat=save"
    )
    remat_offload: tuple[str, ...] = setting(
        (),
        "names of the activations that are kept in the host's memory",
        may_change=True,
        read_if="model.remat!=none|dots",
    )
    loss_chunk_tokens: int = setting(4096, "tokens whose logits exist at one time, in the loss")

    activation_names: ClassVar[tuple[str, ...]] = ()  # that the model marks with checkpoint_name, for remat

    @property
    def embed_dtype(self) -> Dtype:
        """In which the embedding is looked up and logits are multiplied."""
        return self.embed_compute_dtype or self.compute_dtype

    def __post_init__(self):
        check_remat(self.remat, self.remat_save, self.remat_offload, self.activation_names)
        check_positive(self, "vocab_size", "num_layers", "embed_dim", "num_heads", "loss_chunk_tokens")
        if self.num_layers > MOST_LAYERS:
            raise BadInput(f"num_layers={self.num_layers} must be at most {MOST_LAYERS}")
        if self.norm_eps < 0:
            raise BadInput(f"norm_eps={self.norm_eps} must not be negative")
        if self.logit_softcap is not None and self.logit_softcap <= 0:
            raise BadInput(f"logit_softcap={self.logit_softcap} must be above 0, or none")


def check_positive(cfg: ModelConfig, *names: str) -> None:
    """Raises BadInput for the first of these settings that is below 1."""
    for name in names:
        if getattr(cfg, name) < 1:
            raise BadInput(f"{name}={getattr(cfg, name)} must be at least 1")


def param(
    rngs: nnx.Rngs, shape: Sequence[int], axes: tuple[str, ...], *, fan_in: int | None = None, std: float | None = None
) -> nnx.Param:
    """A float32 parameter with its logical axes: normal with std (1 / sqrt(fan_in) unless given)."""
    assert len(shape) == len(axes), f"{shape} has not the axes {axes}"
    std = fan_in**-0.5 if std is None else std
    return nnx.Param(std * jax.random.normal(rngs.params(), tuple(shape), jnp.float32), axes=axes)


def constant(shape: Sequence[int], axes: tuple[str, ...], value: float) -> nnx.Param:
    """A float32 parameter that starts as a constant: scales as 1, biases as 0."""
    return nnx.Param(jnp.full(tuple(shape), value, jnp.float32), axes=axes)


def make_stack(make_block: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs, num_layers: int, scan: bool) -> nnx.Module:
    """Blocks with independent random keys: one module of stacked parameters, or a list. Layer l is the same in both."""
    keys = jax.random.split(rngs.params(), num_layers)
    if not scan:
        return nnx.List([make_block(nnx.Rngs(params=key)) for key in keys])
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make_block(nnx.Rngs(params=0))))
    stacked = jax.vmap(lambda key: nnx.state(make_block(nnx.Rngs(params=key)), nnx.Param))(keys)
    boxed = jax.tree.map(
        lambda leaf: nnx.Param(leaf.get_value(), axes=("layers", *leaf.axes)),
        stacked,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return nnx.merge(graphdef, boxed)


def run_stack(
    blocks: nnx.Module,
    apply: Callable,
    x: jax.Array,
    per_layer: Any,
    cfg: ModelConfig,
    gather: Gather,
    taps: Blind = BLIND,
) -> jax.Array:
    """x after all blocks: apply(block, x, layer_input) -> x, each under the remat policy of the config.

    per_layer: a tree with a leading axis of num_layers (random keys, say), or None. gather: brings the weights of one
    block together just before it runs, and again before its backward pass. taps: given what they saw of each layer, and
    what they ask to have in it.
    """

    def wrap(f: Callable) -> Callable:
        if cfg.remat == "none" and gather is whole_already:
            return f
        policy = remat_policy(cfg.remat, cfg.remat_save, cfg.remat_offload)
        return jax.checkpoint(f, policy=policy, prevent_cse=not cfg.scan_layers)

    def run_layer(graphdef: nnx.GraphDef, params: Any, x: jax.Array, extra: Any, held: Any) -> tuple[jax.Array, Any]:
        taps.begin_layer(held)
        whole = gather_params(params, gather, cfg.compute_dtype, stacked=cfg.scan_layers)
        x = apply(nnx.merge(graphdef, whole), x, extra)
        return x, taps.end_layer(x)

    held = taps.layers()
    if not cfg.scan_layers:
        seen = []
        for layer, block in enumerate(blocks):
            graphdef, params = nnx.split(block)
            run = wrap(functools.partial(run_layer, graphdef))
            x, of_layer = run(params, x, *jax.tree.map(operator.itemgetter(layer), (per_layer, held)))
            seen.append(of_layer)
        taps.end_stack(jax.tree.map(lambda *layers: jnp.stack(layers), *seen))
        return x
    graphdef, params = nnx.split(blocks)
    run = wrap(functools.partial(run_layer, graphdef))
    x, seen = jax.lax.scan(lambda x, layer: run(layer[0], x, *layer[1:]), x, (params, per_layer, held))
    taps.end_stack(seen)
    return x


def gather_params(params: Any, gather: Gather, dtype: Any, *, stacked: bool) -> Any:
    """A block's parameters as every device needs them. stacked: their axes begin with that of the layers, now gone."""
    whole = lambda leaf: leaf.replace(gather(leaf.get_value(), leaf.axes[stacked:], dtype))
    return join_adapters(jax.tree.map(whole, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


@jax.custom_vjp
def settle_together(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, w) as they are; going backward, neither gradient is used before both are there.

    For a weight whose gradient nobody waits for: XLA would sum it over the devices at the end of the backward pass,
    and keep it whole until then (0.5 GiB for the output projection of a 7B, libtpu 0.0.51 for v5e, 2026-11-21).
    """
    return x, w


settle_together.defvjp(lambda x, w: ((x, w), None), lambda _, grads: jax.lax.optimization_barrier(grads))


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, dict, dict]:
    """(graphdef, params, axes): nested plain dicts of arrays and of tuples of logical axes, alike in shape.

    nnx.merge(graphdef, params) is the model again; a checkpoint and optax see nothing but dicts.
    """
    graphdef, state = nnx.split(model, nnx.Param)
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    axes = jax.tree.map(lambda leaf: tuple(leaf.axes), state, is_leaf=is_variable)
    return graphdef, string_keys(nnx.to_pure_dict(state)), string_keys(nnx.to_pure_dict(axes))


def merge_model(graphdef: nnx.GraphDef, params: dict) -> nnx.Module:
    """The model with these parameters: the inverse of split_model."""
    return nnx.merge(graphdef, integer_keys(params))


def string_keys(tree: Any) -> Any:
    """Layer numbers of unrolled blocks as text, since a checkpoint's names are text."""
    return {str(key): string_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def integer_keys(tree: Any) -> Any:
    """The inverse of string_keys."""
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: integer_keys(value) for key, value in tree.items()}


def split_keys(keys_B: jax.Array, number: int) -> jax.Array:
    """`number` new random keys of each row, [number, B]."""
    return jnp.swapaxes(jax.vmap(lambda key: jax.random.split(key, number))(keys_B), 0, 1)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None, tensor: TensorAxis = ONE) -> jax.Array:
    """x [B, T, ...] with a part `rate` of its entries zero and the rest scaled up; as it is without keys or at rate 0.

    Each row has a key of its own, so that no number depends on which device or microbatch a row is in, nor on how its
    positions are shared.
    """
    if keys_B is None or rate == 0.0:
        return x
    shape = (x.shape[1] * tensor.size, *x.shape[2:])
    kept = tensor.own(jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys_B))
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def with_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x plus a bias along its last axes, in x's dtype."""
    return x + bias.astype(x.dtype).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
