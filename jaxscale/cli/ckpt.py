"""Lists, verifies, copies, prunes and averages the checkpoints of a run, locally or in a bucket, without a device.

  jaxscale ckpt list    --workdir=runs/first                           step, time, size, health, loss, verified, pinned
  jaxscale ckpt verify  --workdir=gs://BUCKET/run                      the newest step; --steps=all for every step
  jaxscale ckpt copy    --workdir=runs/first --to=gs://BUCKET/first    the newest step; repeat to resume after a kill
  jaxscale ckpt prune   --workdir=runs/first                           shows which steps training would keep or delete
  jaxscale ckpt prune   --workdir=runs/first --keep_last=1 --delete    deletes steps
  jaxscale ckpt pin     --workdir=runs/first --steps=4000              never deleted, until `unpin`
  jaxscale ckpt average --workdir=runs/first --last=5 --to=runs/mean     weights for a new run: --init_from=runs/mean
  jaxscale ckpt merge_lora --workdir=runs/tuned --to=runs/merged         plain weights of a run with adapters

verify compares every array with the fingerprint computed on the devices at the save, and every file with its recorded
md5. For a mismatch it prints the leaf and the files, and exits with 19. prune never deletes pinned steps, the newest
clean step or the last step that training has read back. average sums in float64, checks its sources while reading, and
writes only weights: start a new run from them. merge_lora adds the adapters of a fine-tuned run to its weights;
convert, sample and evaluate read the result like any model.
"""

import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxscale import units
from jaxscale.runtime.checkpoint import retention
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.derived_weights import average_steps, merge_lora
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.retention import StepFacts, list_steps, pin, unpin
from jaxscale.runtime.checkpoint.storage_errors import KNOWN_CAUSES, read_optional, short_reason
from jaxscale.runtime.checkpoint.transfer import copy_step
from jaxscale.runtime.checkpoint.verify import verify_folder
from jaxscale.settings.command_line import Arguments, flag, whole_number
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop, print_stderr, put

NEEDED_ROLES = "reading needs the IAM role Storage Object Viewer on the bucket, writing Storage Object User"
RULES = ("keep_last", "keep_every_steps", "keep_best")
FIRST_REPORT, NEXT_REPORT = 3.0, 10.0  # seconds until the first progress line, and between later lines


@dataclasses.dataclass(frozen=True)
class CkptFlags:
    no_config = "the settings are read from the work folder"

    workdir: str | None = flag(None, None, "FOLDER")
    steps: str | None = flag(
        None, "steps, or --step=10; default for verify, copy and merge_lora: the newest", "10,20 | all"
    )
    step: str | None = flag(None, None, "N")
    to: str | None = flag(None, "work folder to write (copy, average, merge_lora), used by no other run", "FOLDER")
    last: int | None = flag(None, "averages the newest N clean steps, instead of --steps", "5", least=1)
    what: str = flag("params", "weights to average or merge: params, or ema if the run has it")
    keep_last: int | None = flag(None, "", "3", least=1)
    keep_every_steps: int | None = flag(None, "", "0", least=0)
    keep_best: int | None = flag(None, "retention rules for prune, instead of the run's settings", "0", least=0)
    delete: bool = flag(False, "prune: deletes steps; without this flag, nothing changes")
    json: bool = flag(False, "prints one JSON object per line")


