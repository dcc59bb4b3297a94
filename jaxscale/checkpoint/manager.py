"""Checkpoints of a run: saved in the background, found again after any crash, and never trusted unread.

A folder per step holds two items: `state`, the arrays as nested dicts of plain names that stock Orbax can read too, and
`run`, a JSON object with what else a run needs (resolved config, data position) and with the name, shape, dtype and
fingerprint of every array, sealed by a sha256. Orbax is the only heavy import of a run that is not needed before the
first save, so it is imported at first use; `prepare()` starts that in the background once the first step is running.
"""

import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxscale import paths
from jaxscale.checkpoint.cause import short_cause
from jaxscale.checkpoint.fingerprint import fingerprints
from jaxscale.checkpoint.quiet_orbax import import_orbax
from jaxscale.exits import Exit, Stop
from jaxscale.hosts.agree import agreed
from jaxscale.schema import setting

OWN_ENTRIES = ("_CHECKPOINT_METADATA", "commit_success.txt", "state", "run")
COMMITTED = "commit_success.txt"  # an object store has no rename, so there Orbax writes this last
SAVE_TIMEOUT_SECONDS = 300  # Orbax's default of 1200 would hide a dead disk or peer for 20 minutes
SHOWN_MISMATCHES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and which checkpoints stay."""

    save_every_steps: int = setting(500, "steps between two checkpoints; 0: only at the end", may_change=True)
    keep_last: int = setting(3, "newest checkpoints that are kept", may_change=True)
    keep_every_steps: int = setting(
        0, "checkpoints of steps divisible by this are kept for good; 0: none", may_change=True
    )

    def __post_init__(self):
        for name in ("save_every_steps", "keep_every_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last} must be at least 1, or there would be nothing to go on from")


class Checkpoints:
    """The checkpoints in a folder. Making one touches no file and imports nothing heavy.

    Raises (all methods): Stop with code STORAGE if a save fails, CHECKPOINT_CORRUPT if what was saved cannot be read
    back as it was, CONFIG_MISMATCH if it does not fit the state that is asked for.
    """

    def __init__(self, directory: Any, cfg: CheckpointConfig):
        self.directory, self.cfg = paths.as_path(directory).absolute(), cfg
        self.manager, self.pending_step = None, None

    def prepare(self) -> None:
        """Starts the import of Orbax (0.5 to 2 s) in a thread of its own; the first save waits for it."""
        threading.Thread(target=import_orbax, name="import-orbax", daemon=True).start()

    def latest_step(self) -> int | None:
        """The newest committed step from a fresh look at the folder, or None if there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """All committed steps, ascending, from a fresh look. Unfinished saves and foreign folders do not count.

        On a disk a save is committed by renaming its folder to the bare number. A number that holds only a part of our
        files was damaged later, so it does count: reading it says so, where going on from an older step, or from
        nothing, would lose work without a word.
        """
        if not self.directory.exists():
            return []
        if not self.directory.is_dir():
            raise ValueError(f"{self.directory} is a file where the folder of checkpoints belongs; move it away")
        return sorted(int(child.name) for child in self.directory.iterdir() if self.is_committed(child))

    def is_committed(self, folder: Any) -> bool:
        """True if the folder is named by a step and holds a checkpoint of ours."""
        if not (folder.name.isascii() and folder.name.isdecimal() and folder.name == str(int(folder.name))):
            return False
        if paths.is_remote(folder):
            return (folder / COMMITTED).exists()
        return any((folder / entry).exists() for entry in OWN_ENTRIES)

    def save(self, step: int, state: Any, run: Mapping[str, Any]) -> float:
        """Starts to save in the background; seconds for which the caller was blocked.

        Blocked means: an earlier save that still runs, one pass over the state for its fingerprints, and the copy from
        the devices to the host, after which the state may be donated.
        Args: state: any pytree of arrays and Python numbers. run: plain data that JSON can hold.
        Raises: Stop (STORAGE) if the step cannot be saved, or if the save before it failed.
        """
        began = time.monotonic()
        self.wait()
        orbax, manager = import_orbax(), self.open()
        if agreed(lambda: self.clear_the_way(step)):
            manager.reload()
        leaves = named_leaves(state)
        prints = fingerprints(list(leaves.values()))
        described = {name: describe_leaf(leaf) + [mark] for (name, leaf), mark in zip(leaves.items(), prints)}
        items = orbax.args.Composite(
            state=orbax.args.PyTreeSave(nest(leaves)), run=orbax.args.JsonSave(seal({"run": run, "leaves": described}))
        )
        try:
            # force: Orbax's own opinion of when a save is due would otherwise drop it without a word
            started = manager.save(step, args=items, force=True)
        except Exception as error:
            raise self.storage_error(step, error) from error
        if not started:
            raise Stop(
                Exit.STORAGE, f"step {step} was not saved: Orbax refused it in {self.directory} and gave no reason"
            )
        self.pending_step = step
        return time.monotonic() - began

    def clear_the_way(self, step: int) -> bool:
        """True if an empty folder was removed. Raises Stop if this or a later step exists, or its folder is taken."""
        newest = self.latest_step()
        if newest is not None and newest >= step:
            raise Stop(
                Exit.STORAGE,
                f"step {step} was not saved because {self.directory} already holds step {newest}; "
                f"move steps {step} and later away, or go on from step {newest}",
            )
        folder = self.directory / str(step)
        if paths.is_remote(folder) or not folder.exists():
            return False
        try:
            folder.rmdir()
        except OSError:
            raise Stop(
                Exit.STORAGE, f"step {step} was not saved because {folder} is in the way; move it away"
            ) from None
        return True

    def poll(self) -> None:
        """To be called every step: raises Stop (STORAGE) with the true cause if the save under way has failed."""
        if self.pending_step is not None and not self.manager.is_saving_in_progress():
            self.wait()  # returns at once; Orbax reports a failure nowhere else before the next save

    def wait(self) -> None:
        """Returns when the save in the background, if any, is committed. Raises as poll does."""
        if self.pending_step is None:
            return
        step, self.pending_step = self.pending_step, None
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self.storage_error(step, error) from error
        # the others may see it a moment later, and the first process speaks for them
        if jax.process_index() == 0 and step not in self.all_steps():
            raise Stop(
                Exit.STORAGE, f"step {step} was saved but {self.directory / str(step)} is not there; is the disk well?"
            )

    def read_run(self, step: int) -> dict[str, Any]:
        """What `save` was given as `run`. Needs no Orbax. Raises Stop (CHECKPOINT_CORRUPT) if one bit of it changed."""
        return self.read_record(step)["run"]

    def restore(self, step: int, abstract_state: Any, *, partial: bool = False) -> Any:
        """The saved state, in the structure of `abstract_state` and placed as the shardings of its leaves say.

        The mesh may be another than the one it was saved from; the values are the same bit for bit.
        Args: abstract_state: pytree of jax.ShapeDtypeStruct (without a sharding: the first local device), arrays or
        Python numbers. partial: leaves that only the checkpoint has are left out, as when sampling needs no moments.
        """
        record = self.read_record(step)
        saved, wanted = record["leaves"], named_leaves(abstract_state)
        self.check_fit(step, saved, {name: describe_leaf(leaf) for name, leaf in wanted.items()}, partial)
        orbax = import_orbax()
        restore_args = {name: restore_arg(orbax, leaf) for name, leaf in wanted.items()}
        reader = orbax.Checkpointer(orbax.PyTreeCheckpointHandler())
        try:
            arguments = orbax.args.PyTreeRestore(
                item=nest(wanted), restore_args=nest(restore_args), partial_restore=partial
            )
            restored = named_leaves(reader.restore(self.directory / str(step) / "state", args=arguments))
        except (MemoryError, jax.errors.JaxRuntimeError):  # too little memory here says nothing about the files
            raise
        except Exception as error:
            raise self.corrupt(step, "state", short_cause(error)) from error
        leaves = [restored[name] for name in wanted]
        for name, found in zip(wanted, fingerprints(leaves)):
            if found != saved[name][2]:
                raise self.corrupt(step, "state", f"the bits of {name} are not those that were saved")
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    def close(self) -> None:
        """Waits for the save in the background and ends Orbax's threads. Raises as poll does."""
        try:
            self.wait()
        finally:
            if self.manager is not None:
                self.manager.close()
            self.manager = None

    def open(self) -> Any:
        """Orbax's manager, made at the first save, when leftovers of killed saves are removed as well."""
        if self.manager is None:
            orbax = import_orbax()
            options = orbax.CheckpointManagerOptions(
                preservation_policy=Preserve(self),
                cleanup_tmp_directories=True,
                async_options=orbax.AsyncOptions(timeout_secs=SAVE_TIMEOUT_SECONDS),
            )
            # compressing float32 weights and moments saves 8% of the bytes for twice the CPU time (192 MB, 2 cores)
            arrays = orbax.PyTreeCheckpointHandler(use_compression=False)
            handlers = {"state": arrays, "run": orbax.JsonCheckpointHandler()}
            try:
                self.manager = orbax.CheckpointManager(self.directory, options=options, item_handlers=handlers)
            except Exception as error:
                raise Stop(Exit.STORAGE, f"cannot save into {self.directory}: {short_cause(error)}") from error
        return self.manager

    def read_record(self, step: int) -> dict[str, Any]:
        """The sealed JSON object of a step: {run, leaves: {name: [shape, dtype, fingerprint]}}."""
        try:
            record = paths.read_json(self.directory / str(step) / "run" / "metadata")
        except (OSError, ValueError) as error:
            raise self.corrupt(step, "run", short_cause(error)) from None
        if not is_sealed(record):
            raise self.corrupt(step, "run", "its sha256 does not match its content")
        return record

    def check_fit(self, step: int, saved: Mapping, wanted: Mapping, partial: bool) -> None:
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
                f"{self.directory / str(step)} does not fit: {'; '.join(differences[:SHOWN_MISMATCHES])}{more}; "
                "use the config it was trained with, or another workdir",
            )

    def corrupt(self, step: int, item: str, cause: str) -> Stop:
        """The error for a checkpoint that cannot be read: step, item, path, cause, and what can be done."""
        folder = self.directory / str(step)
        older = max((other for other in self.all_steps() if other < step), default=None)
        way_out = f"move {folder} away to go on from step {older}" if older is not None else "there is no older step"
        return Stop(
            Exit.CHECKPOINT_CORRUPT, f"step {step} cannot be read: {item} in {folder / item}: {cause}; {way_out}"
        )

    def storage_error(self, step: int, error: BaseException) -> Stop:
        """The error for a save that failed, with the newest step that is safe."""
        safe = max((other for other in self.all_steps() if other != step), default=None)
        kept = f"step {safe} is the newest that is safe" if safe is not None else "there is no earlier checkpoint"
        return Stop(Exit.STORAGE, f"saving step {step} to {self.directory} failed: {short_cause(error)}; {kept}")


