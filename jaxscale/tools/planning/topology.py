"""Devices of TPU slices and GPU hosts by name, for compilation without the real devices.

v5p:4x4x8      a TPU slice by shape               v5p-256        by TensorCores (two per chip on v2 to v5p, TPU7x)
v5litepod-256  a slice by chips (v5e, v6e)        2*v6e:16x16    two slices
h100:32x8      32 hosts with 8 GPUs each          h100:8         one host
"""

import contextlib
import dataclasses
import difflib
import itertools
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxscale.kernels.collectives import wraps
from jaxscale.kernels.hardware import CHIPS, Chip
from jaxscale.system import packages
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class ChipFamily:
    """Chips with the same name in topologies."""

    device_kind: str
    dims: int  # number of torus dimensions of a slice; 0 for GPUs
    cores: int = 1  # TensorCores per chip, for names that count TensorCores
    max_chips: int = 0  # chips in the largest slice


# Largest slices: cloud.google.com/tpu/docs, page of each version (v5p: largest job; TPU7x: pod).
FAMILIES = {
    "v4": ChipFamily("TPU v4", 3, 2, 4096),
    "v5e": ChipFamily("TPU v5 lite", 2, 1, 256),
    "v5p": ChipFamily("TPU v5", 3, 2, 6144),
    "v6e": ChipFamily("TPU v6 lite", 2, 1, 256),
    "tpu7x": ChipFamily("TPU7x", 3, 2, 9216),
    "h100": ChipFamily("NVIDIA H100 80GB HBM3", 0),
    "h200": ChipFamily("NVIDIA H200", 0),
    "a100-40gb": ChipFamily("NVIDIA A100-SXM4-40GB", 0),
    "a100-80gb": ChipFamily("NVIDIA A100-SXM4-80GB", 0),
}
# Chips that can be planned for but not compiled for.
PLANNED_ONLY = {
    "v3": ChipFamily("TPU v3", 2, 2, 1024),
    "gb200": ChipFamily("NVIDIA GB200", 0),
    "b200": ChipFamily("NVIDIA B200", 0),
    "a10g": ChipFamily("NVIDIA A10G", 0),
    "p100": ChipFamily("Tesla P100-PCIE-16GB", 0),
    "v100": ChipFamily("Tesla V100-SXM2-16GB", 0),
    "t4": ChipFamily("Tesla T4", 0),
    "l4": ChipFamily("NVIDIA L4", 0),
}
PLANNED = FAMILIES | PLANNED_ONLY
ALIASES = {
    "v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e", "ironwood": "tpu7x", "v7x": "tpu7x", "a100": "a100-80gb",
}  # fmt: skip
MAX_CHIPS = 65_536  # in all slices; the published maximum is 50,944 in 199 v5e slices (Google Cloud blog, Nov. 2023)
MAX_HOSTS = 4096  # larger than any rented cluster of these GPUs; more is probably a typing error

