"""Blocks of documents on disk between passes, as Arrow files written atomically, and completion markers.

A `done` file lists the sha256 of itself and of every file that a task wrote. Whoever is killed leaves no such file, and
what has been damaged since is made again.
"""

import json
import mmap
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from jaxscale.data.verified import hashed, remove
from jaxscale.system.digest import file_sha256, json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json
from jaxscale.system.paths import read_bytes, write_bytes_atomic
from jaxscale.text.document import Document

OBJECT_BYTES = 512  # of a document beside its texts, about
MOST_DOCUMENTS = 1 << 19  # of a block, whose objects are in memory
TEXTS = ("text", "source", "file", "id", "url", "licence", "language")


def cut(documents: Iterable[Document], block_bytes: int) -> Iterator[list[Document]]:
    """The documents in lists of about block_bytes of text, at least one in each; the cuts depend on them alone."""
    block: list[Document] = []
    held = 0
    for document in documents:
        block.append(document)
        held += document.size + len(document.id) + len(document.url) + len(document.licence) + OBJECT_BYTES
        held += len(document.ids)
        if held >= block_bytes or len(block) == MOST_DOCUMENTS:
            yield block
            block, held = [], 0
    if block:
        yield block


def to_table(documents: Sequence[Document], *, with_text: bool = True) -> pa.Table:
    """The documents as columns: their fields, and a float32 column for each score."""
    columns: dict[str, Any] = {}
    if with_text:
        columns["text"] = pa.array([clean(document.text) for document in documents], pa.large_string())
        if any(document.ids for document in documents):
            columns["ids"] = pa.array([document.ids for document in documents], pa.large_binary())
    for name in TEXTS[1:]:
        words = [getattr(document, name) for document in documents]
        columns[name] = pa.array(words if "".join(words).isascii() else [clean(word) for word in words], pa.string())
    columns["offset"] = pa.array([document.offset for document in documents], pa.int64())
    scores = [dict(document.scores) for document in documents]
    for name in sorted({name for held in scores for name in held}):
        columns[f"score.{name}"] = pa.array([held.get(name) for held in scores], pa.float32())
    return pa.table(columns)


def from_table(table: pa.Table) -> list[Document]:
    """The inverse of to_table; scores come back as float32."""
    names = [name for name in table.column_names if name.startswith("score.")]
    held = [table.column(name).to_pylist() for name in names]
    labels = [name.removeprefix("score.") for name in names]
    columns = (*TEXTS, "offset", *(["ids"] if "ids" in table.column_names else []))
    fields = [table.column(name).to_pylist() for name in columns]
    return [
        Document(
            **dict(zip(columns, values)),
            scores=tuple((label, column[i]) for label, column in zip(labels, held) if column[i] is not None),
        )
        for i, values in enumerate(zip(*fields))
    ]


def clean(text: str) -> str:
    """The text without what UTF-8 cannot spell: half a surrogate pair in a name becomes a question mark."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def write_table(path: pathlib.Path, table: pa.Table, *, packed: bool = True) -> None:
    """Writes the table as an Arrow file, whole or not at all. packed: smaller, but no part of it is read alone."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4" if packed else None)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    write_bytes_atomic(path, sink.getvalue())


def read_table(path: pathlib.Path) -> pa.Table:
    """The table of an Arrow file; of one that is not packed, memory-mapped, only what is looked at is read."""
    with open(path, "rb") as file:
        return pa.ipc.open_file(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))).read_all()


def document_at(base: str, place: int) -> Document:
    """One document of a block."""
    return from_table(read_table(pathlib.Path(f"{base}.arrow")).slice(place, 1))[0]


def mark_done(
    path: pathlib.Path, result: dict[str, Any], files: Iterable[pathlib.Path], folder: pathlib.Path | None = None
) -> None:
    """Writes the done file of a piece of work, which has left these files below a folder, its own unless given."""
    folder = folder or path.parent
    plain = {"result": result, "files": {str(file.relative_to(folder)): file_sha256(str(file)) for file in files}}
    write_bytes_atomic(path, json.dumps({**plain, "sha256": json_sha256(plain)}).encode())


def read_done(path: pathlib.Path, *folders: pathlib.Path) -> dict[str, Any] | None:
    """The result in a done file; None if it is missing, or if it or one of its files has changed since.

    folders: where the files may lie; that of the done file unless given. What is damaged is removed, to be made again.
    """
    try:
        found = parse_json(read_bytes(path))
    except FileNotFoundError:
        return None
    except BadInput:
        found = None
    own = found.pop("sha256", None) if isinstance(found, dict) else None
    if not isinstance(found, dict) or own != json_sha256(found):
        remove(path)
        return None
    missing = dict(found["files"])
    for folder in folders or (path.parent,):
        bad = hashed({str(folder / name): sha256 for name, sha256 in missing.items()})
        missing = {name: sha256 for name, sha256 in missing.items() if str(folder / name) in bad}
    if not missing:
        return found["result"]
    for name in missing:
        remove((folders or (path.parent,))[0] / name)
    remove(path)
    return None
