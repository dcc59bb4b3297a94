"""Runs a data preparation: passes over the documents, joins between passes, token shards, and finally the manifest."""

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
from jaxscale.runtime.data.cache import size_and_mtime
from jaxscale.runtime.data.fields import choose_fields, describe_choices
from jaxscale.runtime.data.manifest import NAME as MANIFEST
from jaxscale.runtime.data.manifest import check_manifest, write_manifest
from jaxscale.runtime.text.sources.decode import is_repair
from jaxscale.runtime.text.sources.files import list_files, not_documents_problem, size_of
from jaxscale.runtime.text.sources.part import BYTES, FIXES
from jaxscale.runtime.text.sources.read import split_file
from jaxscale.runtime.text.tokenizer.base import Tokenizer
from jaxscale.runtime.text.tokenizer.config import special_names
from jaxscale.runtime.text.tokenizer.load import NO_BOS, naming_files, tokenizer_problem
from jaxscale.runtime.text.tokenizer.train import train_tokenizer
from jaxscale.system.digest import file_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.open_files import require_open_files
from jaxscale.system.paths import locked, make_private, read_bytes, write_text_atomic
from jaxscale.tools.corpus.curate.contamination import count_items, list_evaluation_files
from jaxscale.tools.corpus.curate.quality import load_bad_words
from jaxscale.tools.corpus.curate.toxicity import load_listed_words
from jaxscale.tools.corpus.curate.urls import list_paths, load_url_words
from jaxscale.tools.corpus.prepare import fertility
from jaxscale.tools.corpus.prepare.block_files import mark_done, read_done, read_table
from jaxscale.tools.corpus.prepare.config import JOINS, PrepareConfig, TokenizerConfig
from jaxscale.tools.corpus.prepare.dedup import Executor, cluster_facts, find_duplicates
from jaxscale.tools.corpus.prepare.examples import WEIGHTS, ensure_classifier, example_files, with_weights
from jaxscale.tools.corpus.prepare.join import BLOCK_LIMIT_FIX, MAX_BLOCKS
from jaxscale.tools.corpus.prepare.lookup import (
    COLUMNS,
    TOKENS,
    Blocks,
    NumberedTasks,
    Pass,
    Pieces,
    plan_passes,
    write_blocks,
    write_input,
)
from jaxscale.tools.corpus.prepare.preparation_page import (
    FACTS,
    MOST_LANGUAGES,
    dropped_languages,
    evaluation_warnings,
    read_facts,
    rewrite_report,
)
from jaxscale.tools.corpus.prepare.progress import RUNNING, Progress, read_running
from jaxscale.tools.corpus.prepare.shuffle import Shuffle
from jaxscale.tools.corpus.prepare.tally import Tally
from jaxscale.tools.corpus.prepare.tokens import move_shards, shard_name, shard_shuffle, tokenizer_of
from jaxscale.tools.corpus.prepare.work import BlockResult, Task, block_rows, join_folder, run_task

MADE_FROM = "made-from.txt"  # the plan's key; not in the manifest, which is independent of file dates
LOCK = ".lock"  # never deleted: another process may already hold a lock on the same file
FORMAT = 2  # increase when the same recipe would produce different bytes
LAYOUT = 4  # of the work folder; work folders of other layouts are not resumed


class PreparePlan(NamedTuple):
    """Input pieces, passes and the key of a preparation."""

    cfg: PrepareConfig
    key: str  # hash of the recipe and the input: equal keys, equal output
    pieces: Pieces
    passes: list[Pass]
    min_blocks: int  # lower bound for the first pass, from file sizes
    notes: tuple[str, ...]  # about the input files, printed once


