"""A new run that begins with the weights of another: what is taken, under which names, and what stays fresh."""

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
from jaxscale.checkpoint.config import ARROW, CheckpointConfig, InitConfig
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import describe_leaf, leaf_text, named_leaves, weight_leaves
from jaxscale.checkpoint.restore import newest_to_read
from jaxscale.checkpoint.upcycle import Origin, Upcycling, is_dense_of, plan_upcycling
from jaxscale.hosts.agree import agreed
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import LoraConfig
from jaxscale.models.lora import is_adapter
from jaxscale.models.mup_config import folded
from jaxscale.schema import convert, from_dict
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, tell

SHOWN_PROBLEMS = 4
HUGGING_FACE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)  # what tells such a folder from one of ours
WHAT = {"params": ("params",), "ema": ("ema",), "state": ("params", "opt_state", "ema")}  # groups of leaves in a file
# of init.what=run none is chosen: it takes all of a state (go_on)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint of another run."""

    checkpoints: Checkpoints
    step: int
    record: Mapping[str, Any]
    experts: str = "none"  # init.experts of the run that begins with it
    whole: bool = False  # init.what=run: that run goes on from here

    def __str__(self) -> str:
        return str(self.checkpoints.directory / str(self.step))

    @property
    def ancestry(self) -> list[dict[str, Any]]:
        """Where its weights come from, itself first: what a branch records of its descent."""
        run = self.record["run"]
        own = {"path": str(self.checkpoints.directory), "step": self.step, "sha256": self.record["sha256"]}
        converted = run.get("converted") or {}  # for whoever exports a descendant: what its config.json said
        own |= {name: converted[name] for name in ("model_type", "kept", "from") if converted.get(name)}
        if self.experts != "none":
            own["upcycled"] = self.experts
        if self.whole:
            own["what"] = "run"
        return [own, *run.get("ancestry", ())]

    @property
    def vocab_size(self) -> int | None:
        """Rows of its embedding table, as its config says."""
        return self.record["run"].get("config", {}).get("model", {}).get("vocab_size")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which of the checkpoint's leaves becomes which of ours."""

    loaded: dict[str, str]  # our name -> name there
    resized: dict[str, int]  # our name -> axis of the vocabulary, among the loaded
    fresh: tuple[str, ...]
    left_out: tuple[str, ...]  # names there
    made: dict[str, Origin] = dataclasses.field(default_factory=dict)  # ours of other shapes, among the loaded
    upcycling: Upcycling | None = None


def open_source(
    path: str,
    ancestor: Mapping[str, Any] | None = None,
    *,
    wanted: int | None = None,
    named: str = "init.from_path",
    log: Callable[[str], None] = tell,
) -> Source:
    """The checkpoint that `path` names: that step, or the newest of a work folder. The same in all processes.

    ancestor: the one with which the run began before; then it must be that, step and content. wanted: the step, where
    the path names none. named: the setting or flag that gave the path, for errors. log: takes a line about newer steps
    that cannot be believed and are passed over, and about files that are not as they were.
    Raises BadInput where no checkpoint is there, and Stop (CHECKPOINT_CORRUPT) for one that cannot be read.
    """
    folder, step = named_step(path)
    step = wanted if step is None else step
    checkpoints = Checkpoints(folder, CheckpointConfig())
    steps = agreed(checkpoints.all_steps)
    if not steps:
        foreign = any((folder.parent / name).exists() for name in HUGGING_FACE)
        how = f"; for a Hugging Face model: jaxscale convert --from={path} --workdir=NEW, then NEW" if foreign else ""
        raise BadInput(f"{named}={path} holds no checkpoint: {folder} has none that was completed{how}")
    if step is not None and step not in steps:
        near = sorted(sorted(steps, key=lambda other: abs(other - step))[:3])
        raise BadInput(f"{named}={path}: step {step} is no checkpoint; {folder} has {units.or_list(near)}")
    if step is None:
        step = ancestor["step"] if ancestor else newest_to_read(checkpoints, log)
        if step is None or step not in steps:
            raise BadInput(f"{named}={path}: this run began with its step {step}, and that is no longer there")
    source = Source(checkpoints, step, checkpoints.read_record(step))
    if ancestor and ancestor["sha256"] != source.record["sha256"]:
        raise BadInput(
            f"{named}={path}: step {step} is not the checkpoint this run began with "
            f"({source.record['sha256'][:16]} now, {ancestor['sha256'][:16]} then); use another --workdir"
        )
    checkpoints.log_changed_files(step, log, small=True)
    return source


def named_step(path: str) -> tuple[Any, int | None]:
    """(the folder of checkpoints that `path` leads to; the step that it names, or None). Touches no device."""
    folder = paths.as_path(path)
    if folder.name.isdecimal() and not (folder / "checkpoints").exists():  # a run may be called 2026
        return folder.parent, int(folder.name)
    return folder if folder.name == "checkpoints" else folder / "checkpoints", None


