"""Settings of kernels, attention features that models need, and implementations that a plan selects."""

import dataclasses
from typing import Literal, NamedTuple

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

AttentionName = Literal["auto", "xla", "splash", "cudnn", "blockwise"]
MatmulDtype = Literal["none", "int8", "fp8"]
# checkpoint_name of attention's output and, if the kernel returns it, of the logsumexp. If both are saved, the backward
# pass does not rerun the forward kernel.
ATTENTION_OUT = "attention_out"


class Choice(NamedTuple):
    """One decision of a parallel plan."""

    requested: str = "auto"  # value of the setting
    name: str = ""  # selected implementation; "" if there is nothing to select
    reason: str = ""


XLA_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # environment variables with XLA options


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """Compiler options of one program, selected by kernels/compiler_options.py."""

    values: dict[str, bool | int | float | str]  # argument compiler_options of jax.jit
    set_by_environment: tuple[str, ...] = ()  # options that environment variables override
    offloads_torus: bool = False  # collectives over several torus dimensions are one asynchronous operation

    def __str__(self) -> str:
        """Returns 'a=True, b=2; c from XLA_FLAGS', or ''."""
        parts = [", ".join(f"{name}={value}" for name, value in self.values.items())]
        if self.set_by_environment:
            parts.append(f"{', '.join(self.set_by_environment)} from {' or '.join(XLA_VARIABLES)}")
        return "; ".join(part for part in parts if part)


NO_COMPILER_OPTIONS = CompilerOptions({})


class WindowLayers(NamedTuple):
    """Number of layers with a sliding window, and number of all layers."""

    windowed: int
    total: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """Properties of a model's attention that a kernel must support."""

    head_dim: int
    dtype: str  # dtype of queries, keys and values
    value_dim: int | None = None  # head dim of values and outputs; None: head_dim
    window: int | None = None
    window_layers: WindowLayers | None = None  # set if only some layers have the window
    softcap: float | None = None
    prefix: bool = False  # True if the keys of a prefix are visible to earlier queries
    bidirectional: bool = False  # True if attention is not causal within a document
    bias: bool = False  # True for a bias on scores; keys may also be from a different sequence

    @property
    def v_dim(self) -> int:
        """Head dim of values."""
        return self.head_dim if self.value_dim is None else self.value_dim


