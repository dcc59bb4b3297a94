"""What all models share: parameters with logical axes, a stack of layers that is scanned or unrolled, and what it keeps
between the forward and the backward pass.

Models mark their activations with jax.ad_checkpoint.checkpoint_name under the names of models/config.py; a remat policy
keeps some of them on the device, moves some to the host's memory, and lets the rest be computed again.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.config import (
    ATTENTION_ADDED,
    DENSE,
    KEY,
    MLP_UP,
    QUERY,
    SAVED,
    VALUE,
    BiasedConfig,
    ModelConfig,
    RematName,
)
from jaxscale.models.lora import join_adapters
from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.ops.gradient import custom_vjp
from jaxscale.ops.kernels import Kernels
from jaxscale.ops.project import PRODUCT
from jaxscale.sharding.batch_axes import GATHERED
from jaxscale.sharding.offload import HOST
from jaxscale.sharding.shardings import Gather, no_gather
from jaxscale.sharding.tensor_axis import AXIS, NO_TENSOR_AXIS, TensorAxis, concat_row_parts

STD = 0.02  # of every matrix and table of GPT-2 and BERT
M = TypeVar("M")  # a model
Stack: TypeAlias = nnx.Module | nnx.List[nnx.Module]  # one module of stacked parameters, or a list of modules


def param(
    rngs: nnx.Rngs, shape: Sequence[int], axes: tuple[str, ...], *, fan_in: int | None = None, std: float | None = None
) -> nnx.Param:
    """A float32 parameter with its logical axes: normal with std (1 / sqrt(fan_in) unless given)."""
    assert len(shape) == len(axes), f"{shape} has not the axes {axes}"
    if std is None:
        assert fan_in is not None, "a parameter needs fan_in or std"
        std = math.pow(fan_in, -0.5)
    return nnx.Param(std * jax.random.normal(rngs.params(), tuple(shape), jnp.float32), axes=axes)


def constant(shape: Sequence[int], axes: tuple[str, ...], value: float) -> nnx.Param:
    """A float32 parameter that starts as a constant: scales as 1, biases as 0."""
    return nnx.Param(jnp.full(tuple(shape), value, jnp.float32), axes=axes)


def make_stack(make_block: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs, num_layers: int, scan: bool) -> Stack:
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
    blocks: Stack,
    apply: Callable,
    x: jax.Array,
    per_layer: Any,
    cfg: ModelConfig,
    gather: Gather,
    kernels: Kernels,
) -> tuple[jax.Array, Any]:
    """Returns (x after all blocks, their metrics with a leading axis of layers, or None).

    apply(block, x, layer_input) returns x or (x, metrics); it runs under the remat policy of the config.

    per_layer: a tree with a leading axis of num_layers (random keys, say), or None. gather: brings the weights of one
    block together just before it runs, and again before its backward pass. kernels: whether layers are a loop
    at all; their recorder takes the intermediates of each layer, and gives each what it has for it.
    """
    recorder, looped = kernels.recorder, cfg.scan_layers and kernels.loop_layers

    def wrap(f: Callable) -> Callable:
        if cfg.remat == "none" and gather is no_gather:
            return f
        policy = remat_policy(cfg.remat, cfg.remat_save, cfg.remat_offload)
        return jax.checkpoint(f, policy=policy, prevent_cse=not looped)

    def run_layer(graphdef: nnx.GraphDef, params: Any, x: jax.Array, extra: Any, held: Any) -> tuple[jax.Array, Any]:
        recorder.begin_layer(held)
        whole = gather_params(params, gather, cfg.compute_dtype, stacked=cfg.scan_layers)
        result = apply(nnx.merge(graphdef, whole), x, extra)
        x, metrics = result if isinstance(result, tuple) else (result, None)
        return x, (recorder.end_layer(x), metrics)

    held = recorder.layers()
    if isinstance(blocks, nnx.List):
        seen = []
        for layer, block in enumerate(blocks):
            graphdef, params = nnx.split(block)
            run = wrap(functools.partial(run_layer, graphdef))
            x, outputs = run(params, x, *jax.tree.map(operator.itemgetter(layer), (per_layer, held)))
            seen.append(outputs)
        recorded, metrics = jax.tree.map(lambda *layers: jnp.stack(layers), *seen)
        recorder.end_stack(recorded)
        return x, metrics
    graphdef, params = nnx.split(blocks)
    run = wrap(functools.partial(run_layer, graphdef))
    layers = params, per_layer, held
    x, (recorded, metrics) = lax.scan(lambda x, layer: run(layer[0], x, *layer[1:]), x, layers, unroll=not looped)
    recorder.end_stack(recorded)
    return x, metrics


class OneStack(nnx.Module):
    """A model whose blocks are one stack, in pieces: enter(), layer() and per_layer() for each block, leave().

    Blocks of another kind may come before them, in a stack of the name DENSE: layer() and per_layer() know both.
    """

    cfg: ModelConfig
    kernels: Kernels
    gather: Gather
    tensor: TensorAxis
    blocks: Stack

    def enter(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns the residual stream before the first block. keys_B: for dropout."""
        raise NotImplementedError

    def per_layer(self, keys_B: jax.Array | None, **stack: str) -> Any:
        """Returns what layer() takes besides the residual stream, with a leading axis of layers, or None.

        stack: the name of the stack, for a model that has more than one.
        """
        raise NotImplementedError

    def layer(self, positions_BT, segment_ids_BT) -> Callable:
        """Returns a function (block, x_BTD, per_layer of it) -> x_BTD or (x_BTD, metrics), for these rows."""
        raise NotImplementedError

    def leave(self, x_BTD) -> jax.Array:
        """Returns the last hidden states, given the residual stream after the last block."""
        raise NotImplementedError

    def unembedding(self, h_BTD) -> tuple[jax.Array, jax.Array]:
        """Returns (h_BTD, the output projection [D, V])."""
        raise NotImplementedError

    def hidden(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """The residual stream after the last block, compute_dtype[B, T, D], of the device's own positions: all but the
        output projection, so that a loss can chunk the logits.

        keys_B: for dropout.
        """
        return self.through(tokens_BT, positions_BT, segment_ids_BT, keys_B)[0]

    def through(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """Returns (what hidden() returns, metrics of the blocks with a leading axis of layers)."""
        x_BTD = self.enter(tokens_BT, positions_BT, segment_ids_BT, keys_B)
        if (dense := getattr(self, DENSE, None)) is not None:
            x_BTD, _ = self.run_blocks(dense, x_BTD, positions_BT, segment_ids_BT, self.per_layer(keys_B, stack=DENSE))
        x_BTD, metrics = self.run_blocks(self.blocks, x_BTD, positions_BT, segment_ids_BT, self.per_layer(keys_B))
        return self.leave(x_BTD), metrics

    def run_blocks(self, blocks: Stack, x_BTD, positions_BT, segment_ids_BT, per_layer: Any):
        """What run_stack() returns of some blocks."""
        run, cfg = self.layer(positions_BT, segment_ids_BT), self.cfg
        return run_stack(blocks, run, x_BTD, per_layer, cfg, self.gather, self.kernels)


def all_but_gathered(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """A policy of jax.checkpoint: everything is kept but weights that were gathered or fetched from the host, and what
    is only their cast."""
    if any(getattr(one, "memory_space", None) == jax.memory.Space.Host for one in inputs):
        return False
    inside = getattr(params.get("call_jaxpr"), "eqns", ())  # of a function with a gradient of its own
    gathers = any(gathers_weight(one.primitive, one.params) for one in inside) or gathers_weight(primitive, params)
    return not gathers and primitive is not lax.convert_element_type_p and params.get("name") != GATHERED


def gathers_weight(primitive: Any, params: Mapping[str, Any]) -> bool:
    """True for a gather over the batch axes; over the tensor axis it is activations that are gathered."""
    return primitive is lax.all_gather_p and params["axis_name"] != (AXIS,)


def remat_policy(remat: RematName, save: tuple[str, ...], offload: tuple[str, ...]) -> Callable[..., Any]:
    """The policy of jax.checkpoint.

    A name in `offload` goes to the host's memory, also where the policy would keep it on the device. No policy keeps
    weights that were gathered from other devices: of a whole model they would fill each of them.
    """
    if remat == "none":
        return all_but_gathered
    if remat == "dots":
        return jax.checkpoint_policies.save_only_these_names(PRODUCT)
    kept = [name for name in (save if remat == "save" else SAVED[remat]) if name not in offload]
    if offload:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=kept,
            names_which_can_be_offloaded=list(offload),
            offload_src="device",
            offload_dst=HOST,
        )
    else:
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
    if ATTENTION_OUT not in kept:
        return policy
    return lambda primitive, *args, **params: kept_by_kernel(primitive) or policy(primitive, *args, **params)


def kept_by_kernel(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of jax.checkpoint: whether this is cuDNN's forward pass, whose two results are not ours to name."""
    return primitive.name == "dot_product_attention_fwd_wrapper"


def in_parts(f: Callable[..., Any], cfg: ModelConfig, *of_rows: Any) -> Any:
    """f(*of_rows), the rows taken in cfg.row_parts parts one after the other, for an f that does not mix rows.

    Going backward, a part is computed again once the gradients of the one behind it are there, so that the activations
    of one part exist at a time. Its gradients of weights are added to theirs in the weights' dtype. Rows that cannot be
    divided so are taken in fewer parts; without remat, as a whole.
    """
    rows = len(jax.tree.leaves(of_rows)[0])
    parts = 1 if cfg.remat == "none" else math.gcd(cfg.row_parts, rows)
    if parts == 1:
        return f(*of_rows)
    f = jax.checkpoint(f, policy=remat_policy(cfg.remat, cfg.remat_save, cfg.remat_offload))  # with its barrier
    leaves, treedef = jax.tree.flatten(of_rows)
    done: list[Any] = []
    for part in zip(*(jnp.split(leaf, parts) for leaf in leaves)):
        x, *rest = jax.tree.unflatten(treedef, part)
        if done and isinstance(done[-1], tuple):
            x, before = settle_together(x, done[-1][0])
            done[-1] = (before, *done[-1][1:])
        elif done:
            x, done[-1] = settle_together(x, done[-1])
        done.append(f(x, *rest))
    return concat_row_parts(done)


@jax.named_scope("gather_weights")
def gather_params(params: Any, gather: Gather, dtype: Any, *, stacked: bool) -> Any:
    """A block's parameters as every device needs them. stacked: their axes begin with that of the layers, now gone."""
    whole = lambda leaf: leaf.replace(gather(leaf.get_value(), leaf.axes[stacked:], dtype))
    return join_adapters(jax.tree.map(whole, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


@custom_vjp
def settle_together(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, w) as they are; going backward, neither gradient is used before both are there.

    For a weight whose gradient nobody waits for: XLA would sum it over the devices at the end of the backward pass,
    and keep it whole until then (0.5 GiB for the output projection of a 7B, libtpu 0.0.51 for v5e, 2026-11-21).
    """
    return x, w


settle_together.defvjp(lambda x, w: ((x, w), None), lambda _, grads: lax.optimization_barrier(grads))


def split_model(model: M) -> tuple[nnx.GraphDef[M], dict, dict]:
    """(graphdef, params, axes): nested plain dicts of arrays and of tuples of logical axes, alike in shape.

    nnx.merge(graphdef, params) is the model again; a checkpoint and optax see nothing but dicts.
    """
    graphdef, state = nnx.split(model, nnx.Param)
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    axes = jax.tree.map(lambda leaf: tuple(leaf.axes), state, is_leaf=is_variable)
    return graphdef, string_keys(nnx.to_pure_dict(state)), string_keys(nnx.to_pure_dict(axes))


def merge_model(graphdef: nnx.GraphDef[M], params: dict) -> M:
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


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None, tensor: TensorAxis = NO_TENSOR_AXIS) -> jax.Array:
    """x [B, T, ...] with a part `rate` of its entries zero and the rest scaled up; as it is without keys or at rate 0.

    Each row has a key of its own, so that no number depends on which device or microbatch a row is in, nor on how its
    positions are shared.
    """
    if keys_B is None or rate == 0.0:
        return x
    shape = (tensor.row_length(x), *x.shape[2:])
    kept = tensor.local_from_row(jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys_B))
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def with_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x plus a bias along its last axes, in x's dtype."""
    return x + bias.astype(x.dtype).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)


class BiasedAttention(nnx.Module):
    """Attention within each packed document, with biases, as in GPT-2 and BERT. out_std: of the output projection."""

    def __init__(
        self, cfg: BiasedConfig, *, causal: bool, out_std: float, rngs: nnx.Rngs, kernels: Kernels, tensor: TensorAxis
    ):
        D, N, H = cfg.embed_dim, cfg.num_heads, cfg.head_dim
        self.kernels, self.tensor, self.causal = kernels, tensor, causal
        self.wq = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), std=STD)
        self.wk = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), std=STD)
        self.wv = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), std=STD)
        self.bias_q = constant((N, H), ("heads", "head_dim"), 0.0)
        self.bias_k = constant((N, H), ("heads", "head_dim"), 0.0)
        self.bias_v = constant((N, H), ("heads", "head_dim"), 0.0)
        self.wo = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), std=out_std)
        self.bias_o = constant((D,), ("norm",), 0.0)

    @jax.named_scope("attention")
    def __call__(self, x_BTD, segment_ids_BT):
        project = self.kernels.project
        x_BTD = self.tensor.all_gather(x_BTD)
        q_BTNH = checkpoint_name(with_bias(project("BTD,DNH->BTNH", x_BTD, self.wq[...]), self.bias_q[...]), QUERY)
        k_BSNH = checkpoint_name(with_bias(project("BSD,DNH->BSNH", x_BTD, self.wk[...]), self.bias_k[...]), KEY)
        v_BSNH = checkpoint_name(with_bias(project("BSD,DNH->BSNH", x_BTD, self.wv[...]), self.bias_v[...]), VALUE)
        how = {} if self.causal else {"causal": False}  # not every kernel can be asked for the latter
        out_BTNH = self.kernels.attend(q_BTNH, k_BSNH, v_BSNH, segment_ids_BT, **how)  # named ATTENTION_OUT within
        added_BTD = with_bias(
            self.tensor.reduce_scatter(project("BTNH,NHD->BTD", out_BTNH, self.wo[...])), self.bias_o[...]
        )
        return checkpoint_name(added_BTD, ATTENTION_ADDED)


