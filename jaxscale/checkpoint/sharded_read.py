"""The arrays of a step on the devices of all processes, each of its bytes read from storage once.

An array, or a part of it, of which devices of several processes hold copies is read by these processes in turns, a
piece each: what a process has not read is zero on its devices. Then one sum over the copies, of the bits as unsigned
integers, brings all pieces to all: no two processes have read the same, so it changes no bit and knows no carry. In the
first half nobody waits for anybody, so that all can agree that all went well before the second, where the devices do.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxscale.checkpoint.array_store import Arrays, Box, misfit, read_ahead
from jaxscale.checkpoint.record import describe_leaf

AHEAD_BYTES = 512 << 20  # asked for at once: a host's bandwidth to a bucket, about 2 GB/s, times a fraction of a second
GROUP_BYTES = 1 << 30  # of one device, summed by one program: what memory its devices need beside the state
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by the bytes of a number
KEY_KINDS = ("threefry2x32", "rbg", "unsafe_rbg")
Region = tuple[tuple[int, int], ...]  # begin and end along each axis


class Misfit(Exception):
    """An array in the files that is not of the shape or type that the record tells."""


def read_leaves(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """{name: what this process has read of each leaf, on its devices}, to be given to `exchanged`; waits for nobody.

    Args: wanted: {name: jax.ShapeDtypeStruct (without a sharding: the first local device), array or Python number}.
    Raises: Misfit, and what TensorStore raises.
    """
    arrays = Arrays(folder)
    opening = {name: arrays.opening(name) for name in wanted}
    stores, plans = {}, {}
    for turn, (name, leaf) in enumerate(wanted.items()):
        stores[name] = store = opening[name].result()
        if wrong := misfit(store, *describe_leaf(leaf)):
            raise Misfit(f"{name}: {wrong}")
        plans[name] = list(own_pieces(store, leaf, turn))
    values = read_ahead(((stores[name], box) for name, plan in plans.items() for _, box in plan), AHEAD_BYTES)
    placed = {}
    for name, leaf in wanted.items():
        make = np.zeros if is_sent(leaf) else np.empty
        local = own_regions(stores[name], leaf)
        buffers = {
            region: make([end - begin for begin, end in region], stores[name].dtype.numpy_dtype) for region in local
        }
        for region, box in plans[name]:
            inside = tuple(slice(part.start - begin, part.stop - begin) for part, (begin, _) in zip(box, region))
            buffers[region][inside] = next(values)
        placed[name] = place(leaf, buffers)
    return placed


def exchanged(placed: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """{name: leaf} of what all processes have read, whole. All call it together; `placed` is used up."""
    leaves = {name: placed.pop(name) for name, leaf in wanted.items() if not is_sent(leaf)}
    groups: list[list[str]] = []
    size, mesh = 0, None
    for name in placed:
        sharding = wanted[name].sharding
        local = np.prod(sharding.shard_shape(wanted[name].shape)) * wanted[name].dtype.itemsize
        if not groups or size + local > GROUP_BYTES or sharding.mesh != mesh:
            groups.append([])
            size, mesh = 0, sharding.mesh
        groups[-1].append(name)
        size += local
    for names in groups:
        described = tuple((wanted[name].sharding.spec, np.dtype(wanted[name].dtype)) for name in names)
        found = sum_program(wanted[names[0]].sharding.mesh, described)([placed.pop(name) for name in names])
        leaves |= {name: jax.device_put(leaf, wanted[name].sharding) for name, leaf in zip(names, found)}
    return leaves


@functools.lru_cache(maxsize=256)
def holders(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[Region, list[Any]]:
    """{part of an array: the devices of all processes that hold it, by their numbers}."""
    found: dict[Region, list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(tuple(part.indices(size)[:2] for part, size in zip(index, shape)), []).append(device)
    return {region: sorted(found[region], key=lambda device: device.id) for region in sorted(found)}


def sharding_of(leaf: Any) -> jax.sharding.Sharding:
    """That of a leaf that is wanted; the first local device where it has none."""
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def is_plain(leaf: Any) -> bool:
    """True for arrays that lie on devices as in the files: no numbers of Python or numpy, and no random keys."""
    is_array = hasattr(leaf, "dtype") and not isinstance(leaf, np.ndarray)
    return is_array and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_sent(leaf: Any) -> bool:
    """True if several processes hold copies of a part of it, which they can sum."""
    if not is_plain(leaf) or not isinstance(sharding_of(leaf), jax.sharding.NamedSharding):
        return False
    if leaf.dtype.itemsize not in WORDS or leaf.dtype.name.endswith("int4"):
        return False
    parts = holders(tuple(leaf.shape), leaf.sharding).values()
    return any(len({device.process_index for device in devices}) > 1 for devices in parts)


def own_regions(store: Any, leaf: Any) -> list[Region]:
    """What devices of this process hold of a leaf; all of it where it lies on none."""
    if not is_plain(leaf):
        return [tuple((0, size) for size in store.shape)]
    here = jax.process_index()
    parts = holders(tuple(leaf.shape), sharding_of(leaf))
    return [region for region, devices in parts.items() if any(device.process_index == here for device in devices)]


def own_pieces(store: Any, leaf: Any, turn: int) -> Iterator[tuple[Region, Box]]:
    """Yields (part, piece) of what this process reads of a leaf: of what several hold, one piece after the other in
    turns. turn: who begins, another with each leaf, or all small ones would be one process's.
    """
    regions = own_regions(store, leaf)
    if not is_sent(leaf):
        yield from ((region, box) for region in regions for box in pieces(store, region))
        return
    for number, (region, devices) in enumerate(holders(tuple(leaf.shape), leaf.sharding).items()):
        if region in regions:
            processes = sorted({device.process_index for device in devices})
            begin = (processes.index(jax.process_index()) - turn - number) % len(processes)
            yield from ((region, box) for box in itertools.islice(pieces(store, region), begin, None, len(processes)))


def pieces(store: Any, region: Region) -> Iterator[Box]:
    """Yields those parts of a region that lie in one stored piece each."""
    sizes = store.chunk_layout.read_chunk.shape or store.shape
    cuts = [
        [slice(max(at, begin), min(at + size, end)) for at in range(begin - begin % size, end, size)]
        for (begin, end), size in zip(region, (max(size, 1) for size in sizes), strict=True)
    ]
    return itertools.product(*cuts)


def place(leaf: Any, buffers: Mapping[Region, np.ndarray]) -> Any:
    """The leaf with what was read into the buffers; of one that is summed the words, zero where others have read."""
    if not is_plain(leaf):
        (value,) = buffers.values()
        if not hasattr(leaf, "dtype"):
            return type(leaf)(value.item())
        return (
            value
            if isinstance(leaf, np.ndarray)
            else jax.random.wrap_key_data(jax.numpy.asarray(value), impl=key_kind(leaf))
        )
    sharding, local = sharding_of(leaf), []
    if is_sent(leaf):
        buffers = {region: buffer.view(WORDS[buffer.itemsize]) for region, buffer in buffers.items()}
        sharding = jax.sharding.NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
    for region, devices in holders(tuple(leaf.shape), sharding_of(leaf)).items():
        value = buffers.get(region)
        for device in devices:
            if device.process_index == jax.process_index():
                at = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                local.append(jax.device_put(value, at))
                value = np.zeros_like(value) if is_sent(leaf) else value
    return jax.make_array_from_single_device_arrays(tuple(leaf.shape), sharding, local)


def key_kind(leaf: Any) -> str:
    """The implementation of random keys by their dtype, which jax tells of keys that are there alone."""
    return next(kind for kind in KEY_KINDS if jax.random.key(0, impl=kind).dtype == leaf.dtype)


@functools.lru_cache(maxsize=64)
def sum_program(mesh: Any, described: tuple) -> Any:
    """The compiled function (words) -> arrays, each summed over the mesh axes that its spec does not name.

    Args: described: (spec, dtype) of each.
    """
    specs = [spec for spec, _ in described]

    def whole(words: jax.Array, spec: Any, dtype: Any) -> jax.Array:
        named = {axis for place in spec if place for axis in ((place,) if isinstance(place, str) else place)}
        total = jax.lax.psum(words, tuple(axis for axis in mesh.axis_names if axis not in named))
        return total != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(total, dtype)

    add = lambda words: [whole(part, *each) for part, each in zip(words, described)]
    places = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    mapped = jax.shard_map(add, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.jit(mapped, out_shardings=places)