def branch_state(program: Any, cfg: InitConfig, log: Callable[[str], None], source: Source | None = None) -> Any:
    """The state before step 0 of a run that begins with another's weights, placed as the program wants it.

    Each array is read straight into its sharding, and what is drawn at random is given up first where it is replaced,
    so that at most one state is in memory. step, random key, guard and loss scale are a new run's.
    Args: program: as build.py makes it (init, abstract_state, cfg.model, cfg.lora). source: open_source's, if opened.
    Raises: BadInput with one line for all that does not fit. Stop (CHECKPOINT_CORRUPT) where a bit there has changed.
    """
    assert source or cfg.from_path, "a run that begins with another one's weights names it"
    source = source or open_source(str(cfg.from_path))
    own = named_leaves(program.abstract_state)
    plan = plan_branch(cfg, source, own, program.cfg.model)
    check_scale(source, plan, program.cfg.lora)
    check_mup_scales(source, program.cfg.model)
    state = program.init()
    leaves = named_leaves(state)
    for name in plan.loaded:
        if name not in plan.resized:
            leaves[name].delete()
    as_they_are = {name: old for name, old in plan.loaded.items() if name not in plan.resized and name not in plan.made}
    there = {old: own[name] for name, old in as_they_are.items()}
    found = source.checkpoints.restore(source.step, there, partial=True) if there else {}
    leaves |= {name: found[old] for name, old in as_they_are.items()}
    for name, axis in plan.resized.items():  # one after the other: each is for a moment in memory twice
        leaves[name] = resized(source, plan.loaded[name], leaves[name], own[name], axis, cfg.new_rows)
    for name, origin in plan.made.items():  # and these too, beside the dense one
        assert plan.upcycling is not None, "arrays are made of others where experts are"
        read = functools.partial(read_leaf, source, plan.loaded[name], own[name].dtype)
        leaves[name] = plan.upcycling.make(origin, read, own[name])
    if plan.upcycling:
        fresh = [name for name in plan.fresh if group_of(name) == "params"]
        leaves |= {name: plan.upcycling.begun(name, leaves[name], own[name]) for name in fresh}
    if state.ema is not None and not any(name.startswith("ema/") for name in plan.loaded):
        begin_average(leaves, own)
    for line in describe(cfg, source, plan, own):
        log(line)
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


def go_on(program: Any, source: Source, log: Callable[[str], None]) -> Any:
    """The whole state of the source, its step, random key and guard too: the run that begins with it is a branch.

    Raises: Stop (CHECKPOINT_CORRUPT) where a bit has changed, and as restore does where the arrays are others.
    """
    state = source.checkpoints.restore(source.step, program.abstract_state)
    if int(state.step) != source.step:
        raise source.checkpoints.corrupt(source.step, "state", f"it has done {int(state.step)} steps")
    health = source.record.get("health", "clean")
    marked = "" if health == "clean" else f", a checkpoint marked {health!r}"
    log(f"init: a branch of {source}{marked}: goes on from step {source.step}, with its state and its data")
    return state


