"""How fast data are prepared and read, on one core: `jaxscale bench data`.

Rates are per second of this process's CPU time, so that a busy neighbour changes little; medians of several rounds.
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
from jaxscale.corpus.prepare.blocks import group_blocks
from jaxscale.corpus.prepare.config import STAGES, PrepareConfig
from jaxscale.corpus.prepare.dedup import find_duplicates, write_sketches
from jaxscale.corpus.prepare.engine import make_plan, prepare
from jaxscale.corpus.prepare.local import LocalExecutor
from jaxscale.corpus.prepare.lookup import block_base, write_blocks
from jaxscale.corpus.prepare.progress import Progress
from jaxscale.corpus.prepare.work import make_stage
from jaxscale.data.config import DataConfig
from jaxscale.data.dataset import read_ahead
from jaxscale.data.pipeline import Corpus, open_data
from jaxscale.qualify.timing import median_seconds, seconds_of
from jaxscale.system.exits import BadInput
from jaxscale.text.document import Document
from jaxscale.text.sources.files import list_files, stdlib_files
from jaxscale.text.sources.read import read_file
from jaxscale.training.feed import Feed

CURATION = ("language", "gopher_repetition", "gopher_quality", "c4", "fineweb", "exact_dedup", "near_dedup", "pii")
FAR_STEP = 1_000_000
READ_BATCHES = 200
SEEKS = 5
# What others reached, one core of a 2-vCPU AMD EPYC (Zen 5), 2026-11-20, on similar English text: to be read beside.
OTHERS = (
    "others, on another day: datatrove 0.10.1's whole recipe 41 documents/s, its tokenising 2.8 MB/s; near duplicates "
    "by datasketch 2.0 1,450, by rensa with Python shingles 4,080 documents/s; Grain's packing 9 to 12, MaxText's "
    "input 1.7, levanter's cache 7 to 57 million tokens/s"
)


def measure_data(
    cfg: PrepareConfig | None, *, seq_len: int, batch_rows: int, rounds: int, commands: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything in one record. cfg: a recipe whose sources are measured; none: this Python's standard library.

    commands: other programs, see in_turn_with.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [split_command(command) for command in commands]  # what is wrong with one is said before all else
        cfg = cfg or stdlib_recipe(pathlib.Path(folder))
        documents = read_all(cfg)
        record: dict[str, Any] = {
            "documents": len(documents),
            "megabytes": sum(document.size for document in documents) / 1e6,
            "rounds": rounds,
            # those that look at a document or block by itself
            "stages": {name: rate(stage_run(cfg, name, documents), rounds) for name in cfg.stages if name in STAGES},
        }
        record["near_dedup"] = rate(lambda: near_pass(cfg, documents, folder), rounds)
        for name, stages in (("curation", cfg.stages), ("shards", ())):
            record[name] = rate(lambda stages=stages, name=name: make_shards(cfg, stages, folder, name), rounds)
        record["others"] = [
            in_turn_with(command, one, cfg, documents, folder, rounds) for command, one in zip(commands, words)
        ]
        record["reading"] = measure_reading(f"{folder}/shards-0/manifest.json", seq_len, batch_rows, rounds)
        return record


def stdlib_recipe(folder: pathlib.Path) -> PrepareConfig:
    """A recipe over this Python's standard library, copied to JSON lines."""
    with open(folder / "stdlib.jsonl", "w", encoding="utf-8") as file:
        for source in stdlib_files():
            text = pathlib.Path(source.path).read_text(encoding="utf-8", errors="replace")
            file.write(json.dumps({"text": text}) + "\n")
    values = {"sources": {"stdlib": {"files": str(folder / "stdlib.jsonl")}}, "stages": CURATION}
    return schema.from_dict(PrepareConfig, values | {"tokenizer": {"name": "bytes"}})


def read_all(cfg: PrepareConfig) -> list[Document]:
    """All documents of the recipe's sources, in memory."""
    files, problems = list_files(cfg.globs, "sources", "text")
    if problems:
        raise BadInput(problems[0])
    return [document for file in files for document in read_file(file, cfg.read_cfg(file.source), Counter())]


def stage_run(cfg: PrepareConfig, name: str, documents: Sequence[Document]) -> Callable[[], None]:
    """A function that runs a stage over all documents as blocks; what documents remember of their text is forgotten."""
    stage = make_stage(cfg, name)
    stage(documents[:10])  # what is loaded lazily is loaded now

    def run() -> None:
        for block in group_blocks(forgetful(documents), cfg.block_bytes):
            stage(block)

    return run


def in_turn_with(
    command: str, words: Sequence[str], cfg: PrepareConfig, documents: Sequence[Document], folder: str, rounds: int
) -> dict[str, Any]:
    """{"command", "stages", "seconds", "ours"}: medians of CPU seconds of another program and of the same stages here.

    It gets a file of JSON lines with the text of each document as its last argument, and prints a line of JSON with the
    "seconds" of CPU time that it took and the "stages" of a recipe that it did in them. Raises BadInput otherwise.
    """
    file = pathlib.Path(folder) / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": document.text}) + "\n" for document in documents), encoding="utf-8")
    theirs, ours, stages, runs = [], [], [], []
    for _ in range(rounds):
        found = run_one([*words, str(file)], shell_environment(), command, ("seconds",))
        named = found.get("stages")
        if not isinstance(named, list) or not named or not all(name in STAGES for name in named):
            raise BadInput(f'{command}: "stages" must list some of {", ".join(STAGES)}, and is {json.dumps(named)}')
        if named != (stages or named):
            raise BadInput(f"{command}: it did {', '.join(stages)} in one round, {', '.join(named)} in another")
        stages, runs = named, runs or [stage_run(cfg, name, documents) for name in named]
        theirs.append(found["seconds"])
        ours.append(sum(rate(run, 1) for run in runs))
    return dict(command=command, stages=stages, seconds=statistics.median(theirs), ours=statistics.median(ours))


