"""Runs a preparation: passes over the documents, joins between them, shards, and last the manifest."""

import array
import collections
import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jaxscale import __version__, schema
from jaxscale.corpus.curate.contamination import count_items, matching
from jaxscale.corpus.curate.quality import bad_words_of
from jaxscale.corpus.curate.toxicity import listed_words_of
from jaxscale.corpus.curate.urls import list_paths, words_of
from jaxscale.corpus.prepare import fertility
from jaxscale.corpus.prepare.blocks import mark_done, read_done, read_table
from jaxscale.corpus.prepare.config import JOINS, PrepareConfig, TokenizerConfig
from jaxscale.corpus.prepare.dedup import Executor, cluster_facts, find_duplicates
from jaxscale.corpus.prepare.examples import WEIGHTS, example_files, trained_filter, with_weights
from jaxscale.corpus.prepare.exchange import Exchange
from jaxscale.corpus.prepare.join import MOST_BLOCKS, WAY_OUT
from jaxscale.corpus.prepare.lookup import (
    COLUMNS,
    TOKENS,
    Blocks,
    Numbered,
    Pass,
    Pieces,
    plan_passes,
    write_blocks,
    write_input,
)
from jaxscale.corpus.prepare.progress import RUNNING, Progress, read_running
from jaxscale.corpus.prepare.report import (
    FACTS,
    MOST_LANGUAGES,
    dropped_languages,
    evaluation_lines,
    read_facts,
    rewrite_report,
)
from jaxscale.corpus.prepare.tally import Tally
from jaxscale.corpus.prepare.tokens import make_exchange, move_out, shard_name, tokenizer_of
from jaxscale.corpus.prepare.work import Block, Call, block_rows, join_folder, run
from jaxscale.data.cache import stamp
from jaxscale.data.fields import choose_all, describe
from jaxscale.data.manifest import NAME as MANIFEST
from jaxscale.data.manifest import check_manifest, write_manifest
from jaxscale.system.digest import file_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.open_files import require_open_files
from jaxscale.system.paths import locked, make_private, read_bytes, write_text_atomic
from jaxscale.text.sources.decode import is_repair
from jaxscale.text.sources.files import list_files, no_text_problem, size_of
from jaxscale.text.sources.left_out import BYTES, WAYS_OUT
from jaxscale.text.sources.read import parts
from jaxscale.text.tokenizer.base import Tokenizer
from jaxscale.text.tokenizer.config import special_names
from jaxscale.text.tokenizer.load import NO_BOS, naming_files, tokenizer_problem
from jaxscale.text.tokenizer.train import train_tokenizer

MADE_FROM = "made-from.txt"  # the plan's key; not in the manifest, which knows nothing of dates
LOCK = ".lock"  # left behind: who deletes a lock takes it from somebody else
FORMAT = 2  # raised when the same recipe would give other bytes
LAYOUT = 4  # of the work folder: one that an earlier version began is not gone on with


class Plan(NamedTuple):
    """What a preparation has to do."""

    cfg: PrepareConfig
    key: str  # of recipe and input: equal keys, equal output
    pieces: Pieces
    passes: list[Pass]
    least_blocks: int  # of the first pass, as far as the sizes of the files show
    notes: tuple[str, ...]  # about the files, to be said once


