"""Memory-mapped index of all documents of a corpus, with their token positions, sources and split.

Documents are numbered across all files. A document takes 4 bytes for its position in the token stream (8 bytes if 1,024
consecutive documents have 2**32 tokens), 1 or 2 bytes for its source if there are several sources, and one bit for each
part (training, validation). Rank and select on these bits map document numbers to ranks in a part and ranks to document
numbers ("Succinct indexable dictionaries", Raman, Raman and Rao, SODA 2002). No array is loaded into memory.

A group is a source of a mixture, or all documents of a part without a mixture.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.data.array_folder import ArrayWriter
from jaxscale.runtime.data.remote import map_ids
from jaxscale.runtime.data.verified import Expected, FileWatch

TRAIN, VALID = "train", "valid"
BLOCK = 256  # documents per stored rank
BASE = 1024  # documents per 8-byte base position
CHUNK_DOCUMENTS = 1 << 20  # documents processed at a time, a multiple of BLOCK and BASE
SELECT_IN_BYTE = np.stack([np.argsort(-row.astype(int), kind="stable") for row in np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
)]).astype(np.int64)  # [byte, k]: position of the k-th set bit  # fmt: skip


class DocumentChunk(NamedTuple):
    """Lengths, sources and split of n consecutive documents."""

    lengths: np.ndarray  # int64[n]
    sources: np.ndarray  # uint16[n]
    train: np.ndarray  # bool[n]: True in the training part
    valid: np.ndarray  # bool[n]: True in the validation part


class SplitRule(NamedTuple):
    """Rule that splits documents into training and validation tokens, or truncates them."""

    fraction: float = 0.0
    tails: tuple[int, ...] = ()  # sources of which the last `fraction` of every document is in validation
    clip: int = 0  # length in tokens to which documents are truncated; 0: no limit

    def lengths(self, whole: np.ndarray, sources: np.ndarray, part: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (first token, number of tokens) of each document in the part. whole: length of each document."""
        skipped = np.zeros_like(whole)
        if self.tails:
            train_lengths = whole - (whole * self.fraction).astype(np.int64)
            is_cut = np.isin(sources, self.tails)
            if part == TRAIN:
                whole = np.where(is_cut, train_lengths, whole)
            else:
                skipped, whole = np.where(is_cut, train_lengths, 0), np.where(is_cut, whole - train_lengths, whole)
        return skipped, np.minimum(whole, self.clip) if self.clip else whole


class MappedFiles(dict):
    """Dict {file number: array} that opens each file at first access."""

    def __init__(self, open_file: Callable[[int], Any]):
        super().__init__()
        self.open_file = open_file

    def __missing__(self, file: int) -> Any:
        return self.setdefault(file, self.open_file(file))


class TokenSet:
    """Token files of all documents, in order. Files are memory-mapped at first use. Pickling excludes the maps."""

    def __init__(self, files: Sequence[tuple[str, str, str, int, int, Mapping[str, Expected]]]):
        """files: (path, dtype, loss mask path or '', number of documents, number of tokens, {path: expected state})."""
        self._files = files
        self.paths, dtypes, self.loss_masks, documents, tokens, expected = zip(*files)
        self.first_documents, self.first_tokens = (
            np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]) for sizes in (documents, tokens)
        )
        self.has_masks = any(self.loss_masks)
        self._unchanged = FileWatch({path: state for states in expected for path, state in states.items()})
        self.ids = MappedFiles(lambda file: self._map(self.paths[file], dtypes[file]))
        self.masks = MappedFiles(lambda file: self.loss_masks[file] and self._map(self.loss_masks[file], "|u1"))

    def __reduce__(self) -> tuple:
        return TokenSet, (self._files,)

    def check(self, file: int) -> None:
        """Raises Stop if a mapped file has changed. Call this method before reading."""
        self._unchanged.check((self.paths[file], self.loss_masks[file]))

    def _map(self, path: str, dtype: str) -> Any:
        self._unchanged.check_file(path)
        return map_ids(path, dtype)


class NeedsInt64(Exception):
    """Raised if positions do not fit in 4 bytes."""


def rechunk(chunks: Iterable[DocumentChunk]) -> Iterator[DocumentChunk]:
    """Yields the same documents in chunks of CHUNK_DOCUMENTS. The last chunk may be shorter."""
    pending: list[DocumentChunk] = []
    size = 0
    for chunk in chunks:
        pending.append(chunk)
        size += len(chunk.lengths)
        while size >= CHUNK_DOCUMENTS:
            whole = DocumentChunk(*map(np.concatenate, zip(*pending)))
            yield DocumentChunk(*(column[:CHUNK_DOCUMENTS] for column in whole))
            pending = [DocumentChunk(*(column[CHUNK_DOCUMENTS:] for column in whole))]
            size -= CHUNK_DOCUMENTS
    if size:
        yield DocumentChunk(*map(np.concatenate, zip(*pending)))


