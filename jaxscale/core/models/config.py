"""Settings shared by all models, including experts and latent attention, and quantities derived from them, such as
parameter counts, shapes and saved activations. The table of models is in `__init__.py`."""

import dataclasses
import difflib
import math
from typing import ClassVar, Literal, get_args

from jaxscale.kernels.config import ATTENTION_OUT, AttentionName, AttentionNeeds, MatmulDtype, RouterConfig
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

BLOCKS = "blocks"  # parameter name of the stacked layers
DENSE = "dense_blocks"  # parameter name of the stacked layers without experts that precede layers with experts
BLOCK_INPUT = "block_input"  # input of a block, the minimum saved per layer
QUERY, KEY, VALUE = "query", "key", "value"  # inputs of attention, after RoPE and norms
LATENT = "latent"  # low-rank input of queries, keys and values, before its norm
ATTENTION_ADDED = "attention_added"  # output projection of attention
MLP_GATE, MLP_UP = "mlp_gate", "mlp_up"  # inputs of the non-linearity; no gradient needs the output of the MLP
ACTIVATIONS = (BLOCK_INPUT, QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_UP)
GATED_ACTIVATIONS = (*ACTIVATIONS[:-1], MLP_GATE, MLP_UP)

RematName = Literal["none", "full", "attention", "qkv", "minimal", "dots", "save"]
# Remat policies given by a list of names. "save" uses model.remat_save. "none" and "dots" are not lists of names.
SAVED_NAMES: dict[str, tuple[str, ...]] = {
    "full": (),
    "attention": (ATTENTION_OUT,),
    "qkv": (QUERY, KEY, VALUE, ATTENTION_OUT),
    "minimal": (LATENT, QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_GATE, MLP_UP),
}
Dtype = Literal["float32", "bfloat16", "float16"]
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
MAX_LAYERS = 10_000  # 10 times the deepest published model (arXiv:2203.00555); a larger number is a typo
ModelKind = Literal["decoder", "encoder", "encoder_decoder"]
ResidualDtype = Literal["compute", "operand", "float32"]  # "operand": the dtype of matmul operands
# Keys of the named parts of a loss. L layers  E experts  Q rounds
EXPERT_COUNTS = "expert_counts"  # int32[L, E]: tokens routed to each expert
EXPERT_ROUNDS = "expert_rounds"  # int32[Q]: all-to-all exchanges by number of rounds, if tokens are sent
ROUTER_ENTROPY = "router_entropy"  # float32[L]
ROUTER_SCORES = "router_scores"  # float32[L]: maximum minus minimum of a token's scores
EXPERTS_DROPPED = "experts_dropped"  # int32[L]: (token, expert) pairs beyond capacity, if there is a capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(RouterConfig):
    """Settings of a mixture of experts: a router, experts, and optionally a shared expert."""

    number: int = setting(help="experts per layer")
    mlp_dim: int = setting(help="width of an expert's gated MLP")
    shared_dim: int = setting(0, "width of a shared gated MLP that processes every token; 0: none")
    first_dense: int = setting(0, "the first n layers are dense, with the model's mlp_dim")
    capacity_factor: float = setting(
        0.0,
        "limits an expert in training to this multiple of the mean number of tokens per expert and sequence, earlier "
        "tokens first (arXiv:2101.03961); dropped tokens are counted; 0: no limit",
    )
    bias: bool = setting(
        False,
        "balances load by a bias per expert, added to scores in top-k only; each step changes it by bias_rate, up "
        "for experts with fewer tokens than the mean, down for those with more (arXiv:2408.15664)",
    )
    bias_rate: float = setting(1e-3, "step size of the bias; 0: constant", read_if=".bias")

    def __post_init__(self):
        for name in ("number", "mlp_dim"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("shared_dim", "first_dense", "capacity_factor", "bias_rate"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must not be negative")
        self.check_router(self.number)

    def capacity(self, row_length: int) -> int | None:
        """Returns the maximum number of tokens per expert and sequence in training, or None without a limit."""
        factor = self.capacity_factor
        return math.ceil(factor * self.chosen * row_length / self.number) if factor else None

    @property
    def active_dim(self) -> int:
        """Total width of the experts of a token, including the shared expert."""
        return self.chosen * self.mlp_dim + self.shared_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Settings of latent attention (arXiv:2405.04434, section 2.1). Keys and values of all heads are projections of one
    latent vector per position."""

    kv_rank: int = setting(help="size of the latent of keys and values")
    q_rank: int = setting(0, "size of the latent of queries; 0: queries are projected from the residual stream")
    nope_dim: int = setting(help="features of a head's query or key without RoPE")
    rope_dim: int = setting(help="features with RoPE, an even number; the keys of all heads share them")
    value_dim: int = setting(help="features of a head's value")

    def __post_init__(self):
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")
        if self.q_rank < 0:
            raise BadInput(f"q_rank={self.q_rank} must not be negative; 0 disables the latent of queries")
        if self.rope_dim % 2:
            raise BadInput(f"rope_dim={self.rope_dim} must be even, because RoPE rotates pairs of features")

    @property
    def head_dim(self) -> int:
        """Size of a query or key of a head."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_width(self) -> int:
        """Number of features per position and layer in the KV cache, shared by all heads."""
        return self.kv_rank + self.rope_dim

    @property
    def width(self) -> int:
        """Number of features of all latents per position."""
        return self.q_rank + self.cache_width

    @property
    def norm_params(self) -> int:
        """Number of norm scales of a layer's latents."""
        return self.q_rank + self.kv_rank

    def matrices(self, embed_dim: int, heads: int) -> dict[str, tuple[int, int]]:
        """Returns {matrix: (input features, output features)}."""
        D, queries = embed_dim, heads * self.head_dim
        query = {"wq": (D, queries)}
        if self.q_rank:
            query = {"wq_down": (D, self.q_rank), "wq_up": (self.q_rank, queries)}
        return query | {
            "wkv_down": (D, self.cache_width),
            "wkv_up": (self.kv_rank, heads * (self.nope_dim + self.value_dim)),
            "wo": (heads * self.value_dim, D),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base class of model settings, with quantities derived from them."""

    vocab_size: int = setting(help="rows of the embedding table, at least the tokenizer's largest id + 1")
    num_layers: int = setting(help="transformer blocks")
    embed_dim: int = setting(help="width of the residual stream")
    num_heads: int = setting(help="query heads")
    norm_eps: float = setting(1e-5, "added to the variance in norms")
    logit_softcap: float | None = setting(
        None, "c: logits become c * tanh(logits / c) (arXiv:2408.00118); none: unchanged"
    )
    compute_dtype: ComputeDtype = setting(
        "auto",
        "dtype of matmuls and activations; parameters, norms and sums are float32. auto: bfloat16 on TPUs, on NVIDIA "
        "GPUs from Ampere on and on CPUs with AMX-BF16 or AVX512-BF16, float16 on V100 and T4, else float32; a resumed "
        "run keeps its dtype",
    )
    embed_compute_dtype: Dtype | None = setting(
        None, "dtype of embedding and logits; float32 is a fallback for instability; none: compute_dtype"
    )
    matmul_precision: Literal["default", "tf32", "highest"] = setting(
        "default", "precision of float32 matmuls; tf32 only on GPUs"
    )
    matmul_dtype: MatmulDtype = setting(
        "none", "quantization of the operands of the blocks' matmuls, forward and backward; none: unchanged"
    )
    attention: AttentionName = setting("auto", "attention kernel; auto prints its choice")
    scan_layers: bool = setting(
        True, "true: stacked layers in one compiled loop where that is faster; false: unrolled, slower to compile"
    )
    remat: RematName = setting(
        "none",
        "activations saved for the backward pass; others are recomputed. none: all; full: block inputs; attention: its "
        "output too; qkv: its inputs too; minimal: all matmuls; dots: matmuls except attention; save: remat_save",
        may_change=True,
    )
    remat_save: tuple[str, ...] = setting(
        (), "names of saved activations, for remat='save'", may_change=True, read_if="model.remat=save"
    )
    remat_offload: tuple[str, ...] = setting(
        (),
        "names of activations offloaded to host memory",
        may_change=True,
        read_if="model.remat!=none|dots",
    )
    loss_chunk_tokens: int = setting(4096, "tokens per chunk of logits in the loss")

    # Every model defines these as settings or properties.
    name: ClassVar[str]
    head_dim: ClassVar[int]
    mlp_dim: ClassVar[int]

    # Defaults that some models override by a setting or property.
    experts: ClassVar[ExpertsConfig | None] = None
    kind: ClassVar[ModelKind] = "decoder"
    max_seq_len: ClassVar[int | None] = None  # longest sequence; None: unlimited
    activation_names: ClassVar[tuple[str, ...]] = ()  # marked with checkpoint_name, for remat
    dropout: ClassVar[float] = 0.0
    qk_norm: ClassVar[bool] = False
    gated_mlp: ClassVar[bool] = False
    row_parts: ClassVar[int] = 1
    splits_rows: ClassVar[bool] = False  # True if blocks may run on parts of the rows
    attention_window: ClassVar[int | None] = None
    norm_residuals: ClassVar[tuple[ResidualDtype, ...]] = ("compute",)  # arrays saved by a norm; RMSNorm: the input

    @property
    def embed_dtype(self) -> ComputeDtype:
        """Dtype of the embedding lookup and of the logits matmul."""
        return self.embed_compute_dtype or self.compute_dtype

    def __post_init__(self):
        check_remat(self.remat, self.remat_save, self.remat_offload, self.activation_names)
        check_positive(self, "vocab_size", "num_layers", "embed_dim", "num_heads", "loss_chunk_tokens")
        if self.num_layers > MAX_LAYERS:
            raise BadInput(f"num_layers={self.num_layers} must be at most {MAX_LAYERS}")
        if self.norm_eps < 0:
            raise BadInput(f"norm_eps={self.norm_eps} must not be negative")
        if self.logit_softcap is not None and self.logit_softcap <= 0:
            raise BadInput(f"logit_softcap={self.logit_softcap} must be above 0; use none to disable it")
        if not 0 <= self.dropout < 1:
            raise BadInput(f"dropout={self.dropout} must be at least 0 and below 1")

    @property
    def leading_layers(self) -> float:
        """Cost of the layers before the stack `blocks`, as a multiple of the cost of one layer of `blocks`."""
        return 0.0

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns {matrix of a block: (input features, output features)}."""
        D, F, query, key = self.embed_dim, self.mlp_dim, self.query_width, self.key_width
        attention = {"wq": (D, query), "wk": (D, key), "wv": (D, key), "wo": (query, D)}
        mlp = {"gate": (D, F)} if self.gated_mlp else {}
        mlp |= {"up": (D, F), "down": (F, D)}
        return {f"attention.{name}": sizes for name, sizes in attention.items()} | {
            f"mlp.{name}": sizes for name, sizes in mlp.items()
        }

    def expert_matrices(self) -> dict[str, tuple[int, int]]:
        """Returns {matrix of each expert of a block: (input features, output features)}."""
        return {}

    @property
    def block_matrix_params(self) -> int:
        """Number of parameters in the matrices of a block."""
        return sum(rows * columns for rows, columns in self.matrices().values())

    @property
    def num_params(self) -> int:
        """Number of parameters, including embeddings."""
        raise NotImplementedError

    @property
    def active_params(self) -> int:
        """Number of parameters used per token: all except those of unselected experts."""
        return self.num_params

    @property
    def mlp_width(self) -> int:
        """Width of the MLP in most blocks. With experts, the total width of those that a token uses."""
        return self.mlp_dim

    @property
    def matmul_params(self) -> int:
        """Number of parameters in matmuls per token. Includes the output projection, but not the embedding lookup."""
        return self.num_layers * self.block_matrix_params + self.vocab_size * self.embed_dim

    def visible_keys(self, seq_len: int) -> float:
        """Returns the number of keys that a query attends to, averaged over positions and summed over layers."""
        return self.num_layers * (seq_len if self.attention_needs().bidirectional else seq_len / 2)

    def flops_per_token(self, seq_len: int, encoder_len: int | None = None) -> float:
        """Returns the FLOPs per token of a training step with sequences of seq_len tokens, without recomputation.

        They are 6 FLOPs per matrix parameter (2 forward, 4 backward) and the two matmuls of attention over unmasked
        keys. PaLM's formula (arXiv:2204.02311, appendix B) includes masked keys, so its MFU is slightly higher.
        encoder_len: tokens per encoder sequence, for models with an encoder.
        """
        return 6 * self.matmul_params + 6 * (self.query_width + self.result_width) * self.visible_keys(seq_len)

    def attention_needs(self, *, prefix: bool = False) -> AttentionNeeds:
        """Returns the features that an attention kernel must support. prefix: whether prefixes are bidirectional."""
        return AttentionNeeds(head_dim=self.head_dim, dtype=self.compute_dtype, prefix=prefix)

    @property
    def layer_stacks(self) -> dict[str, int]:
        """{parameter name of a stack of blocks: number of layers}, in the order of the forward pass."""
        return {BLOCKS: self.num_layers}

    @property
    def query_width(self) -> int:
        """Features per token in the queries of a block."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Features per token in the keys of a block."""
        return self.query_width

    @property
    def value_width(self) -> int:
        """Features per token in the values of a block."""
        return self.key_width

    @property
    def result_width(self) -> int:
        """Features per token in the output of a block's attention, before the output projection."""
        return self.query_width

    @property
    def latent_width(self) -> int:
        """Features per token of the latents from which queries, keys and values are projected; 0 without latents."""
        return 0

    @property
    def gathered_width(self) -> int:
        """Features per token that the tensor axis all-gathers for a block's attention."""
        return self.embed_dim

    @property
    def mlp_residuals(self) -> tuple[tuple[str, ResidualDtype], ...]:
        """(description, dtype) of each array of width mlp_dim that an MLP saves for its backward pass."""
        return ("result", "operand"), ("before the non-linearity", "compute")


def check_positive(cfg: ModelConfig, *names: str) -> None:
    """Raises BadInput if one of these settings is below 1."""
    for name in names:
        if getattr(cfg, name) < 1:
            raise BadInput(f"{name}={getattr(cfg, name)} must be at least 1")


def saved_names(cfg: ModelConfig) -> set[str] | None:
    """Returns the names of a block's activations that stay on the device for the backward pass, or None for all."""
    if cfg.remat == "none":
        return None
    if cfg.remat == "dots":  # matmuls of activations with weights
        return set(cfg.activation_names) - {ATTENTION_OUT}
    saved = cfg.remat_save if cfg.remat == "save" else SAVED_NAMES[cfg.remat]
    return ({BLOCK_INPUT, *saved} & set(cfg.activation_names)) - set(cfg.remat_offload)


def check_remat(remat: RematName, save: tuple[str, ...], offload: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raises BadInput for names that the policy ignores, and for unknown or duplicate names of activations."""
    for field, listed in (("remat_save", save), ("remat_offload", offload)):
        for name in listed:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
                hint = f"did you mean {close[0]!r}?" if close else f"use {', '.join(names)}"
                raise BadInput(f"{field} has {name!r}, which is not an activation of this model; {hint}")
        if twice := sorted({name for name in listed if listed.count(name) > 1}):
            raise BadInput(f"{field} has {twice[0]!r} twice; remove one")
    if save and remat != "save":
        raise BadInput(f"remat_save needs remat='save', but remat={remat!r}; set remat='save' or remat_save=()")
    if remat == "save" and not save and not offload:
        raise BadInput(
            f"remat='save' needs remat_save or remat_offload; set one of them to names from {', '.join(names)}"
        )
    if offload and remat not in (*SAVED_NAMES, "save"):
        able = ", ".join(name for name in get_args(RematName) if name in SAVED_NAMES or name == "save")
        raise BadInput(f"remat_offload cannot be combined with remat={remat!r}, which ignores names; use remat={able}")
    if both := [name for name in save if name in offload]:
        raise BadInput(f"{both[0]!r} is in both remat_save and remat_offload; remove it from one of them")
