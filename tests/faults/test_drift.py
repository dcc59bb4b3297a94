"""A run goes on with the settings and the data it began with, or says what differs; by leave it may, on record."""

import json
import os
import pathlib
import shutil

import pytest
import tiny

from jaxscale import main, schema
from jaxscale.config import RunConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.data.manifest import write_manifest
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.shard_writer import ShardWriter
from jaxscale.runtime.run import resume_checks as same_run
from jaxscale.runtime.run.changes import record_changes
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.run.options import allowed_names
from jaxscale.runtime.run.resume_checks import check_same_run, version_changes
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer
from jaxscale.settings.config_file import load_config
from jaxscale.settings.unread import unread
from jaxscale.system.exits import Exit, Stop

VALUES = dict(
    seq_len=16,
    batch_tokens="8 rows",
    train_tokens="3 steps",
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
    optim=dict(peak_lr=1e-2, min_lr=1e-3, warmup_tokens="1 steps"),
    eval=dict(num_rows=0),
    checkpoint=dict(save_every_steps=2),
    monitor=dict(log_every_steps=1, tensorboard=False, progress="off"),
)


def write_shard(folder, name, texts):
    tokenizer = ByteTokenizer()
    writer = ShardWriter(folder, name, vocab_size=257, eos_id=256, sources=["web"])
    for ids in tokenizer.encode_many(texts):
        writer.add(ids, "web")
    about = {"name": "bytes", "eos_token": "", "vocab_size": 257, "fingerprint": tokenizer.fingerprint}
    files = [{"name": name, "source": "", "documents": len(texts)}]
    header = {"tokenizer": about, "eos_id": 256, "text_bytes": sum(map(len, texts)), "skipped": {}, "files": files}
    writer.finish(tokenizer.token_bytes, header)


