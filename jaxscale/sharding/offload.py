"""Arrays that live in the host's memory between steps: how they are placed there, and how a step reads them."""

from typing import Any

import jax
from jax.sharding import Mesh

HOST = "pinned_host"  # JAX's name for memory of the host that a device copies to and from by itself


def check_host_memory(setting: str, mesh: Mesh) -> None:
    """Raises ValueError naming the setting if the devices of the mesh do not reach the host's memory.

    GPUs that are compiled for and not there list no memory, and jax 0.10.2 takes all their arrays for the device's.
    """
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
        raise ValueError(
            f"{setting} needs devices that reach {HOST} memory, and {device.device_kind} has "
            f"{', '.join(kinds) or 'none that can be compiled for ahead'}; leave it out here"
        )


def on_host(shardings: Any) -> Any:
    """The same shardings in the host's memory, but for scalars."""
    return jax.tree.map(lambda place: place.with_memory_kind(HOST) if len(place.spec) else place, shardings)
