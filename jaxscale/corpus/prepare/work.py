"""One task of a preparation: a part of the input, or a block of the previous pass, through the stages of a pass.

Everything here is a function of its call alone, so that it may run in any process, on any machine, and again. What it
writes is named by the pass, the piece and the block (lookup.py); `done` files are written last, and say what there is.

    000000012-000003.arrow            the fourth block of piece 12: documents after the stages
    000000012-000003.near_dedup.*     its sketch for a join
    000000012-000003.ids, .arrow      its tokens in shuffled order, and what is known of each document
    000000012-000003.kept.json        the same of this block alone, while piece 12 is not finished
    000000012.done.json               piece 12 is finished: its blocks, and what was counted
    running/12.json                   how far piece 12 is, if it has several blocks
"""

import functools
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from jaxscale.corpus.prepare.config import STAGES, PrepareConfig
from jaxscale.corpus.prepare.dedup import apply_joins, sketch_path, write_sketches
from jaxscale.corpus.prepare.join import signatures_path
from jaxscale.corpus.prepare.lookup import Pass, block_base, blocks_of, done_path, passes_of, piece_of, recipe_of
from jaxscale.corpus.prepare.progress import RUNNING
from jaxscale.corpus.prepare.tally import Tally
from jaxscale.corpus.prepare.tokens import tokenise_block, tokenizer_of
from jaxscale.data.fields import Choice, choose, fields_of
from jaxscale.data.token_columns import Vocabulary, read_ids
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import write_text_atomic
from jaxscale.text.document import Document, Stage
from jaxscale.text.sources.files import SourceFile
from jaxscale.text.sources.part import Part
from jaxscale.text.sources.read import read_file, readable

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


class Call(NamedTuple):
    """One task: a piece of the input, or of a later pass the block of that number in the pass before."""

    folder: str  # of the work
    pass_number: int
    number: int = 0


class Block(NamedTuple):
    """A block that a pass has written."""

    place: int  # in its piece
    documents: int
    tokens: int = 0
    keys: Sequence[int] = ()  # of its sketch for each join
    fertility: Sequence[Any] = ()  # fertility.measure of a sample


def run(call: Call) -> dict[str, Any]:
    """Runs the task unless it is done, and returns the content of its done file."""
    cfg, step = recipe_of(call.folder), passes_of(call.folder)[call.pass_number]
    done = done_path(*call)
    if (finished := read_done(done)) is not None:
        return finished | {"was_done": True}
    found: dict[str, Any] = {}  # of the last block
    tally, blocks, files, kept = Tally(), [], [], []
    running, made, was_kept = Running(call), [], False
    for place, documents in enumerate(incoming(cfg, call, tally, running)):
        if place:  # only now it is known that the piece has several blocks, of which each is to be kept by itself
            if not was_kept:
                mark_done(kept[-1], found, made)
            running.write(found, was_kept)
        base = block_base(*call, place)
        base.parent.mkdir(parents=True, exist_ok=True)
        kept.append(pathlib.Path(f"{base}.kept.json"))
        earlier = read_done(kept[-1])
        was_kept = earlier is not None
        found = earlier or do_block(cfg, call, base, documents, place)
        made = files_of(base, step) if found["blocks"] else []
        blocks += found["blocks"]
        files += made
        tally.merge(Tally.from_json(found["tally"]))
    result = {"number": call.number, "blocks": blocks, "tally": tally.to_json()}
    done.parent.mkdir(parents=True, exist_ok=True)
    mark_done(done, result, files)
    for path in (*kept, running.path):
        path.unlink(missing_ok=True)
    return result | {"earlier": dict(running.earlier)}


def do_block(
    cfg: PrepareConfig, call: Call, base: pathlib.Path, documents: list[Document], place: int
) -> dict[str, Any]:
    """What the stages made of a block: 'blocks', one or none if nothing is left, and its 'tally'."""
    tally = Tally()
    if call.pass_number == 0:
        tally.add_lengths(documents)
        tally.add_documents(("in", "read"), documents)
    for name in passes_of(call.folder)[call.pass_number].stages:
        documents = tally.take(name, documents, stage_of(call.folder, name)(documents))
    blocks = [write_block(cfg, call, base, documents, place, tally)] if documents else []
    return {"blocks": blocks, "tally": tally.to_json()}


class Running:
    """How far a piece of several blocks is, in a file that whoever waits for it can read, see progress.Running."""

    def __init__(self, call: Call):
        self.path = pathlib.Path(call.folder) / RUNNING / f"{call.number}.json"
        self.share = self.kept = 0.0
        self.documents = self.bytes = 0
        self.earlier = Counter()  # documents and bytes of the blocks that an earlier process did

    def tell(self, share: float) -> None:
        """Takes note of the share of the piece that is read."""
        self.share = share

    def write(self, found: Mapping[str, Any], was_kept: bool) -> None:
        """Writes how far it is. found: of the block that is done; was_kept: by an earlier process."""
        read = Counter()
        for *name, number in found["tally"]["counts"]:
            read.update({name[-1]: number} if name[:2] == ["in", "read"] else {})
        if was_kept:
            self.kept = self.share
            self.earlier += read
        else:
            self.documents += read["documents"]
            self.bytes += read["bytes"]
        self.path.parent.mkdir(exist_ok=True)
        write_text_atomic(self.path, json.dumps([self.share, self.kept, self.documents, self.bytes]))


