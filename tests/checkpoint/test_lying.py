"""A step that is not what its place says: under another number, of another step, or without one of its files."""

import shutil

import kept_run
import pytest
from ckpt_states import restore_newest, stop_of
from gcs_emulator import Emulator
from twins import twins

from jaxscale.cli import ckpt
from jaxscale.runtime.checkpoint import folders
from jaxscale.runtime.checkpoint.branch import open_source
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.retention import last_good_step, list_steps, retention_reasons
from jaxscale.runtime.checkpoint.transfer import copy_step
from jaxscale.runtime.checkpoint.verify import verify_folder
from jaxscale.system.exits import Exit

LIES = ("moved", "copied", "linked", "linked outside", "swapped", "record", "data")


def lie(run, how):
    """The step that lies now, made of steps 20 and 30 of a run with steps 10, 20 and 30."""
    at = run.directory
    if how == "moved":
        (at / "30").rename(at / "40")
    elif how == "copied":
        shutil.copytree(at / "20", at / "40")
    elif how == "linked":
        (at / "40").symlink_to("20")
    elif how == "linked outside":
        shutil.copytree(at / "20", at.parent / "elsewhere")
        (at / "40").symlink_to(at.parent / "elsewhere")
    elif how == "swapped":
        (at / "20").rename(at / "x")
        (at / "30").rename(at / "20")
        (at / "x").rename(at / "30")
    elif how == "record":
        shutil.copy(at / "20/run/metadata", at / "30/run/metadata")
    else:
        shutil.rmtree(at / "30/state")
        shutil.copytree(at / "20/state", at / "30/state")
    return 30 if how in ("swapped", "record", "data") else 40


def gone_on(run, lines):
    """(the step that was gone on from, what was noted)."""
    notes = []
    run.note = lambda kind, step=None, **facts: notes.append((kind, step))
    leaves = lambda step: run.restore(step, kept_run.make_state(0))["step"]
    return restore_newest(run, lambda step: (step, int(leaves(step)))[1], lines.append), notes


@pytest.mark.fault("F31")
@pytest.mark.parametrize("how", LIES)
def test_a_step_that_lies_is_set_aside_and_told_and_the_newest_honest_one_is_taken(run, how):
    step, lines = lie(run, how), []
    honest = {"moved": 20, "copied": 30, "linked": 30, "linked outside": 30, "swapped": 10}.get(how, 20)
    assert verify_folder(run.directory / str(step)).damages
    found, notes = gone_on(run, lines)
    assert found == honest and ("set_aside", step) in notes and ("fallback", step) in notes
    assert sum(f"step {step} cannot be read" in line for line in lines) == 1
    assert not any(f"move {run.directory / str(step)} away" in line for line in lines)  # it is
    assert any(path.name.startswith(f"damaged-{step}-") for path in run.directory.iterdir())
    assert (how == "linked outside") <= (run.directory.parent / "elsewhere" / "run").exists()  # a link alone is moved


@pytest.mark.fault("F31")
def test_where_every_step_lies_it_ends_and_touches_nothing(run):
    for step in (10, 20, 30):
        (run.directory / str(step)).rename(run.directory / str(step + 1))
    before = sorted(run.directory.iterdir())
    (run.directory / "last_good.json").unlink()
    error = stop_of(restore_newest, run, lambda step: step)
    assert error.code == Exit.CHECKPOINT_CORRUPT and "the folder contains the record of step 30" in str(error)
    assert set(before) - set(run.directory.iterdir()) == {run.directory / "last_good.json"}


