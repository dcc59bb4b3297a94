"""The sums that one does on paper, done right: state of a model by bytes per parameter, batches, GPU-days.

tools.planning.plan.make_plan() counts the state from its shardings instead. These check figures that are often said.
"""

from typing import NamedTuple

from jaxscale.tools.planning.cost import DAY


class BytesPerParam(NamedTuple):
    """What one parameter takes while it is trained."""

    weights: float
    grads: float
    master: float  # a float32 copy of weights that are shorter
    moments: float

    @property
    def optimizer(self) -> float:
        """Master copy and moments: 12 with one, 8 without."""
        return self.master + self.moments


MIXED = BytesPerParam(2, 2, 4, 8)  # bfloat16 weights and gradients, Adam in float32 over a float32 copy
FLOAT32 = BytesPerParam(4, 4, 0, 8)  # what jaxscale keeps: float32 all through, computed in bfloat16
NO_MASTER = BytesPerParam(2, 2, 0, 8)


def state_bytes(params: float, sizes: BytesPerParam = MIXED) -> float:
    """All of it, on all devices together, each once."""
    return params * sum(sizes)


def bytes_of_device(
    params: float,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    zero_stage: int = 0,
    zero_devices: int = 1,
    sizes: BytesPerParam = MIXED,
) -> float:
    """State of one device. Tensor and pipeline split all; ZeRO-1 splits the optimizer over its devices, ZeRO-2 the
    gradients too, ZeRO-3 the weights too (arXiv:1910.02054)."""
    share = lambda stage: zero_devices if zero_stage >= stage else 1
    of_param = sizes.optimizer / share(1) + sizes.grads / share(2) + sizes.weights / share(3)
    return params / (tensor * pipeline) * of_param


def devices_for(num_bytes: float, device_bytes: float) -> int:
    """Devices that so many bytes fill, with nothing left for activations."""
    return int(-(-num_bytes // device_bytes))


def device_days(flops: float, peak_flops: float, mfu: float) -> float:
    """Days of one device."""
    return flops / (peak_flops * mfu) / DAY
