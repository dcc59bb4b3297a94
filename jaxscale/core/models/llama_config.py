"""Settings of Llama and related models, and quantities derived from them. Dimension letters are those of llama.py."""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from jaxscale.core.models.config import (
    BLOCKS,
    DENSE,
    GATED_ACTIVATIONS,
    LATENT,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    ResidualDtype,
    check_positive,
)
from jaxscale.core.models.lora_mup_config import MupConfig, MupScales, mup_scales
from jaxscale.kernels.config import AttentionNeeds, RopeScaling, WindowLayers
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Settings of Llama 2, 3 and related models."""

    name: Literal["llama"] = setting("llama", "which model this is")
    num_kv_heads: int = setting(help="key and value heads; must divide num_heads")
    head_dim: int = setting(help="size of one head, even")
    mlp_dim: int = setting(help="width of the gated MLP of layers without experts")
    row_parts: int = setting(
        1,
        "parts into which each block splits a device's rows and that run sequentially, so that the backward pass needs "
        "the activations of one part; use 1 on TPU v5e, where parts prevent the overlap of gathers with matmuls",
        may_change=True,
        read_if="model.remat!=none",
    )
    rope_base: float = setting(10_000.0, "RoPE's theta (arXiv:2104.09864)")
    rope_scaling: RopeScaling | None = setting(None, "scaling of RoPE for long contexts")
    qkv_bias: bool = setting(False, "biases on queries, keys and values, as in Qwen2")
    out_bias: bool = setting(False, "a bias on the output projection; with qkv_bias the attention_bias of transformers")
    qk_norm: bool = setting(False, "RMSNorm on queries and keys before RoPE (arXiv:2302.05442)")
    qk_norm_over: Literal["head", "all_heads"] = setting(
        "head", "normalizes each head separately, or all heads together as in OLMo-2", read_if="model.qk_norm"
    )
    query_scalar: float | None = setting(None, "scores are divided by its square root; none: by sqrt(head_dim)")
    attention_window: int | None = setting(
        None, "number of latest keys that a query attends to, including its own (arXiv:2310.06825); none: all"
    )
    global_every: int | None = setting(
        None,
        "every n-th layer attends to all keys, other layers to attention_window (Gemma 3: 6); none: no such layer",
        read_if="model.attention_window",
    )
    global_first: int = setting(
        0, "the first n layers attend to all keys (Qwen2's max_window_layers)", read_if="model.attention_window"
    )
    local_rope_base: float | None = setting(
        None,
        "RoPE's theta, without rope_scaling, of the layers with a window; none: the same RoPE for all layers",
        read_if="model.global_every or model.global_first",
    )
    attention_softcap: float | None = setting(
        None, "c: attention scores become c * tanh(scores / c) (arXiv:2408.00118); none: unchanged"
    )
    norm_placement: Literal["before", "after", "both"] = setting(
        "before", "norms on the input of attention and MLP, on the output as in OLMo-2 (after), or both as in Gemma 2"
    )
    zero_centred_norms: bool = setting(False, "norms multiply by 1 + scale, as in Gemma")
    activation: Literal["silu", "gelu_tanh"] = setting("silu", "activation of the MLP's gate; gelu_tanh as in Gemma")
    scaled_embeddings: bool = setting(False, "embeddings are multiplied by sqrt(embed_dim), as in Gemma")
    tied_embeddings: bool = setting(False, "true: the embedding table is also the output projection")

    latent: LatentConfig | None = setting(
        None, "multi-head latent attention, as in DeepSeek; none: projects keys and values from the residual stream"
    )
    experts: ExpertsConfig | None = setting(None, "a mixture of experts instead of the MLP; none: a dense MLP")
    mup: MupConfig | None = setting(
        None, "muP: scales and learning rates relative to a narrower model (arXiv:2203.03466); none: unchanged"
    )

    gated_mlp: ClassVar[bool] = True
    splits_rows: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "num_kv_heads", "head_dim", "mlp_dim", "row_parts", "rope_base")
        if self.num_heads % self.num_kv_heads:
            raise BadInput(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.attention_window is not None and self.attention_window < 1:
            raise BadInput(f"attention_window={self.attention_window} must be at least 1; use none to disable it")
        if self.attention_softcap is not None and self.attention_softcap <= 0:
            raise BadInput(f"attention_softcap={self.attention_softcap} must be above 0; use none to disable it")
        if self.query_scalar is not None and self.query_scalar <= 0:
            raise BadInput(f"query_scalar={self.query_scalar} must be above 0; use none for head_dim")
        if self.qk_norm_over == "all_heads" and not self.qk_norm:
            raise BadInput("qk_norm_over='all_heads' needs qk_norm; set qk_norm=true")
        if self.global_every is not None and (self.global_every < 2 or self.attention_window is None):
            raise BadInput(f"global_every={self.global_every} must be at least 2, and needs attention_window; set both")
        if not 0 <= self.global_first < self.num_layers or (self.global_first and self.attention_window is None):
            raise BadInput(
                f"global_first={self.global_first} must be at least 0 and below num_layers={self.num_layers}; values "
                "above 0 need attention_window"
            )
        if self.local_rope_base is not None and (self.local_rope_base < 1 or not self.mixed_windows):
            raise BadInput(
                f"local_rope_base={self.local_rope_base} must be at least 1, and needs global_every or global_first; "
                "remove local_rope_base to use rope_base in all layers"
            )
        if self.experts is not None and self.experts.first_dense >= self.num_layers:
            raise BadInput(f"experts.first_dense={self.experts.first_dense} must be below num_layers={self.num_layers}")
        if self.head_dim % 2:
            raise BadInput(f"head_dim={self.head_dim} must be even, because RoPE rotates pairs of dimensions")
        if self.rope_scaling is not None:
            check_scaling(self.rope_scaling, self.rope_dim, self.rope_base)
        if self.latent is not None:
            check_latent(self, self.latent)
        if self.mup is not None:
            check_mup_model(self, self.mup)

    @property
    def activation_names(self) -> tuple[str, ...]:
        """Names of activations that a block marks with checkpoint_name, for remat."""
        return GATED_ACTIVATIONS if self.latent is None else (*GATED_ACTIVATIONS, LATENT)

    @property
    def scales(self) -> MupScales:
        """Multipliers of muP; 1 without muP."""
        return mup_scales(self)

    @property
    def init_layers(self) -> int:
        """Number of layers for the initial std of output projections. With muP, the number in the base model."""
        return self.num_layers if self.mup is None else self.mup.base_layers or self.num_layers

    @property
    def score_scalar(self) -> float | None:
        """Number by whose square root attention scores are divided. None means head_dim."""
        if self.query_scalar is not None or self.scales.scores == 1.0:
            return self.query_scalar
        return self.head_dim / self.scales.scores**2

    @property
    def rope_dim(self) -> int:
        """Number of features per head that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def max_seq_len(self) -> int | None:
        """Maximum sequence length, if RoPE's scaling depends on the length."""
        return None if self.rope_scaling is None else self.rope_scaling.longest_row

    @property
    def layer_stacks(self) -> dict[str, int]:
        """{name of a stack of blocks: number of layers}, in forward order."""
        dense = 0 if self.experts is None else self.experts.first_dense
        return ({DENSE: dense} if dense else {}) | {BLOCKS: self.num_layers - dense}

    @property
    def key_width(self) -> int:
        """Features per token in the keys of a block."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Features per token in the values of a block."""
        return self.key_width if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def result_width(self) -> int:
        """Features per token in the output of a block's attention, before the output projection."""
        return self.query_width if self.latent is None else self.value_width

    @property
    def latent_width(self) -> int:
        """Features per token of the latents from which queries, keys and values are projected; 0 without latents."""
        return 0 if self.latent is None else self.latent.width

    @property
    def gathered_width(self) -> int:
        """Features per token that the tensor axis all-gathers for a block's attention."""
        all_latent = self.latent is not None and self.latent.q_rank > 0
        return self.latent_width + (0 if all_latent else self.embed_dim)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns {matrix of a block: (input features, output features)}, excluding expert matrices."""
        matrices, experts = super().matrices(), self.experts
        if self.latent is not None:
            mlp = {name: sizes for name, sizes in matrices.items() if name.startswith("mlp.")}
            latent = self.latent.matrices(self.embed_dim, self.num_heads)
            matrices = {f"attention.{name}": sizes for name, sizes in latent.items()} | mlp
        if experts is None:
            return matrices
        D, S = self.embed_dim, experts.shared_dim
        attention = {name: sizes for name, sizes in matrices.items() if not name.startswith("mlp.")}
        shared = {"mlp.shared.gate": (D, S), "mlp.shared.up": (D, S), "mlp.shared.down": (S, D)} if S else {}
        return attention | {"mlp.router": (D, experts.number)} | shared

    def expert_matrices(self) -> dict[str, tuple[int, int]]:
        """Returns {matrix of each expert of a block: (input features, output features)}."""
        if self.experts is None:
            return {}
        D, F = self.embed_dim, self.experts.mlp_dim
        return {"mlp.gate": (D, F), "mlp.up": (D, F), "mlp.down": (F, D)}

    @property
    def mlp_width(self) -> int:
        """MLP width per token in the stack `blocks`. With experts, the total width of selected and shared experts."""
        return self.mlp_dim if self.experts is None else self.experts.active_dim

    @property
    def block_matrix_params(self) -> int:
        """Number of matrix parameters per token in one block of the stack `blocks`."""
        experts = 0 if self.experts is None else 3 * self.embed_dim * self.experts.chosen * self.experts.mlp_dim
        return super().block_matrix_params + experts

    @property
    def matmul_params(self) -> int:
        """Number of matmul parameters per token, including the output projection but not the embedding lookup."""
        return super().matmul_params + self.layer_stacks.get(DENSE, 0) * self.extra_dense_params

    @property
    def extra_dense_params(self) -> int:
        """Number of matrix parameters of a dense layer minus those used per token in a mixture-of-experts layer."""
        experts = self.experts
        return 0 if experts is None else self.embed_dim * (3 * (self.mlp_dim - experts.active_dim) - experts.number)

    @property
    def leading_layers(self) -> float:
        """Cost of the leading dense layers, in units of one layer of the stack `blocks`."""
        dense = self.layer_stacks.get(DENSE, 0)
        return dense * (1 + self.extra_dense_params / self.block_matrix_params) if dense else 0.0

    @property
    def active_params(self) -> int:
        """Number of parameters used per token: all except those of unselected experts."""
        return self.num_params - self.idle_params

    @property
    def idle_params(self) -> int:
        """Number of parameters of a token's unselected experts."""
        if (experts := self.experts) is None:
            return 0
        idle = (experts.number - experts.chosen) * 3 * self.embed_dim * experts.mlp_dim
        return (self.num_layers - experts.first_dense) * idle

    @property
    def num_params(self) -> int:
        """Number of parameters, including embeddings, excluding router bias and load."""
        qkv_biases = self.qkv_bias * (self.query_width + 2 * self.key_width)
        biases = self.num_layers * (qkv_biases + self.out_bias * self.embed_dim)
        head = self.vocab_size * self.embed_dim * (not self.tied_embeddings)
        return self.matmul_params + self.idle_params + head + biases + self.norm_params

    @property
    def norm_params(self) -> int:
        """Number of norm scales."""
        all_heads = self.num_heads + self.num_kv_heads
        qk_norms = self.qk_norm * (all_heads if self.qk_norm_over == "all_heads" else 2) * self.head_dim
        latent_norms = 0 if self.latent is None else self.latent.norm_params
        per_sublayer = 2 if self.norm_placement == "both" else 1
        return self.num_layers * (2 * per_sublayer * self.embed_dim + qk_norms + latent_norms) + self.embed_dim

    @property
    def mixed_windows(self) -> bool:
        """True if some layers have a window and others do not."""
        return self.attention_window is not None and (self.global_every is not None or self.global_first > 0)

    @property
    def local_layers(self) -> np.ndarray:
        """Mask of the layers with a window, bool[L]."""
        if self.attention_window is None:
            return np.zeros(self.num_layers, bool)
        layers = np.arange(1, self.num_layers + 1)
        local = layers > self.global_first
        return local if self.global_every is None else local & (layers % self.global_every != 0)

    def visible_keys(self, seq_len: int) -> float:
        """Returns the mean visible keys per query, summed over layers: T / 2, or W - W^2 / (2 T) with a window of W."""
        window = min(self.attention_window or seq_len, seq_len)
        local_keys, global_keys = window - window * window / (2 * seq_len), seq_len / 2
        num_local = int(self.local_layers.sum())
        return num_local * local_keys + (self.num_layers - num_local) * global_keys

    def attention_needs(self, *, prefix: bool = False) -> AttentionNeeds:
        """Returns the features that an attention kernel must support."""
        return dataclasses.replace(
            super().attention_needs(prefix=prefix),
            value_dim=None if self.latent is None else self.latent.value_dim,
            window=self.attention_window,
            window_layers=WindowLayers(int(self.local_layers.sum()), self.num_layers) if self.mixed_windows else None,
            softcap=self.attention_softcap,
        )

    @property
    def mlp_residuals(self) -> tuple[tuple[str, ResidualDtype], ...]:
        """(description, dtype) of each array that the gated MLP saves for its backward pass."""
        return *super().mlp_residuals, ("up", "compute")


