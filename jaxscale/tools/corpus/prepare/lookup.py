"""Layout of the work folder: tasks look up recipe, input and blocks by number, so a task is a few integers.

    work/recipe.json                            the settings
    work/files.arrow                            path, name and source of each file of the input
    work/pieces.npy                             int64[pieces, 3]: index of the file, begin and end of the part
    work/pass0/000/000/000000012.done.json      piece 12 of the first pass is finished: its blocks and counts
    work/pass0/000/000/000000012-000003.arrow   its fourth block
    work/pass0/blocks.npy                       int64[blocks, ...]: see Blocks

Tasks read these files after they are complete; their content is a function of the recipe and the input. No folder holds
more than a few thousand files: FIRST_BLOCKS blocks of each of PIECES_IN_FOLDER pieces; a piece's other blocks have
separate folders.
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
from jaxscale.runtime.data.verified import remove
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.part import Part
from jaxscale.system.paths import read_json, write_text_atomic
from jaxscale.tools.corpus.prepare.block_files import read_table, write_table
from jaxscale.tools.corpus.prepare.config import JOINS, PrepareConfig
from jaxscale.tools.corpus.prepare.join import open_array, save_array

PIECES_IN_FOLDER, FIRST_BLOCKS, FOLDER_FILES = 128, 8, 1024
TOKENS, COLUMNS = 3, 4  # of blocks.npy: column of token counts; number of columns before those of joins


class Pass(NamedTuple):
    """One pass over all documents: `stages` in order, then the output that `ends` names."""

    stages: tuple[str, ...]
    ends: Literal["joins", "sample", "tokens"]  # sketches for joins; documents to train a tokenizer on; token ids
    joins: tuple[str, ...] = ()


def plan_passes(stages: Sequence[str], *, train_tokenizer: bool) -> list[Pass]:
    """Returns the passes for the recipe's stages in order. Adjacent joins of whole documents share a pass."""
    passes: list[Pass] = []
    stages_of_pass: list[str] = []
    joins: list[str] = []
    for name in [*stages, ""]:
        is_line_join = "line_dedup" in (name, *joins)  # else a line could be cut for a copy in a dropped document
        if joins and (name not in JOINS or is_line_join):
            passes.append(Pass(tuple(stages_of_pass), "joins", tuple(joins)))
            stages_of_pass, joins = [], []
        if name in JOINS:
            joins.append(name)
        elif name:
            stages_of_pass.append(name)
    if not train_tokenizer:
        return [*passes, Pass(tuple(stages_of_pass), "tokens")]
    return [*passes, Pass(tuple(stages_of_pass), "sample"), Pass((), "tokens")]


class Pieces(Sequence[tuple[SourceFile, Part]]):
    """Pieces of the input, stored in 24 bytes each."""

    def __init__(self, files: Sequence[SourceFile], rows: np.ndarray):
        self.files, self.rows = files, rows  # int64[pieces, 3]: index of the file, begin, end

    @classmethod
    def of(cls, files: Sequence[SourceFile], parts: Iterable[Iterable[Part]]) -> "Pieces":
        """Returns the parts of all files in order."""
        numbers = (
            number for i, file_parts in enumerate(parts) for part in file_parts for number in (i, part.begin, part.end)
        )
        return cls(files, np.fromiter(numbers, np.int64).reshape(-1, 3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> tuple[SourceFile, Part]:
        file, begin, end = self.rows[number].tolist()
        return self.files[file], Part(begin, end)


def write_input(folder: pathlib.Path, cfg: PrepareConfig, pieces: Pieces) -> None:
    """Writes the recipe and input tables that tasks read."""
    for name in ("recipe.json", "files.arrow", "pieces.npy"):
        remove(folder / name)  # of a process that was killed; may be damaged
    write_text_atomic(folder / "recipe.json", json.dumps(schema.to_dict(cfg), sort_keys=True))
    columns = {name: [getattr(file, name) for file in pieces.files] for name in SourceFile._fields}
    texts = {
        name: pa.array([os.fsencode(text) for text in column], pa.large_binary()) for name, column in columns.items()
    }
    write_table(folder / "files.arrow", pa.table(texts), packed=False)
    save_array(folder / "pieces.npy", pieces.rows)


@functools.lru_cache(maxsize=4)
def recipe_of(folder: str) -> PrepareConfig:
    """Returns the settings in a work folder."""
    return schema.from_dict(PrepareConfig, read_json(pathlib.Path(folder) / "recipe.json"))


@functools.lru_cache(maxsize=4)
def passes_of(folder: str) -> list[Pass]:
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
    """Returns the path of a piece's done file, in the folder of its first blocks."""
    group = piece // PIECES_IN_FOLDER
    parent = pass_folder(folder, number) / f"{group // PIECES_IN_FOLDER:03d}" / f"{group % PIECES_IN_FOLDER:03d}"
    return parent / f"{piece:09d}.done.json"


def block_base(folder: str, number: int, piece: int, index: int) -> pathlib.Path:
    """Returns the path of a block without its suffix. index: of the block in its piece."""
    parent = done_path(folder, number, piece).parent
    if index >= FIRST_BLOCKS:
        parent /= f"{piece:09d}.{index // FOLDER_FILES}"
    return parent / f"{piece:09d}-{index:06d}"


class Blocks(Sequence[str]):
    """Path prefixes of the blocks of a pass, in input order; the position is the block's number.

    rows: int64[blocks, COLUMNS + joins]: piece, index in the piece, documents, tokens, and for each join of the pass
    the number of (key, item) in the block's sketch.
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


def write_blocks(folder: str, number: int, found: np.ndarray) -> Blocks:
    """Saves the blocks of a pass, found in any order, for its tasks, and returns them."""
    rows = found[np.lexsort((found[:, 1], found[:, 0]))]
    remove(pass_folder(folder, number) / "blocks.npy")  # may be damaged, see write_input
    save_array(pass_folder(folder, number) / "blocks.npy", rows)
    return Blocks(folder, number, rows)


@functools.lru_cache(maxsize=4)
def blocks_of(folder: str, number: int) -> Blocks:
    """Returns the blocks of a finished pass, memory-mapped."""
    return Blocks(folder, number, open_array(pass_folder(folder, number) / "blocks.npy"))


def numbered_path(folder: str | os.PathLike[str], number: int, ending: str = "") -> pathlib.Path:
    """Returns the path of a result named by a number, with at most FOLDER_FILES results in a folder."""
    return pathlib.Path(folder) / f"{number // FOLDER_FILES:06d}" / f"{number:09d}{ending}"


class NumberedTasks(Sequence[Any]):
    """Tasks that differ only in their field `number`: 0, 1, ..., `length` - 1."""

    def __init__(self, task: Any, length: int):
        self.task, self.length = task, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.length:
            raise IndexError(number)
        return self.task._replace(number=number)

    def __iter__(self) -> Iterator[Any]:
        return (self.task._replace(number=number) for number in range(self.length))
