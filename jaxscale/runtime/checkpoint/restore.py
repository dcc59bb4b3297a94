"""Restores checkpoints: selects the newest valid step, and reads its state onto any mesh.

A state is refused if a single bit differs from what was saved. Skipped steps are logged.

Each byte is read from storage once. If several processes need the same part of an array, each process reads some chunks
of that part and fills the other chunks with zeros. An all-reduce then sums these copies as unsigned integers. Each
chunk is nonzero in at most one process, so the sum reproduces the saved bits. Only the all-reduce communicates, and it
starts after all processes have agreed that reading succeeded.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from jaxscale.runtime.checkpoint import folders, record
from jaxscale.runtime.checkpoint.array_store import ArrayReader, Box, Region, chunk_boxes, format_mismatch, read_ahead
from jaxscale.runtime.checkpoint.fingerprint import WORDS, fingerprints
from jaxscale.runtime.checkpoint.record import describe_leaf, leaf_text, named_leaves, read_record
from jaxscale.runtime.checkpoint.storage_errors import clip, is_storage_error, short_reason
from jaxscale.runtime.checkpoint.verify import DamagedCheckpoint, changed_files
from jaxscale.runtime.hosts.agree import agreed, gathered, next_key, this_process
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

MAX_SHOWN = 4
RESTORE_SECONDS = 3600.0  # timeout for the slowest process to read its part
AHEAD_BYTES = 512 << 20  # bytes in flight: bandwidth to a bucket, about 2 GB/s, times a fraction of a second
GROUP_BYTES = 1 << 30  # bytes per device and all-reduce program, which are needed in addition to the state
KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


class UnreadableCheckpoint(Exception):
    """Raised with (item, cause) for a checkpoint that differs from what was saved."""


def restore_state(folder: Any, abstract_state: Any, partial: bool) -> Any:
    """Returns the state of the step in a folder. Call this in all processes. On failure, all raise the same error.

    Raises: UnreadableCheckpoint, Stop (CONFIG_MISMATCH) if shapes or dtypes differ from `abstract_state`, or Stop
    (STORAGE) if the storage cannot be reached.
    """
    wanted = named_leaves(abstract_state)
    failure, saved, restored = None, {}, {}
    try:
        saved = load_record(folder)["leaves"]
        check_formats(folder, saved, {name: describe_leaf(leaf) for name, leaf in wanted.items()}, partial)
        restored = read_state(folder, wanted)
    except Stop as stop:
        failure = [int(stop.code), "", str(stop)]
    except UnreadableCheckpoint as error:
        failure = [0, *error.args]
    # all processes agree before the collective, so that either all or none take part
    if found := gathered(next_key("restore"), failure, RESTORE_SECONDS, made_of=first_failure):
        code, item, cause = found
        raise Stop(Exit(code), cause) if code else UnreadableCheckpoint(item, cause)
    restored = sum_shared_leaves(restored, wanted)
    leaves = [restored[name] for name in wanted]
    for name, found in zip(wanted, fingerprints(leaves)):
        if found != saved[name][2]:
            raise UnreadableCheckpoint("state", f"the bits of {name} are not those that were saved")
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def changed_files_message(folder: Any, small: bool = False) -> str:
    """Returns a message about damaged files of a step whose arrays are correct, or '' if there are none.

    The damaged bytes belong to no array, so training may resume from the step, but the disk may be failing. Each
    process checks its share of the files; call in all processes. small: skip the array files.
    """
    _, share, shares, _ = this_process()
    try:
        mine = [list(found) for found in changed_files(folder, share, shares, small=small)]
    except Exception as error:
        if not is_storage_error(error):
            raise
        mine = [["its files", f"they could not be verified: {short_reason(error)}"]]
    changed, number = gathered(next_key("files"), mine, RESTORE_SECONDS, made_of=first_and_count)
    if not number:
        return ""
    (name, cause), more = changed, f"; and {number - 1} more" if number > 1 else ""
    scope = "`jaxscale ckpt verify` checks all files" if small else "every array is bitwise correct"
    return f"{name} in {folder}: {cause}{more}; {scope}; check the disk"


def first_failure(answers: list[list[Any] | None]) -> list[Any] | None:
    """Returns [exit code or 0, item, cause with the process index] of the first process that failed, or None."""
    for process, found in enumerate(answers):
        if found:
            return [*found[:2], f"process {process}: {found[2]}" if len(answers) > 1 else found[2]]
    return None


def first_and_count(answers: list[list[Any]]) -> tuple[Any, int]:
    """Returns (first finding or None, total number of findings) over all processes."""
    found = [one for answer in answers for one in answer]
    return (found[0] if found else None), len(found)


def load_record(folder: Any) -> dict[str, Any]:
    """Returns the record of a step. Raises UnreadableCheckpoint, or Stop (STORAGE) if the storage cannot be reached."""
    try:
        return read_record(folder)
    except Exception as error:
        is_storage = is_storage_error(error)
        if not is_storage and not isinstance(error, OSError | ValueError):
            raise
        cause = clip(str(error)) if type(error) in (ValueError, BadInput) else short_reason(error)
        raise_read_error(folder, "run", cause, is_storage)


def read_state(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result of read_leaves(). Raises UnreadableCheckpoint, or Stop (STORAGE) as load_record() does."""
    try:
        found = read_leaves(folder, wanted)
        crash_point("restore.read")
        return found
    except (MemoryError, jax.errors.JaxRuntimeError):  # out of memory, which is not an error of the files
        raise
    except Exception as error:
        cause = str(error) if isinstance(error, DamagedCheckpoint) else short_reason(error)
        raise_read_error(folder, "state", cause, is_storage_error(error))


