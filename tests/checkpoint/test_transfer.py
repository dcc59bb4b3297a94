"""A copy is whole or is no step; a killed one goes on; another run is never written over."""

import json
import re
import resource
import socket

import kept_run
import pytest

from jaxscale.cli import ckpt
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.folders import copy_file
from jaxscale.runtime.checkpoint.lock_stores import folder_lock
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.retention import list_steps
from jaxscale.runtime.checkpoint.transfer import copy_step, written_size_and_md5
from jaxscale.runtime.checkpoint.verify import verify_folder
from jaxscale.system.exits import BadInput, Exit, Stop


def there(folder):
    return Checkpoints(folder / "checkpoints", CheckpointConfig())


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_holds_the_same_bytes_and_the_config_and_is_private(kept, tmp_path):
    told = []
    done = copy_step(kept, 20, tmp_path / "copy", lambda done, total: told.append((done, total)))
    copied = there(tmp_path / "copy")
    assert copied.all_steps() == [20] and copied.read_run(20) == kept.read_run(20)
    assert content(copied.directory / "20") == content(kept.directory / "20")
    assert (tmp_path / "copy" / "config.json").exists() and (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    assert done.num_bytes == sum(map(len, content(kept.directory / "20").values())) and done.kept_bytes == 0
    assert told == sorted(told) and told[-1][0] == told[-1][1]
    assert sorted(path.name for path in copied.directory.iterdir()) == ["20", "copied"]
    copy_step(kept, 30, tmp_path / "copy")
    assert there(tmp_path / "copy").all_steps() == [20, 30]


def test_files_of_a_killed_copy_that_are_not_the_sources_are_brought_again(kept, tmp_path):
    copy_step(kept, 20, tmp_path / "copy")
    directory = tmp_path / "copy" / "checkpoints"
    (directory / "20" / "commit_success.txt").unlink()
    (directory / "20").rename(directory / "copying-20")  # as if killed before its end
    damaged = max(kept_run.files_of(kept, 20, "state"), key=lambda path: path.stat().st_size)
    kept_run.flip_bit(directory / "copying-20" / damaged.relative_to(kept.directory / "20"), 12345)
    (directory / "copying-20" / "state" / "d" / "stray").write_text("of another time")
    done = copy_step(kept, 20, tmp_path / "copy")
    assert 0 < done.kept_bytes < done.num_bytes
    assert content(directory / "20") == content(kept.directory / "20")


def test_a_damaged_source_is_never_copied_to_the_end(run, tmp_path):
    path = max(kept_run.files_of(run, 20, "state"), key=lambda path: path.stat().st_size)
    kept_run.flip_bit(path, 12345)
    with pytest.raises(Stop, match="step 20 in .* is damaged: .*wide: its bits differ") as caught:
        copy_step(run, 20, tmp_path / "copy")
    assert caught.value.code == Exit.CHECKPOINT_CORRUPT and there(tmp_path / "copy").all_steps() == []
    kept_run.flip_bit(path, 12345)
    copy_step(run, 20, tmp_path / "copy")  # whole again
    assert there(tmp_path / "copy").all_steps() == [20]


def test_a_copy_that_is_there_is_checked_again(kept, tmp_path):
    copy_step(kept, 20, tmp_path / "copy")
    assert copy_step(kept, 20, tmp_path / "copy").kept_bytes > 0
    kept_run.flip_bit(tmp_path / "copy" / "checkpoints" / "20" / "_CHECKPOINT_METADATA", 77)
    with pytest.raises(Stop, match="_CHECKPOINT_METADATA: its md5 differs from what was written"):
        copy_step(kept, 20, tmp_path / "copy")


def test_another_run_is_never_written_over(kept, tmp_path):
    other = kept_run.make_run(tmp_path / "other", steps=(10, 20), seed=7)
    before = content(tmp_path / "other")
    for step in (20, 30):
        with pytest.raises(ValueError, match="contains step 10 of a different run; choose an empty folder"):
            copy_step(kept, step, tmp_path / "other")
    assert content(tmp_path / "other") == before

    twin = kept_run.copy_of(kept, tmp_path / "twin")  # the same config and data, but other numbers
    kept_run.reseal(twin, 10, health="suspect")
    with pytest.raises(ValueError, match="contains a step 10 that differs from that of"):
        copy_step(kept, 20, tmp_path / "twin")

    copy_step(other, 10, tmp_path / "begun")
    (tmp_path / "begun" / "checkpoints" / "10").rename(tmp_path / "begun" / "checkpoints" / "copying-10")
    with pytest.raises(ValueError, match="has a copy from another run"):
        copy_step(kept, 20, tmp_path / "begun")

    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "config.json").write_text(json.dumps({"config": {}}))  # started, and not yet saved
    with pytest.raises(ValueError, match="contains a run with no step in common"):
        copy_step(kept, 20, tmp_path / "fresh")
    with pytest.raises(ValueError, match="is the folder of the source run"):
        copy_step(kept, 20, kept.directory.parent)