def check_latent(cfg: LlamaConfig, latent: LatentConfig) -> None:
    """Raises BadInput for settings that are incompatible with latent attention."""
    for name, usual in (
        ("qkv_bias", False), ("out_bias", False), ("qk_norm", False), ("zero_centred_norms", False),
        ("query_scalar", None),
    ):  # fmt: skip
        if (value := getattr(cfg, name)) != usual:
            raise BadInput(
                f"{name}={value} cannot be combined with latent attention, which does not support this setting; "
                f"remove {name}"
            )
    if cfg.num_kv_heads != cfg.num_heads:
        raise BadInput(
            f"num_kv_heads={cfg.num_kv_heads} must equal num_heads={cfg.num_heads} with latent attention, because each "
            "head has its own keys and values"
        )
    if cfg.head_dim != latent.head_dim:
        raise BadInput(
            f"head_dim={cfg.head_dim} must equal latent.nope_dim + latent.rope_dim = {latent.head_dim}, the size of "
            "queries and keys per head"
        )


def check_mup_model(cfg: LlamaConfig, mup: MupConfig) -> None:
    """Raises BadInput for settings that muP does not support."""
    for name, usual in (("latent", None), ("scaled_embeddings", False), ("zero_centred_norms", False)):
        if getattr(cfg, name) != usual:
            raise BadInput(f"{name} cannot be combined with mup; remove one of them")
    if cfg.query_scalar is not None and mup.base_head_dim is not None:
        raise BadInput(
            f"query_scalar={cfg.query_scalar} cannot be combined with mup.base_head_dim={mup.base_head_dim}, because "
            "both scale attention scores; remove one of them"
        )


def check_scaling(scaling: RopeScaling, head_dim: int, base: float) -> None:
    """Raises BadInput if the RoPE scaling does not support this base or head_dim."""
    if scaling.name == "longrope" and len(scaling.long_factor) != head_dim // 2:
        raise BadInput(
            f"rope_scaling.long_factor has {len(scaling.long_factor)} numbers, but RoPE rotates {head_dim} dimensions "
            f"and needs {head_dim // 2} numbers, one for each pair of dimensions"
        )
    if scaling.name == "dynamic" and head_dim < 4:
        raise BadInput(f"head_dim={head_dim} must be at least 4 with rope_scaling.name='dynamic'")
    if scaling.name == "yarn" and base <= 1:
        raise BadInput(f"rope_base={base} must be above 1 with rope_scaling.name='yarn'")
