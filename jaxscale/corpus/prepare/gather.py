"""Writes shards from tokenized blocks: each takes a range of shuffle keys from every block."""

import math
import pathlib
import shutil
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxscale.corpus.prepare.blocks import read_table
from jaxscale.corpus.prepare.config import TokenizerConfig
from jaxscale.corpus.prepare.done import mark_done, read_done
from jaxscale.corpus.prepare.tokens import tokenizer_of
from jaxscale.data.shards import ShardWriter
from jaxscale.data.verified import remove
from jaxscale.system.paths import sync_folder
from jaxscale.text.tokenizer.base import begin_names


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


def num_shards(tokens: int, shard_tokens: int) -> int:
    """Number of shards of about shard_tokens."""
    return max(1, math.ceil(tokens / shard_tokens))


def key_bounds(number: int, count: int) -> tuple[int, int]:
    """[from, to) of the uint64 keys that belong to a shard."""
    return (number << 64) // count, ((number + 1) << 64) // count


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
    writer.add_block(ids, lengths, numbers, ended=True)
    header = {
        "tokenizer": {
            "name": pathlib.Path(call.tokenizer).name,
            "eos_token": tokenizer.eos_token,
            "begin_tokens": begin_names(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
        },
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
    start, stop = key_bounds(call.number, call.count)
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