def make_plan(cfg: PrepareConfig) -> PreparePlan:
    """Returns the input pieces and the passes over them. Raises BadInput if there are no files or no tokenizer."""
    notes: list[str] = []
    files, problems = list_files(cfg.globs, "sources", "text", say=notes.append)
    if not cfg.tokenizer.is_trained and (problem := tokenizer_problem(cfg.tokenizer.name)):
        problems.append(problem.replace("data.tokenizer", "tokenizer.name"))
    if not problems:
        problems += bos_problems(cfg.tokenizer)
    problems += filter(None, map(not_documents_problem, files))
    if problems:
        raise BadInput(problems[0])
    for source in cfg.sources:
        read_cfg = cfg.read_cfg(source)
        choices = choose_fields([file for file in files if file.source == source], read_cfg)
        ids_files = [file.path for file, choice in choices.items() if choice.kind == "ids"]
        if ids_files and cfg.tokenizer.is_trained:
            raise BadInput(f"{ids_files[0]} holds token ids; name the tokenizer that made them in tokenizer.name")
        notes += describe_choices(choices, read_cfg)
    pieces = Pieces.of(files, (split_file(file, cfg.read_cfg(file.source), cfg.block_bytes) for file in files))
    min_blocks = max(len(pieces), sum(size_of(file.path) or 0 for file in files) // cfg.block_bytes)
    if min_blocks > MAX_BLOCKS and not {*JOINS}.isdisjoint(cfg.stages):
        raise BadInput(
            f"the input is {min_blocks:,} blocks or more, and duplicates are found among at most {MAX_BLOCKS:,}; "
            f"{BLOCK_LIMIT_FIX}"
        )
    made_from = {
        "format": FORMAT,
        # rows change indexes, not shards.
        "recipe": {name: value for name, value in schema.to_dict(cfg).items() if name != "rows"},
        "files": [[*file, *size_and_mtime(file.path)] for file in files],
        "read beside": hash_auxiliary_files(cfg, notes.append),
    }
    passes = plan_passes(cfg.stages, train_tokenizer=cfg.tokenizer.is_trained)
    return PreparePlan(cfg, hash_value(made_from), pieces, passes, min_blocks, tuple(notes))


def hash_auxiliary_files(cfg: PrepareConfig, say: Callable[[str], None]) -> list[tuple[str, str]]:
    """Returns (name, sha256) of each file other than the sources whose content changes the output.

    say: receives a line about ignored links. Files of stages that do not run are ignored. Raises BadInput for an
    unreadable file.
    """
    tokenizer, words = cfg.tokenizer, []
    paths = [] if tokenizer.is_trained or tokenizer.name == "bytes" else [pathlib.Path(tokenizer.path(""))]
    paths += [config_path for path in paths for config_path in naming_files(path)]
    paths += [pathlib.Path(path) for path in example_files(cfg, say)]
    if "decontaminate" in cfg.stages and cfg.decontaminate.is_named:
        paths += list_evaluation_files(cfg.decontaminate.files, say)
    if "url_blocklist" in cfg.stages:
        paths += map(pathlib.Path, list_paths(cfg.url_blocklist, say))
        words.append((cfg.url_blocklist.words, hash_value(load_url_words(cfg.url_blocklist))))
    if "c4" in cfg.stages and cfg.c4.bad_words is not None:
        words.append((cfg.c4.bad_words, hash_value(load_bad_words(cfg.c4.bad_words))))
    if "toxicity" in cfg.stages and cfg.toxicity.word_list:
        words.append((cfg.toxicity.word_list, hash_value(load_listed_words(cfg.toxicity))))
    return [*((str(path), file_sha256(str(path))) for path in paths), *words]


def bos_problems(cfg: TokenizerConfig) -> list[str]:
    """Returns the problems of the tokenizer's BOS and EOS settings."""
    if cfg.is_trained and cfg.bos_token not in ("", NO_BOS, *special_names(cfg.train)):
        known = ", ".join(special_names(cfg.train))
        return [f"tokenizer.bos_token={cfg.bos_token} is not a special token of the tokenizer to train ({known})"]
    if not cfg.is_trained:
        try:
            tokenizer_of(cfg.path(""), cfg)
        except BadInput as error:
            names = {"data.tokenizer=": "tokenizer.name=", "data.bos_token": "tokenizer.bos_token"}
            names |= {"data.eos_token": "tokenizer.eos_token"}
            return [functools.reduce(lambda text, pair: text.replace(*pair), names.items(), str(error))]
    return []


def prepare(
    plan: PreparePlan,
    output: pathlib.Path,
    executor: Executor,
    progress: Progress,
    *,
    keep_work: bool = False,
    strict: bool = False,
) -> None:
    """Writes the shards, manifest and report of a plan to `output`.

    After a kill, the same call resumes. Raises BadInput if the folder holds another set, another process works in it,
    or no document is left; with `strict`, also if reading skipped a large share.
    """
    output = output.absolute()
    check_open_files(Shuffle(None, "", plan.min_blocks, 1, merges_first=True))
    create_output(output)
    for line in plan.notes:
        progress.say(line)
    with locked(output / LOCK, functools.partial(raise_in_use, output)):
        versions_hash = hash_value({**versions(), "layout": LAYOUT})[:8]  # other versions may produce different bytes
        folder = output / f"work-{plan.key}-{versions_hash}"
        if has_work(plan, output, folder, progress.say):
            write_set(plan, output, folder, executor, progress, strict)
        elif strict:
            tally = Tally.from_json(read_facts(output)["tally"])
            report_left_out(plan.cfg, tally, progress, strict)
            report_loss(None, tally, progress, strict)
        rewrite_report(output)  # also for a complete set: an earlier process may have ended before this line
        if not keep_work:
            shutil.rmtree(folder, ignore_errors=True)


def write_set(
    plan: PreparePlan, output: pathlib.Path, folder: pathlib.Path, executor: Executor, progress: Progress, strict: bool
) -> None:
    """Runs every pass and join, and writes the manifest last. strict: see report_left_out."""
    tally, clusters, blocks, sums = Tally(), [], None, {}
    item_counts = count_items(plan.cfg.decontaminate) if "decontaminate" in plan.cfg.stages else None
    for line in evaluation_warnings(plan.cfg.decontaminate, item_counts):
        progress.say(line)
    classifier_facts = ensure_classifier(plan.cfg, folder, progress)
    write_input(folder, with_weights(plan.cfg, folder), plan.pieces)
    for number, step in enumerate(plan.passes):
        count = len(plan.pieces if blocks is None else blocks)
        blocks = run_pass(plan, folder, number, count, executor, progress, tally, sums)
        if number == 0:
            report_left_out(plan.cfg, tally, progress, strict)
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
    write_text_atomic(output / MADE_FROM, plan.key + "\n")  # before the shards, whose names all recipes share
    move_shards(folder, names, output)
    if classifier_facts:
        shutil.copyfile(folder / WEIGHTS, output / WEIGHTS)
    rows = fertility.sum_rows(sums, tokenizer_of(tokenizer, plan.cfg.tokenizer))
    facts = {"tally": tally.to_json(), "clusters": clusters, "fertility": [row._asdict() for row in rows]}
    facts |= {"evaluation": item_counts} if item_counts else {}
    facts |= {"classifier": classifier_facts} if classifier_facts else {}
    finish_set(plan.cfg, output, names, tokenizer, facts)


def report_left_out(cfg: PrepareConfig, tally: Tally, progress: Progress, strict: bool) -> None:
    """Logs what reading skipped. Raises BadInput if that is a large share and `strict`."""
    if (lost := tally.left_out(cfg.read.where)) is None:
        return
    if lost.is_much and strict:
        raise BadInput(f"{lost.line}; omit --strict to prepare the other documents")
    progress.say(f"{'WARNING: ' if lost.is_much else ''}{lost.line}")


def report_loss(tokenizer: Tokenizer | None, tally: Tally, progress: Progress, strict: bool) -> None:
    """Logs what the tokenizer loses in samples of the text. Raises BadInput if that is a large share and `strict`.

    tokenizer: None for a finished set.
    """
    if not (loss := tally.loss).lost:
        return
    name, reason = (tokenizer.name, tokenizer.loss_reason) if tokenizer else ("the set's tokenizer", "")
    line = loss.line(f"tokenizer.name={name}" if tokenizer else name, reason)
    if loss.is_much and strict:
        raise BadInput(f"{line}; without --strict the set would be made")
    progress.say(f"{'WARNING: ' if loss.is_much else ''}{line}")


def finish_set(
    cfg: PrepareConfig, output: pathlib.Path, names: Sequence[str], tokenizer: str, facts: dict[str, Any]
) -> None:
    """Writes report.json and the manifest next to the shards. facts: tally, clusters, fertility."""
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
    plan: PreparePlan,
    folder: pathlib.Path,
    number: int,
    count: int,
    executor: Executor,
    progress: Progress,
    tally: Tally,
    sums: fertility.Sums,
) -> Blocks:
    """Returns the blocks that a pass over `count` pieces writes. Adds its counts to tally and sums."""
    step = plan.passes[number]
    progress.begin(pass_title(number, step), count)
    rows = array.array("q")  # 8 bytes per number: there may be millions of blocks
    columns = COLUMNS + len(step.joins)
    shutil.rmtree(folder / RUNNING, ignore_errors=True)  # left by a killed process
    with progress.ticking(lambda: f"{len(rows) // columns:,} blocks", lambda: read_running(folder)):
        for result in executor.run_all(run_task, NumberedTasks(Task(str(folder), number), count)):
            rows.extend(itertools.chain.from_iterable(block_rows(result)))  # the rest is added up, and let go
            for block in result["blocks"]:
                fertility.add_measured(sums, BlockResult(*block).fertility)
            progress.add(result)
            tally.merge(Tally.from_json(result["tally"]))
            if step.joins and len(rows) // columns > MAX_BLOCKS:
                raise BadInput(f"duplicates are found among at most {MAX_BLOCKS:,} blocks; {BLOCK_LIMIT_FIX}")
    if not rows:
        lost = tally.left_out(plan.cfg.read.where)
        reason = "; ".join(filter(None, [funnel_line(tally), lost.line if lost else ""])) or "the input is empty"
        raise BadInput(f"no document is left after {pass_title(number, step)}: {reason}")
    return write_blocks(str(folder), number, np.frombuffer(rows, np.int64).reshape(-1, columns))


