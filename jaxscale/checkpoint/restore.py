"""The state read back from a checkpoint, placed on whatever mesh is there, and refused if one bit of it is another."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxscale.checkpoint.cause import clip, is_trouble, short_cause
from jaxscale.checkpoint.fingerprint import fingerprints
from jaxscale.checkpoint.record import describe_leaf, leaf_text, named_leaves, nest, read_record
from jaxscale.checkpoint.verify import changed_files
from jaxscale.checkpoint.write import epath, import_orbax
from jaxscale.hosts.agree import gathered, next_key
from jaxscale.system.exits import BadInput, Exit, Stop

SHOWN_MISMATCHES = 4
RESTORE_SECONDS = 3600.0  # for the slowest process to read its part


class Unreadable(Exception):
    """A checkpoint that cannot be read as it was saved. args: item, cause."""


def restore_state(folder: Any, abstract_state: Any, partial: bool) -> Any:
    """The state of the step in the folder. All processes call it together and end alike.

    Raises: Unreadable, or Stop: CONFIG_MISMATCH for another shape, STORAGE where the storage cannot be reached.
    """
    wanted = named_leaves(abstract_state)
    failure, saved, restored = None, {}, {}
    try:
        saved = load_record(folder)["leaves"]
        check_fit(folder, saved, {name: describe_leaf(leaf) for name, leaf in wanted.items()}, partial)
        restored = read_state(folder, wanted, partial)
    except (MemoryError, jax.errors.JaxRuntimeError):  # too little memory here says nothing about the files
        raise
    except Stop as stop:
        failure = [int(stop.code), "", str(stop)]
    except Unreadable as error:
        failure = [0, *error.args]
    told = gathered(next_key("restore"), failure, RESTORE_SECONDS)  # before the devices are asked, for all or for none
    for process, found in enumerate(told):
        if found:
            code, item, cause = found
            cause = f"process {process}: {cause}" if len(told) > 1 else cause
            raise Stop(Exit(code), cause) if code else Unreadable(item, cause)
    leaves = [restored[name] for name in wanted]
    for name, found in zip(wanted, fingerprints(leaves)):
        if found != saved[name][2]:
            raise Unreadable("state", f"the bits of {name} are not those that were saved")
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def changed_files_of(folder: Any, small: bool = False) -> str:
    """Which files of a step that came back bit for bit are not as they were written, in words; empty if all are.

    What changed is read by no array, so training may go on from it; the disk may not be trusted any longer. Each
    process looks at its share of the files, and all call this together. small: before the arrays are read, only the
    files beside them.
    """
    share, shares = jax.process_index(), jax.process_count()
    try:
        mine = [list(found) for found in changed_files(folder, share, shares, small=small)]
    except Exception as error:
        if not is_trouble(error):
            raise
        mine = [["its files", f"they could not be compared with their list: {short_cause(error)}"]]
    told = [found for process in gathered(next_key("files"), mine, RESTORE_SECONDS) for found in process]
    if not told:
        return ""
    (name, cause), more = told[0], f"; and {len(told) - 1} more" if len(told) > 1 else ""
    rest = "jaxscale ckpt verify reads all of it" if small else "every array came back bit for bit"
    return f"{name} in {folder}: {cause}{more}; {rest}, but is the disk well?"


def load_record(folder: Any) -> dict[str, Any]:
    """The record of a step. Raises Unreadable, or Stop (STORAGE) where the storage cannot be reached."""
    try:
        return read_record(folder)
    except Exception as error:
        trouble = is_trouble(error)
        if not trouble and not isinstance(error, OSError | ValueError):
            raise
        cause = clip(str(error)) if type(error) in (ValueError, BadInput) else short_cause(error)
        raise_for(folder, "run", cause, trouble)


def read_state(folder: Any, wanted: Mapping[str, Any], partial: bool) -> dict[str, Any]:
    """{name: leaf} of a step. Raises as load_record does, and what too little memory raises as it is."""
    try:
        return read_leaves(folder / "state", wanted, partial)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise_for(folder, "state", short_cause(error), is_trouble(error))


def raise_for(folder: Any, item: str, cause: str, trouble: bool) -> None:
    """Raises what a failed read is: trouble with the storage leaves the checkpoint as good as it was."""
    if trouble:
        raise Stop(
            Exit.STORAGE,
            f"step {folder.name} cannot be reached: {item} in {folder / item}: {cause}; nothing was changed: start "
            "again when the storage answers",
        )
    raise Unreadable(item, cause)


def read_leaves(folder: Any, wanted: Mapping[str, Any], partial: bool) -> dict[str, Any]:
    """{name: leaf} as Orbax brings them back."""
    orbax = import_orbax()
    restore_args = {name: restore_arg(orbax, leaf) for name, leaf in wanted.items()}
    arguments = orbax.args.PyTreeRestore(item=nest(wanted), restore_args=nest(restore_args), partial_restore=partial)
    return named_leaves(orbax.PyTreeCheckpointHandler().restore(epath(folder), args=arguments))


def restore_arg(orbax: Any, leaf: Any) -> Any:
    """How Orbax should bring this leaf back: a Python number as one, an array placed by its sharding."""
    if not hasattr(leaf, "dtype"):
        return orbax.RestoreArgs(restore_type=type(leaf))
    if isinstance(leaf, np.ndarray):
        return orbax.RestoreArgs(restore_type=np.ndarray)
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return orbax.ArrayRestoreArgs(sharding=sharding, dtype=leaf.dtype, global_shape=leaf.shape)


def check_fit(folder: Any, saved: Mapping, wanted: Mapping, partial: bool) -> None:
    """Raises Stop (CONFIG_MISMATCH) listing leaves that differ in name, shape or dtype: Orbax casts silently."""
    differences = []
    for name in sorted(wanted | saved):
        old, new = (list(side[name][:2]) if name in side else None for side in (saved, wanted))
        if old != new and not (partial and new is None):
            differences.append(f"{name} is {leaf_text(old)} in the checkpoint and {leaf_text(new)} in this config")
    if differences:
        more = f"; and {len(differences) - SHOWN_MISMATCHES} more" if len(differences) > SHOWN_MISMATCHES else ""
        raise Stop(
            Exit.CONFIG_MISMATCH,
            f"{folder} does not fit: {'; '.join(differences[:SHOWN_MISMATCHES])}{more}; "
            "use the config it was trained with, or another workdir",
        )
