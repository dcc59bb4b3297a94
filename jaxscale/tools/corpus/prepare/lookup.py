"""Layout of the work folder. Tasks look up the recipe, input and blocks by number, so a task is a few integers.

    work/recipe.json                            settings
    work/files.arrow                            path, name and source of each input file
    work/pieces.npy                             int64[pieces, 3]: file index, begin and end of the part
    work/pass0/000/000/000000012.done.json      done file of piece 12 in the first pass: its blocks and counts
    work/pass0/000/000/000000012-000003.arrow   fourth block of piece 12
    work/pass0/blocks.npy                       int64[blocks, ...]: see PassBlocks

Tasks read only complete files, whose content is a function of the recipe and the input. A folder has at most a few
thousand files: the first FIRST_BLOCKS blocks of each of PIECES_IN_FOLDER pieces. Further blocks of a piece are in
separate folders. A `done` file stores its own sha256 and the sha256 of every file that the task wrote. A killed task
leaves no done file, and damaged files are written again.
"""

import functools
import json
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from jaxscale import schema
from jaxscale.runtime.data.verified import hash_mismatches, remove
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.part import Part
from jaxscale.system.digest import file_sha256, json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json
from jaxscale.system.paths import read_bytes, read_json, write_bytes_atomic, write_text_atomic
from jaxscale.tools.corpus.prepare.config import JOINS, PrepareConfig
from jaxscale.tools.corpus.prepare.sketches import open_array, save_array

PIECES_IN_FOLDER, FIRST_BLOCKS, FOLDER_FILES = 128, 8, 1024
TOKENS, COLUMNS = 3, 4  # in blocks.npy: column of token counts, and number of columns before those of joins
OBJECT_BYTES = 512  # approximate memory per document, without its texts
MAX_DOCUMENTS = 1 << 19  # maximum number of documents in a block, since their Python objects are in memory
TEXTS = ("text", "source", "file", "id", "url", "licence", "language")


class PreparePass(NamedTuple):
    """One pass over all documents: runs `stages` in order, then writes the output that `ends` selects."""

    stages: tuple[str, ...]
    ends: Literal["joins", "sample", "tokens"]  # sketches for joins; documents for training a tokenizer; token ids
    joins: tuple[str, ...] = ()


def plan_passes(stages: Sequence[str], *, train_tokenizer: bool) -> list[PreparePass]:
    """Returns the passes for the recipe's stages. Consecutive exact and near deduplication share a pass."""
    passes: list[PreparePass] = []
    stages_of_pass: list[str] = []
    joins: list[str] = []
    for name in [*stages, ""]:
        is_line_join = "line_dedup" in (
            name,
            *joins,
        )  # a separate pass, without dropped documents
        if joins and (name not in JOINS or is_line_join):
            passes.append(PreparePass(tuple(stages_of_pass), "joins", tuple(joins)))
            stages_of_pass, joins = [], []
        if name in JOINS:
            joins.append(name)
        elif name:
            stages_of_pass.append(name)
    if not train_tokenizer:
        return [*passes, PreparePass(tuple(stages_of_pass), "tokens")]
    return [*passes, PreparePass(tuple(stages_of_pass), "sample"), PreparePass((), "tokens")]


def write_input(folder: pathlib.Path, cfg: PrepareConfig, files: Sequence[SourceFile], pieces: np.ndarray) -> None:
    """Writes the recipe and the input tables that tasks read."""
    for name in ("recipe.json", "files.arrow", "pieces.npy"):
        remove(folder / name)  # may be damaged if an earlier process was killed
    write_text_atomic(folder / "recipe.json", json.dumps(schema.to_dict(cfg), sort_keys=True))
    columns = {name: [os.fsencode(getattr(file, name)) for file in files] for name in SourceFile._fields}
    table = pa.table({name: pa.array(column, pa.large_binary()) for name, column in columns.items()})
    write_table(folder / "files.arrow", table, packed=False)
    save_array(folder / "pieces.npy", pieces)


@functools.lru_cache(maxsize=4)
def recipe_of(folder: str) -> PrepareConfig:
    """Returns the settings in a work folder."""
    return schema.from_dict(PrepareConfig, read_json(pathlib.Path(folder) / "recipe.json"))


@functools.lru_cache(maxsize=4)
def passes_of(folder: str) -> list[PreparePass]:
    """Returns the passes of the preparation in a work folder."""
    cfg = recipe_of(folder)
    return plan_passes(cfg.stages, train_tokenizer=cfg.tokenizer.is_trained)


@functools.lru_cache(maxsize=4)
def input_of(folder: str) -> tuple[pa.Table, np.ndarray]:
    """Returns (files, pieces), memory-mapped."""
    return read_table(pathlib.Path(folder) / "files.arrow"), open_array(pathlib.Path(folder) / "pieces.npy")


def piece_of(folder: str, number: int) -> tuple[SourceFile, Part]:
    """Returns one piece of the input."""
    files, pieces = input_of(folder)
    file, begin, end = pieces[number].tolist()
    (row,) = files.slice(file, 1).to_pylist()
    return SourceFile(*(os.fsdecode(row[name]) for name in SourceFile._fields)), Part(begin, end)


def pass_folder(folder: str, number: int) -> pathlib.Path:
    """Returns the folder of a pass."""
    return pathlib.Path(folder) / f"pass{number}"