def forgetful(documents: Sequence[Document]) -> list[Document]:
    """The same documents without what was computed from them."""
    return [dataclasses.replace(document) for document in documents]


def near_pass(cfg: PrepareConfig, documents: Sequence[Document], folder: str) -> None:
    """The whole of near_dedup as `prepare` does it: hashes, signatures, bands, join, verification, what goes."""
    work, name, rows = tempfile.mkdtemp(dir=folder), "near_dedup", []
    for number, block in enumerate(group_blocks(forgetful(documents), cfg.block_bytes)):
        base = block_base(work, 0, number, 0)
        base.parent.mkdir(parents=True, exist_ok=True)
        rows.append((number, 0, len(block), 0, *write_sketches(cfg, (name,), str(base), block)))
    blocks = write_blocks(work, 0, np.array(rows, np.int64))
    with LocalExecutor(1) as executor:
        find_duplicates(cfg, name, pathlib.Path(work) / "join", blocks, 0, executor)


def make_shards(cfg: PrepareConfig, stages: Sequence[str], folder: str, name: str) -> None:
    """The whole of `jaxscale prepare` in this process."""
    output = next(path for i in itertools.count() if not (path := pathlib.Path(folder) / f"{name}-{i}").exists())
    values = schema.to_dict(cfg) | {"stages": list(stages)}
    with LocalExecutor(1) as executor, open(pathlib.Path(folder) / "progress", "w", encoding="utf-8") as nowhere:
        prepare(make_plan(schema.from_dict(PrepareConfig, values)), output, executor, Progress(nowhere))


def rate(run: Callable[[], None], rounds: int) -> float:
    """Seconds of CPU time that `run` takes: the median."""
    return median_seconds(run, rounds, time.process_time)


def in_turn(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of what each gives, one after the other in each round, so that a busy neighbour meets all of them."""
    found = [{name: measure() for name, measure in measures.items()} for _ in range(rounds)]
    return {name: statistics.median(values[name] for values in found) for name in measures}


def measure_reading(manifest: str, seq_len: int, batch_rows: int, rounds: int) -> dict[str, float]:
    """Packed batches out of shards: tokens/s of one core, seconds to the first batch, and to others far away."""
    cfg = schema.from_dict(DataConfig, {"name": "tokens", "files": manifest, "cache_dir": f"{manifest}-cache"})
    open_corpus = lambda: open_data(cfg, seq_len=seq_len, vocab_size=1 << 20, seed=0, say=lambda line: None)
    corpus = open_corpus()  # row plan and hashes are made and kept
    batches = corpus.batches(batch_rows)
    num_batches = max(1, min(READ_BATCHES, 4 * len(corpus.train_rows) // batch_rows))

    def plain(corpus: Corpus, number: int) -> None:
        reader = corpus.batches(batch_rows)
        for n in range(number):
            reader.batch(n)

    def by_grain(corpus: Corpus, number: int) -> None:
        ahead = read_ahead(corpus.as_grain(batch_rows, number), Feed.AHEAD)
        for _ in range(number):
            next(ahead)
        ahead.close()

    ways = {"plain": plain, "grain": by_grain}
    for way in ways.values():
        way(corpus, num_batches)  # into the page cache
    first = in_turn(
        {name: lambda way=way: seconds_of(lambda: way(open_corpus(), 1))[0] for name, way in ways.items()}, rounds
    )
    once = lambda way: num_batches * batch_rows * seq_len / rate(lambda: way(corpus, num_batches), 1)
    rates = in_turn({name: lambda way=way: once(way) for name, way in ways.items()}, rounds)
    far = [FAR_STEP + 7919 * i for i in range(SEEKS)]  # each in another part of the stream
    half = range(batch_rows // 2, batch_rows)  # the rows of the second of two hosts
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
    """The record for people."""
    documents, megabytes = record["documents"], record["megabytes"]
    per = lambda seconds: f"{documents / seconds:,.0f} documents/s, {megabytes / seconds:,.1f} MB/s"
    lines = [f"{documents:,} documents, {megabytes:,.1f} MB; per CPU second of one core, medians of {record['rounds']}"]
    lines += [f"  {name:<20} {per(seconds)}" for name, seconds in record["stages"].items()]
    lines += [
        f"  {'near_dedup, whole':<20} {per(record['near_dedup'])}",
        f"  {'whole recipe':<20} {per(record['curation'])}",
        f"  {'JSONL to shards':<20} {per(record['shards'])}",
    ]
    read = record["reading"]
    lines.append(
        f"  {'reading':<20} {read['tokens_per_second'] / 1e6:,.0f} million tokens/s, {read['fill']:.2%} of positions "
        f"real; first batch {read['first_batch_seconds']:.3f} s after opening, step {FAR_STEP:,} in "
        f"{read['seek_seconds'] * 1e3:.1f} ms, other rows of it in {read['other_hosts_seconds'] * 1e3:.1f} ms"
    )
    lines.append(
        f"  {'by Grain, as a run':<20} {read['grain_tokens_per_second'] / 1e6:,.0f} million tokens/s; first batch "
        f"{read['grain_first_batch_seconds']:.3f} s after opening"
    )
    for other in record["others"]:
        lines.append(
            f"  {', '.join(other['stages'])}, in turn: {documents / other['ours']:,.0f} documents/s here, "
            f"{documents / other['seconds']:,.0f} by {other['command']}: {other['seconds'] / other['ours']:.1f} times"
        )
    return [*lines, OTHERS]
