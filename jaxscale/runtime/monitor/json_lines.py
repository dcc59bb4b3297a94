"""Reads JSON objects from files that may still be written: damaged ones are skipped and reported, nothing is raised."""

from collections.abc import Iterator
from typing import Any

from jaxscale import units
from jaxscale.runtime.monitor.records import Damage, read_records
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

LARGEST_NUMBER = 1e100  # larger numbers are not measurements
NUMBERS = tuple("step code seconds bytes to until batch number steps_won steps_lost wall_seconds".split())
OBJECTS = ("devices", "goodput", "left")

Row = dict[str, Any]


def read_lines(path: Any, problems: list[str]) -> Iterator[Row]:
    """Yields the JSON objects of a file's lines. Damaged lines are skipped and reported; a missing file is empty."""
    damage = Damage()
    try:
        yield from read_records(path, damage)
    except BadInput as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path.name} cannot be read to its end: {error.strerror or error}")
    if damage.lines:
        problems.append(f"{path.name}: {units.plural(damage.lines, 'damaged line')} left out")
    if damage.torn:
        problems.append(f"{path.name}: its last line is not whole, as while it is written, and is left out")


def read_object(path: Any, problems: list[str], without: str) -> dict[str, Any]:
    """Returns the JSON object in a file after `finite`; {} with a problem if there is none.

    Args: without: consequence of a missing object, for the message.
    """
    try:
        found = paths.read_json(path)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing: {without}")
        return {}
    except BadInput:
        problems.append(f"{path.name} is damaged: {without}")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} is not a JSON object: {without}")
        return {}
    return finite(found)


def clean_event(record: Row) -> Row | None:
    """Replaces invalid fields of an event with None; None if it is not an event."""
    if not isinstance(record.get("event"), str):
        return None
    event = finite(record)
    for names, kind in ((NUMBERS, (int, float)), (OBJECTS, dict)):
        for name in names:
            if name in event and (not isinstance(event[name], kind) or isinstance(event[name], bool)):
                event[name] = None
    return event


def finite(value: Any) -> Any:
    """Replaces non-finite and too large numbers with None, recursively."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and not abs(value) <= LARGEST_NUMBER else value


def as_list(value: Any) -> list[Any]:
    """The value if it is one, else []."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """The value if it is one, else {}: a damaged config.json may hold anything."""
    return value if isinstance(value, dict) else {}
