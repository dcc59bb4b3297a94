"""A run that trains says itself what is wrong with it, and of what it says the evidence is there to be looked up."""

import dataclasses
import functools
import json
import random
import shlex
import shutil

import jax
import pytest
import tiny

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.cli import trace
from jaxscale.config import RunConfig
from jaxscale.runtime.monitor.events import Events, read_events
from jaxscale.runtime.monitor.health import ALL, Health
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.run.options import RunOptions
from jaxscale.runtime.training import loop

pytestmark = pytest.mark.slow

QUIET = {
    "monitor.progress": "lines", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0,
    "checkpoint.save_every_steps": 0,
}  # fmt: skip


def opened(cfg, folder, **options):
    make = functools.partial(make_program, devices=jax.devices()[:1])
    return open_run(cfg, str(folder), log=lambda text: None, options=RunOptions(**options), make_program=make)


def trained(folder, overrides=None):
    loop.train(opened(tiny.config(QUIET | (overrides or {})), folder))
    return [(event["step"], event["what"]) for event in read_events(folder) if event["event"] == "alert"]


@pytest.mark.soak
def test_a_batch_of_nothing_but_nan_is_told_by_the_run_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXSCALE_SPOIL_BATCHES", "6:7:nan")
    assert trained(tmp_path / "run") == [(7, "nonfinite"), (12, "nonfinite")]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("health: ")]
    assert lines[0].startswith("health: step 7: nonfinite: not finite: loss and grad_norm; likely: ")
    assert lines[1].startswith("health: step 12: nonfinite ended: ")


STAGE = 41  # batch at which the sources change
DEVICE = {"device_bytes_in_use", "device_peak_bytes", "mfu"}  # None on a CPU
EXPERTS = {
    f"train/{name}"
    for name in ("experts_effective", "router_entropy_lowest", "experts_dead", "router_bias_to_scores", "router_scores")
}  # of a mixture: tests/training/test_experts_in_the_loop.py


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The work folder of a run whose easy source gives way to one of chance, watched at every second step."""
    folder, draw = tmp_path_factory.mktemp("changed"), random.Random(1)
    for i in range(60):
        (folder / f"easy{i:02}.txt").write_text("".join(draw.choices("ab", k=80)))
        (folder / f"hard{i:02}.txt").write_text("".join(draw.choices("cdefghijklmnopqrstuvwxyz0123456789", k=80)))
    overrides = {
        "train_tokens": "60 steps", "monitor.statistics_every_steps": 2,
        "model": tiny.LLAMA | {"vocab_size": 272, "num_layers": 1},
        "eval.num_rows": 4, "eval.every_steps": 30, "optim.peak_lr": 3e-2, "data": dict(
            files={"easy": str(folder / "easy*.txt"), "hard": str(folder / "hard*.txt")},
            val_fraction=0.05, cache_dir=str(folder / "cache"),
            mixture={"0": {"easy": 1.0}, f"{STAGE} steps": {"easy": 0.25, "hard": 0.75}},
        ),
    }  # fmt: skip
    trained(folder / "run", overrides)
    return folder / "run"


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.soak
def test_a_spike_names_the_stage_that_began_the_batch_its_documents_and_the_command_that_lists_them(changed, capsys):
    alert = next(event for event in read_events(changed) if event.get("what") == "spike")
    assert alert["step"] == STAGE + 1 and alert["numbers"]["batch"] == STAGE
    assert alert["causes"][0] == {
        "what": "the data changed",
        "evidence": f"a stage of data.mixture started with batch {STAGE}; this is batch {STAGE}",
    }
    batch = next(cause["evidence"] for cause in alert["causes"] if cause["what"].startswith("a bad batch"))
    command = shlex.split(batch.split("`")[1])
    assert command[:2] == ["jaxscale", "trace"] and f"--batch={STAGE}" in command
    capsys.readouterr()
    assert trace.main([*command[2:], "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {entry["source"] for entry in listed} == {"easy", "hard"}
    tokens = {}
    for entry in listed:
        name = f"{entry['source']} {entry['file']}, document 0"
        tokens[name] = tokens.get(name, 0) + entry["tokens"]
    named = alert["documents"]
    assert 0 < len(named) <= 8 and alert["numbers"]["documents"] == len(tokens)
    assert [tokens[name] for name in named] == sorted(tokens.values(), reverse=True)[: len(named)]


class Read(dict):
    """A record that remembers what was asked of it, and the beginnings that its names were compared with."""

    def __init__(self, record, asked):
        super().__init__({Name(name, asked): value for name, value in record.items()})
        self.asked = asked

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)

    def __contains__(self, name):
        self.asked.add(name)
        return super().__contains__(name)


class Name(str):
    def __new__(cls, text, asked):
        self = super().__new__(cls, text)
        self.asked = asked
        return self

    def startswith(self, prefix):
        self.asked.add(prefix)
        return super().startswith(prefix)


def test_every_name_that_a_rule_reads_is_one_that_a_run_writes(changed):
    records, asked = records_of(changed), set()
    health = Health()
    for record in records:
        health.observe(Read(record, asked))
    written = {name for record in records for name, value in record.items() if value is not None}
    missing = {name for name in asked if not any(one == name or one.startswith(name) for one in written)}
    # of other attention, of other platforms, of other models, and of a record that holds what is not finite
    assert missing == DEVICE | EXPERTS | {"stats/attention_logit_bound/", "stats/zero_grad/", "nonfinite"}
    assert DEVICE <= set().union(*records) and len(asked) > 20 and {rule.kind for rule in health.rules} == {
        rule.kind for rule in ALL
    }  # fmt: skip


def test_a_run_that_goes_on_knows_what_happened_before(changed, tmp_path):
    shutil.copytree(changed, tmp_path / "run")
    events = Events(tmp_path / "run", primary=True)
    events.note("hang", 58)
    events.note("hang", 70)  # on a way that was gone back from
    events.close()
    cfg = schema.from_dict(RunConfig, json.loads((changed / "config.json").read_text())["config"])
    longer = dataclasses.replace(cfg, train_tokens="70 steps", optim=cfg.optim)
    run = opened(longer, tmp_path / "run", allow_change=("train_tokens",))
    told = [(event["event"], event["step"]) for event in run.writer.diagnosis.health.recent.events]
    run.writer.close()
    assert ("hang", 58) in told and ("hang", 70) not in told


def test_a_run_whose_address_for_alerts_is_no_good_says_so_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_WEBHOOK_URL", "http://chat.example/secretpath")
    try:
        trained(tmp_path / "run")
    except ValueError as error:
        assert "JAXSCALE_WEBHOOK_URL must be an https:// URL" in str(error) and "secretpath" not in str(error)
    else:
        raise AssertionError("it trained")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
