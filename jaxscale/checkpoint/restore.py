"""A checkpoint read back: which step is taken where not all can be believed, and its state on whatever mesh is there.

A state of which one bit differs from what was saved is refused; what is passed over is logged.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax

from jaxscale.checkpoint import folders, record, sharded_read
from jaxscale.checkpoint.fingerprint import fingerprints
from jaxscale.checkpoint.record import describe_leaf, leaf_text, named_leaves, read_record
from jaxscale.checkpoint.storage_errors import clip, is_storage_error, short_reason
from jaxscale.checkpoint.verify import changed_files
from jaxscale.hosts.agree import agreed, gathered, next_key, process_and_count
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

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
        restored = read_state(folder, wanted)
    except (MemoryError, jax.errors.JaxRuntimeError):  # too little memory here says nothing about the files
        raise
    except Stop as stop:
        failure = [int(stop.code), "", str(stop)]
    except Unreadable as error:
        failure = [0, *error.args]
    # before the devices are asked, for all or for none
    if found := gathered(next_key("restore"), failure, RESTORE_SECONDS, made_of=first_failure):
        code, item, cause = found
        raise Stop(Exit(code), cause) if code else Unreadable(item, cause)
    restored = sharded_read.exchanged(restored, wanted)
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
    share, shares = process_and_count()
    try:
        mine = [list(found) for found in changed_files(folder, share, shares, small=small)]
    except Exception as error:
        if not is_storage_error(error):
            raise
        mine = [["its files", f"they could not be compared with their list: {short_reason(error)}"]]
    changed, number = gathered(next_key("files"), mine, RESTORE_SECONDS, made_of=first_and_number)
    if not number:
        return ""
    (name, cause), more = changed, f"; and {number - 1} more" if number > 1 else ""
    rest = "jaxscale ckpt verify reads all of it" if small else "every array came back bit for bit"
    return f"{name} in {folder}: {cause}{more}; {rest}, but is the disk well?"


def first_failure(answers: list[list[Any] | None]) -> list[Any] | None:
    """[exit code or 0, item, cause with the process] of the first process that could not read, or None."""
    for process, found in enumerate(answers):
        if found:
            return [*found[:2], f"process {process}: {found[2]}" if len(answers) > 1 else found[2]]
    return None


def first_and_number(answers: list[list[Any]]) -> tuple[Any, int]:
    """(the first of all that the processes have found, how many they have found)."""
    found = [one for answer in answers for one in answer]
    return (found[0] if found else None), len(found)


def load_record(folder: Any) -> dict[str, Any]:
    """The record of a step. Raises Unreadable, or Stop (STORAGE) where the storage cannot be reached."""
    try:
        return read_record(folder)
    except Exception as error:
        trouble = is_storage_error(error)
        if not trouble and not isinstance(error, OSError | ValueError):
            raise
        cause = clip(str(error)) if type(error) in (ValueError, BadInput) else short_reason(error)
        raise_for(folder, "run", cause, trouble)


def read_state(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What sharded_read.read_leaves reads. Raises as load_record does, and what too little memory raises as it is."""
    try:
        found = sharded_read.read_leaves(folder, wanted)
        crash_point("restore.read")
        return found
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        cause = str(error) if isinstance(error, sharded_read.Misfit) else short_reason(error)
        raise_for(folder, "state", cause, is_storage_error(error))


def raise_for(folder: Any, item: str, cause: str, trouble: bool) -> NoReturn:
    """Raises what a failed read is: trouble with the storage leaves the checkpoint as good as it was."""
    if trouble:
        raise Stop(
            Exit.STORAGE,
            f"step {folder.name} cannot be reached: {item} in {folder / item}: {cause}; nothing was changed: start "
            "again when the storage answers",
        )
    raise Unreadable(item, cause)


