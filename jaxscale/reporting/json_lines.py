"""JSON objects out of files that may still be written: the whole ones are given, the others told, nothing is raised."""

from collections.abc import Iterator
from typing import Any

from jaxscale import units
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json

LONGEST_LINE = 8 * 2**20  # bytes; a longer one is damaged
CHUNK = 2**20  # bytes read at once

LARGEST = 1e100  # a number beyond it is no measurement
NUMBERS = (
    "step",
    "code",
    "seconds",
    "bytes",
    "to",
    "until",
    "batch",
    "number",
    "steps_won",
    "steps_lost",
    "wall_seconds",
)
OBJECTS = ("devices", "goodput", "left")

Row = dict[str, Any]


def read_lines(path: Any, problems: list[str]) -> Iterator[Row]:
    """Yields the JSON objects of a file, one a line. A damaged line is left out and told; no file yields nothing."""
    damaged, torn = 0, False
    try:
        with paths.open_binary(path) as file:
            for line, whole in pieces(file):
                try:
                    record = parse_json(line) if line is not None else None
                except BadInput:
                    record = None
                if isinstance(record, dict):
                    yield record
                elif whole:
                    damaged += 1
                else:
                    torn = True
    except FileNotFoundError:
        return
    except BadInput as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path.name} cannot be read to its end: {error.strerror or error}")
    if damaged:
        problems.append(f"{path.name}: {units.plural(damaged, 'damaged line')} left out")
    if torn:
        problems.append(f"{path.name}: its last line is not whole, as while it is written, and is left out")


def pieces(file: Any) -> Iterator[tuple[bytes | None, bool]]:
    """Yields (line, whether it ended) of each line that is not empty; None for one that is too long to be a record."""
    held, skipping = b"", False
    while chunk := file.read(CHUNK):
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if skipping or len(line) > LONGEST_LINE:
                skipping = False
                yield None, True
            elif line.strip():
                yield line, True
        if len(held) > LONGEST_LINE:
            held, skipping = b"", True
    if skipping:
        yield None, False
    elif held.strip():
        yield held, False


def read_object(path: Any, problems: list[str], without: str) -> dict[str, Any]:
    """The JSON object in a file; {} with a problem told where there is none. without: what that means."""
    try:
        found = paths.read_json(path)
    except FileNotFoundError:
        problems.append(f"{path.name} is missing: {without}")
        return {}
    except BadInput:
        problems.append(f"{path.name} is damaged: {without}")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} is no JSON object: {without}")
        return {}
    return found


def clean_event(record: Row) -> Row | None:
    """The event with None for what its fields cannot hold; None for what is no event."""
    if not isinstance(record.get("event"), str):
        return None
    event = finite(record)
    for names, kind in ((NUMBERS, (int, float)), (OBJECTS, dict)):
        for name in names:
            if name in event and (not isinstance(event[name], kind) or isinstance(event[name], bool)):
                event[name] = None
    return event


def finite(value: Any) -> Any:
    """The value with None for numbers that are not finite, or too large for any measurement, however deep."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and not abs(value) <= LARGEST else value


def as_list(value: Any) -> list[Any]:
    """The value if it is one, else []."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """The value if it is one, else {}: a damaged config.json may hold anything."""
    return value if isinstance(value, dict) else {}
