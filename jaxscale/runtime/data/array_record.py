"""ArrayRecord files of token ids: one record per document, its ids as raw bytes.

Grain recommends group_size:1; with larger groups, reading one record decodes its neighbours too.
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxscale.runtime.data.cache import NAME, cached_shard, size_and_mtime
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.header import file_entry, unknown_tokenizer_header
from jaxscale.runtime.data.remote import map_ids
from jaxscale.runtime.data.shard_writer import ShardWriter
from jaxscale.runtime.data.shards import Shard
from jaxscale.runtime.data.verified import Say
from jaxscale.runtime.text.sources.array_record_text import load_package
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.system.exits import BadInput

OPTIONS = "group_size:1,uncompressed"  # compressing token ids costs more than it saves
READ_RECORDS = 4096  # records read or written together


def export_array_record(shards: Sequence[Shard], path: Path) -> int:
    """Writes one record of little-endian ids per document, and returns their number. Raises BadInput for two dtypes."""
    types = sorted({shard.header["dtype"] for shard in shards})
    if len(types) > 1:
        raise BadInput(f"{path}: shards of {' and '.join(types)} cannot share a file, which does not store the dtype")
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
    """Yields all records in order. Raises BadInput naming the file if it cannot be read."""
    module = load_package()
    if not Path(path).is_file():
        raise BadInput(f"{path} does not exist")
    try:
        reader = module.ArrayRecordReader(str(path))
        try:
            total = reader.num_records()
            for start in range(0, total, READ_RECORDS):
                records = reader.read(start, min(start + READ_RECORDS, total))
                if len(records) != min(READ_RECORDS, total - start):
                    raise BadInput(f"it has only {start + len(records):,} of {total:,} records")
                yield from records
        finally:
            reader.close()
    except (RuntimeError, IndexError, ValueError) as error:
        raise BadInput(f"{path} is not a complete ArrayRecord file: {error}") from None


def array_record_shard(
    file: SourceFile, dtype: str, eos_id: int | None, vocab_size: int, cfg: DataConfig, say: Say = print
) -> Shard:
    """Returns a file of ids as a shard, written to the cache once. Raises BadInput for damaged files and wrong ids."""
    if eos_id is None:
        raise BadInput(f"{file.path} does not store document ends; set data.eos_id or data.tokenizer")
    key = {"array record": [*file, *size_and_mtime(file.path)], "dtype": dtype, "eos_id": eos_id, "vocab": vocab_size}
    make = functools.partial(import_array_record, file, dtype=dtype, vocab_size=vocab_size, eos_id=eos_id)
    return cached_shard(cfg, key, make, say)


def import_array_record(file: SourceFile, folder: Path, *, dtype: str, vocab_size: int, eos_id: int) -> None:
    """Writes the documents of an ArrayRecord file of ids as a shard in `folder`.

    Args: dtype: of the ids, which the file does not store. eos_id: appended to each document that does not end with it.
    Raises: BadInput naming a record whose size is not a multiple of the dtype, or with an id outside the vocabulary.
    """
    itemsize = np.dtype(dtype).itemsize
    writer = ShardWriter(folder, NAME, vocab_size=vocab_size, eos_id=eos_id, sources=[file.source])
    try:
        for number, record in enumerate(read_records(Path(file.path))):
            location = f"{file.path}: record {number:,}"
            if len(record) % itemsize:
                raise BadInput(f"{location} of {len(record):,} bytes is not a multiple of {dtype}")
            ids = np.frombuffer(record, np.dtype(dtype).newbyteorder("<"))
            try:
                writer.add(ids[:-1] if len(ids) and ids[-1] == eos_id else ids, file.source)
            except BadInput as error:
                raise BadInput(f"{location}: {error}") from None
    except BaseException:
        writer.abandon()
        raise
    entry = file_entry(file._replace(name=Path(file.path).name), writer.num_documents)
    writer.finish(None, unknown_tokenizer_header(entry, eos_id, vocab_size))
