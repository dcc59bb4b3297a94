"""Settings of all models, and parameter counts, shapes and saved activations derived from them. Settings of each
model are in its own file; the table of models is in `__init__.py`."""

import dataclasses
import difflib
import re
from collections.abc import Collection
from typing import ClassVar, Literal, get_args

from jaxscale.core.models.moe_config import ExpertsConfig
from jaxscale.kernels.config import ATTENTION_OUT, AttentionName, AttentionNeeds, MatmulDtype
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

BLOCKS = "blocks"  # parameter name of the stacked layers
DENSE = "dense_blocks"  # layers without experts, before those that have them
BLOCK_INPUT = "block_input"  # the input of a block: the minimum saved per layer
QUERY, KEY, VALUE = "query", "key", "value"  # inputs of attention, after RoPE and norms
LATENT = "latent"  # low-rank input of queries, keys and values, before its norms
ATTENTION_ADDED = "attention_added"  # output projection of attention
MLP_GATE, MLP_UP = "mlp_gate", "mlp_up"  # before the non-linearity. No gradient needs the output of the MLP.
ACTIVATIONS = (BLOCK_INPUT, QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_UP)
GATED_ACTIVATIONS = (*ACTIVATIONS[:-1], MLP_GATE, MLP_UP)

RematName = Literal["none", "full", "attention", "qkv", "minimal", "dots", "save"]
# Policies that are lists of names. "save" reads model.remat_save; "none" and "dots" are not lists.
SAVED_NAMES: dict[str, tuple[str, ...]] = {
    "full": (),
    "attention": (ATTENTION_OUT,),
    "qkv": (QUERY, KEY, VALUE, ATTENTION_OUT),
    "minimal": (LATENT, QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_GATE, MLP_UP),
}
Dtype = Literal["float32", "bfloat16", "float16"]
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
MAX_LAYERS = 10_000  # 10 times the deepest published model (arXiv:2203.00555): more is a typo
ModelKind = Literal["decoder", "encoder", "encoder_decoder"]  # a decoder has one causal row
ResidualDtype = Literal["compute", "operand", "float32"]  # compute_dtype; dtype of a matmul operand; float32
INSIDE_GELU: tuple[str, ResidualDtype] = ("inside GELU", "float32")  # read by its backward pass
# Summed over mixture-of-experts layers: squared log-partition of the router (arXiv:2202.08906); each expert's load in
# the previous step times its router probability (arXiv:2101.03961); the same with a row's load (arXiv:2412.19437).
# The last two are 1 per layer if all experts have equal load.
EXPERT_LOSSES = ("router_z_loss", "balance_loss", "row_balance_loss")
# z_loss: squared log-partition of the logits, which keeps it near 0 (arXiv:2204.02311, section 5).
AUX_LOSSES = ("z_loss", *EXPERT_LOSSES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of every model, and quantities derived from them. The annotation for any model's config."""

    vocab_size: int = setting(help="rows of the embedding table: at least the tokenizer's largest id + 1")
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
        "default", "of float32 matmuls; tf32 only on GPUs"
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
        "what is not recomputed in the backward pass. none: all; full: block inputs; attention: its output; qkv: its "
        "inputs too; minimal: all matmuls; dots: matmuls except attention; save: remat_save",
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

    # Required of every model, as settings or properties.
    name: ClassVar[str]
    head_dim: ClassVar[int]
    mlp_dim: ClassVar[int]

    # Defaults, which some models override by a setting or property.
    experts: ClassVar[ExpertsConfig | None] = None
    kind: ClassVar[ModelKind] = "decoder"
    max_seq_len: ClassVar[int | None] = None  # longest row; None: unlimited
    activation_names: ClassVar[tuple[str, ...]] = ()  # marked with checkpoint_name, for remat
    dropout: ClassVar[float] = 0.0
    qk_norm: ClassVar[bool] = False
    gated_mlp: ClassVar[bool] = False
    row_parts: ClassVar[int] = 1
    attention_window: ClassVar[int | None] = None
    norm_residuals: ClassVar[tuple[ResidualDtype, ...]] = ("compute",)  # saved by a norm: RMSNorm saves its input

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
            raise BadInput(f"logit_softcap={self.logit_softcap} must be above 0, or none")
        if not 0 <= self.dropout < 1:
            raise BadInput(f"dropout={self.dropout} must be at least 0 and below 1")

    @property
    def leading_layers(self) -> float:
        """Work of the layers before the stack `blocks`, in units of one of its layers."""
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
        """Returns the same for the matrices of each expert of a block."""
        return {}

    @property
    def block_matrix_params(self) -> int:
        """Number of parameters in the matrices of a block."""
        return sum(rows * columns for rows, columns in self.matrices().values())

    @property
    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        raise NotImplementedError

    @property
    def active_params(self) -> int:
        """Number of parameters used per token: all except those of unselected experts."""
        return self.num_params

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, or of the selected experts, that a token passes through in most blocks."""
        return self.mlp_dim

    @property
    def matmul_params(self) -> int:
        """Number of parameters in matmuls per token: matrices and the output projection, not the embedding lookup."""
        return self.num_layers * self.block_matrix_params + self.vocab_size * self.embed_dim

    def visible_keys(self, seq_len: int) -> float:
        """Returns the number of keys that a query attends to, averaged over a row and summed over the layers."""
        return self.num_layers * (seq_len if self.attention_needs().bidirectional else seq_len / 2)

    def flops_per_token(self, seq_len: int, encoder_len: int | None = None) -> float:
        """Returns the FLOPs of one training step per token of a row of seq_len, without recomputation: 6 per matrix
        parameter (2 forward, 4 backward), and attention's two matmuls over the visible keys.

        encoder_len: tokens of the encoder's row, if there is one. PaLM's formula (arXiv:2204.02311, appendix B) also
        counts masked keys, so its MFU is slightly higher.
        """
        return 6 * self.matmul_params + 6 * (self.query_width + self.result_width) * self.visible_keys(seq_len)

    def attention_needs(self, *, prefix: bool = False) -> AttentionNeeds:
        """Returns the features that an attention kernel must support. prefix: rows have a bidirectional prefix."""
        return AttentionNeeds(head_dim=self.head_dim, dtype=self.compute_dtype, prefix=prefix)

    @property
    def layer_stacks(self) -> dict[str, int]:
        """{name of a stack of blocks among the parameters: number of layers}, in forward order."""
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
        """Arrays [mlp_dim] per token that an MLP saves for its backward pass: (description, dtype)."""
        return ("result", "operand"), ("before the non-linearity", "compute")


class BiasedConfig(ModelConfig):
    """Settings of models with LayerNorm, biases, learned positions and heads that divide embed_dim: GPT-2 and BERT."""

    norm_residuals: ClassVar[tuple[ResidualDtype, ...]] = ("float32", "float32")  # before and after LayerNorm's scale
    activation_names: ClassVar[tuple[str, ...]] = ACTIVATIONS

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "max_seq_len", "mlp_dim")
        if self.embed_dim % self.num_heads:
            raise BadInput(f"embed_dim={self.embed_dim} must be a multiple of num_heads={self.num_heads}")

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.embed_dim // self.num_heads


def check_positive(cfg: ModelConfig, *names: str) -> None:
    """Raises BadInput for the first of these settings that is below 1."""
    for name in names:
        if getattr(cfg, name) < 1:
            raise BadInput(f"{name}={getattr(cfg, name)} must be at least 1")


def saved_names(cfg: ModelConfig) -> set[str] | None:
    """Returns the names of the activations of each block that stay on the device for the backward pass; None: all."""
    if cfg.remat == "none":
        return None
    if cfg.remat == "dots":  # matmuls of activations with weights
        return set(cfg.activation_names) - {ATTENTION_OUT}
    saved = cfg.remat_save if cfg.remat == "save" else SAVED_NAMES[cfg.remat]
    return ({BLOCK_INPUT, *saved} & set(cfg.activation_names)) - set(cfg.remat_offload)


def check_remat(remat: RematName, save: tuple[str, ...], offload: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raises BadInput for a list that the policy ignores, or a name not in `names`, the model's activations."""
    for field, listed in (("remat_save", save), ("remat_offload", offload)):
        for name in listed:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
                hint = f"did you mean {close[0]!r}?" if close else f"use {', '.join(names)}"
                raise BadInput(f"{field} has {name!r}, which is not an activation of this model; {hint}")
        if twice := sorted({name for name in listed if listed.count(name) > 1}):
            raise BadInput(f"{field} has {twice[0]!r} twice; name it once")
    if save and remat != "save":
        raise BadInput(f"remat_save needs remat='save', and remat={remat!r}; set that, or remat_save=()")
    if remat == "save" and not save and not offload:
        raise BadInput(f"remat='save' needs remat_save or remat_offload: names among {', '.join(names)}")
    if offload and remat not in (*SAVED_NAMES, "save"):
        able = ", ".join(name for name in get_args(RematName) if name in SAVED_NAMES or name == "save")
        raise BadInput(f"remat_offload cannot go with remat={remat!r}, which ignores names; use {able}")
    if both := [name for name in save if name in offload]:
        raise BadInput(f"{both[0]!r} is in remat_save and in remat_offload; name it in one of them")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: trains a correction A B of each target matrix and nothing else. B starts as 0, so the first loss is the
    base's."""

    rank: int = setting(0, "rank of A and B; 0: no adapters, all parameters are trained")
    alpha: float = setting(16.0, "the correction is multiplied by alpha / rank")
    targets: tuple[str, ...] = setting(
        (r"attention\.w[qkvo]$", r"mlp\.(gate|up|down)$"),
        "regexes searched in the names of the blocks' matrices, such as blocks.attention.wq; matches get adapters, one "
        "per expert",
    )

    def __post_init__(self):
        if self.rank < 0:
            raise BadInput(f"rank={self.rank} must be 1 or more, or 0 for no adapters")
        if self.alpha <= 0:
            raise BadInput(f"alpha={self.alpha} must be above 0")
        if self.rank and not self.targets:
            raise BadInput("targets is empty, and rank is above 0; name matrices to adapt")
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"targets has {pattern!r}, which is not a regular expression: {error}") from None

    @property
    def on(self) -> bool:
        """True if there are adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor of the correction."""
        return self.alpha / self.rank if self.rank else 0.0


