"""From documents to shards: blocks are tokenized in the order of a seeded shuffle, of which a shard takes a part.

Each shard takes its range of shuffle keys from every block, through an exchange where there are many of them.
"""

import contextlib
import functools
import hashlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxscale.corpus.prepare.blocks import mark_done, read_done, read_table, to_table, write_table
from jaxscale.corpus.prepare.config import PrepareConfig, TokenizerConfig
from jaxscale.corpus.prepare.exchange import Exchange, RunAll, exchange
from jaxscale.corpus.prepare.fertility import measure
from jaxscale.corpus.prepare.lookup import Blocks, blocks_of, recipe_of
from jaxscale.data.header import tokenizer_header
from jaxscale.data.shard_writer import ShardWriter, dtype_for
from jaxscale.data.verified import remove
from jaxscale.system.paths import make_private, replacing, sync_folder, write_bytes_atomic
from jaxscale.text.document import Document
from jaxscale.text.tokenizer.base import Block as EncodedBlock
from jaxscale.text.tokenizer.base import Tokenizer, cut_at, frame_documents
from jaxscale.text.tokenizer.load import load_tokenizer
from jaxscale.text.tokenizer.loss import Loss, measure_loss

FILES_AT_ONCE = 16  # so many files' worth of tokens in memory while files are merged: 128 MB of blocks of 16 MiB
SHARDS_IN_FOLDER = 1000  # five files each: what is more lies in folders below the manifest's, this many in each
IS_WHOLE = "is_whole"  # column of blocks where documents came as token ids: these have no end token of ours
MEASURED = 20  # documents of each block, chosen by the shuffle, on which the tokenizer is measured


def shuffle_keys(seed: int, place: tuple[int, int], count: int) -> np.ndarray:
    """uint64[count]: where each document of a block comes in the shuffled set, which is in the order of these keys.

    They depend on the seed and on the document's place in the input, so that the order is the same for any number of
    workers, and no block need know of another.
    """
    name = f"shuffle {seed} {place[0]} {place[1]}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Philox(key=key).random_raw(count)


def tokenise_block(
    cfg: PrepareConfig, path: str, base: pathlib.Path, documents: Sequence[Document], place: tuple[int, int]
) -> tuple[int, list, Loss]:
    """Writes BASE.ids (documents with their begin and end) and BASE.arrow (a row for each), in the order of their keys.

    Args: path: of the tokenizer. place: of the block, (piece, number within it).
    Returns the number of tokens, those included, how well the tokenizer fits a sample, as plain data, and what it loses
    of a sample.
    Raises BadInput where the fast encoder is wrong, or gives an id that the vocabulary does not have.
    """
    tokenizer = tokenizer_of(path, cfg.tokenizer)
    keys = shuffle_keys(cfg.write.seed, place, len(documents))
    order = np.argsort(keys, kind="stable")
    documents = [documents[i] for i in order]
    is_whole = [bool(document.ids) for document in documents]
    encoded = tokenizer.encode_block([document.text for document in documents if not document.ids])
    block = frame_documents(encoded, tokenizer, dtype_for(tokenizer.vocab_size - 1))
    ids, lengths = with_ids(block, documents) if any(is_whole) else block
    rows = to_table(documents, with_text=False)
    rows = rows.append_column("key", pa.array(keys[order]))
    rows = rows.append_column("tokens", pa.array(lengths))
    rows = rows.append_column("bytes", pa.array([document.size for document in documents], pa.int64()))
    if any(is_whole):
        rows = rows.append_column(IS_WHOLE, pa.array(is_whole))
    write_bytes_atomic(f"{base}.ids", ids.data)
    write_table(pathlib.Path(f"{base}.arrow"), rows, packed=False)  # each shard looks at a part of it
    loss = measure_loss(tokenizer, [one.text for one in documents if not one.ids])
    return len(ids), measure(tokenizer, documents[:MEASURED]), loss


def with_ids(block: EncodedBlock, documents: Sequence[Document]) -> EncodedBlock:
    """The encoded documents of a block, and in their places those that came as token ids, unchanged."""
    encoded = iter(block.split())
    parts = [
        np.frombuffer(document.ids, "<u4").astype(block.ids.dtype) if document.ids else next(encoded)
        for document in documents
    ]
    return EncodedBlock(np.concatenate(parts), np.array([len(part) for part in parts], np.int64))


@functools.lru_cache(maxsize=2)
def tokenizer_of(path: str, cfg: TokenizerConfig) -> Tokenizer:
    """The tokenizer, loaded once in a process."""
    return load_tokenizer(path, cfg.eos_token, cfg.bos_token, cfg.encode)


