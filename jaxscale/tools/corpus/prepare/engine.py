"""Runs a data preparation: passes over the documents, joins between passes, token shards, and the manifest."""

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
from jaxscale.runtime.text.sources.files import SourceFile, list_files, not_documents_problem, size_of
from jaxscale.runtime.text.sources.part import BYTES, FIXES
from jaxscale.runtime.text.sources.read import split_file
from jaxscale.runtime.text.tokenizer.base import Tokenizer
from jaxscale.runtime.text.tokenizer.config import special_names
from jaxscale.runtime.text.tokenizer.load import NO_BOS, naming_files, tokenizer_problem
from jaxscale.runtime.text.tokenizer.train import train_tokenizer
from jaxscale.system.digest import file_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import locked, make_private, read_bytes, write_text_atomic
from jaxscale.tools.corpus.curate.contamination import count_items, list_evaluation_files
from jaxscale.tools.corpus.curate.origin import list_paths, load_url_words
from jaxscale.tools.corpus.curate.quality import read_words
from jaxscale.tools.corpus.prepare import lookup, preparation_page, tokens
from jaxscale.tools.corpus.prepare.config import JOINS, PrepareConfig, TokenizerConfig
from jaxscale.tools.corpus.prepare.dedup import Executor, cluster_facts, find_duplicates
from jaxscale.tools.corpus.prepare.examples import WEIGHTS, ensure_classifier, example_files, with_weights
from jaxscale.tools.corpus.prepare.progress import RUNNING, PrepareProgress, read_running
from jaxscale.tools.corpus.prepare.shuffle import Shuffle, run_shuffle
from jaxscale.tools.corpus.prepare.sketches import BLOCK_LIMIT_FIX, MAX_BLOCKS
from jaxscale.tools.corpus.prepare.tally import Tally
from jaxscale.tools.corpus.prepare.work import BlockResult, Task, join_folder, run_task

MADE_FROM = "made-from.txt"  # has the plan's key, which depends on file dates, unlike the manifest
LOCK = ".lock"  # never deleted, since another process may have locked the same file
FORMAT = 2  # increase when the same recipe would produce different bytes
LAYOUT = 4  # version of the work folder; work folders of other versions are not resumed


class PreparePlan(NamedTuple):
    """Input pieces, passes and key of a preparation."""

    cfg: PrepareConfig
    key: str  # hash of the recipe and the input; equal keys give equal output
    files: Sequence[SourceFile]
    pieces: np.ndarray  # int64[pieces, 3], in input order: file index, begin, end
    passes: list[lookup.PreparePass]
    notes: tuple[str, ...]  # messages about the input files, printed once


