"""Parts of a file, records, and errors of reading them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.system import packages
from jaxscale.system.exits import BadInput
from jaxscale.system.open_files import too_many

SKIP_REMAINDER = " to continue without the rest of it"
PREPARE = "pip install 'jaxscale[prepare]'"  # installs the optional packages


def ignore_progress(share: float) -> None:
    """Ignores progress."""


class Part(NamedTuple):
    """A part [begin, end) of a file: bytes, row groups or records, depending on the format."""

    begin: int
    end: int
    on_progress: Callable[[float], None] = ignore_progress  # called with the fraction of bytes read


Metadata = tuple[str, str, str, str]  # id, url, licence, language of a document in its file
NO_METADATA = ("", "", "", "")
# Undecoded documents: (byte offset in the unpacked file, or row or record number; number of the line, row or record for
# messages; text; metadata).
Records = Iterator[tuple[int, int, bytes | str, Metadata]]

WHOLE = Part(0, 1 << 62)


class Damaged(BadInput):
    """A file, or its rest, is unreadable: truncated, broken, or larger than allowed when unpacked."""


@contextlib.contextmanager
def importing(what: str, package: str, fix: str = PREPARE) -> Iterator[None]:
    """Wraps the import of an optional package. Raises BadInput naming `what` if it is not installed."""
    if not all(packages.is_installed(name) for name in package.split(" with ")):
        raise missing_package(what, package, fix)
    try:
        yield
    except ImportError:
        raise missing_package(what, package, fix) from None


def missing_package(what: str, package: str, fix: str = PREPARE) -> BadInput:
    """Returns the error for a missing optional package."""
    return BadInput(f"{what} needs the package {package}, which is not installed: {fix}")


def damage_fix(cfg: ReadConfig, loss: str = "", first: str = "fetch it again") -> str:
    """Returns the fix for an unreadable file. rest: loss when skipping. first: fix without loss."""
    return f"{first}, or set {cfg.where}damaged='skip'{loss}" if cfg.may_skip else first


def read_error(path: str, error: OSError) -> BadInput:
    """Returns the error for a file that cannot be read."""
    return BadInput(f"{path} cannot be read: {error.strerror or error}{too_many(error)}")
