"""Settings that all models share, and what the rest of the program asks of a model: counts, shapes, what its backward
pass keeps. Each model's own settings are in a file beside this one; the table of models is in `__init__.py`."""

import dataclasses
import difflib
import re
from collections.abc import Collection
from typing import ClassVar, Literal, get_args

from jaxscale.models.experts_config import ExpertsConfig
from jaxscale.ops.config import ATTENTION_OUT, AttentionName, AttentionNeeds, MatmulDtype
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

BLOCKS = "blocks"  # among the parameters: those of the layers, stacked
DENSE = "dense_blocks"  # layers without experts, before those that have them
BLOCK_INPUT = "block_input"  # the residual stream as a block finds it: the least that must be kept of each layer
QUERY, KEY, VALUE = "query", "key", "value"  # as attention reads them: rotated and normalised where the model does that
LATENT = "latent"  # of latent attention: what queries, keys and values are made of, before its norms
ATTENTION_ADDED = "attention_added"  # what attention adds to the residual stream
MLP_GATE, MLP_UP = "mlp_gate", "mlp_up"  # before the non-linearity. What comes out of the MLP no gradient needs.
ACTIVATIONS = (BLOCK_INPUT, QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_UP)
GATED_ACTIVATIONS = (*ACTIVATIONS[:-1], MLP_GATE, MLP_UP)

