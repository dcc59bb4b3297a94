"""From documents to shards: blocks are tokenized in the order of a seeded shuffle, of which a shard takes a part.

Each shard takes its range of shuffle keys from every block.
"""

import functools
import hashlib
import pathlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxscale.corpus.prepare.blocks import mark_done, read_done, read_table, to_table, write_table
from jaxscale.corpus.prepare.config import PrepareConfig, TokenizerConfig
from jaxscale.corpus.prepare.fertility import measure
from jaxscale.data.header import tokenizer_header
from jaxscale.data.shards import ShardWriter, dtype_for
from jaxscale.data.verified import remove
from jaxscale.system.paths import sync_folder, write_bytes_atomic
from jaxscale.text.document import Document
from jaxscale.text.tokenizer.base import Tokenizer, frame_documents
from jaxscale.text.tokenizer.load import load_tokenizer

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
) -> tuple[int, list]:
    """Writes BASE.ids (documents with their begin and end) and BASE.arrow (a row for each), in the order of their keys.

    Args: path: of the tokenizer. place: of the block, (piece, number within it).
    Returns the number of tokens, those included, and how well the tokenizer fits a sample, as plain data.
    Raises BadInput where the fast encoder is wrong, or gives an id that the vocabulary does not have.
    """
    tokenizer = tokenizer_of(path, cfg.tokenizer)
    keys = shuffle_keys(cfg.write.seed, place, len(documents))
    order = np.argsort(keys, kind="stable")
    documents = [documents[i] for i in order]
    encoded = tokenizer.encode_block([document.text for document in documents])
    ids, lengths = frame_documents(encoded, tokenizer, dtype_for(tokenizer.vocab_size - 1))
    rows = to_table(documents, with_text=False)
    rows = rows.append_column("key", pa.array(keys[order]))
    rows = rows.append_column("tokens", pa.array(lengths))
    rows = rows.append_column("bytes", pa.array([document.size for document in documents], pa.int64()))
    write_bytes_atomic(f"{base}.ids", ids.data)
    write_table(pathlib.Path(f"{base}.arrow"), rows, packed=False)  # each shard looks at a part of it
    return len(ids), measure(tokenizer, documents[:MEASURED])


@functools.lru_cache(maxsize=2)
def tokenizer_of(path: str, cfg: TokenizerConfig) -> Tokenizer:
    """The tokenizer, loaded once in a process."""
    return load_tokenizer(path, cfg.eos_token, cfg.bos_token, cfg.encode)


class ShardCall(NamedTuple):
    """A shard to be made."""

    folder: str  # of the work
    blocks: tuple[str, ...]  # in the order of the input
    number: int
    count: int  # of all shards
    sources: tuple[str, ...]
    tokenizer: str  # path
    cfg: TokenizerConfig

    @property
    def name(self) -> str:
        return f"shard-{self.number:05d}-of-{self.count:05d}"


def write_shard(call: ShardCall) -> str:
    """Writes the shard into work/shards/NAME, whole or not at all, and returns its name. Memory: one shard's tokens."""
    folder = pathlib.Path(call.folder) / "shards"
    final = folder / call.name
    done = folder / f"{call.name}.done.json"
    if final.is_dir() and read_done(done, final, pathlib.Path(call.folder).parent) is not None:
        return call.name  # some of its files may have been moved out before
    remove(final)
    folder.mkdir(parents=True, exist_ok=True)
    making = pathlib.Path(tempfile.mkdtemp(prefix=f".{call.name}.", dir=folder))  # another may be making the same
    ids, rows = gather(call)
    tokenizer = tokenizer_of(call.tokenizer, call.cfg)
    ends = dict(vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id)
    writer = ShardWriter(making, call.name, **ends, sources=call.sources)
    lengths = rows.column("tokens").to_numpy()
    numbers = pc.index_in(rows.column("source"), pa.array(call.sources)).to_numpy()
    writer.add_block(ids, lengths, numbers)
    header = {
        "tokenizer": tokenizer_header(tokenizer, pathlib.Path(call.tokenizer).name),
        "eos_id": tokenizer.eos_id,
        "text_bytes": int(pc.sum(rows.column("bytes")).as_py() or 0),
        "skipped": {},
        "files": [{"name": call.name, "source": "", "documents": len(rows)}],
    }
    writer.finish(tokenizer.token_bytes, header, lineage=rows.drop_columns(["key", "tokens", "source", "bytes"]))
    mark_done(done, {}, sorted(making.iterdir()))
    try:
        making.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(making)  # the other one has made it, and the two are alike
    sync_folder(folder)
    return call.name


def gather(call: ShardCall) -> tuple[np.ndarray, pa.Table]:
    """(ids of the shard's documents laid end to end, a row for each), in the order of keys."""
    start, stop = ((number << 64) // call.count for number in (call.number, call.number + 1))  # of uint64 keys
    parts: list[np.ndarray] = []
    tables: list[pa.Table] = []
    for base in call.blocks:
        table = read_table(pathlib.Path(f"{base}.arrow"))
        keys = table.column("key").to_numpy()
        first, last = (int(np.searchsorted(keys, np.uint64(min(bound, 2**64 - 1)))) for bound in (start, stop))
        last = len(keys) if stop == 2**64 else last
        if first == last:
            continue
        ends = np.cumsum(table.column("tokens").to_numpy())
        itemsize = pathlib.Path(f"{base}.ids").stat().st_size // int(ends[-1])
        bounds = np.concatenate([[0], ends])[first : last + 1]
        # Copied, not mapped: a map for each of many blocks would run into the limits on open files and on maps.
        count, dtype = int(bounds[-1] - bounds[0]), np.dtype(f"<u{itemsize}")
        ids = np.fromfile(f"{base}.ids", dtype, count, offset=itemsize * int(bounds[0]))
        parts += np.split(ids, bounds[1:-1] - bounds[0])
        tables.append(table.take(np.arange(first, last)))
    if not tables:
        return np.zeros(0, np.uint16), read_table(pathlib.Path(f"{call.blocks[0]}.arrow")).slice(0, 0)
    rows = pa.concat_tables(tables, promote_options="default")
    order = np.argsort(rows.column("key").to_numpy(), kind="stable")
    return np.concatenate([parts[i] for i in order]), rows.take(order)


def move_out(folder: pathlib.Path, names: Sequence[str], output: pathlib.Path) -> None:
    """Moves the finished shards from work/shards/NAME to the output; once more, it does what is left to do."""
    for name in names:
        source = folder / "shards" / name
        for path in sorted(source.iterdir(), key=lambda path: path.suffix == ".json"):  # headers last
            path.rename(output / path.name)
    sync_folder(output)
