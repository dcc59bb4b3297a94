"""Growth of preparation and loading costs with the number of documents.

  python -m benchmarks.scale --documents=25000

Runs the same recipe on n, 4n and 16n tiny documents in many small blocks, and the loader on as many documents. A
preparation runs in one process, whose memory is that of the driver and a worker together.
"""

import concurrent.futures
import dataclasses
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks import run_main, show
from benchmarks.scale_loader import LOOK_SECONDS, anonymous_bytes, growth, loader_lines, measure_loader
from jaxscale import schema
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import put
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.engine import make_plan, prepare
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.progress import PrepareProgress

TIMES = (1, 4, 16)
ADDED = ("cpu_seconds", "kernel_seconds", "seconds", "opened")  # costs that are summed over the parts of a stage
WORDS = 12  # words per document, about 80 bytes
COPIES = 10  # every tenth document is a copy of one of ten texts
RECIPE: dict[str, Any] = {
    "stages": ("exact_dedup", "near_dedup"),
    "tokenizer": {"name": "bytes"},
    "block_bytes": 1 << 14,  # 28 documents; a real recipe has thousands
    "write": {"shard_tokens": 1 << 20},
}


def measure_scale(documents: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns {"prepare": records, "loader": records} for `documents` and 4 and 16 times as many.

    A record of prepare has `documents` and `stages`, each with cpu_seconds, kernel_seconds (included in cpu_seconds),
    seconds, memory_bytes and the number of files opened.
    """
    sizes, found = [documents * times for times in TIMES], []
    for number in sizes:
        say(f"{number:,} documents: preparing")
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
                found.append(pool.submit(prepare_costs, folder, number).result())
    return {"prepare": found, "loader": measure_loader(sizes, say=say)}


def prepare_costs(folder: str, documents: int) -> dict[str, Any]:
    """Returns the record of one preparation in this process."""
    place = pathlib.Path(folder)
    write_documents(place / "made-up.jsonl", documents)
    cfg = schema.from_dict(PrepareConfig, RECIPE | {"sources": {"made-up": {"files": str(place / "made-up.jsonl")}}})
    with Meter() as meter, LocalExecutor(1) as executor:
        prepare(make_plan(cfg), place / "out", executor, meter)
    return {"documents": documents, "stages": meter.stages}


def write_documents(file: pathlib.Path, documents: int) -> None:
    """Writes synthetic JSONL: documents of random words, and repeated copies of a few texts."""
    rng = random.Random(0)
    word = lambda: str(rng.randrange(10**6))
    copies = [" ".join(word() for _ in range(WORDS)) for _ in range(COPIES)]
    with file.open("w", encoding="utf-8") as out:
        for number in range(documents):
            text = rng.choice(copies) if number % COPIES == 0 else " ".join(word() for _ in range(WORDS))
            out.write(json.dumps({"text": text, "id": str(number)}) + "\n")


class Meter(PrepareProgress):
    """Records the costs of each stage of a preparation in this process. Prints nothing."""

    def __init__(self):
        super().__init__(io.StringIO())
        self.stages: dict[str, dict[str, float]] = {}
        self.name, self.before, self.opened = "", (0.0, 0.0, 0.0, 0), 0
        self.memory, self.base, self.ended = 0, anonymous_bytes(), threading.Event()
        self.watch = threading.Thread(target=self.look, name="memory", daemon=True)
        sys.addaudithook(lambda event, _: self.count_opened(event))

    def count_opened(self, event: str) -> None:
        """Counts the files that Python opens. Files that Arrow maps in C++ are not counted."""
        self.opened += event == "open"

    def look(self) -> None:
        """Records the peak memory of the stage."""
        while not self.ended.wait(LOOK_SECONDS):
            self.memory = max(self.memory, anonymous_bytes())

    def begin(self, title: str, total: int) -> None:
        """Ends a stage and begins the next."""
        self.note(re.sub(r"[\d,]+ (?=shards)", "", title))
        super().begin(title, total)

    def note(self, name: str) -> None:
        """Adds the costs since the last call to the stage that ends."""
        now = time.process_time(), os.times().system, time.perf_counter(), self.opened
        if self.name:
            stage = self.stages.setdefault(self.name, dict.fromkeys((*ADDED, "memory_bytes"), 0.0))
            for what, after, before in zip(ADDED, now, self.before):
                stage[what] += after - before
            stage["memory_bytes"] = max(stage["memory_bytes"], self.memory - self.base)
        self.name, self.before, self.memory = name, now, anonymous_bytes()

    def __enter__(self) -> "Meter":
        self.watch.start()
        self.note("reading the recipe")
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        self.ended.set()
        self.watch.join()
        self.note("")


def scale_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as lines of text, with the costs that grow faster than the documents."""
    lines = ["preparation, with driver and worker in one process"]
    for one in record["prepare"]:
        costs = one["stages"].values()
        total = sum(stage["cpu_seconds"] for stage in costs)
        lines.append(f"{one['documents']:,} documents: {total / one['documents'] * 1e6:,.0f} microseconds of CPU each")
        lines += [
            f"  {name:<44} {stage['cpu_seconds']:>8.2f} s of CPU, {stage['kernel_seconds']:>6.2f} in the kernel, "
            f"{stage['memory_bytes'] / 1e6:>6,.0f} MB, "
            f"{stage['opened'] / one['documents'] * 1e3:>8,.1f} files opened per thousand"
            for name, stage in one["stages"].items()
        ]
    found = growth(record["prepare"]) or ["nothing grows faster than the documents"]
    return list(itertools.chain(lines, found, ["", "loading"], loader_lines(record["loader"])))


@dataclasses.dataclass(frozen=True)
class ScaleFlags:
    """Flags of this benchmark."""

    documents: int = flag(25_000, "smallest number of documents; the largest number is 16 times as many", least=1000)
    json: bool = flag(False, "one line of JSON")


@command(ScaleFlags)
def main(arguments: Arguments) -> None:
    """Measures preparation and loading of n, 4n and 16n documents."""
    flags = arguments.flags
    record = measure_scale(flags.documents, (lambda text: None) if flags.json else put)
    show(record, scale_lines(record), as_json=flags.json)


if __name__ == "__main__":
    run_main(main)
