"""A killed trainer leaves nothing behind: it starts no process of its own, and no shared memory."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import tiny
from xla_flags import xla_flags

from jaxscale import main


def members(session):
    """The processes of a session, as Linux knows them."""
    found = set()
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.mark.fault("F23")
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc")
@pytest.mark.soak
def test_a_killed_trainer_leaves_no_process_and_no_shared_memory(tmp_path):
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number} " * 9)
    values = tiny.VALUES | dict(
        train_tokens="100000 steps",
        model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
        data=dict(files=str(tmp_path / "*.txt"), cache_dir=str(tmp_path / "cache")),
        eval=dict(num_rows=0),
        monitor=dict(log_every_steps=1, tensorboard=False, progress="lines"),
    )
    (tmp_path / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")
    places = [f"--config={tmp_path / 'tiny.py'}", f"--workdir={tmp_path / 'run'}"]
    flags = xla_flags(1)
    shared = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-m", "jaxscale.main", *places],
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(main.__file__).parent.parent,
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as running:
        try:
            assert any(line.startswith("step 3/") for line in running.stdout)
            assert members(running.pid) == {running.pid}
            assert not {name for name in set(os.listdir("/dev/shm")) - shared if str(running.pid) in name}
        finally:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == -signal.SIGKILL and members(running.pid) == set()
