"""Duplicates of a few sketches, in memory: what the passes of `jaxscale prepare` find by shuffles."""

import numpy as np

from jaxscale.tools.corpus.prepare.sketches import (
    components,
    is_similar,
    item_numbers,
    open_array,
    pair_equal_keys,
    read_signatures,
    sort_unique,
)


def pairs_of(paths, neighbours=0):
    """(items, firsts) of the sketches of blocks 0, 1, 2 ..."""
    loaded = [np.zeros((0, 2), np.uint64)]
    for block, path in enumerate(paths):
        part = np.array(open_array(path))
        part[:, 1] |= item_numbers(block, 0)
        loaded.append(part)
    return pair_equal_keys(sort_unique(np.concatenate(loaded)), neighbours).T


def united(paths, threshold, neighbours):
    """(items, keepers) of the pairs whose signatures are alike."""
    read = lambda items: read_signatures(items, paths.__getitem__)
    items, firsts = pairs_of(paths, neighbours)
    kept = is_similar(read(items), read(firsts), threshold)
    return components(items[kept], firsts[kept])