def make_plan(cfg: PrepareConfig) -> PreparePlan:
    """Returns the plan of a preparation. Raises BadInput if there are no input files or no tokenizer."""
    notes: list[str] = []
    files, problems = list_files(cfg.globs, "sources", "text", say=notes.append)
    if not cfg.tokenizer.is_trained and (problem := tokenizer_problem(cfg.tokenizer.name)):
        problems.append(problem.replace("data.tokenizer", "tokenizer.name"))
    if not problems:
        problems += filter(None, [bos_problem(cfg.tokenizer)])
    problems += filter(None, map(not_documents_problem, files))
    if problems:
        raise BadInput(problems[0])
    for source in cfg.sources:
        read_cfg = cfg.read_cfg(source)
        choices = choose_fields([file for file in files if file.source == source], read_cfg)
        ids_files = [file.path for file, choice in choices.items() if choice.kind == "ids"]
        if ids_files and cfg.tokenizer.is_trained:
            raise BadInput(f"{ids_files[0]} has token ids, not text to train on; set tokenizer.name to their tokenizer")
        notes += describe_choices(choices, read_cfg)
    parts = (split_file(file, cfg.read_cfg(file.source), cfg.block_bytes) for file in files)
    rows = (number for i, file_parts in enumerate(parts) for part in file_parts for number in (i, part.begin, part.end))
    pieces = np.fromiter(rows, np.int64).reshape(-1, 3)
    min_blocks = max(len(pieces), sum(size_of(file.path) or 0 for file in files) // cfg.block_bytes)
    if min_blocks > MAX_BLOCKS and not {*JOINS}.isdisjoint(cfg.stages):
        raise BadInput(
            f"the input has at least {min_blocks:,} blocks, but deduplication supports at most {MAX_BLOCKS:,}; "
            f"{BLOCK_LIMIT_FIX}"
        )
    made_from = {
        "format": FORMAT,
        # the settings of `rows` change indexes, not shards
        "recipe": {name: value for name, value in schema.to_dict(cfg).items() if name != "rows"},
        "files": [[*file, *size_and_mtime(file.path)] for file in files],
        "read beside": hash_auxiliary_files(cfg, notes.append),
    }
    passes = lookup.plan_passes(cfg.stages, train_tokenizer=cfg.tokenizer.is_trained)
    return PreparePlan(cfg, hash_value(made_from), files, pieces, passes, tuple(notes))


def hash_auxiliary_files(cfg: PrepareConfig, say: Callable[[str], None]) -> list[tuple[str, str]]:
    """Returns (name, sha256) of each file, other than the source files, that affects the output.

    Omits the files of stages that do not run. Raises BadInput if a file cannot be read. `say` is called with messages
    about ignored links.
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
        words.append((cfg.c4.bad_words, hash_value(read_words(cfg.c4.bad_words, "c4.bad_words"))))
    if "toxicity" in cfg.stages and cfg.toxicity.word_list:
        listed = read_words(cfg.toxicity.word_list, "toxicity.word_list", "#")
        words.append((cfg.toxicity.word_list, hash_value(listed)))
    return [*((str(path), file_sha256(str(path))) for path in paths), *words]


def bos_problem(cfg: TokenizerConfig) -> str:
    """Returns a problem with the tokenizer's BOS or EOS setting, or ''."""
    if cfg.is_trained and cfg.bos_token not in ("", NO_BOS, *special_names(cfg.train)):
        known = ", ".join(special_names(cfg.train))
        return f"tokenizer.bos_token={cfg.bos_token} is not a special token of the tokenizer to train ({known})"
    if not cfg.is_trained:
        try:
            tokens.tokenizer_of(cfg.path(""), cfg)
        except BadInput as error:
            names = {"data.tokenizer=": "tokenizer.name=", "data.bos_token": "tokenizer.bos_token"}
            names |= {"data.eos_token": "tokenizer.eos_token"}
            return functools.reduce(lambda text, pair: text.replace(*pair), names.items(), str(error))
    return ""


def prepare(
    plan: PreparePlan,
    output: pathlib.Path,
    executor: Executor,
    progress: PrepareProgress,
    *,
    keep_work: bool = False,
    strict: bool = False,
) -> None:
    """Writes the shards, manifest and report of a plan to `output`.

    If the process is killed, the same call resumes. Raises BadInput if `output` has a different dataset, if another
    process writes to it, or if no document remains. strict: also raises if much input was skipped or text was lost.
    """
    output = output.absolute()
    try:
        make_private(output)
    except OSError as error:
        raise BadInput(f"--output={output} cannot be created: {error.strerror or error}; use another folder") from None
    if not os.access(output, os.W_OK | os.X_OK):
        raise BadInput(f"--output={output} is not writable by this user; use another folder")
    for line in plan.notes:
        progress.say(line)

    def raise_in_use() -> NoReturn:
        raise BadInput(f"another process is writing to {output}; wait for it to end, or stop it")

    with locked(output / LOCK, raise_in_use):
        versions_hash = hash_value({**versions(), "layout": LAYOUT})[:8]  # other versions may produce different bytes
        folder = output / f"work-{plan.key}-{versions_hash}"
        if has_work(plan, output, folder, progress.say):
            write_set(plan, output, folder, executor, progress, strict)
        elif strict:
            tally = Tally.from_json(preparation_page.read_facts(output)["tally"])
            report_left_out(plan.cfg, tally, progress, strict)
            report_loss(None, tally, progress, strict)
        # also for a complete dataset, since an earlier process may have been killed before this line
        preparation_page.rewrite_report(output)
        if not keep_work:
            shutil.rmtree(folder, ignore_errors=True)


def write_set(
    plan: PreparePlan,
    output: pathlib.Path,
    folder: pathlib.Path,
    executor: Executor,
    progress: PrepareProgress,
    strict: bool,
) -> None:
    """Runs every pass and join, and writes the manifest last. strict: see report_left_out and report_loss."""
    cfg, tally, clusters, blocks, sums = plan.cfg, Tally(), [], None, {}
    item_counts = count_items(cfg.decontaminate) if "decontaminate" in cfg.stages else None
    for line in preparation_page.evaluation_warnings(cfg.decontaminate, item_counts):
        progress.say(line)
    classifier_facts = ensure_classifier(cfg, folder, progress)
    lookup.write_input(folder, with_weights(cfg, folder), plan.files, plan.pieces)
    tokenizer_path = cfg.tokenizer.path(str(folder))
    for number, step in enumerate(plan.passes):
        count = len(plan.pieces if blocks is None else blocks)
        blocks = run_pass(plan, folder, number, count, executor, progress, tally, sums)
        if number == 0:
            report_left_out(cfg, tally, progress, strict)
        if step.ends == "tokens":
            report_loss(tokens.tokenizer_of(tokenizer_path, cfg.tokenizer), tally, progress, strict)
        for column, join in enumerate(step.joins):
            progress.begin(f"{join}: comparing all documents", 1)
            found = find_duplicates(cfg, join, join_folder(str(folder), number, join), blocks, column, executor)
            clusters.append(cluster_facts(join, found, blocks))
        if step.ends == "sample":
            progress.begin("training the tokenizer", 1)
            train_on_blocks(cfg, blocks, pathlib.Path(tokenizer_path))
    assert blocks is not None, "every plan has at least one pass"
    names = write_shards(cfg, blocks, executor, progress)
    progress.end()
    write_text_atomic(output / MADE_FROM, plan.key + "\n")  # before the shards, whose names do not depend on the recipe
    tokens.move_shards(folder, names, output)
    if classifier_facts:
        shutil.copyfile(folder / WEIGHTS, output / WEIGHTS)
    tokenizer = tokens.tokenizer_of(tokenizer_path, cfg.tokenizer)
    rows = [row._asdict() for row in tokens.fertility_rows(sums, tokenizer)]
    facts = {"tally": tally.to_json(), "clusters": clusters, "fertility": rows}
    facts |= {"evaluation": item_counts} if item_counts else {}
    facts |= {"classifier": classifier_facts} if classifier_facts else {}
    write_text_atomic(output / preparation_page.FACTS, json.dumps(facts, indent=1, sort_keys=True) + "\n")
    write_manifest(
        output,
        names,
        recipe=schema.to_dict(cfg),
        tokenizer_file=tokenizer.saved_file(),
        source_bytes={name: tally.counts["written", name, "bytes"] for name in cfg.sources},
        versions=versions(),
    )


def report_left_out(cfg: PrepareConfig, tally: Tally, progress: PrepareProgress, strict: bool) -> None:
    """Logs how much input was skipped while reading. If the share is large and `strict` is set, raises BadInput."""
    if lost := tally.left_out(cfg.read.where):
        say_or_raise(progress, lost.line, lost.is_much, strict, "omit --strict to prepare the other documents")


def report_loss(tokenizer: Tokenizer | None, tally: Tally, progress: PrepareProgress, strict: bool) -> None:
    """Logs how much sampled text the tokenizer loses. If the share is large and `strict` is set, raises BadInput."""
    if (loss := tally.loss).lost:
        name, reason = ("the dataset's tokenizer", "")
        if tokenizer:
            name, reason = f"tokenizer.name={tokenizer.name}", tokenizer.loss_reason
        say_or_raise(progress, loss.line(name, reason), loss.is_much, strict, "omit --strict to prepare it anyway")


def say_or_raise(progress: PrepareProgress, line: str, is_much: bool, strict: bool, fix: str) -> None:
    if is_much and strict:
        raise BadInput(f"{line}; {fix}")
    progress.say(f"{'WARNING: ' if is_much else ''}{line}")


def run_pass(
    plan: PreparePlan,
    folder: pathlib.Path,
    number: int,
    count: int,
    executor: Executor,
    progress: PrepareProgress,
    tally: Tally,
    sums: tokens.FertilitySums,
) -> lookup.PassBlocks:
    """Runs the `count` tasks of a pass and returns the blocks that they write. Updates `tally` and `sums`."""
    step = plan.passes[number]
    progress.begin(pass_title(number, step), count)
    rows = array.array("q")  # 8 bytes per number, since there may be millions of blocks
    columns = lookup.COLUMNS + len(step.joins)
    shutil.rmtree(folder / RUNNING, ignore_errors=True)  # left by a killed process
    with progress.ticking(lambda: f"{len(rows) // columns:,} blocks", lambda: read_running(folder)):
        for result in executor.run_all(run_task, Task(str(folder), number), count):
            for block in itertools.starmap(BlockResult, result["blocks"]):
                rows.extend((result["number"], block.index, block.documents, block.tokens, *block.keys))
                tokens.add_fertility(sums, block.fertility)
            progress.add(result)
            tally.merge(Tally.from_json(result["tally"]))
            if step.joins and len(rows) // columns > MAX_BLOCKS:
                raise BadInput(f"deduplication supports at most {MAX_BLOCKS:,} blocks; {BLOCK_LIMIT_FIX}")
    if not rows:
        lost = tally.left_out(plan.cfg.read.where)
        reason = "; ".join(filter(None, [funnel_line(tally), lost.line if lost else ""])) or "the input is empty"
        raise BadInput(f"no documents are left after {pass_title(number, step)}: {reason}")
    return lookup.write_blocks(str(folder), number, np.frombuffer(rows, np.int64).reshape(-1, columns))


def train_on_blocks(cfg: PrepareConfig, blocks: Sequence[str], path: pathlib.Path) -> None:
    """Trains a tokenizer on all documents and writes it to `path`, unless it exists. Loads one block at a time."""
    done = path.with_suffix(".done.json")
    if lookup.read_done(done) is None:
        tables = (lookup.read_table(pathlib.Path(f"{base}.arrow")) for base in blocks)
        texts = (text for table in tables for text in table.column("text").to_pylist())
        train_tokenizer(texts, cfg.tokenizer.train, path)
        lookup.mark_done(done, {}, [path])


def versions() -> dict[str, str]:
    """Returns the versions of installed packages that can change the output."""
    found = {"jaxscale": __version__, "python": platform.python_version()}
    for name in ("numpy", "pyarrow", "rensa", "py3langid", "tokenizers", "sentencepiece", "rustbpe", "python-stdnum"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def has_work(plan: PreparePlan, output: pathlib.Path, folder: pathlib.Path, say: Callable[[str], None]) -> bool:
    """Returns False if the output is complete. Raises BadInput for a different dataset or missing files."""
    for leftover in output.glob(".*.tmp"):  # left by a process that was killed while writing
        leftover.unlink(missing_ok=True)
    made_from = output / MADE_FROM
    found = read_bytes(made_from).strip() if made_from.exists() else None
    is_same_plan = found == plan.key.encode()
    if not is_same_plan and (found is not None or (output / MANIFEST).exists()):
        whole = "a different dataset" if (output / MANIFEST).exists() else "part of a different dataset"
        raise BadInput(f"{output} already has {whole} (different recipe, input or version); use a different --output")
    if (output / MANIFEST).exists():
        check_manifest(output / MANIFEST, deep=False)
        say(f"{output} is already complete, with the same recipe and input")
        return False
    for other in sorted(output.glob("work-*")):
        if other != folder:
            say(f"{other} is unfinished work of a different recipe, input or version; delete it if it is not needed")
    if folder.is_dir():
        say(f"resuming {folder}")
    make_private(folder)
    return True


def hash_value(value: Any) -> str:
    """Returns a hash of plain data, as 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def write_shards(
    cfg: PrepareConfig, blocks: lookup.PassBlocks, executor: Executor, progress: PrepareProgress
) -> list[str]:
    """Writes all shards and returns their names in order."""
    count = max(1, math.ceil(blocks.total(lookup.TOKENS) / cfg.write.shard_tokens))
    progress.begin(f"writing {count} shards", count)
    source, between = tokens.TokenBlocks(blocks.folder, blocks.number), f"{blocks.folder}/shuffled"
    shuffle = Shuffle(source, between, len(blocks), count, merges_first=True)
    for _ in run_shuffle(executor.run_all, shuffle, tokens.merge_tokens, tokens.write_shard):
        progress.add(None)
    return [tokens.shard_name(number, count) for number in range(count)]


def pass_title(number: int, step: lookup.PreparePass) -> str:
    """Returns the title of a pass for the progress line."""
    names = [*(["reading"] if number == 0 else []), *step.stages, *(["tokens"] if step.ends == "tokens" else [])]
    return f"pass {number + 1}: " + (", ".join(names) or "counting")


def funnel_line(tally: Tally) -> str:
    """Returns counts by reason, such as 'read 10; language: not wanted 7; ...'."""
    totals: collections.Counter = collections.Counter()
    for name, number in tally.counts.items():
        if name[0] == "dropped" and name[-1] == "documents":
            totals[name[3]] += number
        if name[:2] == ("in", "read") and name[-1] == "documents":
            totals["read"] += number
        if name[0] == "read" and not is_repair(name[-1]) and name[-1] not in (BYTES, *FIXES):
            totals[f"left out: {name[-1]}"] += number
    reasons = [f"{reason} {number:,}" for reason, number in totals.most_common()]
    dropped = tally.sums("detail", "language", by=3)
    languages = [f"{name} {number:,}" for name, number in dropped.most_common(preparation_page.MOST_LANGUAGES)]
    return "; ".join([*reasons, f"dropped languages {', '.join(languages)}"] if languages else reasons)
