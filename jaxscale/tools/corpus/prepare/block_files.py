"""Blocks of documents on disk between passes, as Arrow files written atomically, and completion markers.

A `done` file lists its own sha256 and that of every file that a task wrote. A killed task leaves no done file; damaged
files are made again.
"""

import json
import mmap
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from jaxscale.runtime.data.verified import hash_mismatches, remove
from jaxscale.runtime.text.document import Document
from jaxscale.system.digest import file_sha256, json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json
from jaxscale.system.paths import read_bytes, write_bytes_atomic

OBJECT_BYTES = 512  # of memory per document in addition to its texts, approximately
MAX_DOCUMENTS = 1 << 19  # in a block, whose Python objects are in memory
TEXTS = ("text", "source", "file", "id", "url", "licence", "language")


def group_blocks(documents: Iterable[Document], block_bytes: int) -> Iterator[list[Document]]:
    """Yields lists of documents with about block_bytes of text, at least one document each; deterministic."""
    block: list[Document] = []
    size = 0
    for document in documents:
        block.append(document)
        size += document.size + len(document.id) + len(document.url) + len(document.licence) + OBJECT_BYTES
        size += len(document.ids)
        if size >= block_bytes or len(block) == MAX_DOCUMENTS:
            yield block
            block, size = [], 0
    if block:
        yield block


def to_table(documents: Sequence[Document], *, with_text: bool = True) -> pa.Table:
    """Returns a table of the documents' fields, with a float32 column for each score."""
    columns: dict[str, Any] = {}
    if with_text:
        columns["text"] = pa.array([replace_surrogates(document.text) for document in documents], pa.large_string())
        if any(document.ids for document in documents):
            columns["ids"] = pa.array([document.ids for document in documents], pa.large_binary())
    for name in TEXTS[1:]:
        words = [getattr(document, name) for document in documents]
        columns[name] = pa.array(
            words if "".join(words).isascii() else [replace_surrogates(word) for word in words], pa.string()
        )
    columns["offset"] = pa.array([document.offset for document in documents], pa.int64())
    scores = [dict(document.scores) for document in documents]
    for name in sorted({name for document_scores in scores for name in document_scores}):
        columns[f"score.{name}"] = pa.array([document_scores.get(name) for document_scores in scores], pa.float32())
    return pa.table(columns)


def from_table(table: pa.Table) -> list[Document]:
    """Returns the inverse of to_table; scores come back as float32."""
    names = [name for name in table.column_names if name.startswith("score.")]
    scores = [table.column(name).to_pylist() for name in names]
    labels = [name.removeprefix("score.") for name in names]
    columns = (*TEXTS, "offset", *(["ids"] if "ids" in table.column_names else []))
    fields = [table.column(name).to_pylist() for name in columns]
    return [
        Document(
            **dict(zip(columns, values)),
            scores=tuple((label, column[i]) for label, column in zip(labels, scores) if column[i] is not None),
        )
        for i, values in enumerate(zip(*fields))
    ]


def replace_surrogates(text: str) -> str:
    """Returns the text with lone surrogates, which UTF-8 cannot encode, as question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def write_table(path: pathlib.Path, table: pa.Table, *, packed: bool = True) -> None:
    """Writes an Arrow file atomically. packed: compressed, so that readers cannot map a part of it."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4" if packed else None)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    write_bytes_atomic(path, sink.getvalue())


def read_table(path: pathlib.Path) -> pa.Table:
    """Returns the table of an Arrow file, memory-mapped; without compression only the parts in use are read."""
    with open(path, "rb") as file:
        return pa.ipc.open_file(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))).read_all()


def document_at(base: str, place: int) -> Document:
    """Returns one document of a block."""
    return from_table(read_table(pathlib.Path(f"{base}.arrow")).slice(place, 1))[0]


def mark_done(
    path: pathlib.Path, result: dict[str, Any], files: Iterable[pathlib.Path], folder: pathlib.Path | None = None
) -> None:
    """Writes the done file of a task. files: its outputs, below `folder` (default: the done file's folder)."""
    folder = folder or path.parent
    plain = {"result": result, "files": {str(file.relative_to(folder)): file_sha256(str(file)) for file in files}}
    write_bytes_atomic(path, json.dumps({**plain, "sha256": json_sha256(plain)}).encode())


def read_done(path: pathlib.Path, *folders: pathlib.Path) -> dict[str, Any] | None:
    """Returns the result in a done file; None if it is missing, or if it or one of its files has changed.

    folders: where the files may be (default: the done file's folder). Damaged files are deleted, to be made again.
    """
    try:
        found = parse_json(read_bytes(path))
    except FileNotFoundError:
        return None
    except BadInput:
        found = None
    recorded = found.pop("sha256", None) if isinstance(found, dict) else None
    if not isinstance(found, dict) or recorded != json_sha256(found):
        remove(path)
        return None
    missing = dict(found["files"])
    for folder in folders or (path.parent,):
        bad = hash_mismatches({str(folder / name): sha256 for name, sha256 in missing.items()})
        missing = {name: sha256 for name, sha256 in missing.items() if str(folder / name) in bad}
    if not missing:
        return found["result"]
    for name in missing:
        remove((folders or (path.parent,))[0] / name)
    remove(path)
    return None
