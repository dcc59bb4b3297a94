"""Compiler options per platform that change a compiled training step.

Many published recommendations for TPUs are now defaults of the compiler, so setting them does not change the program
(ON_BY_DEFAULT). tests/sharding/test_compiler_options.py compiles with and without each option of TABLE.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxscale.kernels.config import XLA_VARIABLES, CompilerOptions
from jaxscale.kernels.hardware import Device
from jaxscale.system.exits import BadInput

Value = bool | int | float | str
FLAG = re.compile(r"--(\w+)")


@dataclasses.dataclass(frozen=True)
class Option:
    """A compiler option for some devices, with its effect and evidence."""

    devices: tuple[str, ...]  # platforms ("tpu", "gpu") or device kinds
    name: str
    value: Value
    effect: str
    evidence: str  # change of a compiled program, with chip, versions and date
    old_name: str = ""  # name in older versions, and still in XLA_FLAGS

    @property
    def names(self) -> set[str]:
        """Current and old name. The environment may set either of them."""
        return {self.name, self.old_name} - {""}


# Chips with SparseCores, which run collectives concurrently with matmuls on the TensorCore. On these chips, XLA:TPU
# runs gathers and scatters inside shard_map asynchronously only if they are offloaded. Others block matmuls.
SPARSE_CORES = ("TPU v5", "TPU v6 lite")
SPARSE_CORE = "xla_tpu_enable_sparse_core_collective_offload_"
# With OFFLOAD_TORUS a gather or scatter over a whole slice is one asynchronous operation (kernels/collectives.py).
OFFLOAD = tuple(SPARSE_CORE + what for what in ("all_gather", "reduce_scatter"))
OFFLOAD_TORUS = tuple(SPARSE_CORE + what for what in ("2d_all_gather", "3d_all_gather", "nd_reduce_scatter"))
LATENCY = tuple(f"xla_tpu_sparse_core_{what}_latency_multiplier" for what in ("all_gather", "reduce_scatter"))
# The name depends on the version, and the compiler aborts on an unknown name.
PIPELINED_GATHER = (
    ("xla_gpu_pipeline_all_gather", "COLLECTIVE_PIPELINING_MODE_ON")
    if jax.__version_info__ >= (0, 11, 1)
    else ("xla_gpu_enable_pipelined_all_gather", True)
)
OPTIMIZATION_LEVEL = "xla_backend_optimization_level"
OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
SLICE_FUSION = "xla_gpu_enable_dynamic_slice_fusion"
PIPELINE = ("xla_tpu_enable_ici_ag_pipelining", "xla_tpu_enable_ici_rs_pipelining")

# Unless stated otherwise, evidence for GPU options is from a Llama of 4 layers, embed_dim 512, zero3 over 8 GPUs,
# compiled ahead of time on 2026-11-21 with jax 0.10.2 and its CUDA 12 plugin. Only the last option was timed on a GPU.
TABLE = (
    *(
        Option(
            SPARSE_CORES,
            name,
            True,
            "offloads all-gathers and reduce-scatters along one torus dimension to the SparseCores",
            "v5p:2x2x4 and v6e:8x8, libtpu 0.0.51, 2026-11-23: all have separate start and done instead of none",
        )
        for name in OFFLOAD
    ),
    *(
        Option(
            SPARSE_CORES,
            name,
            True,
            "offloads collectives along several torus dimensions, so that a gather uses all their links at once",
            "v5p:2x2x4, libtpu 0.0.51, 2026-11-23: 3 gathers of 6 rings each for 3 matrices instead of 9 of one ring",
        )
        for name in OFFLOAD_TORUS
    ),
    *(
        Option(
            SPARSE_CORES,
            name,
            True,
            "gathers the next layer's parameters and scatters the previous layer's gradients in a loop over layers",
            "v5p:2x2x4, libtpu 0.0.51, 2026-11-23: a layer's matmuls are between start and done of every gather of the "
            "forward loop and every scatter of the backward loop",
        )
        for name in PIPELINE
    ),
    *(
        Option(
            SPARSE_CORES,
            name,
            4,
            "makes the scheduler assume 4 times the latency of collectives, so that it overlaps more matmuls with them",
            "7B on v5p:2x2x4, 4 x 4096, libtpu 0.0.51, 2026-11-23: 94.9% of bytes are sent during matmuls that take as "
            "long instead of 70.4%, at published link bandwidths; peak 51.4 GiB instead of 51.5",
        )
        for name in LATENCY
    ),
    Option(
        ("TPU v5", "TPU v5 lite"),
        "xla_tpu_scoped_vmem_limit_kib",
        32 * 1024,
        "raises the VMEM limit of an operation from 16 to 32 MiB, which allows larger tiles",
        "step of a 7B by the compiler's estimate, with RoPE on whole heads, libtpu 0.0.51, 2026-11-23: 3.06 billion "
        "cycles instead of 3.95 on v5p:2x2x4 (4 x 4096 tokens; 3.34 instead of 4.11 with SparseCore options), "
        "3.48 instead of 4.16 on v5e:8x8 (4 x 2048)",
    ),
    Option(
        ("gpu",),
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "starts collectives earlier and ends them later, so that they overlap with matmuls",
        "8 A100, with the next option: 8, 11 and 4 operations between start and end of reduce-scatters instead of "
        "0, 2 and 0; peak memory of this small program 100 MB instead of 73. 8 H100: no change, already on by default",
    ),
    Option(
        ("gpu",),
        *PIPELINED_GATHER,
        "gathers the next layer's parameters during a layer, in a loop over layers; needs memory for two layers",
        "8 H100: 5 and 20 operations between start and end of gathers in the loops instead of 2 and 2; peak memory 3% "
        "higher",
        old_name="xla_gpu_enable_pipelined_all_gather",
    ),
    Option(
        ("gpu",),
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        1,  # byte per shard
        "scatters each gradient as soon as it is computed, instead of all gradients of a layer at the end",
        "7B on 64 H100, 4 microbatches, 2026-11-23: 95.3% of the communication time hidden instead of 78.1%; peak 12.0 "
        "GiB instead of 10.7",
    ),
    Option(
        ("gpu",),
        OVERLAP,
        16,
        "allows 16 collectives in flight, so that gathers of a layer start early and queue on the network, instead of "
        "each waiting for its matmul. Set only if each layer is gathered over the network",
        "7B on 64 H100, 4 microbatches, jax 0.12.0.1, 2026-11-24: 98.2% of the communication time hidden instead of "
        "58.7% (79.2% with 8), peak 11.1 GiB instead of 11.2; 70B on 256 A100, tensor 8: at least 31.7 s instead of "
        "37.7, with 32.5 GiB instead of 25.1. Within a node, collectives delay each other: 68.5% instead of 84.1%",
    ),
    Option(
        ("gpu",),
        SLICE_FUSION,
        False,
        "runs an expert kernel once if a loop over layers saves its output. Without the option it runs a second time "
        "to write the output into the stack of all layers. Set only if outputs are saved",
        "Mixtral 8x7B with 3 layers, 8 rows of 4,096, remat minimal, one H200, jax 0.11.2, 2026-11-26: 58,621 tokens/s "
        "instead of 52,856; 3 expert kernels in the forward loop instead of 5. OLMoE with remat full: 41,923 tokens/s "
        "instead of 42,541",
    ),
)
# Options for which False changes the program and True does not (v5e:2x4, libtpu 0.0.42). Not passed to the compiler.
ON_BY_DEFAULT = {
    "tpu": (
        "xla_tpu_enable_latency_hiding_scheduler",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_overlap_compute_collective_tc",
    ),
}


def compiler_options(
    platform: str,
    device_kind: str,
    extra: Mapping[str, Value],
    environment: Mapping[str, str],
    *,
    prefetch_weights: bool = True,
    over_network: bool = False,
    saves_expert_outputs: bool = False,
) -> CompilerOptions:
    """Returns the compiler options in TABLE for these devices, overridden by `extra`, the options in the config.

    Options set in XLA_FLAGS or LIBTPU_INIT_ARGS are omitted, because compiler options would silently override these
    variables. Options in `extra` do override the variables, because the user sets them explicitly.

    prefetch_weights: whether to gather a layer's weights during the previous layer. XLA:TPU then fails a check if the
    layer contains a conditional or a loop (Gemma 3 on v5p:2x2x2, ring attention on v5p:4x4x4, libtpu 0.0.51,
    2026-11-24). Experts are not prefetched, because a second copy of a layer's experts is large, and their matmuls are
    long enough to hide the next gather (docs/explanation/mixtures.md compares compiled programs). over_network: whether
    each layer's weights are gathered over the network between nodes. saves_expert_outputs: whether outputs of expert
    kernels are saved for the backward pass.
    """
    set_already = {name for variable in XLA_VARIABLES for name in FLAG.findall(environment.get(variable, ""))}
    conditional = ((prefetch_weights, PIPELINE), (over_network, (OVERLAP,)), (saves_expert_outputs, (SLICE_FUSION,)))
    excluded = [name for applies, names in conditional if not applies for name in names]
    rows = [row for row in TABLE if {platform, device_kind} & set(row.devices) and not row.names & {*extra, *excluded}]
    values = {row.name: row.value for row in rows if not row.names & set_already} | dict(extra)
    return CompilerOptions(
        values,
        set_by_environment=tuple(name for row in rows for name in sorted(row.names & set_already)),
        offloads_torus=all(values.get(name) is True for name in OFFLOAD + OFFLOAD_TORUS),
    )


def fast_compile_options(platform: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns compiler_options for jax.jit that reduce the compile time of programs that run rarely.

    Compiling the quick start's initialization took 11 CPU seconds, 8 of them for LLVM's highest optimization level.
    Results are bitwise equal (jax 0.10.2, AMD Zen 3, 2026-11-27). A level set in XLA_FLAGS is not changed.
    """
    is_set = OPTIMIZATION_LEVEL in FLAG.findall(environment.get("XLA_FLAGS", ""))
    return {OPTIMIZATION_LEVEL: 2} if platform == "cpu" and not is_set else {}


def check_options(extra: Mapping[str, Value], device: Device) -> None:
    """Raises BadInput if XLA for this device rejects an option. Compiles a small program for each option."""
    for name, value in extra.items():
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
        try:
            jax.jit(jnp.negative, compiler_options={name: value}).lower(scalar).compile()
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
            raise BadInput(f"XLA for {device.platform} rejects compiler.{name}={value}: {reason}") from None
