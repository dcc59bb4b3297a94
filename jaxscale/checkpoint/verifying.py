"""Whether a checkpoint still is what training saved: every bit of every array, read from the files."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxscale.checkpoint.array_store import DICT_KEY, TREE, Arrays, Locations, compare_leaf, index_damages, named_files
from jaxscale.checkpoint.cause import is_trouble, short_cause
from jaxscale.checkpoint.inventory import changed_files
from jaxscale.checkpoint.record import RECORD, require_record
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop

VALUE_KINDS = ("jax.Array", "np.ndarray", "scalar")


@dataclasses.dataclass(frozen=True)
class Damage:
    """Something that is not as it was saved."""

    what: str  # a leaf, or a file of the step's folder
    cause: str
    files: tuple[str, ...] = ()  # below the step's folder, where the leaf's bytes lie

    def __str__(self):
        return f"{self.what}: {self.cause}" + (f" (in {', '.join(self.files)})" if self.files else "")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the check of a step found."""

    num_leaves: int
    num_bytes: int
    damages: tuple[Damage, ...]


def verify_folder(
    folder: Any, on_bytes: Callable[[int], None] = lambda done: None, *, finished: bool = True
) -> Verdict:
    """Reads the whole step: every leaf against the fingerprint taken on the devices, every file against its md5.

    Raises: Stop (STORAGE) where a bucket or disk does not let itself be read.
    Args: on_bytes: called with the bytes of arrays read so far. finished: False before the step counts.
    """
    try:
        return look_through(folder, on_bytes, finished)
    except Stop:
        raise
    except Exception as error:
        require_reachable(error, folder)
        raise


def look_through(folder: Any, on_bytes: Callable[[int], None], finished: bool) -> Verdict:
    """As verify_folder; what is wrong with the storage itself is raised as it came."""
    try:
        record = require_record(folder)
    except BadInput as error:
        require_reachable(error, folder)
        return Verdict(0, 0, (Damage(RECORD, str(error)),))
    damages, done = [], 0
    damages += tree_damages(folder, record["leaves"])
    arrays, located = Arrays(folder), Locations(folder)
    for name, described in record["leaves"].items():
        try:
            cause, size = compare_leaf(arrays, name, *described)
        except Exception as error:  # whatever TensorStore makes of spoilt bytes
            require_reachable(error, folder)
            cause, size = short_cause(error), 0
        if cause:
            damages.append(Damage(name, cause, located.files(name) or named_files(cause)))
        done += size
        on_bytes(done)
    damages += [Damage(*told) for told in index_damages(folder)]
    named = {file for damage in damages for file in (damage.what, *damage.files)}
    damages += [Damage(*told) for told in changed_files(folder, finished=finished) if told[0] not in named]
    return Verdict(len(record["leaves"]), done, tuple(damages))


def require_reachable(error: Exception, folder: Any) -> None:
    """Raises Stop (STORAGE) if the error says that nothing could be read, which is no word on what is there."""
    if is_trouble(error):
        raise Stop(
            Exit.STORAGE, f"{folder} cannot be read now: {short_cause(error)}; whether it is whole is not known"
        ) from None


def tree_damages(folder: Any, leaves: Mapping[str, Any]) -> Iterator[Damage]:
    """Yields what would make Orbax read other leaves than the record has."""
    name = TREE
    try:
        tree = paths.read_json(folder / name)
        if not isinstance(tree, dict) or tree.get("use_ocdbt") is not True or type(tree.get("use_zarr3")) is not bool:
            yield Damage(name, "it does not say how the arrays are kept")
        described = {}
        for entry in tree["tree_metadata"].values():
            if any(part["key_type"] != DICT_KEY for part in entry["key_metadata"]):
                yield Damage(name, f"a level of {entry['key_metadata']} is no dict")
            value = entry["value_metadata"]
            if value["value_type"] not in VALUE_KINDS or value["skip_deserialize"] is not False:
                yield Damage(name, f"a leaf is described as {value}")
            described["/".join(str(part["key"]) for part in entry["key_metadata"])] = entry
        if wrong := sorted(set(described) ^ set(leaves)):
            yield Damage(name, f"its leaves are not those of the record: {', '.join(wrong[:4])}")
    except (OSError, BadInput, KeyError, TypeError, AttributeError) as error:
        require_reachable(error, folder)
        yield Damage(name, f"it cannot be understood: {short_cause(error)}")
