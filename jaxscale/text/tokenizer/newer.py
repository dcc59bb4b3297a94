"""Finds texts with characters so new that encoders disagree on their Unicode category.

Which characters are letters, digits or marks, and so where a text is cut, each package takes from the version of
Unicode that it was built with: in 2026-11 tokenizers 0.23 and tiktoken 0.14 have 16.0, gigatoken 0.10 has 17.0, and of
132,189 characters compared they differ in 359 (GPT-2's and cl100k's patterns) and 401 (o200k's), all new in 17.0.
"""

import functools
import unicodedata
from collections.abc import Sequence

import numpy as np

# New letters, digits and marks of Unicode 17.0 (unicode.org/Public/17.0.0/ucd), for a Python that knows them.
NEW_IN_17 = (
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0xA7CE, 0xA7CF),
    (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4), (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x10EFA, 0x10EFB),
    (0x11B60, 0x11B67), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9), (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3),
    (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E), (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE),
    (0x1E6E0, 0x1E6F5), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
)  # fmt: skip


@functools.cache
def newer_characters() -> np.ndarray:
    """bool[0x110000]: code points that this Python's Unicode does not know, and those of NEW_IN_17."""
    newer = np.ones(0x110000, bool)
    newer[0xF0000:] = False  # private use
    for first, end in ((0, 0x34000), (0xE0000, 0xE0200), (0xFFFFE, 0x100000), (0x10FFFE, 0x110000)):  # all assigned
        categories = map(unicodedata.category, map(chr, range(first, end)))
        newer[first:end] = np.fromiter((name == "Cn" for name in categories), bool, end - first)
    for first, last in NEW_IN_17:
        newer[first : last + 1] = True
    return newer


@functools.cache
def beginnings() -> np.ndarray:
    """bool[65536]: by the first two bytes in UTF-8, big-endian, whether a newer character begins with them."""
    found = np.zeros(1 << 16, bool)
    codes = np.flatnonzero(newer_characters())
    middle, long = codes[(codes >= 0x800) & (codes < 0x10000)], codes[codes >= 0x10000]
    found[(0xE0 | middle >> 12) << 8 | 0x80 | middle >> 6 & 0x3F] = True
    found[(0xF0 | long >> 18) << 8 | 0x80 | long >> 12 & 0x3F] = True
    return found


def with_newer(texts: Sequence[str]) -> list[int]:
    """Places in `texts` of those that hold a newer character from U+0800 on; below, there is nothing new since 2018."""
    places = [i for i, text in enumerate(texts) if not text.isascii()]
    raw = [texts[i].encode() for i in places]
    whole = np.frombuffer(b"".join(raw), np.uint8)
    leads = np.flatnonzero(whole >= 0xE0)  # first bytes of characters of three or four bytes
    leads = leads[beginnings()[whole[leads].astype(np.uint16) << 8 | whole[leads + 1]]]
    if not len(leads):
        return []
    first, second, third = (whole[leads + n].astype(np.int32) for n in range(3))
    fourth = whole[np.minimum(leads + 3, len(whole) - 1)].astype(np.int32)
    code = (first & 0x0F) << 12 | (second & 0x3F) << 6 | third & 0x3F
    code = np.where(
        first < 0xF0, code, (first & 0x07) << 18 | (second & 0x3F) << 12 | (third & 0x3F) << 6 | fourth & 0x3F
    )
    leads = leads[newer_characters()[code]]
    owners = np.searchsorted(np.cumsum([len(one) for one in raw]), leads, side="right")
    return [places[i] for i in np.unique(owners)]
