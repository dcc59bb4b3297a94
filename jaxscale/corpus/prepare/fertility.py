"""Tokenizer fertility: bytes per token, tokens per word, unknown tokens and unused vocabulary."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.corpus.curate.hashes import hash_words
from jaxscale.text.document import Document
from jaxscale.text.tokenizer.base import Tokenizer

Key = tuple[str, str]  # (source, language)


class Sums(NamedTuple):
    """What is counted; blocks are counted apart and added, in any order."""

    documents: int
    text_bytes: int
    words: int
    tokens: int
    fallback: int  # tokens that are a byte of a longer character, or unknown
    returned: int  # documents whose text comes back as it was
    used: np.ndarray  # bool[vocab_size]: ids seen

    def __add__(self, other: "Sums") -> "Sums":  # type: ignore[override] - these are sums, not a list of fields
        """Both together."""
        counts = (a + b for a, b in zip(self[:-1], other[:-1]))
        return Sums(*counts, used=self.used | other.used)


class Row(NamedTuple):
    """A line of the report."""

    source: str
    language: str
    documents: int
    tokens: int
    bytes_per_token: float
    tokens_per_word: float
    fallback_share: float  # of tokens
    returned_share: float  # of documents
    vocabulary_share: float  # of ids that text can give


def measure(tokenizer: Tokenizer, documents: Sequence[Document]) -> dict[Key, Sums]:
    """Sums for each (source, language) of `documents`. Every text is decoded again, so give a sample."""
    block = tokenizer.encode_block([document.text for document in documents])
    sums: dict[Key, Sums] = {}
    for document, words, ids in zip(documents, hash_words(documents), block.split(), strict=True):
        used = np.zeros(tokenizer.vocab_size, bool)
        used[ids] = True
        one = Sums(
            documents=1,
            text_bytes=len(document.text.encode()),
            words=len(words),
            tokens=len(ids),
            fallback=int(tokenizer.fallback[ids].sum()),
            returned=int(tokenizer.decode(ids) == document.text),
            used=used,
        )
        key = (document.source, document.language)
        sums[key] = sums[key] + one if key in sums else one
    return sums


def add(parts: Iterable[Mapping[Key, Sums]]) -> dict[Key, Sums]:
    """The sums of all blocks."""
    total: dict[Key, Sums] = {}
    for part in parts:
        for key, one in part.items():
            total[key] = total[key] + one if key in total else one
    return total


def rows(sums: Mapping[Key, Sums], tokenizer: Tokenizer) -> list[Row]:
    """A row for each source and language, in order of their names, and if there are several the sum of all, last.

    A ratio with nothing below the line is nan.
    """
    usable = int(np.count_nonzero(tokenizer.token_bytes))
    named = [(*key, sums[key]) for key in sorted(sums)]
    if len(named) > 1:
        total = named[0][2]
        for _, _, one in named[1:]:
            total = total + one
        named.append(("all", "", total))
    return [
        Row(
            source=source,
            language=language,
            documents=one.documents,
            tokens=one.tokens,
            bytes_per_token=ratio(one.text_bytes, one.tokens),
            tokens_per_word=ratio(one.tokens, one.words),
            fallback_share=ratio(one.fallback, one.tokens),
            returned_share=ratio(one.returned, one.documents),
            vocabulary_share=ratio(int(np.count_nonzero(one.used & (tokenizer.token_bytes > 0))), usable),
        )
        for source, language, one in named
    ]


def ratio(above: float, below: float) -> float:
    """above / below, or nan."""
    return above / below if below else float("nan")
