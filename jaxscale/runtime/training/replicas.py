"""Detection of silent data corruption by comparing replicas: finds a wrong bit in one copy and names the device.

Data-parallel replicas of the state are updated independently, so a difference shows a fault in the memory or in a local
computation of a device. A wrong gradient is not detected, because the all-reduce distributes it to all devices. A fault
in a shard without replicas is not detected either. After a difference, the run repeats the steps before it decides.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxscale import units
from jaxscale.core.batch import Batch
from jaxscale.core.shardings import Rules, replicated
from jaxscale.core.state import TrainState
from jaxscale.core.step import TrainStep
from jaxscale.runtime.checkpoint.fingerprint import fingerprint
from jaxscale.runtime.checkpoint.record import named_leaves
from jaxscale.runtime.monitor.events import Note, ignore
from jaxscale.runtime.training.config import ReplicaConfig
from jaxscale.system import faults
from jaxscale.system.exits import Exit, Stop

SHOWN_LEAVES = 4


@dataclasses.dataclass(frozen=True)
class ReplicaDifference:
    """Copies of one shard of a leaf that differ."""

    leaf: str
    devices: tuple[int, ...]  # ids of the devices with a wrong copy, or of all without a majority
    certain: bool  # True if a majority of copies agrees


@dataclasses.dataclass(frozen=True)
class ReplicaReport:
    """Result of a comparison of all copies."""

    differences: tuple[ReplicaDifference, ...]
    descriptions: dict[int, str]  # {device id: kind and process}

    @property
    def same(self) -> bool:
        """True if all copies agree."""
        return not self.differences

    @property
    def devices(self) -> tuple[int, ...]:
        """Ids of the devices with a wrong copy or, without a majority, of all devices whose copies differ."""
        certain = {device for found in self.differences if found.certain for device in found.devices}
        return tuple(sorted(certain or {device for found in self.differences for device in found.devices}))

    @property
    def certain(self) -> bool:
        """True if a majority of copies agrees for some shard."""
        return any(found.certain for found in self.differences)

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the arrays whose copies differ."""
        return tuple(dict.fromkeys(found.leaf for found in self.differences))

    def __str__(self) -> str:
        """Returns 'all copies are equal', or names the devices and the arrays in which their copies differ."""
        if self.same:
            return "all copies are equal"
        names = ", ".join(f"device {device} ({self.descriptions[device]})" for device in self.devices)
        more = f" and {len(self.leaves) - SHOWN_LEAVES} more arrays" if len(self.leaves) > SHOWN_LEAVES else ""
        leaves = ", ".join(self.leaves[:SHOWN_LEAVES]) + more
        if self.certain:
            plural = len(self.devices) > 1
            return f"{names} {'have' if plural else 'has'} different bits in {leaves} than the other copies"
        return f"{names} have different bits in {leaves}; there are too few copies to identify the wrong one"


@dataclasses.dataclass(frozen=True)
class ReplicaCoverage:
    """Part of a state that has replicas to compare."""

    copied_bytes: int  # bytes of arrays with replicas, each counted once
    total_bytes: int
    fewest_copies: int  # smallest number of copies of an array; 0 without replicas
    regathered: bool = False  # True if each step gathers parameters from the shards that are updated (ZeRO-1, ZeRO-2)

    def __str__(self) -> str:
        """Describes which part of the state has replicas, and whether a wrong copy can be identified."""
        if not self.copied_bytes:
            return "each part of the state is on one device only: there are no copies to compare"
        share = self.copied_bytes / self.total_bytes
        percent = f"{share:.2g}" if share < 0.01 else f"{share:.0%}"
        amount = f"{units.size(self.copied_bytes)} of {units.size(self.total_bytes)} of the state ({percent})"
        small = "; the rest has no copy, and a wrong bit there is not detected" if share < 1 else ""
        voice = "a wrong copy is identified" if self.fewest_copies > 2 else "if two copies differ, both are named"
        soon = (
            "; each step overwrites the copies from one of them, so only bits that flip between the last step and the "
        )
        soon = f"{soon}comparison are detected" if self.regathered else ""
        return f"{amount} are on {self.fewest_copies} devices or more: {voice}{small}{soon}"