def files_of(base: pathlib.Path, step: Pass) -> list[pathlib.Path]:
    """The files that a pass writes for a block."""
    if step.ends == "tokens":
        return [pathlib.Path(f"{base}{ending}") for ending in (".ids", ".arrow")]
    sketches = [sketch_path(str(base), join) for join in step.joins]
    beside = [path for path in map(signatures_path, sketches) if path.exists()]
    return [pathlib.Path(f"{base}.arrow"), *sketches, *beside]


def incoming(cfg: PrepareConfig, call: Call, tally: Tally, running: Running) -> Iterator[list[Document]]:
    """The blocks of documents that the stages see: as they are read, or as the pass before left them."""
    if call.pass_number == 0:
        file, part = piece_of(call.folder, call.number)
        skipped: Counter = Counter()
        part = part._replace(tell=running.tell)
        yield from cut(read_documents(cfg, call.folder, file, skipped, part), cfg.block_bytes)
        tally.add_skipped(file.source, file.name, part.begin, skipped)
        return
    before = call.pass_number - 1
    documents = from_table(read_table(pathlib.Path(f"{blocks_of(call.folder, before)[call.number]}.arrow")))
    folders = {join: join_folder(call.folder, before, join) for join in passes_of(call.folder)[before].joins}
    yield apply_joins(cfg, folders, call.number, documents, tally)


def read_documents(
    cfg: PrepareConfig, folder: str, file: SourceFile, skipped: Counter, part: Part
) -> Iterator[Document]:
    """Yields the documents of a part of a file; those of token ids with their text too, for stages to judge.

    Raises: BadInput as read_file and read_ids do, and for labels, which shards do not have.
    """
    reading = cfg.reading(file.source)
    choice = Choice("text")  # of a file that is broken and to be skipped: reading it counts it
    with readable(file.path, reading, Counter()):
        choice = choose(file.path, fields_of(file.path, reading), reading)
    if choice.kind != "ids":
        yield from read_file(file, reading, skipped, part)
        return
    tokenizer = tokenizer_of(cfg.tokenizer.path(folder), cfg.tokenizer)
    vocabulary = Vocabulary(tokenizer.vocab_size, f"tokenizer.name={cfg.tokenizer.name}")
    with readable(file.path, reading, skipped):
        for offset, found, words in read_ids(file.path, choice, reading, vocabulary, skipped, part):
            if found.learned is not None:
                raise BadInput(
                    f"{found.place} has labels that are not learned, which prepared sets do not have; train on the "
                    "file itself (data.files)"
                )
            text, (id, url, licence, language) = tokenizer.decode(found.ids.tolist()), words
            content = found.ids.astype("<u4").tobytes()
            licence = licence or reading.licence
            yield Document(text, file.source, file.name, offset, id, url, licence, language, ids=content)


def write_block(
    cfg: PrepareConfig, call: Call, base: pathlib.Path, documents: Sequence[Document], place: int, tally: Tally
) -> Block:
    """Writes a block as the pass leaves it. place: of the block in its piece."""
    step = passes_of(call.folder)[call.pass_number]
    if step.ends == "tokens":
        tally.add_languages(documents)
        tally.add_documents(("written",), documents)
        where = (call.number, place)
        tokens, fertility, loss = tokenise_block(cfg, cfg.tokenizer.path(call.folder), base, documents, where)
        tally.add_loss(loss)
        return Block(place, len(documents), tokens, fertility=fertility)
    keys = write_sketches(cfg, step.joins, str(base), documents)
    write_table(pathlib.Path(f"{base}.arrow"), to_table(documents))
    return Block(place, len(documents), keys=keys)


def join_folder(folder: str, number: int, join: str) -> pathlib.Path:
    """Where a join after pass `number` keeps what it finds."""
    return pathlib.Path(folder) / "joins" / f"{number}-{join}"


def block_rows(result: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    """The rows of lookup.Blocks for what `run` returned."""
    for found in result["blocks"]:
        block = Block(*found)
        yield (result["number"], block.place, block.documents, block.tokens, *block.keys)


@functools.lru_cache(maxsize=64)
def stage_of(folder: str, name: str) -> Stage:
    """The stage, made once in a process: some load a model."""
    return make_stage(recipe_of(folder), name)


def make_stage(cfg: PrepareConfig, name: str) -> Stage:
    """The stage of that name, with its settings in the recipe."""
    return MAKERS[name](getattr(cfg, name))
