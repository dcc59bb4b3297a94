"""What reading leaves out of text that was wanted: how much it was, and what can be done about it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxscale import units

BYTES = "bytes left out"  # of all that was left out, counted beside the number
BROKEN = "files cut short or broken"
TRAILING = "files with other bytes after the packed data"
OF_FILES = (BROKEN, TRAILING)  # reasons that are counted by files, of which an unknown part is left out
MUCH = 0.01  # of documents or bytes: more asks for a look, a rule of thumb of this project
NOT_UTF8 = "not UTF-8; set {where}invalid_utf8='repair', and {where}encoding if it is not Windows-1252"
WAYS_OUT = {  # by the reason that they are counted under; other counts, as of requests in a WARC file, are no loss
    "invalid UTF-8": NOT_UTF8,
    "NUL bytes": "UTF-16, or no text; set {where}invalid_utf8='repair'",
    "no text in any encoding": "name {where}encoding, or take them out",
    "not JSON": "write them again, or name the files .txt if lines are no records",
    "not tf.train.Example": "name what they are in {where}record_format",
    "without text field": "name it in {where}text_field",
    "without token ids": "name them in {where}ids_field, or write these rows again",
    "longer than max_line_bytes": "raise {where}max_line_bytes, or give each document a line",
    "longer than max_document_bytes": "raise {where}max_document_bytes",
    "page that is no text": "fetch them again",
    "page nested too deeply": "take them out",
    "WARC: packed in an unknown way": "unpack them first",
    BROKEN: "how much was in their rest is not known; fetch them again",
    TRAILING: "they are neither gzip nor zstd; fetch them again if text is missing",
}  # fmt: skip


class LeftOut(NamedTuple):
    """What was left out of the documents that there were."""

    documents: int
    bytes: int
    is_much: bool  # more than MUCH of documents or bytes, or of files an unknown part
    line: str  # for a person: how much, why, where, and the way out


def lose(skipped: Counter, reason: str, size: int) -> None:
    """Counts a document of `size` bytes that is left out."""
    skipped[reason] += 1
    skipped[BYTES] += size


def left_out(
    skipped: Mapping[str, int],
    documents: int,
    size: int,
    where: str,
    places: Mapping[str, Sequence[str]] | None = None,
) -> LeftOut | None:
    """What was left out; None if nothing was.

    Args: documents, size: what was read, in bytes of text. where: before the names of settings. places: {reason: names
    of files}, as examples.
    """
    found = {reason: skipped[reason] for reason in WAYS_OUT if skipped.get(reason)}
    if not found:
        return None
    lost, lost_bytes = sum(n for reason, n in found.items() if reason not in OF_FILES), skipped.get(BYTES, 0)
    told = [f"{lost:,} of {documents + lost:,} documents ({lost / (documents + lost):.1%})"] if lost else []
    told += [f"{units.size(lost_bytes)} of {units.size(size + lost_bytes)}"] if lost_bytes else []
    files = sum(found.get(reason, 0) for reason in OF_FILES)
    told += [f"the rest of {units.plural(files, 'file')}"] if files else []
    reasons = [
        f"{number:,} {reason}{' in ' + ', '.join(places[reason]) if places and reason in places else ''} "
        f"({WAYS_OUT[reason].format(where=where)})"
        for reason, number in sorted(found.items(), key=lambda pair: -pair[1])
    ]
    is_much = files > 0 or lost > MUCH * (documents + lost) or lost_bytes > MUCH * (size + lost_bytes)
    return LeftOut(lost, lost_bytes, is_much, f"reading left out {', '.join(told)}: {'; '.join(reasons)}")