@pytest.mark.fault("F31")
def test_the_verbs_refuse_such_a_step_and_name_its_own(run, tmp_path, capsys):
    lie(run, "copied")
    workdir = f"--workdir={run.directory.parent}"
    assert ckpt.main(["list", workdir]) == 0
    told = capsys.readouterr()
    assert "UNREADABLE" in told.out and "the folder contains the record of step 20" in told.err
    assert ckpt.main(["verify", workdir]) == Exit.CHECKPOINT_CORRUPT
    assert "the folder contains the record of step 20" in capsys.readouterr().out
    for verb, *flags in (
        ("copy", f"--to={tmp_path}/copy"), ("average", "--steps=30,40", f"--to={tmp_path}/mean"),
        ("pin", "--steps=40"), ("merge_lora", f"--to={tmp_path}/merged"),
    ):  # fmt: skip
        error = stop_of(ckpt.main, [verb, workdir, *flags])
        assert error.code == Exit.CHECKPOINT_CORRUPT and "the folder contains the record of step 20" in str(error), verb
    assert not (run.directory / "pinned").exists() and not list(tmp_path.glob("m*"))
    ckpt.main(["prune", workdir, "--keep_last=1", "--delete"])
    assert run.all_steps() == [30, 40]  # the newest honest one is not pushed out by it


@pytest.mark.fault("F31")
def test_who_only_reads_takes_the_newest_honest_step_aloud_and_moves_nothing(run):
    lie(run, "moved")
    lines = []
    source = open_source(str(run.directory.parent), log=lines.append)
    assert source.step == 20 and run.all_steps() == [10, 20, 40]
    (line,) = lines
    assert "the folder contains the record of step 30" in line and line.endswith("using step 20")
    error = stop_of(open_source, str(run.directory.parent), wanted=40)
    assert error.code == Exit.CHECKPOINT_CORRUPT and "the folder contains the record of step 30" in str(error)


def spoil(path, how, other):
    """Does one thing to a file; False where that changes nothing."""
    was = path.read_bytes()
    if how == "deleted":
        path.unlink()
        return True
    now = {"emptied": b"", "changed": bytes([was[0] ^ 1]) + was[1:] if was else b"x"}.get(how)
    if how == "swapped":
        now = other.read_bytes()
    path.write_bytes(now)
    return now != was


@pytest.fixture(scope="module")
def files(kept):
    """Every file of a step, below its folder; of the data files, whose names are random, the place of each."""
    return [path.relative_to(kept.directory / "30").as_posix() for path in kept_run.files_of(kept, 30)]


@pytest.mark.cases(1)
@pytest.mark.fault("F33", "F2", "F20")
@pytest.mark.parametrize("how", ["deleted", "emptied", "changed", "swapped"])
def test_whatever_happens_to_any_file_of_a_step_is_noticed_when_it_is_verified_and_gone_on_from(run, files, how):
    older = [path.relative_to(run.directory / "20").as_posix() for path in kept_run.files_of(run, 20)]
    silent = []
    for number, name in enumerate(files):
        path, original = run.directory / "30" / name, (run.directory / "30" / name).read_bytes()
        other = run.directory / "20" / (name if name in older else sorted(older)[number % len(older)])
        if spoil(path, how, other):
            lines = []
            if not verify_folder(run.directory / "30").damages:
                silent.append(f"verify: {name}")
            found, notes = gone_on(run, lines)
            if not lines or not notes:
                silent.append(f"going on: {name}")
            for moved in run.directory.glob("damaged-*"):
                moved.rename(run.directory / "30")
        path.write_bytes(original)
    assert not silent and not verify_folder(run.directory / "30").damages


@pytest.mark.fault("F33")
@pytest.mark.parametrize("name", ["run/files.json", folders.COMMITTED])
def test_what_lists_or_commits_a_step_is_missed_wherever_it_is_opened(run, tmp_path, capsys, name):
    (run.directory / "30" / name).unlink()
    workdir, lines = f"--workdir={run.directory.parent}", []
    assert open_source(str(run.directory.parent), log=lines.append).step == 30
    assert len(lines) == 1 and name in lines[0] and "it is missing" in lines[0]
    ckpt.main(["list", workdir])
    assert f"step 30 lacks {name}" in capsys.readouterr().err
    ckpt.main(["average", workdir, "--steps=20,30", f"--to={tmp_path}/mean"])
    assert name in capsys.readouterr().err
    assert stop_of(copy_step, run, 30, tmp_path / "copy").code == Exit.CHECKPOINT_CORRUPT
    assert ckpt.main(["verify", workdir]) == Exit.CHECKPOINT_CORRUPT