class BiasedMlp(nnx.Module):
    """Two products with biases and an activation between. out_std: of the second."""

    def __init__(
        self,
        cfg: BiasedConfig,
        activate: Callable[[jax.Array], jax.Array],
        *,
        out_std: float,
        rngs: nnx.Rngs,
        kernels: Kernels,
        tensor: TensorAxis,
    ):
        D, F = cfg.embed_dim, cfg.mlp_dim
        self.kernels, self.tensor, self.activate = kernels, tensor, activate
        self.up = param(rngs, (D, F), ("embed", "mlp"), std=STD)
        self.bias_up = constant((F,), ("mlp",), 0.0)
        self.down = param(rngs, (F, D), ("mlp", "embed"), std=out_std)
        self.bias_down = constant((D,), ("norm",), 0.0)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD):
        project = self.kernels.project
        h_BTF = with_bias(project("BTD,DF->BTF", self.tensor.all_gather(x_BTD), self.up[...]), self.bias_up[...])
        h_BTF = self.activate(checkpoint_name(h_BTF, MLP_UP))
        return with_bias(self.tensor.reduce_scatter(project("BTF,FD->BTD", h_BTF, self.down[...])), self.bias_down[...])


def drop_embeddings(x_BTD: jax.Array, keys_B: jax.Array | None, cfg: ModelConfig, tensor: TensorAxis) -> jax.Array:
    """The embeddings after dropout; as they are without keys or at rate 0."""
    if keys_B is None or not cfg.dropout:
        return x_BTD
    return dropout(x_BTD, cfg.dropout, split_keys(keys_B, cfg.num_layers + 1)[0], tensor)


def layer_keys(keys_B: jax.Array | None, cfg: ModelConfig) -> jax.Array | None:
    """A random key for each layer and row, [L, B], apart from those of drop_embeddings(); None without dropout."""
    return None if keys_B is None or not cfg.dropout else split_keys(keys_B, cfg.num_layers + 1)[1:]