def raise_read_error(folder: Any, item: str, cause: str, is_storage: bool) -> NoReturn:
    """Raises Stop (STORAGE) if the storage failed, else UnreadableCheckpoint."""
    if is_storage:
        raise Stop(
            Exit.STORAGE,
            f"step {folder.name} cannot be reached: {item} in {folder / item}: {cause}; nothing was changed; "
            "restart when the storage responds",
        )
    raise UnreadableCheckpoint(item, cause)


def check_formats(folder: Any, saved: Mapping, wanted: Mapping, partial: bool) -> None:
    """Raises Stop (CONFIG_MISMATCH) if the names, shapes or dtypes of the saved and requested leaves differ."""
    differences = []
    for name in sorted({*wanted, *saved}):
        old, new = (list(side[name][:2]) if name in side else None for side in (saved, wanted))
        if old != new and not (partial and new is None):
            differences.append(f"{name} is {leaf_text(old)} in the checkpoint, but {leaf_text(new)} in this config")
    if differences:
        more = f"; and {len(differences) - MAX_SHOWN} more" if len(differences) > MAX_SHOWN else ""
        raise Stop(
            Exit.CONFIG_MISMATCH,
            f"{folder} does not match this config: {'; '.join(differences[:MAX_SHOWN])}{more}; "
            "use the config of the checkpoint, or choose a different --workdir",
        )


def newest_readable_step(checkpoints: Any, log: Callable[[str], None], before: int | None = None) -> int | None:
    """Returns the newest step (below `before`) with a valid record, or None if there are no steps.

    Logs skipped steps, but does not move them. Call in all processes.
    Raises: Stop (CHECKPOINT_CORRUPT) if steps exist but none has a valid record.
    """
    steps = agreed(lambda: [step for step in checkpoints.all_steps() if before is None or step < before])
    newest = agreed(lambda: checkpoints.newest(before))
    if steps and newest is None:
        checkpoints.read_record(steps[-1])
    for step in steps:
        if step > newest:
            cause = record_error(checkpoints, step).removesuffix(checkpoints.way_out(step, newest))
            log(f"WARNING: {cause}; using step {newest}")
    return newest


def record_error(checkpoints: Any, step: int) -> str:
    """Returns the error of a step's record, or '' if the record is valid. Raises Stop (STORAGE)."""
    try:
        checkpoints.read_record(step)
    except Stop as error:
        if error.code != Exit.CHECKPOINT_CORRUPT:
            raise
        return str(error)
    return ""


def warn_if_last_good_lost(checkpoints: Any, log: Callable[[str], None]) -> None:
    """Logs a warning and an event if the step in last_good.json is missing, replaced, or without its commit file.

    In a bucket, a step without a commit file would be deleted as an interrupted save, so it is set aside first.
    Raises Stop (CHECKPOINT_CORRUPT) if no other step exists, because a run must not silently start from scratch.
    """
    directory = checkpoints.directory
    good = agreed(lambda: record.load_last_good(directory))
    if not good:
        return
    if isinstance(good, str):
        cause = f"{good}; the last saved step is unknown until the next save rewrites that file"
        return checkpoints.warn(None, cause, log)
    step, newest = good["step"], agreed(checkpoints.latest_step)
    if agreed(lambda: folders.is_committed(directory / str(step))):
        if record_error(checkpoints, step) or checkpoints.read_record(step)["sha256"] == good["sha256"]:
            return  # an invalid record is reported when the step is restored
        cause = f"step {step} differs from the step that this run saved last ({directory / record.LAST_GOOD})"
        checkpoints.note("alarm", step, cause=f"{cause}")
        return log(f"WARNING: {cause}; it may be from a different run")
    if newest is not None and agreed(lambda: is_last_good_set_aside(directory, good)):
        return
    cause = f"step {step}, the last complete step ({directory / record.LAST_GOOD}), is missing"
    if paths.is_remote(directory) and agreed(lambda: (directory / str(step)).exists()):
        moved = checkpoints.set_aside(step, "damaged")
        cause = f"step {step} was complete, but its {folders.COMMITTED} is missing; moved to {moved}"
    if newest is None:
        way_out = "restore a step from a copy, or choose a different --workdir"
        raise Stop(Exit.CHECKPOINT_CORRUPT, f"{cause}, and no other step exists; {way_out}")
    checkpoints.warn(step, cause, log)


