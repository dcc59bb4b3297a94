"""Expert parallelism inside shard_map: each device has some of the experts.

With the exchange "gather", every device all-gathers the experts of a layer, as over fsdp. With "send", tokens are sent
to the devices of their experts and back.
"""

import dataclasses
from typing import NamedTuple

import jax
from jax import lax

from jaxscale.kernels.collectives import CollectiveBytes
from jaxscale.kernels.config import Choice
from jaxscale.units import size

AXIS = "expert"
EXPERTS = "experts"  # the logical axis that AXIS shards


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """The devices of the expert axis, which exchange tokens. With one device, every method is the identity."""

    size: int = 1  # devices

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """Returns [source device, ...] from [destination device, ...]."""
        return x if self.size == 1 else lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over the devices. Not differentiable."""
        return x if self.size == 1 else lax.pmax(x, AXIS)

    def bytes_sent(self, rows: float, row_bytes: float) -> list[CollectiveBytes]:
        """Returns the bytes sent by one layer and microbatch. rows: number of (token, expert) pairs per device.

        Recomputation sends nothing, since gradients do not use its results. Combine weights and gradients are float32.
        """
        nbytes = rows * (TRANSFERS_PER_ROW * row_bytes + WEIGHT_TRANSFERS_PER_ROW * 4)
        return [CollectiveBytes(AXIS, "all-to-all", nbytes)] if self.size > 1 else []

    def bytes_held(self, rows: float, row_bytes: float) -> float:
        """Returns the bytes of local inputs, output gradients and input gradients, which all rounds share."""
        return 3 * rows * row_bytes if self.size > 1 else 0.0


NO_EXPERT_AXIS = ExpertAxis()

# Maximum fraction of device memory for the gathered experts of a layer. The next layer and gradients need more.
MAX_GATHERED_SHARE = 1 / 8
# Weights are gathered in the forward pass and recomputation, and their gradients reduced. Rows are sent for dispatch
# and combine, and in the backward pass as x, dy and dx. Combine weights are sent forward, backward and as gradients.
GATHERS_PER_WEIGHT, TRANSFERS_PER_ROW, WEIGHT_TRANSFERS_PER_ROW = 3, 5, 3
# Sending a byte of rows delays matmuls about four times as long as gathering a byte of weights, because gathers overlap
# with some matmuls, and an all-to-all uses only the links of its mesh axis. In compiled programs (libtpu 0.0.51,
# 2026-11-25) the ratio is 3.5 for Mixtral 8x7B with expert 8 x fsdp 8 on v5p:4x4x4, and 6 for Qwen3 30B A3B on v6e:8x8,
# where fsdp 64 is compared with expert 8 x fsdp 8.
SEND_COST = 4


class ExpertWork(NamedTuple):
    """Sizes that resolve_expert_exchange() compares. An unknown size is None."""

    devices: int  # size of the expert axis
    layer_bytes: int  # bytes of all experts of a layer in compute_dtype, divided by the size of the tensor axis
    row_bytes: int  # bytes of the residual stream of a token
    rows: int | None = None  # (token, expert) pairs per device and microbatch
    memory_bytes: int | None = None  # memory of a device


def describe(exchange: Choice) -> str:
    """Returns a description of the expert exchange and its reason, or "" if the axis has one device."""
    words = {"gather": "experts are gathered (gather)", "send": "tokens are sent to their experts (send)"}
    return f"{words[exchange.name]}: {exchange.reason}" if exchange.name else ""


def resolve_expert_exchange(requested: str, work: ExpertWork) -> Choice:
    """Returns the requested exchange. "auto" selects the one that fits in memory and delays matmuls less."""
    if work.devices == 1:
        return Choice(requested)
    if requested != "auto":
        return Choice(requested, requested, "set by expert.exchange")
    if work.memory_bytes is not None and work.layer_bytes > MAX_GATHERED_SHARE * work.memory_bytes:
        share, memory = f"1/{1 / MAX_GATHERED_SHARE:g}", size(work.memory_bytes)
        reason = f"the experts of a layer need {size(work.layer_bytes)}, more than {share} of {memory}"
        return Choice(requested, "send", reason)
    if work.rows is None:
        return Choice(requested, "send", "the number of tokens per device is unknown")
    gathered, sent = GATHERS_PER_WEIGHT * work.layer_bytes, TRANSFERS_PER_ROW * work.rows * work.row_bytes
    name = "gather" if gathered <= SEND_COST * sent else "send"
    waits = f"where each byte delays matmuls {SEND_COST} times as long"
    reason = f"per device and microbatch a layer gathers {size(gathered)}, or sends {size(sent)}, {waits}"
    return Choice(requested, name, reason)