def test_a_later_state_of_the_same_run_is_taken_in(kept, tmp_path):
    twin = kept_run.copy_of(kept, tmp_path / "twin")
    for name in ("20", "30"):
        (twin.directory / name).rename(tmp_path / name)
    copy_step(kept, 30, tmp_path / "twin")  # step 10 is the same in both
    assert twin.all_steps() == [10, 30]


@pytest.mark.fault("F4")
def test_a_full_disk_is_one_line_and_the_copy_goes_on_afterwards(kept, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(Stop, match="cannot be written: File too large; fix this and run") as caught:
            copy_step(kept, 20, tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.code == Exit.STORAGE and there(tmp_path / "copy").all_steps() == []
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:  # not even the note of what is copied: of any verb such an error is one line
        with pytest.raises(Stop, match="/copy: File too large; fix this and run the command again$") as caught:
            ckpt.main(["copy", f"--workdir={kept.directory.parent}", "--step=20", f"--to={tmp_path}/copy"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.code == Exit.STORAGE
    copy_step(kept, 20, tmp_path / "copy")
    assert verify_folder(tmp_path / "copy" / "checkpoints" / "20").damages == ()


def test_what_cannot_be_read_is_told_of_the_file_it_is_in_and_not_of_the_copy(run, tmp_path, monkeypatch):
    odd = run.directory / "20" / "run" / "odd"
    monkeypatch.chdir(odd.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as nobody:
        nobody.bind("odd")  # to open it is an OSError
        told = re.escape(f"{odd} cannot be read: No such device or address; fix this")
        for copied in (lambda: copy_step(run, 20, tmp_path / "copy"), lambda: copy_file(odd, tmp_path / "odd")):
            with pytest.raises(Stop, match=told) as caught:
                copied()
            assert caught.value.code == Exit.STORAGE
    odd.unlink()
    (tmp_path / "copy/checkpoints/copying-20").mkdir(exist_ok=True)
    with folder_lock(tmp_path / "copy/checkpoints/copying-20", ""):
        with pytest.raises(
            BadInput, match="another process is copying into .*copying-20; wait until it ends, or choose a"
        ):
            copy_step(run, 20, tmp_path / "copy")
    assert copy_step(run, 20, tmp_path / "copy").num_files > 9


def test_a_step_that_training_deletes_meanwhile_is_one_line(run, tmp_path):
    path = run.directory / "20" / "state" / "_METADATA"

    def delete(done, total):
        path.unlink(missing_ok=True)

    with pytest.raises(ValueError, match="_METADATA no longer exists, because training deletes old steps; pin"):
        copy_step(run, 20, tmp_path / "copy", delete)


def test_a_copy_that_was_killed_before_its_last_note_gets_it_at_the_next_run(kept, tmp_path):
    copy_step(kept, 20, tmp_path / "copy")
    directory = tmp_path / "copy" / "checkpoints"
    note = directory / "copied" / "20.json"
    whole = json.loads(note.read_text())
    begun = {key: value for key, value in whole.items() if key != "record"} | {"files": {}}
    note.write_text(json.dumps(begun))
    assert copy_step(kept, 20, tmp_path / "copy").num_files == len(whole["files"])
    assert json.loads(note.read_text()) == whole
    assert list_steps(there(tmp_path / "copy").directory)[0].verified

    note.write_text(json.dumps(begun))
    kept_run.flip_bit(directory / "20" / "_CHECKPOINT_METADATA", 77)  # which no restore looks at
    with pytest.raises(Stop, match="_CHECKPOINT_METADATA: its md5 differs .*; remove that folder") as caught:
        copy_step(kept, 20, tmp_path / "copy")
    assert caught.value.code == Exit.CHECKPOINT_CORRUPT


def test_what_a_run_has_decided_goes_along_and_is_brought_up_to_date(run, tmp_path):
    events, copied = run.directory.parent / "events.jsonl", tmp_path / "copy" / "events.jsonl"
    copy_step(run, 10, tmp_path / "copy")
    assert not copied.exists()  # nothing has happened
    for text, step in (("one\n", 20), ("one\ntwo\n", 20), ("one\ntwo\nthree\n", 30)):
        events.write_text(text)
        copy_step(run, step, tmp_path / "copy")
        assert copied.read_text() == text
    copied.write_text("one\ntwo\nthree\nof the copy\n")
    copy_step(run, 30, tmp_path / "copy")
    assert copied.read_text().endswith("of the copy\n")


def test_a_file_removed_while_it_is_listed_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="removed"):
        written_size_and_md5(tmp_path / "removed")
