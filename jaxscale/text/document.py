"""A document on its way from raw text to shards, and the outcome of a preparation stage for it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and where it came from. What is computed from the text is kept with it, so that stages share the work."""

    text: str
    source: str = ""  # the recipe's name for where it is from
    file: str = ""  # name of its file, relative to where the source's glob begins
    offset: int = 0  # where it begins in that file, unpacked: a byte, or the number of its row or record
    id: str = ""  # the file's own name for it, if it has one
    url: str = ""
    licence: str = ""
    language: str = ""  # its ISO 639 code, once it was identified; before that what its file says, if that is trusted
    scores: tuple[tuple[str, float], ...] = ()  # (column, value) pairs that stages have added
    ids: bytes = b""  # uint32[n]: the token ids that the text was decoded from; empty: it is to be encoded

    def edited(self, text: str) -> "Document":
        """The document with another text. Token ids are of the text as it was, and are dropped."""
        return dataclasses.replace(self, text=text, ids=b"")

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the text in UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.text.encode(errors="surrogatepass"))

    @functools.cached_property
    def computed(self) -> dict[str, Any]:
        """What stages have computed from the text, by name, for those that come after them."""
        return {}


class Outcome(NamedTuple):
    """What a stage made of a document."""

    document: Document | None  # as it was, edited, or None: dropped
    reason: str = ""  # why it was dropped: one of few, since drops are counted by it
    edits: tuple[tuple[str, int], ...] = ()  # what was edited in it, and how often: (("e-mail", 2),)
    detail: str = ""  # of a drop or an edit: what was hit, as "gsm8k.jsonl:17, gsm8k.jsonl:21"


Stage = Callable[[Sequence[Document]], list[Outcome]]  # one outcome for each document of a block, in order; pure


def each(judge: Callable[[Document], Outcome]) -> Stage:
    """The stage that looks at each document by itself."""
    return lambda documents: [judge(document) for document in documents]


def outcome_of(document: Document, fault: str, detail: str = "") -> Outcome:
    """The document as it was, or dropped if it has a fault."""
    return Outcome(None, fault, detail=detail) if fault else Outcome(document)
