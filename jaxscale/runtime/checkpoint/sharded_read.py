"""Reads the arrays of a step onto the devices of all processes, each byte from storage once.

Processes whose devices hold copies of the same part of an array read its chunks in turns, and each leaves zeros for the
chunks of the others. One sum over the copies, of the bits as unsigned integers, then gives every process all chunks: no
two processes have read the same one, so the sum carries nothing and changes no bit. Reading needs no communication, so
the processes can agree that all of it succeeded before the sum, which does.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxscale.runtime.checkpoint.array_store import ArrayReader, Box, Region, chunk_boxes, format_mismatch, read_ahead
from jaxscale.runtime.checkpoint.record import describe_leaf
from jaxscale.runtime.checkpoint.verify import DamagedCheckpoint

AHEAD_BYTES = 512 << 20  # in flight: a host's bandwidth to a bucket, about 2 GB/s, times a fraction of a second
GROUP_BYTES = 1 << 30  # per device and sum program: the memory that it takes in addition to the state
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by itemsize
KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


def read_leaves(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: this process's part of each leaf, on its devices} for `sum_shared_leaves`. No communication.

    Args: wanted: {name: jax.ShapeDtypeStruct (without a sharding: the first local device), array or Python number}.
    Raises: DamagedCheckpoint for another shape or dtype, and the errors of TensorStore.
    """
    arrays = ArrayReader(folder)
    opened = {name: arrays.open_async(name) for name in wanted}
    stores, plans = {}, {}
    for turn, (name, leaf) in enumerate(wanted.items()):
        stores[name] = store = opened[name].result()
        if wrong := format_mismatch(store, *describe_leaf(leaf)):
            raise DamagedCheckpoint(f"{name}: {wrong}")
        plans[name] = list(assigned_pieces(store, leaf, turn))
    values = read_ahead(((stores[name], box) for name, plan in plans.items() for _, box in plan), AHEAD_BYTES)
    leaves = {}
    for name, leaf in wanted.items():
        make = np.zeros if is_shared(leaf) else np.empty
        local = local_regions(stores[name], leaf)
        buffers = {
            region: make([end - begin for begin, end in region], stores[name].dtype.numpy_dtype) for region in local
        }
        for region, box in plans[name]:
            inside = tuple(slice(part.start - begin, part.stop - begin) for part, (begin, _) in zip(box, region))
            buffers[region][inside] = next(values)
        leaves[name] = make_leaf(leaf, buffers)
    return leaves


def sum_shared_leaves(partial: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: leaf} with the parts that all processes have read. All call it together; empties `partial`."""
    leaves = {name: partial.pop(name) for name, leaf in wanted.items() if not is_shared(leaf)}
    groups: list[list[str]] = []
    size, mesh = 0, None
    for name in partial:
        sharding = wanted[name].sharding
        local = np.prod(sharding.shard_shape(wanted[name].shape)) * wanted[name].dtype.itemsize
        if not groups or size + local > GROUP_BYTES or sharding.mesh != mesh:
            groups.append([])
            size, mesh = 0, sharding.mesh
        groups[-1].append(name)
        size += local
    for names in groups:
        described = tuple((wanted[name].sharding.spec, np.dtype(wanted[name].dtype)) for name in names)
        found = make_sum(wanted[names[0]].sharding.mesh, described)([partial.pop(name) for name in names])
        leaves |= {name: jax.device_put(leaf, wanted[name].sharding) for name, leaf in zip(names, found)}
    return leaves


@functools.lru_cache(maxsize=256)
def region_devices(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[Region, list[Any]]:
    """Returns {region of an array: devices of all processes that hold it, by id}."""
    found: dict[Region, list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(tuple(part.indices(size)[:2] for part, size in zip(index, shape)), []).append(device)
    return {region: sorted(found[region], key=lambda device: device.id) for region in sorted(found)}


def sharding_of(leaf: Any) -> jax.sharding.Sharding:
    """Returns the sharding of a leaf; the first local device if it has none."""
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def is_device_array(leaf: Any) -> bool:
    """True for arrays stored as on devices, which excludes Python and numpy values and random keys."""
    is_array = hasattr(leaf, "dtype") and not isinstance(leaf, np.ndarray)
    return is_array and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_shared(leaf: Any) -> bool:
    """True if several processes hold copies of a part, which they can sum."""
    if not is_device_array(leaf) or not isinstance(sharding_of(leaf), jax.sharding.NamedSharding):
        return False
    if leaf.dtype.itemsize not in WORDS or leaf.dtype.name.endswith("int4"):
        return False
    parts = region_devices(tuple(leaf.shape), leaf.sharding).values()
    return any(len({device.process_index for device in devices}) > 1 for devices in parts)


def local_regions(store: Any, leaf: Any) -> list[Region]:
    """Returns the regions of a leaf on this process's devices; all of it for a leaf that is not on devices."""
    if not is_device_array(leaf):
        return [tuple((0, size) for size in store.shape)]
    process = jax.process_index()
    parts = region_devices(tuple(leaf.shape), sharding_of(leaf))
    return [region for region, devices in parts.items() if any(device.process_index == process for device in devices)]