class TokenBlocks(NamedTuple):
    """The blocks of tokens that a pass has left: what an exchange makes shards of."""

    folder: str  # of the work
    number: int  # of the pass

    def base(self, number: int) -> str:
        """Where a block lies, without an ending."""
        return blocks_of(self.folder, self.number)[number]

    @property
    def tokenizer(self) -> Tokenizer:
        """That has made them."""
        cfg = recipe_of(self.folder).tokenizer
        return tokenizer_of(cfg.path(self.folder), cfg)

    @property
    def dtype(self) -> np.dtype:
        """Of ids."""
        return np.dtype(dtype_for(self.tokenizer.vocab_size - 1))


def make_exchange(blocks: Blocks, count: int) -> Exchange:
    """The exchange that makes so many shards of the blocks of a pass."""
    source, between = TokenBlocks(blocks.folder, blocks.number), f"{blocks.folder}/shuffled"
    return Exchange(source, between, len(blocks), count, merges_first=True)


def shard_name(number: int, count: int) -> str:
    """'shard-00001-of-00042'; where there are too many for one folder, '00003/shard-03000-of-04200'."""
    folder = f"{number // SHARDS_IN_FOLDER:05d}/" if count > SHARDS_IN_FOLDER else ""
    return f"{folder}shard-{number:05d}-of-{count:05d}"


def shards_by_exchange(run_all: RunAll, whole: Exchange) -> Iterator[str]:
    """Yields the names of shards when they are written, as an executor without a shuffle of its own does it."""
    yield from exchange(run_all, whole, merge_tokens, write_shard)


def merge_tokens(call: Exchange) -> None:
    """A task before the last level of an exchange of tokens: leaves BASE.ids and BASE.arrow, as of a block."""
    base, done = call.path(call.level, call.number), call.path(call.level, call.number, ".done.json")
    if read_done(done) is not None:
        return
    base.parent.mkdir(parents=True, exist_ok=True)
    files = [pathlib.Path(f"{base}{ending}") for ending in (".ids", ".arrow")]
    with replacing(files[0]) as ids_file, replacing(files[1]) as rows_file:
        write_merged(call, ids_file, rows_file)
    mark_done(done, {}, files)


