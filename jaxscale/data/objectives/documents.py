"""Where the documents of a packed row lie."""

from typing import NamedTuple

import numpy as np


class Documents(NamedTuple):
    """The D documents of a row, in their order; padding is in none of them."""

    starts: np.ndarray  # int64[D]
    lengths: np.ndarray  # int64[D]


def find_documents(segment_ids_T: np.ndarray) -> Documents:
    """The runs of one segment number that is not 0."""
    edges = np.flatnonzero(np.diff(segment_ids_T)) + 1
    starts = np.concatenate([[0], edges])
    lengths = np.diff(np.concatenate([starts, [len(segment_ids_T)]]))
    real = (segment_ids_T[starts] > 0) & (lengths > 0) if len(segment_ids_T) else np.zeros(1, bool)
    return Documents(starts[real], lengths[real])


def ramps(lengths: np.ndarray) -> np.ndarray:
    """int64[sum of lengths]: 0, 1, 2, ... for each of the lengths, one after another."""
    first = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(first, lengths)
