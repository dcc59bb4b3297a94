"""A document on its way from raw text to shards, and the outcome of a preparation stage for it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and its origin, with a cache of values computed from the text, which stages share."""

    text: str
    source: str = ""  # name in the recipe
    file: str = ""  # file name, relative to the fixed part of the source's glob
    offset: int = 0  # start in the unpacked file: byte offset, or row or record number
    id: str = ""  # its id in the file, if any
    url: str = ""
    licence: str = ""
    language: str = ""  # ISO 639 code, once identified; before that from its file, if trusted
    scores: tuple[tuple[str, float], ...] = ()  # (column, value) pairs added by stages
    ids: bytes = b""  # uint32[n]: the ids that the text was decoded from; empty: not encoded yet

    def edited(self, text: str) -> "Document":
        """Returns the document with another text, without token ids."""
        return dataclasses.replace(self, text=text, ids=b"")

    @functools.cached_property
    def size(self) -> int:
        """Returns the bytes of the text in UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.text.encode(errors="surrogatepass"))

    @functools.cached_property
    def computed(self) -> dict[str, Any]:
        """Values that stages have computed from the text, by name."""
        return {}


class Outcome(NamedTuple):
    """The result of a stage for one document."""

    document: Document | None  # unchanged, edited, or None: dropped
    reason: str = ""  # of a drop; one of a few, since drops are counted by reason
    edits: tuple[tuple[str, int], ...] = ()  # kinds and counts of edits: (("e-mail", 2),)
    detail: str = ""  # of a drop or an edit: the matches, as "gsm8k.jsonl:17, gsm8k.jsonl:21"


Stage = Callable[[Sequence[Document]], list[Outcome]]  # one outcome per document of a block, in order; pure


def per_document(judge: Callable[[Document], Outcome]) -> Stage:
    """Returns the stage that applies `judge` to each document."""
    return lambda documents: [judge(document) for document in documents]


def drop_if(document: Document, fault: str, detail: str = "") -> Outcome:
    """Returns the document unchanged, or dropped if it has a fault."""
    return Outcome(None, fault, detail=detail) if fault else Outcome(document)
