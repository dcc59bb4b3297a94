"""Copies a step to a different work folder or bucket, verifies the copy, and resumes a killed copy.

In a local folder the copy is written to `copying-STEP`, and renamed after every leaf was read back. In a bucket the
object that commits the step is written last. The file `copied/STEP.json` in the destination names the source and, after
the copy is complete, the md5 of each file.
"""

import dataclasses
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.runtime.checkpoint import folders
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.lock_stores import folder_lock
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import RECORD, digest, require_record, require_step
from jaxscale.runtime.checkpoint.retention import COPIED
from jaxscale.runtime.checkpoint.storage_errors import read_optional
from jaxscale.runtime.checkpoint.verify import StepDamage, changed_files, verify_folder
from jaxscale.runtime.monitor.events import NAME as EVENTS
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

UNFINISHED_PREFIX = "copying-"  # prefix of the unfinished folder; with this prefix the folder is not listed as a step


@dataclasses.dataclass(frozen=True)
class CopyResult:
    """Numbers of files and bytes of a copy."""

    num_files: int
    num_bytes: int
    kept_bytes: int  # part of num_bytes that existed already, from a killed copy


def copy_step(
    source: Checkpoints, step: int, workdir: Any, on_bytes: Callable[[int, int], None] = lambda done, total: None
) -> CopyResult:
    """Copies a committed step, events.jsonl and, if missing in the destination, config.json to the folder `workdir`.

    on_bytes: called with (bytes copied, total bytes).
    Raises: Stop (CHECKPOINT_CORRUPT) if a leaf is damaged, BadInput if the source does not exist, or if the destination
    belongs to a different run or cannot be written.
    """
    run, folder = source.directory.parent, source.directory / str(step)
    record = require_step(folder, "copy a different step")
    destination = check_destination(run, record, step, workdir)
    for where in (destination.parent, destination, destination / COPIED):
        paths.make_run_dir(where)
    note, final = destination / COPIED / f"{step}.json", destination / str(step)
    claim = {"from": os.fspath(run), "step": step, "run": run_identity(record), "files": {}}
    if folders.is_committed(final):
        found = read_optional(note)
        files = found.get("files", {})
        require_undamaged(final, step)
        if found.get("record") != record["sha256"]:  # a previous copy was killed after the commit
            files = {name: written_size_and_md5(final / name) for name in folders.files_under(final)}
            paths.write_json(note, claim | {"files": files, "record": record["sha256"]})
        copy_events(run, destination.parent)
        return CopyResult(len(files), *[sum(size for size, _ in files.values())] * 2)
    remote = paths.is_remote(destination)
    if remote:
        require_undamaged(folder, step)  # files in a bucket are compared by md5, not read back
    elif changed := list(changed_files(folder, small=True)):
        raise damaged_step_error(folder, step, [StepDamage(*found) for found in changed])
    paths.write_json(note, claim)
    unfinished = final if remote else destination / f"{UNFINISHED_PREFIX}{step}"
    if not remote:
        paths.make_private(unfinished)
    with folder_lock(unfinished, "copying into"):
        claim["files"], resumed = copy_files(folder, unfinished, on_bytes)
        crash_point("copy.read_back")
        if not remote:
            require_undamaged(unfinished, step, finished=False)
        if not (workdir_path := destination.parent / "config.json").exists() and (run / "config.json").exists():
            folders.copy_file(run / "config.json", workdir_path)
        copy_events(run, destination.parent)  # before the commit, because a resumed run needs these events
        crash_point("copy.commit")
        commit_file = folder / folders.COMMITTED
        content = commit_file.read_bytes() if commit_file.exists() else folders.COMMIT_TEXT.encode()
        folders.commit(unfinished, final, content)
    claim["files"][folders.COMMITTED] = written_size_and_md5(final / folders.COMMITTED)
    paths.write_json(note, claim | {"record": record["sha256"]})
    crash_point("copy.done")
    sizes = [size for size, _ in claim["files"].values()]
    return CopyResult(len(sizes), sum(sizes), resumed)


