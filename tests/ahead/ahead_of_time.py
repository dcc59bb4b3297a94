"""Eight simulated CPU devices as a machine that one compiles for, shared by the tests of preflight and search."""

import dataclasses

import jax

from jaxscale.kernels.hardware import Chip
from jaxscale.tools.planning.topology import Topology

CHIP = Chip(
    "simulated CPU", 1e12, 2**30, 1e11, "made up for tests", ici_bandwidth=1e10, dcn_bandwidth=1e9, host_bytes=2**30
)


def topology(hbm_bytes: int = 2**30) -> Topology:
    """The simulated devices with so much memory each."""
    return Topology(
        "simulated:8", "cpu", dataclasses.replace(CHIP, hbm_bytes=hbm_bytes), jax.devices()[:8], 1, num_hosts=1
    )
