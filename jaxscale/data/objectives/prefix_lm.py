"""Prefix language modelling: the first part of each document is read in both directions, the rest is predicted.

As the prefix LM of arXiv:1910.10683, section 3.2.1: where a document is cut is uniform among the places that leave a
token on either side.
"""

import numpy as np

from jaxscale.data.batch import Batch
from jaxscale.data.objectives.documents import find_documents, ramps
from jaxscale.data.objectives.draws import below, draws


def prefix_row(row: Batch, seed: int, n: int, number: int) -> Batch:
    """The row of [T] with its prefixes, and weight only where the target lies behind the prefix of its document."""
    documents = find_documents(row.segment_ids)
    words = draws(seed, n, number, len(documents.lengths))
    prefix_lengths = 1 + below(words, np.maximum(documents.lengths - 1, 1))  # 1 to length - 1
    place, first = ramps(documents.lengths), np.repeat(prefix_lengths, documents.lengths)
    where = np.repeat(documents.starts, documents.lengths) + place
    prefix_T, weights_T = np.zeros_like(row.tokens), np.zeros_like(row.weights)
    prefix_T[where] = place < first
    weights_T[where] = np.where(place >= first - 1, row.weights[where], 0)
    return row._replace(prefix=prefix_T, weights=weights_T)