def written_size_and_md5(path: Any) -> list[Any]:
    """Returns [bytes, md5 in hexadecimal] of a file. Raises FileNotFoundError if the file is missing."""
    if (mark := folders.size_and_md5(path)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    return list(mark)


def require_undamaged(folder: Any, step: int, finished: bool = True) -> None:
    """Raises Stop (CHECKPOINT_CORRUPT) if the step in the folder is damaged."""
    if damages := verify_folder(folder, finished=finished).damages:
        raise damaged_step_error(folder, step, damages)


def damaged_step_error(folder: Any, step: int, damages: Sequence[StepDamage]) -> Stop:
    """Returns the error for a damaged step or copy."""
    more = f"; and {len(damages) - 2} more" if len(damages) > 2 else ""
    shown = "; ".join(str(damage) for damage in damages[:2])
    return Stop(
        Exit.CHECKPOINT_CORRUPT,
        f"step {step} in {folder} is damaged: {shown}{more}; remove that folder, or copy another step",
    )


def run_identity(record: Mapping[str, Any]) -> str:
    """Returns a digest of values that are equal in all steps of a run: seed, data fingerprint, and array shapes."""
    data = record["run"].get("data") or {}
    config = record["run"].get("config") or {}
    leaves = {name: described[:2] for name, described in record["leaves"].items()}
    return digest([config.get("seed"), data.get("fingerprint"), leaves])


def check_destination(run: Any, record: Mapping[str, Any], step: int, workdir: Any) -> Any:
    """Returns the folder of checkpoints in `workdir`. Raises BadInput if the folder belongs to a different run.

    The folder is accepted if it is empty, if a copy of this run was started there, or if it shares a step with the run.
    """
    folder = paths.absolute(workdir)
    if os.fspath(folder).rstrip("/") == os.fspath(run).rstrip("/"):
        raise BadInput(f"--to={workdir} is the folder of the source run; choose a different folder")
    destination, identity = folder / "checkpoints", run_identity(record)
    other = Checkpoints(destination, CheckpointConfig())
    steps, shared = other.all_steps(), False
    for theirs in steps:
        try:
            found = require_record(destination / str(theirs))
        except BadInput:
            continue  # the run of a damaged step is unknown
        if run_identity(found) != identity:
            raise BadInput(f"--to={workdir} contains step {theirs} of a different run; choose an empty folder")
        mine = record if theirs == step else read_optional(run / "checkpoints" / str(theirs) / RECORD)
        if mine and mine["sha256"] != found["sha256"]:
            raise BadInput(
                f"--to={workdir} contains a step {theirs} that differs from that of {run}; choose an empty folder"
            )
        shared |= bool(mine)
    started = [read_optional(note) for note in sorted((destination / COPIED).glob("*.json"))]
    if any(note.get("run", identity) != identity for note in started):
        raise BadInput(f"--to={workdir} has a copy from another run, {started[0].get('from')}; choose an empty folder")
    if not started and not shared and (steps or (folder / "config.json").exists()):
        raise BadInput(f"--to={workdir} contains a run with no step in common with {run}; choose an empty folder")
    return destination


def copy_files(source: Any, target: Any, on_bytes: Callable[[int, int], None]) -> tuple[dict[str, list], int]:
    """Copies a step's files except the commit file; returns ({name: [bytes, md5]}, bytes of existing files)."""
    sizes = {name: size for name, size in folders.files_under(source).items() if name != folders.COMMITTED}
    existing = folders.files_under(target)
    for stray in set(existing) - set(sizes):
        (target / stray).unlink()  # from an interrupted copy of a different version of this step
    files, done, resumed = {}, 0, 0
    for name, size in sizes.items():
        with folders.translate_read_errors(source / name):
            source_md5 = folders.size_and_md5(source / name)
            if source_md5 is None:
                raise FileNotFoundError
        if existing.get(name) == size and folders.size_and_md5(target / name) == source_md5:
            resumed += size
        else:
            folders.copy_file(source / name, target / name)
            if folders.size_and_md5(target / name) != source_md5:
                raise Stop(
                    Exit.STORAGE,
                    f"{target / name} differs from its source; check the disk, then run the command again",
                )
        files[name] = list(source_md5)
        done += size
        on_bytes(done, sum(sizes.values()))
        crash_point("copy.file")
    return files, resumed


def copy_events(run: Any, folder: Any) -> None:
    """Copies events.jsonl, which a resumed run needs, unless the target file already starts with the same content."""
    source, target = run / EVENTS, folder / EVENTS
    if not source.exists():
        return
    if target.exists() and target.read_bytes().startswith(source.read_bytes()):
        return
    folders.copy_file(source, target)