def write_documents(
    out: ArrayWriter, chunks: Iterable[DocumentChunk], rule: SplitRule, num_sources: int, groups: Mapping[str, int],
    *, use_int64: bool,
) -> dict[str, Any]:  # fmt: skip
    """Writes the index; returns its metadata as JSON data. groups: {part: number of groups}. May raise NeedsInt64."""
    number = total = base = 0
    source_type = np.uint8 if num_sources <= 1 << 8 else np.uint16
    counts = {part: np.zeros(num, np.int64) for part, num in groups.items()}
    tokens = {part: np.zeros(num_sources, np.int64) for part in groups}
    targets = dict.fromkeys(groups, False)
    for part, num in groups.items():
        for group in range(num):
            out.append(f"{part}.{group}.ranks", np.zeros(1, np.int64))
    for chunk in rechunk(chunks):
        lengths, sources = chunk.lengths.astype(np.int64), chunk.sources
        base = write_positions(out, number, total + np.cumsum(lengths) - lengths, base, use_int64=use_int64)
        if num_sources > 1:
            out.append("sources", pad_to_block(sources.astype(source_type)))
        for part, members in ((TRAIN, chunk.train), (VALID, chunk.valid)):
            if part not in groups:
                continue
            out.append(f"{part}.bits", np.packbits(pad_to_block(members), bitorder="little"))
            part_lengths = rule.lengths(lengths, sources, part)[1]
            tokens[part] += np.bincount(sources[members], part_lengths[members], num_sources).astype(np.int64)
            targets[part] |= bool((part_lengths[members] > 1).any())
            for group in range(groups[part]):
                in_group = members if groups[part] == 1 else members & (sources == group)
                blocks = pad_to_block(in_group).reshape(-1, BLOCK)
                ends = counts[part][group] + np.cumsum(blocks.sum(axis=1, dtype=np.int64))
                out.append(f"{part}.{group}.ranks", ends)
                counts[part][group] = ends[-1]
        number, total = number + len(lengths), total + int(lengths.sum())
    write_positions(out, number, np.array([total]), base, use_int64=use_int64)
    return {
        "number": number,
        "num_sources": num_sources,
        "rule": rule._asdict(),
        "members": {part: found.tolist() for part, found in counts.items()},
        "tokens": {part: found.tolist() for part, found in tokens.items()},
        "targets": targets,
    }


def pad_to_block(values: np.ndarray) -> np.ndarray:
    """Pads the values with zeros to a multiple of BLOCK."""
    return np.pad(values, (0, -len(values) % BLOCK))


def write_positions(out: ArrayWriter, number: int, positions: np.ndarray, base: int, *, use_int64: bool) -> int:
    """Writes document starts as offsets from bases; returns the last base. Raises NeedsInt64 if offsets overflow."""
    if use_int64:
        out.append("positions", positions)
        return base
    bases = np.array([base])
    if number % BASE == 0:  # true except for the last call, with a single position
        bases = positions[::BASE]
        out.append("bases", bases)
    offsets = positions - np.repeat(bases, BASE)[: len(positions)]
    if len(offsets) and offsets.max() > np.iinfo(np.uint32).max:
        raise NeedsInt64
    out.append("positions", offsets.astype(np.uint32))
    return int(bases[-1])


