"""A run says which versions and which source made it, and nothing of the machine or its owner."""

import mmap
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxscale.runtime.monitor.machine import host_bytes_in_use, host_peak_bytes, memory_metrics
from jaxscale.runtime.monitor.runinfo import git_commit, run_info, versions


def git(folder, *arguments):
    names = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=clean | names, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_versions_come_from_metadata_without_imports():
    code = (
        "import sys; from jaxscale.runtime.monitor.runinfo import versions; versions(); sys.exit('jax' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0
    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3])) and found["jax"] and found["orbax-checkpoint"]


def test_the_commit_is_that_of_the_tree_and_says_if_files_differ(tmp_path):
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    (tmp_path / "a.py").write_text("1")
    assert git_commit(tmp_path) is None
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "--quiet", "--no-verify", "--message=first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "untracked.txt").write_text("x")
    (tmp_path / "venv").mkdir()
    assert git_commit(tmp_path) == commit
    assert git_commit(tmp_path / "venv") is None  # installed into a folder of somebody's repository
    (tmp_path / "a.py").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_a_git_hook_around_us_does_not_answer_for_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    test_the_commit_is_that_of_the_tree_and_says_if_files_differ(tmp_path)


def test_nothing_names_the_host():
    assert set(run_info()) == {"versions", "git_commit"}
    assert len(socket.gethostname()) < 4 or socket.gethostname() not in str(run_info())


def test_memory_is_that_of_the_fullest_device():
    assert 10**7 < host_peak_bytes() < 10**12
    stats = [None, {"peak_bytes_in_use": 5, "bytes_in_use": 4}, {"peak_bytes_in_use": 7, "bytes_in_use": 3}]
    metrics = memory_metrics([stats and stats | {"bytes_limit": 100} for stats in stats])
    told = [metrics[f"device_{name}"] for name in ("bytes_in_use", "peak_bytes", "bytes_limit")]
    assert told == [4, 7, 100]
    assert memory_metrics([None])["device_peak_bytes"] is memory_metrics([None])["device_bytes_in_use"] is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_memory_in_use_grows_with_arrays_and_not_with_files_that_are_mapped(tmp_path):
    size = 64 * 2**20
    (tmp_path / "shard.bin").write_bytes(bytes(size))
    before = host_bytes_in_use()
    mapped = np.memmap(tmp_path / "shard.bin", np.uint8, mode="r")
    assert mapped.sum() == 0 and host_bytes_in_use() - before < size / 4
    with mmap.mmap(
        -1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as held:  # new pages, whatever the heap has left over from other tests
        held.write(b"1" * size)
        assert host_bytes_in_use() - before > size * 3 / 4 and host_bytes_in_use() <= host_peak_bytes()
