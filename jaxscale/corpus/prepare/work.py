"""One task of a preparation: a part of the input, or a block of the previous pass, through the stages of a pass.

Everything here is a function of its call alone, so that it may run in any process, on any machine, and again. What it
writes is named by the pass, the piece and the block; `done` files are written last, and say what there is.

    work/pass0/000012-00003.arrow            the third block of piece 12: documents after the stages
    work/pass0/000012-00003.near_dedup.*     its sketch for a join
    work/pass1/000012-00003.ids, .arrow      its tokens in shuffled order, and what is known of each document
    work/pass0/000012.done.json              piece 12 is finished: its blocks, and what was counted
"""

import functools
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jaxscale import schema
from jaxscale.corpus.curate.classifier import make_classifier
from jaxscale.corpus.curate.contamination import make_contamination
from jaxscale.corpus.curate.langid import make_language
from jaxscale.corpus.curate.licence import make_licence
from jaxscale.corpus.curate.pii import make_pii
from jaxscale.corpus.curate.quality import make_c4, make_fineweb, make_gopher
from jaxscale.corpus.curate.repair import make_repair
from jaxscale.corpus.curate.repetition import make_repetition
from jaxscale.corpus.curate.substring import make_substring
from jaxscale.corpus.curate.toxicity import make_toxicity
from jaxscale.corpus.curate.urls import make_urls
from jaxscale.corpus.prepare.blocks import cut, from_table, mark_done, read_done, read_table, to_table, write_table
from jaxscale.corpus.prepare.config import JOINS, STAGES, PrepareConfig
from jaxscale.corpus.prepare.dedup import apply_joins, sketch_path, write_sketches
from jaxscale.corpus.prepare.join import signatures_path
from jaxscale.corpus.prepare.tally import Tally
from jaxscale.corpus.prepare.tokens import tokenise_block
from jaxscale.system.foreign import parse_json
from jaxscale.text.document import Document, Stage
from jaxscale.text.sources.files import SourceFile
from jaxscale.text.sources.part import Part
from jaxscale.text.sources.read import read_file

MAKERS: dict[str, Callable[[Any], Stage]] = {
    "url_blocklist": make_urls,
    "repair": make_repair,
    "language": make_language,
    "gopher_repetition": make_repetition,
    "gopher_quality": make_gopher,
    "c4": make_c4,
    "fineweb": make_fineweb,
    "licence": make_licence,
    "toxicity": make_toxicity,
    "classifier": make_classifier,
    "substring": make_substring,
    "decontaminate": make_contamination,
    "pii": make_pii,
}
assert set(MAKERS) == set(STAGES)


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


class Call(NamedTuple):
    """One task."""

    recipe: str  # PrepareConfig as JSON
    folder: str  # of the work
    number: int  # of the pass
    step: Pass
    piece: int
    file: SourceFile | None = None  # first pass: what is read
    part: Part | None = None
    path: str = ""  # later passes: the block whose number among those of the pass before is the piece's
    joined: tuple[str, ...] = ()  # the joins whose findings are applied first


class Block(NamedTuple):
    """A block that a pass has written."""

    path: str  # without an ending; in a done file only its name, since a folder can be written in several ways
    documents: int
    tokens: int = 0
    fertility: Sequence[Any] = ()  # fertility.measure of a sample


def run(call: Call) -> dict[str, Any]:
    """Runs the task unless it is done, and returns the content of its done file."""
    cfg = recipe_of(call.recipe)
    folder = pathlib.Path(call.folder) / f"pass{call.number}"
    done = folder / f"{call.piece:06d}.done.json"
    if (found := read_done(done)) is not None:
        return found | {"was_done": True}
    folder.mkdir(parents=True, exist_ok=True)
    tally, blocks, files = Tally(), [], []
    stages = [(name, stage_of(call.recipe, name)) for name in call.step.stages]
    for k, documents in enumerate(incoming(cfg, call, tally)):
        for name, stage in stages:
            documents = tally.take(name, documents, stage(documents))
        if documents:
            base = folder / f"{call.piece:06d}-{k:05d}"
            block = write_block(cfg, call, base, documents, (call.piece, k), tally)
            blocks.append(block._replace(path=base.name))
            files += files_of(base, call.step)
    result = {"blocks": blocks, "tally": tally.to_json()}
    mark_done(done, result, files)
    return result


def files_of(base: pathlib.Path, step: Pass) -> list[pathlib.Path]:
    """The files that a pass writes for a block."""
    if step.ends == "tokens":
        return [pathlib.Path(f"{base}{ending}") for ending in (".ids", ".arrow")]
    sketches = [sketch_path(str(base), join) for join in step.joins]
    beside = [path for path in map(signatures_path, sketches) if path.exists()]
    return [pathlib.Path(f"{base}.arrow"), *sketches, *beside]


def incoming(cfg: PrepareConfig, call: Call, tally: Tally) -> Iterator[list[Document]]:
    """The blocks of documents that the stages see: as they are read, or as the pass before left them."""
    if call.file is not None and call.part is not None:
        skipped: Counter = Counter()
        source = call.file.source
        for block in cut(read_file(call.file, cfg.reading(source), skipped, call.part), cfg.block_bytes):
            tally.add_lengths(block)
            tally.add_documents(("in", "read"), block)
            yield block
        tally.add_skipped(source, call.file.name, call.part.begin, skipped)
        return
    documents = from_table(read_table(pathlib.Path(call.path)))
    folders = {join: join_folder(call.folder, call.number - 1, join) for join in call.joined}
    yield apply_joins(cfg, folders, call.piece, documents, tally)


def write_block(
    cfg: PrepareConfig,
    call: Call,
    base: pathlib.Path,
    documents: Sequence[Document],
    place: tuple[int, int],
    tally: Tally,
) -> Block:
    """Writes a block as the pass leaves it."""
    if call.step.ends == "tokens":
        tally.add_languages(documents)
        tally.add_documents(("written",), documents)
        tokens, fertility = tokenise_block(cfg, cfg.tokenizer.path(call.folder), base, documents, place)
        return Block(str(base), len(documents), tokens, fertility)
    write_sketches(cfg, call.step.joins, str(base), documents)
    write_table(pathlib.Path(f"{base}.arrow"), to_table(documents))
    return Block(str(base), len(documents))


def join_folder(folder: str, number: int, join: str) -> pathlib.Path:
    """Where a join after pass `number` keeps what it finds."""
    return pathlib.Path(folder) / "joins" / f"{number}-{join}"


def in_order(blocks: Iterable[Sequence[Any]], folder: pathlib.Path, number: int) -> list[Block]:
    """The blocks of a pass, as done files have them, in the order of the input: its place in it is a block's number."""
    found = [Block(*block) for block in sorted(blocks, key=lambda block: block[0])]
    return [block._replace(path=str(folder / f"pass{number}" / block.path)) for block in found]


def count_blocks(folder: pathlib.Path, number: int) -> int:
    """How many blocks a pass has written so far, of pieces that are not done too."""
    return sum(1 for _ in (folder / f"pass{number}").glob("*.arrow"))


@functools.lru_cache(maxsize=4)
def recipe_of(text: str) -> PrepareConfig:
    """The settings that the JSON text holds."""
    return schema.from_dict(PrepareConfig, parse_json(text))


@functools.lru_cache(maxsize=64)
def stage_of(recipe: str, name: str) -> Stage:
    """The stage, made once in a process: some load a model."""
    return make_stage(recipe_of(recipe), name)


def make_stage(cfg: PrepareConfig, name: str) -> Stage:
    """The stage of that name, with its settings in the recipe."""
    return MAKERS[name](getattr(cfg, name))
