"""Types and errors for reading parts of files, and counts of skipped documents."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxscale import units
from jaxscale.runtime.text.config import ReadConfig
from jaxscale.system import packages
from jaxscale.system.exits import BadInput
from jaxscale.system.open_files import too_many

SKIP_REMAINDER = " to skip the rest of the file"
PREPARE = "pip install 'jaxscale[prepare]'"  # installs the optional packages
BYTES = "bytes left out"  # total bytes of skipped documents
BROKEN = "files cut short or broken"
TRAILING = "files with other bytes after the packed data"
FILE_REASONS = (BROKEN, TRAILING)  # reasons that are counted by file, because the lost amount is unknown
MUCH = 0.01  # fraction of documents or bytes above which a warning is logged
NOT_UTF8 = "not UTF-8; set {where}invalid_utf8='repair', and {where}encoding if it is not Windows-1252"
FIXES = {  # {reason: fix}; other counts, such as requests in a WARC file, are not losses
    "invalid UTF-8": NOT_UTF8,
    "NUL bytes": "UTF-16, or not text; set {where}invalid_utf8='repair'",
    "no text in any encoding": "set {where}encoding, or remove these documents",
    "not JSON": "rewrite these lines, or rename the files to .txt if lines are not records",
    "not tf.train.Example": "set the format in {where}record_format",
    "without text field": "set {where}text_field",
    "without token ids": "set {where}ids_field, or rewrite these rows",
    "longer than max_line_bytes": "raise {where}max_line_bytes, or write one document per line",
    "longer than max_document_bytes": "raise {where}max_document_bytes",
    "page that is no text": "download these pages again",
    "page nested too deeply": "remove these pages",
    "WARC: packed in an unknown way": "decompress these records first",
    BROKEN: "the lost amount is unknown; download these files again",
    TRAILING: "the bytes are neither gzip nor zstd; download these files again if text is missing",
}  # fmt: skip


def ignore_progress(share: float) -> None:
    """Ignores a progress report."""


class Part(NamedTuple):
    """A part [begin, end) of a file, in bytes, row groups or records depending on the format."""

    begin: int
    end: int
    on_progress: Callable[[float], None] = ignore_progress  # called with the fraction of the bytes that were read


Metadata = tuple[str, str, str, str]  # id, URL, licence and language of a document, from its file
NO_METADATA = ("", "", "", "")
# Documents before decoding: (offset in the uncompressed file as byte, row or record number; number of the line, row or
# record for messages; text; metadata).
Records = Iterator[tuple[int, int, bytes | str, Metadata]]

WHOLE = Part(0, 1 << 62)


class Damaged(BadInput):
    """Raised if a file or its remainder is unreadable: truncated, corrupt, or too large when decompressed."""


@contextlib.contextmanager
def importing(what: str, package: str, fix: str = PREPARE) -> Iterator[None]:
    """Converts ImportError of an optional package to BadInput. what: use of the package, for the message."""
    if not all(packages.is_installed(name) for name in package.split(" with ")):
        raise missing_package(what, package, fix)
    try:
        yield
    except ImportError:
        raise missing_package(what, package, fix) from None


def missing_package(what: str, package: str, fix: str = PREPARE) -> BadInput:
    """Returns the error for a missing optional package."""
    return BadInput(f"{what} needs the package {package}, which is not installed: {fix}")


def damage_fix(cfg: ReadConfig, loss: str = "", first: str = "download it again") -> str:
    """Returns the fix for an unreadable file. first: fix without a loss. loss: what data.damaged='skip' skips."""
    return f"{first}, or set {cfg.where}damaged='skip'{loss}" if cfg.may_skip else first


def read_error(path: str, error: OSError) -> BadInput:
    """Returns the error for a file that cannot be read."""
    return BadInput(f"{path} cannot be read: {error.strerror or error}{too_many(error)}")


class ReadLosses(NamedTuple):
    """Summary of skipped documents."""

    documents: int
    is_much: bool  # True for more than MUCH of the documents or bytes, or any damaged file
    line: str  # log line with amounts, reasons, files and fixes


def count_skipped(skipped: Counter, reason: str, size: int) -> None:
    """Counts a skipped document of `size` bytes."""
    skipped[reason] += 1
    skipped[BYTES] += size


def summarize_losses(
    skipped: Mapping[str, int],
    documents: int,
    size: int,
    where: str,
    places: Mapping[str, Sequence[str]] | None = None,
) -> ReadLosses | None:
    """Returns a summary of skipped documents, or None. documents, size: number and bytes of the other documents."""
    found = {reason: skipped[reason] for reason in FIXES if skipped.get(reason)}
    if not found:
        return None
    lost, lost_bytes = sum(n for reason, n in found.items() if reason not in FILE_REASONS), skipped.get(BYTES, 0)
    amounts = [f"{lost:,} of {documents + lost:,} documents ({lost / (documents + lost):.1%})"] if lost else []
    amounts += [f"{units.size(lost_bytes)} of {units.size(size + lost_bytes)}"] if lost_bytes else []
    files = sum(found.get(reason, 0) for reason in FILE_REASONS)
    amounts += [f"the rest of {units.plural(files, 'file')}"] if files else []
    reasons = [
        f"{number:,} {reason}{' in ' + ', '.join(places[reason]) if places and reason in places else ''} "
        f"({FIXES[reason].format(where=where)})"
        for reason, number in sorted(found.items(), key=lambda pair: -pair[1])
    ]
    is_much = files > 0 or lost > MUCH * (documents + lost) or lost_bytes > MUCH * (size + lost_bytes)
    return ReadLosses(lost, is_much, f"reading skipped {', '.join(amounts)}: {'; '.join(reasons)}")
