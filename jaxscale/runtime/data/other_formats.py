"""Reads and writes token ids as Megatron indexed datasets and ArrayRecord files.

An ArrayRecord file has one record per document, with the ids as raw bytes. Grain recommends group_size:1, because
reading a record decodes its whole group.

Megatron's NAME.bin is read in place. The .idx, version 1 (megatron/core/datasets/indexed_dataset.py), is little-endian:
    "MMIDIDX\\0\\0", uint64 version, uint8 type of the ids, uint64 number of sequences, uint64 number of documents + 1,
    int32[sequences] length of each sequence, int64[sequences] start of each sequence in the .bin, in bytes,
    int64[documents + 1] first sequence of each document, and the number of sequences,
    and in multimodal datasets int8[sequences] mode of each sequence.
"""

import functools
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxscale.runtime.data.cache import NAME, cached_shard, index_raw, size_and_mtime
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.remote import map_ids
from jaxscale.runtime.data.shard_writer import ShardWriter, write_synced
from jaxscale.runtime.data.shards import Shard, expect_size, file_entry, unknown_tokenizer_header
from jaxscale.runtime.data.verified import Say
from jaxscale.runtime.text.sources.data_sets import load_package
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.system.digest import READ_BYTES
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import open_regular

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEAD = struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
# Shard dtypes of the same size; index_raw() rejects negative ids.
SAME_BITS = {1: "uint8", 2: "uint8", 3: "uint16", 4: "uint32", 5: "int64", 8: "uint16"}
CODES = {"uint8": 1, "uint16": 8, "uint32": 4, "int64": 5}  # Megatron has int32 instead of uint32
SIGNED_END = {2: 2**7, 3: 2**15, 4: 2**31, 5: 2**63}  # smallest unsigned value that is negative in the signed type
OPTIONS = "group_size:1,uncompressed"  # compression of token ids costs more time than it saves
READ_RECORDS = 4096  # number of records that are read together


class MegatronIndex(NamedTuple):
    """The memory-mapped content of an .idx."""

    code: int  # code of the id dtype, see TYPES
    lengths: np.ndarray  # int32[sequences]
    documents: np.ndarray  # int64[documents + 1]: first sequence of each document, and the end
    modes: np.ndarray | None  # int8[sequences]

    @property
    def offsets(self) -> np.ndarray:
        """Returns int64[documents + 1], the index of each document's first id, and the end."""
        ends = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=ends[1:])
        return ends[self.documents]


def is_megatron(path: str) -> bool:
    """Returns True for the .bin or .idx of a Megatron dataset. Checks the magic number in the .idx."""
    if not path.endswith((".bin", ".idx")):
        return False
    try:
        with open_regular(Path(path).with_suffix(".idx")) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, BadInput):
        return False


