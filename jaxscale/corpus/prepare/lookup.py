"""What the tasks of a preparation look up in its work folder, so that a task is a few numbers and no list of paths.

    work/recipe.json                            the settings
    work/files.arrow                            path, name and source of each file of the input
    work/pieces.npy                             int64[pieces, 3]: a file's number, and the part of it from begin to end
    work/pass0/000/000/000000012.done.json      piece 12 of the first pass is finished: its blocks, and what it counted
    work/pass0/000/000/000000012-000003.arrow   its fourth block
    work/pass0/blocks.npy                       int64[blocks, ...]: see Blocks

All of it is written before a task asks for it, and is a function of the recipe and the input, which name the folder. No
folder holds more than some thousand files: NEAR blocks of each of MANY pieces, and the other blocks of one piece apart.
"""

import functools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from jaxscale import schema
from jaxscale.corpus.prepare.blocks import read_table, write_table
from jaxscale.corpus.prepare.config import JOINS, PrepareConfig
from jaxscale.corpus.prepare.join import open_array, save_whole
from jaxscale.data.verified import remove
from jaxscale.system.paths import read_json, write_text_atomic
from jaxscale.text.sources.files import SourceFile
from jaxscale.text.sources.part import Part

MANY, NEAR, APART = 128, 8, 1024
TOKENS, COLUMNS = 3, 4  # of blocks.npy: the column of tokens, and how many there are before those of joins


class Pass(NamedTuple):
    """Once over all documents: `stages` one after the other, then what the next pass needs."""

    stages: tuple[str, ...]
    ends: Literal["joins", "sample", "tokens"]  # sketches for joins; documents a tokenizer is trained on; token ids
    joins: tuple[str, ...] = ()


def plan_passes(stages: Sequence[str], *, train_tokenizer: bool) -> list[Pass]:
    """The passes for stages in the recipe's order. Joins of whole documents that stand together see the same ones."""
    passes: list[Pass] = []
    waiting: list[str] = []
    joins: list[str] = []
    for name in [*stages, ""]:
        alone = "line_dedup" in (name, *joins)  # else a line could be cut for a copy in a document that is dropped
        if joins and (name not in JOINS or alone):
            passes.append(Pass(tuple(waiting), "joins", tuple(joins)))
            waiting, joins = [], []
        if name in JOINS:
            joins.append(name)
        elif name:
            waiting.append(name)
    if not train_tokenizer:
        return [*passes, Pass(tuple(waiting), "tokens")]
    return [*passes, Pass(tuple(waiting), "sample"), Pass((), "tokens")]


