"""Batches of numpy rows: stacked, padded and split."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.core.batch import Batch, EncoderInput, reshape_rows
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
