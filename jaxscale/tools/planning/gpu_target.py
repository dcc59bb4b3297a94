"""GpuTargetConfigProto texts, which describe GPUs to XLA's compiler without an attached card."""

import dataclasses

from jaxscale.kernels.hardware import CHIPS

KIB = 1024


@dataclasses.dataclass(frozen=True)
class Card:
    """GPU figures that only its compiler needs; memory and bandwidth are in hardware.CHIPS."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    float32_units: int  # of one multiprocessor
    clock_ghz: float  # boost
    l2_bytes: int
    shared_bytes: int  # of one multiprocessor
    shared_bytes_of_block: int  # maximum per block


# The architecture whitepapers (multiprocessors, units, L2, clock), and the table of technical specifications by compute
# capability in the CUDA C++ Programming Guide (shared memory). Programs compiled so were not compared with a real card.
HOPPER = Card((9, 0), 132, 128, 1.98, 50 * KIB * KIB, 228 * KIB, 227 * KIB)
AMPERE = Card((8, 0), 108, 64, 1.41, 40 * KIB * KIB, 164 * KIB, 163 * KIB)
CARDS = {
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA H200": HOPPER,
    "NVIDIA A100-SXM4-40GB": AMPERE,
    "NVIDIA A100-SXM4-80GB": AMPERE,
}
# Target cuDNN and CUDA; jax 0.10's cuda12 wheels require at least these.
CUDNN, CUDA = (9, 7), (12, 8)


def target_config(device_kind: str) -> str:
    """Returns the text proto of one card of this kind, which must be in CARDS."""
    card, chip = CARDS[device_kind], CHIPS[device_kind]
    major, minor = card.compute_capability
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {card.shared_bytes}
  threads_per_core_limit: 2048
  core_count: {card.multiprocessors}
  fpus_per_core: {card.float32_units}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.hbm_bandwidth)}
  l2_cache_size: {card.l2_bytes}
  clock_rate_ghz: {card.clock_ghz}
  device_memory_size: {chip.hbm_bytes}
  shared_memory_per_block_optin: {card.shared_bytes_of_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
runtime_version {{ major: {CUDA[0]} minor: {CUDA[1]} patch: 0 }}
device_description_str: "{device_kind}"
"""
