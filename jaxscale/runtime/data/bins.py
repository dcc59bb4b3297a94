"""Bin packing with one capacity: the better of two heuristics.

A change that puts sizes into other bins changes the rows of a corpus: raise VERSION in best_fit.py, which is part of
the plan's cache key and the data fingerprint.

Sets of sizes or free space are integer bit sets, so that a shift finds the nearest member.
"""

import numpy as np

GOOD_FILL = 0.995  # fill at which the second heuristic is not tried
CANDIDATES = 64  # sizes tried as one of the last two of a bin


def pack_bins(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Returns int64[n]: the bin of each size, which is at most the capacity. Bins are numbered from 0 without gaps.

    Best fit decreasing is good if there are small sizes (web text: 0.994 to 0.999 full). If all sizes are alike, it
    leaves the same space in every bin, and filling bins by pairs is better.
    """
    bins = best_fit_decreasing(sizes, capacity)
    fewest = -(-int(sizes.sum()) // capacity)
    if not len(sizes) or fewest >= GOOD_FILL * (bins.max() + 1):
        return bins
    other = fill_by_pairs(sizes, capacity)
    return other if other.max() < bins.max() else bins


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Returns int64[n]: the bin of each size, largest first, each into the fullest bin with enough space.

    Bit r of `open_rooms` is set if some bin has r free, so that the smallest sufficient space is the lowest set bit of
    a shifted integer; 0.4 to 1.4 microseconds a document.
    """
    bins = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    open_rooms, num_bins, found = 0, 0, []
    for size in sizes[order].tolist():
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            same = with_room[room]
            number = same.pop()
            if not same:
                open_rooms ^= 1 << room
            room -= size
        else:
            number, num_bins, room = num_bins, num_bins + 1, capacity - size
        found.append(number)
        if room:
            with_room[room].append(number)
            open_rooms |= 1 << room
    bins[order] = found
    return bins


def fill_by_pairs(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Returns int64[n]: the bin of each size. A bin takes the largest sizes that fit, then the best-fitting pair."""
    order = np.argsort(sizes, kind="stable")
    distinct, firsts = np.unique(sizes[order], return_index=True)
    indices_by_size = {size: part.tolist() for size, part in zip(distinct.tolist(), np.split(order, firsts[1:]))}
    remaining = sum(1 << size for size in indices_by_size)
    bins, number = np.empty(len(sizes), np.int64), -1
    while remaining:
        number, room = number + 1, capacity
        while fitting := remaining & ((2 << room) - 1):
            largest = fitting.bit_length() - 1
            chosen = [largest]
            if room <= 3 * largest:
                pair = best_pair(indices_by_size, remaining, fitting, room)
                if sum(pair) == room or room <= 2 * largest and sum(pair) > largest:
                    chosen = pair
            for size in chosen:
                bins[indices_by_size[size].pop()] = number
                room -= size
                if not indices_by_size[size]:
                    remaining ^= 1 << size
    return bins


def best_pair(indices_by_size: dict[int, list[int]], remaining: int, fitting: int, room: int) -> list[int]:
    """Returns the one or two remaining sizes whose sum is closest to the room, among CANDIDATES sizes."""
    best, untried = [fitting.bit_length() - 1], fitting
    for _ in range(CANDIDATES):
        if not untried or sum(best) == room:
            break
        size = untried.bit_length() - 1
        untried ^= 1 << size
        others = remaining & ((2 << (room - size)) - 1)
        if len(indices_by_size[size]) == 1:
            others &= ~(1 << size)
        if others and size + (other := others.bit_length() - 1) > sum(best):
            best = [size, other]
    return best
