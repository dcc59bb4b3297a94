"""A run on a mixture with the gate on, told in metrics, traced afterwards, and gone on with only where it may."""

import dataclasses
import json
import pathlib
import random
import shutil

import numpy as np
import pytest
import tiny

from jaxscale import config, main, schema
from jaxscale.cli import trace
from jaxscale.main import TrainFlags
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.run.resume_checks import check_same_past
from jaxscale.settings import config_file
from jaxscale.settings.command_line import parse
from jaxscale.system.exits import Exit, Stop
from jaxscale.units import BatchSizes

pytestmark = pytest.mark.slow

STEPS = 12
COUNTS = "step {}, counted from 0; it is step {} in the console and in metrics.jsonl, which count completed steps\n"
STAGES = {"0": {"web": 0.75, "code": 0.25}, "6 steps": {"web": 0.5, "code": 0.5}}
VALUES = tiny.VALUES | dict(
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
    train_tokens=f"{STEPS} steps",
    monitor=dict(progress="off", tensorboard=False, log_every_steps=1),
    eval=dict(num_rows=0),
    checkpoint=dict(save_every_steps=5),
    mesh=dict(data=8, fsdp=1),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a config and two sources, one document of which repeats a letter."""
    folder, draw = tmp_path_factory.mktemp("home"), random.Random(1)
    for name, alphabet, number in (("web", "abcdefghijklm ", 60), ("code", "0123456789+-", 30)):
        for i in range(number):
            (folder / f"{name}{i:02}.txt").write_text("".join(draw.choices(alphabet, k=draw.randint(4, 90))))
    (folder / "web99.txt").write_text("z" * 300)
    data = dict(
        files={"web": str(folder / "web*.txt"), "code": str(folder / "code*.txt")},
        val_fraction=0.0,
        mixture=STAGES,
        cache_dir=str(folder / "cache"),
        gate=dict(on=True, max_run=8, max_top_share=1.0, min_distinct_share=0.0),
    )
    (folder / "tiny.py").write_text(f"def get_config():\n    return {VALUES | dict(data=data)!r}\n")
    return folder


@pytest.fixture(scope="module")
def run(home, tmp_path_factory):
    """The work folder of the finished run, batches 3 and 4 left out."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    assert train(home, workdir) == 0
    return workdir


def train(home, workdir, *flags):
    flags = flags or ("--skip-data=3:5",)
    return main.main([f"--config={home / 'tiny.py'}", f"--workdir={workdir}", *flags])


def told(capsys, *flags):
    capsys.readouterr()
    assert trace.main(list(flags)) == 0
    return capsys.readouterr().out.splitlines()


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def batches_of(home):
    cfg = config_file.load_config(str(home / "tiny.py"))
    corpus = open_data(cfg.data, seq_len=16, vocab_size=272, seed=1, say=lambda line: None)
    return corpus, corpus.batches(16, corpus.plan_mixture(16, STEPS, STEPS + 2))


def test_the_metrics_tell_the_loss_of_each_source_and_the_gated_rows(home, run):
    _, batches = batches_of(home)
    found = records(run)
    assert [record["batch_index"] for record in found] == [0, 1, 2, *range(5, 14)]
    gated = 0
    for record in found:
        batch = batches.batch(record["batch_index"])
        tokens = [batch.weights[batch.sources == source].sum() for source in (0, 1)]
        mean = (record["train/web/loss"] * tokens[0] + record["train/code/loss"] * tokens[1]) / sum(tokens)
        assert record["loss"] == pytest.approx(mean, rel=1e-5)
        assert record["gated_rows"] == (~batch.weights.any(axis=1) & batch.segment_ids.any(axis=1)).sum()
        gated += record["gated_rows"]
        assert (batch.sources == batch.sources[:, :1]).all()
    assert gated > 0
    shares = [np.mean(batches.batch(n).sources[:, 0] == 0) for n in range(12)]
    assert np.mean(shares[:6]) == 0.75 and np.mean(shares[6:]) == 0.5


def test_a_step_lists_its_documents_with_their_text(home, run, capsys):
    corpus, batches = batches_of(home)
    lines = told(capsys, f"--workdir={run}", "--step=3", "--json")
    batch = batches.batch(5)  # 3 and 4 were skipped
    pieces = [json.loads(line) for line in lines]
    assert {piece["batch"] for piece in pieces} == {5} and {piece["row"] for piece in pieces} == set(range(16))
    for piece in pieces:
        ids = batch.tokens[piece["row"], piece["begin"] : piece["begin"] + piece["tokens"]]
        assert piece["text"] == corpus.tokenizer.decode(ids)
        file = home / piece["file"].rpartition("/")[2]
        whole = file.read_text()
        assert piece["text"] == whole[piece["first_token"] :][: piece["tokens"]] and file.name.startswith(
            piece["source"]
        )
    row = told(capsys, f"--workdir={run}", "--batch=5", "--row=2", "--text=5")
    assert len(row) == sum(piece["row"] == 2 for piece in pieces)
    assert all(line.startswith("row 2 [") and ".txt" in line for line in row)
    bare = told(capsys, f"--workdir={run}", "--batch=5", "--text=0", "--json")
    assert not any("text" in json.loads(line) for line in bare)


def test_a_document_lists_its_steps(home, run, capsys):
    by_step = {}
    for step in range(STEPS):
        for line in told(capsys, f"--workdir={run}", f"--step={step}", "--text=0", "--json"):
            piece = json.loads(line)
            by_step.setdefault(f"{piece['shard']}:{piece['number']}", []).append(piece)
    for name in random.Random(0).sample(sorted(by_step), 8):
        found = [json.loads(line) for line in told(capsys, f"--workdir={run}", f"--doc={name}", "--json")]
        key = lambda piece: (piece["step"], piece["row"])
        assert sorted(found, key=key) == sorted(by_step[name], key=key)
    assert told(capsys, f"--workdir={run}", f"--doc={name}")[0].startswith("step ")
    seen = {piece["file"].rpartition("/")[2] for pieces in by_step.values() for piece in pieces}
    never = next(file.name for file in sorted(home.glob("code*.txt")) if file.name not in seen)
    assert trace.main([f"--workdir={run}", f"--doc={never}:0"]) == 0
    assert f"no past or future step of this run trains on {never}:0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step=1"], "--workdir must be given"),
        (["--workdir={run}"], "give exactly one of step, batch and document"),
        (["--workdir={run}", "--step=1", "--doc=x"], "give exactly one of step, batch and document"),
        (["--workdir={run}", "--step=-1"], "--step=-1 must be a whole number"),
        (["--workdir={run}", "--doc=x"], "no document of the corpus has this id or location"),
        (["--workdir=nowhere", "--step=1"], "has no config.json"),
        (["--workdir={run}", "--step=1", "--config.seed=3"], "set only data.* for moved data"),
        (
            ["--workdir={run}", "--step=1", "--config.data.max_epochs.web=3"],
            "determines the batches and is read from the work folder",
        ),
        (["--workdir={run}", "--step=1", "--row=16"], "there are 16 rows in batch 1; use 0 to 15"),
        (
            ["--workdir={run}", "--step=12"],
            "step=12 is after the end of the run, which has 12 steps .*use 0 to 11",
        ),
        (["--workdir={run}", "--batch=14"], "batch=14 is after the end of the run.*use 0 to 13"),
    ],
)
def test_what_is_wrong_with_the_command_is_one_line(run, flags, message):
    with pytest.raises(ValueError, match=message):
        trace.main([flag.format(run=run) for flag in flags])


