"""Memory does not grow with the input: 2 GB of made text, through deduplication, in a bounded number of bytes."""

import json
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import made_text
import pytest

from jaxscale.cli import prepare as command

ROOT = pathlib.Path(command.__file__).parents[2]
TOTAL_BYTES = 2_000_000_000
WORKERS = 2
BOUND = 900 << 20  # of one process; 633 MiB were seen


def write_text(path):
    """2 GB of JSON lines: sentences drawn from ten thousand, so that documents differ; every tenth is a copy."""
    rng = random.Random(0)
    sentences = [made_text.sentence(rng) for _ in range(10_000)]
    written, last = 0, ""
    with open(path, "w") as file:
        while written < TOTAL_BYTES:
            last = last if rng.random() < 0.1 and last else " ".join(rng.choices(sentences, k=40))
            written += file.write(json.dumps({"text": last}) + "\n")


def resident(pid):
    """Bytes in memory of a process and of each of those below it."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(folder.name) == pid or int(fields[1]) == pid:
                found.append(int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, IndexError):
            continue
    return found


@pytest.mark.soak
def test_two_gigabytes_are_prepared_in_bounded_memory(tmp_path):
    write_text(tmp_path / "raw.jsonl")
    flags = [f"--input={tmp_path}/raw.jsonl", f"--output={tmp_path}/out", f"--workers={WORKERS}"]
    flags += ["--config.stages=('repair','exact_dedup','near_dedup')", "--config.tokenizer.name=bytes"]
    process = subprocess.Popen([sys.executable, "-m", "jaxscale.cli", "prepare", *flags], cwd=ROOT)
    peaks, done = [], threading.Event()

    def watch():
        while not done.is_set():
            peaks.append(max(resident(process.pid), default=0))
            time.sleep(0.2)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert process.wait(timeout=3000) == 0
    finally:
        done.set()
        thread.join()
        process.kill()
    print(f"largest process: {max(peaks) / 2**20:.0f} MiB")
    assert max(peaks) < BOUND