def make_plan(cfg: PrepareConfig) -> Plan:
    """The pieces of the input and the passes over them. Raises BadInput where no file or no tokenizer is found."""
    notes: list[str] = []
    files, problems = list_files(cfg.globs, "sources", "text", say=notes.append)
    if not cfg.tokenizer.is_trained and (problem := tokenizer_problem(cfg.tokenizer.name)):
        problems.append(problem.replace("data.tokenizer", "tokenizer.name"))
    if not problems:
        problems += bos_problems(cfg.tokenizer)
    problems += filter(None, map(no_text_problem, files))
    if problems:
        raise BadInput(problems[0])
    for source in cfg.sources:
        reading = cfg.reading(source)
        choices = choose_all([file for file in files if file.source == source], reading)
        of_ids = [file.path for file, choice in choices.items() if choice.kind == "ids"]
        if of_ids and cfg.tokenizer.is_trained:
            raise BadInput(f"{of_ids[0]} holds token ids; name the tokenizer that made them in tokenizer.name")
        notes += describe(choices, reading)
    pieces = Pieces.of(files, (parts(file, cfg.reading(file.source), cfg.block_bytes) for file in files))
    least = max(len(pieces), sum(size_of(file.path) or 0 for file in files) // cfg.block_bytes)
    if least > MOST_BLOCKS and not {*JOINS}.isdisjoint(cfg.stages):
        raise BadInput(
            f"the input is {least:,} blocks or more, and duplicates are found among at most {MOST_BLOCKS:,}; {WAY_OUT}"
        )
    made_from = {
        "format": FORMAT,
        "recipe": {name: value for name, value in schema.to_dict(cfg).items() if name != "rows"},  # added at any time
        "files": [[*file, *stamp(file.path)] for file in files],
        "read beside": read_beside(cfg, notes.append),
    }
    passes = plan_passes(cfg.stages, train_tokenizer=cfg.tokenizer.is_trained)
    return Plan(cfg, hash_of(made_from), pieces, passes, least, tuple(notes))


def read_beside(cfg: PrepareConfig, say: Callable[[str], None]) -> list[tuple[str, str]]:
    """(name, hash) of each file that the recipe reads beside the sources, and whose content decides what comes out.

    say: gets a line where links were left out. Raises BadInput for a file that cannot be read. Files of a stage that is
    not run are not looked at.
    """
    tokenizer, words = cfg.tokenizer, []
    own = [] if tokenizer.is_trained or tokenizer.name == "bytes" else [pathlib.Path(tokenizer.path(""))]
    own += [beside for path in own for beside in naming_files(path)]
    own += [pathlib.Path(path) for path in example_files(cfg, say)]
    if "decontaminate" in cfg.stages and cfg.decontaminate.is_named:
        own += matching(cfg.decontaminate.files, say)
    if "url_blocklist" in cfg.stages:
        own += map(pathlib.Path, list_paths(cfg.url_blocklist, say))
        words.append((cfg.url_blocklist.words, hash_of(words_of(cfg.url_blocklist))))
    if "c4" in cfg.stages and cfg.c4.bad_words is not None:
        words.append((cfg.c4.bad_words, hash_of(bad_words_of(cfg.c4.bad_words))))
    if "toxicity" in cfg.stages and cfg.toxicity.word_list:
        words.append((cfg.toxicity.word_list, hash_of(listed_words_of(cfg.toxicity))))
    return [*((str(path), file_sha256(str(path))) for path in own), *words]


def bos_problems(cfg: TokenizerConfig) -> list[str]:
    """Why documents cannot begin as the setting says."""
    if cfg.is_trained and cfg.bos_token not in ("", NO_BOS, *special_names(cfg.train)):
        known = ", ".join(special_names(cfg.train))
        return [f"tokenizer.bos_token={cfg.bos_token} is no special token of the one to be trained ({known})"]
    if not cfg.is_trained:
        try:
            tokenizer_of(cfg.path(""), cfg)
        except BadInput as error:
            names = {"data.tokenizer=": "tokenizer.name=", "data.bos_token": "tokenizer.bos_token"}
            names |= {"data.eos_token": "tokenizer.eos_token"}
            return [functools.reduce(lambda told, pair: told.replace(*pair), names.items(), str(error))]
    return []


def prepare(
    plan: Plan,
    output: pathlib.Path,
    executor: Executor,
    progress: Progress,
    *,
    keep_work: bool = False,
    strict: bool = False,
) -> None:
    """Makes the shards, manifest and report of a plan in `output`.

    Killed at any moment, the same call goes on. Raises BadInput where the folder holds something else, another
    process is at work in it, or no document is left; if `strict`, where reading left out much.
    """
    output = output.absolute()
    check_files(Exchange(None, "", plan.least_blocks, 1, merges_first=True))
    make_output(output)
    for line in plan.notes:
        progress.say(line)
    with locked(output / LOCK, functools.partial(in_use, output)):
        made_by = hash_of({**versions(), "layout": LAYOUT})[:8]  # other versions may give other bytes
        folder = output / f"work-{plan.key}-{made_by}"
        if is_open(plan, output, folder, progress.say):
            make_set(plan, output, folder, executor, progress, strict)
        elif strict:
            tally = Tally.from_json(read_facts(output)["tally"])
            tell_left_out(plan.cfg, tally, progress, strict)
            report_loss(None, tally, progress, strict)
        rewrite_report(output)  # again where it is complete: an earlier process may have ended just before
        if not keep_work:
            shutil.rmtree(folder, ignore_errors=True)


def make_set(
    plan: Plan, output: pathlib.Path, folder: pathlib.Path, executor: Executor, progress: Progress, strict: bool
) -> None:
    """Runs every pass and join, and writes the manifest last. strict: see tell_left_out."""
    tally, clusters, blocks, sums = Tally(), [], None, {}
    looked_for = count_items(plan.cfg.decontaminate) if "decontaminate" in plan.cfg.stages else None
    for line in evaluation_lines(plan.cfg.decontaminate, looked_for):
        progress.say(line)
    learned = trained_filter(plan.cfg, folder, progress)
    write_input(folder, with_weights(plan.cfg, folder), plan.pieces)
    for number, step in enumerate(plan.passes):
        count = len(plan.pieces if blocks is None else blocks)
        blocks = run_pass(plan, folder, number, count, executor, progress, tally, sums)
        if number == 0:
            tell_left_out(plan.cfg, tally, progress, strict)
        if step.ends == "tokens":
            report_loss(tokenizer_of(plan.cfg.tokenizer.path(str(folder)), plan.cfg.tokenizer), tally, progress, strict)
        for column, join in enumerate(step.joins):
            progress.begin(f"{join}: comparing all documents", 1)
            found = find_duplicates(plan.cfg, join, join_folder(str(folder), number, join), blocks, column, executor)
            clusters.append(cluster_facts(join, found, blocks))
        if step.ends == "sample":
            progress.begin("training the tokenizer", 1)
            train_on_blocks(plan.cfg, blocks, pathlib.Path(plan.cfg.tokenizer.path(str(folder))))
    assert blocks is not None, "every plan has a pass"
    tokenizer = plan.cfg.tokenizer.path(str(folder))
    names = write_shards(plan.cfg, blocks, executor, progress)
    progress.end()
    write_text_atomic(output / MADE_FROM, plan.key + "\n")  # first: shards of two recipes have the same names
    move_out(folder, names, output)
    if learned:
        shutil.copyfile(folder / WEIGHTS, output / WEIGHTS)
    rows = fertility.rows_of(sums, tokenizer_of(tokenizer, plan.cfg.tokenizer))
    facts = {"tally": tally.to_json(), "clusters": clusters, "fertility": [row._asdict() for row in rows]}
    facts |= {"evaluation": looked_for} if looked_for else {}
    facts |= {"classifier": learned} if learned else {}
    write_outcome(plan.cfg, output, names, tokenizer, facts)


def tell_left_out(cfg: PrepareConfig, tally: Tally, progress: Progress, strict: bool) -> None:
    """Says what reading left out. Raises BadInput where that is much and `strict`."""
    if (lost := tally.left_out(cfg.read.where)) is None:
        return
    if lost.is_much and strict:
        raise BadInput(f"{lost.line}; without --strict the rest would be prepared")
    progress.say(f"{'WARNING: ' if lost.is_much else ''}{lost.line}")


def report_loss(tokenizer: Tokenizer | None, tally: Tally, progress: Progress, strict: bool) -> None:
    """Reports what the tokenizer lost of samples of the text. Raises BadInput where that is much and `strict`.

    tokenizer: None: of a finished set.
    """
    if not (loss := tally.loss).lost:
        return
    name, reason = (tokenizer.name, tokenizer.loss_reason) if tokenizer else ("the set's tokenizer", "")
    line = loss.line(f"tokenizer.name={name}" if tokenizer else name, reason)
    if loss.is_much and strict:
        raise BadInput(f"{line}; without --strict the set would be made")
    progress.say(f"{'WARNING: ' if loss.is_much else ''}{line}")


def write_outcome(
    cfg: PrepareConfig, output: pathlib.Path, names: Sequence[str], tokenizer: str, facts: dict[str, Any]
) -> None:
    """Writes report.json and the manifest beside the shards. facts: tally, clusters, fertility."""
    write_text_atomic(output / FACTS, json.dumps(facts, indent=1, sort_keys=True) + "\n")
    tally = Tally.from_json(facts["tally"])
    write_manifest(
        output,
        names,
        recipe=schema.to_dict(cfg),
        tokenizer_file=tokenizer_of(tokenizer, cfg.tokenizer).saved_file(),
        source_bytes={name: tally.counts["written", name, "bytes"] for name in cfg.sources},
        versions=versions(),
    )


def run_pass(
    plan: Plan,
    folder: pathlib.Path,
    number: int,
    count: int,
    executor: Executor,
    progress: Progress,
    tally: Tally,
    sums: fertility.Sums,
) -> Blocks:
    """The blocks that a pass over `count` pieces leaves. What it counted is added to tally and sums."""
    step = plan.passes[number]
    progress.begin(title(number, step), count)
    rows = array.array("q")  # 8 bytes a number: there may be millions of blocks
    columns = COLUMNS + len(step.joins)
    shutil.rmtree(folder / RUNNING, ignore_errors=True)  # of a process that was killed
    with progress.ticking(lambda: f"{len(rows) // columns:,} blocks", lambda: read_running(folder)):
        for result in executor.run_all(run, Numbered(Call(str(folder), number), count)):
            rows.extend(itertools.chain.from_iterable(block_rows(result)))  # the rest is added up, and let go
            for block in result["blocks"]:
                fertility.add_measured(sums, Block(*block).fertility)
            progress.add(result)
            tally.merge(Tally.from_json(result["tally"]))
            if step.joins and len(rows) // columns > MOST_BLOCKS:
                raise BadInput(f"duplicates are found among at most {MOST_BLOCKS:,} blocks; {WAY_OUT}")
    if not rows:
        lost = tally.left_out(plan.cfg.read.where)
        why = "; ".join(filter(None, [funnel_line(tally), lost.line if lost else ""])) or "the input is empty"
        raise BadInput(f"no document is left after {title(number, step)}: {why}")
    return write_blocks(str(folder), number, np.frombuffer(rows, np.int64).reshape(-1, columns))


def train_on_blocks(cfg: PrepareConfig, blocks: Sequence[str], path: pathlib.Path) -> None:
    """Writes a tokenizer trained on all documents to `path`, unless it is there; one block is in memory at a time."""
    done = path.with_suffix(".done.json")
    if read_done(done) is None:
        tables = (read_table(pathlib.Path(f"{base}.arrow")) for base in blocks)
        texts = (text for table in tables for text in table.column("text").to_pylist())
        train_tokenizer(texts, cfg.tokenizer.train, path)
        mark_done(done, {}, [path])


def versions() -> dict[str, str]:
    """Of the packages that the bytes may depend on, as far as they are there."""
    found = {"jaxscale": __version__, "python": platform.python_version()}
    for name in ("numpy", "pyarrow", "rensa", "py3langid", "tokenizers", "sentencepiece", "rustbpe"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def make_output(output: pathlib.Path) -> None:
    """Makes the folder. Raises BadInput if it cannot be made or written."""
    try:
        make_private(output)
    except OSError as error:
        raise BadInput(f"--output={output} cannot be made: {error.strerror or error}; name a folder") from None
    if not os.access(output, os.W_OK | os.X_OK):
        raise BadInput(f"--output={output} cannot be written by this user; name another folder")


def is_open(plan: Plan, output: pathlib.Path, folder: pathlib.Path, say: Callable[[str], None]) -> bool:
    """True if there is work to do in `folder`; False if the output is complete.

    Raises BadInput if another set is in the way, or a complete one has lost something.
    """
    for leftover in output.glob(".*.tmp"):  # of a process that was killed while it wrote one
        leftover.unlink(missing_ok=True)
    made_from = output / MADE_FROM
    found = read_bytes(made_from).strip() if made_from.exists() else None
    mine = found == plan.key.encode()
    if not mine and (found is not None or (output / MANIFEST).exists()):
        whole = "another set" if (output / MANIFEST).exists() else "a part of another set"
        raise BadInput(
            f"{output} holds {whole}, of another recipe, other input or an earlier version; choose another --output"
        )
    if (output / MANIFEST).exists():
        check_manifest(output / MANIFEST, deep=False)
        say(f"{output} is complete: the same recipe, the same input")
        return False
    for other in sorted(output.glob("work-*")):
        if other != folder:
            say(f"{other} is unfinished work of another recipe, input or version; delete it if it is not wanted")
    if folder.is_dir():
        say(f"going on with {folder}")
    make_private(folder)
    return True


def hash_of(value: Any) -> str:
    """32 hexadecimal digits that stand for plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def in_use(folder: pathlib.Path) -> NoReturn:
    """Raises the BadInput for a folder in which another process of this machine is at work."""
    raise BadInput(f"another process is at work in {folder}; wait for it, or end it")


def write_shards(cfg: PrepareConfig, blocks: Blocks, executor: Executor, progress: Progress) -> list[str]:
    """Writes all shards and returns their names in order."""
    count = max(1, math.ceil(blocks.total(TOKENS) / cfg.write.shard_tokens))
    progress.begin(f"writing {count} shards", count)
    whole = make_exchange(blocks, count)
    check_files(whole)
    for _ in executor.write_shards(whole):
        progress.add(None)
    return [shard_name(number, count) for number in range(count)]


def check_files(whole: Exchange) -> None:
    """Raises BadInput where the system allows fewer open files than a task of the exchange needs."""
    require_open_files(whole.most_open, "files of blocks")


def title(number: int, step: Pass) -> str:
    """What a pass does, for the progress line."""
    does = [*(["reading"] if number == 0 else []), *step.stages, *(["tokens"] if step.ends == "tokens" else [])]
    return f"pass {number + 1}: " + (", ".join(does) or "counting")


def funnel_line(tally: Tally) -> str:
    """'read 10; language: not wanted 7; ...'."""
    totals: collections.Counter = collections.Counter()
    for name, number in tally.counts.items():
        if name[0] == "dropped" and name[-1] == "documents":
            totals[name[3]] += number
        if name[:2] == ("in", "read") and name[-1] == "documents":
            totals["read"] += number
        if name[0] == "read" and not is_repair(name[-1]) and name[-1] not in (BYTES, *WAYS_OUT):
            totals[f"left out: {name[-1]}"] += number
    told = [f"{reason} {number:,}" for reason, number in totals.most_common()]
    languages = [f"{name} {number:,}" for name, number in dropped_languages(tally).most_common(MOST_LANGUAGES)]
    return "; ".join([*told, f"dropped languages {', '.join(languages)}"] if languages else told)
