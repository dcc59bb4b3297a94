"""A preparation that is killed comes to the same bytes when it is started again."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import made_text
import pytest
from prepared import contents, recipe, run

from jaxscale.cli import prepare as command
from jaxscale.runtime.data.manifest import check_manifest
from jaxscale.tools.corpus.publish import publish_indexes

ROOT = pathlib.Path(command.__file__).parents[2]


DYING = """
import os, re, runpy, signal, sys

def watch(event, args):
    path = os.fsdecode(args[0]) if event in ("os.rename", "os.mkdir") else ""
    if event == "os.rename" and ("/joins/" in path or "/shuffled/" in path) or path.endswith("/ranges"):
        place = re.sub(r"[0-9a-f]{16}|[0-9]{6,}", "N", path.partition("/work-")[2].partition("/")[2])
        if not chosen:
            print("at", place, flush=True)
        elif place == chosen:
            os.kill(os.getpid(), signal.SIGKILL)

chosen = sys.argv.pop(1)
sys.addaudithook(watch)
sys.argv.insert(1, "prepare")
runpy.run_module("jaxscale.cli", run_name="__main__")
"""  # prepares, and is killed just before it gives such a file its name; or tells which they are


def group_of(leader):
    """Numbers of the living processes of a group."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            found += [int(folder.name)] if int(fields[2]) == leader and fields[0] != "Z" else []
    return found


def killed_and_finished(flags, output, times, rng):
    """Runs the command, kills it with -9 after its first piece, then at random, `times` times, and lets it finish.

    The first time the parent is killed alone, and its workers must end by themselves.
    """
    command_line = [sys.executable, "-m", "jaxscale.cli", "prepare", *flags, f"--output={output}"]
    for number in range(times):
        process = subprocess.Popen(command_line, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
        while number == 0 and process.poll() is None and not list(output.glob("work-*/pass0/*")):
            time.sleep(0.01)
        time.sleep(rng.uniform(0.3, 8) if number else 0)
        if number == 0:
            workers_end(process)
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert not (output / "manifest.json").exists() or check_manifest(output / "manifest.json", deep=True)
    assert command.main([*flags, f"--output={output}"]) == 0


def workers_end(process):
    """Kills the leader of a group alone, and fails unless the others end too."""
    deadline = time.monotonic() + 60
    while len(group_of(process.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(group_of(process.pid)) > 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while group_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_of(process.pid)


@pytest.mark.slow
@pytest.mark.fault("F23")
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_killed_at_random_it_comes_to_the_same_bytes(corpus, tmp_path, times):
    stages = "('exact_dedup','near_dedup')"
    flags = [f"--input={corpus}", f"--config.stages={stages}", "--config.tokenizer.name=bytes"]
    flags += ["--config.block_bytes=2048", "--config.write.shard_tokens=3000", "--workers=2"]
    killed_and_finished(flags, tmp_path / "killed", times, random.Random(times))
    settings = {"block_bytes": 2048, "write": {"shard_tokens": 3000}}
    cfg = recipe(corpus, stages=("exact_dedup", "near_dedup"), **settings)
    calm = run(cfg, tmp_path / "calm")
    publish_indexes(calm, cfg.rows, lambda line: None)  # as the command does
    assert contents(tmp_path / "killed") == contents(calm)


@pytest.mark.soak
def test_killed_at_every_kind_of_file_of_joins_and_shuffles_it_comes_to_the_same_bytes(corpus, tmp_path):
    more = [made_text.text(i, words=100) for i in range(200, 360)]
    made_text.write_jsonl(corpus.parent / "c.jsonl", more)  # so more than 128 blocks, and two levels
    flags = [f"--input={corpus}", "--config.stages=('exact_dedup','near_dedup')", "--config.tokenizer.name=bytes"]
    flags += ["--workers=1", "--config.block_bytes=1024", "--config.write.shard_tokens=3000"]

    def until(place, name):
        command_line = [sys.executable, "-c", DYING, place, *flags, f"--output={tmp_path / name}"]
        return subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, timeout=300)

    told = until("", "calm").stdout.splitlines()
    places = list(dict.fromkeys(line.removeprefix("at ") for line in told if line.startswith("at ")))
    for place in ("keys/level1", "keys/pairs", "firsts/attached", "near_dedup/pairs", "ranges", "shuffled/level1"):
        assert any(place in one for one in places), place
    for place in places:
        assert until(place, "killed").returncode == -signal.SIGKILL, place
    assert until("nowhere", "killed").returncode == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "calm")