def train_on_blocks(cfg: PrepareConfig, blocks: Sequence[str], path: pathlib.Path) -> None:
    """Writes a tokenizer trained on all documents to `path`, unless it exists. Memory: one block."""
    done = path.with_suffix(".done.json")
    if read_done(done) is None:
        tables = (read_table(pathlib.Path(f"{base}.arrow")) for base in blocks)
        texts = (text for table in tables for text in table.column("text").to_pylist())
        train_tokenizer(texts, cfg.tokenizer.train, path)
        mark_done(done, {}, [path])


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that can change the output."""
    found = {"jaxscale": __version__, "python": platform.python_version()}
    for name in ("numpy", "pyarrow", "rensa", "py3langid", "tokenizers", "sentencepiece", "rustbpe"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def create_output(output: pathlib.Path) -> None:
    """Creates the folder. Raises BadInput if it cannot be created or written."""
    try:
        make_private(output)
    except OSError as error:
        raise BadInput(f"--output={output} cannot be made: {error.strerror or error}; name another folder") from None
    if not os.access(output, os.W_OK | os.X_OK):
        raise BadInput(f"--output={output} cannot be written by this user; name another folder")


def has_work(plan: PreparePlan, output: pathlib.Path, folder: pathlib.Path, say: Callable[[str], None]) -> bool:
    """Returns True if there is work to do in `folder`, False if the output is complete.

    Raises BadInput if `output` holds another set, or a complete one with missing files.
    """
    for leftover in output.glob(".*.tmp"):  # left by a process that was killed while writing
        leftover.unlink(missing_ok=True)
    made_from = output / MADE_FROM
    found = read_bytes(made_from).strip() if made_from.exists() else None
    is_same_plan = found == plan.key.encode()
    if not is_same_plan and (found is not None or (output / MANIFEST).exists()):
        whole = "another set" if (output / MANIFEST).exists() else "a part of another set"
        raise BadInput(f"{output} holds {whole}, made from another recipe, input or version; choose another --output")
    if (output / MANIFEST).exists():
        check_manifest(output / MANIFEST, deep=False)
        say(f"{output} is complete: the same recipe, the same input")
        return False
    for other in sorted(output.glob("work-*")):
        if other != folder:
            say(f"{other} is unfinished work of another recipe, input or version; delete it if you do not need it")
    if folder.is_dir():
        say(f"resuming {folder}")
    make_private(folder)
    return True


def hash_value(value: Any) -> str:
    """Returns 32 hexadecimal digits: a hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def raise_in_use(folder: pathlib.Path) -> NoReturn:
    """Raises BadInput for a folder that another process on this machine is using."""
    raise BadInput(f"another process is at work in {folder}; wait for it, or stop it")


