"""Tasks of a preparation. A task runs the stages of a pass on one piece of the input or one block of the previous pass.

A task is a pure function of its arguments and the work folder, so it can run on any machine, and repeatedly. File names
have the numbers of the pass, piece and block (see lookup.py). `done` files are written last and list the other files.

    000000012-000003.arrow            fourth block of piece 12: documents after the stages
    000000012-000003.near_dedup.*     the block's sketch for a join
    000000012-000003.ids, .arrow      the block's tokens in shuffled order, and metadata of each document
    000000012-000003.kept.json        done file of this block only, while piece 12 is unfinished
    000000012.done.json               done file of piece 12: its blocks and counts
    running/12.json                   progress of piece 12, if it has several blocks
"""

import functools
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.runtime.data.fields import FieldChoice, Vocabulary, choose_field, read_fields, read_ids
from jaxscale.runtime.text.document import Document, Stage
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.part import Part
from jaxscale.runtime.text.sources.read import handle_damage, read_file
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import write_text_atomic
from jaxscale.tools.corpus.curate.classifier import make_classifier, make_toxicity
from jaxscale.tools.corpus.curate.contamination import make_contamination
from jaxscale.tools.corpus.curate.duplicates import make_substring
from jaxscale.tools.corpus.curate.langid import make_language
from jaxscale.tools.corpus.curate.origin import make_licence, make_urls
from jaxscale.tools.corpus.curate.pii import make_pii
from jaxscale.tools.corpus.curate.quality import make_c4, make_fineweb, make_gopher, make_repetition
from jaxscale.tools.corpus.curate.repair import make_repair
from jaxscale.tools.corpus.prepare import lookup
from jaxscale.tools.corpus.prepare.config import STAGES, PrepareConfig
from jaxscale.tools.corpus.prepare.dedup import apply_joins, sketch_path, write_sketches
from jaxscale.tools.corpus.prepare.progress import RUNNING, RunningPiece
from jaxscale.tools.corpus.prepare.sketches import signatures_path
from jaxscale.tools.corpus.prepare.tally import Tally
from jaxscale.tools.corpus.prepare.tokens import tokenize_block, tokenizer_of

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


class Task(NamedTuple):
    """One task: a piece of the input in the first pass, or a block of the previous pass in later passes."""

    folder: str  # work folder
    pass_number: int
    number: int = 0


class BlockResult(NamedTuple):
    """A block that a pass has written, as stored in done files."""

    index: int  # index in the piece
    documents: int
    tokens: int = 0
    keys: Sequence[int] = ()  # number of keys in the sketch for each join
    fertility: Sequence[Any] = ()  # result of tokens.measure_fertility on a sample


def run_task(task: Task) -> dict[str, Any]:
    """Runs the task unless it is done, and returns the content of its done file."""
    cfg, step = lookup.recipe_of(task.folder), lookup.passes_of(task.folder)[task.pass_number]
    done = lookup.done_path(*task)
    if (finished := lookup.read_done(done)) is not None:
        return finished | {"was_done": True}
    found: dict[str, Any] = {}  # result of the last block
    tally, blocks, files, block_marks = Tally(), [], [], []
    running, outputs, was_done = PieceProgress(task), [], False
    for index, documents in enumerate(input_blocks(cfg, task, tally, running)):
        if index:  # a piece with several blocks has a done file for each block
            if not was_done:
                lookup.mark_done(block_marks[-1], found, outputs)
            running.write(found, was_done)
        base = lookup.block_base(*task, index)
        base.parent.mkdir(parents=True, exist_ok=True)
        block_marks.append(pathlib.Path(f"{base}.kept.json"))
        earlier = lookup.read_done(block_marks[-1])
        was_done = earlier is not None
        found = earlier or process_block(cfg, task, base, documents, index)
        outputs = output_files(base, step) if found["blocks"] else []
        blocks += found["blocks"]
        files += outputs
        tally.merge(Tally.from_json(found["tally"]))
    result = {"number": task.number, "blocks": blocks, "tally": tally.to_json()}
    done.parent.mkdir(parents=True, exist_ok=True)
    lookup.mark_done(done, result, files)
    for path in (*block_marks, running.path):
        path.unlink(missing_ok=True)
    return result | {"earlier": dict(running.earlier)}


def process_block(
    cfg: PrepareConfig, task: Task, base: pathlib.Path, documents: list[Document], index: int
) -> dict[str, Any]:
    """Runs the stages on a block and writes it. Returns {'blocks': [BlockResult] or [], 'tally': counts}."""
    tally, step = Tally(), lookup.passes_of(task.folder)[task.pass_number]
    if task.pass_number == 0:
        tally.counts.update(("length", document.source, str(document.size.bit_length())) for document in documents)
        tally.add_documents(("in", "read"), documents)
    for name in step.stages:
        documents = tally.record(name, documents, stage_of(task.folder, name)(documents))
    blocks = []
    if documents and step.ends == "tokens":
        tally.counts.update(("language", document.source, document.language) for document in documents)
        tally.add_documents(("written",), documents)
        path, place = cfg.tokenizer.path(task.folder), (task.number, index)
        tokens, fertility, loss = tokenize_block(cfg, path, base, documents, place)
        tally.add_loss(loss)
        blocks = [BlockResult(index, len(documents), tokens, fertility=fertility)]
    elif documents:
        keys = write_sketches(cfg, step.joins, str(base), documents)
        lookup.write_table(pathlib.Path(f"{base}.arrow"), lookup.to_table(documents))
        blocks = [BlockResult(index, len(documents), keys=keys)]
    return {"blocks": blocks, "tally": tally.to_json()}


