"""A step copied to another folder or bucket: checked on the way, gone on with after a kill, never over another run.

A local copy grows in `copying-STEP` and is renamed once every leaf was read back from it; in a bucket the object that
makes a step count is written last. `copied/STEP.json` beside the steps names the source and, once the copy is whole,
each file with its md5, by which a killed copy knows what it has brought already.
"""

import dataclasses
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.folders import (
    COMMIT_TEXT,
    COMMITTED,
    commit,
    copy_file,
    files_under,
    is_committed,
    mark_of,
    reading,
)
from jaxscale.checkpoint.lock_stores import held
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import RECORD, digest, require_record, require_step
from jaxscale.checkpoint.retention import COPIED
from jaxscale.checkpoint.storage_errors import read_optional
from jaxscale.checkpoint.verify import Damage, changed_files, verify_folder
from jaxscale.monitor.events import NAME as EVENTS
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

GROWING = "copying-"  # never a number, so it never counts as a step


@dataclasses.dataclass(frozen=True)
class Copied:
    """What a copy did."""

    num_files: int
    num_bytes: int
    kept_bytes: int  # of them that an earlier, killed copy had brought already


def copy_step(
    source: Checkpoints, step: int, workdir: Any, on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> Copied:
    """Copies a committed step into the run folder `workdir`, with events.jsonl, and config.json if that has none.

    Args: on_bytes: called with the bytes that are there and those there will be.
    Raises: Stop (CHECKPOINT_CORRUPT) if a leaf is not what was saved, before the copy counts as a step; BadInput if
    the destination belongs to another run, cannot be written, or the source is not there (any more).
    """
    run, folder = source.directory.parent, source.directory / str(step)
    record = require_step(folder, "take another step")
    destination = check_destination(run, record, step, workdir)
    for where in (destination.parent, destination, destination / COPIED):
        paths.make_run_dir(where)
    note, final = destination / COPIED / f"{step}.json", destination / str(step)
    claim = {"from": os.fspath(run), "step": step, "run": run_identity(record), "files": {}}
    if is_committed(final):
        found = read_optional(note)
        files = found.get("files", {})
        require_whole(final, step)
        if found.get("record") != record["sha256"]:  # killed when the step counted and its note was not yet written
            files = {name: written_mark(final / name) for name in files_under(final)}
            paths.write_json(note, claim | {"files": files, "record": record["sha256"]})
        copy_events(run, destination.parent)
        return Copied(len(files), *[sum(size for size, _ in files.values())] * 2)
    remote = paths.is_remote(destination)
    if remote:
        require_whole(folder, step)  # what arrives is compared with this by md5, and not read back
    elif changed := list(changed_files(folder, small=True)):
        raise damaged(folder, step, [Damage(*found) for found in changed])
    paths.write_json(note, claim)
    growing = final if remote else destination / f"{GROWING}{step}"
    if not remote:
        paths.make_private(growing)
    with held(growing, "copying into"):
        claim["files"], kept = copy_files(folder, growing, on_bytes)
        crash_point("copy.read_back")
        if not remote:
            require_whole(growing, step, finished=False)
        if not (workdir_path := destination.parent / "config.json").exists() and (run / "config.json").exists():
            copy_file(run / "config.json", workdir_path)
        copy_events(run, destination.parent)  # before the step counts: what it binds a run to is never missing
        crash_point("copy.commit")
        mark = folder / COMMITTED
        commit(growing, final, mark.read_bytes() if mark.exists() else COMMIT_TEXT.encode())
    claim["files"][COMMITTED] = written_mark(final / COMMITTED)
    paths.write_json(note, claim | {"record": record["sha256"]})
    crash_point("copy.done")
    sizes = [size for size, _ in claim["files"].values()]
    return Copied(len(sizes), sum(sizes), kept)


def written_mark(path: Any) -> list[Any]:
    """Returns [bytes, md5 in hexadecimal] of a file that was just written. Raises FileNotFoundError without it."""
    if (mark := mark_of(path)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    return list(mark)


def require_whole(folder: Any, step: int, finished: bool = True) -> None:
    """Raises Stop (CHECKPOINT_CORRUPT) naming what is damaged."""
    if damages := verify_folder(folder, finished=finished).damages:
        raise damaged(folder, step, damages)


def damaged(folder: Any, step: int, damages: Sequence[Damage]) -> Stop:
    """The error for a step, or a copy of it, that is not what was saved."""
    more = f"; and {len(damages) - 2} more" if len(damages) > 2 else ""
    shown = "; ".join(str(damage) for damage in damages[:2])
    return Stop(
        Exit.CHECKPOINT_CORRUPT,
        f"step {step} in {folder} is damaged: {shown}{more}; remove that folder, or copy another step",
    )


def run_identity(record: Mapping[str, Any]) -> str:
    """What all steps of a run have in common and can never change: its seed, its data and the shapes of its state."""
    data = record["run"].get("data") or {}
    config = record["run"].get("config") or {}
    leaves = {name: described[:2] for name, described in record["leaves"].items()}
    return digest([config.get("seed"), data.get("fingerprint"), leaves])


def check_destination(run: Any, record: Mapping[str, Any], step: int, workdir: Any) -> Any:
    """The folder of checkpoints below `workdir`. Raises BadInput if another run lives there, and touches nothing.

    It is this run's if it is empty, if a copy of this run was begun there, or if both hold one and the same step.
    """
    folder = paths.as_path(workdir)
    folder = folder if paths.is_remote(workdir) else folder.absolute()
    if os.fspath(folder).rstrip("/") == os.fspath(run).rstrip("/"):
        raise BadInput(f"--to={workdir} is the run itself; name another folder")
    destination, own = folder / "checkpoints", run_identity(record)
    other = Checkpoints(destination, CheckpointConfig())
    steps, shared = other.all_steps(), False
    for theirs in steps:
        try:
            found = require_record(destination / str(theirs))
        except BadInput:
            continue  # damaged: it says nothing of whose it is
        if run_identity(found) != own:
            raise BadInput(f"--to={workdir} holds step {theirs} of another run; name an empty folder")
        mine = record if theirs == step else read_optional(run / "checkpoints" / str(theirs) / RECORD)
        if mine and mine["sha256"] != found["sha256"]:
            raise BadInput(f"--to={workdir} has another step {theirs} than {run}: it is another run; name an empty one")
        shared |= bool(mine)
    begun = [read_optional(destination / COPIED / name) for name in copies(destination)]
    if any(note.get("run", own) != own for note in begun):
        raise BadInput(f"--to={workdir} holds a copy of another run, {begun[0].get('from')}; name an empty folder")
    if not begun and not shared and (steps or (folder / "config.json").exists()):
        raise BadInput(f"--to={workdir} holds a run that shares no step with {run}; name an empty folder")
    return destination


def copies(destination: Any) -> list[str]:
    """The notes of copies that were begun there."""
    folder = destination / COPIED
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".json")) if folder.exists() else []