class Pieces(Sequence[tuple[SourceFile, Part]]):
    """The pieces of the input, in 24 bytes each beside the files."""

    def __init__(self, files: Sequence[SourceFile], rows: np.ndarray):
        self.files, self.rows = files, rows  # int64[pieces, 3]: number of the file, begin, end

    @classmethod
    def of(cls, files: Sequence[SourceFile], parts: Iterable[Iterable[Part]]) -> "Pieces":
        """The parts of each file, in their order."""
        numbered = (number for i, own in enumerate(parts) for part in own for number in (i, part.begin, part.end))
        return cls(files, np.fromiter(numbered, np.int64).reshape(-1, 3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> tuple[SourceFile, Part]:
        file, begin, end = self.rows[number].tolist()
        return self.files[file], Part(begin, end)


def write_input(folder: pathlib.Path, cfg: PrepareConfig, pieces: Pieces) -> None:
    """Writes what tasks look up of the recipe and the input."""
    for name in ("recipe.json", "files.arrow", "pieces.npy"):
        remove(folder / name)  # of a process that was killed, and perhaps damaged since
    write_text_atomic(folder / "recipe.json", json.dumps(schema.to_dict(cfg), sort_keys=True))
    columns = {name: [getattr(file, name) for file in pieces.files] for name in SourceFile._fields}
    texts = {
        name: pa.array([os.fsencode(text) for text in column], pa.large_binary()) for name, column in columns.items()
    }
    write_table(folder / "files.arrow", pa.table(texts), packed=False)
    save_whole(folder / "pieces.npy", pieces.rows)


@functools.lru_cache(maxsize=4)
def recipe_of(folder: str) -> PrepareConfig:
    """The settings of the preparation in a work folder."""
    return schema.from_dict(PrepareConfig, read_json(pathlib.Path(folder) / "recipe.json"))


@functools.lru_cache(maxsize=4)
def passes_of(folder: str) -> list[Pass]:
    """The passes of the preparation in a work folder."""
    cfg = recipe_of(folder)
    return plan_passes(cfg.stages, train_tokenizer=cfg.tokenizer.is_trained)


@functools.lru_cache(maxsize=4)
def input_of(folder: str) -> tuple[pa.Table, np.ndarray]:
    """(files, pieces), memory-mapped."""
    return read_table(pathlib.Path(folder) / "files.arrow"), open_array(pathlib.Path(folder) / "pieces.npy")


def piece_of(folder: str, number: int) -> tuple[SourceFile, Part]:
    """A piece of the input."""
    files, pieces = input_of(folder)
    file, begin, end = pieces[number].tolist()
    (row,) = files.slice(file, 1).to_pylist()
    return SourceFile(*(os.fsdecode(row[name]) for name in SourceFile._fields)), Part(begin, end)


def pass_folder(folder: str, number: int) -> pathlib.Path:
    """Where everything of a pass lies."""
    return pathlib.Path(folder) / f"pass{number}"


def done_path(folder: str, number: int, piece: int) -> pathlib.Path:
    """Where a piece's done file lies, beside its first blocks."""
    group = piece // MANY
    return pass_folder(folder, number) / f"{group // MANY:03d}" / f"{group % MANY:03d}" / f"{piece:09d}.done.json"


def block_base(folder: str, number: int, piece: int, place: int) -> pathlib.Path:
    """Where the files of a block lie, without an ending. place: of the block in its piece."""
    near = done_path(folder, number, piece).parent
    return (near if place < NEAR else near / f"{piece:09d}.{place // APART}") / f"{piece:09d}-{place:06d}"


class Blocks(Sequence[str]):
    """The blocks of a pass in the order of the input, which is their number: where each lies, without an ending.

    rows: int64[blocks, COLUMNS and one for each join of the pass]: piece, place in the piece, documents, tokens; and
    how many (key, item) its sketch for the join holds.
    """

    def __init__(self, folder: str, number: int, rows: np.ndarray):
        self.folder, self.number, self.rows = folder, number, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, block: Any) -> str:
        if not 0 <= block < len(self.rows):
            raise IndexError(block)
        piece, place = self.rows[block, :2].tolist()
        return str(block_base(self.folder, self.number, piece, place))

    def total(self, column: int) -> int:
        """The sum of a column."""
        return int(self.rows[:, column].sum())


def write_blocks(folder: str, number: int, found: np.ndarray) -> Blocks:
    """The blocks of a pass, found in any order, after they are written down for tasks."""
    rows = found[np.lexsort((found[:, 1], found[:, 0]))]
    remove(pass_folder(folder, number) / "blocks.npy")  # as above
    save_whole(pass_folder(folder, number) / "blocks.npy", rows)
    return Blocks(folder, number, rows)


@functools.lru_cache(maxsize=4)
def blocks_of(folder: str, number: int) -> Blocks:
    """The blocks of a pass that is finished, memory-mapped."""
    return Blocks(folder, number, open_array(pass_folder(folder, number) / "blocks.npy"))


def numbered(folder: str | os.PathLike[str], number: int, ending: str = "") -> pathlib.Path:
    """Where a result lies that has a number alone: at most APART of them, and their done files, in a folder."""
    return pathlib.Path(folder) / f"{number // APART:06d}" / f"{number:09d}{ending}"


class Numbered(Sequence[Any]):
    """Calls that differ in their field `number` alone: 0, 1, 2, ... `length` - 1."""

    def __init__(self, call: Any, length: int):
        self.call, self.length = call, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.length:
            raise IndexError(number)
        return self.call._replace(number=number)

    def __iter__(self) -> Iterator[Any]:
        return (self.call._replace(number=number) for number in range(self.length))
