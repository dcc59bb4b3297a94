"""Writes token shards (see shards.py) with a lineage, a Parquet file with the origin of each document.

file      dictionary<string>  file name, relative to the fixed part of the source's glob
offset    int64               start in the uncompressed file, as byte offset, row number or record number
id        string              id of the document in the file, or empty; likewise url, licence and language
score.X   float32             a column per score of a preparation stage; null for documents without this score
"""

import array
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from jaxscale.runtime.data.shards import FORMAT, SUFFIXES, VERSION, encode_header
from jaxscale.system.digest import READ_BYTES
from jaxscale.system.exits import BadInput

if TYPE_CHECKING:
    import pyarrow

    from jaxscale.runtime.text.document import Document

LINEAGE_TEXTS = ("id", "url", "licence", "language")
LINEAGE_COLUMNS = ("file", "offset", *LINEAGE_TEXTS)
ROW_GROUP = 1 << 13  # lineage rows that are read together, about 600 kB


def dtype_for(largest_id: int) -> np.dtype:
    """Returns little-endian uint16 if all ids up to `largest_id` fit, else uint32."""
    return np.dtype("<u2") if largest_id <= np.iinfo(np.uint16).max else np.dtype("<u4")


class ShardWriter:
    """Appends documents to NAME.bin; `finish` writes the other files. A call that raises adds no documents."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        vocab_size: int,
        eos_id: int | None,
        sources: Sequence[str],
        trained: bool = False,
    ):
        """eos_id: None to append no end tokens. trained: write the loss mask even if all values are 1."""
        if eos_id is not None and not 0 <= eos_id < vocab_size:
            raise BadInput(f"the end token {eos_id} is outside the vocabulary of {vocab_size:,} ids")
        self._base, self._dtype, self._vocab_size = Path(folder) / name, dtype_for(vocab_size - 1), vocab_size
        self._eos_id, self._sources = eos_id, list(sources)
        self._bin = open(f"{self._base}.bin", "wb")  # noqa: SIM115 - closed by finish
        self._loss_mask: BinaryIO | None = None
        self._sha256, self._loss_mask_sha256 = hashlib.sha256(), hashlib.sha256()
        self._ends, self._document_sources = array.array("q", [0]), array.array("H")
        self._max_id = eos_id or 0
        if trained:
            self._write_loss_mask(np.zeros(0, np.uint8))

    def _write_loss_mask(self, loss_mask: np.ndarray) -> None:
        """Appends to the loss mask. The first call creates the mask, with 1 for all previous tokens."""
        if self._loss_mask is None:
            self._loss_mask = open(f"{self._base}.trained", "wb")  # noqa: SIM115
            for start in range(0, self.num_tokens, READ_BYTES):
                self._write_loss_mask(np.ones(min(READ_BYTES, self.num_tokens - start), np.uint8))
        self._loss_mask.write(loss_mask.tobytes())
        self._loss_mask_sha256.update(loss_mask.tobytes())

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens added so far, including end tokens."""
        return self._ends[-1]

    @property
    def num_documents(self) -> int:
        """Returns the number of documents added so far."""
        return len(self._document_sources)

    def add(self, ids: np.ndarray, source: str, trained: np.ndarray | None = None, *, is_whole: bool = False) -> None:
        """Appends a document and, unless is_whole, an end token. trained: loss mask, with a value for the end token."""
        if source not in self._sources:
            raise BadInput(f"{self._base}: source {source!r} is not one of {self._sources}")
        if not is_whole:
            assert self._eos_id is not None, "an end token is appended unless is_whole"
            ids = np.append(ids, self._eos_id)
        self.add_block(ids, [len(ids)], [self._sources.index(source)], trained, is_whole=is_whole)

    def add_block(
        self,
        ids: np.ndarray,
        lengths: ArrayLike,
        sources: ArrayLike,
        trained: np.ndarray | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        """Appends documents with one write. Raises BadInput for invalid ids, lengths or source numbers.

        ids: concatenated documents. trained: bool[ids] loss mask; None: all True. is_whole: allow missing end tokens.
        """
        ids, lengths, sources = np.asarray(ids), np.asarray(lengths, np.int64), np.asarray(sources, np.int64)
        if ids.ndim != 1 or lengths.ndim != 1 or (lengths < 1).any() or int(lengths.sum()) != len(ids):
            raise BadInput(f"{self._base}: the lengths of {len(lengths):,} documents do not sum to {len(ids):,} ids")
        if len(sources) != len(lengths) or (sources >= len(self._sources)).any() or (sources < 0).any():
            raise BadInput(
                f"{self._base}: {len(sources):,} source numbers must be {len(lengths):,} indices of {self._sources}"
            )
        if not len(lengths):
            return
        ends, largest = np.cumsum(lengths), int(ids.max())
        if largest >= self._vocab_size or (ids.dtype.kind != "u" and int(ids.min()) < 0):
            place = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
            document = self.num_documents + int(ends.searchsorted(place, side="right"))
            raise BadInput(
                f"token id {int(ids[place])} in document {document:,} of {self._base}.bin is outside the "
                f"vocabulary of {self._vocab_size:,} ids; the text was encoded with a different tokenizer"
            )
        if not is_whole and not (ids[ends - 1] == self._eos_id).all():
            raise BadInput(f"{self._base}: a document does not end with the end token {self._eos_id}")
        content = np.ascontiguousarray(ids, self._dtype)
        self._bin.write(content.data)
        self._sha256.update(content.data)
        if trained is not None or self._loss_mask:
            self._write_loss_mask(np.ones(len(ids), np.uint8) if trained is None else np.asarray(trained, np.uint8))
        self._max_id = max(self._max_id, largest)
        self._ends.frombytes((ends + self._ends[-1]).tobytes())
        self._document_sources.frombytes(sources.astype(np.uint16).tobytes())

    def finish(
        self, token_bytes: np.ndarray | None, header: dict[str, Any], lineage: "pyarrow.Table | None" = None
    ) -> None:
        """Writes and syncs the index and header. header: additional entries. lineage: table, one row per document."""
        sums = {"bin": self._sha256.hexdigest()}
        if self._loss_mask:
            sums["trained"] = self._loss_mask_sha256.hexdigest()
        for file in filter(None, (self._bin, self._loss_mask)):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        about = {"dtype": self._dtype.name, "num_tokens": self._ends[-1], "max_id": self._max_id}
        offsets, source_ids = np.array(self._ends, "<i8"), np.array(self._document_sources, "<u2")
        write_index(self._base, offsets, source_ids, token_bytes, sums, self._sources, {**about, **header}, lineage)

    def abandon(self) -> None:
        """Closes the files without finishing the shard."""
        for file in filter(None, (self._bin, self._loss_mask)):
            file.close()


def write_index(
    base: Path,
    offsets: np.ndarray,
    source_ids: np.ndarray,
    token_bytes: np.ndarray | None,
    sums: dict[str, str],
    sources: Sequence[str],
    header: dict[str, Any],
    lineage: "pyarrow.Table | None" = None,
) -> None:
    """Writes the index files of a shard, then its header. sums: {part: sha256} of the files already written."""
    contents = {"idx": offsets.tobytes(), "src": source_ids.tobytes()}
    if token_bytes is not None:
        buffer = io.BytesIO()
        np.save(buffer, token_bytes.astype("<i4"), allow_pickle=False)
        contents["token_bytes"] = buffer.getvalue()
    if lineage is not None:
        contents["docs"] = lineage_bytes(lineage, len(source_ids))
    for name, content in contents.items():
        sums = {**sums, name: hashlib.sha256(content).hexdigest()}
        write_synced(Path(f"{base}{SUFFIXES[name]}"), content)
    about = {"bin": f"{base.name}.bin", "num_documents": len(source_ids), "sources": list(sources), "sha256": sums}
    write_synced(Path(f"{base}.json"), encode_header({"format": FORMAT, "version": VERSION, **about, **header}))


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and syncs it to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def escape_non_utf8(name: str) -> str:
    """Escapes the bytes of a name that are not UTF-8, as on_one_line() does."""
    return name.encode(errors="backslashreplace").decode()


def lineage_table(documents: Sequence["Document"]) -> "pyarrow.Table":
    """Returns the lineage table of the documents, in order."""
    import pyarrow

    files = [escape_non_utf8(doc.file) for doc in documents]
    columns: dict[str, Any] = {"file": pyarrow.array(files, pyarrow.string())}
    columns["offset"] = pyarrow.array([doc.offset for doc in documents], pyarrow.int64())
    for name in LINEAGE_TEXTS:
        columns[name] = pyarrow.array([getattr(doc, name) for doc in documents], pyarrow.string())
    scores = [dict(doc.scores) for doc in documents]
    for name in sorted(set().union(*scores)):
        columns[f"score.{name}"] = pyarrow.array([score.get(name) for score in scores], pyarrow.float32())
    return canonical(pyarrow.table(columns))


def join_lineages(tables: Sequence["pyarrow.Table"]) -> "pyarrow.Table":
    """Concatenates one or more lineage tables."""
    import pyarrow

    return pyarrow.concat_tables(tables, promote_options="default").unify_dictionaries()


def canonical(table: "pyarrow.Table") -> "pyarrow.Table":
    """Returns the table with canonical column order, types and chunks. Raises BadInput for missing or wrong columns."""
    import pyarrow

    names = table.column_names
    if missing := [name for name in LINEAGE_COLUMNS if name not in names]:
        raise BadInput(f"the lineage table lacks the columns {missing}; it has only {names}")
    if len(set(names)) != len(names):
        raise BadInput(f"the lineage table has duplicate columns: {names}")
    kinds = {"file": pyarrow.string(), "offset": pyarrow.int64(), **dict.fromkeys(LINEAGE_TEXTS, pyarrow.string())}
    columns = {}
    for name in [*LINEAGE_COLUMNS, *sorted(set(names) - set(LINEAGE_COLUMNS))]:
        kind = kinds.get(name, pyarrow.float32())
        try:
            column = table[name].cast(kind)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise BadInput(f"lineage column {name!r} has type {table[name].type}, not {kind}: {error}") from None
        # encoded again, so that dictionary indices are in the order of first occurrence
        columns[name] = column.combine_chunks().dictionary_encode() if name == "file" else column.combine_chunks()
    return pyarrow.table(columns)


def lineage_bytes(table: "pyarrow.Table", documents: int) -> bytes:
    """Returns the table as Parquet. A pyarrow version writes equal rows as equal bytes. Raises BadInput if invalid."""
    import pyarrow.parquet

    if table.num_rows != documents:
        raise BadInput(f"the lineage table has {table.num_rows:,} rows for {documents:,} documents")
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        canonical(table), buffer, row_group_size=ROW_GROUP, compression="zstd", compression_level=3
    )
    return buffer.getvalue()
