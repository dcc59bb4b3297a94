"""Reads and writes the records of checkpoints: a JSON file with array fingerprints, the run's data and a sha256."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import traverse_util

from jaxscale.runtime.checkpoint.folders import is_step_name
from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, stop_if_unreachable
from jaxscale.system import fence, paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.faults import crash_point

RECORD = "run/metadata"  # path in the folder of a step: Orbax's JSON item named `run`
LAST_GOOD = "last_good.json"  # file in the folder of checkpoints
LAST_GOOD_KINDS = {"step": int, "verified": bool, "health": str, "sha256": str}


def read_record(folder: Any) -> dict[str, Any]:
    """Returns a step's record: {step, run, leaves: {name: [shape, dtype, fingerprint]}, health, metrics, ...}.

    Records of earlier versions have no step, health or metrics.
    Raises: OSError if the record is missing, BadInput if it was changed or belongs to a different step.
    """
    record = paths.read_json(folder / RECORD)
    if not is_sealed(record):
        raise BadInput("the sha256 of the record does not match its content")
    if is_step_name(folder.name):  # folders of unfinished and set-aside steps have other names
        step = int(folder.name)
        for recorded in (record.get("step", step), (record.get("run") or {}).get("step", step)):
            if recorded != step:
                raise BadInput(
                    f"the folder contains the record of step {recorded}; restore the original folder of step {step}"
                )
    return record


def require_record(folder: Any) -> dict[str, Any]:
    """Same as read_record, but all errors are BadInput and name the file."""
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
    """Returns the record of a step. Raises Stop (CHECKPOINT_CORRUPT). way_out: fix at the end of the message."""
    try:
        return require_record(folder)
    except BadInput as error:
        raise Stop(Exit.CHECKPOINT_CORRUPT, f"step {folder.name} cannot be read: {error}; {way_out}") from None


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {path: leaf} with paths such as "params/layers/wq", in tree order without empty containers."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    assert len(named) == len(flat), "two leaves of the state have the same name"
    return named


def weight_leaves(leaves: Iterable[str], what: str) -> dict[str, str]:
    """Maps a group's leaves to paths, such as {'w': 'params/w'}. Group 'ema' includes frozen parameters."""
    found = {name.removeprefix(f"{what}/"): name for name in leaves if name.startswith(f"{what}/")}
    if what != "ema" or not found:
        return found
    return {name: found.get(name, leaf) for name, leaf in weight_leaves(leaves, "params").items()}


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Converts {"a/b": leaf} to {"a": {"b": leaf}}."""
    return traverse_util.unflatten_dict(leaves, sep="/")


def describe_leaf(leaf: Any) -> list:
    """Returns [shape, dtype] for an array, or [[], 'int'] for a Python number."""
    return [list(leaf.shape), str(leaf.dtype)] if hasattr(leaf, "dtype") else [[], type(leaf).__name__]


def leaf_text(described: list | None) -> str:
    """Returns a text such as 'float32[64,64]', or 'missing' for None. described: [shape, dtype]."""
    return f"{described[1]}[{','.join(map(str, described[0]))}]" if described else "missing"


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content as JSON types (tuples become lists) with the key `sha256`, a digest of the content."""
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain | {"sha256": digest(plain)}


def is_sealed(record: Any) -> bool:
    """Returns True if the record's sha256 matches its content."""
    return isinstance(record, dict) and record.get("sha256") == digest(
        {k: v for k, v in record.items() if k != "sha256"}
    )


def digest(content: Any) -> str:
    """Returns the sha256 of the content as JSON text with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_last_good(directory: Any, step: int, *, verified: bool, health: str, sha256: str) -> None:
    """Writes last_good.json, which names the last saved step. sha256: value from the step's record."""
    content = {"step": step, "verified": verified, "health": health, "sha256": sha256}
    crash_point("last_good/before")
    paths.write_text_atomic(directory / LAST_GOOD, json.dumps(content) + "\n")
    crash_point("last_good/after")


def remove_last_good(directory: Any, step: int) -> None:
    """Removes last_good.json if it names this step. Call before a step is moved, so that it is not reported missing."""
    found = read_last_good(directory)
    if found and found["step"] == step:
        fence.ask(directory)
        (directory / LAST_GOOD).unlink(missing_ok=True)


def read_last_good(directory: Any) -> dict[str, Any] | None:
    """Returns the content of last_good.json, or None if the file is missing or invalid. Raises Stop (STORAGE)."""
    found = load_last_good(directory)
    return found if isinstance(found, dict) else None


def load_last_good(directory: Any) -> dict[str, Any] | str | None:
    """Returns the content of last_good.json, an error message if invalid, or None if missing. Raises Stop (STORAGE)."""
    path = directory / LAST_GOOD
    try:
        found = stop_if_unreachable(lambda: paths.read_json(path), path)
    except FileNotFoundError:
        return None
    except (OSError, BadInput) as error:
        return str(error)
    whole = isinstance(found, dict) and all(type(found.get(name)) is kind for name, kind in LAST_GOOD_KINDS.items())
    return found if whole else f"{path} lacks fields that every save writes"