def open_folder(workdir: str) -> Checkpoints:
    """Returns the checkpoints of a run. Raises BadInput if there are none."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # gcsfs logs a traceback for each error that it raises
    checkpoints = Checkpoints(paths.as_path(workdir) / "checkpoints", CheckpointConfig())
    if not checkpoints.all_steps():
        inside = os.path.basename(os.fspath(workdir).rstrip("/")) == "checkpoints"
        hint = "use its parent folder" if inside else "use the work folder of a run with a checkpoint"
        raise BadInput(f"--workdir={workdir} has no checkpoint; {hint}")
    return checkpoints


def list_(checkpoints: Checkpoints, flags: CkptFlags) -> None:
    """Prints a table of all steps."""
    facts = list_steps(checkpoints.directory)
    rows = [("step", "saved", "size", "health", "validation/loss", "verified", "pinned")]
    for fact in facts:
        loss = "-" if fact.validation_loss is None else f"{fact.validation_loss:.4f}"
        health = "UNREADABLE" if fact.problem else fact.health or "-"
        marks = ("yes" if fact.verified else "-", "yes" if fact.pinned else "-")
        rows.append((str(fact.step), fact.saved or "-", units.size(fact.num_bytes), health, loss, *marks))
    show(flags, [dataclasses.asdict(fact) for fact in facts], rows)
    for fact in facts:
        if fact.problem:
            print_stderr(f"step {fact.step} cannot be restored: {fact.problem}")
        if fact.missing:
            print_stderr(f"step {fact.step} lacks {' and '.join(fact.missing)}; check it with `jaxscale ckpt verify`")


def verify(checkpoints: Checkpoints, flags: CkptFlags) -> int:
    """Verifies the steps. Returns CHECKPOINT_CORRUPT if any step differs from what was saved."""
    folder, sound, bad = checkpoints.directory, [], []
    for step in selected(checkpoints, flags, newest=True):
        began, report = time.monotonic(), TransferProgress(f"step {step}")
        verdict = verify_folder(folder / str(step), report)
        (bad if verdict.damages else sound).append(step)
        record = {"step": step, "ok": not verdict.damages, "leaves": verdict.num_leaves, "bytes": verdict.num_bytes}
        record["damages"] = [dataclasses.asdict(damage) for damage in verdict.damages]
        lines = [f"step {step}: DAMAGED: {damage}" for damage in verdict.damages] or [
            f"step {step}: {verdict.num_leaves} leaves, {units.size(verdict.num_bytes)}, bitwise as saved "
            f"({units.duration(time.monotonic() - began)})"
        ]
        say(flags, record, "\n".join(lines))
    if bad:
        good = f"; step {max(sound)} is intact" if sound else ""
        print_stderr(f"damaged steps: {', '.join(map(str, bad))}{good}; move damaged steps away before resuming")
    return Exit.CHECKPOINT_CORRUPT if bad else 0


def copy(checkpoints: Checkpoints, flags: CkptFlags) -> None:
    """Copies the steps, oldest first."""
    for step in selected(checkpoints, flags, newest=True):
        done = copy_step(checkpoints, step, flags.to, TransferProgress(f"step {step}"))
        copied_before = f", {units.size(done.kept_bytes)} already copied" if done.kept_bytes else ""
        record = {"step": step, "to": flags.to, **dataclasses.asdict(done)}
        line = f"step {step}: {done.num_files} files, {units.size(done.num_bytes)}{copied_before}, verified in"
        say(flags, record, f"{line} {flags.to}")


def prune(checkpoints: Checkpoints, flags: CkptFlags) -> None:
    """Prints which steps are retained, and why. With --delete, deletes all other steps."""
    folder, delete = checkpoints.directory, flags.delete
    facts = list_steps(folder)
    run = read_optional(folder.parent / "config.json").get("config", {})
    rules: dict[str, Any] = {name: int(value) for name, value in run.get("checkpoint", {}).items() if name in RULES}
    rules |= {name: number for name in RULES if (number := getattr(flags, name)) is not None}
    reasons = retention.retention_reasons(facts, retention.last_good_step(folder), CheckpointConfig(**rules))
    unneeded = [fact for fact in facts if fact.step not in reasons]
    if delete:
        for fact in unneeded:
            retention.delete_step(folder, fact.step)
        retention.remove_half_deleted(folder)
    rows, records = [("step", "size", "")], []
    for fact in facts:
        reason = reasons.get(fact.step)
        others = "deleted" if delete else "would be deleted"
        rows.append((str(fact.step), units.size(fact.num_bytes), others if reason is None else f"kept: {reason}"))
        deleted = delete and reason is None
        records.append({"step": fact.step, "bytes": fact.num_bytes, "kept": reason, "deleted": deleted})
    show(flags, records, rows)
    if unneeded and not delete:
        print_stderr(f"{units.size(sum(f.num_bytes for f in unneeded))} would be freed; run again with --delete")


def mark(checkpoints: Checkpoints, flags: CkptFlags, *, pinned: bool) -> None:
    """Pins or unpins each step and prints whether its state changed."""
    steps = selected(checkpoints, flags)
    if pinned:
        check_readable(checkpoints, steps)
    done, unchanged = ("pinned", "was already pinned") if pinned else ("no longer pinned", "was not pinned")
    for step in steps:
        changed = (pin if pinned else unpin)(checkpoints.directory, step)
        say(flags, {"step": step, "changed": changed}, f"step {step} {done if changed else unchanged}")


def average(checkpoints: Checkpoints, flags: CkptFlags) -> None:
    """Writes the mean of several steps."""
    if (flags.last is None) == (flags.step is None and flags.steps is None):
        raise BadInput("ckpt average needs either --last=5 or --steps=10,20,30")
    steps = newest_clean(list_steps(checkpoints.directory), flags.last) if flags.last else selected(checkpoints, flags)
    check_readable(checkpoints, steps)
    to, what = flags.to, flags.what
    done = average_steps(checkpoints, steps, to, what, TransferProgress("average"))
    size, names = units.size(done.num_bytes), ", ".join(map(str, steps))
    record = {"to": to, "what": what, "steps": steps, **dataclasses.asdict(done)}
    line = f"{to}: step {done.step}, the mean of {what} of steps {names} ({done.num_leaves} leaves, {size})"
    say(flags, record, line)


def merge(checkpoints: Checkpoints, flags: CkptFlags) -> None:
    """Writes the weights of a step with its adapters merged."""
    if len(steps := selected(checkpoints, flags, newest=True)) != 1:
        raise BadInput("ckpt merge_lora accepts only one step; set --step=N")
    check_readable(checkpoints, steps)
    to, what = flags.to, flags.what
    done = merge_lora(checkpoints, steps[0], to, what, TransferProgress("merge_lora"))
    record = {"to": to, "what": what, **dataclasses.asdict(done)}
    size = units.size(done.num_bytes)
    say(flags, record, f"{to}: step {done.step} with its adapters merged ({done.num_leaves} leaves, {size})")


def newest_clean(facts: Sequence[StepFacts], count: int) -> list[int]:
    """Returns the newest `count` readable steps with clean or unknown health. Raises BadInput if there are fewer."""
    clean = [fact.step for fact in facts if fact.health in ("clean", None) and not fact.problem]
    if excluded := [fact.step for fact in facts if fact.step not in clean]:
        print_stderr(f"excluded because not healthy or not readable: {', '.join(map(str, excluded))}")
    if len(clean) < count:
        raise BadInput(f"--last={count} exceeds the {len(clean)} healthy steps; use at most {len(clean)}, or --steps")
    return clean[-count:]


def check_readable(checkpoints: Checkpoints, steps: list[int]) -> None:
    """Raises Stop(CHECKPOINT_CORRUPT) for a step with an invalid record. Logs changes of files other than arrays."""
    for step in steps:
        checkpoints.read_record(step)
        checkpoints.log_changed_files(step, print_stderr, small=True)


def selected(checkpoints: Checkpoints, flags: CkptFlags, newest: bool = False) -> list[int]:
    """Returns the steps of --step or --steps, ascending. If neither is set and `newest`, returns the newest step."""
    existing = checkpoints.all_steps()
    if flags.step and flags.steps:
        raise BadInput("--step and --steps cannot be combined; use one of them")
    text = flags.steps or flags.step
    if text == "all" or text is None and newest:
        return existing if text else existing[-1:]
    assert text is not None, "main() raises if a verb that needs steps has none"
    steps = sorted({whole_number("--steps", part.strip(), 0) for part in text.split(",")})
    if missing := [step for step in steps if step not in existing]:
        raise BadInput(
            f"--steps={text}: no checkpoint of step {missing[0]}; existing steps: {', '.join(map(str, existing))}"
        )
    return steps


def say(flags: CkptFlags, record: Mapping[str, Any], line: str) -> None:
    """Prints the record as JSON, or the line."""
    put(json.dumps(record) if flags.json else line)


def show(flags: CkptFlags, records: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[str]]) -> None:
    """Prints the records as JSON, or the rows as a table."""
    put(*(map(json.dumps, records) if flags.json else units.table(rows, indent="")))


class TransferProgress:
    """Prints progress of a long operation to stderr, every few seconds."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic):
        self.what, self.clock, self.began = what, clock, clock()
        self.due = self.began + FIRST_REPORT

    def __call__(self, done: int, total: int | None = None, copied_before: int = 0) -> None:
        """Records the number of bytes done. The speed excludes the `copied_before` bytes of an earlier run."""
        now = self.clock()
        if now >= self.due:
            self.due = now + NEXT_REPORT
            speed = (done - copied_before) / (now - self.began)
            total_text = f" of {units.size(total)}" if total else ""
            left = f", {units.duration((total - done) / speed)} left" if total and speed > 0 else ""
            print_stderr(f"{self.what}: {units.size(done)}{total_text}, {units.size(speed)}/s{left}")


