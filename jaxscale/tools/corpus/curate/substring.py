"""Exact substring deduplication within a block by suffix array; the first occurrence is kept.

The method of Lee et al. (arXiv:2107.06499, section 4.1): sort all suffixes; neighbours that share their first K bytes
are two occurrences of a substring. Of each substring of K bytes that occurs several times, every occurrence but the
first is cut, so a longer repeated passage is cut as a whole. Memory: about 15 bytes per byte of the block's text at the
peak (suffix array, its inverse and the common prefixes, 4 bytes each), 23 where all of it is repeated.
"""

from collections.abc import Sequence

import numpy as np

from jaxscale.runtime.text.document import Document, Outcome, Stage
from jaxscale.runtime.text.sources.part import importing
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import SubstringConfig

SEPARATOR = 0xFF  # a byte that UTF-8 never has
MAX_BLOCK_BYTES = 1 << 30  # suffix arrays are int32


def make_substring(cfg: SubstringConfig) -> Stage:
    """Returns a stage that cuts from each document of a block the passages that occur earlier in the block.

    The parts before and after a cut are joined, by a newline if two words would merge.
    """

    def stage(documents: Sequence[Document]) -> list[Outcome]:
        encoded = [document.text.encode("utf-8", "surrogatepass") for document in documents]
        ends = np.cumsum([len(data) + 1 for data in encoded]) - 1  # of each text: position of its separator
        flat = np.frombuffer(b"".join(data + b"\xff" for data in encoded), np.uint8)
        starts, stops = repeated_passages(flat, cfg.min_bytes)
        owners = np.searchsorted(ends, starts, side="right")
        outcomes = [Outcome(document) for document in documents]
        for owner in np.unique(owners).tolist():
            mask, begin = owners == owner, int(ends[owner]) - len(encoded[owner])
            spans = list(zip((starts[mask] - begin).tolist(), (stops[mask] - begin).tolist()))
            outcomes[owner] = cut(documents[owner], encoded[owner], spans, cfg)
        return outcomes

    return stage


def cut(document: Document, data: bytes, spans: Sequence[tuple[int, int]], cfg: SubstringConfig) -> Outcome:
    """Returns the outcome: the document without the spans of its UTF-8 bytes, or dropped if little is left."""
    text, place = "", 0
    for start, stop in [*spans, (len(data), len(data))]:
        piece = data[place:start].decode("utf-8", "surrogatepass")
        text += "\n" if text[-1:].isalnum() and piece[:1].isalnum() else ""
        text += piece
        place = stop
    gone = sum(stop - start for start, stop in spans)
    if len(text.strip()) < cfg.min_document_characters:
        return Outcome(None, "repeated passages: too little is left", detail=f"{gone} bytes repeated")
    edits = (("repeated passage", len(spans)),)
    return Outcome(document.edited(text), edits=edits, detail=f"{gone} bytes repeated")


def repeated_passages(flat: np.ndarray, min_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (starts, stops), int64[k] each, sorted: the bytes to cut from UTF-8 texts, each followed by a separator.

    A passage is within one text, and begins and ends between characters. If it overlaps its own first occurrence ("ha
    ha ha ...") it is cut from the end of that occurrence.
    """
    if len(flat) > MAX_BLOCK_BYTES:
        raise BadInput(f"a block of {len(flat):,} bytes is too large for a suffix array; at most {MAX_BLOCK_BYTES:,}")
    places, first = repeated_windows(flat, min_bytes)
    if not len(places):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.argsort(begins := np.maximum(places, first + min_bytes))
    begins, ends = begins[order], np.maximum.accumulate(places[order] + min_bytes)
    splits = np.flatnonzero(begins[1:] > ends[:-1]) + 1  # windows that overlap or touch are one passage
    starts, stops = begins[np.append(0, splits)], ends[np.append(splits - 1, len(ends) - 1)]
    for _ in range(3):  # a character has at most three bytes that continue it
        starts += (flat[starts] & 0xC0) == 0x80
        stops -= (flat[stops] & 0xC0) == 0x80
    nonempty = starts < stops
    return starts[nonempty], stops[nonempty]


def repeated_windows(flat: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (places, first), int32[k] each: repeated windows of `size` bytes, and their first occurrence."""
    order, common = suffix_array(flat)
    linked = common[:-1] >= size  # suffix i of the order and the next begin with the same window
    del common
    if not linked.any():
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    member = np.zeros(len(order), bool)
    member[:-1] |= linked
    member[1:] |= linked
    places = order[member]
    del order
    begins = np.append(True, ~linked)[member]  # True if the window differs from the one before
    group = np.flatnonzero(begins)
    first = np.repeat(np.minimum.reduceat(places, group), np.diff(np.append(group, len(places))))
    later = places > first
    places, first = places[later], first[later]
    stop = np.flatnonzero(flat == SEPARATOR).astype(np.int32)
    inside = places + np.int32(size) <= stop[np.searchsorted(stop, places)]
    return places[inside], first[inside]


def suffix_array(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int32[n] sorted suffixes, int32[n] bytes that each shares with the next; 0 for the last)."""
    with importing("finding repeated passages", "pydivsufsort"):
        import pydivsufsort
    if not len(flat):
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    flat = np.array(flat)  # the package requires a writable array
    order = pydivsufsort.divsufsort(flat)
    return order, pydivsufsort.kasai(flat, order)
