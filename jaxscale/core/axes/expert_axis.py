"""Expert parallelism inside shard_map: each device has some of the experts.

Either every device all-gathers the experts of a layer, as over fsdp (gather), or tokens are sent to their experts'
devices and back (send).
"""

import dataclasses
from typing import NamedTuple

import jax
from jax import lax

from jaxscale.kernels.collectives import CollectiveBytes
from jaxscale.kernels.config import Choice
from jaxscale.units import size

AXIS = "expert"
EXPERTS = "experts"  # the logical axis that it shards


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """The devices among which tokens are sent. With one device every method is the identity."""

    size: int = 1  # devices

    def all_to_all(self, x: jax.Array) -> jax.Array:
        """Returns [source device, ...] from [destination device, ...]."""
        return x if self.size == 1 else lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over the devices. Not differentiable."""
        return x if self.size == 1 else lax.pmax(x, AXIS)

    def bytes_sent(self, rows: float, row_bytes: float) -> list[CollectiveBytes]:
        """Returns what one layer and microbatch sends. rows: rows of a device in all rounds, `row_bytes` each.

        Recomputation sends nothing: no gradient reads what comes back. Combine weights and their gradients are float32.
        """
        nbytes = rows * (TRANSFERS_PER_ROW * row_bytes + WEIGHT_TRANSFERS_PER_ROW * 4)
        return [CollectiveBytes(AXIS, "all-to-all", nbytes)] if self.size > 1 else []

    def bytes_held(self, rows: float, row_bytes: float) -> float:
        """Returns bytes of the local rows that a round's rows are read from and added to: x, dy and dx."""
        return 3 * rows * row_bytes if self.size > 1 else 0.0


NO_EXPERT_AXIS = ExpertAxis()

# Limit for the gathered experts of one layer, of a device's memory; it also holds the next layer's and their gradients.
MAX_GATHERED_SHARE = 1 / 8
# Weights: forward, recomputation, gradients. Rows: dispatch and combine; in the backward pass x, dy, dx. Combine
# weights of rows: forward, backward, gradients.
GATHERS_PER_WEIGHT, TRANSFERS_PER_ROW, WEIGHT_TRANSFERS_PER_ROW = 3, 5, 3
# A byte of rows delays matmuls about four times as long as a byte of weights: gathers overlap some matmuls, and an
# all-to-all uses only the links of its axis. Compiled (libtpu 0.0.51, 2026-11-25) the ratio is 3.5 for Mixtral 8x7B,
# expert 8 x fsdp 8 on v5p:4x4x4, and 6 for Qwen3 30B A3B on v6e:8x8, fsdp 64 compared with expert 8 x fsdp 8.
SEND_COST = 4


class ExpertWork(NamedTuple):
    """Sizes that resolve_expert_exchange compares. None: unknown."""

    devices: int  # of the axis
    layer_bytes: int  # of all experts of a layer, divided by tensor, in compute_dtype
    row_bytes: int  # of the residual stream of a token
    rows: int | None = None  # (token, expert) pairs of a device and microbatch
    memory_bytes: int | None = None  # of a device


def describe(exchange: Choice) -> str:
    """Returns the exchange between tokens and experts and its reason; "" where the axis has one device."""
    words = {"gather": "experts are gathered (gather)", "send": "tokens are sent to their experts (send)"}
    return f"{words[exchange.name]}: {exchange.reason}" if exchange.name else ""


def resolve_expert_exchange(requested: str, work: ExpertWork) -> Choice:
    """Returns the requested exchange, or for "auto" the one that delays matmuls less, if it fits in memory."""
    if work.devices == 1:
        return Choice(requested)
    if requested != "auto":
        return Choice(requested, requested, "as expert.exchange says")
    if work.memory_bytes is not None and work.layer_bytes > MAX_GATHERED_SHARE * work.memory_bytes:
        share, memory = f"1/{1 / MAX_GATHERED_SHARE:g}", size(work.memory_bytes)
        reason = f"those of a layer take {size(work.layer_bytes)}, more than {share} of {memory}"
        return Choice(requested, "send", reason)
    if work.rows is None:
        return Choice(requested, "send", "how many tokens a device has is not known")
    gathered, sent = GATHERS_PER_WEIGHT * work.layer_bytes, TRANSFERS_PER_ROW * work.rows * work.row_bytes
    name = "gather" if gathered <= SEND_COST * sent else "send"
    waits = f"each byte of which delays matmuls {SEND_COST} times as long"
    reason = f"a layer gathers {size(gathered)}, or sends {size(sent)}, {waits}, a device and microbatch"
    return Choice(requested, name, reason)
