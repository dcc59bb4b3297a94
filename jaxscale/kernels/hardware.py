"""Peak FLOP/s, memory, links and prices of chips, with sources. MFU is reported only for chips in this table.

Peaks are dense bfloat16 FLOP/s without sparsity, or those of float16 matrix units for cards without bfloat16.
"""

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol


class Device(Protocol):
    """Used attributes of jax.Device. Type checkers cannot use jax.Device itself, because jaxlib has no stubs."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    coords: Any  # only TPUs have coords and core_on_chip
    core_on_chip: int

    def memory_stats(self) -> dict[str, int] | None:
        """Returns current and peak bytes in use, if the platform reports them."""


class Price(NamedTuple):
    """On-demand list price per hour of one chip, used as a default."""

    dollars_per_hour: float
    date: str  # date of the list, or when it was read
    source: str


@dataclasses.dataclass(frozen=True)
class Chip:
    """Properties of an accelerator, per JAX device. None means that no source was found."""

    name: str
    peak_flops: float  # dense bfloat16 FLOP/s
    hbm_bytes: int
    hbm_bandwidth: float  # bytes/s
    source: str
    ici_bandwidth: float | None = None  # bytes/s sent by one device over all fast links (ICI, NVLink); one direction
    ici_dims: int = 0  # dimensions of the torus of fast links; 0 for a switch, which connects all pairs
    dcn_bandwidth: float | None = None  # bytes/s sent by one device to other slices (TPU) or hosts (GPU); one direction
    devices_per_host: int = 8
    single_host_devices: int = 0  # size of the largest slice on one host, if above devices_per_host
    host_bytes: int | None = None  # host memory per device, which limits offloading
    int8_flops: float | None = None  # dense; None: no faster than bfloat16, or no source
    fp8_flops: float | None = None
    links_source: str = ""
    fp16_flops: float | None = None  # dense FLOP/s of matrix units; None: no source (TPUs do not support float16)
    fp32_flops: float | None = None  # FLOP/s of vector units, not TF32
    bfloat16: bool = True  # False: the card computes in float16 or float32
    architecture: str = ""  # published MFU is compared only within an architecture
    devices_per_chip: int = 1  # JAX devices per chip, the unit of prices
    watts: float | None = None  # power of one chip or board at full load
    watts_source: str = ""
    price: Price | None = None  # price of one chip
    compute_capability: float | None = None  # NVIDIA GPUs only; source: developer.nvidia.com/cuda-gpus

    def num_hosts(self, num_devices: int) -> int:
        """Returns the number of hosts (VMs) of a TPU slice with num_devices devices, or of full GPU hosts."""
        per_host = self.devices_per_host
        return 1 if num_devices <= max(per_host, self.single_host_devices) else -(-num_devices // per_host)


# Google's pages list "bidirectional" ICI bandwidth, the sum of both directions of all links. One direction has half.
CLOUD = "cloud.google.com/tpu/docs, system architecture page of the version"
TPU7X = "cloud.google.com/tpu/docs/tpu7x (2025), per chip; a JAX device is half a chip"
# Links are those of an 8-card HGX or DGX machine, with an NVLink switch and one network port per GPU. Networks differ
# between clouds. 8-bit peaks are half of the datasheets' figures with sparsity.
BASEPOD = "docs.nvidia.com/dgx-basepod, core components: eight ConnectX-7 ports of 400 Gb/s for eight GPUs"
HOPPER_LINKS = f"nvidia.com Hopper page: NVLink 900 GB/s, both directions; DGX H100 and H200: {BASEPOD}"
AMPERE_LINKS = (
    "glennklockwood.com/garden/processors/A100, which quotes NVIDIA: NVLink 300 GB/s in one direction; DGX A100: a "
    "200 Gb/s ConnectX-6 port per GPU, from memory and not checked"
)
BLACKWELL_LINKS = (
    "docs.nvidia.com/dgx/dgxb200-user-guide: NVLink 14.4 TB/s for eight GPUs, both directions; eight 400 Gb/s "
    "ConnectX-7 ports"
)
# List prices as quoted by these sources. Google's price page shows figures only in a browser.
GOOGLE_PRICE = (
    "on demand in us-central1 (v4: us-central2), from Google's price list as copied by "
    "github.com/skypilot-org/skypilot-catalog: catalogs/v8/gcp/vms.csv at 006059e"
)
GOOGLE_CARD = "the card alone, its machine is billed separately; " + GOOGLE_PRICE
GOOGLE_DATE = "2026-11-22"  # read then
LAMBDA = "lambda.ai/instances, one of 8 GPUs, as transcribed by api-evangelist/lambda-labs"
NEBIUS = "nebius.com/prices, HGX H200, as transcribed by tgarg01/silybench-data"
H100 = Chip(
    "H100 SXM", 989.4e12, 80 * 10**9, 3.35e12, "NVIDIA H100 datasheet",
    ici_bandwidth=450e9, dcn_bandwidth=50e9, int8_flops=1978.9e12, fp8_flops=1978.9e12, links_source=HOPPER_LINKS,
    fp16_flops=989.4e12, fp32_flops=67e12, watts=700.0, architecture="Hopper",
    watts_source="NVIDIA H100 datasheet; arXiv:2407.21783, section 3.3.1", price=Price(3.99, "2026-09-20", LAMBDA),
    compute_capability=9.0,
)  # fmt: skip
A100 = Chip(
    "A100 40GB", 312e12, 40 * 10**9, 1.555e12, "NVIDIA A100 datasheet",
    ici_bandwidth=300e9, dcn_bandwidth=25e9, int8_flops=624e12, links_source=AMPERE_LINKS,
    fp16_flops=312e12, fp32_flops=19.5e12, watts=400.0, watts_source="NVIDIA A100 datasheet", architecture="A100",
    price=Price(1.99, "2026-09-20", LAMBDA), compute_capability=8.0,
)  # fmt: skip
CHIPS = {
    "TPU v3": Chip(
        "TPU v3", 123e12 / 2, 32 * 2**30 // 2, 900e9 / 2, CLOUD + ", per chip; a JAX device is one of its two cores",
        ici_bandwidth=4 * 656e9 / 8 / 2, ici_dims=2,
        links_source="IEEE Micro 41(2), 2021, on TPUv2 and TPUv3: 4 links of 656 Gb/s per direction, from memory and "
        "not checked; no DCN figure found",
        devices_per_chip=2, watts=262.0,
        watts_source="cloud.google.com/tpu/docs/v3: measured min/mean/max 123/220/262 W",
    ),
    "TPU v4": Chip(
        "TPU v4", 275e12, 32 * 2**30, 1.2e12, CLOUD,
        ici_bandwidth=300e9, ici_dims=3, devices_per_host=4, int8_flops=275e12,
        links_source="glennklockwood.com/garden/processors/TPUv4: 6 links, 400 Gb/s per direction; no DCN figure found",
        watts=192.0, watts_source="cloud.google.com/tpu/docs/v4: measured min/mean/max 90/170/192 W",
        price=Price(3.22, GOOGLE_DATE, GOOGLE_PRICE),
    ),
    "TPU v5 lite": Chip(
        "TPU v5e", 197e12, 16 * 2**30, 0.819e12, CLOUD,
        ici_bandwidth=200e9, ici_dims=2, dcn_bandwidth=6.4e12 / 8 / 256, devices_per_host=4,
        single_host_devices=8,  # machine type ct5lp-hightpu-8t
        host_bytes=512 * 2**30 // 8, int8_flops=393e12,
        links_source=CLOUD + ": ICI 400 GB/s both directions, DCN 6.4 Tb/s for 256 chips, 512 GiB for 8 chips",
        price=Price(1.20, GOOGLE_DATE, GOOGLE_PRICE),
    ),
    "TPU v5": Chip(
        "TPU v5p", 459e12, 95 * 2**30, 2.765e12, CLOUD,
        ici_bandwidth=600e9, ici_dims=3, dcn_bandwidth=50e9 / 8, devices_per_host=4,
        host_bytes=448 * 10**9 // 4, int8_flops=918e12, fp8_flops=459e12,
        links_source=CLOUD + ": ICI 1200 GB/s both directions, DCN 50 Gb/s, 448 GB for 4 chips",
        price=Price(4.20, GOOGLE_DATE, GOOGLE_PRICE),
    ),
    "TPU v6 lite": Chip(
        "TPU v6e", 918e12, 32 * 2**30, 1.64e12, CLOUD,
        ici_bandwidth=400e9, ici_dims=2, dcn_bandwidth=100e9 / 8, devices_per_host=4,
        single_host_devices=8,  # machine type ct6e-standard-8t
        host_bytes=720 * 10**9 // 4, int8_flops=1836e12, fp8_flops=918e12,
        links_source=CLOUD + ": ICI 800 GB/s both directions, DCN 100 Gb/s, 720 GB for 4 chips",
        price=Price(2.70, GOOGLE_DATE, GOOGLE_PRICE),
    ),
    "TPU7x": Chip(
        "TPU7x", 2307e12 / 2, 192 * 2**30 // 2, 7.38e12 / 2, TPU7X,
        ici_bandwidth=600e9 / 2, ici_dims=3, dcn_bandwidth=100e9 / 8 / 2, devices_per_host=8,
        host_bytes=960 * 10**9 // 8, fp8_flops=4614e12 / 2,
        links_source=TPU7X + ": ICI 1200 GB/s both directions, DCN 100 Gb/s, 960 GB for 4 chips",
        devices_per_chip=2,
    ),
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H200": dataclasses.replace(
        H100, name="H200 SXM", hbm_bytes=141 * 10**9, hbm_bandwidth=4.8e12, source="NVIDIA H200 datasheet",
        watts_source="NVIDIA H200 datasheet", price=Price(4.50, "2026-09-25", NEBIUS),
    ),
    "NVIDIA B200": Chip(
        "B200 SXM", 2250e12, 180 * 10**9, 8.0e12, "glennklockwood.com/garden/processors/B200, HGX at 1,000 W; 180 GB",
        ici_bandwidth=900e9, dcn_bandwidth=50e9, int8_flops=4500e12, fp8_flops=4500e12, links_source=BLACKWELL_LINKS,
        fp16_flops=2250e12, fp32_flops=80e12, watts=1000.0, watts_source="glennklockwood.com/garden/processors/B200",
        architecture="Blackwell", price=Price(6.69, "2026-09-20", LAMBDA), compute_capability=10.0,
    ),
    "NVIDIA GB200": Chip(
        "GB200", 360e15 / 72 / 2, 186 * 10**9, 8.0e12,
        "NVIDIA GB200 NVL72 page, of 72 GPUs: 360 PFLOPS of bfloat16 with sparsity, 13.4 TB, 576 TB/s",
        ici_bandwidth=900e9, dcn_bandwidth=50e9, devices_per_host=4, fp8_flops=720e15 / 72 / 2,
        links_source="NVLink as B200, counted inside a tray of 4 GPUs only, though it joins the 72 of a rack; one "
        "400 Gb/s port for each GPU: NVIDIA GB200 NVL72 reference architecture, from memory and not checked",
        fp16_flops=360e15 / 72 / 2, fp32_flops=80e12, watts=1200.0,
        watts_source="verda.com/blog/gb300-nvl72-architecture",
        architecture="Blackwell", compute_capability=10.0,
    ),
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": dataclasses.replace(
        A100, name="A100 80GB", hbm_bytes=80 * 10**9, hbm_bandwidth=2.039e12, price=Price(2.79, "2026-09-20", LAMBDA)
    ),
    "Tesla V100-SXM2-16GB": Chip(
        "V100", 125e12, 16 * 10**9, 0.9e12, "NVIDIA V100 datasheet (float16)",
        ici_bandwidth=150e9, links_source="NVIDIA WP-08608-001: NVLink 300 GB/s, both directions; no network figure",
        fp16_flops=125e12, fp32_flops=15.7e12, bfloat16=False, watts=300.0, watts_source="NVIDIA V100 datasheet",
        price=Price(0.79, "2026-09-20", LAMBDA), compute_capability=7.0,
    ),
    "Tesla P100-PCIE-16GB": Chip(
        "P100", 18.7e12, 16 * 10**9, 0.732e12, "NVIDIA P100 PCIe datasheet (float16, without matrix units)",
        fp16_flops=18.7e12, fp32_flops=9.3e12, bfloat16=False, watts=250.0, watts_source="NVIDIA P100 PCIe datasheet",
        compute_capability=6.0,
    ),
    "Tesla T4": Chip(
        "T4", 65e12, 16 * 10**9, 0.32e12, "NVIDIA T4 datasheet (float16)", int8_flops=130e12,
        fp16_flops=65e12, fp32_flops=8.1e12, bfloat16=False, watts=70.0, watts_source="NVIDIA T4 datasheet",
        price=Price(0.35, GOOGLE_DATE, GOOGLE_CARD), compute_capability=7.5,
    ),
    "NVIDIA A10G": Chip(
        "A10G", 70e12, 24 * 10**9, 0.6e12,
        "NVIDIA A10G datasheet, as quoted by baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference",
        fp16_flops=70e12, fp32_flops=35e12, watts=300.0,
        watts_source="gist.github.com/shashankprasanna/10ebe6dc1ba1d8d93db17da4e2cc890e, TDP from nvidia-smi",
        compute_capability=8.6,
    ),
    "NVIDIA L4": Chip(
        "L4", 121e12, 24 * 10**9, 0.3e12, "NVIDIA L4 datasheet", watts=72.0, watts_source="aiwiki.ai/wiki/nvidia_l4",
        price=Price(0.56, GOOGLE_DATE, GOOGLE_CARD), compute_capability=8.9,
    ),
}  # fmt: skip


def find_chip(device_kind: str) -> Chip | None:
    """Returns the entry of CHIPS for a JAX device_kind, or None for an unknown chip."""
    return CHIPS.get(device_kind)


class DtypeChoice(NamedTuple):
    """The compute dtype for a device, with the reason."""

    dtype: str
    reason: str


AMPERE, VOLTA = 8.0, 7.0  # the first compute capabilities with matrix units for bfloat16, and for float16
# Values of --xla_cpu_max_isa, in order. XLA:CPU does not use instruction sets after the given value.
XLA_CPU_ISAS = ("SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX", "AMX_FP16")
MAX_ISA = re.compile(r"--xla_cpu_max_isa=(\w+)")
CPU_BFLOAT16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16"}  # CPU feature in /proc/cpuinfo: instruction set


def choose_compute_dtype(
    device: Device, environ: Mapping[str, str] = os.environ, cpu_features: Collection[str] | None = None
) -> DtypeChoice:
    """Returns bfloat16 if the hardware supports it, else float16 on GPUs with float16 matrix units, else float32.

    device: an attached or ahead-of-time device. cpu_features: features of the CPU; None means those of this machine.
    """
    if device.platform == "tpu":
        return DtypeChoice("bfloat16", "the matrix units of TPUs multiply bfloat16")
    if device.platform == "cpu":
        return cpu_compute_dtype(read_cpu_features() if cpu_features is None else cpu_features, environ)
    capability = compute_capability(device)
    if capability is None:
        return DtypeChoice("float32", f"the compute capability of {device.device_kind!r} is unknown")
    card = f"{device.device_kind}, compute capability {capability:g},"
    if capability >= AMPERE:
        return DtypeChoice("bfloat16", f"{card} has bfloat16 matrix units")
    if capability >= VOLTA:
        return DtypeChoice("float16", f"{card} has float16 matrix units, but none for bfloat16")
    return DtypeChoice("float32", f"{card} has no matrix units")


def cpu_compute_dtype(features: Collection[str], environ: Mapping[str, str]) -> DtypeChoice:
    """Returns bfloat16 if the CPU has AMX-BF16 or AVX512-BF16 and XLA_FLAGS do not exclude it, else float32."""
    found = [name for name in CPU_BFLOAT16 if name in features]
    limits = [name.upper() for name in MAX_ISA.findall(environ.get("XLA_FLAGS", ""))]  # the last flag applies
    allowed = XLA_CPU_ISAS.index(limits[-1]) if limits and limits[-1] in XLA_CPU_ISAS else len(XLA_CPU_ISAS)
    for name in found:
        if XLA_CPU_ISAS.index(CPU_BFLOAT16[name]) <= allowed:
            return DtypeChoice("bfloat16", f"this CPU has {name}")
    if found:
        return DtypeChoice("float32", f"--xla_cpu_max_isa={limits[-1]} in XLA_FLAGS excludes this CPU's {found[-1]}")
    return DtypeChoice("float32", "this CPU has neither amx_bf16 nor avx512_bf16")


def compute_capability(device: Device | None) -> float | None:
    """Returns the compute capability of an NVIDIA GPU, from the device or CHIPS, or None if unknown."""
    if device is None:
        return None
    try:
        return float(getattr(device, "compute_capability", None) or "")
    except ValueError:  # not reported, or from a different vendor, such as gfx90a
        chip = find_chip(device.device_kind)
        return chip.compute_capability if chip else None


def read_cpu_features(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Returns this machine's CPU features from /proc/cpuinfo, or an empty set if unavailable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return frozenset()
    return frozenset(next((text for name, _, text in lines if name.strip() in ("flags", "Features")), "").split())


def host_memory_bytes() -> int:
    """Returns the memory limit of this process in bytes, from the machine or its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total
