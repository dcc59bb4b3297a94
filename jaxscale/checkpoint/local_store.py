"""The local copies on a host: FOLDER/RUN/OWNER/STEP-TOKEN, a file for each process's part of a step."""

import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Iterator
from typing import Any

from jaxscale.checkpoint.local_copy import read_about
from jaxscale.checkpoint.read_back import Damaged
from jaxscale.checkpoint.record import digest
from jaxscale.checkpoint.storage_errors import short_reason
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

COPY = re.compile(r"(\d+)-([0-9a-f]{16})")
BOOT = "/proc/sys/kernel/random/boot_id"  # proc(5): another one on each machine, and after each boot


@dataclasses.dataclass(frozen=True, order=True)
class Copy:
    """A whole copy of one process's part, as it describes itself."""

    step: int
    token: str  # of the start that made it
    mark: str  # equal in all parts of one and the same state
    base: int  # the newest step of the work folder when it was made, -1: none
    owner: int
    parts: int  # of how many processes


class LocalStore:
    """The copies of one run in a host's folder. Raises BadInput where the folder cannot be used."""

    def __init__(self, folder: str, checkpoints: Any):
        """checkpoints: the folder of the run's checkpoints, by which its copies are told from those of other runs."""
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
        """The same for processes that share this folder: they lose it together."""
        found = self.folder.stat()
        boot = pathlib.Path(BOOT)
        machine = boot.read_text("utf-8").strip() if boot.exists() else os.uname().nodename
        return f"{machine}:{found.st_dev}:{found.st_ino}"

    def files(self) -> Iterator[tuple[int, int, str, pathlib.Path]]:
        """Yields (owner, step, token, path) of every copy, whole or not."""
        for owner in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            for path in sorted(owner.iterdir()) if owner.name.isdecimal() and owner.is_dir() else ():
                if found := COPY.fullmatch(path.name):
                    yield int(owner.name), int(found[1]), found[2], path

    def path(self, owner: int, step: int, token: str) -> pathlib.Path:
        """Where a copy is or will be."""
        return self.folder / name_of(owner, step, token)

    def copies(self) -> tuple[list[Copy], list[str]]:
        """(the copies that can be understood, why the others cannot). Their pieces are not read."""
        found, odd = [], []
        for owner, step, token, path in self.files():
            try:
                about = read_about(path)
                if (about["owner"], about["record"]["step"], about["token"]) != (owner, step, token):
                    raise Damaged(f"{path} bears another name than it was written under")
                found.append(Copy(step, token, mark_of_state(about["record"]), about["base"], owner, about["parts"]))
            except (Damaged, OSError, KeyError, TypeError) as error:
                odd.append(str(error) if isinstance(error, Damaged) else f"{path}: {short_reason(error)}")
        return found, odd

    def make_owner(self, owner: int) -> None:
        """Makes the folder of an owner."""
        (self.folder / str(owner)).mkdir(mode=0o700, parents=True, exist_ok=True)

    def keep_only(self, names: Collection[str], owner: int | None = None) -> None:
        """Removes all copies but these, and what killed processes have left half-written; of one owner, or of all."""
        folders = self.folder.iterdir() if owner is None else [self.folder / str(owner)]
        for inner in [one for one in folders if one.is_dir()]:
            for path in inner.iterdir():
                if f"{inner.name}/{path.name}" not in names:
                    path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes all copies of the run: its checkpoint holds more."""
        shutil.rmtree(self.folder, ignore_errors=True)


def name_of(owner: int, step: int, token: str) -> str:
    """The name of a copy below the folder of the run."""
    return f"{owner}/{step}-{token}"


def mark_of_state(record: Any) -> str:
    """Equal for records of the same state: of the step, and of name, shape, dtype and fingerprint of all arrays."""
    return digest([record["step"], record["leaves"]])
