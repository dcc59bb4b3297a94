"""`jaxscale prepare` as a person types it: what it says, where things go, and one line for each mistake."""

import errno
import json
import os
import pathlib
import shutil

import made_text
import numpy as np
import pytest
from gcs_emulator import Emulator, Fault

from jaxscale import schema
from jaxscale.api.corpora import storage_errors
from jaxscale.cli import prepare
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.ledger import Ledger
from jaxscale.runtime.data.other_formats import read_records
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.system.exits import BadInput, Stop, verdict

ROOT = pathlib.Path(prepare.__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "data").glob("*.py"))
SMALL = ["--workers=1", "--config.tokenizer.name=bytes"]


@pytest.fixture
def raw(tmp_path):
    texts = [made_text.text(i) for i in range(30)]
    return made_text.write_jsonl(tmp_path / "raw.jsonl", [*texts, *texts[:5]])


def corpus_of(manifest, tmp_path):
    cfg = schema.from_dict(DataConfig, {"name": "tokens", "files": str(manifest), "cache_dir": str(tmp_path / "cache")})
    return open_data(cfg, seq_len=128, vocab_size=264, seed=3, say=lambda line: None)


def test_a_set_is_prepared_described_and_trained_on(raw, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare.main([f"--input={raw}", f"--output={out}", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "complete" in said and f"--config.data.files={out}/manifest.json" in said
    report = (out / "report.html").read_text()
    assert "probability of a candidate" in report and "0.924" in report  # at the threshold: the error curve
    assert "exact duplicate" in report and "no decontamination" in report
    corpus = corpus_of(out / "manifest.json", tmp_path)
    assert corpus.source_names == ("text",) and corpus.tokenizer.name == "bytes"
    (names,) = out.glob("names-*/small")
    assert not list(out.glob("rows-*")) and corpus.train_rows.arrays.folder.startswith(str(tmp_path / "cache"))
    before = names.read_bytes()
    shutil.rmtree(names.parent)  # as of an earlier version
    assert prepare.main(["--index", f"--output={out}", "--config.rows.seq_len=128", "--config.rows.seed=3"]) == 0
    planned = corpus_of(out / "manifest.json", tmp_path)
    assert names.read_bytes() == before and planned.train_rows.arrays.folder.startswith(str(out))
    np.testing.assert_array_equal(planned.batches(4).batch(5).tokens, corpus.batches(4).batch(5).tokens)
    with pytest.raises(BadInput, match="rows.seq_len=99999999: .*fewer than one sequence of seq_len=99,999,999"):
        prepare.main(["--index", f"--output={out}", "--config.rows.seq_len=99999999"])
    (out / "report.html").unlink()
    assert prepare.main(["--report", f"--output={out}"]) == 0
    assert (out / "report.html").read_text() == report


@pytest.mark.parametrize("kind", ["megatron", "array_record"])
def test_a_finished_set_is_written_for_another_program_and_read_back(raw, tmp_path, kind):
    out = tmp_path / "out"
    prepare.main([f"--input={raw}", f"--output={out}", *SMALL, "--config.stages=()"])
    assert prepare.main([f"--output={out}", f"--export={kind}:{tmp_path / 'set'}"]) == 0
    ours = np.fromfile(out / "shard-00000-of-00001.bin", np.uint16)
    if kind == "megatron":
        theirs = np.fromfile(tmp_path / "set.bin", np.uint16)
    else:
        theirs = np.concatenate([np.frombuffer(record, np.uint16) for record in read_records(tmp_path / "set")])
    np.testing.assert_array_equal(theirs, ours)


@pytest.mark.slow
def test_a_set_in_a_bucket_is_the_set_in_the_folder_through_errors_on_the_way(raw, tmp_path, monkeypatch):
    with Emulator() as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        gcs.faults.append(Fault("status", path=".bin", method="POST", status=503, times=1))
        rows = ["--config.rows.seq_len=128", "--config.rows.seed=3"]
        base = [f"--input={raw}", *SMALL, *rows, "--config.stages=('exact_dedup',)"]
        assert prepare.main([*base, "--output=gs://b/set", f"--work_dir={tmp_path / 'work'}"]) == 0
        assert prepare.main([*base, f"--output={tmp_path / 'local'}"]) == 0
        gcs.faults.append(Fault("status", path=".bin", status=503, times=2))
        assert gcs.get("b", "set/report.html").startswith(b"<!doctype html>")
        corpora = [
            corpus_of("gs://b/set/manifest.json", tmp_path / "far"),
            corpus_of(tmp_path / "local" / "manifest.json", tmp_path / "near"),
        ]
        folders = [corpus.train_rows.arrays.folder.rpartition("/")[0] for corpus in corpora]
        assert folders == ["gs://b/set", str(tmp_path / "local")]  # where their plan is published
        far, near = (corpus.batches(4) for corpus in corpora)
        found = [Ledger(corpus, corpus.batches(4)).find("7") for corpus in corpora]
        assert found[0] == found[1] != []
        assert not list((tmp_path / "far").glob("**/*.idx"))  # the plan has what the loader needs of it
        for n in (0, 7):
            np.testing.assert_array_equal(far.batch(n).tokens, near.batch(n).tokens)


def test_the_plan_is_told_and_nothing_is_done(raw, tmp_path, capsys):
    assert prepare.main([f"--input={raw}", "--plan"]) == 0
    said = capsys.readouterr().out
    assert "pass 1: repair, language; then exact_dedup, near_dedup" in said and "training the tokenizer" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--output must be given"),
        (["--output=o"], "sources is empty; set --input="),
        (["--output=o", "--input=none/*.txt"], "matches no file"),
        (["--output=o", "--input=RAW", "--config.stages=('gopher',)"], "did you mean 'gopher_quality'?"),
        (["--output=o", "--input=RAW", "--config.stages=('pii','pii')"], "'pii' more than once"),
        (["--output=o", "--input=RAW", "--config.stages=('decontaminate',)"], "decontaminate.files is empty"),
        (["--output=o", "--input=RAW", "--workers=0"], "--workers=0 must be a whole number"),
        (["--output=gs://b/x", "--input=RAW"], "set --work_dir=FOLDER"),
        (["--output=o", "--input=RAW", "--work_dir=w"], "--work_dir applies only to gs://"),
        (["--output=RAW", "--input=RAW"], "cannot be created"),
        (["--output=gs://b/x", "--report"], "--report, --index and --export require a local folder"),
        (["--index", "--output=TMP", "--config.write.seed=1"], "does not apply to --index, which uses only rows.*"),
        (["--output=o", "--input=RAW", "--", "--project=p"], "flags after -- apply only to a Beam runner"),
        (
            ["--output=o", "--input=RAW", "--runner=DirectRunner"],
            "needs the package apache-beam, which is not",
        ),
        (["--output=o", "--inptu=RAW"], "did you mean --input?"),
        (["--report", "--output=TMP"], "so it is not a complete dataset"),
        (["--export=parquet:x", "--output=TMP"], "KIND one of megatron, array_record"),
        (["--output=o", "--input=RAW", "--config.tokenizer.name=none.json"], "none.json does not exist"),
        (["--output=o", "--input=RAW", "--config.near_dedup.threshold=2"], "near_dedup: threshold=2"),
    ],
)
def test_a_mistake_is_one_line(raw, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    argv = [argument.replace("RAW", str(raw)).replace("TMP", str(tmp_path)) for argument in arguments]
    with pytest.raises(ValueError) as error:
        prepare.main(argv)
    assert told in str(error.value) and "\n" not in str(error.value) and isinstance(error.value, BadInput)


def test_help_lists_every_setting_of_a_recipe(capsys):
    assert prepare.main(["--help", "all"]) == 0
    said = capsys.readouterr().out
    for name in ("near_dedup.threshold", "pii.phone", "write.shard_tokens", "tokenizer.train.vocab_size"):
        assert f"--config.{name}=" in said


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_short_says_how_it_is_run_and_can_be_planned(file, tmp_path, monkeypatch, capsys):
    assert len(file.read_text().splitlines()) <= 40
    assert f"jaxscale prepare --config=configs/data/{file.name}" in file.read_text()
    monkeypatch.chdir(tmp_path)
    values = prepare.config_values(str(file))
    for source in values.get("sources", {}).values():
        path = tmp_path / source["files"].replace("*", "x")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "x.jsonl").write_text(json.dumps({"question": "what is it?"}))
    given = [] if "sources" in values else [f"--input={made_text.write_jsonl(tmp_path / 'a.jsonl', ['text'])}"]
    assert prepare.main([f"--config={file}", "--plan", *given]) == 0
    assert "pass 1" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 14), (errno.EROFS, 2), (errno.EACCES, 2)])
def test_a_disk_that_is_full_or_may_not_be_written_is_one_line_with_its_code(tmp_path, number, code):
    with pytest.raises((Stop, BadInput)) as caught, storage_errors(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / "names"))
    assert verdict(caught.value)[0] == code and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
