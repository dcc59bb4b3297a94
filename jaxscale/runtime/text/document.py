"""Documents with their origin, and the result of a preparation stage for a document."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and its origin. Stages share a cache of values that they compute from the text."""

    text: str
    source: str = ""  # name of the source in the recipe
    file: str = ""  # file name, relative to the fixed part of the source's glob
    offset: int = 0  # start in the uncompressed file, as byte offset, row number or record number
    id: str = ""  # id of the document in the file, if any
    url: str = ""
    licence: str = ""
    language: str = ""  # ISO 639 code, from the file if trusted, later from language identification
    scores: tuple[tuple[str, float], ...] = ()  # (column, value) pairs that stages add
    ids: bytes = b""  # uint32[n], the ids from which the text was decoded; empty if not encoded yet

    def edited(self, text: str) -> "Document":
        """Returns the document with a different text, without token ids."""
        return dataclasses.replace(self, text=text, ids=b"")

    @functools.cached_property
    def size(self) -> int:
        """Returns the size of the text in UTF-8 bytes."""
        return len(self.text) if self.text.isascii() else len(self.text.encode(errors="surrogatepass"))

    @functools.cached_property
    def computed(self) -> dict[str, Any]:
        """Returns {name: value} of values that stages have computed from the text."""
        return {}


class Outcome(NamedTuple):
    """The result of a stage for a document."""

    document: Document | None  # the unchanged or edited document; None: dropped
    reason: str = ""  # reason of a drop, from a small set, because drops are counted by reason
    edits: tuple[tuple[str, int], ...] = ()  # kinds and counts of edits, such as (("e-mail", 2),)
    detail: str = ""  # matches that caused a drop or an edit, such as "gsm8k.jsonl:17, gsm8k.jsonl:21"


Stage = Callable[[Sequence[Document]], list[Outcome]]  # pure; one outcome per document, in order


def per_document(judge: Callable[[Document], Outcome]) -> Stage:
    """Returns a stage that applies `judge` to each document."""
    return lambda documents: [judge(document) for document in documents]


def drop_if(document: Document, fault: str, detail: str = "") -> Outcome:
    """Returns an outcome that drops the document if it has a fault, and otherwise keeps it unchanged."""
    return Outcome(None, fault, detail=detail) if fault else Outcome(document)
