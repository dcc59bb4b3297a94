"""Whether the devices that hold the same bytes still do: a wrong bit in one copy is found, and its device named.

Data parallelism keeps copies of the state and renews each by itself, so that copies that differ are a fault of a
device: of its memory, or of what it computed for itself. A gradient that one device got wrong is not seen this way, for
the sum over the devices gives it to all of them alike; and what only one device holds has no copy to compare with.
A run answers copies that differ with the same steps once more, and then with a verdict.
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
from jaxscale.checkpoint.fingerprint import fingerprint
from jaxscale.checkpoint.record import named_leaves
from jaxscale.data.batch import Batch
from jaxscale.monitor.events import Note, ignore
from jaxscale.sharding.rules import Rules
from jaxscale.sharding.shardings import replicated
from jaxscale.system import faults
from jaxscale.system.exits import Exit, Stop
from jaxscale.training.config import ReplicaConfig
from jaxscale.training.state import TrainState
from jaxscale.training.step import TrainStep

SHOWN_LEAVES = 4


@dataclasses.dataclass(frozen=True)
class Difference:
    """Copies of one piece of a leaf that are not the same."""

    leaf: str
    devices: tuple[int, ...]  # jax's ids of those whose copy is wrong, or of all where no majority says which
    certain: bool  # whether a majority says which are wrong


@dataclasses.dataclass(frozen=True)
class ReplicaReport:
    """What a comparison of all copies found."""

    differences: tuple[Difference, ...]
    places: dict[int, str]  # every device's id -> how people find it

    @property
    def same(self) -> bool:
        """True if every copy is like its others."""
        return not self.differences

    @property
    def devices(self) -> tuple[int, ...]:
        """The ids of the devices that are wrong; where no majority can tell, of those that may be."""
        certain = {device for found in self.differences if found.certain for device in found.devices}
        return tuple(sorted(certain or {device for found in self.differences for device in found.devices}))

    @property
    def certain(self) -> bool:
        """True if a majority of copies says which devices are wrong."""
        return any(found.certain for found in self.differences)

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the arrays whose copies differ."""
        return tuple(dict.fromkeys(found.leaf for found in self.differences))

    def __str__(self) -> str:
        """'device 5 (process 0) holds other bits of params/head than the other copies', or that all are the same."""
        if self.same:
            return "all copies are the same"
        names = ", ".join(f"device {device} ({self.places[device]})" for device in self.devices)
        more = f" and {len(self.leaves) - SHOWN_LEAVES} more arrays" if len(self.leaves) > SHOWN_LEAVES else ""
        leaves = ", ".join(self.leaves[:SHOWN_LEAVES]) + more
        if self.certain:
            plural = len(self.devices) > 1
            return f"{names} {'hold' if plural else 'holds'} other bits of {leaves} than the other copies"
        return f"{names} hold different bits of {leaves}, and too few copies to say which of them is wrong"


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a state a comparison of copies can see."""

    copied_bytes: int  # of arrays, each counted once, that more than one device holds
    total_bytes: int
    fewest_copies: int  # of those; 0 where nothing has any
    renewed: bool = False  # each step takes every parameter anew from the one device that keeps its moments

    def __str__(self) -> str:
        """How much of the state has copies, and whether a wrong one can be told from a right one."""
        if not self.copied_bytes:
            return "no part of the state is held by more than one device: no copies to compare"
        share = self.copied_bytes / self.total_bytes
        told = f"{share:.2g}" if share < 0.01 else f"{share:.0%}"
        amount = f"{units.size(self.copied_bytes)} of {units.size(self.total_bytes)} of the state ({told})"
        small = "; the rest has no copy, and a wrong bit there is not seen" if share < 1 else ""
        voice = "a wrong copy is named" if self.fewest_copies > 2 else "of two copies that differ both are named"
        soon = "; each step renews the copies from one of them, so only a bit that flips between the last step and the "
        soon = f"{soon}comparison is seen" if self.renewed else ""
        return f"{amount} are held by {self.fewest_copies} devices or more: {voice}{small}{soon}"


def coverage(abstract_state: Any, rules: Rules) -> Coverage:
    """How much of a state with these shardings has copies."""
    copied = total = fewest = 0
    for leaf in jax.tree.leaves(abstract_state):
        num_bytes = leaf.size * leaf.dtype.itemsize
        total += num_bytes
        copies = len(leaf.sharding.device_set) // len(pieces(leaf))
        if copies > 1:
            copied += num_bytes
            fewest = min(fewest or copies, copies)
    return Coverage(copied, total, fewest, renewed=rules.params != rules.moments)


def make_replica_check(mesh: Mesh, abstract_state: Any) -> Callable[[Any], ReplicaReport]:
    """check(state) -> ReplicaReport: all copies compared bit for bit, the same answer in all processes.

    Each device makes a fingerprint of its own bytes of every array that has copies, one pass over them; what travels
    between devices is one uint32 an array. The state is not changed and not donated. Compiled at the first call.
    """
    leaves = {name: leaf for name, leaf in named_leaves(abstract_state).items()}
    groups = {name: [ids for ids in pieces(leaf).values() if len(ids) > 1] for name, leaf in leaves.items()}
    compared = [name for name, found in groups.items() if found]
    devices = list(mesh.devices.flat)
    places = {device.id: f"{device.device_kind}, process {device.process_index}" for device in devices}
    position = {device.id: place for place, device in enumerate(devices)}
    specs = [leaves[name].sharding.spec for name in compared]
    one_each = PartitionSpec(mesh.axis_names)

    @functools.partial(jax.jit, out_shardings=replicated(mesh))
    def device_prints(arrays: Sequence[jax.Array]) -> jax.Array:
        """uint32[devices, arrays]."""
        # inside, an array is the device's own bytes: nothing says, and nothing may assume, that copies are alike
        own = lambda *arrays: jnp.stack([fingerprint(array) for array in arrays])[None]
        return jax.shard_map(own, mesh=mesh, in_specs=tuple(specs), out_specs=one_each, check_vma=False)(*arrays)

    def check(state: Any) -> ReplicaReport:
        if not compared:
            return ReplicaReport((), places)
        found = named_leaves(state)
        prints = np.asarray(device_prints([found[name] for name in compared]))
        differences = []
        for column, name in enumerate(compared):
            for ids in groups[name]:
                seen = {device: int(prints[position[device], column]) for device in ids}
                if (difference := outvoted(name, seen)) is not None:
                    differences.append(difference)
        return ReplicaReport(tuple(differences), places)

    return check


def outvoted(leaf: str, seen: dict[int, int]) -> Difference | None:
    """Which devices' fingerprints are not that of more than half of the copies; None if all are the same."""
    counts = Counter(seen.values())
    if len(counts) == 1:
        return None
    (likeliest, votes), *_ = counts.most_common(1)
    certain = 2 * votes > len(seen)
    wrong = tuple(device for device, value in seen.items() if not certain or value != likeliest)
    return Difference(leaf, wrong, certain)