def write_shards(cfg: PrepareConfig, blocks: Blocks, executor: Executor, progress: Progress) -> list[str]:
    """Writes all shards and returns their names in order."""
    count = max(1, math.ceil(blocks.total(TOKENS) / cfg.write.shard_tokens))
    progress.begin(f"writing {count} shards", count)
    shuffle = shard_shuffle(blocks, count)
    check_open_files(shuffle)
    for _ in executor.write_shards(shuffle):
        progress.add(None)
    return [shard_name(number, count) for number in range(count)]


def check_open_files(shuffle: Shuffle) -> None:
    """Raises BadInput if the limit on open files is below what one task of the shuffle needs."""
    require_open_files(shuffle.max_open_files, "files of blocks")


def pass_title(number: int, step: Pass) -> str:
    """Returns the title of a pass for the progress line."""
    names = [*(["reading"] if number == 0 else []), *step.stages, *(["tokens"] if step.ends == "tokens" else [])]
    return f"pass {number + 1}: " + (", ".join(names) or "counting")


def funnel_line(tally: Tally) -> str:
    """Returns counts such as 'read 10; language: not wanted 7; ...'."""
    totals: collections.Counter = collections.Counter()
    for name, number in tally.counts.items():
        if name[0] == "dropped" and name[-1] == "documents":
            totals[name[3]] += number
        if name[:2] == ("in", "read") and name[-1] == "documents":
            totals["read"] += number
        if name[0] == "read" and not is_repair(name[-1]) and name[-1] not in (BYTES, *FIXES):
            totals[f"left out: {name[-1]}"] += number
    reasons = [f"{reason} {number:,}" for reason, number in totals.most_common()]
    languages = [f"{name} {number:,}" for name, number in dropped_languages(tally).most_common(MOST_LANGUAGES)]
    return "; ".join([*reasons, f"dropped languages {', '.join(languages)}"] if languages else reasons)
