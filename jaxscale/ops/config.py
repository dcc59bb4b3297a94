"""Settings of operations: which attention kernel, number types of products, RoPE scaling; and what a model asks of its
attention kernel."""

import dataclasses
from typing import Literal, NamedTuple

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

AttentionName = Literal["auto", "xla", "splash", "cudnn", "blockwise"]
MatmulDtype = Literal["none", "int8", "fp8"]
# The checkpoint_name of attention's result and, in forms that have one, of the logarithm of each row's softmax sum:
# with both kept, the backward pass runs without a second forward pass of the kernel.
ATTENTION_OUT = "attention_out"


class Mix(NamedTuple):
    """How many layers of a stack have the window."""

    near: int
    layers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What a model asks of attention."""

    head_dim: int
    dtype: str  # of queries, keys and values
    value_dim: int | None = None  # of values and results; none: as keys
    window: int | None = None
    mixed: Mix | None = None  # the window is that of some layers, and the others see every key
    softcap: float | None = None
    prefix: bool = False  # some keys are seen by queries before them
    bidirectional: bool = False  # every key is seen by all queries of its document
    bias: bool = False  # scores have a bias, and keys may come from another row

    @property
    def of_values(self) -> int:
        """Size of a head's value."""
        return self.head_dim if self.value_dim is None else self.value_dim


RopeName = Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
BY_LENGTH = ("dynamic", "longrope")  # whose rotations depend on how long the rows are


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a context longer than the one the rotations were trained for is squeezed into them."""

    name: RopeName = setting(
        "llama3",
        "linear: positions / factor; llama3, yarn (arXiv:2309.00071): only slow rotations; dynamic: a larger theta; "
        "longrope (arXiv:2402.13753): each rotation by a number of its own",
    )
    factor: float = setting(8.0, "how many times longer the context becomes")
    low_freq_factor: float = setting(
        1.0, "waves longer than original_max_len / this are slowed by `factor`", read_if=".name=llama3"
    )
    high_freq_factor: float = setting(
        4.0, "waves shorter than original_max_len / this are left alone", read_if=".name=llama3"
    )
    original_max_len: int = setting(
        8192, "context length before the extension [tokens]", read_if=".name=llama3|yarn|dynamic|longrope"
    )
    beta_fast: float = setting(
        32.0, "waves that turn more often than this in original_max_len are left alone", read_if=".name=yarn"
    )
    beta_slow: float = setting(
        1.0, "waves that turn less often than this in original_max_len are slowed by `factor`", read_if=".name=yarn"
    )
    truncate: bool = setting(True, "the ramp between the two begins and ends at whole dimensions", read_if=".name=yarn")
    attention_factor: float | None = setting(
        None,
        "queries and keys are multiplied by it; none: what follows from factor, as transformers has it",
        read_if=".name=yarn|longrope",
    )
    mscale: float | None = setting(
        None,
        "with mscale_all_dim, the attention factor is the ratio of 0.1 m log(factor) + 1 of the two, as in DeepSeek; "
        "model.latent multiplies scores by the square of the latter",
        read_if=".name=yarn and not .attention_factor",
    )
    mscale_all_dim: float | None = setting(None, "see mscale", read_if=".name=yarn and .mscale")
    short_factor: tuple[float, ...] = setting(
        (), "what divides each rotation in rows up to original_max_len; head_dim / 2 numbers", read_if=".name=longrope"
    )
    long_factor: tuple[float, ...] = setting((), "the same in longer rows", read_if=".name=longrope")
    row_len: int | None = setting(
        None,
        "length of the rows that the rotations are for, the same ones for all rows up to it [tokens]; none: "
        "original_max_len",
        read_if=".name=dynamic|longrope",
    )

    def __post_init__(self):
        if self.factor < 1:
            raise BadInput(f"factor={self.factor} must be at least 1; leave out rope scaling to have none")
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
                raise BadInput(f"{name}={value} must be above 0, or none")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise BadInput("mscale and mscale_all_dim are read together; give both, or neither")
        for name in ("original_max_len", "row_len"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadInput(f"{name}={value} must be at least 1 token")
        if self.name == "longrope":
            self.check_factors()

    def check_factors(self) -> None:
        """Raises BadInput unless longrope has two lists of positive numbers, equally long."""
        if not self.short_factor or len(self.short_factor) != len(self.long_factor):
            raise BadInput(
                f"short_factor has {len(self.short_factor)} numbers and long_factor {len(self.long_factor)}; longrope "
                "needs head_dim / 2 of each"
            )
        if min(*self.short_factor, *self.long_factor) <= 0:
            raise BadInput("short_factor and long_factor must be above 0")
        if self.original_max_len < 2:
            raise BadInput("longrope needs original_max_len of at least 2 tokens: it divides by the logarithm")

    @property
    def longest_row(self) -> int | None:
        """The longest row that the rotations are right for [tokens]; none where they do not depend on it."""
        return max(self.row_len or 0, self.original_max_len) if self.name in BY_LENGTH else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterForm:
    """How a token's experts are chosen, and what their results are multiplied with: always in float32."""

    chosen: int = setting(help="experts of a token")
    score: Literal["softmax", "sigmoid"] = setting(
        "softmax", "of the router's logits: over all experts, or each for itself as in DeepSeek-V3"
    )
    normalised: bool = setting(True, "weights of a token's experts are divided by their sum; OLMoE: false")
    scale: float = setting(1.0, "weights are multiplied by it")
    groups: int = setting(1, "groups that experts fall into; a token's are from the best of them (arXiv:2405.04434)")
    groups_chosen: int = setting(1, "groups that a token's experts are from", read_if=".groups!=1")
    group_best: int = setting(
        1,
        "a group is as good as the sum of its so many best scores; DeepSeek-V2: 1, DeepSeek-V3: 2",
        read_if=".groups!=1",
    )

    def check_router(self, number: int) -> None:
        """Raises BadInput for what a router of so many experts cannot do."""
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
            raise BadInput(f"group_best={self.group_best} must be at least 1 and at most the {size} experts of a group")
        if self.chosen > self.groups_chosen * size:
            raise BadInput(
                f"chosen={self.chosen} is more than the {self.groups_chosen * size} experts of "
                f"groups_chosen={self.groups_chosen}"
            )
