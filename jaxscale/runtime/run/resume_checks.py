"""Checks that the config and the data match the run in the work folder, except for allowed changes."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.program.budget import BEGINNING, Position, recorded_rows
from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, stop_if_unreachable
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.mixture import Mixture, same_prefix
from jaxscale.runtime.data.order import Ranges, batch_index, merge_skips
from jaxscale.runtime.data.pipeline import Corpus, open_data
from jaxscale.runtime.data.remote import CacheUnwritable
from jaxscale.runtime.eval.named import Evaluator
from jaxscale.runtime.hosts.agree import agreed
from jaxscale.runtime.run.changes import Change
from jaxscale.runtime.run.options import NEVER, Log, groups_of
from jaxscale.runtime.training.decisions import Decisions
from jaxscale.settings.unread import unread
from jaxscale.system import paths
from jaxscale.system.bucket_errors import Forbidden
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.units import BatchSizes, recorded_sizes

MAX_LISTED = 8  # differences in an error
data_mismatch = functools.partial(Stop, Exit.DATA_MISMATCH)
DATA_SECONDS = 24 * 3600.0  # timeout: the first process may tokenize for hours after another is done


def recorded_settings(workdir: str) -> dict[str, Any]:
    """Returns the settings of the last start, or {} without a run. Raises Stop if the folder is unreachable."""
    return stop_if_unreachable(lambda: recorded_run(paths.as_path(workdir)), workdir).get("config", {})


def recorded_run(folder: Any) -> dict[str, Any]:
    """Returns config.json of the folder, or {} if it is missing."""
    return paths.read_json(folder / "config.json") if (folder / "config.json").exists() else {}


def recorded_position(recorded: Mapping[str, Any] | None, step: int) -> Position:
    """Returns the position at which a run resumes from a checkpoint with this record.

    Values in '%' depend on train_tokens. They are fixed for ramps whose last stage has begun, and for stages of
    data.mixture that have begun.
    """
    if not recorded or not step:
        return BEGINNING
    skipped = recorded["data"]["skipped"]
    ramps = {name: recorded["budget"].get(name) or () for name in ("ramp", "seq_len_ramp")}
    stages = {name: tuple((int(first), int(size)) for first, size in ramp) for name, ramp in ramps.items()}
    last = batch_index(step - 1, skipped)
    finished = {name: ramp for name, ramp in stages.items() if ramp and ramp[-1][0] <= last}
    starts = (recorded.get("mixture") or {}).get("starts") or {}
    begun = {start: batch for start, batch in starts.items() if batch <= last}
    return Position(step, batch_index(step, skipped), finished, begun)


def check_same_run(
    cfg: RunConfig, folder: Any, recorded: Mapping[str, Any] | None, allowed: Sequence[str] = ()
) -> list[Change]:
    """Returns the changed settings. Each of them may always change or is covered by `allowed`.

    A later restore of the checkpoint also rejects arrays with a different name, shape or dtype.
    Raises Stop(CONFIG_MISMATCH), with the old and new values, if any other setting has changed.
    """
    if recorded is None:
        recorded = recorded_run(folder)  # a run that stopped before its first checkpoint
        if not recorded:
            return []
    if recorded.get("converted"):
        raise Stop(
            Exit.CONFIG_MISMATCH,
            f"{folder} contains a converted model, not a run; train it with --init_from={folder} and another --workdir",
        )
    old, new = recorded["config"], schema.to_dict(cfg)
    with contextlib.suppress(ValueError):
        before = schema.from_dict(RunConfig, old)
        old = schema.to_dict(before)  # defaults for settings newer than the run
        for unused in unread(before).keys() & unread(cfg).keys():
            schema.put(old, unused, schema.look_up(new, unused))
    may = schema.changeable(RunConfig)
    changed = [
        Change(name, was, now, allowed=not may.intersection(groups_of(name)))
        for name, (was, now) in schema.difference(old, new).items()
    ]
    refused = [change for change in changed if change.allowed and not set(allowed).intersection(groups_of(change.name))]
    if refused:
        lines = "; ".join(f"{change.name}: {change.old!r} -> {change.new!r}" for change in refused)
        may_be_allowed = [change.name for change in refused if change.name not in NEVER]
        leave = f", or allow the change with --allow_change={','.join(may_be_allowed)}" * (
            len(may_be_allowed) == len(refused)
        )
        raise Stop(
            Exit.CONFIG_MISMATCH,
            f"settings differ from the run in {folder}: {lines}; use another --workdir, or restore them{leave}",
        )
    return changed


def open_same_data(
    cfg: DataConfig, recorded: Mapping[str, Any] | None, log: Log, open_data: Any = open_data, **settings: Any
) -> Corpus:
    """Opens the corpus. For an existing run, raises Stop: STORAGE if it is unreachable, else DATA_MISMATCH."""
    try:
        return open_data(cfg, say=log, **settings)
    except BadInput as error:
        if recorded is None or isinstance(error, CacheUnwritable | Forbidden):
            raise
        if is_storage_error(error):
            raise Stop(
                Exit.STORAGE, f"the data of this run cannot be read: {error}; restart when the storage is reachable"
            ) from error
        raise data_mismatch(f"the data of this run can no longer be opened: {error}") from error


def describe_data_changes(corpus: Corpus, data: Mapping[str, Any]) -> str:
    """Returns which parts of the data differ from the record, or '' if the record has no parts."""
    old, new = data.get("parts"), corpus.parts
    if not old or old == new:
        return ""
    names = [name for name in (*old, *(name for name in new if name not in old)) if old.get(name) != new.get(name)]
    words = [
        f"{name} is {'missing' if name not in new else 'new' if name not in old else 'different'}"
        for name in names[:MAX_LISTED]
    ]
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(words)}{more}"


def check_same_data(
    cfg: RunConfig, corpus: Corpus, recorded: dict[str, Any] | None, start_step: int, decisions: Decisions
) -> Ranges:
    """Returns the ranges of skipped batches, with those of rewinds. Raises Stop(DATA_MISMATCH) for other data."""
    requested = [*cfg.data.skip_batches, *decisions.skip_batches]
    if recorded is None:
        return merge_skips((), requested, 0)
    data = recorded["data"]
    if data["fingerprint"] != corpus.fingerprint:
        changes = describe_data_changes(corpus, data)
        changes = changes or "the text, the tokenizer, the held-out part or the order of the release differs"
        raise data_mismatch(
            f"the data have changed since the run started: fingerprint {corpus.fingerprint[:16]} instead of "
            f"{data['fingerprint'][:16]} ({changes}); restore the original data, or use another --workdir"
        )
    return merge_skips([tuple(r) for r in data["skipped"]], requested, start_step)


def check_position(recorded: Mapping[str, Any], step: int) -> None:
    """Raises Stop(CHECKPOINT_CORRUPT) if the recorded data position does not match `step` completed steps."""
    data = recorded["data"]
    expected = batch_index(step, [tuple(r) for r in data["skipped"]])
    if data.get("batch_index", expected) != expected:
        raise Stop(
            Exit.CHECKPOINT_CORRUPT,
            f"the checkpoint of step {step} is damaged: its data position is batch {data['batch_index']}, but must be "
            f"batch {expected} after {step} steps",
        )


def check_hosts_agree(corpus: Corpus) -> None:
    """Raises Stop(DATA_MISMATCH) on a process whose data differ from those of process 0."""
    first = agreed(lambda: corpus.fingerprint, DATA_SECONDS)
    if first != corpus.fingerprint:
        raise data_mismatch(
            f"the data of process {jax.process_index()} differ from those of process 0: fingerprint "
            f"{corpus.fingerprint[:16]} instead of {first[:16]}; give all hosts the same files, and delete caches of "
            "tokenized text that are older than the text"
        )


def check_same_evals(evaluators: Sequence[Evaluator]) -> None:
    """Raises Stop(DATA_MISMATCH) on a process whose evaluation data differ from those of process 0."""
    if not evaluators:
        return
    found = {one.name: one.fingerprint for one in evaluators}
    first = agreed(lambda: found, DATA_SECONDS)
    if differ := [name for name in found if found[name] != first.get(name)]:
        raise data_mismatch(
            f"the files of evals.{differ[0]} at process {jax.process_index()} differ from those of process 0; give all "
            "hosts the same files"
        )


def check_same_past(
    sizes: BatchSizes, row_tokens: BatchSizes, mixture: Mixture | None, recorded: dict | None, start_step: int, log: Log
) -> None:
    """Raises Stop(DATA_MISMATCH) if the batch sizes, sequence lengths or mixture of past steps would change."""
    if not start_step:
        return
    assert recorded is not None, "completed steps have a record"
    old, new = recorded["data"].get("mixture"), mixture.record() if mixture else None
    last = batch_index(start_step - 1, [tuple(r) for r in recorded["data"]["skipped"]])
    then = recorded_sizes(recorded["budget"], recorded["config"]["seq_len"])
    check_same_stages("batch_ramp would change the sizes", "rows", then, sizes, last)
    if not same_prefix(old, new, sizes.begin(last + 1)):
        raise data_mismatch(
            f"data.mixture and data.max_epochs would change the rows of the {start_step} completed steps; only stages "
            f"that start after batch {last} may change (write their starts in tokens or steps: '%' depends on "
            "train_tokens); restore these settings, or use another --workdir"
        )
    if old != new:
        log("data: the mixture of later steps has changed; the change is recorded with the next checkpoint")
    lengths = recorded_rows(recorded["budget"], recorded["config"]["seq_len"])
    check_same_stages("seq_len_ramp would change the row lengths", "tokens per row", lengths, row_tokens, last)


def check_same_stages(what: str, unit: str, then: BatchSizes, now: BatchSizes, last: int) -> None:
    """Raises Stop(DATA_MISMATCH) if the size of a completed batch (up to `last`) would change."""
    past = lambda sizes: [stage for stage in sizes.stages if stage[0] <= last]
    if past(then) != past(now):
        raise data_mismatch(
            f"{what} of the completed batches up to {last}: (first batch, {unit}) were {past(then)} and would be "
            f"{past(now)}; ends in '%' depend on train_tokens: restore train_tokens, or use another --workdir with the "
            "ends in tokens"
        )


def version_changes(recorded: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """Returns a warning for each package whose version differs from the version in the checkpoint."""
    old = (recorded or {}).get("versions") or {}
    return [
        f"warning: {name} was {old[name]} when this run was last saved and is {version} now: results may differ by "
        "rounding"
        for name, version in now.items()
        if name in old and old[name] != version
    ]