def check_fit(folder: Any, saved: Mapping, wanted: Mapping, partial: bool) -> None:
    """Raises Stop (CONFIG_MISMATCH) listing leaves that differ in name, shape or dtype: Orbax casts silently."""
    differences = []
    for name in sorted({*wanted, *saved}):
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


def newest_to_read(checkpoints: Any, log: Callable[[str], None], before: int | None = None) -> int | None:
    """The newest step (below `before`) whose record can be believed, for those who only read; None if there is none.

    Nothing is moved, and what is passed over is said. For all processes.
    Raises: Stop (CHECKPOINT_CORRUPT) if there are steps, and no record can be believed.
    """
    steps = agreed(lambda: [step for step in checkpoints.all_steps() if before is None or step < before])
    newest = agreed(lambda: checkpoints.newest(before))
    if steps and newest is None:
        checkpoints.read_record(steps[-1])
    for step in steps:
        if step > newest:
            cause = why_not(checkpoints, step).removesuffix(checkpoints.way_out(step, newest))
            log(f"WARNING: {cause}; step {newest} is taken")
    return newest


def why_not(checkpoints: Any, step: int) -> str:
    """Why the record of a step cannot be believed; '' if it can. Raises Stop (STORAGE) where that may pass."""
    try:
        checkpoints.read_record(step)
    except Stop as error:
        if error.code != Exit.CHECKPOINT_CORRUPT:
            raise
        return str(error)
    return ""


def log_lost(checkpoints: Any, log: Callable[[str], None]) -> None:
    """Says, in an event as well, if the last good step is gone, is another or lacks its commit mark, or is not known.

    In a bucket a step without its mark looks like a save that was killed, and would be removed: it is set aside.
    Raises Stop (CHECKPOINT_CORRUPT) where there is no other step: what is lost is not begun anew in silence.
    """
    directory = checkpoints.directory
    good = agreed(lambda: record.look_up_last_good(directory))
    if not good:
        return
    if isinstance(good, str):
        cause = f"{good}; which step was saved last is not known from it, and the next save writes it anew"
        checkpoints.note("alarm", None, cause=cause)
        return log(f"WARNING: {cause}")
    step, newest = good["step"], agreed(checkpoints.latest_step)
    if agreed(lambda: folders.is_committed(directory / str(step))):
        if why_not(checkpoints, step) or checkpoints.read_record(step)["sha256"] == good["sha256"]:
            return  # what cannot be believed is reported when it is opened
        cause = (
            f"step {step} is not the one that was last saved here ({directory / record.LAST_GOOD}): was it copied in"
        )
        checkpoints.note("alarm", step, cause=f"{cause}?")
        return log(f"WARNING: {cause} from another run?")
    if newest is not None and agreed(lambda: was_set_aside(directory, good)):
        return
    cause = f"step {step}, the last that was saved whole ({directory / record.LAST_GOOD}), is not there any more"
    if paths.is_remote(directory) and agreed(lambda: (directory / str(step)).exists()):
        moved = checkpoints.set_aside(step, "damaged")
        cause = f"step {step} was saved whole and has no {folders.COMMITTED} any more; it is now {moved}"
    if newest is None:
        way_out = "bring one back from a copy, or name another --workdir"
        raise Stop(Exit.CHECKPOINT_CORRUPT, f"{cause}, and there is no other; {way_out}")
    checkpoints.note("alarm", step, cause=cause)
    log(f"WARNING: {cause}")


def was_set_aside(directory: Any, good: Mapping[str, Any]) -> bool:
    """True if the last good step was set aside, where earlier versions did not forget it: it is not lost.

    One that was saved anew after that, and is gone, is. Where its record cannot be read, as of a damaged one, it is
    taken for the same.
    """
    for moved in folders.those_set_aside(directory):
        if moved.name.split("-")[1] == str(good["step"]):
            try:
                same = load_record(moved)["sha256"] == good["sha256"]
            except Unreadable:
                same = True
            if same:
                return True
    return False
