"""Stacks, pads, splits and hashes batches of numpy rows, and provides random numbers for each row.

Random numbers are a pure function of seed, batch and row, and equal on all machines.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxscale.core.batch import HASH_SALTS, Batch, EncoderInput, hashed_token_arrays, mix_tokens, reshape_rows
from jaxscale.system.exits import BadInput


def stack_rows(rows: Sequence[Any]) -> Any:
    """Stacks rows of [T] into a batch of [rows, T]. All rows must have the same fields, which may be nested tuples."""
    if len({tuple(field is None for field in row) for row in rows}) > 1:
        raise BadInput("only some rows of a batch have a prefix or encoder input; all rows must have the same fields")
    return map_fields(lambda *fields: np.stack(fields), *rows)


def map_fields(f: Callable[..., Any], *batches: Any) -> Any:
    """Applies f to each field of the batches, including fields of nested tuples. Fields that are None remain None."""
    columns = zip(*batches, strict=True)
    apply = lambda column: map_fields(f, *column) if isinstance(column[0], tuple) else f(*column)
    return type(batches[0])(*(None if column[0] is None else apply(column) for column in columns))


def padding_row(seq_len: int, *, prefix: bool = False, encoder_len: int | None = None) -> Batch:
    """Returns a padding row of [T]. prefix: True to add a prefix. encoder_len: length of the encoder input, if any."""
    zeros_T = np.zeros(seq_len, np.int32)
    encoder = None if encoder_len is None else EncoderInput(*[np.zeros(encoder_len, np.int32)] * 3)
    weights_T = np.zeros(seq_len, np.float32)
    return Batch(zeros_T, zeros_T, zeros_T, zeros_T, weights_T, prefix=zeros_T if prefix else None, encoder=encoder)


def split_rows(batch: Batch, row_tokens: int) -> Batch:
    """Splits each row of [T] into T / row_tokens rows.

    Documents are split at row ends, and positions restart at 0. Targets are unchanged: the target of the last token of
    a row is the first token of the next row.
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
    """Returns a hash of all token ids, including those of the encoder, as 16 hexadecimal digits."""
    sums = [0, 0]
    for words_BT, first_column in hashed_token_arrays(batch):
        words_BT = np.asarray(words_BT).astype(np.uint32)
        rows, columns = (np.arange(size, dtype=np.uint32) for size in words_BT.shape)
        columns = columns + np.uint32(first_column)
        mixed = [mix_tokens(words_BT, rows[:, None], columns[None, :], salt) for salt in HASH_SALTS]
        sums = [so_far + int(words.sum(dtype=np.uint32)) for so_far, words in zip(sums, mixed)]
    return format_hash([number % 2**32 for number in sums])


def format_hash(sums: Sequence[int]) -> str:
    """Returns the two 32-bit sums of a hash as hexadecimal digits."""
    return "".join(f"{int(number):08x}" for number in sums)


def find_documents(segment_ids_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (starts int64[D], lengths int64[D]) of the documents in a row, from its segment ids."""
    edges = np.flatnonzero(np.diff(segment_ids_T)) + 1
    starts = np.concatenate([[0], edges])
    lengths = np.diff(np.concatenate([starts, [len(segment_ids_T)]]))
    is_document = (segment_ids_T[starts] > 0) & (lengths > 0) if len(segment_ids_T) else np.zeros(1, bool)
    return starts[is_document], lengths[is_document]


def aranges(lengths: np.ndarray) -> np.ndarray:
    """Returns int64[sum of lengths], the concatenation of arange(length) for each length."""
    first = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(first, lengths)


def random_words(seed: int, n: int, row: int, number: int) -> np.ndarray:
    """Returns random uint64[number] for row `row` of batch `n`: raw Philox output, the same in all NumPy versions."""
    key = hashlib.blake2b(f"objective {seed} {n} {row}".encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(number)


def random_integers(words: np.ndarray, bounds: np.ndarray | int) -> np.ndarray:
    """Scales each word to an int64 in [0, bound). Bounds must be below 2**31; a bound of 0 gives 0."""
    return ((words >> np.uint64(32)) * np.asarray(bounds).astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def random_floats(words: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1) from the upper 53 bits of each word."""
    return (words >> np.uint64(11)) * 2.0**-53
