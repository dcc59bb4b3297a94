"""Parts of a file, the records in one, and the errors of reading them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxscale.system import packages
from jaxscale.system.exits import BadInput
from jaxscale.system.open_files import too_many
from jaxscale.text.config import ReadConfig

REST = " to go on without the rest of it"
PREPARE = "pip install 'jaxscale[prepare]'"  # what brings the optional packages


def ignore(share: float) -> None:
    """For those who do not want to know."""


class Part(NamedTuple):
    """A part of a file, from begin up to but not including end: bytes, row groups or records, as its kind has it."""

    begin: int
    end: int
    tell: Callable[[float], None] = ignore  # is told the share of its bytes that was read, where they are read in order


Words = tuple[str, str, str, str]  # id, url, licence and language of a document, as its file tells them
NO_WORDS = ("", "", "", "")
# What a file holds before its bytes are judged: (offset: byte in the unpacked file, or number of the row or record;
# number of the line, row or record, for messages; text; words).
Records = Iterator[tuple[int, int, bytes | str, Words]]

WHOLE = Part(0, 1 << 62)


class Damaged(BadInput):
    """A file, or the rest of it, that cannot be read: cut short, broken, or unpacking to more than was allowed."""


@contextlib.contextmanager
def needs(what: str, package: str, way_out: str = PREPARE) -> Iterator[None]:
    """Around the import of an optional package. Raises BadInput, naming what needs it, if it is not installed."""
    if not all(packages.is_installed(name) for name in package.split(" with ")):
        raise missing_package(what, package, way_out)
    try:
        yield
    except ImportError:
        raise missing_package(what, package, way_out) from None


def missing_package(what: str, package: str, way_out: str = PREPARE) -> BadInput:
    """The error for an optional package that is not there."""
    return BadInput(f"{what} needs the package {package}, which is not installed: {way_out}")


def refetch(cfg: ReadConfig, rest: str = "", first: str = "fetch it again") -> str:
    """The way out of a file that cannot be read. rest: what is lost by going on. first: what helps without a loss."""
    return f"{first}, or set {cfg.where}damaged='skip'{rest}" if cfg.may_skip else first


def unreadable(path: str, error: OSError) -> BadInput:
    """The error for a file that cannot be read."""
    return BadInput(f"{path} cannot be read: {error.strerror or error}{too_many(error)}")
