"""The expert axis by hand: devices that have rows of their own, and each some of the experts.

Either every device brings all experts of a layer together, as it does over fsdp, and its tokens stay (gather); or
experts stay, and rows are sent to them and back (send).
"""

import dataclasses
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh

from jaxscale.units import size

AXIS = "expert"
EXPERTS = "experts"  # the logical axis that it cuts


@dataclasses.dataclass(frozen=True)
class ExpertAxis:
    """The devices among which rows are sent. With one, every method leaves things as they are."""

    size: int = 1  # devices

    def swap(self, x: jax.Array) -> jax.Array:
        """[of the device with this number, for me, ...] from [of mine, for the device with this number, ...]."""
        return x if self.size == 1 else lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)

    def max(self, x: jax.Array) -> jax.Array:
        """The largest among them. Not to be differentiated."""
        return x if self.size == 1 else lax.pmax(x, AXIS)


STAYING = ExpertAxis()

# Of a device's memory, for the experts of one layer that all come together; beside them are those of the next layer,
# and their gradients.
MOST_GATHERED = 1 / 8
GATHERED_TIMES, SENT_TIMES = 3, 5  # weights: there, again to go back, gradients; rows: there and back, and x, dy, dx
# Products wait about four times as long for a byte of rows as for one of weights: beside weights some run, and an
# all-to-all has the links of its own axis alone. Compiled (libtpu 0.0.51, 2026-11-25) it is 3.5 times for Mixtral 8x7B,
# expert 8 x fsdp 8 on v5p:4x4x4, and 6 for Qwen3 30B A3B on v6e:8x8, fsdp 64 beside expert 8 x fsdp 8.
SENT_WAITS = 4


class ExpertWork(NamedTuple):
    """What the rule looks at. None: not known."""

    devices: int  # of the axis
    layer_bytes: int  # of all experts of a layer, of a device's part by tensor, as products read them
    row_bytes: int  # of the residual stream of a token
    rows: int | None = None  # tokens of a device at a time, once for each of their experts
    memory_bytes: int | None = None  # of a device


class Exchange(NamedTuple):
    """How tokens and experts meet, and why so."""

    form: str = ""  # "gather" or "send"; "" where the axis has one device
    reason: str = ""

    def __str__(self) -> str:
        words = {"gather": "experts are gathered (gather)", "send": "tokens are sent to their experts (send)"}
        return f"{words[self.form]}: {self.reason}" if self.form else ""


def choose_exchange(wish: str, work: ExpertWork) -> Exchange:
    """The form that `wish` names, or for "auto" the one that products wait less for, if it fits."""
    if work.devices == 1:
        return Exchange()
    if wish != "auto":
        return Exchange(wish, "as expert.exchange says")
    if work.memory_bytes is not None and work.layer_bytes > MOST_GATHERED * work.memory_bytes:
        part, there = f"1/{1 / MOST_GATHERED:g}", size(work.memory_bytes)
        return Exchange("send", f"those of a layer take {size(work.layer_bytes)}, more than {part} of {there}")
    if work.rows is None:
        return Exchange("send", "how many tokens a device has is not known")
    gathered, sent = GATHERED_TIMES * work.layer_bytes, SENT_TIMES * work.rows * work.row_bytes
    form = "gather" if gathered <= SENT_WAITS * sent else "send"
    waits = f"for which products wait {SENT_WAITS} times as long"
    return Exchange(form, f"a layer gathers {size(gathered)}, or sends {size(sent)}, {waits}, a device and microbatch")


def make_expert_axis(mesh: Mesh, exchange: Exchange) -> ExpertAxis:
    """The axis of this mesh where rows are sent; else of one device."""
    return ExpertAxis(mesh.shape[AXIS]) if exchange.form == "send" else STAYING
