"""Options for XLA by platform: a table, every row of which was seen to change a compiled training step.

Much of what is published for TPUs elsewhere is by now the compiler's own default: setting it again compiles the same
program (ON_ALREADY). tests/sharding/test_compiler_options.py compiles with and without each name here.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxscale.hardware import Device
from jaxscale.system.exits import BadInput

Value = bool | int | float | str
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # where people set options for XLA themselves
FLAG = re.compile(r"--(\w+)")


@dataclasses.dataclass(frozen=True)
class Option:
    """A row of the table."""

    devices: tuple[str, ...]  # platforms, "tpu" or "gpu", or device_kinds
    name: str
    value: Value
    does: str
    seen: str  # what changed in a compiled program: chip, versions, date
    formerly: str = ""  # the name that older versions have for it, and XLA_FLAGS still

    @property
    def names(self) -> set[str]:
        """By which one may have set it."""
        return {self.name, self.formerly} - {""}


# Chips with SparseCores, which run collectives beside the TensorCore's products. One that they are not given stands in
# the way of every product: XLA:TPU runs no other gather or scatter of a manual program asynchronously there.
SPARSE_CORES = ("TPU v5", "TPU v6 lite")
SPARSE_CORE = "xla_tpu_enable_sparse_core_collective_offload_"
# With these a gather or scatter over a whole slice is one asynchronous operation: sharding/torus.py.
OFFLOAD = tuple(SPARSE_CORE + what for what in ("all_gather", "reduce_scatter"))
OFFLOAD_TORUS = tuple(SPARSE_CORE + what for what in ("2d_all_gather", "3d_all_gather", "nd_reduce_scatter"))
LATENCY = tuple(f"xla_tpu_sparse_core_{what}_latency_multiplier" for what in ("all_gather", "reduce_scatter"))
# A name that a version does not know ends its compiler.
PIPELINED_GATHER = (
    ("xla_gpu_pipeline_all_gather", "COLLECTIVE_PIPELINING_MODE_ON")
    if jax.__version_info__ >= (0, 11, 1)
    else ("xla_gpu_enable_pipelined_all_gather", True)
)
OPTIMIZATION_LEVEL = "xla_backend_optimization_level"
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
SLICE_FUSION = "xla_gpu_enable_dynamic_slice_fusion"
PIPELINE = ("xla_tpu_enable_ici_ag_pipelining", "xla_tpu_enable_ici_rs_pipelining")

# How the rows of GPUs were seen: a Llama of 4 layers, d 512, zero3 over 8 cards, compiled ahead of time on 2026-11-21
# with jax 0.10.2 and its CUDA 12 plugin, or as said. Of the last row alone the time was measured, on a card.
TABLE = (
    *(
        Option(
            SPARSE_CORES,
            name,
            True,
            "gives gathers and reduce-scatters along one dimension of the torus to the SparseCores",
            "v5p:2x2x4 and v6e:8x8, libtpu 0.0.51, 2026-11-23: start and done of all of them instead of none",
        )
        for name in OFFLOAD
    ),
    *(
        Option(
            SPARSE_CORES,
            name,
            True,
            "the same for those along several dimensions, whose links a gather then uses all at once",
            "v5p:2x2x4, libtpu 0.0.51, 2026-11-23: 3 gathers of 6 rings each for 3 matrices instead of 9 of one each",
        )
        for name in OFFLOAD_TORUS
    ),
    *(
        Option(
            SPARSE_CORES,
            name,
            True,
            "gathers the next layer's parameters, and scatters the last one's gradients, in a loop over layers",
            "v5p:2x2x4, libtpu 0.0.51, 2026-11-23: a layer's products between start and done of every gather of the "
            "forward loop and every scatter of the backward one",
        )
        for name in PIPELINE
    ),
    *(
        Option(
            SPARSE_CORES,
            name,
            4,
            "lets the scheduler take these collectives for 4 times as long, so that it puts more products beside each",
            "7B on v5p:2x2x4, 4 x 4096, libtpu 0.0.51, 2026-11-23: 94.9% of the bytes sent under products that last as "
            "long instead of 70.4%, at the links' published rates; peak 51.4 GiB instead of 51.5",
        )
        for name in LATENCY
    ),
    Option(
        ("TPU v5", "TPU v5 lite"),
        "xla_tpu_scoped_vmem_limit_kib",
        32 * 1024,
        "lets one operation have 32 MiB of the fast memory and not 16: products are taken in larger tiles",
        "a 7B's step by the compiler's estimate, with heads rotated whole, libtpu 0.0.51, 2026-11-23: 3.06 billion "
        "cycles instead of 3.95 on v5p:2x2x4 (4 x 4096 tokens; 3.34 instead of 4.11 with the rows of the SparseCores), "
        "3.48 instead of 4.16 on v5e:8x8 (4 x 2048)",
    ),
    Option(
        ("gpu",),
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "moves the start of a collective up and its end down, so that products run meanwhile",
        "8 A100, with the row below: 8, 11 and 4 operations between start and end of the reduce-scatters instead of "
        "0, 2 and 0; peak memory of this small program 100 MB instead of 73. 8 H100: nothing, for it is on there",
    ),
    Option(
        ("gpu",),
        *PIPELINED_GATHER,
        "gathers the next layer's parameters during this one, in a loop over layers; costs their bytes once more",
        "8 H100: 5 and 20 operations between start and end of the loops' gathers instead of 2 and 2; peak memory 3% "
        "higher",
        formerly="xla_gpu_enable_pipelined_all_gather",
    ),
    Option(
        ("gpu",),
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        1,  # byte of a device's part
        "scatters each matrix's gradient as soon as it is there, not all of a layer's together at its end",
        "7B on 64 H100, 4 microbatches, 2026-11-23: 95.3% of the time on links hidden instead of 78.1%; peak 12.0 GiB "
        "instead of 10.7",
    ),
    Option(
        ("gpu",),
        OVERLAP,
        16,
        "lets so many collectives be between their start and their end at a time: a layer's gathers begin early, and "
        "wait for each other on the network and not each with its product. Only where each layer's come over it",
        "7B on 64 H100, 4 microbatches, jax 0.12.0.1, 2026-11-24: 98.2% of the time on links hidden instead of 58.7% "
        "(79.2% with 8), peak 11.1 GiB instead of 11.2; 70B on 256 A100, tensor 8: 31.7 s at least instead of 37.7, in "
        "32.5 GiB instead of 25.1. Inside a node they delay each other: 68.5% instead of 84.1%",
    ),
    Option(
        ("gpu",),
        SLICE_FUSION,
        False,
        "runs a kernel of experts once where a loop over layers keeps what comes out: else it runs a second time, to "
        "write it into the stack of all layers. Only where it is kept",
        "Mixtral 8x7B of 3 layers, 8 rows of 4,096, remat minimal, one H200, jax 0.11.2, 2026-11-26: 58,621 tokens/s "
        "instead of 52,856; 3 such kernels in the forward loop instead of 5. OLMoE with remat full: 41,923 instead of "
        "42,541",
    ),
)
# On by default: False changes the program (v5e:2x4, libtpu 0.0.42), True does not. Not passed on; told to who looks.
ON_ALREADY = {
    "tpu": (
        "xla_tpu_enable_latency_hiding_scheduler",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_overlap_compute_collective_tc",
    ),
}


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """What a program is compiled with."""

    values: dict[str, Value]  # for jax.jit(compiler_options=...)
    left_out: tuple[str, ...]  # rows of the table that the environment sets already

    @property
    def offloads_torus(self) -> bool:
        """Whether collectives over several dimensions of the torus are one asynchronous operation."""
        return all(self.values.get(name) is True for name in OFFLOAD + OFFLOAD_TORUS)

    def __str__(self) -> str:
        """'a=True, b=2; c as XLA_FLAGS has it', or '' where there is nothing to say."""
        parts = [", ".join(f"{name}={value}" for name, value in self.values.items())]
        parts += [f"{', '.join(self.left_out)} as {' or '.join(VARIABLES)} has it"] if self.left_out else []
        return "; ".join(part for part in parts if part)


def compiler_options(
    platform: str,
    device_kind: str,
    extra: Mapping[str, Value],
    environment: Mapping[str, str],
    *,
    fetch_ahead: bool = True,
    network: bool = False,
    kept_kernels: bool = False,
) -> CompilerOptions:
    """The table's rows for these devices, and `extra` (the config's) over them.

    A row that the environment's XLA_FLAGS or LIBTPU_INIT_ARGS names is left to it: an option given to a program would
    win over them in silence. What `extra` names was asked for by name, and does win. fetch_ahead: whether a layer's
    weights are gathered during the layer before. XLA:TPU ends with a failed check if it shall do so where a layer of
    the loop takes one of two ways as it runs, or loops itself (Gemma 3 on v5p:2x2x2, a ring of keys and values on
    v5p:4x4x4, libtpu 0.0.51, 2026-11-24); and a layer's experts are much memory to have twice, with products long
    enough to hide the gather of the next ones (docs/explanation/mixtures.md has both ways compiled).
    network: whether each layer's weights are gathered over that between nodes. kept_kernels: whether what experts'
    kernels give is kept for the backward pass.
    """
    set_already = {name for variable in VARIABLES for name in FLAG.findall(environment.get(variable, ""))}
    wanted = ((fetch_ahead, PIPELINE), (network, (OVERLAP,)), (kept_kernels, (SLICE_FUSION,)))
    unfit = [name for fits, names in wanted if not fits for name in names]
    rows = [row for row in TABLE if {platform, device_kind} & set(row.devices) and not row.names & {*extra, *unfit}]
    return CompilerOptions(
        values={row.name: row.value for row in rows if not row.names & set_already} | dict(extra),
        left_out=tuple(name for row in rows for name in sorted(row.names & set_already)),
    )


def options_of_rare_programs(platform: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """For jax.jit(compiler_options=...) of a program that runs once, or once in many steps: it compiles sooner.

    LLVM's last level of optimisation took 8 of the 11 CPU seconds in which the quick start's parameters were compiled,
    to the same bits (jax 0.10.2, AMD Zen 3, 2026-11-27). One that XLA_FLAGS set stays.
    """
    is_set = OPTIMIZATION_LEVEL in FLAG.findall(environment.get("XLA_FLAGS", ""))
    return {OPTIMIZATION_LEVEL: 2} if platform == "cpu" and not is_set else {}


def check_options(extra: Mapping[str, Value], device: Device) -> None:
    """Raises BadInput where XLA for this device refuses one: asked of it with a program of one scalar."""
    for name, value in extra.items():
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
        try:
            jax.jit(jnp.negative, compiler_options={name: value}).lower(scalar).compile()
        except jax.errors.JaxRuntimeError as error:
            told = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
            raise BadInput(f"compiler.{name}={value}: XLA for {device.platform} refuses it: {told}") from None
