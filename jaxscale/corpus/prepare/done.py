"""Completion markers: a `done` file lists the sha256 of itself and of every file that a task wrote.

Whoever is killed leaves no such file, and what has been damaged since is made again.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

from jaxscale.data.verified import hashed, remove
from jaxscale.system.digest import file_sha256, json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json
from jaxscale.system.paths import read_bytes, write_bytes_atomic


def mark_done(path: pathlib.Path, result: dict[str, Any], files: Iterable[pathlib.Path]) -> None:
    """Writes the done file of a piece of work, which has left these files."""
    plain = {"result": result, "files": {file.name: file_sha256(str(file)) for file in files}}
    write_bytes_atomic(path, json.dumps({**plain, "sha256": json_sha256(plain)}).encode())


def read_done(path: pathlib.Path, *folders: pathlib.Path) -> dict[str, Any] | None:
    """The result in a done file, or None if there is none, or it or one of its files is no longer as it was written.

    folders: where the files may lie; that of the done file unless given. What is damaged is removed, to be made again.
    """
    try:
        found = parse_json(read_bytes(path))
    except FileNotFoundError:
        return None
    except BadInput:
        found = None
    own = found.pop("sha256", None) if isinstance(found, dict) else None
    if own is None or own != json_sha256(found):
        remove(path)
        return None
    missing = dict(found["files"])
    for folder in folders or (path.parent,):
        bad = hashed({str(folder / name): sha256 for name, sha256 in missing.items()})
        missing = {name: sha256 for name, sha256 in missing.items() if str(folder / name) in bad}
    if not missing:
        return found["result"]
    for name in missing:
        remove((folders or (path.parent,))[0] / name)
    remove(path)
    return None
