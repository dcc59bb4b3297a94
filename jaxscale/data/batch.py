"""What the model is fed: the one structure that the data room hands to everyone else."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.system.exits import BadInput

HASH_SALTS = (np.uint32(0), np.uint32(0x27D4EB2F))  # two sums of 32 bits


class EncoderInput(NamedTuple):
    """What the encoder of an encoder-decoder reads: [rows, S], or [S] for a single row.

    A document has one segment number here and in the decoder's row.
    """

    tokens: Any  # int32
    positions: Any  # int32
    segment_ids: Any  # int32


class Batch(NamedTuple):
    """Packed rows of T tokens: numpy on the host, jax on the device. Every field is [rows, T], or [T] for a single row.

    A weight is 1 where the target is a real token of the same document. Segment 0 is padding; documents count from 1 in
    each row. Positions restart at 0 where a document starts and where a row starts.
    """

    tokens: Any  # int32
    targets: Any  # int32, the next token of the stream, or what the objective asks for in its place
    positions: Any  # int32
    segment_ids: Any  # int32
    weights: Any  # float32
    sources: Any = None  # int32: the mixture's number of the row's source, all along the row; None without a mixture
    prefix: Any = None  # int32: 1 where all of the document sees the position, the tokens before it too; or none
    encoder: Any = None  # EncoderInput, where the model has an encoder that these rows are decoded from


ReadRows = Callable[[int, Sequence[int]], Batch]  # (n, rows) -> these rows of batch n, numpy: fields of [rows, T]


def stack_rows(rows: Sequence[Any]) -> Any:
    """Single rows of [T] as one batch of [rows, T]. All have the same fields, some of which are tuples again."""
    columns = []
    for column in zip(*rows, strict=True):
        if any((field is None) != (column[0] is None) for field in column):
            raise BadInput("some rows of a batch have a prefix or an encoder's input and some have none")
        nested = isinstance(column[0], tuple)
        columns.append(None if column[0] is None else stack_rows(column) if nested else np.stack(column))
    return type(rows[0])(*columns)


def padding_row(seq_len: int, *, prefix: bool = False, encoder_len: int | None = None) -> Batch:
    """One row of [T] that nothing is learned from: segment 0 and weight 0 everywhere.

    With a prefix, or with encoder_len tokens for an encoder, where the rows that it is stacked with have these.
    """
    zeros_T = np.zeros(seq_len, np.int32)
    encoder = None if encoder_len is None else EncoderInput(*[np.zeros(encoder_len, np.int32)] * 3)
    weights_T = np.zeros(seq_len, np.float32)
    own = dict(prefix=zeros_T if prefix else None, encoder=encoder)
    return Batch(zeros_T, zeros_T, zeros_T, zeros_T, weights_T, **own)


def cut_rows(batch: Batch, row_tokens: int) -> Batch:
    """Each row of [T] as T / row_tokens rows, one after the other: what packing into rows so short makes of the text.

    Documents are cut where a row ends: what follows begins at position 0. Targets and weights stay, so that the last
    token of a row learns the first of the next one, as in rows that were packed.
    """
    if batch.tokens.shape[1] == row_tokens:
        return batch
    cut = joined_rows(batch, row_tokens)
    number = cut.segment_ids - cut.segment_ids[:, :1] + 1
    return cut._replace(
        positions=np.minimum(cut.positions, np.arange(row_tokens, dtype=np.int32)),
        segment_ids=np.where(cut.segment_ids > 0, number, 0),
    )


def joined_rows(batch: Batch, row_tokens: int) -> Batch:
    """The tokens of all rows in order, in rows of so many, with positions and segments as they were."""
    if batch.tokens.shape[1] == row_tokens:
        return batch
    return Batch(*(None if field is None else field.reshape(-1, row_tokens) for field in batch))


def tokens_hash(batch: Batch) -> str:
    """Sixteen hexadecimal digits that stand for the token ids of a batch: equal batches, equal text, on any machine.

    The encoder's tokens count as columns behind the others.
    """
    sums = [0, 0]
    for words_BT, first_column in hashed_parts(batch):
        words_BT = np.asarray(words_BT).astype(np.uint32)
        rows, columns = (np.arange(size, dtype=np.uint32) for size in words_BT.shape)
        columns = columns + np.uint32(first_column)
        mixed = [mixed_tokens(words_BT, rows[:, None], columns[None, :], salt) for salt in HASH_SALTS]
        sums = [so_far + int(words.sum(dtype=np.uint32)) for so_far, words in zip(sums, mixed)]
    return hash_text([number % 2**32 for number in sums])


def hashed_parts(batch: Batch) -> list[tuple[Any, int]]:
    """(token ids, number of the first column) of each part of a batch that is hashed."""
    parts = [(batch.tokens, 0)]
    return parts if batch.encoder is None else [*parts, (batch.encoder.tokens, batch.tokens.shape[1])]


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
