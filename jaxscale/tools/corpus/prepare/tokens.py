"""Tokenizes blocks and writes token shards in the order of a seeded shuffle. Each shard has a range of shuffle keys."""

import base64
import functools
import hashlib
import itertools
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxscale.runtime.data.shard_writer import ShardWriter, dtype_for
from jaxscale.runtime.data.shards import tokenizer_header
from jaxscale.runtime.data.verified import remove
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.tokenizer.base import EncodedBlock, Tokenizer, frame_documents, split_ids
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.runtime.text.tokenizer.loss import TextLoss, measure_loss
from jaxscale.system.paths import make_private, replacing, sync_folder, write_bytes_atomic
from jaxscale.tools.corpus.curate.hashes import hash_words
from jaxscale.tools.corpus.prepare import lookup
from jaxscale.tools.corpus.prepare.config import PrepareConfig, TokenizerConfig
from jaxscale.tools.corpus.prepare.shuffle import Shuffle

MERGE_BATCH_FILES = 16  # number of files whose tokens a merge has in memory: 128 MB for blocks of 16 MiB
SHARDS_IN_FOLDER = 1000  # shards per folder, with five files each; more shards are written to subfolders
IS_WHOLE = "is_whole"  # column of blocks with documents that were read as token ids, which get no EOS
FERTILITY_DOCUMENTS = 20  # documents per block in the sample for fertility; the shuffle selects them


def shuffle_keys(seed: int, place: tuple[int, int], count: int) -> np.ndarray:
    """Returns uint64[count], the shuffle key of each document of a block.

    Keys depend only on the seed and the position of the document in the input, so the order is the same for any number
    of workers, and blocks are independent.
    """
    name = f"shuffle {seed} {place[0]} {place[1]}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Philox(key=key).random_raw(count)


def tokenize_block(
    cfg: PrepareConfig, path: str, base: pathlib.Path, documents: Sequence[Document], place: tuple[int, int]
) -> tuple[int, list, TextLoss]:
    """Writes BASE.ids (token ids with BOS and EOS) and BASE.arrow (one row per document), sorted by shuffle key.

    `path` is the tokenizer's path, and `place` is (piece, index of the block in the piece).
    Returns (number of tokens, measure_fertility() of a sample, measure_loss() of the texts).
    Raises BadInput if the fast encoder gives wrong ids or an id outside the vocabulary.
    """
    tokenizer = tokenizer_of(path, cfg.tokenizer)
    keys = shuffle_keys(cfg.write.seed, place, len(documents))
    order = np.argsort(keys, kind="stable")
    documents = [documents[i] for i in order]
    is_whole = [bool(document.ids) for document in documents]
    encoded = tokenizer.encode_block([document.text for document in documents if not document.ids])
    block = frame_documents(encoded, tokenizer, dtype_for(tokenizer.vocab_size - 1))
    ids, lengths = merge_ids(block, documents) if any(is_whole) else block
    rows = lookup.to_table(documents, with_text=False)
    rows = rows.append_column("key", pa.array(keys[order]))
    rows = rows.append_column("tokens", pa.array(lengths))
    rows = rows.append_column("bytes", pa.array([document.size for document in documents], pa.int64()))
    if any(is_whole):
        rows = rows.append_column(IS_WHOLE, pa.array(is_whole))
    write_bytes_atomic(f"{base}.ids", ids.data)
    lookup.write_table(pathlib.Path(f"{base}.arrow"), rows, packed=False)  # uncompressed, since shards read parts of it
    loss = measure_loss(tokenizer, [one.text for one in documents if not one.ids])
    return len(ids), measure_fertility(tokenizer, documents[:FERTILITY_DOCUMENTS]), loss


def merge_ids(block: EncodedBlock, documents: Sequence[Document]) -> EncodedBlock:
    """Merges tokenized texts with documents that were read as token ids, in document order."""
    encoded, dtype = iter(block.split()), block.ids.dtype
    parts = [np.frombuffer(one.ids, "<u4").astype(dtype) if one.ids else next(encoded) for one in documents]
    return EncodedBlock(np.concatenate(parts), np.array([len(part) for part in parts], np.int64))


@functools.lru_cache(maxsize=2)
def tokenizer_of(path: str, cfg: TokenizerConfig) -> Tokenizer:
    """Returns the tokenizer, cached per process."""
    return load_tokenizer(path, cfg.eos_token, cfg.bos_token, cfg.encode)


class TokenBlocks(NamedTuple):
    """Token blocks of a pass, as the source of a shuffle."""

    folder: str  # work folder
    number: int  # number of the pass

    def base(self, number: int) -> str:
        """Returns the path of a block without its suffix."""
        return lookup.blocks_of(self.folder, self.number)[number]

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the blocks."""
        cfg = lookup.recipe_of(self.folder).tokenizer
        return tokenizer_of(cfg.path(self.folder), cfg)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the token ids."""
        return np.dtype(dtype_for(self.tokenizer.vocab_size - 1))


