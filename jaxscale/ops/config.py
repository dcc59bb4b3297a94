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
    window: int | None = None
    mixed: Mix | None = None  # the window is that of some layers, and the others see every key
    softcap: float | None = None
    prefix: bool = False  # some keys are seen by queries before them
    bidirectional: bool = False  # every key is seen by all queries of its document
    bias: bool = False  # scores have a bias, and keys may come from another row


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a context longer than the one the rotations were trained for is squeezed into them."""

    name: Literal["linear", "llama3"] = setting("llama3", "linear: positions / factor; llama3: only slow rotations")
    factor: float = setting(8.0, "how many times longer the context becomes")
    low_freq_factor: float = setting(
        1.0, "llama3: waves longer than original_max_len / this are slowed by `factor`", read_if=".name=llama3"
    )
    high_freq_factor: float = setting(
        4.0, "llama3: waves shorter than original_max_len / this are left alone", read_if=".name=llama3"
    )
    original_max_len: int = setting(
        8192, "llama3: context length before the extension [tokens]", read_if=".name=llama3"
    )

    def __post_init__(self):
        if self.factor < 1:
            raise BadInput(f"factor={self.factor} must be at least 1; leave out rope scaling to have none")
        if self.low_freq_factor <= 0:
            raise BadInput(f"low_freq_factor={self.low_freq_factor} must be above 0")
        if self.high_freq_factor <= self.low_freq_factor:
            raise BadInput(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}"
            )
        if self.original_max_len < 1:
            raise BadInput(f"original_max_len={self.original_max_len} must be at least 1 token")