class PieceProgress:
    """Progress of a piece with several blocks, in a file that progress.read_running reads."""

    def __init__(self, task: Task):
        self.path = pathlib.Path(task.folder) / RUNNING / f"{task.number}.json"
        self.share = self.resumed_share = 0.0
        self.finished, self.earlier = Counter(), Counter()  # documents and bytes of this process, and of earlier ones

    def write(self, found: Mapping[str, Any], was_done: bool) -> None:
        """Writes the progress file. found: result of the block; was_done: whether an earlier process finished it."""
        read = Tally.from_json(found["tally"]).sums("in", "read", by=-1)
        if was_done:
            self.resumed_share = self.share
        (self.earlier if was_done else self.finished).update(read)
        self.path.parent.mkdir(exist_ok=True)
        running = RunningPiece(self.share, self.resumed_share, self.finished["documents"], self.finished["bytes"])
        write_text_atomic(self.path, json.dumps(running))


def output_files(base: pathlib.Path, step: lookup.PreparePass) -> list[pathlib.Path]:
    """Returns the files that a pass writes for a block."""
    if step.ends == "tokens":
        return [pathlib.Path(f"{base}{ending}") for ending in (".ids", ".arrow")]
    sketches = [sketch_path(str(base), join) for join in step.joins]
    signatures = [path for path in map(signatures_path, sketches) if path.exists()]
    return [pathlib.Path(f"{base}.arrow"), *sketches, *signatures]


def input_blocks(cfg: PrepareConfig, task: Task, tally: Tally, running: PieceProgress) -> Iterator[list[Document]]:
    """Yields the input blocks of a task, read from the source files or, after joins, from the previous pass."""
    if task.pass_number == 0:
        file, part = lookup.piece_of(task.folder, task.number)
        skipped: Counter = Counter()
        part = part._replace(on_progress=lambda share: setattr(running, "share", share))
        yield from lookup.group_blocks(read_documents(cfg, task.folder, file, skipped, part), cfg.block_bytes)
        tally.add_skipped(file.source, file.name, part.begin, skipped)
        return
    before = task.pass_number - 1
    base = lookup.blocks_of(task.folder, before)[task.number]
    documents = lookup.from_table(lookup.read_table(pathlib.Path(f"{base}.arrow")))
    folders = {join: join_folder(task.folder, before, join) for join in lookup.passes_of(task.folder)[before].joins}
    yield apply_joins(cfg, folders, task.number, documents, tally)


def read_documents(
    cfg: PrepareConfig, folder: str, file: SourceFile, skipped: Counter, part: Part
) -> Iterator[Document]:
    """Yields the documents in part of a file. Decodes token ids. Raises BadInput for damaged data and masked labels."""
    read_cfg = cfg.read_cfg(file.source)
    choice = FieldChoice("text")  # default for a damaged file that is skipped, which read_file counts
    with handle_damage(file.path, read_cfg, Counter()):
        choice = choose_field(file.path, read_fields(file.path, read_cfg), read_cfg)
    if choice.kind != "ids":
        yield from read_file(file, read_cfg, skipped, part)
        return
    tokenizer = tokenizer_of(cfg.tokenizer.path(folder), cfg.tokenizer)
    vocabulary = Vocabulary(tokenizer.vocab_size, f"tokenizer.name={cfg.tokenizer.name}")
    with handle_damage(file.path, read_cfg, skipped):
        for offset, found, words in read_ids(file.path, choice, read_cfg, vocabulary, skipped, part):
            if found.loss_mask is not None:
                raise BadInput(
                    f"{found.place} has masked labels, which prepared datasets do not support; train on the file "
                    "directly (data.files)"
                )
            text, (id, url, licence, language) = tokenizer.decode(found.ids.tolist()), words
            content = found.ids.astype("<u4").tobytes()
            licence = licence or read_cfg.licence
            yield Document(text, file.source, file.name, offset, id, url, licence, language, ids=content)


def join_folder(folder: str, number: int, join: str) -> pathlib.Path:
    """Returns the folder with the results of a join after pass `number`."""
    return pathlib.Path(folder) / "joins" / f"{number}-{join}"


@functools.lru_cache(maxsize=64)
def stage_of(folder: str, name: str) -> Stage:
    """Returns the stage, cached per process, since some stages load a model."""
    return make_stage(lookup.recipe_of(folder), name)


def make_stage(cfg: PrepareConfig, name: str) -> Stage:
    """Returns the stage with this name and the recipe's settings."""
    return MAKERS[name](getattr(cfg, name))
