"""Starts a new run with weights from a different run: selects, renames and resizes leaves of that run's checkpoint."""

import dataclasses
import difflib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale import units
from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.lora import is_adapter
from jaxscale.core.models.lora_mup_config import LoraConfig
from jaxscale.runtime.checkpoint.config import ARROW, CheckpointConfig, InitConfig
from jaxscale.runtime.checkpoint.conversions import (
    Origin,
    Upcycling,
    folding_factors,
    is_dense_mlp,
    plan_upcycling,
    spec_of,
)
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import describe_leaf, leaf_text, named_leaves, weight_leaves
from jaxscale.runtime.checkpoint.restore import newest_readable_step
from jaxscale.runtime.hosts.agree import agreed
from jaxscale.schema import convert, from_dict
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, print_stderr

SHOWN_PROBLEMS = 4
# files that occur in Hugging Face model folders but not in work folders
HUGGING_FACE = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
# leaf groups for each value of init.what, except 'run', which restores the whole state (resume_branch)
LEAF_GROUPS = {"params": ("params",), "ema": ("ema",), "state": ("params", "opt_state", "ema")}


@dataclasses.dataclass(frozen=True)
class InitSource:
    """A checkpoint of a different run that provides the initial weights of this run."""

    checkpoints: Checkpoints
    step: int
    record: Mapping[str, Any]
    experts: str = "none"  # value of init.experts in the new run
    whole: bool = False  # True for init.what=run: the new run resumes the whole state

    def __str__(self) -> str:
        return str(self.checkpoints.directory / str(self.step))

    @property
    def ancestry(self) -> list[dict[str, Any]]:
        """Record entries of this checkpoint and of the checkpoints from which its weights derive, newest first."""
        run = self.record["run"]
        entry = {"path": str(self.checkpoints.directory), "step": self.step, "sha256": self.record["sha256"]}
        converted = run.get("converted") or {}  # fields of the imported config.json, which later exports need
        entry |= {name: converted[name] for name in ("model_type", "kept", "from") if converted.get(name)}
        if self.experts != "none":
            entry["upcycled"] = self.experts
        if self.whole:
            entry["what"] = "run"
        return [entry, *run.get("ancestry", ())]


@dataclasses.dataclass(frozen=True)
class BranchPlan:
    """Mapping from the leaves of the new state to the checkpoint leaves that initialize them."""

    loaded: dict[str, str] = dataclasses.field(default_factory=dict)  # new name -> name in the checkpoint
    resized: dict[str, int] = dataclasses.field(default_factory=dict)  # new name -> vocabulary axis; subset of `loaded`
    fresh: list[str] = dataclasses.field(default_factory=list)  # new names that are initialized as in a new model
    left_out: list[str] = dataclasses.field(default_factory=list)  # names in the checkpoint that are not used
    upcycled: dict[str, Origin] = dataclasses.field(default_factory=dict)  # converted leaves; subset of `loaded`
    upcycling: Upcycling | None = None


def open_source(
    path: str,
    ancestor: Mapping[str, Any] | None = None,
    *,
    wanted: int | None = None,
    named: str = "init.from_path",
    log: Callable[[str], None] = print_stderr,
) -> InitSource:
    """Returns the checkpoint at `path`, or the newest checkpoint if `path` is a work folder. Call in all processes.

    ancestor: record entry of the checkpoint that initialized this run, which the result must match. wanted: step to
    open if the path does not name a step. named: setting or flag with the path, for error messages. log: receives
    warnings about unreadable newer steps and changed files.
    Raises: BadInput if no checkpoint exists, Stop (CHECKPOINT_CORRUPT) if the checkpoint cannot be read.
    """
    folder, step = parse_checkpoint_path(path)
    step = wanted if step is None else step
    checkpoints = Checkpoints(folder, CheckpointConfig())
    steps = agreed(checkpoints.all_steps)
    if not steps:
        foreign = any((folder.parent / name).exists() for name in HUGGING_FACE)
        how = f", or convert the Hugging Face model: jaxscale convert --from={path} --workdir=NEW" if foreign else ""
        raise BadInput(f"{named}={path} contains no checkpoint: {folder} has no saved step; use a different run{how}")
    if step is not None and step not in steps:
        near = sorted(sorted(steps, key=lambda other: abs(other - step))[:3])
        raise BadInput(f"{named}={path}: {folder} has no step {step}; use step {units.or_list(near)}")
    if step is None:
        step = ancestor["step"] if ancestor else newest_readable_step(checkpoints, log)
        if step is None or step not in steps:
            raise BadInput(f"{named}={path}: step {step}, the origin of this run, no longer exists; restore it")
    source = InitSource(checkpoints, step, checkpoints.read_record(step))
    if ancestor and ancestor["sha256"] != source.record["sha256"]:
        raise BadInput(
            f"{named}={path}: step {step} has the sha256 {source.record['sha256'][:16]}, but this run started from a "
            f"checkpoint with {ancestor['sha256'][:16]}; restore that checkpoint, or use a different --workdir"
        )
    checkpoints.log_changed_files(step, log, small=True)
    return source