class DocumentIndex:
    """Index of the documents, read from memory-mapped arrays. Methods take and return arrays of any length."""

    def __init__(self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any], files: TokenSet | None = None):
        """metadata: result of write_documents(). files: token files; None to plan rows without reading tokens."""
        self.arrays, self.metadata, self.files = arrays, metadata, files
        self.rule = SplitRule(metadata["rule"]["fraction"], tuple(metadata["rule"]["tails"]), metadata["rule"]["clip"])

    def __len__(self) -> int:
        return self.metadata["number"]

    def positions(self, numbers: np.ndarray) -> np.ndarray:
        """Returns int64[n], the start of each document in the token stream. Number len(self) gives the end."""
        found = self.arrays["positions"][numbers].astype(np.int64)
        return found + self.arrays["bases"][numbers // BASE] if "bases" in self.arrays else found

    def sources(self, numbers: np.ndarray) -> np.ndarray:
        """Returns uint16[n], the source of each document."""
        if self.metadata["num_sources"] == 1:
            return np.zeros(len(numbers), np.uint16)
        return self.arrays["sources"][numbers].astype(np.uint16)

    def lengths(self, numbers: np.ndarray, part: str) -> np.ndarray:
        """Returns int64[n], the number of tokens of each document in the part."""
        return self._part_range(numbers, part)[1]

    def _part_range(self, numbers: np.ndarray, part: str) -> tuple[np.ndarray, np.ndarray]:
        whole = self.positions(numbers + 1) - self.positions(numbers)
        return self.rule.lengths(whole, self.sources(numbers) if self.rule.tails else numbers, part)

    def locate(self, numbers: np.ndarray, part: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (file number, offset in the file) of the first token of each document in the part."""
        assert self.files is not None, "locate needs the token files"
        files = self.files.first_documents.searchsorted(numbers, side="right") - 1
        begins = self.positions(numbers) - self.files.first_tokens[files]
        return files, begins if part == TRAIN else begins + self._part_range(numbers, part)[0]

    def size(self, part: str, group: int) -> int:
        """Returns the number of documents of a group."""
        return self.metadata["members"][part][group]

    def select(self, part: str, group: int, ranks: np.ndarray) -> np.ndarray:
        """Returns int64[n], the number of the document with each rank in a group (select on the bit vector)."""
        if self.size(part, group) == len(self):
            return ranks
        block_ranks = self.arrays[f"{part}.{group}.ranks"]
        blocks = block_ranks.searchsorted(ranks, side="right") - 1
        rank_left = ranks - block_ranks[blocks]
        bits = self._bits(part, group, blocks)
        words = bits.view(np.uint64)
        word, rank_left = select_part(np.bitwise_count(words), rank_left)
        word_bytes = words[np.arange(len(bits)), word][:, None].view(np.uint8)
        byte, rank_left = select_part(np.bitwise_count(word_bytes), rank_left)
        return blocks * BLOCK + word * 64 + byte * 8 + SELECT_IN_BYTE[word_bytes[np.arange(len(bits)), byte], rank_left]

    def rank(self, part: str, group: int, number: int) -> int | None:
        """Returns the rank of a document in a group (inverse of select), or None for a document of another group."""
        block, place = divmod(number, BLOCK)
        members = np.unpackbits(self._bits(part, group, np.array([block]))[0], bitorder="little")
        if not members[place]:
            return None
        return int(self.arrays[f"{part}.{group}.ranks"][block]) + int(members[:place].sum())

    def _bits(self, part: str, group: int, blocks: np.ndarray) -> np.ndarray:
        """Returns uint8[n, BLOCK / 8], one bit per document of each block: 1 if the document is in the group."""
        bits = self.arrays[f"{part}.bits"].reshape(-1, BLOCK // 8).take(blocks, axis=0)
        if len(self.metadata["members"][part]) == 1:
            return bits
        sources = self.arrays["sources"].reshape(-1, BLOCK).take(blocks, axis=0)
        return bits & np.packbits(sources == group, axis=1, bitorder="little")

    def members(self, part: str, group: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (document numbers, lengths in the part) of the documents of a group, in chunks of CHUNK_DOCUMENTS."""
        for first in range(0, len(self), CHUNK_DOCUMENTS):
            numbers = np.arange(first, min(first + CHUNK_DOCUMENTS, len(self)))
            blocks = np.arange(first // BLOCK, -(-(first + len(numbers)) // BLOCK))
            is_one = np.unpackbits(self._bits(part, group, blocks).reshape(-1), bitorder="little", count=len(numbers))
            numbers = numbers[is_one.view(bool)]
            yield numbers, self.lengths(numbers, part)


def select_part(counts: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (column that contains each rank, rank within the column). counts: [n, columns]. ranks: [n]."""
    part = np.zeros(len(ranks), np.int64)
    for column in range(counts.shape[1] - 1):  # for a few columns, a loop is faster than a cumulative sum
        is_behind = (part == column) & (ranks >= counts[:, column])
        ranks = np.where(is_behind, ranks - counts[:, column], ranks)
        part += is_behind
    return part, ranks


def bisect_right(array: np.ndarray, low: np.ndarray, high: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns int64[n], np.searchsorted(array[low:high], key, side="right") + low for each key."""
    low, high = low.copy(), high.copy()
    while (open_ := low < high).any():
        middle = (low + high) // 2
        below = open_ & (array[np.minimum(middle, len(array) - 1)] <= keys)
        low = np.where(below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low
