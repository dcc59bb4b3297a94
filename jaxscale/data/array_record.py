"""ArrayRecord files of token ids: one record for each document, its ids as raw bytes.

Grain asks for group_size:1, without which each read of a record unpacks its neighbours too.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxscale.data.cache import NAME, cached, stamp
from jaxscale.data.config import DataConfig
from jaxscale.data.header import listed, untold_header
from jaxscale.data.remote import map_ids
from jaxscale.data.shard_writer import ShardWriter
from jaxscale.data.shards import Shard
from jaxscale.data.verified import Say
from jaxscale.system.exits import BadInput
from jaxscale.text.sources.array_record import load_package
from jaxscale.text.sources.files import SourceFile

OPTIONS = "group_size:1,uncompressed"  # ids are dense: compressing them costs more than it saves
AT_ONCE = 4096  # records read or written together


def export_array_record(shards: Sequence[Shard], path: Path) -> int:
    """Writes each document of the shards as one record of little-endian ids; gives their number.

    All records have the type of the first shard's ids. Raises BadInput if the shards have several types.
    """
    types = sorted({shard.header["dtype"] for shard in shards})
    if len(types) > 1:
        raise BadInput(f"{path}: shards of {' and '.join(types)} cannot share a file, which does not tell the type")
    writer, written = load_package().ArrayRecordWriter(str(path), OPTIONS), 0
    try:
        for shard in shards:
            ids = map_ids(shard.bin_path, types[0])
            for start, stop in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist()):
                writer.write(ids[start:stop].tobytes())
                written += 1
    finally:
        writer.close()
    return written


def read_records(path: Path) -> Iterator[bytes]:
    """Yields every record, in order. Raises BadInput naming the file if it cannot be read."""
    module = load_package()
    if not Path(path).is_file():
        raise BadInput(f"{path} does not exist")
    try:
        reader = module.ArrayRecordReader(str(path))
        try:
            total = reader.num_records()
            for start in range(0, total, AT_ONCE):
                records = reader.read(start, min(start + AT_ONCE, total))
                if len(records) != min(AT_ONCE, total - start):
                    raise BadInput(f"only {start + len(records):,} of {total:,} records are there")
                yield from records
        finally:
            reader.close()
    except (RuntimeError, IndexError, ValueError) as error:
        raise BadInput(f"{path} is no whole ArrayRecord file: {error}") from None


def array_record_shard(
    file: SourceFile, dtype: str, eos_id: int | None, vocab_size: int, cfg: DataConfig, say: Say = print
) -> Shard:
    """A file of ids as a shard, copied into the cache once.

    Raises: BadInput naming it if it is damaged, holds ids that the model does not have, or no end token is known.
    """
    if eos_id is None:
        raise BadInput(f"{file.path} does not tell where documents end; set data.eos_id, or data.tokenizer")
    made_from = {"array record": [*file, *stamp(file.path)], "dtype": dtype, "eos_id": eos_id, "vocab": vocab_size}
    make = functools.partial(import_array_record, file, dtype=dtype, vocab_size=vocab_size, eos_id=eos_id)
    return cached(cfg, made_from, make, say)


def import_array_record(file: SourceFile, folder: Path, *, dtype: str, vocab_size: int, eos_id: int) -> None:
    """Writes the documents of an ArrayRecord file of ids as a shard in `folder`.

    Args: dtype: of the ids in the records, which the file does not tell. eos_id: put after each document that does not
    end with it.
    Raises: BadInput naming the record that is no whole number of ids, or has an id beyond the vocabulary.
    """
    itemsize = np.dtype(dtype).itemsize
    writer = ShardWriter(folder, NAME, vocab_size=vocab_size, eos_id=eos_id, sources=[file.source])
    try:
        for number, record in enumerate(read_records(Path(file.path))):
            place = f"{file.path}: record {number:,}"
            if len(record) % itemsize:
                raise BadInput(f"{place} of {len(record):,} bytes is no whole number of {dtype}")
            ids = np.frombuffer(record, np.dtype(dtype).newbyteorder("<"))
            try:
                writer.add(ids[:-1] if len(ids) and ids[-1] == eos_id else ids, file.source)
            except BadInput as error:
                raise BadInput(f"{place}: {error}") from None
    except BaseException:
        writer.abandon()
        raise
    entry = listed(file._replace(name=Path(file.path).name), writer.num_documents)
    writer.finish(None, untold_header(entry, eos_id, vocab_size))