def parse_checkpoint_path(path: str) -> tuple[Any, int | None]:
    """Returns (checkpoint folder, step) for a path. The step is None if the path does not name a step."""
    folder = paths.as_path(path)
    if folder.name.isdecimal() and not (folder / "checkpoints").exists():  # a work folder may be named 2026
        return folder.parent, int(folder.name)
    return folder if folder.name == "checkpoints" else folder / "checkpoints", None


def branch_state(program: Any, cfg: InitConfig, log: Callable[[str], None], source: InitSource | None = None) -> Any:
    """Returns the initial state of a run that starts with weights from a checkpoint of a different run.

    Each array is read directly into the sharding of the program, after the random array that it replaces is freed, so
    at most one state is in memory. The step, random key, guard and loss scale have the values of a new run.
    program: the Program from build.py. source: the open checkpoint; None opens init.from_path.
    Raises: BadInput with one line for all mismatches, Stop (CHECKPOINT_CORRUPT) if a bit of the checkpoint has changed.
    """
    assert source or cfg.from_path, "init.from_path is set unless a source is given"
    source = source or open_source(str(cfg.from_path))
    targets = named_leaves(program.abstract_state)
    plan = plan_branch(cfg, source, targets, program.cfg.model)
    check_lora_scale(source, plan, program.cfg.lora)
    check_mup_scales(source, program.cfg.model)
    state = program.init()
    leaves = named_leaves(state)
    for name in plan.loaded:
        if name not in plan.resized:
            leaves[name].delete()
    converted = plan.resized | plan.upcycled
    unchanged = {name: old for name, old in plan.loaded.items() if name not in converted}
    wanted = {old: targets[name] for name, old in unchanged.items()}
    found = source.checkpoints.restore(source.step, wanted, partial=True) if wanted else {}
    leaves |= {name: found[old] for name, old in unchanged.items()}
    for name, axis in plan.resized.items():  # one at a time, because two copies of each are in memory
        leaves[name] = resize_leaf(source, plan.loaded[name], leaves[name], targets[name], axis, cfg.new_rows)
    for name, origin in plan.upcycled.items():  # one at a time, for the same reason
        assert plan.upcycling is not None, "upcycled leaves have a plan"
        read = functools.partial(read_leaf, source, plan.loaded[name], targets[name].dtype)
        leaves[name] = plan.upcycling.make(origin, read, targets[name])
    if plan.upcycling:
        fresh = [name for name in plan.fresh if leaf_group(name) == "params"]
        leaves |= {name: plan.upcycling.init_leaf(name, leaves[name], targets[name]) for name in fresh}
    if state.ema is not None and not any(name.startswith("ema/") for name in plan.loaded):
        init_ema(leaves, targets)
    for line in describe_plan(cfg, source, plan, targets):
        log(line)
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


def resume_branch(program: Any, source: InitSource, log: Callable[[str], None]) -> Any:
    """Returns the complete state of the source for init.what=run. Raises the errors of Checkpoints.restore()."""
    state = source.checkpoints.restore(source.step, program.abstract_state)
    if int(state.step) != source.step:
        raise source.checkpoints.corrupt(source.step, "state", f"its step counter is {int(state.step)}")
    health = source.record.get("health", "clean")
    marked = "" if health == "clean" else f", a checkpoint marked {health!r}"
    log(f"init: a branch of {source}{marked}: continues from step {source.step}, with its state and its data")
    return state