def done_path(folder: str, number: int, piece: int) -> pathlib.Path:
    """Returns the path of the file that marks an input piece as done, in the folder of the piece's first blocks."""
    group = piece // PIECES_IN_FOLDER
    parent = pass_folder(folder, number) / f"{group // PIECES_IN_FOLDER:03d}" / f"{group % PIECES_IN_FOLDER:03d}"
    return parent / f"{piece:09d}.done.json"


def block_base(folder: str, number: int, piece: int, index: int) -> pathlib.Path:
    """Returns the path of a block without its suffix. index: index of the block in its piece."""
    parent = done_path(folder, number, piece).parent
    if index >= FIRST_BLOCKS:
        parent /= f"{piece:09d}.{index // FOLDER_FILES}"
    return parent / f"{piece:09d}-{index:06d}"


class PassBlocks(Sequence[str]):
    """Path prefixes of all blocks of a pass, in input order, indexed by block number.

    rows: int64[blocks, COLUMNS + joins]. The columns are the piece, the index in the piece, the number of documents,
    the number of tokens, and the number of sketch keys for each join of the pass.
    """

    def __init__(self, folder: str, number: int, rows: np.ndarray):
        self.folder, self.number, self.rows = folder, number, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, block: Any) -> str:
        if not 0 <= block < len(self.rows):
            raise IndexError(block)
        piece, index = self.rows[block, :2].tolist()
        return str(block_base(self.folder, self.number, piece, index))

    def total(self, column: int) -> int:
        """Returns the sum of a column."""
        return int(self.rows[:, column].sum())


def write_blocks(folder: str, number: int, found: np.ndarray) -> PassBlocks:
    """Sorts the blocks of a pass in input order, saves them for tasks, and returns them. found: rows in any order."""
    rows = found[np.lexsort((found[:, 1], found[:, 0]))]
    remove(pass_folder(folder, number) / "blocks.npy")  # may be damaged, as in write_input
    save_array(pass_folder(folder, number) / "blocks.npy", rows)
    return PassBlocks(folder, number, rows)


@functools.lru_cache(maxsize=4)
def blocks_of(folder: str, number: int) -> PassBlocks:
    """Returns the blocks of a finished pass, memory-mapped."""
    return PassBlocks(folder, number, open_array(pass_folder(folder, number) / "blocks.npy"))


def numbered_path(folder: str | os.PathLike[str], number: int, ending: str = "") -> pathlib.Path:
    """Returns the path of a numbered result, with at most FOLDER_FILES results per folder."""
    return pathlib.Path(folder) / f"{number // FOLDER_FILES:06d}" / f"{number:09d}{ending}"


def group_blocks(documents: Iterable[Document], block_bytes: int) -> Iterator[list[Document]]:
    """Groups consecutive documents into blocks of about block_bytes. The result is deterministic."""
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
        if not "".join(words).isascii():
            words = list(map(replace_surrogates, words))
        columns[name] = pa.array(words, pa.string())
    columns["offset"] = pa.array([document.offset for document in documents], pa.int64())
    scores = [dict(document.scores) for document in documents]
    for name in sorted({name for document_scores in scores for name in document_scores}):
        columns[f"score.{name}"] = pa.array([document_scores.get(name) for document_scores in scores], pa.float32())
    return pa.table(columns)


def from_table(table: pa.Table) -> list[Document]:
    """Returns the documents of a table written by to_table. Scores are rounded to float32."""
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
    """Returns the text with lone surrogates, which UTF-8 cannot encode, replaced by question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def write_table(path: pathlib.Path, table: pa.Table, *, packed: bool = True) -> None:
    """Writes an Arrow file atomically. packed: compress the file, which can then only be read as a whole."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4" if packed else None)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    write_bytes_atomic(path, sink.getvalue())


def read_table(path: pathlib.Path) -> pa.Table:
    """Returns the table of an Arrow file, memory-mapped. Only the accessed parts of an uncompressed file are read."""
    with open(path, "rb") as file:
        return pa.ipc.open_file(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))).read_all()


def mark_done(
    path: pathlib.Path, result: dict[str, Any], files: Iterable[pathlib.Path], folder: pathlib.Path | None = None
) -> None:
    """Writes the done file of a task. files: output files, in `folder` (default: the folder of the done file)."""
    folder = folder or path.parent
    plain = {"result": result, "files": {str(file.relative_to(folder)): file_sha256(str(file)) for file in files}}
    write_bytes_atomic(path, json.dumps({**plain, "sha256": json_sha256(plain)}).encode())


def read_done(path: pathlib.Path, *folders: pathlib.Path) -> dict[str, Any] | None:
    """Returns the result in a done file, or None if the done file or a file that it lists is missing or damaged."""
    try:
        found = parse_json(read_bytes(path))
    except FileNotFoundError:
        return None
    except BadInput:
        found = None
    folders = folders or (path.parent,)
    if isinstance(found, dict) and found.pop("sha256", None) == json_sha256(found):
        missing = dict(found["files"])
        for folder in folders:
            bad = hash_mismatches({str(folder / name): sha256 for name, sha256 in missing.items()})
            missing = {name: sha256 for name, sha256 in missing.items() if str(folder / name) in bad}
        if not missing:
            return found["result"]
        for name in missing:
            remove(folders[0] / name)
    remove(path)
    return None
