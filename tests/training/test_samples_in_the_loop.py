"""Samples on the way: at their steps, by one program, counted apart, and the training is the same bit for bit."""

import dataclasses
import json

import numpy as np
import pytest
import tiny

from jaxscale.runtime.hosts.config import HangConfig
from jaxscale.runtime.hosts.watchdog import Watchdog
from jaxscale.runtime.monitor.goodput import TimeLedger
from jaxscale.runtime.monitor.history import read_history
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop
from jaxscale.tools.qualify.timing import CompileLog

MESH = {"mesh.data": 4, "mesh.fsdp": 2, "train.num_microbatches": 2}
QUIET = {"monitor.progress": "off", "monitor.log_every_steps": 1, "eval.num_rows": 0, "checkpoint.save_every_steps": 0}
SAMPLE = {"sample.num_tokens": 5, "sample.prompt": "def "}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(" ".join(rng.choice("def return import while".split(), 40)))
    return {"data.name": "files", "data.files": str(folder / "*.txt"), "data.cache_dir": str(folder / "cache")}


def open_tiny(folder, files, overrides=None):
    overrides = {"train_tokens": "7 steps", "model.vocab_size": 272} | SAMPLE | (overrides or {})
    cfg = tiny.config(QUIET | MESH | files | overrides)
    make = tiny.reuse(tiny.program(MESH | {"model.vocab_size": 272}, 8))
    return open_run(cfg, str(folder), log=lambda text: None, make_program=make)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.soak
def test_a_run_that_is_sampled_is_the_same_bit_for_bit_and_its_samples_are_of_their_steps(tmp_path, files):
    states = {
        every: tiny.host(loop.train(open_tiny(tmp_path / str(every), files, {"sample.every_steps": every})))
        for every in (0, 3)
    }
    tiny.assert_same_bits(states[0], states[3])
    plain, sampled = lines(tmp_path / "0" / "metrics.jsonl"), lines(tmp_path / "3" / "metrics.jsonl")
    for name in ("loss", "grad_norm", "tokens_hash"):
        assert [row[name] for row in plain] == [row[name] for row in sampled]
    assert not (tmp_path / "0" / "samples.jsonl").exists()
    found = lines(tmp_path / "3" / "samples.jsonl")
    assert [line["step"] for line in found] == [3, 6, 7] and {line["prompt"] for line in found} == {"def "}
    assert all(line["text"].startswith("def ") for line in found)
    last = (tmp_path / "3" / "sample.txt").read_text()
    assert found[-1]["text"] == last == (tmp_path / "0" / "sample.txt").read_text()
    assert [sample.step for sample in read_history(tmp_path / "3").samples] == [3, 6, 7]
    events = b"".join(path.read_bytes() for path in (tmp_path / "3" / "tensorboard").iterdir())
    assert events.count(b"sample/text_summary") == 3


@pytest.mark.soak
def test_one_program_writes_all_samples_and_its_time_is_neither_a_steps_nor_the_throughputs(tmp_path, files):
    ledger = TimeLedger()
    run = open_tiny(tmp_path / "run", files, {"sample.every_steps": 2})
    watchdog = Watchdog(None, HangConfig(), observers=(ledger,))
    write, took = run.sample, []

    def sample(state):
        before = ledger.totals()["eval"]
        with CompileLog() as compiled:
            text = write(state)
        took.append((ledger.totals()["eval"] - before, compiled.count))
        return text

    loop.train(dataclasses.replace(run, sample=sample, services=run.services._replace(watchdog=watchdog)))
    assert [compiled > 0 for _, compiled in took] == [True, False, False]
    assert ledger.totals()["eval"] >= sum(seconds for seconds, _ in took) > 0
    steps = [row["step_seconds"] for row in lines(tmp_path / "run" / "metrics.jsonl") if row["step_seconds"]]
    assert max(steps) < took[0][0]  # the compilation is in none of them


@pytest.mark.soak
def test_samples_of_steps_that_are_run_again_go_with_them(tmp_path, files):
    folder = tmp_path / "run"
    settings = {"sample.every_steps": 2, "checkpoint.save_every_steps": 3}
    loop.train(dataclasses.replace(open_tiny(folder, files, settings), stop_after=3))
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "prompt": "def ", "text": "lost"}) + '\n{"step": 5, "te')
    loop.train(open_tiny(folder, files, settings))
    found = lines(folder / "samples.jsonl")
    assert [line["step"] for line in found] == [2, 4, 6, 7] and "lost" not in [line["text"] for line in found]


def test_a_reader_sees_each_step_once_while_an_older_attempt_is_still_in_the_file(tmp_path):
    texts = [(2, "a"), (4, "lost"), (6, "lost"), (4, "b")]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    written = "".join(json.dumps({"step": step, "text": text}) + "\n" for step, text in texts)
    (tmp_path / "samples.jsonl").write_text(written + '{"step": 6, "te')
    assert [tuple(sample) for sample in read_history(tmp_path).samples] == [(2, "a"), (4, "b")]


@pytest.mark.slow
def test_what_cannot_write_text_says_so_at_the_start(tmp_path):
    said = []
    cfg, make = tiny.config(QUIET | SAMPLE | {"sample.every_steps": 2}), tiny.reuse(tiny.program())
    run = open_run(cfg, str(tmp_path / "run"), log=said.append, make_program=make)
    assert run.sample is None and "no sample: data.name='synthetic' has no tokenizer" in said
    run.writer.close()
    run.checkpoints.close()


@pytest.mark.parametrize("wrong", [{"sample.every_steps": -1}, {"sample.every_steps": 5, "sample.num_tokens": 0}])
def test_a_cadence_without_tokens_is_refused(wrong):
    with pytest.raises(ValueError, match="every_steps=.* 0 if num_tokens is 0"):
        tiny.config(wrong)