RematName = Literal["none", "full", "attention", "qkv", "minimal", "dots", "save"]
# Policies that are lists of names. "save" reads model.remat_save; "none" and "dots" are no lists.
SAVED: dict[str, tuple[str, ...]] = {
    "full": (),
    "attention": (ATTENTION_OUT,),
    "qkv": (QUERY, KEY, VALUE, ATTENTION_OUT),
    "minimal": (LATENT, QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_GATE, MLP_UP),
}
Dtype = Literal["float32", "bfloat16", "float16"]
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]
MOST_LAYERS = 10_000  # ten times the deepest that was published (arXiv:2203.00555): beyond is a slip of the keyboard
Kind = Literal["decoder", "encoder", "encoder_decoder"]  # a decoder reads one row from left to right
NumberKind = Literal["compute", "operand", "float32"]  # a number of compute_dtype; as a product reads it; a float32
INSIDE_GELU: tuple[str, NumberKind] = ("inside GELU", "float32")  # an array that its backward pass reads
# Of mixtures of experts, each a sum over layers: the squared log-partition of the router (arXiv:2202.08906); how often
# the step before chose an expert times how much it is wanted now (arXiv:2101.03961); the same of each row's own choices
# (arXiv:2412.19437). The latter two are 1 a layer where all experts are equal.
EXPERT_LOSSES = ("router_z_loss", "balance_loss", "row_balance_loss")
# z_loss: the squared log-partition of the logits keeps them near 0 (arXiv:2204.02311, section 5).
AUX_LOSSES = ("z_loss", *EXPERT_LOSSES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings that every model has, and what the rest of the program reads of a model. Annotated as ModelConfig where
    any model will do."""

    vocab_size: int = setting(help="rows of the embedding table: at least the tokenizer's largest id + 1")
    num_layers: int = setting(help="transformer blocks")
    embed_dim: int = setting(help="width of the residual stream")
    num_heads: int = setting(help="query heads")
    norm_eps: float = setting(1e-5, "added to the variance in norms")
    logit_softcap: float | None = setting(
        None, "c: logits become c * tanh(logits / c) (arXiv:2408.00118); none: as they are"
    )
    compute_dtype: ComputeDtype = setting(
        "auto",
        "matrix products and activations; parameters, norms and sums are float32. auto: bfloat16 on TPUs, on NVIDIA "
        "GPUs from Ampere on and on CPUs with AMX-BF16 or AVX512-BF16, float16 on V100 and T4, else float32; a run "
        "keeps what it began with",
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
    scan_layers: bool = setting(
        True, "layers are stacked, and one compiled layer runs for all where that pays; false: apart, slower to compile"
    )
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

    # Every model has these, as settings or properties.
    name: ClassVar[str]
    head_dim: ClassVar[int]
    mlp_dim: ClassVar[int]

    # Defaults; some models have a setting or a property of the same name.
    experts: ClassVar[ExpertsConfig | None] = None
    kind: ClassVar[Kind] = "decoder"
    max_seq_len: ClassVar[int | None] = None  # the longest row that can be read; None: no limit of its own
    activation_names: ClassVar[tuple[str, ...]] = ()  # that the model marks with checkpoint_name, for remat
    dropout: ClassVar[float] = 0.0
    qk_norm: ClassVar[bool] = False
    gated_mlp: ClassVar[bool] = False
    row_parts: ClassVar[int] = 1
    attention_window: ClassVar[int | None] = None
    norm_residuals: ClassVar[tuple[NumberKind, ...]] = ("compute",)  # that a norm keeps: RMSNorm its input alone

    @property
    def embed_dtype(self) -> ComputeDtype:
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
        if not 0 <= self.dropout < 1:
            raise BadInput(f"dropout={self.dropout} must be at least 0 and below 1")

    @property
    def leading_layers(self) -> float:
        """The work of the layers before the stack `blocks`, in layers of it."""
        return 0.0

    def matrices(self) -> dict[str, tuple[int, int]]:
        """{name of each matrix of a block: (numbers per token that come in, numbers that come out)}."""
        D, F, query, key = self.embed_dim, self.mlp_dim, self.query_width, self.key_width
        attention = {"wq": (D, query), "wk": (D, key), "wv": (D, key), "wo": (query, D)}
        mlp = {"gate": (D, F)} if self.gated_mlp else {}
        mlp |= {"up": (D, F), "down": (F, D)}
        return {f"attention.{name}": sizes for name, sizes in attention.items()} | {
            f"mlp.{name}": sizes for name, sizes in mlp.items()
        }

    def expert_matrices(self) -> dict[str, tuple[int, int]]:
        """The same of the matrices of which each expert of a block has one."""
        return {}

    @property
    def block_matrix_params(self) -> int:
        """Numbers in the matrices of a block."""
        return sum(rows * columns for rows, columns in self.matrices().values())

    @property
    def num_params(self) -> int:
        """Parameters in all, embeddings included."""
        raise NotImplementedError

    @property
    def active_params(self) -> int:
        """Those of num_params that a token goes through: all, but for experts that it was not sent to."""
        return self.num_params

    @property
    def mlp_width(self) -> int:
        """Width of the MLPs of most blocks that a token goes through."""
        return self.mlp_dim

    @property
    def matmul_params(self) -> int:
        """Parameters that each token is multiplied with: matrices and the output projection, not the lookup."""
        return self.num_layers * self.block_matrix_params + self.vocab_size * self.embed_dim

    def visible_keys(self, seq_len: int) -> float:
        """Keys that a query sees, on average over a row and summed over the layers."""
        return self.num_layers * (seq_len if self.attention_needs().bidirectional else seq_len / 2)

    def flops_per_token(self, seq_len: int, encoder_len: int | None = None) -> float:
        """Floating-point operations of one training step per token of a row of seq_len, recomputation left out: 6 per
        matrix parameter (2 forward, 4 backward), and attention's two products over the keys that a query sees.

        encoder_len: tokens of the encoder's row, where there is one. PaLM's formula (arXiv:2204.02311, appendix B)
        counts the masked half of the keys too, so its MFU is a little higher than ours.
        """
        return 6 * self.matmul_params + 6 * (self.query_width + self.result_width) * self.visible_keys(seq_len)

    def attention_needs(self, *, prefix: bool = False) -> AttentionNeeds:
        """What the model asks of its attention kernel. prefix: whether its rows have one."""
        return AttentionNeeds(head_dim=self.head_dim, dtype=self.compute_dtype, prefix=prefix)

    @property
    def layer_stacks(self) -> dict[str, int]:
        """{name of a stack of blocks among the parameters: its layers}, in the order that a batch goes through them."""
        return {BLOCKS: self.num_layers}

    @property
    def query_width(self) -> int:
        """Numbers per token in the queries of a block."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers per token in the keys of a block."""
        return self.query_width

    @property
    def value_width(self) -> int:
        """Numbers per token in the values of a block."""
        return self.key_width

    @property
    def result_width(self) -> int:
        """Numbers per token in the result of a block's attention, before its projection."""
        return self.query_width

    @property
    def latent_width(self) -> int:
        """Numbers per token of the latents that a block's queries, keys and values are made of; 0: there are none."""
        return 0

    @property
    def gathered_width(self) -> int:
        """Numbers per token that the devices of the tensor axis bring together for a block's attention."""
        return self.embed_dim

    @property
    def mlp_residuals(self) -> tuple[tuple[str, NumberKind], ...]:
        """Arrays of mlp_dim numbers per token that an MLP keeps for its backward pass: (what it is, of which type)."""
        return ("result", "operand"), ("before the non-linearity", "compute")


class BiasedConfig(ModelConfig):
    """Of models with LayerNorm, biases, learned positions and heads that share embed_dim, as GPT-2 and BERT."""

    norm_residuals: ClassVar[tuple[NumberKind, ...]] = ("float32", "float32")  # LayerNorm: before and after its scale
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
    """The activations of each block that the device keeps for the backward pass; None: all there are."""
    if cfg.remat == "none":
        return None
    if cfg.remat == "dots":  # products of activations with weights
        return set(cfg.activation_names) - {ATTENTION_OUT}
    kept = cfg.remat_save if cfg.remat == "save" else SAVED[cfg.remat]
    return ({BLOCK_INPUT, *kept} & set(cfg.activation_names)) - set(cfg.remat_offload)


def check_remat(remat: RematName, save: tuple[str, ...], offload: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raises BadInput for a list that the policy does not read, or a name that the model does not give.

    names: of the model's activations.
    """
    for field, listed in (("remat_save", save), ("remat_offload", offload)):
        for name in listed:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
                hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(names)}"
                raise BadInput(f"{field} has {name!r}, which this model gives to no activation; {hint}")
        if twice := sorted({name for name in listed if listed.count(name) > 1}):
            raise BadInput(f"{field} has {twice[0]!r} twice; name it once")
    if save and remat != "save":
        raise BadInput(f"remat_save is read with remat='save' only, and remat={remat!r}; set that, or remat_save=()")
    if remat == "save" and not save and not offload:
        raise BadInput(f"remat='save' needs remat_save or remat_offload: names among {', '.join(names)}")
    if offload and remat not in (*SAVED, "save"):
        able = ", ".join(name for name in get_args(RematName) if name in SAVED or name == "save")
        raise BadInput(f"remat_offload cannot go with remat={remat!r}, which keeps by other rules; use {able}")
    if both := [name for name in save if name in offload]:
        raise BadInput(f"{both[0]!r} is in remat_save and in remat_offload; it can be kept in one place")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Learn a correction A B of each chosen matrix and nothing else. B begins as 0, so the first loss is the base's."""

    rank: int = setting(0, "columns of A and rows of B; 0: no adapters, all parameters are learned")
    alpha: float = setting(16.0, "the correction is multiplied by alpha / rank")
    targets: tuple[str, ...] = setting(
        (r"attention\.w[qkvo]$", r"mlp\.(gate|up|down)$"),
        "regexes searched in the names of the blocks' matrices, such as blocks.attention.wq; those found get adapters, "
        "experts one each",
    )

    def __post_init__(self):
        if self.rank < 0:
            raise BadInput(f"rank={self.rank} must be 1 or more, or 0 for no adapters")
        if self.alpha <= 0:
            raise BadInput(f"alpha={self.alpha} must be above 0")
        if self.rank and not self.targets:
            raise BadInput("targets is empty, and with rank above 0 something must be learned; name matrices")
        for pattern in self.targets:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"targets has {pattern!r}, which is no regular expression: {error}") from None

    @property
    def on(self) -> bool:
        """Whether there are adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """What the correction is multiplied by."""
        return self.alpha / self.rank if self.rank else 0.0


NO_LORA = LoraConfig()


def adapted(cfg: LoraConfig, names: Collection[str]) -> set[str]:
    """Those of the matrices that get adapters. Raises BadInput for a target that finds none."""
    for pattern in cfg.targets:
        if not any(re.search(pattern, name) for name in names):
            raise BadInput(f"lora.targets has {pattern!r}, which finds no matrix; there are {', '.join(sorted(names))}")
    return {name for name in names if any(re.search(pattern, name) for pattern in cfg.targets)}


def lora_params(model: ModelConfig, cfg: LoraConfig, *, active: bool = False) -> int:
    """Parameters in the adapters of a model. active: those that a token goes through."""
    experts = model.experts
    of_each = 0 if experts is None else experts.chosen if active else experts.number
    # A router's is none: which expert a token gets hangs on its last bits.
    plain = {name: sum(sizes) for name, sizes in model.matrices().items() if not name.endswith(".router")}
    matrices = plain | {name: of_each * sum(sizes) for name, sizes in model.expert_matrices().items()}
    matrices = {f"{BLOCKS}.{name}": size for name, size in matrices.items()}
    layers = model.layer_stacks.get(BLOCKS, 0)
    return cfg.rank * layers * sum(matrices[name] for name in adapted(cfg, matrices))


def lora_flops(model: ModelConfig, cfg: LoraConfig) -> float:
    """What adapters add to flops_per_token: 6 for each of theirs, but no gradient of the frozen matrices, 2 each."""
    return 6 * lora_params(model, cfg, active=True) - 2 * model.matmul_params
