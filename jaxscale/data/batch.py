"""What the model is fed: the one structure that the data room hands to everyone else."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

HASH_SALTS = (np.uint32(0), np.uint32(0x27D4EB2F))  # two sums of 32 bits


class Batch(NamedTuple):
    """Packed rows of T tokens: numpy on the host, jax on the device. Every field is [rows, T], or [T] for a single row.

    A weight is 1 where the target is a real token of the same document. Segment 0 is padding; documents count from 1 in
    each row. Positions restart at 0 where a document starts and where a row starts.
    """

    tokens: Any  # int32
    targets: Any  # int32, the next token of the stream
    positions: Any  # int32
    segment_ids: Any  # int32
    weights: Any  # float32


def stack_rows(rows: Sequence[Batch]) -> Batch:
    """Single rows of [T] as one batch of [rows, T]."""
    return Batch(*(np.stack(column) for column in zip(*rows)))


def padding_row(seq_len: int) -> Batch:
    """One row of [T] that nothing is learned from: segment 0 and weight 0 everywhere."""
    zeros_T = np.zeros(seq_len, np.int32)
    return Batch(zeros_T, zeros_T, zeros_T, zeros_T, np.zeros(seq_len, np.float32))


def tokens_hash(batch: Batch) -> str:
    """Sixteen hexadecimal digits that stand for the token ids of a batch: equal batches, equal text, on any machine."""
    words_BT = np.asarray(batch.tokens).astype(np.uint32)
    rows, columns = (np.arange(size, dtype=np.uint32) for size in words_BT.shape)
    mixed = [mixed_tokens(words_BT, rows[:, None], columns[None, :], salt) for salt in HASH_SALTS]
    return hash_text([int(words.sum(dtype=np.uint32)) for words in mixed])


def hash_text(sums: Sequence[int]) -> str:
    """The two numbers of a hash as text."""
    return "".join(f"{int(number):08x}" for number in sums)


def mixed_tokens(words_BT: Any, row_BT: Any, column_BT: Any, salt: np.uint32) -> Any:
    """uint32[B, T]: every token mixed with its place. Plain arithmetic, the same on numpy and on jax arrays.

    A place and a salt select a bijection of the words, so that their sum changes with any one token.
    """
    mixed = words_BT ^ (row_BT * np.uint32(0x85EBCA77) + column_BT * np.uint32(0x9E3779B9) + salt)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's 32-bit finaliser, Appleby 2011
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return mixed ^ (mixed >> np.uint32(16))