STEPS = ("step", "steps")
VERBS = {  # verb: (function, flags, required flags)
    "list": (list_, (), ()),
    "verify": (verify, STEPS, ()),
    "copy": (copy, (*STEPS, "to"), ("to",)),
    "prune": (prune, (*RULES, "delete"), ()),
    "pin": (partial(mark, pinned=True), STEPS, ("steps",)),
    "unpin": (partial(mark, pinned=False), STEPS, ("steps",)),
    "average": (average, (*STEPS, "last", "what", "to"), ("to",)),
    "merge_lora": (merge, (*STEPS, "what", "to"), ("to",)),
}
SUBVERBS = {verb: ("workdir", "json", *flags) for verb, (_, flags, _) in VERBS.items()}


@command(CkptFlags, subverbs=SUBVERBS, alone="--help")
def main(arguments: Arguments) -> int:
    """Runs the subverb and returns the exit code."""
    work, _, needed = VERBS[arguments.subverb]
    for name in ("workdir", *needed):
        if name not in arguments.options and not (name == "steps" and "step" in arguments.options):
            raise BadInput(f"ckpt {arguments.subverb} needs --{name}; see jaxscale ckpt --help")
    try:
        return work(open_folder(arguments.flags.workdir), arguments.flags)
    except Exception as error:
        remote = paths.is_remote(arguments.flags.workdir)
        is_gcsfs_error = type(error).__module__.startswith("gcsfs.")
        if remote and isinstance(error, OSError) or is_gcsfs_error:
            raise BadInput(f"cannot access the bucket: {short_reason(error)}; {NEEDED_ROLES}") from None
        if isinstance(error, OSError) and not isinstance(error, BadInput) and KNOWN_CAUSES.search(str(error)):
            where = "" if error.filename else f"{arguments.flags.to or arguments.flags.workdir}: "
            raise Stop(Exit.STORAGE, f"{where}{short_reason(error)}; fix this and run the command again") from None
        raise