# 2D shapes, and 3D shapes smaller than a 4x4x4 cube: tables of supported configurations on the pages above.
SHAPES_2D = [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
SHAPES_UNDER_A_CUBE = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
KIB = 1024
# GPU properties that only the compiler needs, with XLA's names; memory and bandwidth are in hardware.CHIPS. Sources:
# architecture whitepapers (cores, fpus, L2, boost clock), and the table of technical specifications by compute
# capability in the CUDA C++ Programming Guide (shared memory). The compiled programs were not compared with a real GPU.
HOPPER = dict(
    cuda_compute_capability="{ major: 9 minor: 0 }", core_count=132, fpus_per_core=128, clock_rate_ghz=1.98,
    l2_cache_size=50 * KIB * KIB, shared_memory_per_core=228 * KIB, shared_memory_per_block_optin=227 * KIB,
)  # fmt: skip
AMPERE = dict(
    cuda_compute_capability="{ major: 8 minor: 0 }", core_count=108, fpus_per_core=64, clock_rate_ghz=1.41,
    l2_cache_size=40 * KIB * KIB, shared_memory_per_core=164 * KIB, shared_memory_per_block_optin=163 * KIB,
)  # fmt: skip
CARDS = {
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA H200": HOPPER,
    "NVIDIA A100-SXM4-40GB": AMPERE,
    "NVIDIA A100-SXM4-80GB": AMPERE,
}
# Target cuDNN and CUDA versions, the lowest that the cuda12 wheels of jax 0.10 support.
CUDNN, CUDA = (9, 7), (12, 8)


@dataclasses.dataclass(frozen=True)
class TopologyName:
    """A parsed topology name. `shape` is the shape of a TPU slice in chips, or (hosts, GPUs per host)."""

    family: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def platform(self) -> str:
        """JAX platform, 'tpu' or 'gpu'."""
        return "tpu" if PLANNED[self.family].dims else "gpu"

    def __str__(self) -> str:
        slices = f"{self.num_slices}*" if self.num_slices > 1 else ""
        return f"{slices}{self.family}:{'x'.join(map(str, self.shape))}"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to plan or compile for."""

    name: str  # canonical name
    platform: str  # 'tpu' or 'gpu'
    chip: Chip
    devices: list[Any]
    num_slices: int
    num_hosts: int


def open_topology(text: str) -> Topology:
    """Returns the topology with this name. Raises BadInput for an invalid name or a missing compiler."""
    name = parse_topology(text)
    try:
        devices = tpu_devices(name) if name.platform == "tpu" else gpu_devices(name)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"topology {text!r}: the compiler does not support {name} ({line})") from error
    chip = CHIPS[devices[0].device_kind]
    hosts = len({device.process_index for device in devices})
    return Topology(str(name), name.platform, chip, devices, name.num_slices, hosts)


def tpu_devices(name: TopologyName) -> list[Any]:
    """Returns the devices of a TPU topology from libtpu's compiler, without a TPU or metadata server."""
    if not packages.is_installed("libtpu") and "TPU_LIBRARY_PATH" not in os.environ:
        raise BadInput(f"{name} needs the compiler in libtpu, which is not installed: pip install 'jaxscale[tpu]'")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # otherwise a second process waits for a lock file
    closed = [wraps(FAMILIES[name.family].dims, name.shape, size) for size in name.shape]
    options: dict[str, Any] = {"wrap": (*closed, *[False] * (3 - len(closed)))}  # libtpu's default has no wraparound
    if name.num_slices > 1:
        options["num_slices"] = name.num_slices
    if name.family == "v4":
        options["chip_config_name"] = "megacore"  # one device per chip, as in Cloud TPU's runtime
    chip = CHIPS[FAMILIES[name.family].device_kind]
    if chip.num_hosts(math.prod(name.shape) * chip.devices_per_chip) == 1:
        options["chips_per_host_bounds"] = (*name.shape, 1)[:3]  # libtpu's default is hosts of 2x2
    layout = f"{name.family}:{'x'.join(map(str, name.shape))}"
    with quiet_stderr():  # libtpu warns twice that no TPU is attached
        return topologies.get_topology_desc(platform="tpu", topology_name=layout, **options).devices


def gpu_devices(name: TopologyName) -> list[Any]:
    """Returns the devices of GPU hosts from the CUDA plugin's compiler."""
    if not any(packages.is_installed(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise BadInput(
            f"{name} needs the compiler in jax's CUDA plugin, which is not installed: pip install 'jaxscale[cuda12]'"
        )
    if jax.config.jax_platforms != "cpu":  # pyright: ignore[reportAttributeAccessIssue]  jax sets it at import
        raise BadInput(f"to compile for {name}, JAX must use only the CPU; set JAX_PLATFORMS=cpu")
    hosts, cards = name.shape
    target = target_config(FAMILIES[name.family].device_kind)
    layout = f"{name.num_slices}x{hosts}x{cards}"
    with quiet_stderr():
        return topologies.get_topology_desc(platform="cuda", topology=layout, target_config=target).devices


def target_config(device_kind: str) -> str:
    """Returns XLA's target config of a GPU as a text proto. device_kind: a key of CARDS."""
    chip = CHIPS[device_kind]
    card = CARDS[device_kind] | dict(
        threads_per_block_limit=1024, threads_per_warp=32, threads_per_core_limit=2048, block_dim_limit_x=2**31 - 1,
        block_dim_limit_y=65535, block_dim_limit_z=65535, registers_per_core_limit=65536,
        registers_per_block_limit=65536, shared_memory_per_block=48 * KIB, memory_bandwidth=int(chip.hbm_bandwidth),
        device_memory_size=chip.hbm_bytes,
    )  # fmt: skip
    figures = "\n".join(f"  {name}: {value}" for name, value in card.items())
    return f"""\
gpu_device_info {{
{figures}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
runtime_version {{ major: {CUDA[0]} minor: {CUDA[1]} patch: 0 }}
device_description_str: "{device_kind}"
"""


def link_domains(devices: Sequence[Any]) -> list[int]:
    """Returns the index of each device's domain of fast links: the slice (ICI) on TPU, the host (NVLink) on GPU."""
    if devices[0].platform == "tpu":
        return [getattr(device, "slice_index", None) or 0 for device in devices]
    return [device.process_index for device in devices]


def parse_topology(text: str, *, planned: bool = False) -> TopologyName:
    """Returns the parsed name. Raises BadInput with the nearest valid name. planned: allow PLANNED_ONLY chips."""
    number = r"\d{1,9}"
    form = rf"(?:({number})\*)?([a-z][a-z0-9]*(?:-\d+gb)?)(?:([:-])({number}(?:x{number})*))?"
    match = re.fullmatch(form, text.strip().lower())
    if not match:
        raise BadInput(
            f"topology {text[:80]!r} must be a chip and a shape; write v5p:4x4x8, v5p-256, 2*v6e:16x16 or h100:32x8"
        )
    slices, chip, mark, sizes = match.groups()
    num_slices = int(slices or 1)
    family = ALIASES.get(chip, chip)
    if family not in (PLANNED if planned else FAMILIES):
        known = sorted({*FAMILIES, *ALIASES})
        close = difflib.get_close_matches(chip, known, n=1, cutoff=0.4)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        more = f"; jaxscale plan also supports {', '.join(PLANNED_ONLY)}" if planned else ""
        raise BadInput(f"topology {text!r}: unknown chip {chip!r}{meant}; use one of {', '.join(known)}{more}")
    if num_slices < 1:
        raise BadInput(f"topology {text!r}: the number of slices must be at least 1; write {text.split('*')[1]}")
    if not sizes:
        shapes = {0: [(1, 8), (8, 8)], 2: [(4, 4), (16, 16)], 3: [(2, 2, 4), (4, 4, 8)]}[PLANNED[family].dims]
        examples = ", ".join(str(TopologyName(family, shape)) for shape in shapes)
        raise BadInput(f"topology {text!r} has no shape; write {examples}")
    shape = tuple(int(size) for size in sizes.split("x"))
    if PLANNED[family].dims == 0:
        hosts, cards = gpu_shape(text, family, shape, counted=mark == "-")
        if num_slices > 1:
            whole = TopologyName(family, (min(MAX_HOSTS, num_slices * hosts), cards))
            raise BadInput(f"topology {text!r}: only TPU topologies can have several slices; write {whole}")
        return TopologyName(family, (hosts, cards))
    shape = counted_shape(text, family, shape) if mark == "-" else checked_shape(text, family, shape)
    if num_slices * math.prod(shape) > MAX_CHIPS:
        most = TopologyName(family, shape, MAX_CHIPS // math.prod(shape))
        raise BadInput(f"topology {text!r}: a job can have at most {MAX_CHIPS:,} chips; write {most}")
    return TopologyName(family, shape, num_slices)


def gpu_shape(text: str, family: str, shape: tuple[int, ...], *, counted: bool) -> tuple[int, int]:
    """Returns (hosts, GPUs per host) of a GPU topology."""
    most = CHIPS[PLANNED[family].device_kind].devices_per_host
    if counted or len(shape) > 2:
        total = math.prod(shape)
        hosts = min(MAX_HOSTS, max(1, round(total / most)))
        nearest = TopologyName(family, (hosts, min(total, most)))
        raise BadInput(f"topology {text!r}: the shape of a GPU topology is hosts x GPUs per host; write {nearest}")
    ends = list(shape)
    hosts, cards = math.prod(ends[:-1]), ends[-1]
    if not (1 <= cards <= most and 1 <= hosts <= MAX_HOSTS):
        total = max(1, math.prod(shape))
        fit = (min(MAX_HOSTS, -(-total // most)), min(total, most))
        raise BadInput(
            f"topology {text!r}: a host has 1 to {most} GPUs, and a job has at most {MAX_HOSTS} hosts; "
            f"write {TopologyName(family, fit)}"
        )
    return hosts, cards


def counted_shape(text: str, family: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the usual shape of a slice. shape: (number of chips,), or of TensorCores if a chip has two."""
    (count, *more), cores = shape, PLANNED[family].cores
    unit = "TensorCores" if cores > 1 else "chips"
    if more:
        raise BadInput(f"topology {text!r}: '-' must precede a number of {unit}; write {text.replace('-', ':')}")
    # legal_shapes lists the most cubic shape of each size first; in reversed order, the dict saves this shape
    shapes = {math.prod(known): known for known in reversed(legal_shapes(family))}
    if count % cores or count // cores not in shapes:
        nearest = min(shapes, key=lambda chips: (abs(math.log(max(count, 1) / cores / chips)), chips))
        raise BadInput(
            f"topology {text!r}: no {family} slice has {count} {unit}; the nearest is {family}-{nearest * cores} "
            f"({TopologyName(family, shapes[nearest])})"
        )
    return shapes[count // cores]


def checked_shape(text: str, family: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape. Raises BadInput if no slice has this shape."""
    ordered = tuple(sorted(shape))
    legal = {tuple(sorted(known)): known for known in legal_shapes(family)}
    if ordered in legal:
        return shape
    chips = max(1, math.prod(shape))
    padded = (ordered + (1,) * 3)[: PLANNED[family].dims]
    distance = lambda known: sum(abs(math.log(max(a, 1) / b)) for a, b in zip(sorted(padded), sorted(known)))
    nearest = min(legal.values(), key=lambda known: (abs(math.log(chips / math.prod(known))), distance(known)))
    rule = "x".join("ABC"[: PLANNED[family].dims])
    raise BadInput(
        f"topology {text!r}: no {family} slice has this shape (must be {rule} with at most {PLANNED[family].max_chips} "
        f"chips); the nearest is {TopologyName(family, nearest)} ({math.prod(nearest)} chips)"
    )


def legal_shapes(family: str) -> list[tuple[int, ...]]:
    """Returns all slice shapes of a family by increasing size. Of equal sizes, the most cubic shape is first."""
    dims, most = PLANNED[family].dims, PLANNED[family].max_chips
    if family == "v3":
        return [(2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)]
    if dims == 2:
        return SHAPES_2D
    sides = range(4, most // 16 + 1, 4)  # whole cubes of 4x4x4
    pairs = ((a, b) for a, b in itertools.product(sides, sides) if a <= b and a * b * b <= most)
    cubes = [(a, b, c) for a, b in pairs for c in range(b, most // (a * b) + 1, 4)]
    one = [(1, 1, 1)] if family == "tpu7x" else []
    return one + SHAPES_UNDER_A_CUBE + sorted(cubes, key=lambda shape: (math.prod(shape), shape[::-1]))


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Captures stderr of native code, and prints it if the block raises an exception."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(stderr_copy, 2)
            captured.seek(0)
            os.write(2, captured.read())
            raise
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
