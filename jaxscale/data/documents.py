"""The index of all documents of a corpus, on disk and memory-mapped: where each lies, and what part of it trains.

Documents are numbered through all files. For each there are 4 bytes of its position in the stream of all tokens (8
where 1,024 documents in a row hold 2**32 tokens), 1 or 2 of its source where there are several sources, and a bit for
each part, training and validation, that has something of it. The n-th document of a part, and its n, are found by
counting bits ("Succinct indexable dictionaries", Raman, Raman and Rao, SODA 2002): nothing is in memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.array_folder import ArrayWriter
from jaxscale.data.verified import Expected

TRAIN, VALID = "train", "valid"
BLOCK = 256  # documents whose bits are counted together
BASE = 1024  # documents that share the 8 bytes to which their 4 are added
AT_ONCE = 1 << 20  # documents looked at together: a multiple of both
PLACES = np.stack([np.argsort(-row.astype(int), kind="stable") for row in np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
)]).astype(np.int64)  # [byte, k]: the place of its k-th bit  # fmt: skip


class Chunk(NamedTuple):
    """Some documents in a row."""

    lengths: np.ndarray  # int64[n]
    sources: np.ndarray  # uint16[n]
    train: np.ndarray  # bool[n]: the part has something of it
    valid: np.ndarray  # bool[n]


class Rule(NamedTuple):
    """What part of a document is for training and what for validation, where it is in both or longer than a row."""

    fraction: float = 0.0
    tails: tuple[int, ...] = ()  # sources of whose documents the last `fraction` is for validation
    clip: int = 0  # tokens, behind which each is cut; 0: nowhere

    def lengths(self, whole: np.ndarray, sources: np.ndarray, part: str) -> tuple[np.ndarray, np.ndarray]:
        """(tokens before the part, tokens of the part) of documents of these lengths and sources that it has."""
        skipped = np.zeros_like(whole)
        if self.tails:
            kept = whole - (whole * self.fraction).astype(np.int64)
            is_cut = np.isin(sources, self.tails)
            if part == TRAIN:
                whole = np.where(is_cut, kept, whole)
            else:
                skipped, whole = np.where(is_cut, kept, 0), np.where(is_cut, whole - kept, whole)
        return skipped, np.minimum(whole, self.clip) if self.clip else whole


class TokenSet(NamedTuple):
    """The files that the tokens of all documents lie in, one after the other."""

    paths: tuple[str, ...]
    dtypes: tuple[str, ...]  # of the ids in each file
    first_documents: np.ndarray  # int64[files + 1]
    first_tokens: np.ndarray  # int64[files + 1]
    trained: tuple[str, ...] = ()  # of each file, that of its marks, see shards.py; '' or (): every token is learned
    expected: Mapping[str, Expected] = {}  # what these files must stay


class TooFar(Exception):
    """Positions do not fit into 4 bytes and a base."""


def aligned(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The same documents in chunks of AT_ONCE but for the last."""
    held: list[Chunk] = []
    size = 0
    for chunk in chunks:
        held.append(chunk)
        size += len(chunk.lengths)
        while size >= AT_ONCE:
            whole = Chunk(*map(np.concatenate, zip(*held)))
            yield Chunk(*(column[:AT_ONCE] for column in whole))
            held = [Chunk(*(column[AT_ONCE:] for column in whole))]
            size -= AT_ONCE
    if size:
        yield Chunk(*map(np.concatenate, zip(*held)))


