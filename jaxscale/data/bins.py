"""Sizes into bins of one capacity, few of them and full: two ways of bin packing, and the better of both.

A change here that puts sizes into other bins makes other rows of the same documents: it needs another VERSION in
best_fit.py, which is part of what a plan and a run's data are known by.

Sets of sizes or rooms are integers with bit s for size s, so that the nearest member is found by a shift.
"""

import numpy as np

GOOD_FILL = 0.995  # enough to look no further
CANDIDATES = 64  # sizes that are tried as one of the last two of a bin


def pack_bins(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """int64[n]: the bin of each size, none larger than the capacity. Bins are numbered from 0 without a gap.

    Best fit decreasing does well where there are small sizes to fill up with (web text: 0.994 to 0.999 full). Where all
    are alike it leaves the same room in every bin; then closing bins by pairs does better.
    """
    bins = best_fit_decreasing(sizes, capacity)
    fewest = -(-int(sizes.sum()) // capacity)
    if not len(sizes) or fewest >= GOOD_FILL * (bins.max() + 1):
        return bins
    other = close_by_pairs(sizes, capacity)
    return other if other.max() < bins.max() else bins


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """int64[n]: the bin of each size, the largest first, each into the fullest bin that has room for it.

    `open_rooms` has bit r set where some bin has room r, so that the smallest sufficient room is the lowest bit of a
    shifted integer; 0.4 to 1.4 microseconds a document.
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


def close_by_pairs(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """int64[n]: the bin of each size. Bin by bin: the largest sizes that fit, then the two that leave least room."""
    order = np.argsort(sizes, kind="stable")
    distinct, firsts = np.unique(sizes[order], return_index=True)
    waiting = {size: part.tolist() for size, part in zip(distinct.tolist(), np.split(order, firsts[1:]))}
    left = sum(1 << size for size in waiting)
    bins, number = np.empty(len(sizes), np.int64), -1
    while left:
        number, room = number + 1, capacity
        while fitting := left & ((2 << room) - 1):
            largest = fitting.bit_length() - 1
            chosen = [largest]
            if room <= 3 * largest:
                pair = best_pair(waiting, left, fitting, room)
                if sum(pair) == room or room <= 2 * largest and sum(pair) > largest:
                    chosen = pair
            for size in chosen:
                bins[waiting[size].pop()] = number
                room -= size
                if not waiting[size]:
                    left ^= 1 << size
    return bins


def best_pair(waiting: dict[int, list[int]], left: int, fitting: int, room: int) -> list[int]:
    """The one size or the two of those that are left whose sum comes nearest to the room, as far as was looked."""
    best, rest = [fitting.bit_length() - 1], fitting
    for _ in range(CANDIDATES):
        if not rest or sum(best) == room:
            break
        size = rest.bit_length() - 1
        rest ^= 1 << size
        others = left & ((2 << (room - size)) - 1)
        if len(waiting[size]) == 1:
            others &= ~(1 << size)
        if others and size + (other := others.bit_length() - 1) > sum(best):
            best = [size, other]
    return best