def copied(run, tmp_path, *, upto, **data):
    """A copy of the run without what came after step `upto`, and with other settings of data in its config.json."""
    copy = pathlib.Path(shutil.copytree(run, tmp_path / "copy"))
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name.isdecimal() and int(checkpoint.name) > upto:
            shutil.rmtree(checkpoint)
    lines = [json.dumps(record) for record in records(run) if record["step"] <= upto]
    (copy / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    written = json.loads((copy / "config.json").read_text())
    written["config"]["data"] |= data
    (copy / "config.json").write_text(json.dumps(written))
    return copy


def test_what_a_start_changed_ahead_counts_before_its_first_save(home, run, tmp_path, capsys):
    copy = copied(run, tmp_path, upto=10)
    later = STAGES | {"14 steps": {"code": 1.0}}
    flags = {"data.skip_batches": ((13, 17),), "data.mixture": later}
    started = open_run(config_file.load_config(str(home / "tiny.py"), flags), str(copy), log=lambda line: None)
    assert (started.start_step, started.total_steps) == (10, 12)
    feed = started.open_feed(10, 12)
    fed = [next(feed) for _ in range(2)]
    feed.close()
    started.checkpoints.close()
    started.writer.close()
    corpus = open_data(started_config(copy).data, seq_len=16, vocab_size=272, seed=1, say=lambda line: None)
    for step, one in zip((10, 11), fed):
        flags = (f"--workdir={copy}", f"--step={step}", "--json")
        pieces = [json.loads(line) for line in told(capsys, *flags)]
        assert {piece["batch"] for piece in pieces} == {one.batch_index}
        assert {piece["done"] for piece in pieces} == {False}
        tokens_BT = np.asarray(one.batch.tokens)
        for piece in pieces:
            ids = tokens_BT[piece["row"], piece["begin"] : piece["begin"] + piece["tokens"]]
            assert piece["text"] == corpus.tokenizer.decode(ids)
    assert [one.batch_index for one in fed] == [12, 17] and {piece["source"] for piece in pieces} == {"code"}


@pytest.mark.fault("F31")
def test_where_no_checkpoint_tells_what_was_skipped_it_is_not_guessed(run, tmp_path, capsys):
    copy = copied(run, tmp_path, upto=10)
    newest, oldest = ((copy / "checkpoints" / str(step) / "run/metadata") for step in (10, 5))
    newest.write_text("{")
    assert trace.main([f"--workdir={copy}", "--step=3"]) == 0
    assert "using step 5" in capsys.readouterr().err
    oldest.write_text("{")
    with pytest.raises(Stop, match="step 10 cannot be read") as stop:
        trace.main([f"--workdir={copy}", "--step=3"])
    assert stop.value.code is Exit.CHECKPOINT_CORRUPT


def started_config(folder):
    written = json.loads((folder / "config.json").read_text())
    return schema.from_dict(config.RunConfig, written["config"])


def test_a_stage_that_only_skipped_batches_reach_counts_before_the_first_checkpoint(run, tmp_path, capsys):
    stages = STAGES | {"12 steps": {"code": 1.0}}
    copy = copied(run, tmp_path, upto=0, mixture=stages, skip_batches=[[3, 8]])
    pieces = [json.loads(line) for line in told(capsys, f"--workdir={copy}", "--step=8", "--json")]
    assert {(piece["batch"], piece["source"]) for piece in pieces} == {(13, "code")}


def test_a_config_that_gives_another_past_is_refused(run, tmp_path):
    copy = copied(run, tmp_path, upto=10, mixture=STAGES | {"8 steps": {"web": 1.0}})
    with pytest.raises(Stop, match="the 10 completed steps have other rows") as stop:
        trace.main([f"--workdir={copy}", "--step=1"])
    assert stop.value.code is Exit.DATA_MISMATCH


def test_a_batch_that_is_not_the_one_in_the_metrics_is_called_so(run, tmp_path, capsys):
    flags = ("--row=0", "--text=0")
    assert trace.main([f"--workdir={run}", "--step=4", *flags]) == 0 and capsys.readouterr().err == COUNTS.format(4, 5)
    copy = copied(run, tmp_path, upto=12)
    lines = records(copy)
    assert lines[4]["step"] == 5
    lines[4]["tokens_hash"] = "0123456789abcdef"
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 13, "tok')
    assert trace.main([f"--workdir={copy}", "--step=4", *flags]) == Exit.DATA_MISMATCH
    listed, said = capsys.readouterr()
    assert listed.startswith("row 0 [") and said.count("\n") == 2
    assert "step 4 did NOT train on this list: metrics.jsonl has tokens_hash 0123456789abcdef" in said
    assert trace.main([f"--workdir={copy}", "--step=3", *flags]) == 0 and capsys.readouterr().err == COUNTS.format(3, 4)


def test_a_step_that_is_to_come_and_a_skipped_batch_are_called_so(run, tmp_path, capsys):
    copy = copied(run, tmp_path, upto=7)  # the checkpoint of step 5, and two more lines of metrics
    for flag, note in (
        ("--step=6", COUNTS.format(6, 7)),
        ("--step=7", "step 7 is in the future: the work folder has 7 completed steps"),
        ("--batch=9", "step 7 is in the future"),
        ("--batch=4", "batch 4 is skipped: no step trains on it"),
    ):
        assert trace.main([f"--workdir={copy}", flag, "--json"]) == 0
        listed, said = capsys.readouterr()
        assert note in said and len(said.splitlines()) == 1
        assert {json.loads(line)["done"] for line in listed.splitlines()} == {flag == "--step=6"}
    name = "{shard}:{number}".format_map(json.loads(listed.splitlines()[0]))
    lines = told(capsys, f"--workdir={copy}", f"--doc={name}")
    ahead = [int(line.split()[1]) >= 7 for line in lines]
    assert any(ahead) and [", in the future)" in line for line in lines] == ahead


def test_a_mixture_may_not_change_behind(home, run):
    stages = lambda start, **weights: f"--config.data.mixture={STAGES | {start: weights}!r}"
    with pytest.raises(
        Stop, match="data.mixture and data.max_epochs would change the rows of the 12 completed steps"
    ) as stop:
        train(home, run, stages("4 steps", web=1.0, code=1.0), "--config.train_tokens=13 steps")
    assert stop.value.code is Exit.DATA_MISMATCH
    with pytest.raises(Stop, match="only stages that start after batch 13 may change"):
        train(home, run, "--config.data.max_epochs.code=0.5", "--config.train_tokens=13 steps")


def test_a_change_ahead_is_told_and_let_through(home, run):
    cfg = config_file.load_config(str(home / "tiny.py"))
    checkpoints = Checkpoints(run / "checkpoints", cfg.checkpoint)
    recorded = checkpoints.read_run(checkpoints.latest_step())
    later = dataclasses.replace(cfg.data, mixture=STAGES | {"14 steps": {"web": 1.0}})
    corpus = open_data(later, seq_len=16, vocab_size=272, seed=1, say=lambda line: None)
    sizes, said = BatchSizes.of(16), []
    check_same_past(sizes, sizes, corpus.plan_mixture(16, 20), recorded, STEPS, said.append)
    assert "the mixture of later steps has changed" in said[0]
    said.clear()
    check_same_past(sizes, sizes, corpus.plan_mixture(16, STEPS, STEPS + 2), recorded, STEPS, said.append)
    assert not said  # a stage behind the end of the run is none yet
    with pytest.raises(Stop, match="only stages that start after batch 13"):
        check_same_past(sizes, sizes, None, recorded, STEPS, said.append)


@pytest.mark.soak
def test_a_run_goes_on_with_a_mixture_that_changes_ahead(home, run, tmp_path, capsys):
    copy = pathlib.Path(shutil.copytree(run, tmp_path / "copy"))
    mixture = f"--config.data.mixture={STAGES | {'14 steps': {'web': 1.0}}!r}"
    assert train(home, copy, mixture, "--config.train_tokens=14 steps") == 0
    assert "the mixture of later steps has changed" in capsys.readouterr().out
    checkpoints = Checkpoints(copy / "checkpoints", CheckpointConfig())
    recorded = checkpoints.read_run(checkpoints.latest_step())["data"]["mixture"]
    assert [first for first, _ in recorded] == [0, 6 * 16, 14 * 16]
    assert {"train/code/loss"}.isdisjoint(records(copy)[-1])
    pieces = [json.loads(line) for line in told(capsys, f"--workdir={copy}", "--step=13", "--text=0", "--json")]
    assert {piece["source"] for piece in pieces} == {"web"}


def test_skip_data_is_shorthand_for_the_setting():
    overrides = lambda *flags: config_file.with_flags(parse(["--config=x", *flags], TrainFlags))
    assert overrides("--skip-data=3:5,9:10")["data.skip_batches"] == ((3, 5), (9, 10))
    assert overrides() == {}
    for flags, message in (
        (["--skip-data=3-5"], "must be ranges FROM:TO of batches"),
        (["--skip-data=3:5", "--config.data.skip_batches=((1,2),)"], "set the same setting"),
    ):
        with pytest.raises(ValueError, match=message):
            overrides(*flags)