def assigned_pieces(store: Any, leaf: Any, turn: int) -> Iterator[tuple[Region, Box]]:
    """Yields (region, chunk part) to read of a leaf. Regions are shared in turns that `turn` rotates by leaf."""
    regions = local_regions(store, leaf)
    if not is_shared(leaf):
        yield from ((region, box) for region in regions for box in chunk_boxes(store, region))
        return
    for number, (region, devices) in enumerate(region_devices(tuple(leaf.shape), leaf.sharding).items()):
        if region in regions:
            processes = sorted({device.process_index for device in devices})
            begin = (processes.index(jax.process_index()) - turn - number) % len(processes)
            yield from ((region, box) for box in chunk_boxes(store, region)[begin :: len(processes)])


def make_leaf(leaf: Any, buffers: Mapping[Region, np.ndarray]) -> Any:
    """Returns the leaf made of the buffers; for a leaf that is summed its words, with zeros for remote chunks."""
    if not is_device_array(leaf):
        (value,) = buffers.values()
        if not hasattr(leaf, "dtype"):
            return type(leaf)(value.item())
        if isinstance(leaf, np.ndarray):
            return value
        # jax reports the implementation of concrete keys only
        impl = next(kind for kind in KEY_IMPLS if jax.random.key(0, impl=kind).dtype == leaf.dtype)
        return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=impl)
    sharding, local = sharding_of(leaf), []
    if is_shared(leaf):
        buffers = {region: buffer.view(WORDS[buffer.itemsize]) for region, buffer in buffers.items()}
        sharding = jax.sharding.NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)
    for region, devices in region_devices(tuple(leaf.shape), sharding_of(leaf)).items():
        value = buffers.get(region)
        for device in devices:
            if device.process_index == jax.process_index():
                at = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                local.append(jax.device_put(value, at))
                value = np.zeros_like(value) if is_shared(leaf) else value
    return jax.make_array_from_single_device_arrays(tuple(leaf.shape), sharding, local)


@functools.lru_cache(maxsize=64)
def make_sum(mesh: Any, described: tuple) -> Any:
    """Returns the compiled sum of words over the axes missing from each spec. described: (spec, dtype) of each."""
    specs = [spec for spec, _ in described]

    def total_of(words: jax.Array, spec: Any, dtype: Any) -> jax.Array:
        named = {axis for axes in spec if axes for axis in ((axes,) if isinstance(axes, str) else axes)}
        total = jax.lax.psum(words, tuple(axis for axis in mesh.axis_names if axis not in named))
        return total != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(total, dtype)

    add = lambda words: [total_of(part, spec, dtype) for part, (spec, dtype) in zip(words, described)]
    shardings = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    mapped = jax.shard_map(add, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.jit(mapped, out_shardings=shardings)