def replica_coverage(abstract_state: Any, rules: Rules) -> ReplicaCoverage:
    """Returns the coverage of a state with these shardings."""
    copied = total = fewest = 0
    for leaf in jax.tree.leaves(abstract_state):
        num_bytes = leaf.size * leaf.dtype.itemsize
        total += num_bytes
        copies = len(leaf.sharding.device_set) // len(shard_devices(leaf))
        if copies > 1:
            copied += num_bytes
            fewest = min(fewest or copies, copies)
    return ReplicaCoverage(copied, total, fewest, regathered=rules.params != rules.moments)


def make_replica_check(mesh: Mesh, abstract_state: Any) -> Callable[[Any], ReplicaReport]:
    """Returns a function state -> ReplicaReport that compares all copies bit by bit.

    Each device computes the fingerprint, a uint32, of its shard of every replicated array. All processes get the same
    report. The state is not donated. Compiles at the first call.
    """
    leaves = {name: leaf for name, leaf in named_leaves(abstract_state).items()}
    groups = {name: [ids for ids in shard_devices(leaf).values() if len(ids) > 1] for name, leaf in leaves.items()}
    compared = [name for name, found in groups.items() if found]
    devices = list(mesh.devices.flat)
    descriptions = {device.id: f"{device.device_kind}, process {device.process_index}" for device in devices}
    position = {device.id: i for i, device in enumerate(devices)}
    specs = [leaves[name].sharding.spec for name in compared]
    per_device = PartitionSpec(mesh.axis_names)

    @functools.partial(jax.jit, out_shardings=replicated(mesh))
    def device_fingerprints(arrays: Sequence[jax.Array]) -> jax.Array:
        """Returns uint32[devices, arrays]."""
        # In shard_map an array is the device's shard, and XLA cannot assume that replicas are equal.
        local = lambda *arrays: jnp.stack([fingerprint(array) for array in arrays])[None]
        return jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=per_device, check_vma=False)(*arrays)

    def check(state: Any) -> ReplicaReport:
        if not compared:
            return ReplicaReport((), descriptions)
        arrays = named_leaves(state)
        fingerprints = np.asarray(device_fingerprints([arrays[name] for name in compared]))
        differences = []
        for column, name in enumerate(compared):
            for ids in groups[name]:
                by_device = {device: int(fingerprints[position[device], column]) for device in ids}
                if (difference := find_difference(name, by_device)) is not None:
                    differences.append(difference)
        return ReplicaReport(tuple(differences), descriptions)

    return check


def find_difference(leaf: str, fingerprints: dict[int, int]) -> ReplicaDifference | None:
    """Returns the devices whose fingerprints differ from the majority, or None if all are equal."""
    counts = Counter(fingerprints.values())
    if len(counts) == 1:
        return None
    (likeliest, votes), *_ = counts.most_common(1)
    certain = 2 * votes > len(fingerprints)
    wrong = tuple(device for device, value in fingerprints.items() if not certain or value != likeliest)
    return ReplicaDifference(leaf, wrong, certain)