def plan_branch(cfg: InitConfig, source: Source, own: Mapping[str, Any], model: Any) -> Plan:
    """What goes where. Raises BadInput, one line, if a leaf on either side is neither used nor skipped."""
    leaves = source.record["leaves"]
    saved = {leaf: leaves[leaf] for part in WHAT[cfg.what] for leaf in weight_leaves(leaves, part).values()}
    check_rules(cfg, source, saved, own)
    is_skipped = lambda name: any(re.search(pattern, name) for pattern in cfg.skip)
    renamed = {name: new_name(cfg, name) for name in saved}
    if clash := [name for name, number in Counter(renamed.values()).items() if number > 1]:
        raise BadInput(f"init.rename gives several arrays of {source} the name {clash[0]}")
    available = {new: old for old, new in renamed.items() if not is_skipped(new) and not is_skipped(old)}
    wanted = [name for name in own if group_of(name) in receivers(cfg, available) and not is_skipped(name)]
    upcycling = None
    if cfg.experts != "none":
        upcycling = plan_upcycling(cfg.experts, model, {new: saved[old][0] for new, old in available.items()}, source)
    loaded, resized, made, problems = {}, {}, {}, []
    for name in wanted:
        origin = upcycling.origin(name) if upcycling else Origin(name)
        if origin is None or (origin.name not in available and is_adapter(name)):
            continue  # it begins here
        if origin.name not in available:
            near = nearest(origin.name, [old for new, old in available.items() if new not in own] or available)
            problems.append(f"{name} is not there (nearest: {near})")
            continue
        (shape, dtype), new = saved[available[origin.name]][:2], describe_leaf(own[name])
        old = [upcycling.shape(origin, shape) if upcycling else shape, dtype]
        axis = vocab_axis(old[0], new[0], source.vocab_size, model.vocab_size)
        loaded[name] = available[origin.name]
        if old == new:
            made |= {} if origin.is_whole else {name: origin}
            continue
        if old[1] == new[1] and axis is not None and cfg.resize_vocab:
            resized[name] = axis
            continue
        way_out = " (init.resize_vocab=true resizes it)" if old[1] == new[1] and axis is not None else ""
        if not upcycling and is_dense_of(old[0], new[0], name):
            way_out = " (init.experts='copy' makes experts of it, or 'split' narrower ones)"
        problems.append(f"{name} is {leaf_text([shape, dtype])} there and {leaf_text(new)} here{way_out}")
    keeps_average = any(group_of(name) == "ema" for name in own)  # or that of the checkpoint is not needed
    used = set(loaded.values())
    unused = [old for new, old in available.items() if old not in used and (keeps_average or group_of(new) != "ema")]
    merge = "; jaxscale ckpt merge_lora makes plain weights of it"
    problems += [
        f"{name} is there and has no place here (nearest: {nearest(name, own)}){merge * is_adapter(name)}"
        for name in unused
    ]
    if problems:
        more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise BadInput(
            f"init.from_path: {source} does not fit this config: {'; '.join(problems[:SHOWN_PROBLEMS])}{more}; "
            "use init.rename or init.skip, or the model it was trained with"
        )
    return Plan(
        loaded,
        resized,
        fresh=tuple(name for name in own if name not in loaded),
        left_out=tuple(name for name in saved if name not in used),
        made=made,
        upcycling=upcycling,
    )


def check_scale(source: Source, plan: Plan, lora: LoraConfig) -> None:
    """Raises BadInput for adapters that would be multiplied by another number here than there."""
    there = from_dict(LoraConfig, source.record["run"].get("config", {}).get("lora") or {}, f"{source}: lora")
    if any(map(is_adapter, plan.loaded)) and there.scale != lora.scale:
        raise BadInput(
            f"init.from_path: the adapters of {source} are multiplied by alpha / rank = {there.scale:g} there and by "
            f"{lora.scale:g} here; set lora.alpha={there.alpha:g} and lora.rank={there.rank}"
        )


def check_mup_scales(source: Source, model: Any) -> None:
    """Raises BadInput for weights that muP would multiply with other factors here than there."""
    recorded = source.record["run"].get("config", {}).get("model") or {}
    there = folded(convert(recorded, AnyModelConfig, f"{source}: model")) if recorded.get("mup") else {}
    if there != folded(model):
        raise BadInput(
            f"init.from_path: the weights of {source} were trained with other factors of model.mup than they would "
            "have here; set model.mup as it is there, or leave it out where it has none"
        )


