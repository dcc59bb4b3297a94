"""Token ids and loss mask of a rendered conversation."""

from collections.abc import Sequence

import numpy as np

from jaxscale.text.chat.spans import Piece, Written
from jaxscale.text.tokenizer.base import Tokenizer

LINE_END = "\n"  # no tokenizer joins a text to a line end before it, but some put a space before a text that begins


def encode_written(tokenizer: Tokenizer, documents: Sequence[Written]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(int32[n] ids without the end of the document, bool[n + 1] learned, for that end too) of each document.

    The name of a special token is its id where a piece is one, and plain text elsewhere.
    """
    found = []
    for document, ids in zip(documents, encode_pieces(tokenizer, documents), strict=True):
        learned = [np.full(len(part), piece.learned) for part, piece in zip(ids, document.pieces, strict=True)]
        whole, marks = joined(ids), np.concatenate([*learned, [document.end_learned]]).astype(bool)
        if len(whole) and whole[-1] == tokenizer.eos_id and document.pieces[-1].special:
            whole, marks = whole[:-1], marks[:-1]  # it ends as every document does
        found.append((whole, marks))
    return found


def encode_prompt(tokenizer: Tokenizer, document: Written) -> np.ndarray:
    """int32[n]: the ids of all of it, as encode_written has them."""
    return joined(encode_pieces(tokenizer, [document])[0])


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """int32[n] of all parts."""
    return np.concatenate([np.zeros(0, np.int32), *parts])


def encode_pieces(tokenizer: Tokenizer, documents: Sequence[Written]) -> list[list[np.ndarray]]:
    """The ids of each piece of each document."""
    begins, goes_on = [], []  # texts at a document's beginning, and behind something
    for document in documents:
        for alone, piece in zip(restarts(tokenizer, document), document.pieces):
            if not piece.special:
                (begins if alone else goes_on).append(piece.text)
    first, other = iter(tokenizer.encode_many(begins)), iter(encode_behind(tokenizer, goes_on))

    def ids(alone: bool, piece: Piece) -> np.ndarray:
        found = [tokenizer.special_ids[piece.text]] if piece.special else next(first if alone else other)
        return np.asarray(found, np.int32)

    return [list(map(ids, restarts(tokenizer, document), document.pieces)) for document in documents]


def restarts(tokenizer: Tokenizer, document: Written) -> list[bool]:
    """For each piece, whether its text is encoded as at the beginning of a document."""
    before = [True, *(tokenizer.prefix_after_special and piece.special for piece in document.pieces[:-1])]
    return before[: len(document.pieces)]


def encode_behind(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of texts that stand behind others: without the space that some tokenizers put before a text."""
    line_end = tokenizer.encode(LINE_END)
    behind = tokenizer.encode(f"{LINE_END}a")
    if np.array_equal(behind[len(line_end) :], tokenizer.encode("a")) or not np.array_equal(
        behind[: len(line_end)], line_end
    ):
        return list(tokenizer.encode_many(texts))
    found = tokenizer.encode_many([LINE_END + text for text in texts])
    return [ids[len(line_end) :] for ids in found]
