"""Measurements of a device's matmuls (of width N) and memory, compared with the datasheet and other devices."""

import socket
import statistics
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxscale.kernels.hardware import Chip, Device
from jaxscale.runtime.hosts.agree import gathered, in_all, next_key
from jaxscale.tools.qualify.result import NO_DATASHEET, Machine, Probe, Reading, first_words, reading_of
from jaxscale.tools.qualify.timing import Timed, timed

MIB = 2**20
QUEUED = 8  # calls dispatched before waiting, to hide the dispatch time
REPEATS = 10
WIDTH, CPU_WIDTH = 8192, 1024  # a width of 8192 takes 1.1e12 FLOPs, about 1 ms on the fastest chip in the table
MEMORY_BYTES, CPU_MEMORY_BYTES = 2**30, 64 * MIB  # larger than on-chip memory and CPU caches
RESULTS = {"int8": jnp.int32, "float8_e4m3fn": jnp.bfloat16}  # {8-bit operand dtype: result dtype}


def measure_products(machine: Machine) -> Probe:
    """Measures matmul FLOP/s in each dtype, and memory bytes/s, on this process's first device."""
    device, chip = jax.local_devices()[0], machine.chip
    source = chip.source if chip else ""
    figures, notes = [], [] if chip else [NO_DATASHEET]
    for dtype, peak in product_types(chip):
        try:
            found, flops = time_products(device, product_width(device), dtype)
        except (jax.errors.JaxRuntimeError, NotImplementedError, TypeError) as error:
            if dtype not in RESULTS:  # all machines must support the other dtypes
                raise
            notes.append(f"matmuls in {dtype}: not measured, {first_words(error)}")
            continue
        name = f"matmuls in {dtype}"
        figures.append(reading_of(found.rate(flops), name, "FLOP/s", peak, machine.floors.products, source))
    num_bytes = CPU_MEMORY_BYTES if device.platform == "cpu" else MEMORY_BYTES
    x = jax.device_put(np.ones(num_bytes // 4, np.float32), device)
    found, moved = timed(lambda: over(x), REPEATS), QUEUED * 2.0 * num_bytes  # read and written
    datasheet = chip.hbm_bandwidth if chip else None
    rate = found.rate(moved)
    name = "memory, read and write"
    figures.append(reading_of(rate, name, "bytes/s", datasheet, machine.floors.bandwidth, source))
    return Probe(name="products", figures=tuple(figures), notes=tuple(notes))


def product_types(chip: Chip | None) -> list[tuple[str, float | None]]:
    """Returns (operand dtype, FLOP/s in the datasheet or None) for each dtype to measure."""
    if chip is None:
        return [("float32", None), ("bfloat16", None)]
    dtypes = {"bfloat16" if chip.bfloat16 else "float16": chip.peak_flops}
    eight_bit = {"int8": chip.int8_flops, "float8_e4m3fn": chip.fp8_flops}
    return [*dtypes.items(), *((dtype, peak) for dtype, peak in eight_bit.items() if peak)]


def product_width(device: Device) -> int:
    """Returns the width of the matmul operands. With this width, all calls take a fraction of a second."""
    return CPU_WIDTH if device.platform == "cpu" else WIDTH


def time_products(device: Device, width: int, dtype: str, repeats: int = REPEATS) -> tuple[Timed, float]:
    """Returns (time of QUEUED matmuls, FLOPs). Operands are random, because chips use less power for ones."""
    key = jax.random.key(0)
    if dtype == "int8":
        make = lambda: jax.random.randint(key, (2, width, width), -127, 128, jnp.int8)
    else:
        make = lambda: jax.random.normal(key, (2, width, width), jnp.bfloat16).astype(dtype)
    with jax.default_device(device):
        a_NN, b_NN = jax.jit(lambda: tuple(make()))()
        found = timed(lambda: [multiply(a_NN, b_NN) for _ in range(QUEUED)], repeats)
    return found, QUEUED * 2.0 * width**3


@jax.jit
def multiply(a_NN: jax.Array, b_NN: jax.Array) -> jax.Array:
    """Returns a @ b.T, the operand layout of 8-bit matmuls in cuBLAS. RESULTS: result dtypes for 8-bit operands.

    On CPU, the result is computed in float32 and cast, because XLA:CPU would convert the operands for a 16-bit result.
    """
    result = RESULTS.get(a_NN.dtype.name, a_NN.dtype)
    contract_last = (((1,), (1,)), ((), ()))
    product = lambda a_NN, b_NN, result: lax.dot_general(a_NN, b_NN, contract_last, preferred_element_type=result)
    if a_NN.dtype.name in RESULTS:
        return product(a_NN, b_NN, result)
    in_float32 = lambda a_NN, b_NN: lax.optimization_barrier(product(a_NN, b_NN, jnp.float32)).astype(result)
    return lax.platform_dependent(a_NN, b_NN, cpu=in_float32, default=lambda a_NN, b_NN: product(a_NN, b_NN, result))


@jax.jit
def over(x: jax.Array) -> jax.Array:
    """Reads and writes x QUEUED times in one program. Each pass depends on the previous pass."""
    return lax.fori_loop(0, QUEUED, lambda _, x: x * 0.5 + 1.0, x)


def product_seconds(device: Device, repeats: int = REPEATS) -> float:
    """Returns the median time of one matmul on this device, without communication."""
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    return time_products(device, product_width(device), dtype, repeats)[0].median / QUEUED


def measure_devices(machine: Machine, time_device: Callable[[Device], float] = product_seconds) -> Probe:
    """Compares devices with their median. Times only one simulated device per process, since they share cores."""
    local = [device for device in machine.devices if device.process_index == jax.process_index()]
    at = lambda d: f" at {tuple(d.coords)}" if getattr(d, "coords", None) is not None else ""
    name_of = lambda d: f"{d.platform.upper()} {d.id}{at(d)}"
    shared = machine.on_cpu and len(local) > 1 and time_device is product_seconds
    time_one = lambda d: (f"{name_of(d)} on {socket.gethostname()}", jax.process_index(), time_device(d))
    mine = in_all(lambda: [time_one(d) for d in (local[:1] if shared else local)], machine.wait_seconds)
    rows = [row for rows in gathered(next_key("devices"), mine) for row in rows]
    notes = ["simulated devices share the processor, so one per process was timed"] if shared else []
    if len(rows) == 1:
        return Probe(name="devices", notes=(*notes, "one device, so there is nothing to compare"))
    return Probe(name="devices", figures=beside_median(rows, machine.floors.slow), notes=tuple(notes))


def beside_median(rows: Sequence[tuple[str, int, float]], most: float) -> tuple[Reading, ...]:
    """Returns the (lower) median, and the slow devices or the slowest. rows: (name of device, process, seconds)."""
    usual = statistics.median_low([seconds for _, _, seconds in rows])
    times = sorted(rows, key=lambda row: -row[2])
    slow = {f"{label} (process {n}) is slow": seconds for label, n, seconds in times if seconds > most * usual}
    fastest, slowest = times[-1][2], times[0][2]
    name = f"one matmul, median of {len(rows)} devices"
    shown = slow or {f"slowest, {times[0][0]}": slowest}
    return (
        Reading(name=name, value=usual, unit="s", low=fastest, high=slowest),
        *(Reading(name=label, value=s / usual, unit="times", most=most) for label, s in shown.items()),
    )