def check_rules(cfg: InitConfig, source: Source, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises BadInput for a rule that nothing matches, or where the checkpoint has not what is asked for."""
    first = WHAT[cfg.what][0]
    if not any(group_of(name) == first for name in saved):
        has = sorted({group_of(name) for name in source.record["leaves"]})
        raise BadInput(f"init.what={cfg.what!r}: {source} has no {first}, only {', '.join(has)}")
    for rule in cfg.rename:
        pattern = rule.partition(ARROW)[0]
        if not any(re.search(pattern, name) for name in saved):
            raise BadInput(f"init.rename={rule!r} matches nothing in {source}; nearest: {nearest(pattern, saved)}")
    for pattern in cfg.skip:
        if not any(re.search(pattern, name) for name in (*saved, *own)):
            raise BadInput(f"init.skip={pattern!r} matches nothing there or here; nearest: {nearest(pattern, own)}")


def group_of(name: str) -> str:
    """'params' of 'params/head'."""
    return name.partition("/")[0]


def new_name(cfg: InitConfig, name: str) -> str:
    """What a leaf of the checkpoint is called here."""
    if cfg.what == "ema" and group_of(name) == "ema":
        name = "params" + name.removeprefix("ema")
    for rule in cfg.rename:
        pattern, _, replacement = rule.partition(ARROW)
        name = re.sub(pattern, replacement, name)
    return name


def receivers(cfg: InitConfig, available: Iterable[str]) -> tuple[str, ...]:
    """The groups of our leaves that must be filled. An average that is not there begins as the weights."""
    has_average = any(group_of(name) == "ema" for name in available)
    return {"state": ("params", "opt_state", *(["ema"] * has_average))}.get(cfg.what, ("params",))


def nearest(name: str, names: Iterable[str]) -> str:
    """Up to two of the names that are most like this one."""
    return " or ".join(difflib.get_close_matches(name, list(names), n=2, cutoff=0.3)) or "none"


def vocab_axis(old: list[int], new: list[int], old_size: int | None, new_size: int) -> int | None:
    """The one axis in which two shapes differ, if it is that of the vocabulary; else None."""
    if len(old) != len(new):
        return None
    axes = [axis for axis, (a, b) in enumerate(zip(old, new)) if a != b]
    return axes[0] if len(axes) == 1 and (old[axes[0]], new[axes[0]]) == (old_size, new_size) else None


def resized(source: Source, name: str, fresh: jax.Array, own: Any, axis: int, new_rows: str) -> jax.Array:
    """The leaf `name` of the checkpoint with as many rows as `own` has along the vocabulary's axis."""
    shape = source.record["leaves"][name][0]
    spec = list(own.sharding.spec) + [None] * (len(shape) - len(own.sharding.spec))
    spec[axis] = None  # the devices that share the vocabulary need not divide its old size
    whole = NamedSharding(own.sharding.mesh, PartitionSpec(*spec), memory_kind=own.sharding.memory_kind)
    old = read_leaf(source, name, own.dtype, whole)

    @functools.partial(jax.jit, out_shardings=own.sharding)
    def resize(old: jax.Array, fresh: jax.Array) -> jax.Array:
        old, fresh = (jax.device_put(array, jax.memory.Space.Device) for array in (old, fresh))
        kept = jax.lax.slice_in_dim(old, 0, min(old.shape[axis], fresh.shape[axis]), axis=axis)
        added = jax.lax.slice_in_dim(fresh, kept.shape[axis], fresh.shape[axis], axis=axis)
        if new_rows == "mean":
            added = jnp.broadcast_to(jnp.mean(old, axis=axis, keepdims=True, dtype=jnp.float32), added.shape)
        return jnp.concatenate([kept, added.astype(kept.dtype)], axis=axis)

    return resize(old, fresh)


def read_leaf(source: Source, name: str, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """The leaf `name` of the checkpoint, by itself."""
    wanted = {name: jax.ShapeDtypeStruct(tuple(source.record["leaves"][name][0]), dtype, sharding=sharding)}
    return source.checkpoints.restore(source.step, wanted, partial=True)[name]


def begin_average(leaves: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Makes the average in `leaves` equal to the parameters there: bits of its own, for both are donated."""
    names = [name for name in own if group_of(name) == "ema"]
    params = [leaves["params" + name.removeprefix("ema")] for name in names]
    copy = jax.jit(lambda arrays: [jnp.copy(array) for array in arrays], out_shardings=[own[n].sharding for n in names])
    leaves |= dict(zip(names, copy(params)))


def describe(cfg: InitConfig, source: Source, plan: Plan, own: Mapping[str, Any]) -> list[str]:
    """Lines for people: what was loaded, resized and left random, by group, and what was left out."""
    health = source.record.get("health", "clean")
    lines = [f"init: {cfg.what} of {source}" + ("" if health == "clean" else f", a checkpoint marked {health!r}")]
    lines += [f"init: loaded   {line}" for line in grouped(plan.loaded, own)]
    for name, axis in plan.resized.items():
        old, new = source.record["leaves"][plan.loaded[name]][0][axis], own[name].shape[axis]
        how = {"mean": "the mean of the old ones", "init": "as a new model has them"}[cfg.new_rows]
        added = f"the {new - old} added rows are {how}" if new > old else f"the last {old - new} rows are cut off"
        lines.append(f"init: resized  {name}: {old} -> {new}; {added}")
    lines += plan.upcycling.describe() if plan.upcycling else []
    fresh = [name for name in plan.fresh if group_of(name) in ("params", "opt_state")]
    lines += [f"init: fresh    {line}" for line in grouped(fresh, own)]
    if any(name.startswith("ema/") for name in plan.fresh):
        lines.append("init: fresh    ema: begins as the weights")
    if plan.left_out:
        lines.append(f"init: left out {', '.join(plan.left_out)}")
    return lines


def grouped(names: Iterable[str], own: Mapping[str, Any]) -> list[str]:
    """One line for each folder of arrays: 'params/blocks/mlp: down, gate, up; 12.6M numbers'.

    Layers that are numbered are one folder, params/blocks/*/mlp, and a whole optimizer state is one line.
    """
    names, folders = list(names), {}
    whole = {group for group in ("opt_state", "ema") if all(n in names for n in own if group_of(n) == group)}
    for name in names:
        folder, _, last = name.rpartition("/")
        if group_of(name) in whole:
            folder, last = group_of(name), "all of it"
        folder = re.sub(r"(?<=/)[0-9]+(?=/|$)", "*", folder)
        members, size = folders.get(folder, ((), 0))
        folders[folder] = (*members, *(() if last in members else (last,))), size + own[name].size
    return [f"{folder}: {', '.join(found)}; {units.count(size)} numbers" for folder, (found, size) in folders.items()]