def write_merged(call: Exchange, ids_file: BinaryIO, rows_file: BinaryIO) -> None:
    """Writes ids and rows of a task, a part of its keys after the other, so that memory does not grow with its files.

    Its files, MOST_WAYS at most, stay open meanwhile, two descriptors each.
    """
    numbers, begin, end = call.reads()
    parts = -(-len(numbers) // FILES_AT_ONCE)
    bounds = [begin + (end - begin) * part // parts for part in range(parts + 1)]
    with contextlib.ExitStack() as stack:
        opened = lambda number: stack.enter_context(OpenDocuments(before(call, number), call.source.dtype))
        found = [opened(number) for number in numbers]
        schema = pa.unify_schemas([documents.rows.schema for documents in found])  # some blocks have no scores
        writer = stack.enter_context(pa.ipc.new_file(rows_file, schema))
        for first, last in zip(bounds, bounds[1:]):
            ids, rows = laid_together([documents.between(first, last) for documents in found])
            ids_file.write(np.ascontiguousarray(ids).data)
            whole = pa.concat_tables([schema.empty_table(), rows], promote_options="default")
            writer.write_table(whole.combine_chunks())


def total(rows: pa.Table, column: str) -> int:
    """The sum of a column, without its nulls."""
    return int(pc.call_function("sum", [rows.column(column)]).as_py() or 0)


def write_shard(call: Exchange, collect: Callable[[], tuple[np.ndarray, pa.Table]] | None = None) -> str:
    """Writes the shard into work/shards/NAME, whole or not at all, and returns its name. Memory: one shard's tokens.

    collect: gives what is in it, instead of the files of the exchange.
    """
    work, name = pathlib.Path(call.source.folder), shard_name(call.number, call.outputs)
    final = work / "shards" / name
    folder, plain_name = final.parent, final.name
    done = folder / f"{plain_name}.done.json"
    if final.is_dir() and read_done(done, final, (work.parent / name).parent) is not None:
        return name  # some of its files may have been moved out before
    remove(final)
    folder.mkdir(parents=True, exist_ok=True)
    making = pathlib.Path(tempfile.mkdtemp(prefix=f".{plain_name}.", dir=folder))  # another may be making the same
    ids, rows = collect() if collect else gather(call)
    cfg, tokenizer = recipe_of(call.source.folder), call.source.tokenizer
    ends = dict(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    writer = ShardWriter(making, plain_name, **ends, sources=tuple(cfg.sources))
    lengths = rows.column("tokens").to_numpy()
    known = pc.SetLookupOptions(pa.array(tuple(cfg.sources)))
    numbers = pc.call_function("index_in", [rows.column("source")], known).to_numpy()
    of_ids = total(rows, IS_WHOLE) if IS_WHOLE in rows.column_names else 0
    writer.add_block(ids, lengths, numbers, is_whole=of_ids > 0)
    header = {
        "tokenizer": tokenizer_header(tokenizer, pathlib.Path(cfg.tokenizer.path(call.source.folder)).name),
        "eos_id": tokenizer.eos_id,
        "text_bytes": total(rows, "bytes"),
        "skipped": {},
        "files": [{"name": plain_name, "source": "", "documents": len(rows)}],
        **({"ids_documents": of_ids} if of_ids else {}),
    }
    others = [name for name in ("key", "tokens", "source", "bytes", IS_WHOLE) if name in rows.column_names]
    writer.finish(tokenizer.token_bytes, header, lineage=rows.drop_columns(others))
    mark_done(done, {}, sorted(making.iterdir()), making)
    try:
        making.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(making)  # the other one has made it, and the two are alike
    sync_folder(folder)
    return name


def gather(call: Exchange) -> tuple[np.ndarray, pa.Table]:
    """(ids of documents laid end to end, a row for each), in the order of keys, of the files that a task reads."""
    numbers, begin, end = call.reads()
    return laid_together([documents_between(before(call, number), begin, end, call.source.dtype) for number in numbers])


def before(call: Exchange, number: int) -> str:
    """Where a file lies that a task reads, without an ending."""
    return call.source.base(number) if call.level == 1 else str(call.path(call.level - 1, number))


class OpenDocuments:
    """The documents in BASE.ids and BASE.arrow, in the order of their keys."""

    def __init__(self, base: str, dtype: np.dtype):
        self.dtype = dtype
        self.rows = read_table(pathlib.Path(f"{base}.arrow"))
        self.keys = self.rows.column("key").to_numpy()
        self.ends = np.cumsum(self.rows.column("tokens").to_numpy())
        self.file = open(f"{base}.ids", "rb")

    def __enter__(self) -> "OpenDocuments":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def between(self, begin: int, end: int) -> tuple[np.ndarray, pa.Table]:
        """(ids, rows) of the documents with keys from begin up to but not including end, copied."""
        first = int(np.searchsorted(self.keys, np.uint64(begin)))
        last = int(np.searchsorted(self.keys, np.uint64(end - 1), side="right"))
        if first == last:
            return np.zeros(0, self.dtype), self.rows.slice(0, 0)
        start, stop = int(self.ends[first - 1]) if first else 0, int(self.ends[last - 1])
        self.file.seek(self.dtype.itemsize * start)
        # Copied, not mapped: a map for each of many blocks would run into the limits on open files and on maps.
        return np.fromfile(self.file, self.dtype, stop - start), self.rows.take(np.arange(first, last))


def documents_between(base: str, begin: int, end: int, dtype: np.dtype) -> tuple[np.ndarray, pa.Table]:
    """(ids, rows) of the documents in BASE.ids and BASE.arrow with keys from begin up to but not including end."""
    with OpenDocuments(base, dtype) as documents:
        return documents.between(begin, end)


def laid_together(found: Sequence[tuple[np.ndarray, pa.Table]]) -> tuple[np.ndarray, pa.Table]:
    """(ids, rows) of several such, in the order of keys."""
    some = [(ids, rows) for ids, rows in found if len(rows)]
    if not some:
        return found[0]
    parts: list[np.ndarray] = []
    for ids, rows in some:
        parts += cut_at(ids, rows.column("tokens").to_numpy())
    rows = pa.concat_tables([rows for _, rows in some], promote_options="default")
    order = np.argsort(rows.column("key").to_numpy(), kind="stable")
    return np.concatenate([parts[i] for i in order]), rows.take(order)


def move_out(folder: pathlib.Path, names: Sequence[str], output: pathlib.Path) -> None:
    """Moves the finished shards from work/shards/NAME to the output; once more, it does what is left to do."""
    for name in names:
        source, target = folder / "shards" / name, (output / name).parent
        if not target.is_dir():
            make_private(target, output.stat().st_mode & 0o777)
        for path in sorted(source.iterdir(), key=lambda path: path.suffix == ".json"):  # headers last
            path.rename(target / path.name)
    for target in {(output / name).parent for name in names} | {output}:
        sync_folder(target)