@dataclasses.dataclass(frozen=True)
class Preserve:
    """Says which steps Orbax may delete once a newer one is committed.

    Orbax's own rules count, and delete, any folder with a number for a name; this one touches committed steps only.
    """

    checkpoints: Checkpoints

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        """True for every folder that stays; the last one is being saved."""
        cfg, steps = self.checkpoints.cfg, [info.step for info in checkpoints]
        ours = set(self.checkpoints.all_steps()) | set(steps[-1:])
        keep = kept_steps(ours, cfg.keep_last, cfg.keep_every_steps)
        return [step in keep or step not in ours for step in steps]


def kept_steps(steps: set[int], keep_last: int, keep_every_steps: int) -> set[int]:
    """The newest keep_last of the steps, and those divisible by keep_every_steps."""
    forever = {step for step in steps if keep_every_steps and step % keep_every_steps == 0}
    return set(sorted(steps)[-keep_last:]) | forever


def named_leaves(tree: Any) -> dict[str, Any]:
    """{"params/layers/wq": leaf} in the order of the tree; containers leave no other trace, so empty ones vanish."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    assert len(named) == len(flat), "two leaves of the state have the same name"
    return named


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": leaf} as {"a": {"b": leaf}}."""
    nested: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *outer, last = name.split("/")
        group = nested
        for part in outer:
            group = group.setdefault(part, {})
        group[last] = leaf
    return nested