def write_set(folder):
    """A prepared set of two shards."""
    folder.mkdir()
    for number in range(2):
        write_shard(folder, f"part-{number}", [f"document {number} {i} " * (5 + i % 7) for i in range(20)])
    write_manifest(folder, ["part-0", "part-1"], recipe={})


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with the config, the set and the work folder of a run of three steps; only to be copied."""
    home = tmp_path_factory.mktemp("drift") / "home"
    home.mkdir()
    write_set(home / "set")
    write_config(home)
    assert command(home) == 0
    return home


@pytest.fixture
def home(begun, tmp_path):
    """A copy of it at another place: where data lie is no part of what they are."""
    home = pathlib.Path(shutil.copytree(begun, tmp_path / "home"))
    write_config(home)
    return home


def write_config(home):
    values = VALUES | dict(data=dict(name="tokens", files="set/manifest.json", cache_dir=str(home / "cache")))
    (home / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")


def command(home, *flags):
    """The training command, run in its home."""
    before = os.getcwd()
    os.chdir(home)
    try:
        return main.main(["--config=tiny.py", "--workdir=run", *flags])
    finally:
        os.chdir(before)


def refusal(home, *flags):
    """(exit code, message) with which the command ends before its first step; the work folder is as it was."""
    before = {path: path.stat().st_mtime_ns for path in (home / "run").rglob("*") if path.is_file()}
    with pytest.raises(Stop) as stop:
        command(home, "--config.train_tokens=5 steps", *flags)
    assert {path: path.stat().st_mtime_ns for path in (home / "run").rglob("*") if path.is_file()} == before
    return stop.value.code, str(stop.value)


# Settings.

FLIPS = {
    "model.embed_dim": (16, 32),
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.vocab_size": (272, 300),
    "optim.name": ("adamw", "lion"),
    "optim.peak_lr": (0.01, 0.02),
    "optim.clip_norm": (1.0, 2.0),
    "seq_len": (16, 32),
    "batch_tokens": ("8 rows", "16 rows"),
    "seed": (0, 3),
    "train.num_microbatches": (1, 2),
    "data.files": ("set/manifest.json", "other/manifest.json"),
    "data.packing": ("best_fit", "concat"),
    "data.tokenizer": ("", "bytes"),
}


def recorded(home, overrides=None):
    return {"config": schema.to_dict(load_config(str(home / "tiny.py"), overrides))}


@pytest.mark.cases(1)
@pytest.mark.fault("F13")
@pytest.mark.parametrize("name", FLIPS)
def test_every_setting_that_differs_is_named_with_its_old_and_new_value(begun, name):
    old, new = FLIPS[name]
    with pytest.raises(Stop) as stop:
        check_same_run(load_config(str(begun / "tiny.py"), {name: new}), begun / "run", recorded(begun))
    assert stop.value.code is Exit.CONFIG_MISMATCH == 11
    assert f"{name}: {old!r} -> {new!r}" in str(stop.value)
    told = f"or allow the change with --allow_change={name}"
    assert (told in str(stop.value)) == (name not in same_run.NEVER)


@pytest.mark.slow
@pytest.mark.fault("F13")
def test_no_setting_changes_in_silence_but_those_that_say_they_may(begun):
    """Whatever leaf differs in the record, it is refused, marked as changeable, or read by nothing."""
    cfg = load_config(str(begun / "tiny.py"))
    may = schema.changeable(RunConfig) | set(unread(cfg))
    plain = schema.to_dict(cfg)
    refused = 0
    for name, value in schema.flatten(plain).items():
        old = schema.merge(plain, {name: f"not {value}"})
        try:
            check_same_run(cfg, begun / "run", {"config": old})
        except Stop as stop:
            refused += 1
            assert stop.code is Exit.CONFIG_MISMATCH and f"{name}: " in str(stop)
        else:
            assert may.intersection(same_run.groups_of(name)), name
    assert refused > 35


@pytest.mark.slow
@pytest.mark.fault("F13", "F14")
def test_an_allowed_change_goes_on_is_told_and_stays_on_record(home, capsys):
    """In a copy at another place, with its data: where they lie is no part of what they are."""
    flags = ["--config.train_tokens=5 steps", "--config.optim.peak_lr=2e-2", "--config.optim.min_lr=2e-3"]
    code, told = refusal(home, *flags[1:], "--allow_change=optim.peak_lr")
    assert code is Exit.CONFIG_MISMATCH and "optim.min_lr: 0.001 -> 0.002" in told and "peak_lr: " not in told
    assert command(home, *flags, "--allow_change=optim.peak_lr,optim.min_lr") == 0
    out = capsys.readouterr().out
    assert "allowed by --allow_change, from step 3 on: optim.peak_lr: 0.01 -> 0.02" in out
    run = Checkpoints(home / "run" / "checkpoints", load_config(str(home / "tiny.py")).checkpoint).read_run(5)
    changes = run["changed"]
    assert changes == json.loads((home / "run" / "config.json").read_text())["changed"]
    told = [(change["step"], change["name"], change["old"], change["new"], change["allowed"]) for change in changes]
    assert told[1:] == [  # the first is the cache, which lies at the other place too
        (3, "optim.min_lr", 0.001, 0.002, True),
        (3, "optim.peak_lr", 0.01, 0.02, True),
        (3, "train_tokens", "3 steps", "5 steps", False),
    ]
    assert run["config"]["optim"]["peak_lr"] == 0.02
    assert f"versions: python {run['versions']['python']}, jax {run['versions']['jax']}" in out
    code, told = refusal(home, "--config.train_tokens=6 steps")  # from now on this is how the run is
    assert code is Exit.CONFIG_MISMATCH and "optim.peak_lr: 0.02 -> 0.01" in told
    assert record_changes([], run, 6, None, print) == changes


@pytest.mark.fault("F13")
def test_arrays_of_another_shape_are_refused_even_where_the_setting_is_allowed(home):
    code, told = refusal(home, "--config.model.embed_dim=32", "--allow_change=model")
    assert code is Exit.CONFIG_MISMATCH and "does not match this config" in told and "float32[" in told


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed", "the data of each step depend on seed"),
        ("optim,batch_tokens", "depend on batch_tokens"),
        ("lr", "lr is not a setting"),
        ("peak_lr", "did you mean optim.peak_lr?"),
        ("optim.peek_lr", "did you mean optim.peak_lr?"),
        ("", "is not a setting"),
    ],
)
def test_what_cannot_be_allowed_is_one_line(text, told):
    with pytest.raises(ValueError) as error:
        allowed_names("--allow_change", text)
    assert told in str(error.value) and len(str(error.value).splitlines()) == 1


def test_names_are_settings_or_groups_of_them():
    assert allowed_names("--allow_change", "optim.peak_lr, model") == ("optim.peak_lr", "model")


@pytest.mark.fault("H12")
def test_other_versions_than_those_of_the_last_save_are_told(begun):
    record = json.loads((begun / "run" / "config.json").read_text())
    assert version_changes(record, record["versions"]) == [] == version_changes(None, record["versions"])
    (line,) = version_changes(record, record["versions"] | {"jax": "99.0"})
    jax_then = record["versions"]["jax"]
    assert line.startswith(f"warning: jax was {jax_then} when this run was last saved and is 99.0 now")


# Data.


def edit(path):
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


@pytest.mark.fault("F14", "H10")
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "part-1.bin").unlink(), "part-1.bin is missing; prepare the set again"),
        (lambda folder: os.truncate(folder / "part-1.bin", 100), "part-1.bin has 100 bytes instead of the"),
        (lambda folder: edit(folder / "part-1.bin"), "part-1.bin was changed after the manifest was written"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json does not exist"),
    ],
    ids=["missing", "cut", "edited", "no manifest"],
)
def test_a_shard_that_is_not_as_it_was_is_named_before_the_first_step(home, damage, told):
    damage(home / "set")
    code, line = refusal(home)
    assert code is Exit.DATA_MISMATCH == 12 and told in line


@pytest.mark.fault("F14")
def test_a_set_that_was_prepared_anew_is_told_by_its_shards(home):
    write_shard(home / "set", "part-1", ["other text " * 50] * 20)
    write_shard(home / "set", "part-2", ["more text " * 50] * 20)
    write_manifest(home / "set", ["part-1", "part-2"], recipe={})
    code, line = refusal(home)
    assert code is Exit.DATA_MISMATCH
    assert "shard part-0 is missing, shard part-1 is different, shard part-2 is new" in line


@pytest.mark.fault("F14")
def test_another_packing_or_held_out_part_is_told_even_where_it_was_allowed(home):
    code, line = refusal(home, "--config.data.packing=concat", "--allow_change=data.packing")
    assert code is Exit.DATA_MISMATCH and "data.packing is different" in line


def text_corpus(folder, tokenizer="bytes"):
    cfg = tiny.config({"data.name": "files", "data.files": str(folder / "*.txt"), "data.tokenizer": tokenizer}).data
    return open_data(cfg, seq_len=16, vocab_size=272, seed=0, say=lambda text: None)


@pytest.mark.fault("F14", "H3")
def test_text_files_and_the_tokenizer_are_named_when_they_change(tmp_path):
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number} " * 20)
    begun = text_corpus(tmp_path)
    data = {"parts": json.loads(json.dumps(begun.parts)), "fingerprint": begun.fingerprint}
    assert same_run.describe_data_changes(begun, data) == ""
    (tmp_path / "03.txt").write_text("document 3 " * 21)
    (tmp_path / "05.txt").unlink()
    (tmp_path / "99.txt").write_text("new")
    told = same_run.describe_data_changes(text_corpus(tmp_path), data)
    assert told == "file 03.txt is different, file 05.txt is missing, file 99.txt is new"
    data["parts"]["the tokenizer"] = "0" * 16
    assert same_run.describe_data_changes(begun, data) == "the tokenizer is different"


@pytest.mark.fault("F14")
def test_a_record_of_thousands_of_files_stays_small_and_a_long_list_is_cut(monkeypatch, tmp_path):
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number} " * 20)
    begun = text_corpus(tmp_path)
    for number in range(10):
        (tmp_path / f"{number:02}.txt").write_text("changed " * 20)
    assert same_run.describe_data_changes(text_corpus(tmp_path), {"parts": begun.parts}).endswith(
        "07.txt is different and 2 more"
    )
    monkeypatch.setattr("jaxscale.runtime.data.pipeline.MOST_PARTS", 5)
    changed = text_corpus(tmp_path)
    assert [name for name in changed.parts if name.startswith(("file", "source"))] == ["source text"]


@pytest.mark.cases(1)
@pytest.mark.fault("F23")
@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (os.unlink, r"tokens [\d,]+ to [\d,]+ cannot be read: No such file"),
        (None, "was changed after the run started: it is truncated"),
    ],
)
def test_a_shard_that_goes_away_while_a_run_reads_is_named_with_its_tokens(home, monkeypatch, harm, told):
    monkeypatch.chdir(home)
    run = open_run(load_config("tiny.py", {"train_tokens": "5 steps"}), "run", log=lambda text: None)
    for number in range(2):  # after it was opened and before a row was read from it
        path = home / "set" / f"part-{number}.bin"
        harm(path) if harm else os.truncate(path, 64)
    feed = run.open_feed(3, 5)
    with pytest.raises(Stop, match=rf"part-\d.bin:? {told}") as stop:
        next(feed)
    assert stop.value.code is Exit.DATA_MISMATCH
    feed.close()
    run.writer.close()
