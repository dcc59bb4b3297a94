"""The local copies on a host: FOLDER/RUN/OWNER/STEP-TOKEN, one file for each process's part of a step."""

import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Iterator
from typing import Any

from jaxscale.runtime.checkpoint.local_copy import read_description
from jaxscale.runtime.checkpoint.read_back import DamagedCheckpoint
from jaxscale.runtime.checkpoint.record import digest
from jaxscale.runtime.checkpoint.storage_errors import short_reason
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

COPY_NAME = re.compile(r"(\d+)-([0-9a-f]{16})")
BOOT_ID = "/proc/sys/kernel/random/boot_id"  # proc(5): differs between machines and boots


@dataclasses.dataclass(frozen=True, order=True)
class LocalCopy:
    """A complete copy of one process's part, from its description."""

    step: int
    token: str  # of the start that made it
    state_digest: str  # equal in all parts of one state
    base: int  # the newest step of the work folder when the copy was made, -1: none
    owner: int
    parts: int  # number of processes


class LocalStore:
    """The copies of one run in a host's folder. Raises BadInput if the folder cannot be used."""

    def __init__(self, folder: str, checkpoints: Any):
        """checkpoints: the folder of the run's checkpoints, which identifies the run."""
        given = pathlib.Path(os.path.expandvars(os.path.expanduser(folder)))
        self.folder = given.absolute() / digest(os.fspath(checkpoints))[:16]
        try:
            paths.make_private(self.folder)
            if not os.access(self.folder, os.W_OK | os.X_OK):
                raise PermissionError("this user may not write there")
        except OSError as error:
            cause = error.strerror or error
            raise BadInput(
                f"checkpoint.local.folder={folder} cannot be used on this host: {given}: {cause}; name one that every "
                "host has and this user may write"
            ) from None

    @property
    def identity(self) -> str:
        """Returns a value equal for processes that share this folder, and so lose it together."""
        found = self.folder.stat()
        boot = pathlib.Path(BOOT_ID)
        machine = boot.read_text("utf-8").strip() if boot.exists() else os.uname().nodename
        return f"{machine}:{found.st_dev}:{found.st_ino}"

    def files(self) -> Iterator[tuple[int, int, str, pathlib.Path]]:
        """Yields (owner, step, token, path) of every copy, complete or not."""
        for owner in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            for path in sorted(owner.iterdir()) if owner.name.isdecimal() and owner.is_dir() else ():
                if found := COPY_NAME.fullmatch(path.name):
                    yield int(owner.name), int(found[1]), found[2], path

    def path(self, owner: int, step: int, token: str) -> pathlib.Path:
        """Returns the path of a copy."""
        return self.folder / copy_name(owner, step, token)

    def copies(self) -> tuple[list[LocalCopy], list[str]]:
        """Returns (the readable copies, the errors of the others). Reads descriptions, no pieces."""
        found, unreadable = [], []
        for owner, step, token, path in self.files():
            try:
                copy = read_description(path)
                if (copy["owner"], copy["record"]["step"], copy["token"]) != (owner, step, token):
                    raise DamagedCheckpoint(f"{path} was written under another name")
                found.append(LocalCopy(step, token, state_digest(copy["record"]), copy["base"], owner, copy["parts"]))
            except (DamagedCheckpoint, OSError, KeyError, TypeError) as error:
                is_damaged = isinstance(error, DamagedCheckpoint)
                unreadable.append(str(error) if is_damaged else f"{path}: {short_reason(error)}")
        return found, unreadable

    def make_owner(self, owner: int) -> None:
        """Creates the folder of an owner."""
        (self.folder / str(owner)).mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep_only(self, names: Collection[str], owner: int | None = None) -> None:
        """Removes all other copies, and incomplete files of killed processes; of one owner, or of all."""
        folders = self.folder.iterdir() if owner is None else [self.folder / str(owner)]
        for inner in [one for one in folders if one.is_dir()]:
            for path in inner.iterdir():
                if f"{inner.name}/{path.name}" not in names:
                    path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes all copies of the run. Its last checkpoint replaces them."""
        shutil.rmtree(self.folder, ignore_errors=True)


def copy_name(owner: int, step: int, token: str) -> str:
    """Returns the name of a copy below the folder of the run."""
    return f"{owner}/{step}-{token}"


def state_digest(record: Any) -> str:
    """Returns a digest of a state: of its step, and of name, shape, dtype and fingerprint of all arrays."""
    return digest([record["step"], record["leaves"]])
