"""Ahead-of-time compilation of the training step for devices that may be absent, with results cached on disk.

JAX's compilation cache is disabled during the compilation, since entries for absent devices cannot be loaded.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jaxscale import schema
from jaxscale.build import Program
from jaxscale.kernels.config import XLA_VARIABLES
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import cache_dir, make_private, read_json, write_json
from jaxscale.tools.planning.links import make_torus
from jaxscale.tools.planning.topology import Topology, link_domains
from jaxscale.tools.preflight.hlo import HloFacts, read_hlo

FORMAT = 5  # version of cached results; a new number invalidates earlier results
CACHE_ENABLED = "jax_enable_compilation_cache"
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"([0-9.]+)([BKMGT]?)"
# XLA:TPU's out-of-memory messages. The first is from libtpu 0.0.42 to 0.0.51, the second from earlier versions.
SHORTAGES = (
    re.compile(rf"memory on (?P<space>\w+), the total memory required .*?\({SIZE}\) exceeds available \w+ \({SIZE}\)"),
    re.compile(rf"memory in memory space (?P<space>\w+)\. Used {SIZE} of {SIZE}"),
)
LARGE = re.compile(rf"^\s*\d+\. Size: {SIZE}\s(?:(?!^\s*\d+\. Size:).)*?^\s*Shape: (\S+)", re.M | re.S)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory in bytes on one device, from the compiler's buffer assignment."""

    peak: int  # largest sum of live buffers, which must fit
    arguments: int
    code: int


@dataclasses.dataclass(frozen=True)
class Shortage:
    """An out-of-memory error reported by the compiler."""

    space: str  # 'hbm', or an on-chip memory such as 'vmem'
    needed: int | None  # bytes including arguments; None if the message has no number
    available: int | None
    largest: tuple[tuple[int, str], ...]  # (bytes, shape) of the largest arrays, if listed
    said: str  # first line of the message


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Result of a compilation: memory and facts, or the shortage if the program does not fit."""

    memory: Memory | None
    facts: HloFacts | None
    shortage: Shortage | None
    lower_seconds: float
    compile_seconds: float
    versions: dict[str, str]
    date: str
    kept: bool = False  # True if read from the cache


def compile_ahead(
    program: Program,
    topology: Topology,
    *,
    keep: bool = True,
    save_executable: pathlib.Path | None = None,
    say: Callable[[str], None] = print,
) -> Compiled:
    """Compiles the training step. keep: use the cache. save_executable: file to write; if set, always compiles."""
    begin = time.monotonic()
    lowered, key = lower(program, topology)
    lower_seconds = time.monotonic() - begin
    if keep and save_executable is None and (cached := read_result(key, say)):
        return cached
    begin = time.monotonic()
    executable = memory = facts = shortage = None
    with without_compilation_cache():
        try:
            executable = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("RESOURCE_EXHAUSTED"):
                raise
            shortage = read_shortage(str(error))
    compile_seconds = time.monotonic() - begin
    if executable is not None:
        memory, facts = read_executable(executable, program, topology)
        if save_executable is not None:
            write_executable(executable, save_executable, topology.name)
    today = datetime.date.today().isoformat()
    result = Compiled(memory, facts, shortage, lower_seconds, compile_seconds, installed_versions(), today)
    if keep:
        write_result(key, result, say)
    return result


def read_executable(executable: jax.stages.Compiled, program: Program, topology: Topology) -> tuple[Memory, HloFacts]:
    """Returns memory and facts of a compiled training step, even if its devices are not on this machine."""
    devices = list(program.mesh.devices.flat)  # XLA numbers devices by their position in the mesh
    torus = make_torus(devices, topology.chip)
    text = executable.as_text()
    assert text is not None, "XLA returns the text of compiled programs"
    facts = read_hlo(text, dict(program.mesh.shape), link_domains(devices), torus)
    return read_memory(executable.memory_analysis(), topology.platform), facts


def lower(program: Program, topology: Topology) -> tuple[jax.stages.Lowered, str]:
    """Returns (lowered training step, cache key of its result)."""
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    return lowered, result_key(lowered.as_text(), program, topology)


def read_memory(stats: Any, platform: str) -> Memory:
    """Returns the memory from the compiler's CompiledMemoryStats.

    On CPU, returns an upper bound, because XLA's peak omits temporaries (jax 0.10.2). On TPU, subtracts the host
    arguments, which are part of XLA's peak (libtpu 0.0.51).
    """
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    unaliased = stats.output_size_in_bytes - stats.alias_size_in_bytes
    on_host = stats.host_argument_size_in_bytes if platform == "tpu" else 0
    return Memory(
        peak=arguments + unaliased + temporaries if platform == "cpu" else stats.peak_memory_in_bytes - on_host,
        arguments=arguments,
        code=stats.generated_code_size_in_bytes,
    )


def read_shortage(message: str) -> Shortage:
    """Returns the numbers in the compiler's RESOURCE_EXHAUSTED message, if there are any."""
    said = next((line.strip() for line in message.splitlines() if line.strip()), "RESOURCE_EXHAUSTED")
    said = said.partition("RESOURCE_EXHAUSTED:")[2].strip() or said
    to_bytes = lambda number, unit: round(float(number) * UNITS[unit])
    largest = tuple((to_bytes(size, unit), shape) for size, unit, shape in LARGE.findall(message))
    for pattern in SHORTAGES:
        if found := pattern.search(message):
            space, *sizes = found.groups()
            needed, available = to_bytes(*sizes[:2]), to_bytes(*sizes[2:])
            return Shortage(space.lower(), needed, available, largest, said)
    return Shortage("hbm", None, None, largest, said)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Disables JAX's persistent compilation cache."""
    before = getattr(jax.config, CACHE_ENABLED)
    jax.config.update(CACHE_ENABLED, False)
    compilation_cache.reset_cache()  # JAX reads the setting only once
    try:
        yield
    finally:
        jax.config.update(CACHE_ENABLED, before)
        compilation_cache.reset_cache()