def shard_name(number: int, count: int) -> str:
    """Returns e.g. 'shard-00001-of-00042', or '00003/shard-03000-of-04200' for more than SHARDS_IN_FOLDER shards."""
    folder = f"{number // SHARDS_IN_FOLDER:05d}/" if count > SHARDS_IN_FOLDER else ""
    return f"{folder}shard-{number:05d}-of-{count:05d}"


def merge_tokens(task: Shuffle) -> None:
    """Merges blocks before the last level of the shuffle. Writes BASE.ids and BASE.arrow in the format of a block."""
    done, *files = (task.path(task.level, task.number, ending) for ending in (".done.json", ".ids", ".arrow"))
    if lookup.read_done(done) is not None:
        return
    done.parent.mkdir(parents=True, exist_ok=True)
    with replacing(files[0]) as ids_file, replacing(files[1]) as rows_file:
        write_merged(task, ids_file, rows_file)
    lookup.mark_done(done, {}, files)


def write_merged(task: Shuffle, ids_file: BinaryIO, rows_file: BinaryIO) -> None:
    """Writes the merged ids and rows of a task in key order. Merges one key range at a time, to bound memory."""
    numbers, begin, end = task.inputs_of_task()
    parts = -(-len(numbers) // MERGE_BATCH_FILES)
    bounds = [begin + (end - begin) * part // parts for part in range(parts + 1)]
    bases, dtype = [input_base(task, number) for number in numbers], task.source.dtype
    schemas = [lookup.read_table(pathlib.Path(f"{base}.arrow")).schema for base in bases]
    schema = pa.unify_schemas(schemas)  # some blocks have no scores
    with pa.ipc.new_file(rows_file, schema) as writer:
        for first, last in itertools.pairwise(bounds):
            ids, rows = merge_by_key([documents_between(base, first, last, dtype) for base in bases])
            ids_file.write(np.ascontiguousarray(ids).data)
            rows = pa.concat_tables([schema.empty_table(), rows], promote_options="default")
            writer.write_table(rows.combine_chunks())


def total(rows: pa.Table, column: str) -> int:
    """Returns the sum of a column, ignoring nulls."""
    return int(pc.call_function("sum", [rows.column(column)]).as_py() or 0)


def write_shard(task: Shuffle) -> str:
    """Writes work/shards/NAME atomically and returns NAME."""
    work, name = pathlib.Path(task.source.folder), shard_name(task.number, task.outputs)
    final = work / "shards" / name
    folder, plain_name = final.parent, final.name
    done = folder / f"{plain_name}.done.json"
    if final.is_dir() and lookup.read_done(done, final, (work.parent / name).parent) is not None:
        return name  # files that were already moved to the output are verified there
    remove(final)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{plain_name}.", dir=folder))  # another task may write the shard
    numbers, begin, end = task.inputs_of_task()
    dtype = task.source.dtype
    ids, rows = merge_by_key([documents_between(input_base(task, one), begin, end, dtype) for one in numbers])
    cfg, tokenizer = lookup.recipe_of(task.source.folder), task.source.tokenizer
    ends = dict(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    writer = ShardWriter(temporary, plain_name, **ends, sources=tuple(cfg.sources))
    lengths = rows.column("tokens").to_numpy()
    known = pc.SetLookupOptions(pa.array(tuple(cfg.sources)))
    numbers = pc.call_function("index_in", [rows.column("source")], known).to_numpy()
    num_ids_documents = total(rows, IS_WHOLE) if IS_WHOLE in rows.column_names else 0
    writer.add_block(ids, lengths, numbers, is_whole=num_ids_documents > 0)
    header = {
        "tokenizer": tokenizer_header(tokenizer, pathlib.Path(cfg.tokenizer.path(task.source.folder)).name),
        "eos_id": tokenizer.eos_id,
        "text_bytes": total(rows, "bytes"),
        "skipped": {},
        "files": [{"name": plain_name, "source": "", "documents": len(rows)}],
        **({"ids_documents": num_ids_documents} if num_ids_documents else {}),
    }
    others = [name for name in ("key", "tokens", "source", "bytes", IS_WHOLE) if name in rows.column_names]
    writer.finish(tokenizer.token_bytes, header, lineage=rows.drop_columns(others))
    lookup.mark_done(done, {}, sorted(temporary.iterdir()), temporary)
    try:
        temporary.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(temporary)  # another process wrote the same bytes
    sync_folder(folder)
    return name


def input_base(task: Shuffle, number: int) -> str:
    """Returns the path of a task's input without its suffix."""
    return task.source.base(number) if task.level == 1 else str(task.path(task.level - 1, number))


def documents_between(base: str, begin: int, end: int, dtype: np.dtype) -> tuple[np.ndarray, pa.Table]:
    """Returns copies of (ids, rows) of the documents in BASE.ids and BASE.arrow with keys in [begin, end)."""
    rows = lookup.read_table(pathlib.Path(f"{base}.arrow"))
    keys, ends = rows.column("key").to_numpy(), np.cumsum(rows.column("tokens").to_numpy())
    first = int(np.searchsorted(keys, np.uint64(begin)))
    last = int(np.searchsorted(keys, np.uint64(end - 1), side="right"))
    if first == last:
        return np.zeros(0, dtype), rows.schema.empty_table()
    start, stop = int(ends[first - 1]) if first else 0, int(ends[last - 1])
    # Not memory-mapped, since one map for each of many blocks would exceed the limits on open files and maps.
    ids = np.fromfile(f"{base}.ids", dtype, stop - start, offset=dtype.itemsize * start)
    return ids, rows.take(np.arange(first, last))


def merge_by_key(found: Sequence[tuple[np.ndarray, pa.Table]]) -> tuple[np.ndarray, pa.Table]:
    """Returns (ids, rows) merged in key order."""
    some = [(ids, rows) for ids, rows in found if len(rows)]
    if not some:
        return found[0]
    parts = [part for ids, rows in some for part in split_ids(ids, rows.column("tokens").to_numpy())]
    rows = pa.concat_tables([rows for _, rows in some], promote_options="default")
    order = np.argsort(rows.column("key").to_numpy(), kind="stable")
    return np.concatenate([parts[i] for i in order]), rows.take(order)


def move_shards(folder: pathlib.Path, names: Sequence[str], output: pathlib.Path) -> None:
    """Moves the finished shards from work/shards/NAME to the output. Resumes if called again."""
    for name in names:
        source, target = folder / "shards" / name, (output / name).parent
        if not target.is_dir():
            make_private(target, output.stat().st_mode & 0o777)
        for path in sorted(source.iterdir(), key=lambda path: path.suffix == ".json"):  # headers last
            path.rename(target / path.name)
    for target in {(output / name).parent for name in names} | {output}:
        sync_folder(target)


class FertilityRow(NamedTuple):
    """One row of the report's tokenizer table. A ratio with a zero denominator is None."""

    source: str
    language: str
    documents: int
    tokens: int
    bytes_per_token: float | None
    tokens_per_word: float | None
    fallback_share: float | None  # fraction of tokens that are unknown, or single bytes of a longer character
    returned_share: float | None  # fraction of documents that are unchanged after encoding and decoding
    vocabulary_share: float | None  # fraction of ids that occur, of the ids that text can produce


FertilitySums = dict[tuple[str, str], list[np.ndarray]]  # (source, language) -> [counts, bit mask of ids that occurred]


def measure_fertility(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[list[Any]]:
    """Returns counts by source and language, as plain data. Decodes every text, so pass only a sample."""
    block = tokenizer.encode_block([document.text for document in documents])
    sums: FertilitySums = {}
    for document, words, ids in zip(documents, hash_words(documents), block.split(), strict=True):
        used = np.zeros(tokenizer.vocab_size, bool)
        used[ids] = True
        returned = int(tokenizer.decode(ids) == document.text)
        counts = [1, document.size, len(words), len(ids), int(tokenizer.fallback[ids].sum()), returned]
        add_counts(sums, (document.source, document.language), counts, np.packbits(used))
    return [[*key, *counts.tolist(), base64.b64encode(bits.tobytes()).decode()] for key, (counts, bits) in sums.items()]


def add_counts(sums: FertilitySums, key: tuple[str, str], counts: Sequence[int], bits: np.ndarray) -> None:
    """Adds counts, and the bit mask of the ids that occurred, to the entry of `key` in `sums`."""
    total = sums.setdefault(key, [np.zeros(len(counts), np.int64), np.zeros_like(bits)])
    total[0] += counts
    total[1] |= bits


def add_fertility(sums: FertilitySums, measured: Iterable[Sequence[Any]]) -> None:
    """Adds the result of measure_fertility for a block."""
    for source, language, *counts, bits in measured:
        add_counts(sums, (source, language), counts, np.frombuffer(base64.b64decode(bits), np.uint8))


def fertility_rows(sums: FertilitySums, tokenizer: Tokenizer) -> list[FertilityRow]:
    """Returns a row for each source and language, sorted, followed by a total if there are several."""
    named = [(*key, *sums[key]) for key in sorted(sums)]
    if len(named) > 1:
        counts, packed = (list(column) for column in zip(*sums.values()))
        named.append(("all", "", np.sum(counts, axis=0), np.bitwise_or.reduce(packed)))
    is_text_id = tokenizer.token_bytes > 0
    found = []
    for source, language, counts, packed in named:
        documents, text_bytes, words, tokens, fallback, returned = counts.tolist()
        used = np.unpackbits(packed, count=tokenizer.vocab_size).astype(bool) & is_text_id
        ratios = ((text_bytes, tokens), (tokens, words), (fallback, tokens), (returned, documents))
        ratios += ((int(used.sum()), int(is_text_id.sum())),)
        found.append(FertilityRow(source, language, documents, tokens, *(a / b if b else None for a, b in ratios)))
    return found