NO_LORA = LoraConfig()


def adapted_matrices(cfg: LoraConfig, names: Collection[str]) -> set[str]:
    """Returns the matrices that get adapters. Raises BadInput for a target that matches none."""
    for pattern in cfg.targets:
        if not any(re.search(pattern, name) for name in names):
            raise BadInput(f"lora.targets has {pattern!r}, which matches no matrix; use {', '.join(sorted(names))}")
    return {name for name in names if any(re.search(pattern, name) for pattern in cfg.targets)}


def lora_params(model: ModelConfig, cfg: LoraConfig, *, active: bool = False) -> int:
    """Returns the number of parameters in a model's adapters. active: those used per token."""
    experts = model.experts
    num_experts = 0 if experts is None else experts.chosen if active else experts.number
    # Routers have no adapters: top-k depends on their last bits.
    plain = {name: sum(sizes) for name, sizes in model.matrices().items() if not name.endswith(".router")}
    matrices = plain | {name: num_experts * sum(sizes) for name, sizes in model.expert_matrices().items()}
    matrices = {f"{BLOCKS}.{name}": size for name, size in matrices.items()}
    layers = model.layer_stacks.get(BLOCKS, 0)
    return cfg.rank * layers * sum(matrices[name] for name in adapted_matrices(cfg, matrices))


def lora_flops(model: ModelConfig, cfg: LoraConfig) -> float:
    """Returns added FLOPs per token: 6 per adapter parameter, minus 2 per frozen parameter, which has no gradient."""
    return 6 * lora_params(model, cfg, active=True) - 2 * model.matmul_params