def installed_versions() -> dict[str, str]:
    """Returns {package: version} for packages that affect compilation."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def result_key(stablehlo: str, program: Program, topology: Topology) -> str:
    """Returns a hash of all inputs of a result, including the code that reads compiled programs."""
    folder = pathlib.Path(__file__).parent
    others = ("../planning/topology.py", "../planning/links.py", "../../kernels/collectives.py")
    files = [*sorted(folder.glob("hlo*.py")), *(folder / name for name in others)]
    material = {
        "format": FORMAT,
        "stablehlo": hashlib.sha256(stablehlo.encode()).hexdigest(),
        "topology": topology.name,
        "devices": [device.id for device in program.mesh.devices.flat],  # the text omits the order of devices
        "mesh": dict(program.mesh.shape),
        "options": program.plan.compiler_options.values,
        "flags": {name: os.environ.get(name, "") for name in XLA_VARIABLES},
        "versions": installed_versions(),
        "readers": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(),
    }
    return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest()


def result_file(key: str) -> pathlib.Path:
    """Returns the path of a cached result."""
    return cache_dir() / "preflight" / f"{key}.json"


def write_result(key: str, result: Compiled, say: Callable[[str], None]) -> None:
    """Writes a result to the cache. If this fails, prints a message."""
    file = result_file(key)
    try:
        make_private(file.parent.parent)
        file.parent.mkdir(exist_ok=True)
        write_json(file, dataclasses.asdict(result))
    except OSError as error:
        say(f"result not cached: {file.parent}: {error.strerror or error}; set XDG_CACHE_HOME to a writable folder")


def read_result(key: str, say: Callable[[str], None]) -> Compiled | None:
    """Returns the cached result, or None. If the result is damaged, prints a message."""
    file = result_file(key)
    try:
        return dataclasses.replace(schema.from_dict(Compiled, read_json(file)), kept=True)
    except FileNotFoundError:
        return None
    except BadInput as error:
        say(f"ignored an unreadable cached result ({error}): {file}")
        return None


def write_executable(executable: jax.stages.Compiled, file: pathlib.Path, topology: str) -> None:
    """Writes JAX's serialised executable, and a .json file with metadata.

    Loading requires the target chips and is untested. Load only files that you wrote, because JAX unpickles them.
    """
    payload, _, _ = serialize_executable.serialize(executable)
    file.write_bytes(payload)
    metadata = {
        "topology": topology,
        "versions": installed_versions(),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "load": "jax.experimental.serialize_executable.deserialize_and_load, with the trees of the same program",
        "tested": "written only; loading needs the chips and was not tested",
    }
    write_json(file.with_name(file.name + ".json"), metadata)