def write_documents(
    out: ArrayWriter, chunks: Iterable[Chunk], rule: Rule, num_sources: int, groups: Mapping[str, int], *, wide: bool
) -> dict[str, Any]:
    """Writes the index of all documents and returns what is known of them, as plain data.

    Args: groups: {part: its groups, which are its sources, or 1}. wide: positions of 8 bytes.
    Raises: TooFar where positions need to be wide.
    """
    number = total = base = 0
    source_type = np.uint8 if num_sources <= 1 << 8 else np.uint16
    counts = {part: np.zeros(num, np.int64) for part, num in groups.items()}  # members so far
    tokens = {part: np.zeros(num_sources, np.int64) for part in groups}
    targets = dict.fromkeys(groups, False)
    for part, num in groups.items():
        for group in range(num):
            out.append(f"{part}.{group}.ranks", np.zeros(1, np.int64))
    for chunk in aligned(chunks):
        lengths, sources = chunk.lengths.astype(np.int64), chunk.sources
        base = write_positions(out, number, total + np.cumsum(lengths) - lengths, base, wide=wide)
        if num_sources > 1:
            out.append("sources", padded(sources.astype(source_type)))
        for part, members in ((TRAIN, chunk.train), (VALID, chunk.valid)):
            if part not in groups:
                continue
            out.append(f"{part}.bits", np.packbits(padded(members), bitorder="little"))
            own = rule.lengths(lengths, sources, part)[1]
            tokens[part] += np.bincount(sources[members], own[members], num_sources).astype(np.int64)
            targets[part] |= bool((own[members] > 1).any())
            for group in range(groups[part]):
                here = members if groups[part] == 1 else members & (sources == group)
                ends = counts[part][group] + np.cumsum(padded(here).reshape(-1, BLOCK).sum(axis=1, dtype=np.int64))
                out.append(f"{part}.{group}.ranks", ends)
                counts[part][group] = ends[-1]
        number, total = number + len(lengths), total + int(lengths.sum())
    write_positions(out, number, np.array([total]), base, wide=wide)
    return {
        "number": number,
        "num_sources": num_sources,
        "rule": rule._asdict(),
        "members": {part: found.tolist() for part, found in counts.items()},
        "tokens": {part: found.tolist() for part, found in tokens.items()},
        "targets": targets,
    }


def padded(values: np.ndarray) -> np.ndarray:
    """The values and as many zeros as fill the last block."""
    return np.pad(values, (0, -len(values) % BLOCK))


def write_positions(out: ArrayWriter, number: int, positions: np.ndarray, base: int, *, wide: bool) -> int:
    """Writes the positions of documents from `number` on, as far from their bases, and returns the last base.

    Args: number: a multiple of BASE but for a single position. base: the last one so far. Raises: TooFar.
    """
    if wide:
        out.append("positions", positions)
        return base
    bases = np.array([base])
    if number % BASE == 0:
        bases = positions[::BASE]
        out.append("bases", bases)
    offsets = positions - np.repeat(bases, BASE)[: len(positions)]
    if len(offsets) and offsets.max() > np.iinfo(np.uint32).max:
        raise TooFar
    out.append("positions", offsets.astype(np.uint32))
    return int(bases[-1])