@pytest.mark.fault("F33")
@pytest.mark.parametrize("how", ["deleted", "emptied", "changed", "swapped"])
def test_a_spoilt_last_good_file_vouches_for_nothing(run, how):
    (run.directory / "30.json").write_text('{"step": 20, "verified": true, "health": "clean", "sha256": "other"}')
    spoil(run.directory / "last_good.json", how, run.directory / "30.json")
    lines, odd = [], how in ("emptied", "changed")
    assert gone_on(run, lines) == (30, {"deleted": [], "swapped": [("alarm", 20)]}.get(how, [("alarm", None)]))
    assert ["last_good.json" in line and "until the next save rewrites that file" in line for line in lines if odd] == [
        True
    ] * odd
    facts = list_steps(run.directory)
    assert [fact.verified for fact in facts] == [False] * 3
    assert retention_reasons(facts, last_good_step(run.directory), run.cfg)[30] == "newest 3"
    copy = kept_run.copy_of(run, run.directory.parent.parent / "again")
    shutil.rmtree(copy.directory / "30")
    if how == "swapped":
        assert gone_on(copy, [])[0] == 20


@pytest.mark.fault("F31")
def test_the_last_good_step_that_is_gone_is_missed(run):
    lines = []
    shutil.rmtree(run.directory / "30")
    found, notes = gone_on(run, lines)
    assert (found, notes) == (20, [("alarm", 30)])
    assert "step 30, the last complete step" in lines[0]
    for step in (10, 20):
        shutil.rmtree(run.directory / str(step))
    error = stop_of(restore_newest, run, lambda step: step)
    assert error.code == Exit.CHECKPOINT_CORRUPT and "no other step exists" in str(error)


@pytest.mark.fault("F31")
@pytest.mark.parametrize("why", ["rewound", "damaged"])
def test_a_step_that_an_earlier_version_set_aside_and_did_not_forget_is_not_missed(run, why):
    good = (run.directory / "last_good.json").read_text()
    place = folders.set_aside(run.directory, 30, why)
    if why == "damaged":
        (place / "run/metadata").write_text("{")
    lines = []
    assert gone_on(run, lines) == (20, []) and not lines
    if why == "rewound":  # and saved anew, and then lost
        (run.directory / "last_good.json").write_text(good.replace('"sha256": "', '"sha256": "0'))
        assert gone_on(run, lines) == (20, [("alarm", 30)])


@pytest.mark.fault("F31")
def test_another_run_in_the_place_of_the_last_good_step_is_told(run, tmp_path):
    other = kept_run.make_run(tmp_path / "other", (30,), seed=1)
    shutil.rmtree(run.directory / "30")
    shutil.copytree(other.directory / "30", run.directory / "30")
    lines = []
    found, notes = gone_on(run, lines)
    assert (found, notes) == (30, [("alarm", 30)])
    assert "differs from the step that this run saved last" in lines[0]


@pytest.mark.slow
@pytest.mark.fault("F31", "F33")
@pytest.mark.parametrize("how", twins(["under another number", "without its commit mark"], "under another number"))
def test_in_a_bucket_too_such_a_step_is_set_aside_and_told(run, monkeypatch, how):
    with Emulator() as bucket:
        for name, value in bucket.environment().items():
            monkeypatch.setenv(name, value)
        for path in kept_run.files_of(run, "."):
            name = path.relative_to(run.directory).as_posix()
            if how == "under another number" and name.startswith("30/"):
                name = f"4{name[1:]}"
            if name != f"30/{folders.COMMITTED}":
                bucket.put("bucket", f"run/checkpoints/{name}", path.read_bytes())
        there, lines = Checkpoints("gs://bucket/run/checkpoints", CheckpointConfig()), []
        found, notes = gone_on(there, lines)
        assert found == 20 and there.all_steps() == [10, 20]
        step = 40 if how == "under another number" else 30
        assert ("set_aside", step) in notes and any(f"damaged-{step}-" in line for line in lines)
        assert [path for path in there.directory.iterdir() if path.name.startswith(f"damaged-{step}-")]
