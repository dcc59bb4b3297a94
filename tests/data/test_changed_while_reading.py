"""Files that change while a run reads them, and what is asked of the storage: data.verify, its failures, its cache."""

import dataclasses
import errno
import os
import threading

import numpy as np
import pytest
from damage import DAMAGES, OPENED, in_time

from jaxscale.runtime.data import verified
from jaxscale.runtime.data.cache import open_or_rebuild
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.verified import FileWatch, snapshot_files
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.foreign import Unreadable, cannot_read

pytestmark = pytest.mark.fault("F38")


@pytest.fixture(autouse=True)
def looked_at_always(monkeypatch):
    monkeypatch.setattr(verified, "LOOK_SECONDS", 0.0)


def in_place(change):
    """A change of an open file: the inode stays."""

    def damage(path):
        with open(path, "r+b") as file:
            change(file)

    return damage


def replaced(path):
    other = path.with_name("coming")
    other.write_bytes(bytes(path.stat().st_size))
    os.replace(other, path)


WHILE_TRAINING = {
    "overwritten": (in_place(lambda file: file.write(b"\0\0\0\0\1")), True),
    "cut": (in_place(lambda file: file.truncate(100)), True),
    "emptied": (in_place(lambda file: file.truncate(0)), True),
    "replaced": (replaced, False),  # what is open stays as it was
    "deleted": (os.unlink, False),
    "touched": (lambda path: os.utime(path, (1, 1)), False),
    "made readable for all": (lambda path: path.chmod(0o644), False),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("file", ["data/part-1.bin", "cache/rows-*/small"])
@pytest.mark.parametrize("name", WHILE_TRAINING)
def test_a_file_that_changes_while_it_is_trained_on_is_found(worlds, name, file):
    one, was = worlds("shards")
    change, is_told = WHILE_TRAINING[name]
    corpus = open_data(one.cfg, say=lambda line: None, **OPENED)
    rows = len(corpus.train_rows)
    first = corpus.batches(rows).batch(0)
    (path,) = one.folder.glob(file)
    change(path)
    if is_told:
        with pytest.raises(Stop, match=f"{path.name} was changed after the run started") as stop:
            corpus.batches(rows).batch(0)
        assert stop.value.code is Exit.DATA_MISMATCH and "\n" not in str(stop.value)
    else:
        np.testing.assert_array_equal(corpus.batches(rows).batch(0).tokens, first.tokens)


def test_a_file_that_changes_before_its_first_row_is_read_is_found(worlds):
    one, _ = worlds("shards")
    corpus = open_data(one.cfg, say=lambda line: None, **OPENED)
    replaced(one.folder / "data" / "part-1.bin")
    with pytest.raises(Stop, match="part-1.bin was changed after the run started"):
        corpus.batches(len(corpus.train_rows)).batch(0)


def watched(tmp_path, content=b"right"):
    path = tmp_path / "part.bin"
    path.write_bytes(content)
    return path, FileWatch(snapshot_files({str(path): verified.file_sha256(str(path))}))


def rehashed(files, path):
    """Looks until the thread has hashed the file."""
    with in_time():
        while any(thread.name == "rehashing" for thread in threading.enumerate()):
            pass
    files.check([path])


@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_whose_inode_alone_changed_is_hashed_beside_the_run(tmp_path, damaged):
    path, files = watched(tmp_path)
    files.check([str(path)])
    DAMAGES["flipped, time kept"](path) if damaged else os.link(path, tmp_path / "backup")
    files.check([str(path)])  # goes on
    if damaged:
        with pytest.raises(Stop, match="a different file of the same size") as stop:
            rehashed(files, str(path))
        assert stop.value.code is Exit.DATA_MISMATCH
    else:
        rehashed(files, str(path))
        assert files._files[str(path)].stamp == verified.stamp_of(path)  # so that it is not hashed again


def test_files_that_change_together_are_all_hashed_after_one_request(tmp_path):
    paths = [tmp_path / f"part-{number}.bin" for number in range(5)]
    for path in paths:
        path.write_bytes(os.urandom(1 << 20))
    files = FileWatch(snapshot_files({str(path): verified.file_sha256(str(path)) for path in paths}))
    for path in paths[:-1]:
        os.link(path, path.with_suffix(".backup"))
    DAMAGES["flipped, time kept"](paths[-1])
    files.check([*map(str, paths)])
    with pytest.raises(Stop, match="part-4.bin"):
        rehashed(files, str(paths[-1]))


def test_a_file_is_not_looked_at_for_each_row(tmp_path, monkeypatch):
    path, files = watched(tmp_path)
    monkeypatch.setattr(verified, "LOOK_SECONDS", 1e9)
    files.check([str(path)])
    path.write_bytes(b"wrong")
    files.check([str(path)])
    with pytest.raises(Stop):
        files.check_file(str(path))


class Failing(os.PathLike):
    """A path that the storage answers with this error."""

    def __init__(self, number):
        self.number = number

    def __fspath__(self):
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_storage_that_fails_during_a_run_is_an_error_of_the_storage(number):
    path = Failing(number)
    with pytest.raises(Stop, match="can no longer be read") as stop:
        FileWatch({path: verified.Expected((1, 1, 1, 1), "0" * 64)}).check([path])
    assert stop.value.code is Exit.STORAGE


@pytest.mark.parametrize(("number", "again"), [(errno.EIO, False), (errno.EACCES, False), (errno.ENOENT, True)])
def test_a_cache_is_made_again_for_damage_and_never_for_what_cannot_be_read(tmp_path, number, again):
    made, fails = [], [OSError(number, "told by the storage")] * 2  # before the lock, and within it

    def make(folder):
        made.append((folder / "it").write_text("here"))

    def open_whole(folder):
        if fails:
            raise cannot_read(folder / "it", fails.pop())
        return (folder / "it").read_text()

    opened = lambda: open_or_rebuild(tmp_path, "tokens", {}, make, open_whole, lambda line: None)
    if again:
        assert opened() == "here" and len(made) == 2
    else:
        with pytest.raises(Unreadable, match="told by the storage"):
            opened()
        assert len(made) == 1 and len(list(tmp_path.glob("tokens-*/it"))) == 1


def test_a_cache_that_another_process_made_again_meanwhile_is_left_alone(tmp_path):
    made, fails = [], [BadInput("damaged")]

    def open_whole(folder):
        if fails:
            raise fails.pop()
        return folder

    assert open_or_rebuild(tmp_path, "tokens", {}, made.append, open_whole, print).is_dir() and len(made) == 1


@pytest.mark.parametrize("world", ["set", "shards", "raw", "megatron", "text"])
def test_each_start_reads_what_data_verify_asks_for(worlds, world):
    one, _ = worlds(world)
    open_data(one.cfg, say=lambda line: None, **OPENED)
    for verify, told in (("hash", False), ("always", True), ("size", False)):
        said = []
        open_data(dataclasses.replace(one.cfg, verify=verify), say=said.append, **OPENED)
        read = [line for line in said if "to verify its hashes" in line]
        places = ["/rows-"] + ["/tokens-"] * (world in ("raw", "megatron", "text")) + ["/data"] * (world[0] == "s")
        assert len(read) == (len(places) if told else 0), said
        assert all(any(place in line for line in read) for place in places if told), said


def test_size_compares_no_more_than_sizes(worlds):
    one, _ = worlds("shards")
    path = one.folder / "data" / "part-1.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(BadInput, match="part-1.bin was changed"):
        open_data(one.cfg, say=lambda line: None, **OPENED)
    cfg = dataclasses.replace(one.cfg, verify="size")
    corpus = open_data(cfg, say=lambda line: None, **OPENED)
    path.write_bytes(bytes(path.stat().st_size))
    corpus.batches(len(corpus.train_rows)).batch(0)
    path.write_bytes(b"short")
    with pytest.raises(Stop, match="part-1.bin was changed after the run started: it is truncated"):
        corpus.batches(len(corpus.train_rows)).batch(0)


def test_a_raw_bin_is_hashed_while_it_is_scanned_and_not_again(worlds):
    for world in ("raw", "megatron"):
        one, _ = worlds(world)
        said = []
        cfg = dataclasses.replace(one.cfg, cache_dir=str(one.folder / "another"))
        open_data(cfg, say=said.append, **OPENED)
        (line,) = [line for line in said if "/tokens-" in line and "to verify its hashes" in line]
        assert "(2 files, " in line  # the .idx and the .src of its index