def plan_branch(cfg: InitConfig, source: InitSource, targets: Mapping[str, Any], model: Any) -> BranchPlan:
    """Plans how to initialize each leaf. Raises BadInput if a leaf of the checkpoint or the new state has no match."""
    leaves = source.record["leaves"]
    saved = {leaf: leaves[leaf] for part in LEAF_GROUPS[cfg.what] for leaf in weight_leaves(leaves, part).values()}
    check_rules(cfg, source, saved, targets)
    is_skipped = lambda name: any(re.search(pattern, name) for pattern in cfg.skip)
    has_average = lambda names: any(leaf_group(name) == "ema" for name in names)
    renamed = {name: renamed_leaf(cfg, name) for name in saved}
    if clash := [name for name, number in Counter(renamed.values()).items() if number > 1]:
        raise BadInput(f"init.rename maps several arrays of {source} to {clash[0]}; make the rules more specific")
    available = {new: old for old, new in renamed.items() if not is_skipped(new) and not is_skipped(old)}
    vocab_sizes = source.record["run"].get("config", {}).get("model", {}).get("vocab_size"), model.vocab_size
    groups = ["params"]
    if cfg.what == "state":  # a missing average is initialized with the weights
        groups += ["opt_state", *(["ema"] * has_average(available))]
    upcycling = None
    if cfg.experts != "none":
        upcycling = plan_upcycling(cfg.experts, model, {new: saved[old][0] for new, old in available.items()}, source)
    plan, problems = BranchPlan(upcycling=upcycling), []
    for name in targets:
        origin = upcycling.origin(name) if upcycling else Origin(name)
        if leaf_group(name) not in groups or is_skipped(name) or origin is None:
            continue
        if origin.name in available:
            plan.loaded[name] = available[origin.name]
            found = saved[available[origin.name]][:2]
            problems += match_leaf(cfg, plan, name, origin, found, describe_leaf(targets[name]), vocab_sizes)
        elif not is_adapter(name):  # adapters are initialized as in a new model
            near = nearest(origin.name, [old for new, old in available.items() if new not in targets] or available)
            problems.append(f"{name} is not in the checkpoint (nearest: {near})")
    used = set(plan.loaded.values())
    for new, name in available.items():
        if name not in used and (leaf_group(new) != "ema" or has_average(targets)):  # a run without ema ignores it
            near = nearest(name, targets)
            merge = "; jaxscale ckpt merge_lora merges adapters into the weights" * is_adapter(name)
            problems.append(f"{name} is in the checkpoint, but not in this config (nearest: {near}){merge}")
    if problems:
        more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise BadInput(
            f"init.from_path: {source} does not fit this config: {'; '.join(problems[:SHOWN_PROBLEMS])}{more}; "
            "use init.rename or init.skip, or the model config of the checkpoint"
        )
    plan.fresh.extend(name for name in targets if name not in plan.loaded)
    plan.left_out.extend(name for name in saved if name not in used)
    return plan


def match_leaf(
    cfg: InitConfig, plan: BranchPlan, name: str, origin: Origin, found: list, new: list, vocab_sizes: tuple
) -> list[str]:
    """Plans the conversion of a leaf from `found` to `new`, each [shape, dtype]. Returns a list of problems."""
    old = [plan.upcycling.shape(origin, found[0]), found[1]] if plan.upcycling else found
    axis = vocab_axis(old, new, *vocab_sizes)
    if old == new:
        plan.upcycled.update({} if origin == Origin(origin.name) else {name: origin})
    elif axis is not None and cfg.resize_vocab:
        plan.resized[name] = axis
    else:
        way_out = " (init.resize_vocab=true resizes it)" if axis is not None else ""
        if not plan.upcycling and is_dense_mlp(old[0], new[0], name):
            way_out = " (init.experts='copy' converts it to experts, 'split' to smaller experts)"
        return [f"{name} is {leaf_text(found)} in the checkpoint, but {leaf_text(new)} in this config{way_out}"]
    return []


