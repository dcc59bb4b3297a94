"""Parameters with logical axes, stacks of blocks, and remat, for all models. Stacks are scanned or unrolled.

Models mark activations by jax.ad_checkpoint.checkpoint_name with the names in core/models/config.py. A remat policy
saves some activations on the device, offloads some to host memory, and recomputes the others.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.core.axes.batch_axes import GATHERED
from jaxscale.core.axes.tensor_axis import AXIS, NO_TENSOR_AXIS, TensorAxis, concat_row_parts
from jaxscale.core.models.config import (
    ATTENTION_ADDED,
    KEY,
    MLP_UP,
    QUERY,
    SAVED_NAMES,
    VALUE,
    ModelConfig,
    RematName,
)
from jaxscale.core.models.lora import join_adapters
from jaxscale.core.plan import ParallelPlan
from jaxscale.core.recorder import NO_RECORDER
from jaxscale.core.shardings import Gather, no_gather
from jaxscale.kernels.collectives import order_on_cpu
from jaxscale.kernels.config import ATTENTION_OUT
from jaxscale.kernels.gradient import custom_vjp
from jaxscale.kernels.host_memory import HOST
from jaxscale.kernels.matmul.project import PRODUCT

if TYPE_CHECKING:
    from jaxscale.core.models.gpt2_bert_t5_config import BiasedConfig

STD = 0.02  # initial standard deviation of matrices and embeddings in GPT-2 and BERT
M = TypeVar("M")  # a model
Stack: TypeAlias = nnx.Module | nnx.List[nnx.Module]  # a module with stacked parameters, or a list of modules


def param(
    rngs: nnx.Rngs, shape: Sequence[int], axes: tuple[str, ...], *, fan_in: int | None = None, std: float | None = None
) -> nnx.Param:
    """Returns a float32 parameter with logical axes, drawn from a normal distribution. std defaults to fan_in**-0.5."""
    assert len(shape) == len(axes), f"{shape} and {axes} differ in length"
    if std is None:
        assert fan_in is not None, "a parameter needs fan_in or std"
        std = math.pow(fan_in, -0.5)
    return nnx.Param(std * jax.random.normal(rngs.params(), tuple(shape), jnp.float32), axes=axes)


def constant(shape: Sequence[int], axes: tuple[str, ...], value: float) -> nnx.Param:
    """Returns a float32 parameter initialized to a constant, such as 1 for scales or 0 for biases."""
    return nnx.Param(jnp.full(tuple(shape), value, jnp.float32), axes=axes)


def make_stack(make_block: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs, num_layers: int, scan: bool) -> Stack:
    """Returns a module with stacked parameters if `scan`, else a list of blocks with the same initial values."""
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


class Block(nnx.Module):
    """Base class of the layers of a stack."""

    def __call__(self, x_BTD: jax.Array, layer_input: Any, *shared: Any) -> Any:
        """Returns x_BTD after the layer, or (x_BTD, metrics).

        layer_input: the slice of `layer_inputs` in run_stack() for this layer. shared: inputs that all layers receive.
        """
        raise NotImplementedError


def run_stack(
    blocks: Stack, x: jax.Array, layer_inputs: Any, shared: tuple, cfg: ModelConfig, plan: ParallelPlan
) -> tuple[jax.Array, Any]:
    """Returns (x after all blocks, stacked metrics of the blocks or None).

    layer_inputs: inputs that differ by layer, such as random keys, as a tree with a leading layer axis, or None.
    shared: inputs that all layers receive. The weights of a block are gathered before its forward pass and again before
    its backward pass. plan.recorder receives intermediates of each layer, and may provide an additional layer input.
    """
    gather, recorder, looped = plan.gather, plan.recorder, cfg.scan_layers and plan.scan_layers
    recorder_inputs = recorder.layer_inputs()

    def make_layer(graphdef: nnx.GraphDef) -> Callable[[jax.Array, tuple], tuple]:
        def run_layer(x: jax.Array, layer: tuple) -> tuple:
            params, layer_input, recorder_input = layer
            recorder.begin_layer(recorder_input)
            block = nnx.merge(graphdef, gather_params(params, gather, cfg.compute_dtype, stacked=cfg.scan_layers))
            result = in_row_parts(block, cfg, plan)(x, layer_input, *shared)
            x, metrics = result if isinstance(result, tuple) else (result, None)
            return x, (recorder.end_layer(x), metrics)

        if cfg.remat == "none" and gather is no_gather:
            return run_layer
        policy = remat_policy(cfg.remat, cfg.remat_save, cfg.remat_offload)
        return jax.checkpoint(run_layer, policy=policy, prevent_cse=not looped)

    if isinstance(blocks, nnx.List):
        outputs = []
        for number, block in enumerate(blocks):
            graphdef, params = nnx.split(block)
            inputs = jax.tree.map(operator.itemgetter(number), (layer_inputs, recorder_inputs))
            x, output = make_layer(graphdef)(x, (params, *inputs))
            outputs.append(output)
        recorded, metrics = jax.tree.map(lambda *layers: jnp.stack(layers), *outputs)
    else:
        graphdef, params = nnx.split(blocks)
        layers = params, layer_inputs, recorder_inputs
        x, (recorded, metrics) = lax.scan(make_layer(graphdef), x, layers, unroll=not looped)
    recorder.end_stack(recorded)
    return x, metrics


class StackedModel(nnx.Module):
    """Base class of models that consist of embed_tokens(), stacks of blocks and last_hidden().

    Each stack is an attribute named in cfg.layer_stacks. layer_inputs() and shared_inputs() return its inputs.
    """

    cfg: ModelConfig
    plan: ParallelPlan

    def embed_tokens(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns the residual stream before the first block. keys_B: dropout keys."""
        raise NotImplementedError

    def layer_inputs(self, keys_B: jax.Array | None, stack: str) -> Any:
        """Returns the inputs that differ by layer, as a tree with a leading layer axis, or None."""
        raise NotImplementedError

    def shared_inputs(self, positions_BT, segment_ids_BT) -> tuple:
        """Returns the inputs that all layers share."""
        return (segment_ids_BT,)

    def last_hidden(self, x_BTD) -> jax.Array:
        """Returns the last hidden states from the residual stream after the last block."""
        raise NotImplementedError

    def unembedding(self, h_BTD) -> tuple[jax.Array, jax.Array]:
        """Returns (h_BTD, the output projection [D, V])."""
        raise NotImplementedError

    def hidden(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """Returns the last hidden states of local positions, compute_dtype[B, T, D]. keys_B: dropout keys.

        Excludes the output projection, so that a loss can compute the logits in chunks.
        """
        return self.hidden_and_metrics(tokens_BT, positions_BT, segment_ids_BT, keys_B)[0]

    def hidden_and_metrics(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """Returns (last hidden states, stacked metrics of the blocks or None)."""
        x_BTD, metrics = self.embed_tokens(tokens_BT, positions_BT, segment_ids_BT, keys_B), None
        for stack in self.cfg.layer_stacks:
            inputs, shared = self.layer_inputs(keys_B, stack), self.shared_inputs(positions_BT, segment_ids_BT)
            x_BTD, metrics = run_stack(getattr(self, stack), x_BTD, inputs, shared, self.cfg, self.plan)
        return self.last_hidden(x_BTD), metrics


def save_all_but_gathered(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """A jax.checkpoint policy that saves everything except gathered weights, casts, and copies from host memory."""
    if any(getattr(x, "memory_space", None) == jax.memory.Space.Host for x in inputs):
        return False
    eqns = getattr(params.get("call_jaxpr"), "eqns", ())  # equations of a custom_vjp
    gathers = any(gathers_weight(eqn.primitive, eqn.params) for eqn in eqns) or gathers_weight(primitive, params)
    return not gathers and primitive is not lax.convert_element_type_p and params.get("name") != GATHERED


def gathers_weight(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Returns True for an all-gather of weights. An all-gather over the tensor axis gathers activations."""
    return primitive is lax.all_gather_p and params["axis_name"] != (AXIS,)


def remat_policy(remat: RematName, save: tuple[str, ...], offload: tuple[str, ...]) -> Callable[..., Any]:
    """Returns the jax.checkpoint policy for these settings.

    Activations named in `offload` are saved in host memory even if the policy would save them on the device. No policy
    saves gathered weights, because the weights of all layers would not fit in memory.
    """
    if remat == "none":
        return save_all_but_gathered
    if remat == "dots":
        return jax.checkpoint_policies.save_only_these_names(PRODUCT)
    saved = [name for name in (save if remat == "save" else SAVED_NAMES[remat]) if name not in offload]
    if offload:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=list(offload),
            offload_src="device",
            offload_dst=HOST,
        )
    else:
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
    if ATTENTION_OUT not in saved:
        return policy
    return lambda primitive, *args, **params: is_cudnn_forward(primitive) or policy(primitive, *args, **params)


def is_cudnn_forward(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns True for cuDNN's attention forward pass, whose two results cannot be marked with checkpoint_name."""
    return primitive.name == "dot_product_attention_fwd_wrapper"


def in_row_parts(block: Block, cfg: ModelConfig, plan: ParallelPlan) -> Callable:
    """Returns the block, wrapped in run_row_parts() if it runs on parts of the batch."""
    if not cfg.splits_rows or plan.recorder is not NO_RECORDER or (row_parts(cfg) == 1 and plan.tensor.size == 1):
        return block  # a recorder stores one record per layer
    return functools.partial(run_row_parts, block, cfg, plan)


def row_parts(cfg: ModelConfig) -> int:
    """Returns the number of parts of the batch. It is 1 with remat='none', which saves all activations."""
    return 1 if cfg.remat == "none" else cfg.row_parts


def run_row_parts(
    block: Block, cfg: ModelConfig, plan: ParallelPlan, x_BTD: jax.Array, layer_input: Any, *shared: Any
) -> Any:
    """Returns block(x_BTD, layer_input, *shared), computed sequentially on cfg.row_parts parts of the batch.

    The backward pass recomputes one part at a time, so only the activations of one part are in memory. Weight gradients
    accumulate in the dtype of the weights. If row_parts does not divide the batch size, fewer parts are used. With a
    tensor axis, each part is computed in two halves. shared: arrays with a leading batch axis.
    """
    run = functools.partial(plan.tensor.run_in_halves, lambda x, *shared: block(x, layer_input, *shared))
    parts = math.gcd(row_parts(cfg), len(x_BTD))
    if parts == 1:
        return run(x_BTD, *shared)
    run = jax.checkpoint(run, policy=remat_policy(cfg.remat, cfg.remat_save, cfg.remat_offload))  # keeps prevent_cse
    leaves, treedef = jax.tree.flatten((x_BTD, *shared))
    results: list[Any] = []
    for part in zip(*(jnp.split(leaf, parts) for leaf in leaves)):
        x, *others = jax.tree.unflatten(treedef, part)
        if results and isinstance(results[-1], tuple):
            x, previous = grad_barrier(x, results[-1][0])
            results[-1] = (previous, *results[-1][1:])
        elif results:
            x, results[-1] = grad_barrier(x, results[-1])
        results.append(run(x, *others))
    return concat_row_parts(results)


@jax.named_scope("gather_weights")
def gather_params(params: Any, gather: Gather, dtype: Any, *, stacked: bool) -> Any:
    """Gathers a block's parameters and joins adapters to weights. stacked: whether logical axes begin with `layers`."""
    gathered = lambda leaf: leaf.replace(gather(leaf.get_value(), leaf.axes[stacked:], dtype))
    return join_adapters(jax.tree.map(gathered, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


@custom_vjp
def grad_barrier(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (x, w) unchanged, with an optimization barrier on their gradients in the backward pass.

    Without the barrier, XLA reduces the gradient of w over the devices only at the end of the backward pass and keeps
    the unreduced gradient until then (0.5 GiB for the output projection of a 7B model, libtpu 0.0.51, v5e, 2026-11-21).
    """
    return x, w


grad_barrier.defvjp(lambda x, w: ((x, w), None), lambda _, grads: lax.optimization_barrier(grads))


def gather_after(
    gather: Gather, x: jax.Array, w: jax.Array, axes: tuple[str, ...], dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns (x, gathered w), with grad_barrier() between their gradients. axes: logical axes of w."""
    x, w = grad_barrier(x, w) if gather is no_gather else order_on_cpu(*grad_barrier(x, w))
    return x, gather(w, axes, dtype)


def split_model(model: M) -> tuple[nnx.GraphDef[M], dict, dict]:
    """Returns (graphdef, nested dict of parameters, nested dict of tuples of logical axes).

    merge_model() returns the model again. Checkpoints and optax use only the dicts.
    """
    graphdef, state = nnx.split(model, nnx.Param)
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    axes = jax.tree.map(lambda leaf: tuple(leaf.axes), state, is_leaf=is_variable)
    return graphdef, string_keys(nnx.to_pure_dict(state)), string_keys(nnx.to_pure_dict(axes))


def merge_model(graphdef: nnx.GraphDef[M], params: dict) -> M:
    """Returns the model with these parameters. Inverse of split_model()."""
    return nnx.merge(graphdef, integer_keys(params))


def string_keys(tree: Any) -> Any:
    """Converts the layer numbers of unrolled blocks to strings, which checkpoints require."""
    return {str(key): string_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def integer_keys(tree: Any) -> Any:
    """Inverse of string_keys."""
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: integer_keys(value) for key, value in tree.items()}


def split_keys(keys_B: jax.Array, number: int) -> jax.Array:
    """Returns `number` new random keys per row, [number, B]."""
    return jnp.swapaxes(jax.vmap(lambda key: jax.random.split(key, number))(keys_B), 0, 1)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None, tensor: TensorAxis = NO_TENSOR_AXIS) -> jax.Array:
    """Applies dropout to x [B, T, ...]. Returns x unchanged without keys or at rate 0.

    Each sequence has its own key, so masks do not depend on the mesh or the number of microbatches.
    """
    if keys_B is None or rate == 0.0:
        return x
    shape = (tensor.row_length(x), *x.shape[2:])
    mask = tensor.local_from_row(jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys_B))
    return jnp.where(mask, x / (1 - rate), jnp.zeros_like(x))


def with_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns x plus a bias along the last axes, in the dtype of x."""
    return x + bias.astype(x.dtype).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)


class BiasedAttention(nnx.Module):
    """Attention within each packed document, with biases, as in GPT-2 and BERT.

    out_std: initial standard deviation of the output projection.
    """

    def __init__(self, cfg: "BiasedConfig", *, causal: bool, out_std: float, rngs: nnx.Rngs, plan: ParallelPlan):
        D, N, H = cfg.embed_dim, cfg.num_heads, cfg.head_dim
        self.plan, self.causal = plan, causal
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
        project = self.plan.project
        x_BTD = self.plan.tensor.all_gather(x_BTD)
        q_BTNH = checkpoint_name(with_bias(project("BTD,DNH->BTNH", x_BTD, self.wq[...]), self.bias_q[...]), QUERY)
        k_BSNH = checkpoint_name(with_bias(project("BSD,DNH->BSNH", x_BTD, self.wk[...]), self.bias_k[...]), KEY)
        v_BSNH = checkpoint_name(with_bias(project("BSD,DNH->BSNH", x_BTD, self.wv[...]), self.bias_v[...]), VALUE)
        causal = {} if self.causal else {"causal": False}  # some kernels lack this argument
        out_BTNH = self.plan.attend(q_BTNH, k_BSNH, v_BSNH, segment_ids_BT, **causal)  # marks ATTENTION_OUT
        added_BTD = self.plan.tensor.reduce_scatter(project("BTNH,NHD->BTD", out_BTNH, self.wo[...]))
        return checkpoint_name(with_bias(added_BTD, self.bias_o[...]), ATTENTION_ADDED)


class BiasedMlp(nnx.Module):
    """MLP with biases. out_std: initial standard deviation of the second matrix."""

    def __init__(
        self,
        cfg: "BiasedConfig",
        activate: Callable[[jax.Array], jax.Array],
        *,
        out_std: float,
        rngs: nnx.Rngs,
        plan: ParallelPlan,
    ):
        D, F = cfg.embed_dim, cfg.mlp_dim
        self.plan, self.activate = plan, activate
        self.up = param(rngs, (D, F), ("embed", "mlp"), std=STD)
        self.bias_up = constant((F,), ("mlp",), 0.0)
        self.down = param(rngs, (F, D), ("mlp", "embed"), std=out_std)
        self.bias_down = constant((D,), ("norm",), 0.0)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD):
        project = self.plan.project
        h_BTF = with_bias(project("BTD,DF->BTF", self.plan.tensor.all_gather(x_BTD), self.up[...]), self.bias_up[...])
        h_BTF = self.activate(checkpoint_name(h_BTF, MLP_UP))
        added_BTD = self.plan.tensor.reduce_scatter(project("BTF,FD->BTD", h_BTF, self.down[...]))
        return with_bias(added_BTD, self.bias_down[...])
