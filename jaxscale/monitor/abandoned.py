"""Metrics of steps that a run has gone back from: kept in abandoned.jsonl, out of the way of those that count."""

import json
from typing import Any

from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json


def abandon(workdir: Any, to_step: int, rewind: int) -> int:
    """Moves the lines of metrics.jsonl behind to_step to abandoned.jsonl; the number of lines that it moved.

    Each gets "rewind": the number of the rewind that it was lost by. Done again after a crash, it moves nothing twice.
    """
    folder = paths.as_path(workdir)
    kept, moved = [], []
    for line in lines_of(folder / "metrics.jsonl"):
        try:
            record = parse_json(line)
            is_left = int(record["step"]) > to_step
        except (BadInput, TypeError, KeyError):
            continue  # torn: the next start of the metrics would drop it too
        if is_left:
            moved.append(json.dumps({"rewind": rewind} | record))
        else:
            kept.append(line)
    if not moved:
        return 0
    before = lines_of(folder / "abandoned.jsonl")
    known = set(before)
    new = [line for line in moved if line not in known]
    paths.write_text_atomic(folder / "abandoned.jsonl", "".join(f"{line}\n" for line in [*before, *new]))
    paths.write_text_atomic(folder / "metrics.jsonl", "".join(f"{line}\n" for line in kept))
    return len(moved)


def lines_of(path: Any) -> list[str]:
    """The lines of a file; none where there is no file."""
    try:
        return [line for line in paths.read_bytes(path).decode("utf-8", "replace").split("\n") if line]
    except FileNotFoundError:
        return []