def pieces(leaf: Any) -> dict[tuple, list[int]]:
    """{where a piece lies in the array: ids of the devices that hold it}."""
    found: dict[tuple, list[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        where = tuple(part.indices(length) for part, length in zip(index, leaf.shape))
        found.setdefault(where, []).append(device.id)
    return found


class ReplicaWatch:
    """Compares the copies, and remembers a difference while its steps are run again: one object over both."""

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
        self.passing: Counter[int] = Counter()  # by device

    def due(self, step: int, saving: bool) -> bool:
        """True if the copies are to be compared after `step` steps. Before a save always: what is saved is believed."""
        every = self.cfg.every_steps
        return every > 0 and (saving or step % every == 0 or step == self.suspected)

    def agree(self, step: int, state: Any) -> bool:
        """True if all copies of the state after `step` steps are the same; if not, go back and run these steps again.

        All processes get the same answer. Raises Stop (SILENT_CORRUPTION) naming the device if they differ again, or if
        one device has had too many faults that passed.
        """
        report = self.check(state)
        if report.same:
            if self.suspected is not None and step >= self.suspected:
                self.tell(step, "passing", "the same steps give the same copies now: a fault that has passed")
                self.suspected = None
            return True
        if self.suspected is not None:
            self.end(
                step, report, f"and the steps up to {self.suspected}, run once more, end in different copies again"
            )
        self.passing.update(report.devices)
        often = [device for device in report.devices if self.passing[device] > self.cfg.max_passing]
        if often:
            times = (f"device {device} has had {units.plural(self.passing[device], 'such fault')}" for device in often)
            self.end(step, report, f"and {', '.join(times)} (train.replicas.max_passing={self.cfg.max_passing})")
        self.suspected = step
        self.tell(step, "unknown", f"{report}; the same steps are run again from the last checkpoint", report)
        return False

    def end(self, step: int, report: ReplicaReport, why: str) -> None:
        """Raises the Stop that names the device."""
        self.tell(step, "lasting", f"{report}: {why}", report)
        raise Stop(
            Exit.SILENT_CORRUPTION,
            f"after step {step} {report}, {why}; take the device's machine out of the run and start the same command: "
            "the checkpoints were saved from copies that agreed",
        )

    def tell(self, step: int, verdict: str, text: str, report: ReplicaReport | None = None) -> None:
        """Reports a difference or its end, to people and as an event."""
        facts = {"devices": list(report.devices), "leaves": list(report.leaves)} if report else {}
        self.note("replicas_differ", step, verdict=verdict, **facts)
        self.say(f"replicas, step {step}: {text}")


def flip_bit(state: Any, device: int, *, leaf: str | None = None, bit: int = 7) -> Any:
    """The state with one bit of one device's own bytes of a leaf turned over: a fault on purpose, as memory has them.

    Args: device: jax's id. leaf: by its name; unless given the first parameter that other devices hold too, or else the
    first parameter. bit: counted from the lowest of the first word, modulo the bits that the device has.
    """
    leaves = named_leaves(state)
    names = [name for name in leaves if name.startswith("params/")]
    copied = [name for name in names if len(holders(leaves[name], device)) > 1]
    name = leaf or (copied or names)[0]
    array = leaves[name]
    parts = []
    for shard in array.addressable_shards:
        data = shard.data
        if shard.device.id == device:
            raw = np.array(data)
            words = raw.reshape(-1).view(np.uint8)
            place = bit % (words.size * 8)
            words[place // 8] ^= np.uint8(1 << (place % 8))
            data = jax.device_put(raw, data.sharding)
        parts.append(data)
    leaves[name] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


def holders(array: jax.Array, device: int) -> list[int]:
    """Ids of the devices that hold the same piece of the array as this one."""
    return next((ids for ids in pieces(array).values() if device in ids), [])


def flip_bits(train_step: TrainStep, start_step: int) -> TrainStep:
    """The step, called first at start_step: a device computes with a wrong bit where JAXSCALE_FLIP_BIT says so."""
    if faults.flipped_bit() is None:
        return train_step
    steps = itertools.count(start_step)

    def corrupted(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        device = faults.bit_flip_device(next(steps))
        return train_step(state if device is None else flip_bit(state, device), batch)

    return corrupted