RopeName = Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
BY_LENGTH = ("dynamic", "longrope")  # scalings whose frequencies depend on the sequence length


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Settings of RoPE frequency scaling, for contexts longer than in training."""

    name: RopeName = setting(
        "llama3",
        "linear: positions / factor; llama3, yarn (arXiv:2309.00071): scales only low frequencies; dynamic: a larger "
        "theta; longrope (arXiv:2402.13753): a separate factor for each frequency",
    )
    factor: float = setting(8.0, "ratio of the new to the original context length")
    low_freq_factor: float = setting(
        1.0, "wavelengths above original_max_len / low_freq_factor are scaled by `factor`", read_if=".name=llama3"
    )
    high_freq_factor: float = setting(
        4.0, "wavelengths below original_max_len / high_freq_factor are unchanged", read_if=".name=llama3"
    )
    original_max_len: int = setting(
        8192, "context length before the extension, in tokens", read_if=".name=llama3|yarn|dynamic|longrope"
    )
    beta_fast: float = setting(
        32.0, "frequencies with more rotations in original_max_len are unchanged", read_if=".name=yarn"
    )
    beta_slow: float = setting(
        1.0, "frequencies with fewer rotations in original_max_len are scaled by `factor`", read_if=".name=yarn"
    )
    truncate: bool = setting(True, "rounds beta_fast and beta_slow to whole dimensions", read_if=".name=yarn")
    attention_factor: float | None = setting(
        None,
        "factor by which queries and keys are multiplied; none: derived from `factor`, as in transformers",
        read_if=".name=yarn|longrope",
    )
    mscale: float | None = setting(
        None,
        "with mscale_all_dim, the attention factor is f(mscale) / f(mscale_all_dim), where f(m) is 0.1 m log(factor) + "
        "1, as in DeepSeek; model.latent multiplies scores by f(mscale_all_dim) squared",
        read_if=".name=yarn and not .attention_factor",
    )
    mscale_all_dim: float | None = setting(None, "see mscale", read_if=".name=yarn and .mscale")
    short_factor: tuple[float, ...] = setting(
        (), "divisor of each frequency up to original_max_len tokens; head_dim / 2 numbers", read_if=".name=longrope"
    )
    long_factor: tuple[float, ...] = setting((), "divisors for longer sequences", read_if=".name=longrope")
    row_len: int | None = setting(
        None,
        "sequence length in tokens for which frequencies are computed, also for shorter ones; none: original_max_len",
        read_if=".name=dynamic|longrope",
    )

    def __post_init__(self):
        if self.factor < 1:
            raise BadInput(f"factor={self.factor} must be at least 1; remove rope_scaling to disable scaling")
        for name in ("low_freq_factor", "beta_slow"):
            if getattr(self, name) <= 0:
                raise BadInput(f"{name}={getattr(self, name)} must be above 0")
        if self.high_freq_factor <= self.low_freq_factor:
            raise BadInput(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}"
            )
        if self.beta_fast < self.beta_slow:
            raise BadInput(f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow}")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise BadInput(f"{name}={value} must be above 0; use none to unset it")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise BadInput("mscale and mscale_all_dim must be set together; set both or neither")
        for name in ("original_max_len", "row_len"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadInput(f"{name}={value} must be at least 1 token")
        if self.name == "longrope":
            self.check_factors()

    def check_factors(self) -> None:
        """Raises BadInput unless longrope has two lists of positive numbers of equal length."""
        if not self.short_factor or len(self.short_factor) != len(self.long_factor):
            raise BadInput(
                f"short_factor has {len(self.short_factor)} numbers and long_factor has {len(self.long_factor)}; "
                "with longrope, both must have head_dim / 2 numbers"
            )
        if min(*self.short_factor, *self.long_factor) <= 0:
            raise BadInput("all numbers in short_factor and long_factor must be above 0")
        if self.original_max_len < 2:
            raise BadInput("longrope divides by log(original_max_len); set original_max_len to at least 2 tokens")

    @property
    def longest_row(self) -> int | None:
        """Sequence length for which frequencies are computed, in tokens; None if they do not depend on the length."""
        return max(self.row_len or 0, self.original_max_len) if self.name in BY_LENGTH else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Settings of a router, which selects and weights the experts of a token in float32."""

    chosen: int = setting(help="experts per token")
    score: Literal["softmax", "sigmoid"] = setting(
        "softmax", "function of the router's logits: softmax over experts, or sigmoid of each as in DeepSeek-V3"
    )
    normalised: bool = setting(True, "weights of a token's experts are divided by their sum; OLMoE: false")
    scale: float = setting(1.0, "factor of the weights")
    groups: int = setting(1, "groups of experts; a token's experts are from the best groups (arXiv:2405.04434)")
    groups_chosen: int = setting(1, "groups per token", read_if=".groups!=1")
    group_best: int = setting(
        1,
        "the score of a group is the sum of this number of its best scores; DeepSeek-V2: 1, DeepSeek-V3: 2",
        read_if=".groups!=1",
    )

    def check_router(self, number: int) -> None:
        """Raises BadInput for settings that a router of `number` experts does not support."""
        if not 1 <= self.chosen <= number:
            raise BadInput(f"chosen={self.chosen} must be at least 1 and at most number={number}")
        if self.scale <= 0:
            raise BadInput(f"scale={self.scale} must be above 0")
        if self.groups < 1 or number % self.groups:
            raise BadInput(f"groups={self.groups} must divide number={number}")
        if not 1 <= self.groups_chosen <= self.groups:
            raise BadInput(f"groups_chosen={self.groups_chosen} must be at least 1 and at most groups={self.groups}")
        size = number // self.groups
        if not 1 <= self.group_best <= size:
            raise BadInput(f"group_best={self.group_best} must be at least 1 and at most {size}, the size of a group")
        if self.chosen > self.groups_chosen * size:
            raise BadInput(
                f"chosen={self.chosen} must be at most {self.groups_chosen * size}, the number of experts in "
                f"groups_chosen={self.groups_chosen} groups"
            )