def check_lora_scale(source: InitSource, plan: BranchPlan, lora: LoraConfig) -> None:
    """Raises BadInput if the scale of the LoRA adapters differs between the checkpoint and this config."""
    saved = from_dict(LoraConfig, source.record["run"].get("config", {}).get("lora") or {}, f"{source}: lora")
    if any(map(is_adapter, plan.loaded)) and saved.scale != lora.scale:
        raise BadInput(
            f"init.from_path: the adapters of {source} were trained with the scale alpha / rank = {saved.scale:g}, but "
            f"this config has {lora.scale:g}; set lora.alpha={saved.alpha:g} and lora.rank={saved.rank}"
        )


def check_mup_scales(source: InitSource, model: Any) -> None:
    """Raises BadInput if the muP factors of the weights differ between the checkpoint and this config."""
    recorded = source.record["run"].get("config", {}).get("model") or {}
    saved = folding_factors(convert(recorded, AnyModelConfig, f"{source}: model")) if recorded.get("mup") else {}
    if saved != folding_factors(model):
        raise BadInput(
            f"init.from_path: the weights of {source} were trained with different model.mup factors than in this "
            "config; copy model.mup from the config of that run, or remove it if that run does not set it"
        )


def check_rules(cfg: InitConfig, source: InitSource, saved: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """Raises BadInput if a rule matches no leaf, or if the checkpoint lacks the leaves requested by init.what."""
    first = LEAF_GROUPS[cfg.what][0]
    if not any(leaf_group(name) == first for name in saved):
        has = sorted({leaf_group(name) for name in source.record["leaves"]})
        raise BadInput(f"init.what={cfg.what!r} needs {first}, but {source} has only {', '.join(has)}")
    for rule in cfg.rename:
        pattern = rule.partition(ARROW)[0]
        if not any(re.search(pattern, name) for name in saved):
            raise BadInput(f"init.rename={rule!r} matches no leaf of {source}; similar: {nearest(pattern, saved)}")
    for pattern in cfg.skip:
        if not any(re.search(pattern, name) for name in (*saved, *targets)):
            near = nearest(pattern, targets)
            raise BadInput(f"init.skip={pattern!r} matches no leaf of the checkpoint or this config; similar: {near}")


def leaf_group(name: str) -> str:
    """Returns the first part of a leaf's name: 'params' for 'params/head'."""
    return name.partition("/")[0]


def renamed_leaf(cfg: InitConfig, name: str) -> str:
    """Applies init.rename to the name of a checkpoint leaf. With init.what=ema, 'ema/w' becomes 'params/w' first."""
    if cfg.what == "ema" and leaf_group(name) == "ema":
        name = "params" + name.removeprefix("ema")
    for rule in cfg.rename:
        pattern, _, replacement = rule.partition(ARROW)
        name = re.sub(pattern, replacement, name)
    return name


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the one or two `names` that are most similar to `name`, or 'none'."""
    return " or ".join(difflib.get_close_matches(name, list(names), n=2, cutoff=0.3)) or "none"


def vocab_axis(old: list, new: list, old_size: int | None, new_size: int) -> int | None:
    """Returns the vocabulary axis if `old` and `new`, each [shape, dtype], differ only in that axis; else None."""
    if len(old[0]) != len(new[0]) or old[1] != new[1]:
        return None
    differing = [(axis, *sizes) for axis, sizes in enumerate(zip(old[0], new[0])) if sizes[0] != sizes[1]]
    return differing[0][0] if [sizes[1:] for sizes in differing] == [(old_size, new_size)] else None


def resize_leaf(source: InitSource, name: str, fresh: jax.Array, target: Any, axis: int, new_rows: str) -> jax.Array:
    """Returns the checkpoint's leaf `name` with the vocabulary axis truncated or extended to the shape of `target`."""
    spec = spec_of(target)
    spec[axis] = None  # the old vocabulary size need not be divisible by the devices that shard it
    whole = NamedSharding(target.sharding.mesh, PartitionSpec(*spec), memory_kind=target.sharding.memory_kind)
    old = read_leaf(source, name, target.dtype, whole)

    @functools.partial(jax.jit, out_shardings=target.sharding)
    def resize(old: jax.Array, fresh: jax.Array) -> jax.Array:
        old, fresh = (jax.device_put(array, jax.memory.Space.Device) for array in (old, fresh))
        old_rows = jax.lax.slice_in_dim(old, 0, min(old.shape[axis], fresh.shape[axis]), axis=axis)
        added = jax.lax.slice_in_dim(fresh, old_rows.shape[axis], fresh.shape[axis], axis=axis)
        if new_rows == "mean":
            added = jnp.broadcast_to(jnp.mean(old, axis=axis, keepdims=True, dtype=jnp.float32), added.shape)
        return jnp.concatenate([old_rows, added.astype(old_rows.dtype)], axis=axis)

    return resize(old, fresh)


def read_leaf(source: InitSource, name: str, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Returns one leaf of the checkpoint with the given dtype and sharding."""
    wanted = {name: jax.ShapeDtypeStruct(tuple(source.record["leaves"][name][0]), dtype, sharding=sharding)}
    return source.checkpoints.restore(source.step, wanted, partial=True)[name]


def init_ema(leaves: dict[str, Any], targets: Mapping[str, Any]) -> None:
    """Sets the moving average in `leaves` to a copy of the parameters. Both are donated and cannot share arrays."""
    names = [name for name in targets if leaf_group(name) == "ema"]
    params = [leaves["params" + name.removeprefix("ema")] for name in names]
    shardings = [targets[name].sharding for name in names]
    copy = jax.jit(lambda arrays: [jnp.copy(array) for array in arrays], out_shardings=shardings)
    leaves |= dict(zip(names, copy(params)))


def describe_plan(cfg: InitConfig, source: InitSource, plan: BranchPlan, targets: Mapping[str, Any]) -> list[str]:
    """Returns log lines that list the loaded, resized, initialized and unused leaves."""
    health = source.record.get("health", "clean")
    lines = [f"init: {cfg.what} of {source}" + ("" if health == "clean" else f", a checkpoint marked {health!r}")]
    lines += [f"init: loaded   {line}" for line in summarize_leaves(plan.loaded, targets)]
    for name, axis in plan.resized.items():
        old, new = source.record["leaves"][plan.loaded[name]][0][axis], targets[name].shape[axis]
        how = {"mean": "the mean of the old rows", "init": "initialized as in a new model"}[cfg.new_rows]
        added = f"the {new - old} added rows are {how}" if new > old else f"the last {old - new} rows are removed"
        lines.append(f"init: resized  {name}: {old} -> {new}; {added}")
    lines += plan.upcycling.describe() if plan.upcycling else []
    fresh = [name for name in plan.fresh if leaf_group(name) in ("params", "opt_state")]
    lines += [f"init: fresh    {line}" for line in summarize_leaves(fresh, targets)]
    if any(name.startswith("ema/") for name in plan.fresh):
        lines.append("init: fresh    ema: a copy of the weights")
    if plan.left_out:
        lines.append(f"init: left out {', '.join(plan.left_out)}")
    return lines


def summarize_leaves(names: Iterable[str], targets: Mapping[str, Any]) -> list[str]:
    """Returns a line for each group of arrays, such as 'params/blocks/*/mlp: down, gate, up; 12.6M numbers'."""
    names, folders = list(names), {}
    whole = {group for group in ("opt_state", "ema") if all(n in names for n in targets if leaf_group(n) == group)}
    for name in names:
        folder, _, last = name.rpartition("/")
        if leaf_group(name) in whole:
            folder, last = leaf_group(name), "all"
        folder = re.sub(r"(?<=/)[0-9]+(?=/|$)", "*", folder)
        members, size = folders.get(folder, ((), 0))
        folders[folder] = (*members, *(() if last in members else (last,))), size + targets[name].size
    return [f"{folder}: {', '.join(found)}; {units.count(size)} numbers" for folder, (found, size) in folders.items()]
