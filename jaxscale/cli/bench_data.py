"""Implements `jaxscale bench data`, which measures the speed of preparing and reading data on one core.

Rates are per second of this process's CPU time, which other programs affect little. Each is a median of several rounds.
"""

import dataclasses
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale import schema
from jaxscale.cli.bench_against import run_one, shell_environment, split_command
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.dataset import read_ahead
from jaxscale.runtime.data.pipeline import Corpus, open_data
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.sources.files import list_files, stdlib_files
from jaxscale.runtime.text.sources.read import read_file
from jaxscale.runtime.training.feed import Feed
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.prepare.config import STAGES, PrepareConfig
from jaxscale.tools.corpus.prepare.dedup import find_duplicates, write_sketches
from jaxscale.tools.corpus.prepare.engine import make_plan, prepare
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.lookup import block_base, group_blocks, write_blocks
from jaxscale.tools.corpus.prepare.progress import PrepareProgress
from jaxscale.tools.corpus.prepare.work import make_stage
from jaxscale.tools.qualify.timing import median_seconds, seconds_of

CURATION = ("language", "gopher_repetition", "gopher_quality", "c4", "fineweb", "exact_dedup", "near_dedup", "pii")
FAR_STEP = 1_000_000
READ_BATCHES = 200
SEEKS = 5
# Measured on one core of a 2-vCPU AMD EPYC (Zen 5), 2026-11-20, on similar English text.
REFERENCE_RATES = (
    "other programs, measured 2026-11-20: datatrove 0.10.1: 41 documents/s for the whole recipe, 2.8 MB/s for "
    "tokenization; near duplicates: 1,450 documents/s with datasketch 2.0, 4,080 with rensa and Python shingles; "
    "reading: 9 to 12 million tokens/s with Grain's packing, 1.7 with MaxText's input, 7 to 57 with levanter's cache"
)


