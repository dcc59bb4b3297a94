"""A document on its way from raw text to shards, and what a stage of the preparation says of it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.corpus.curate.hashes import word_hashes, word_hashes_of
from jaxscale.corpus.curate.words import TextStats, text_stats


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
    language: str = ""  # ISO 639-1, once it was identified
    scores: tuple[tuple[str, float], ...] = ()  # (column, value) pairs that stages have added

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the text in UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.text.encode(errors="surrogatepass"))

    @functools.cached_property
    def words(self) -> np.ndarray:
        """uint64[n]: hashes of its words in order; see word_hashes."""
        return word_hashes(self.text)

    @functools.cached_property
    def stats(self) -> TextStats:
        """Its words, lines and characters as the quality rules count them."""
        return text_stats(self.text)


def hash_words(documents: Sequence[Document]) -> list[np.ndarray]:
    """The words of each document. Those that are not known yet are found together, which is faster."""
    unknown = [document for document in documents if "words" not in document.__dict__]
    for document, words in zip(unknown, word_hashes_of([document.text for document in unknown])):
        document.__dict__["words"] = words  # where cached_property keeps it
    return [document.words for document in documents]


class Outcome(NamedTuple):
    """What a stage made of a document."""

    document: Document | None  # as it was, edited, or None: dropped
    reason: str = ""  # why it was dropped: one of few, since drops are counted by it
    edits: tuple[tuple[str, int], ...] = ()  # what was edited in it, and how often: (("e-mail", 2),)
    detail: str = ""  # of a drop or an edit: what was hit, as "gsm8k.jsonl:17, gsm8k.jsonl:21"


Stage = Callable[[Sequence[Document]], list[Outcome]]  # one outcome for each document of a block, in order; pure
