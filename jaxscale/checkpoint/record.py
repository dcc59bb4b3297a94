"""What a checkpoint says of itself: names and fingerprints of its arrays, and what the run needs, under a sha256."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxscale.checkpoint.folders import is_step_name
from jaxscale.checkpoint.storage_errors import is_storage_error, reached
from jaxscale.system import fence, paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

RECORD = "run/metadata"  # below the folder of a step: Orbax's JSON item of the name `run`
LAST_GOOD = "last_good.json"  # beside the steps
LAST_GOOD_KINDS = {"step": int, "verified": bool, "health": str, "sha256": str}


def read_record(folder: Any) -> dict[str, Any]:
    """The sealed JSON object of a step: {step, run, leaves: {name: [shape, dtype, fingerprint]}, health, metrics, ...}.

    Checkpoints of earlier versions have no step, no health and no metrics. Needs no Orbax.
    Raises: OSError if it is not there, BadInput if one bit of it has changed, or if the folder bears another number.
    """
    record = paths.read_json(folder / RECORD)
    if wrong := what_is_wrong(record, folder.name):
        raise BadInput(wrong)
    return record


def require_record(folder: Any) -> dict[str, Any]:
    """As read_record, with one kind of error: BadInput naming the file, for whatever keeps it from being read."""
    try:
        return read_record(folder)
    except BadInput as error:
        named = str(folder / RECORD)
        if named in str(error):
            raise
        raise BadInput(f"{named}: {error}") from None
    except Exception as error:
        if not (isinstance(error, OSError) or is_storage_error(error)):
            raise
        cause = getattr(error, "strerror", None) or type(error).__name__
        raise BadInput(f"{folder / RECORD} cannot be read: {cause}") from None


def require_step(folder: Any, way_out: str) -> dict[str, Any]:
    """The record of a step that is to be read. Raises Stop (CHECKPOINT_CORRUPT) that ends with the way out."""
    try:
        return require_record(folder)
    except BadInput as error:
        raise Stop(Exit.CHECKPOINT_CORRUPT, f"step {folder.name} cannot be read: {error}; {way_out}") from None


def what_is_wrong(record: Any, name: str) -> str:
    """Why a record is not to be believed in a folder of this name; '' if it is. Whoever opens a step asks this.

    The step stands in the record and in the run's part of it. Folders that are no step yet, or not any more, bear
    other names and may hold any.
    """
    if not is_sealed(record):
        return "its sha256 does not match its content"
    if not is_step_name(name):
        return ""
    step = int(name)
    for recorded in (record.get("step", step), (record.get("run") or {}).get("step", step)):
        if recorded != step:
            return f"it is the record of step {recorded}: what lies in {name} was moved, copied or linked there"
    return ""


def named_leaves(tree: Any) -> dict[str, Any]:
    """{"params/layers/wq": leaf} in the order of the tree; containers leave no other trace, so empty ones vanish."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    assert len(named) == len(flat), "two leaves of the state have the same name"
    return named


def weight_leaves(leaves: Iterable[str], what: str) -> dict[str, str]:
    """{'w': 'params/w'} of the leaves below a part of the state; {} where it has none.

    What was frozen has no average: the weights of 'ema' are those averages that there are, and parameters for the rest.
    """
    own = {name.removeprefix(f"{what}/"): name for name in leaves if name.startswith(f"{what}/")}
    if what != "ema" or not own:
        return own
    return {name: own.get(name, leaf) for name, leaf in weight_leaves(leaves, "params").items()}


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


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content after a round trip through JSON (tuples become lists), with the sha256 of its sorted text."""
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain | {"sha256": digest(plain)}


def is_sealed(record: Any) -> bool:
    """True if the record's sha256 is that of the rest of it."""
    return isinstance(record, dict) and record.get("sha256") == digest(
        {k: v for k, v in record.items() if k != "sha256"}
    )


def digest(content: Any) -> str:
    """sha256 of the JSON text with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_last_good(directory: Any, step: int, *, verified: bool, health: str, sha256: str) -> None:
    """Records the step in last_good.json. sha256: of its record."""
    content = {"step": step, "verified": verified, "health": health, "sha256": sha256}
    crash_point("last_good/before")
    paths.write_text_atomic(directory / LAST_GOOD, json.dumps(content) + "\n")
    crash_point("last_good/after")


def forget_last_good(directory: Any, step: int) -> None:
    """Removes last_good.json if it names this step, which will not count any more: a later look would miss it."""
    found = read_last_good(directory)
    if found and found["step"] == step:
        fence.ask(directory)
        (directory / LAST_GOOD).unlink(missing_ok=True)


def read_last_good(directory: Any) -> dict[str, Any] | None:
    """What last_good.json says; None if it is missing or odd, for it can be made again. Raises Stop as look_up does."""
    found = look_up_last_good(directory)
    return found if isinstance(found, dict) else None


def look_up_last_good(directory: Any) -> dict[str, Any] | str | None:
    """What last_good.json says, or in words what is odd about it; None if it is missing.

    Raises Stop (STORAGE) where its bucket cannot be reached: that says nothing about it.
    """
    path = directory / LAST_GOOD
    try:
        found = reached(lambda: paths.read_json(path), path)
    except FileNotFoundError:
        return None
    except (OSError, BadInput) as error:
        return str(error)
    whole = isinstance(found, dict) and all(type(found.get(name)) is kind for name, kind in LAST_GOOD_KINDS.items())
    return found if whole else f"{path} does not name a step as a save writes it"
