"""Growth of loader costs: plans, indexes, opens, reads and traces a synthetic set of tiny documents at several sizes.

Each stage runs in its own process, so that its memory can be measured.
"""

import concurrent.futures
import functools
import multiprocessing
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxscale import schema
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.ledger import Ledger, publish_names
from jaxscale.runtime.data.manifest import NAME as MANIFEST
from jaxscale.runtime.data.manifest import open_set, read_manifest, write_manifest
from jaxscale.runtime.data.pipeline import Corpus, open_data
from jaxscale.runtime.data.shard_writer import ShardWriter
from jaxscale.system.exits import BadInput

SHARD_DOCUMENTS = 1 << 20  # documents per shard of the synthetic set
VOCABULARY = 1000
SEQ_LEN, BATCH_ROWS = 64, 64  # about 16 documents of 4 tokens per row
BATCHES = 50  # number of batches that are read, far from each other
FAR = 7919  # distance between two batches that are read
LOOK_SECONDS = 0.02  # between two measurements of memory
LEAST = {"cpu_seconds": 0.1, "memory_bytes": 1e7, "opened": 100}  # smaller values are not measured well enough
LINEAR = 1.1  # a cost that grows by more than this times the growth of the documents is reported


def measure_loader(
    sizes: Sequence[int], folder: pathlib.Path | None = None, *, tokens: int = 4, say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Returns a record per size, smallest first: documents, index_bytes and names_bytes per document, and stages, each
    with cpu_seconds, seconds, memory_bytes (without mapped files) and count (of operations).

    `sizes` are numbers of documents. `folder` is for the sets, about 45 bytes per document; the default is a temporary
    folder. `tokens` is the mean length of a document.
    """
    found = []
    with tempfile.TemporaryDirectory(dir=folder) as own:
        for documents in sorted(sizes):
            place = pathlib.Path(own) / str(documents)
            say(f"{documents:,} documents: generating")
            alone(make_set, place, documents, tokens)
            stages = {}
            for name, stage in STAGES.items():
                say(f"{documents:,} documents: {name}")
                stages[name] = alone(stage, place)
            size = lambda kind, place=place: sum(file.stat().st_size for file in place.glob(f"**/{kind}-*/*"))
            each = {f"{name}_bytes": size(kind) / documents for name, kind in (("index", "rows"), ("names", "names"))}
            found.append({"documents": documents, **each, "stages": stages})
    return found


def growth(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each stage whose CPU time, memory or opened files grow faster than the documents.

    Costs below a tenth of a second, ten megabytes or a hundred files are too small to be measured and do not count.
    """
    lines = []
    for before, after in zip(records, records[1:]):
        times = after["documents"] / before["documents"]
        for name, stage in after["stages"].items():
            for what, least in LEAST.items():
                if what not in stage or name not in before["stages"]:
                    continue
                was, now = (max(record["stages"][name][what], least) for record in (before, after))
                if now / was > LINEAR * times:
                    lines.append(
                        f"{name}: {what} grows {now / was:.2f} times while the documents grow {times:.2f} times, to "
                        f"{after['documents']:,}"
                    )
    return lines


def loader_lines(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the records as lines of text."""
    lines = []
    for record in records:
        lines.append(
            f"{record['documents']:,} documents: {record['index_bytes']:.2f} bytes of index and plan each, "
            f"{record['names_bytes']:.2f} of names"
        )
        for name, stage in record["stages"].items():
            each = f", {stage['seconds'] / stage['count'] * 1e3:,.1f} ms each of {stage['count']}"
            lines.append(
                f"  {name:<16} {stage['cpu_seconds']:>9.2f} s of CPU, {stage['seconds']:>9.2f} s, "
                f"{stage['memory_bytes'] / 1e6:>7,.0f} MB{each if stage['count'] > 1 else ''}"
            )
    return [*lines, *(growth(records) or ["nothing grows faster than the documents"])]


def alone(stage: Callable[..., int], *arguments: Any) -> dict[str, Any]:
    """Measures a stage in a new process."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(costs_of, functools.partial(stage, *arguments)).result()


def costs_of(stage: Callable[[], int]) -> dict[str, Any]:
    """Returns the seconds and the additional memory of a stage, which returns its number of operations."""
    before, peak, ended = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while True:
            peak[0] = max(peak[0], anonymous_bytes())
            if ended.wait(LOOK_SECONDS):
                return

    watch = threading.Thread(target=look, name="memory")
    watch.start()
    clocks = time.process_time(), time.perf_counter()
    try:
        count = stage()
        spent = time.process_time() - clocks[0], time.perf_counter() - clocks[1]
    finally:
        ended.set()
        watch.join()
    return {"cpu_seconds": spent[0], "seconds": spent[1], "memory_bytes": peak[0] - before, "count": count}


def anonymous_bytes() -> int:
    """Returns the memory of this process without mapped files, whose memory the system can reclaim."""
    for line in pathlib.Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise BadInput("this system does not report process memory (RssAnon in /proc/self/status); measure on Linux")


def make_set(folder: pathlib.Path, documents: int, tokens: int) -> int:
    """Writes shards of random documents, each with an id, and their manifest."""
    folder.mkdir(parents=True)
    names = []
    for first in range(0, documents, SHARD_DOCUMENTS):
        number, rng = min(SHARD_DOCUMENTS, documents - first), np.random.default_rng(first)
        lengths = rng.geometric(1 / (tokens - 1), number) + 1
        ids = rng.integers(1, VOCABULARY, int(lengths.sum()), np.uint16)
        ids[np.cumsum(lengths) - 1] = 0
        names.append(f"shard-{first // SHARD_DOCUMENTS:05d}")
        writer = ShardWriter(folder, names[-1], vocab_size=VOCABULARY, eos_id=0, sources=["made-up"])
        writer.add_block(ids, lengths, np.zeros(number, np.int64))
        numbers = pa.array(np.arange(first, first + number))
        nothing = pa.array([""] * number)
        lineage = pa.table(
            {
                "file": pa.DictionaryArray.from_arrays(np.zeros(number, np.int32), ["made-up.jsonl"]),
                "offset": numbers,
                "id": numbers.cast(pa.string()),
                "url": nothing,
                "licence": nothing,
                "language": nothing,
            }
        )
        tokenizer = {"name": "made-up", "eos_token": "", "vocab_size": VOCABULARY, "fingerprint": "made-up"}
        files = [{"name": names[-1], "source": "made-up", "documents": number}]
        header = {"tokenizer": tokenizer, "eos_id": 0, "text_bytes": 0, "skipped": {}, "files": files}
        writer.finish(None, header, lineage)
    write_manifest(folder, names, recipe={})
    return 1


def open_made_up(folder: pathlib.Path) -> Corpus:
    """Returns the corpus of a synthetic set."""
    values = {"name": "tokens", "files": str(folder / MANIFEST), "cache_dir": str(folder / "cache")}
    make = dict(seq_len=SEQ_LEN, vocab_size=VOCABULARY, seed=0)
    return open_data(schema.from_dict(DataConfig, values), **make, say=lambda line: None)


def plan_rows(folder: pathlib.Path) -> int:
    """Hashes the set and plans its rows."""
    open_made_up(folder)
    return 1


def index_names(folder: pathlib.Path) -> int:
    """Creates the index of document names."""
    publish_names(folder, open_set(read_manifest(folder / MANIFEST)))
    return 1


def open_again(folder: pathlib.Path) -> int:
    """Opens the corpus, which is already hashed and planned, and reads a batch."""
    open_made_up(folder).batches(BATCH_ROWS).batch(0)
    return 1


def read_far(folder: pathlib.Path) -> int:
    """Reads batches that are far from each other."""
    batches = open_made_up(folder).batches(BATCH_ROWS)
    for n in range(BATCHES):
        batches.batch(n * FAR)
    return BATCHES


def trace_step(folder: pathlib.Path) -> int:
    """Lists the documents of a batch."""
    corpus = open_made_up(folder)
    Ledger(corpus, corpus.batches(BATCH_ROWS)).batch(FAR)
    return 1


def trace_document(folder: pathlib.Path) -> int:
    """Finds the steps that train on a document, given its id."""
    corpus = open_made_up(folder)
    ledger = Ledger(corpus, corpus.batches(BATCH_ROWS))
    number = int(corpus.train_rows.pieces(ledger.batches.row_numbers(FAR)).documents[0])  # the number is also the id
    if not ledger.steps_of(str(number), FAR + 1):
        raise RuntimeError(f"no step reads document {number}")
    return 1


STAGES = {
    "hash and plan": plan_rows,
    "index of names": index_names,
    "open, a batch": open_again,
    "far batches": read_far,
    "trace a step": trace_step,
    "trace a document": trace_document,
}
