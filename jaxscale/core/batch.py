"""The batch that the data pipeline produces and the model reads."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

HASH_SALTS = (np.uint32(0), np.uint32(0x27D4EB2F))  # one salt for each of the two 32-bit sums


class EncoderInput(NamedTuple):
    """Encoder inputs of an encoder-decoder model, [B, S], or [S] for a single sequence.

    A document has the same segment id in the sequences of the encoder and the decoder.
    """

    tokens: Any  # int32
    positions: Any  # int32
    segment_ids: Any  # int32


class Batch(NamedTuple):
    """Packed sequences: NumPy arrays on the host, JAX arrays on devices. Fields are [B, T], or [T] for one sequence.

    weights are 1 where the target is not padding and belongs to the same document as the token. Segment id 0 is
    padding; the documents of a sequence are numbered from 1. Positions restart at 0 in each document and sequence.
    """

    tokens: Any  # int32
    targets: Any  # int32: the next token, or the objective's target
    positions: Any  # int32
    segment_ids: Any  # int32
    weights: Any  # float32
    sources: Any = None  # int32: index of the row's mixture source, repeated along T; None without a mixture
    prefix: Any = None  # int32: 1 at positions with bidirectional attention (prefix LM), or None
    encoder: Any = None  # EncoderInput of an encoder-decoder model, or None


ReadRows = Callable[[int, Sequence[int]], Batch]  # (n, row indices) -> these rows of batch n, in numpy


def reshape_rows(batch: Batch, row_tokens: int) -> Batch:
    """Reshapes all fields to sequences of row_tokens. Values, such as positions and segment ids, do not change."""
    if batch.tokens.shape[1] == row_tokens:
        return batch
    return Batch(*(None if field is None else field.reshape(-1, row_tokens) for field in batch))


def hashed_token_arrays(batch: Batch) -> list[tuple[Any, int]]:
    """Returns (token ids, index of the first column) for each hashed array of a batch."""
    parts = [(batch.tokens, 0)]
    return parts if batch.encoder is None else [*parts, (batch.encoder.tokens, batch.tokens.shape[1])]


def mix_tokens(words_BT: Any, row_BT: Any, column_BT: Any, salt: np.uint32) -> Any:
    """Returns uint32[B, T], the hash of each token with its row and column. Accepts NumPy and JAX arrays.

    For a fixed row, column and salt, the hash is a bijection. So changing one token changes the sum of hashes.
    """
    mixed = words_BT ^ (row_BT * np.uint32(0x85EBCA77) + column_BT * np.uint32(0x9E3779B9) + salt)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's 32-bit finaliser, Appleby 2011
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return mixed ^ (mixed >> np.uint32(16))
