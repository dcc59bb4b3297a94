"""Batches of numpy rows: stacked, padded, split and hashed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.core.batch import HASH_SALTS, Batch, EncoderInput, hashed_token_arrays, mix_tokens, reshape_rows
from jaxscale.system.exits import BadInput


def stack_rows(rows: Sequence[Any]) -> Any:
    """Stacks rows of [T] into a batch of [rows, T]. All rows have the same fields; fields may be nested tuples."""
    columns = []
    for column in zip(*rows, strict=True):
        if any((field is None) != (column[0] is None) for field in column):
            raise BadInput("some rows of a batch have a prefix or encoder input and some do not")
        nested = isinstance(column[0], tuple)
        columns.append(None if column[0] is None else stack_rows(column) if nested else np.stack(column))
    return type(rows[0])(*columns)


def padding_row(seq_len: int, *, prefix: bool = False, encoder_len: int | None = None) -> Batch:
    """Returns a padding row of [T]: segment 0 and weight 0 everywhere.

    prefix, encoder_len: set them if the rows that it is stacked with have a prefix or encoder inputs.
    """
    zeros_T = np.zeros(seq_len, np.int32)
    encoder = None if encoder_len is None else EncoderInput(*[np.zeros(encoder_len, np.int32)] * 3)
    weights_T = np.zeros(seq_len, np.float32)
    return Batch(zeros_T, zeros_T, zeros_T, zeros_T, weights_T, prefix=zeros_T if prefix else None, encoder=encoder)


def split_rows(batch: Batch, row_tokens: int) -> Batch:
    """Splits each row of [T] into T / row_tokens rows, as if the documents had been packed into rows of row_tokens.

    Documents are cut at row ends and their positions restart at 0. Targets and weights are unchanged, so the last token
    of a row still predicts the first token of the next one.
    """
    if batch.tokens.shape[1] == row_tokens:
        return batch
    cut = reshape_rows(batch, row_tokens)
    number = cut.segment_ids - cut.segment_ids[:, :1] + 1
    return cut._replace(
        positions=np.minimum(cut.positions, np.arange(row_tokens, dtype=np.int32)),
        segment_ids=np.where(cut.segment_ids > 0, number, 0),
    )


def tokens_hash(batch: Batch) -> str:
    """Returns a hash of the token ids of a batch as 16 hexadecimal digits, equal on every machine.

    Encoder tokens are hashed as columns after the decoder tokens.
    """
    sums = [0, 0]
    for words_BT, first_column in hashed_token_arrays(batch):
        words_BT = np.asarray(words_BT).astype(np.uint32)
        rows, columns = (np.arange(size, dtype=np.uint32) for size in words_BT.shape)
        columns = columns + np.uint32(first_column)
        mixed = [mix_tokens(words_BT, rows[:, None], columns[None, :], salt) for salt in HASH_SALTS]
        sums = [so_far + int(words.sum(dtype=np.uint32)) for so_far, words in zip(sums, mixed)]
    return format_hash([number % 2**32 for number in sums])


def format_hash(sums: Sequence[int]) -> str:
    """Formats the two 32-bit sums of a hash."""
    return "".join(f"{int(number):08x}" for number in sums)
