"""What the model is fed: the one structure that the data room hands to everyone else."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


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
    tokens_BT = np.ascontiguousarray(np.asarray(batch.tokens), dtype="<i4")
    return hashlib.blake2b(tokens_BT.tobytes() + str(tokens_BT.shape).encode(), digest_size=8).hexdigest()