def describe_leaf(leaf: Any) -> list:
    """[shape, dtype] of an array, [[], 'int'] of a Python number."""
    return [list(leaf.shape), str(leaf.dtype)] if hasattr(leaf, "dtype") else [[], type(leaf).__name__]


def leaf_text(described: list | None) -> str:
    """'float32[64,64]', or 'missing'."""
    return f"{described[1]}[{','.join(map(str, described[0]))}]" if described else "missing"


def restore_arg(orbax: Any, leaf: Any) -> Any:
    """How Orbax should bring this leaf back: a Python number as one, an array placed by its sharding."""
    if not hasattr(leaf, "dtype"):
        return orbax.RestoreArgs(restore_type=type(leaf))
    if isinstance(leaf, np.ndarray):
        return orbax.RestoreArgs(restore_type=np.ndarray)
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return orbax.ArrayRestoreArgs(sharding=sharding, dtype=leaf.dtype, global_shape=leaf.shape)


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content as JSON will give it back (tuples are lists there), with the sha256 of its canonical text."""
    content = json.loads(json.dumps(content))
    return content | {"sha256": digest(content)}


def is_sealed(record: Any) -> bool:
    """True if the record's sha256 is that of the rest of it."""
    return isinstance(record, dict) and record.get("sha256") == digest(
        {k: v for k, v in record.items() if k != "sha256"}
    )


def digest(content: Any) -> str:
    """sha256 of the JSON text with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