def is_last_good_set_aside(directory: Any, good: Mapping[str, Any]) -> bool:
    """Returns True if the last good step was set aside by an earlier version, which did not update last_good.json.

    A set-aside step with a different record is ignored, because the step was saved again later. A set-aside step with
    an unreadable record is not ignored.
    """
    for moved in folders.set_aside_folders(directory):
        if moved.name.split("-")[1] == str(good["step"]):
            try:
                same = load_record(moved)["sha256"] == good["sha256"]
            except UnreadableCheckpoint:
                same = True
            if same:
                return True
    return False


def read_leaves(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: leaf} with the chunks assigned to this process, for `sum_shared_leaves`. Does not communicate.

    wanted: {name: jax.ShapeDtypeStruct, array or Python number}; leaves without a sharding use the first local device.
    Raises: DamagedCheckpoint if a shape or dtype differs, and the errors of TensorStore.
    """
    arrays = ArrayReader(folder)
    opened = {name: arrays.open_async(name) for name in wanted}
    stores, plans = {}, {}
    for turn, (name, leaf) in enumerate(wanted.items()):
        stores[name] = store = opened[name].result()
        if wrong := format_mismatch(store, *describe_leaf(leaf)):
            raise DamagedCheckpoint(f"{name}: {wrong}")
        plans[name] = assigned_chunks(store, leaf, turn)
    requests = ((stores[name], box) for name, plan in plans.items() for boxes in plan.values() for box in boxes)
    values = read_ahead(requests, AHEAD_BYTES)
    leaves = {}
    for name, leaf in wanted.items():
        buffers = {}
        for region, boxes in plans[name].items():
            buffers[region] = np.zeros([end - begin for begin, end in region], stores[name].dtype.numpy_dtype)
            for box in boxes:
                inside = tuple(slice(part.start - begin, part.stop - begin) for part, (begin, _) in zip(box, region))
                buffers[region][inside] = next(values)
        leaves[name] = make_leaf(leaf, buffers)
    return leaves


def sum_shared_leaves(partial: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {name: leaf} with the chunks of all processes. Call in all processes. Empties `partial`."""
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
    """Returns {region of an array: devices of all processes with this region, sorted by id}."""
    found: dict[Region, list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(tuple(part.indices(size)[:2] for part, size in zip(index, shape)), []).append(device)
    return {region: sorted(found[region], key=lambda device: device.id) for region in sorted(found)}


def sharding_of(leaf: Any) -> jax.sharding.Sharding:
    """Returns the sharding of a leaf; the default is a SingleDeviceSharding on the first local device."""
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def is_device_array(leaf: Any) -> bool:
    """Returns True for a JAX array or its abstract value; False for Python and numpy values and random keys."""
    is_array = hasattr(leaf, "dtype") and not isinstance(leaf, np.ndarray)
    return is_array and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_shared(leaf: Any) -> bool:
    """Returns True if several processes have copies of a region, and the dtype can be summed as unsigned integers."""
    if not is_device_array(leaf) or not isinstance(sharding_of(leaf), jax.sharding.NamedSharding):
        return False
    if leaf.dtype.itemsize not in WORDS or leaf.dtype.name.endswith("int4"):
        return False
    parts = region_devices(tuple(leaf.shape), leaf.sharding).values()
    return any(len({device.process_index for device in devices}) > 1 for devices in parts)


def assigned_chunks(store: Any, leaf: Any, turn: int) -> dict[Region, list[Box]]:
    """Returns {region of a leaf on this process: chunks to read}. turn: leaf index; rotates the chunks."""
    if not is_device_array(leaf):
        whole = tuple((0, size) for size in store.shape)
        return {whole: chunk_boxes(store, whole)}
    plan, process, shared = {}, jax.process_index(), is_shared(leaf)
    for number, (region, devices) in enumerate(region_devices(tuple(leaf.shape), sharding_of(leaf)).items()):
        processes = sorted({device.process_index for device in devices})
        if process in processes:
            begin = (processes.index(process) - turn - number) % len(processes)
            boxes = chunk_boxes(store, region)
            plan[region] = boxes[begin :: len(processes)] if shared else boxes
    return plan


def make_leaf(leaf: Any, buffers: Mapping[Region, np.ndarray]) -> Any:
    """Makes a leaf from host buffers. A shared leaf has an unsigned dtype, and zeros for remote chunks."""
    if not is_device_array(leaf):
        (value,) = buffers.values()
        if not hasattr(leaf, "dtype"):
            return type(leaf)(value.item())
        if isinstance(leaf, np.ndarray):
            return value
        # JAX reports the implementation of concrete keys only
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
    """Returns a jitted function that sums arrays over the mesh axes not in their specs. described: [(spec, dtype)]."""
    specs = [spec for spec, _ in described]

    def total_of(words: jax.Array, spec: Any, dtype: Any) -> jax.Array:
        named = {axis for axes in spec if axes for axis in ((axes,) if isinstance(axes, str) else axes)}
        total = jax.lax.psum(words, tuple(axis for axis in mesh.axis_names if axis not in named))
        return total != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(total, dtype)

    add = lambda words: [total_of(part, spec, dtype) for part, (spec, dtype) in zip(words, described)]
    shardings = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    mapped = jax.shard_map(add, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.jit(mapped, out_shardings=shardings)
