"""Tokenizer fertility: bytes per token, tokens per word, unknown tokens and unused vocabulary."""

import base64
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.tokenizer.base import Tokenizer
from jaxscale.tools.corpus.curate.hashes import hash_words


class FertilityRow(NamedTuple):
    """One line of the report. A ratio with a zero denominator is None."""

    source: str
    language: str
    documents: int
    tokens: int
    bytes_per_token: float | None
    tokens_per_word: float | None
    fallback_share: float | None  # of tokens: bytes of a longer character, or unknown
    returned_share: float | None  # of documents whose text is unchanged after encoding and decoding
    vocabulary_share: float | None  # of ids that text can produce


Sums = dict[tuple[str, str], list[np.ndarray]]  # (source, language) -> [counts, packed bits of the ids seen]


def measure(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[list[Any]]:
    """Returns counts by source and language, as plain data for `add_measured`. Decodes every text, so pass a sample."""
    block = tokenizer.encode_block([document.text for document in documents])
    sums: Sums = {}
    for document, words, ids in zip(documents, hash_words(documents), block.split(), strict=True):
        used = np.zeros(tokenizer.vocab_size, bool)
        used[ids] = True
        returned = int(tokenizer.decode(ids) == document.text)
        counts = [1, document.size, len(words), len(ids), int(tokenizer.fallback[ids].sum()), returned]
        add(sums, (document.source, document.language), counts, np.packbits(used))
    return [[*key, *counts.tolist(), base64.b64encode(bits.tobytes()).decode()] for key, (counts, bits) in sums.items()]


def add(sums: Sums, key: tuple[str, str], counts: Sequence[int], bits: np.ndarray) -> None:
    """Adds counts to those of the key."""
    total = sums.setdefault(key, [np.zeros(len(counts), np.int64), np.zeros_like(bits)])
    total[0] += counts
    total[1] |= bits


def add_measured(sums: Sums, measured: Iterable[Sequence[Any]]) -> None:
    """Adds the result of `measure` for a block."""
    for source, language, *counts, bits in measured:
        add(sums, (source, language), counts, np.frombuffer(base64.b64decode(bits), np.uint8))


def rows(measured: Iterable[Sequence[Any]], tokenizer: Tokenizer) -> list[FertilityRow]:
    """Returns sum_rows for results of `measure` in any order."""
    sums: Sums = {}
    add_measured(sums, measured)
    return sum_rows(sums, tokenizer)


def sum_rows(sums: Sums, tokenizer: Tokenizer) -> list[FertilityRow]:
    """Returns a row for each source and language, sorted, and last the sum if there are several."""
    named = [(*key, *sums[key]) for key in sorted(sums)]
    if len(named) > 1:
        counts, packed = (list(column) for column in zip(*sums.values()))
        named.append(("all", "", np.sum(counts, axis=0), np.bitwise_or.reduce(packed)))
    is_text_id = tokenizer.token_bytes > 0
    found = []
    for source, language, counts, packed in named:
        documents, text_bytes, words, tokens, fallback, returned = counts.tolist()
        used = np.unpackbits(packed, count=tokenizer.vocab_size).astype(bool) & is_text_id
        ratios = ((text_bytes, tokens), (tokens, words), (fallback, tokens), (returned, documents))
        ratios += ((int(used.sum()), int(is_text_id.sum())),)
        found.append(FertilityRow(source, language, documents, tokens, *(a / b if b else None for a, b in ratios)))
    return found