def read_index(path: Path) -> MegatronIndex:
    """Reads an .idx. Raises BadInput if the file is damaged or has a different version."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            raw = np.memmap(file, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    if len(raw) < HEAD.size or raw[: len(MAGIC)].tobytes() != MAGIC:
        raise BadInput(f"{path} is not a Megatron index: it does not start with {MAGIC!r}")
    _, version, code, sequences, bounds = HEAD.unpack(raw[: HEAD.size].tobytes())
    if version != VERSION or code not in TYPES:
        raise BadInput(f"{path} has version {version} and type {code}; it must have version {VERSION} and type 1 to 8")
    size = HEAD.size + 12 * sequences + 8 * bounds
    if len(raw) not in (size, size + sequences) or not bounds:
        what = "truncated" if len(raw) < size else "too long"
        raise BadInput(
            f"{path} has {len(raw):,} bytes instead of the {size:,} in its header: it is {what}; copy it again"
        )
    parts, place = [], HEAD.size
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", bounds)):
        stop = place + np.dtype(dtype).itemsize * count
        parts.append(np.asarray(raw[place:stop]).view(dtype))
        place = stop
    lengths, pointers, documents = parts
    modes = np.asarray(raw[place:]).view(np.int8) if sequences and place < len(raw) else None
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    if (lengths < 0).any() or (pointers != starts * np.dtype(TYPES[code]).itemsize).any():
        raise BadInput(f"{path}: the sequences are not contiguous in the .bin; write the .idx and .bin again")
    if documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise BadInput(
            f"{path}: the document index does not cover all {len(lengths):,} sequences; write the .idx again"
        )
    return MegatronIndex(code, lengths, documents, modes)


def index_bytes(code: int, lengths: np.ndarray, documents: np.ndarray, modes: np.ndarray | None = None) -> bytes:
    """Returns the content of an .idx for contiguous sequences. documents: as in MegatronIndex."""
    itemsize = np.dtype(TYPES[code]).itemsize
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * itemsize
    parts = [HEAD.pack(MAGIC, VERSION, code, len(lengths), len(documents)), lengths.astype("<i4").tobytes()]
    parts += [pointers.astype("<i8").tobytes(), documents.astype("<i8").tobytes()]
    return b"".join([*parts, b"" if modes is None else modes.astype(np.int8).tobytes()])


def megatron_shard(file: SourceFile, cfg: DataConfig, say: Say) -> Shard:
    """Opens a Megatron dataset as a shard, and joins the sequences of each document. Raises BadInput if damaged."""
    idx, path = Path(file.path).with_suffix(".idx"), str(Path(file.path).with_suffix(".bin"))
    stamps = *size_and_mtime(str(idx)), *size_and_mtime(path)
    key = {"megatron": [path, file.name, file.source, *stamps], "eos_id": cfg.eos_id}

    def make(folder: Path) -> None:
        index = read_index(idx)
        if index.code not in SAME_BITS:
            raise BadInput(f"{idx} has type {index.code} ({np.dtype(TYPES[index.code])}); token ids must be integers")
        if index.modes is not None and index.modes.any():
            raise BadInput(f"{idx} is a multimodal dataset; only text is supported")
        dtype, offsets = SAME_BITS[index.code], index.offsets
        expect_size(path, int(offsets[-1]) * np.dtype(dtype).itemsize)
        negative_from = SIGNED_END.get(index.code, 1 << 64)
        index_raw(folder, file._replace(path=path), dtype, cfg.eos_id, say, offsets, negative_from)

    return cached_shard(cfg, key, make, say)


def export_megatron(shards: Sequence[Shard], base: Path) -> None:
    """Writes BASE.bin and BASE.idx, with one sequence per document. Raises BadInput for ids that exceed int32."""
    widest = max((shard.header["dtype"] for shard in shards), key=lambda name: np.dtype(name).itemsize)
    if (largest := max(shard.header["max_id"] for shard in shards)) >= 2**31 and CODES[widest] == 4:
        raise BadInput(f"{shards[0].bin_path}: id {largest} does not fit in int32, the Megatron type for uint32 ids")
    base.parent.mkdir(parents=True, exist_ok=True)
    idx = Path(f"{base}.idx")
    idx.unlink(missing_ok=True)  # first, so that an interruption never leaves an old index with a new .bin
    lengths = []
    with open(f"{base}.bin", "wb") as file:
        for shard in shards:
            lengths.append(np.diff(shard.offsets))
            ids = map_ids(shard.bin_path, shard.header["dtype"])
            for start in range(0, int(shard.offsets[-1]), READ_BYTES):
                file.write(np.ascontiguousarray(ids[start : start + READ_BYTES], TYPES[CODES[widest]]).data)
        file.flush()
    all_lengths = np.concatenate(lengths)
    write_synced(idx, index_bytes(CODES[widest], all_lengths, np.arange(len(all_lengths) + 1)))


def export_array_record(shards: Sequence[Shard], path: Path) -> int:
    """Writes one record of little-endian ids per document; returns the number of records. Shards must share a dtype."""
    types = sorted({shard.header["dtype"] for shard in shards})
    if len(types) > 1:
        raise BadInput(f"{path} cannot contain shards of {' and '.join(types)}; write each dtype to a separate file")
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
    """Yields all records in order. Raises BadInput naming the file if reading fails."""
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
                    raise BadInput(f"only {start + len(records):,} of {total:,} records can be read")
                yield from records
        finally:
            reader.close()
    except (RuntimeError, IndexError, ValueError) as error:
        raise BadInput(f"{path} is not a complete ArrayRecord file: {error}") from None


def array_record_shard(
    file: SourceFile, dtype: str, eos_id: int | None, vocab_size: int, cfg: DataConfig, say: Say = print
) -> Shard:
    """Opens an ArrayRecord file of ids as a cached shard. Raises BadInput for damaged files and invalid ids."""
    if eos_id is None:
        raise BadInput(f"{file.path} requires an end-of-document id; set data.eos_id or data.tokenizer")
    key = {"array record": [*file, *size_and_mtime(file.path)], "dtype": dtype, "eos_id": eos_id, "vocab": vocab_size}
    make = functools.partial(import_array_record, file, dtype=dtype, vocab_size=vocab_size, eos_id=eos_id)
    return cached_shard(cfg, key, make, say)


def import_array_record(file: SourceFile, folder: Path, *, dtype: str, vocab_size: int, eos_id: int) -> None:
    """Converts an ArrayRecord file of ids to a shard whose documents end with eos_id. Raises BadInput if invalid."""
    itemsize = np.dtype(dtype).itemsize
    writer = ShardWriter(folder, NAME, vocab_size=vocab_size, eos_id=eos_id, sources=[file.source])
    try:
        for number, record in enumerate(read_records(Path(file.path))):
            location = f"{file.path}: record {number:,}"
            if len(record) % itemsize:
                raise BadInput(f"{location} has {len(record):,} bytes, which is not a multiple of the size of {dtype}")
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