def copy_files(source: Any, target: Any, on_bytes: Callable[[int, int], None]) -> tuple[dict[str, list], int]:
    """({name: [bytes, md5]} of all files of a step but the one that commits it, bytes that were there already)."""
    sizes = {name: size for name, size in files_under(source).items() if name != COMMITTED}
    there = files_under(target)
    for stray in set(there) - set(sizes):
        (target / stray).unlink()  # another version of this step was being copied
    files, done, kept = {}, 0, 0
    for name, size in sizes.items():
        with reading(source / name):
            mark = mark_of(source / name)
            if mark is None:
                raise FileNotFoundError
        if there.get(name) == size and mark_of(target / name) == mark:
            kept += size
        else:
            copy_file(source / name, target / name)
            if mark_of(target / name) != mark:
                raise Stop(
                    Exit.STORAGE, f"{target / name} is not what was written there; is the disk well? run it again"
                )
        files[name] = list(mark)
        done += size
        on_bytes(done, sum(sizes.values()))
        crash_point("copy.file")
    return files, kept


def copy_events(run: Any, folder: Any) -> None:
    """Brings events.jsonl up to the run's, the whole file at once: a run that goes on is bound by its rewinds.

    One that holds all of the run's events and more stays: training has gone on from the copy.
    """
    source, target = run / EVENTS, folder / EVENTS
    if not source.exists():
        return
    if target.exists() and target.read_bytes().startswith(source.read_bytes()):
        return
    copy_file(source, target)
