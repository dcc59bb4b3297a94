"""What the tests ask of XLA, in this process and in those they start: little compiling, for tiny programs run once."""

from importlib.metadata import version

# Without LLVM's optimisation (XLA's own stays), without the emitters that go through MLIR, and without the threads that
# large programs are split among: compiling, most of what the tests do, took 0.6 of the CPU time (jax 0.10.2, 2 cores).
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):  # 0.12 does not know it, and ends the process
    QUICK += " --xla_cpu_use_fusion_emitters=false"
QUICK += " --xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"  # as jaxscale.system.process sets it


def xla_flags(devices: int) -> str:
    """A value of XLA_FLAGS for so many simulated devices."""
    return f"{QUICK} --xla_force_host_platform_device_count={devices}"