class Documents:
    """Reads the index. All arrays are mapped; numbers and answers are arrays of any length."""

    def __init__(self, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any], files: TokenSet | None = None):
        """about: what write_documents returned. files: not needed while rows are planned."""
        self.arrays, self.about, self.files = arrays, about, files
        self.rule = Rule(about["rule"]["fraction"], tuple(about["rule"]["tails"]), about["rule"]["clip"])

    def __len__(self) -> int:
        return self.about["number"]

    def positions(self, numbers: np.ndarray) -> np.ndarray:
        """int64[n]: where each begins in the stream of all tokens; for len(self), where it ends."""
        found = self.arrays["positions"][numbers].astype(np.int64)
        return found + self.arrays["bases"][numbers // BASE] if "bases" in self.arrays else found

    def sources(self, numbers: np.ndarray) -> np.ndarray:
        """uint16[n]: the source of each."""
        if self.about["num_sources"] == 1:
            return np.zeros(len(numbers), np.uint16)
        return self.arrays["sources"][numbers].astype(np.uint16)

    def lengths(self, numbers: np.ndarray, part: str) -> np.ndarray:
        """int64[n]: the tokens that a part has of each of its documents."""
        return self._own(numbers, part)[1]

    def _own(self, numbers: np.ndarray, part: str) -> tuple[np.ndarray, np.ndarray]:
        whole = self.positions(numbers + 1) - self.positions(numbers)
        return self.rule.lengths(whole, self.sources(numbers) if self.rule.tails else numbers, part)

    def locate(self, numbers: np.ndarray, part: str) -> tuple[np.ndarray, np.ndarray]:
        """(file, where in it a part's first token is) of each."""
        assert self.files is not None, "places are looked up of documents that have files"
        files = self.files.first_documents.searchsorted(numbers, side="right") - 1
        begins = self.positions(numbers) - self.files.first_tokens[files]
        return files, begins if part == TRAIN else begins + self._own(numbers, part)[0]

    def size(self, part: str, group: int) -> int:
        """How many documents a group of a part has."""
        return self.about["members"][part][group]

    def select(self, part: str, group: int, turns: np.ndarray) -> np.ndarray:
        """int64[n]: the numbers of a group's documents 0, 1, 2, ... in their order."""
        if self.size(part, group) == len(self):
            return turns
        ranks = self.arrays[f"{part}.{group}.ranks"]
        blocks = ranks.searchsorted(turns, side="right") - 1
        left = turns - ranks[blocks]
        bits = self._bits(part, group, blocks)
        words = bits.view(np.uint64)
        word, left = find_part(np.bitwise_count(words), left)
        own = words[np.arange(len(bits)), word][:, None].view(np.uint8)
        byte, left = find_part(np.bitwise_count(own), left)
        return blocks * BLOCK + word * 64 + byte * 8 + PLACES[own[np.arange(len(bits)), byte], left]

    def rank(self, part: str, group: int, number: int) -> int | None:
        """Which of a group's documents one is, the inverse of select; None if it is none of them."""
        block, place = divmod(number, BLOCK)
        members = np.unpackbits(self._bits(part, group, np.array([block]))[0], bitorder="little")
        if not members[place]:
            return None
        return int(self.arrays[f"{part}.{group}.ranks"][block]) + int(members[:place].sum())

    def _bits(self, part: str, group: int, blocks: np.ndarray) -> np.ndarray:
        """uint8[n, BLOCK / 8]: the bits of a group in each block."""
        bits = self.arrays[f"{part}.bits"].reshape(-1, BLOCK // 8).take(blocks, axis=0)
        if len(self.about["members"][part]) == 1:
            return bits
        sources = self.arrays["sources"].reshape(-1, BLOCK).take(blocks, axis=0)
        return bits & np.packbits(sources == group, axis=1, bitorder="little")

    def members(self, part: str, group: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (numbers, lengths in the part) of a group's documents in their order, AT_ONCE or fewer at a time."""
        for first in range(0, len(self), AT_ONCE):
            numbers = np.arange(first, min(first + AT_ONCE, len(self)))
            blocks = np.arange(first // BLOCK, -(-(first + len(numbers)) // BLOCK))
            is_one = np.unpackbits(self._bits(part, group, blocks).reshape(-1), bitorder="little", count=len(numbers))
            numbers = numbers[is_one.view(bool)]
            yield numbers, self.lengths(numbers, part)


def find_part(counts: np.ndarray, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(in which of its row's parts each turn is, its turn in it), of counts [n, parts] of what each part has."""
    part = np.zeros(len(turns), np.int64)
    for column in range(counts.shape[1] - 1):  # a few: faster than a sum along them
        is_behind = (part == column) & (turns >= counts[:, column])
        turns = np.where(is_behind, turns - counts[:, column], turns)
        part += is_behind
    return part, turns


def bisect(array: np.ndarray, low: np.ndarray, high: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """int64[n]: for each key, how many of array[low:high], which is sorted, are at most the key, and low."""
    low, high = low.copy(), high.copy()
    while (open_ := low < high).any():
        middle = (low + high) // 2
        below = open_ & (array[np.minimum(middle, len(array) - 1)] <= keys)
        low = np.where(below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low


def token_set(files: Sequence[tuple[str, str, str, int, int, Mapping[str, Expected]]]) -> TokenSet:
    """Of (path, dtype, path of the marks or '', documents, tokens, what its files must stay) of each file."""
    paths, dtypes, trained, documents, tokens, expected = zip(*files)
    first_documents, first_tokens = (
        np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]) for sizes in (documents, tokens)
    )
    known = {path: one for each in expected for path, one in each.items()}
    return TokenSet(paths, dtypes, first_documents, first_tokens, trained, known)