def shard_devices(leaf: Any) -> dict[tuple, list[int]]:
    """Returns {index of a shard: ids of the devices with this shard}."""
    found: dict[tuple, list[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        key = tuple(part.indices(length) for part, length in zip(index, leaf.shape))
        found.setdefault(key, []).append(device.id)
    return found


class ReplicaMonitor:
    """Compares the copies of the state. After a difference, compares them again when the run has repeated the steps."""

    def __init__(
        self,
        cfg: ReplicaConfig,
        check: Callable[[Any], ReplicaReport],
        *,
        note: Note = ignore,
        say: Callable[[str], None] = print,
    ):
        self.cfg, self.check, self.note, self.say = cfg, check, note, say
        self.suspected: int | None = None  # the step after which copies differed
        self.passing: Counter[int] = Counter()  # number of transient faults by device

    def due(self, step: int, saving: bool) -> bool:
        """Returns True if the copies must be compared after `step` steps. Each save requires a comparison."""
        every = self.cfg.every_steps
        return every > 0 and (saving or step % every == 0 or step == self.suspected)

    def check_agreement(self, step: int, state: Any) -> bool:
        """Returns True if all copies of the state agree. If not, the caller rewinds and runs the steps again.

        The result is the same in all processes. Raises Stop(SILENT_CORRUPTION) with the device if the copies differ
        again, or if a device has had too many transient faults.
        """
        report = self.check(state)
        if report.same:
            if self.suspected is not None and step >= self.suspected:
                self.log(
                    step, "passing", "the copies are equal after running the same steps again: the fault was transient"
                )
                self.suspected = None
            return True
        if self.suspected is not None:
            self.stop(step, report, f"and running the steps up to {self.suspected} again also gives different copies")
        self.passing.update(report.devices)
        often = [device for device in report.devices if self.passing[device] > self.cfg.max_passing]
        if often:
            times = (f"device {device} has had {units.plural(self.passing[device], 'such fault')}" for device in often)
            self.stop(step, report, f"and {', '.join(times)} (train.replicas.max_passing={self.cfg.max_passing})")
        self.suspected = step
        self.log(step, "unknown", f"{report}; running the same steps again from the last checkpoint", report)
        return False

    def stop(self, step: int, report: ReplicaReport, reason: str) -> None:
        """Raises the Stop that names the device."""
        self.log(step, "lasting", f"{report}: {reason}", report)
        raise Stop(
            Exit.SILENT_CORRUPTION,
            f"after step {step}, {report}, {reason}; run the same command again without the device's machine; the "
            "checkpoints are valid, because they were saved from equal copies",
        )

    def log(self, step: int, verdict: str, text: str, report: ReplicaReport | None = None) -> None:
        """Logs a difference or its end, and records it as an event."""
        facts = {"devices": list(report.devices), "leaves": list(report.leaves)} if report else {}
        self.note("replicas_differ", step, verdict=verdict, **facts)
        self.say(f"replicas, step {step}: {text}")


def flip_bit(state: Any, device: int, *, leaf: str | None = None, bit: int = 7) -> Any:
    """Returns the state with one bit flipped in one device's shard of a leaf, to simulate a memory fault.

    By default, `leaf` is the first parameter with replicas, or else the first parameter. `bit` is an index that counts
    from the lowest bit of the first byte, modulo the number of bits in the shard.
    """
    leaves = named_leaves(state)
    names = [name for name in leaves if name.startswith("params/")]
    copied = [name for name in names if len(replica_devices(leaves[name], device)) > 1]
    name = leaf or (copied or names)[0]
    array = leaves[name]
    parts = []
    for shard in array.addressable_shards:
        data = shard.data
        if shard.device.id == device:
            host = np.array(data)
            raw_bytes = host.reshape(-1).view(np.uint8)
            index = bit % (raw_bytes.size * 8)
            raw_bytes[index // 8] ^= np.uint8(1 << (index % 8))
            data = jax.device_put(host, data.sharding)
        parts.append(data)
    leaves[name] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


def replica_devices(array: jax.Array, device: int) -> list[int]:
    """Returns the ids of all devices, including `device`, that have the same shard of the array."""
    return next((ids for ids in shard_devices(array).values() if device in ids), [])


def flip_bits(train_step: TrainStep, start_step: int) -> TrainStep:
    """Wraps a train step to flip the bits that JAXSCALE_FLIP_BIT requests. Calls count from start_step."""
    if faults.flipped_bit() is None:
        return train_step
    steps = itertools.count(start_step)

    def corrupted(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        device = faults.bit_flip_device(next(steps))
        return train_step(state if device is None else flip_bit(state, device), batch)

    return corrupted