def measure_data(
    cfg: PrepareConfig | None, *, seq_len: int, batch_rows: int, rounds: int, commands: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns all measurements. cfg: a recipe, or None for Python's standard library. commands: see compare_program."""
    with tempfile.TemporaryDirectory() as folder:
        words = [split_command(command) for command in commands]  # raises for invalid commands before measuring
        cfg = cfg or stdlib_recipe(pathlib.Path(folder))
        documents = read_all(cfg)
        record: dict[str, Any] = {
            "documents": len(documents),
            "megabytes": sum(document.size for document in documents) / 1e6,
            "rounds": rounds,
        }
        independent = [name for name in cfg.stages if name in STAGES]  # stages that process each block separately
        record["stages"] = {name: rate(make_stage_run(cfg, name, documents), rounds) for name in independent}
        record["near_dedup"] = rate(lambda: run_near_dedup(cfg, documents, folder), rounds)
        for name, stages in (("curation", cfg.stages), ("shards", ())):
            record[name] = rate(lambda stages=stages, name=name: make_shards(cfg, stages, folder, name), rounds)
        record["others"] = [
            compare_program(command, one, cfg, documents, folder, rounds) for command, one in zip(commands, words)
        ]
        record["reading"] = measure_reading(f"{folder}/shards-0/manifest.json", seq_len, batch_rows, rounds)
        return record


def stdlib_recipe(folder: pathlib.Path) -> PrepareConfig:
    """Returns a recipe for the source code of Python's standard library, copied to a JSON Lines file in `folder`."""
    with open(folder / "stdlib.jsonl", "w", encoding="utf-8") as file:
        for source in stdlib_files():
            text = pathlib.Path(source.path).read_text(encoding="utf-8", errors="replace")
            file.write(json.dumps({"text": text}) + "\n")
    values = {"sources": {"stdlib": {"files": str(folder / "stdlib.jsonl")}}, "stages": CURATION}
    return schema.from_dict(PrepareConfig, values | {"tokenizer": {"name": "bytes"}})


def read_all(cfg: PrepareConfig) -> list[Document]:
    """Returns all documents of the recipe's sources."""
    files, problems = list_files(cfg.globs, "sources", "text")
    if problems:
        raise BadInput(problems[0])
    return [document for file in files for document in read_file(file, cfg.read_cfg(file.source), Counter())]


def make_stage_run(cfg: PrepareConfig, name: str, documents: Sequence[Document]) -> Callable[[], None]:
    """Returns a function that runs a stage on all documents, in blocks, without the caches of earlier runs."""
    stage = make_stage(cfg, name)
    stage(documents[:10])  # loads lazy resources

    def run() -> None:
        for block in group_blocks(map(dataclasses.replace, documents), cfg.block_bytes):
            stage(block)

    return run


def compare_program(
    command: str, words: Sequence[str], cfg: PrepareConfig, documents: Sequence[Document], folder: str, rounds: int
) -> dict[str, Any]:
    """Returns {"command", "stages", "seconds", "ours"}: median CPU seconds of a program, and of jaxscale.

    The last argument of the program is a JSON Lines file with the text of each document. The program prints a JSON line
    with the CPU time ("seconds") and its "stages", which jaxscale also runs. Raises BadInput for other output.
    """
    file = pathlib.Path(folder) / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": document.text}) + "\n" for document in documents), encoding="utf-8")
    theirs, ours, stages, runs = [], [], [], []
    for _ in range(rounds):
        found = run_one([*words, str(file)], shell_environment(), command, ("seconds",))
        named = found.get("stages")
        if not isinstance(named, list) or not named or not all(name in STAGES for name in named):
            raise BadInput(
                f'{command}: "stages" is {json.dumps(named)}, but must be a non-empty list of {", ".join(STAGES)}'
            )
        if named != (stages or named):
            raise BadInput(f"{command} must always run the same stages: {', '.join(stages)}, not {', '.join(named)}")
        stages, runs = named, runs or [make_stage_run(cfg, name, documents) for name in named]
        theirs.append(found["seconds"])
        ours.append(sum(rate(run, 1) for run in runs))
    return dict(command=command, stages=stages, seconds=statistics.median(theirs), ours=statistics.median(ours))


def run_near_dedup(cfg: PrepareConfig, documents: Sequence[Document], folder: str) -> None:
    """Runs near_dedup as `prepare` does: hashes, signatures, bands, join, verification, removal."""
    work, name, rows = tempfile.mkdtemp(dir=folder), "near_dedup", []
    for number, block in enumerate(group_blocks(map(dataclasses.replace, documents), cfg.block_bytes)):
        base = block_base(work, 0, number, 0)
        base.parent.mkdir(parents=True, exist_ok=True)
        rows.append((number, 0, len(block), 0, *write_sketches(cfg, (name,), str(base), block)))
    blocks = write_blocks(work, 0, np.array(rows, np.int64))
    with LocalExecutor(1) as executor:
        find_duplicates(cfg, name, pathlib.Path(work) / "join", blocks, 0, executor)


def make_shards(cfg: PrepareConfig, stages: Sequence[str], folder: str, name: str) -> None:
    """Runs `jaxscale prepare` in this process."""
    output = next(path for i in itertools.count() if not (path := pathlib.Path(folder) / f"{name}-{i}").exists())
    values = schema.to_dict(cfg) | {"stages": list(stages)}
    with LocalExecutor(1) as executor, open(pathlib.Path(folder) / "progress", "w", encoding="utf-8") as progress_file:
        prepare(make_plan(schema.from_dict(PrepareConfig, values)), output, executor, PrepareProgress(progress_file))


def rate(run: Callable[[], None], rounds: int) -> float:
    """Returns the median CPU seconds of `run`."""
    return median_seconds(run, rounds, time.process_time)


def interleaved_medians(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Returns the median of each measure. Each round runs all measures, so that other load affects all of them."""
    found = [{name: measure() for name, measure in measures.items()} for _ in range(rounds)]
    return {name: statistics.median(values[name] for values in found) for name in measures}


def measure_reading(manifest: str, seq_len: int, batch_rows: int, rounds: int) -> dict[str, float]:
    """Measures the reading of packed batches on one core: tokens/s, and seconds to the first and to distant batches."""
    cfg = schema.from_dict(DataConfig, {"name": "tokens", "files": manifest, "cache_dir": f"{manifest}-cache"})
    open_corpus = lambda: open_data(cfg, seq_len=seq_len, vocab_size=1 << 20, seed=0, say=lambda line: None)
    corpus = open_corpus()  # caches the row plan and hashes
    batches = corpus.batches(batch_rows)
    num_batches = max(1, min(READ_BATCHES, 4 * len(corpus.train_rows) // batch_rows))

    def read_directly(corpus: Corpus, number: int) -> None:
        reader = corpus.batches(batch_rows)
        for n in range(number):
            reader.batch(n)

    def read_with_grain(corpus: Corpus, number: int) -> None:
        ahead = read_ahead(corpus.as_grain(batch_rows, number), Feed.AHEAD)
        for _ in range(number):
            next(ahead)
        ahead.close()

    readers = {"plain": read_directly, "grain": read_with_grain}
    for read in readers.values():
        read(corpus, num_batches)  # fills the page cache
    first = interleaved_medians(
        {name: lambda read=read: seconds_of(lambda: read(open_corpus(), 1))[0] for name, read in readers.items()},
        rounds,
    )
    once = lambda read: num_batches * batch_rows * seq_len / rate(lambda: read(corpus, num_batches), 1)
    rates = interleaved_medians({name: lambda read=read: once(read) for name, read in readers.items()}, rounds)
    far = [FAR_STEP + 7919 * i for i in range(SEEKS)]  # in different parts of the stream
    half = range(batch_rows // 2, batch_rows)  # rows of the second of two hosts
    return {
        "tokens_per_second": rates["plain"],
        "grain_tokens_per_second": rates["grain"],
        "first_batch_seconds": first["plain"],
        "grain_first_batch_seconds": first["grain"],
        "seek_seconds": max(seconds_of(lambda n=n: batches.batch(n))[0] for n in far),
        "other_hosts_seconds": max(seconds_of(lambda n=n: batches.rows(n, half))[0] for n in reversed(far)),
        "fill": float(np.mean([np.mean(batches.batch(n).segment_ids > 0) for n in range(num_batches)])),
    }


def data_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as text."""
    documents, megabytes = record["documents"], record["megabytes"]
    per = lambda seconds: f"{documents / seconds:,.0f} documents/s, {megabytes / seconds:,.1f} MB/s"
    lines = [
        f"{documents:,} documents, {megabytes:,.1f} MB; per CPU second on one core, medians of "
        f"{record['rounds']} round(s)"
    ]
    lines += [f"  {name:<20} {per(seconds)}" for name, seconds in record["stages"].items()]
    lines += [
        f"  {'near_dedup, whole':<20} {per(record['near_dedup'])}",
        f"  {'whole recipe':<20} {per(record['curation'])}",
        f"  {'JSONL to shards':<20} {per(record['shards'])}",
    ]
    read = record["reading"]
    lines.append(
        f"  {'reading':<20} {read['tokens_per_second'] / 1e6:,.0f} million tokens/s, {read['fill']:.2%} non-padding "
        f"positions; first batch {read['first_batch_seconds']:.3f} s after opening, step {FAR_STEP:,} in "
        f"{read['seek_seconds'] * 1e3:.1f} ms, rows of another host in {read['other_hosts_seconds'] * 1e3:.1f} ms"
    )
    lines.append(
        f"  {'reading with Grain':<20} {read['grain_tokens_per_second'] / 1e6:,.0f} million tokens/s; first batch "
        f"{read['grain_first_batch_seconds']:.3f} s after opening"
    )
    for other in record["others"]:
        lines.append(
            f"  {', '.join(other['stages'])}, alternating: {documents / other['ours']:,.0f} documents/s in jaxscale, "
            f"{documents / other['seconds']:,.0f} in {other['command']}: ratio {other['seconds'] / other['ours']:.1f}"
        )
    return [*lines, REFERENCE_RATES]
