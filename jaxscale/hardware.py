"""What a chip can do, each row with its source. MFU is always against a row of this table, or it is not shown.

Peaks are dense bfloat16 (sparsity never counted); for cards without bfloat16, float16 matrix units.
"""

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator as JAX names it (`device.device_kind`)."""

    name: str
    peak_flops: float  # dense bfloat16 FLOP/s of one JAX device
    hbm_bytes: int
    hbm_bandwidth: float  # bytes/s
    source: str


CLOUD = "cloud.google.com/tpu/docs, system architecture page of the version"
CHIPS = {
    "TPU v4": Chip("TPU v4", 275e12, 32 * 2**30, 1.2e12, CLOUD),
    "TPU v5 lite": Chip("TPU v5e", 197e12, 16 * 2**30, 0.819e12, CLOUD),
    "TPU v5": Chip("TPU v5p", 459e12, 95 * 2**30, 2.765e12, CLOUD),
    "TPU v6 lite": Chip("TPU v6e", 918e12, 32 * 2**30, 1.64e12, CLOUD),
    "NVIDIA H100 80GB HBM3": Chip("H100 SXM", 989.4e12, 80 * 10**9, 3.35e12, "NVIDIA H100 datasheet"),
    "NVIDIA H200": Chip("H200 SXM", 989.4e12, 141 * 10**9, 4.8e12, "NVIDIA H200 datasheet"),
    "NVIDIA A100-SXM4-40GB": Chip("A100 40GB", 312e12, 40 * 10**9, 1.555e12, "NVIDIA A100 datasheet"),
    "NVIDIA A100-SXM4-80GB": Chip("A100 80GB", 312e12, 80 * 10**9, 2.039e12, "NVIDIA A100 datasheet"),
    "Tesla V100-SXM2-16GB": Chip("V100", 125e12, 16 * 10**9, 0.9e12, "NVIDIA V100 datasheet (float16)"),
    "Tesla T4": Chip("T4", 65e12, 16 * 10**9, 0.32e12, "NVIDIA T4 datasheet (float16)"),
    "NVIDIA L4": Chip("L4", 121e12, 24 * 10**9, 0.3e12, "NVIDIA L4 datasheet"),
}


def find_chip(device_kind: str) -> Chip | None:
    """The table's row for JAX's device_kind, or None when the chip is unknown: then nothing is assumed."""
    return CHIPS.get(device_kind)


def host_memory_bytes() -> int:
    """Memory this process may use: the machine's, or the container's limit where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
