"""Duplicates of a few sketches, in memory: what the passes of `jaxscale prepare` find by exchanges."""

import numpy as np

from jaxscale.corpus.prepare.join import (
    alike,
    components,
    item_numbers,
    pairs_of_keys,
    signature_reader,
    sketch_between,
)


def pairs_of(paths, neighbours=0):
    """(items, firsts) of the sketches of blocks 0, 1, 2 ..."""
    loaded = [np.zeros((2, 0), np.uint64)]
    for block, path in enumerate(paths):
        part = np.array(sketch_between(path, 0, 1 << 64))
        part[1] |= item_numbers(block, 0)
        loaded.append(part)
    return pairs_of_keys(*np.concatenate(loaded, axis=1), neighbours)


def united(paths, threshold, neighbours):
    """(items, keepers) of the pairs whose signatures are alike."""
    read = signature_reader(paths.__getitem__)
    items, firsts = pairs_of(paths, neighbours)
    kept = alike(read(items), read(firsts), threshold)
    return components(items[kept], firsts[kept])
