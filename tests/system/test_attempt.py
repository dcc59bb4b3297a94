"""A process is signalled and its group killed only while its number is surely its own."""

import os
import signal
import sys

import pytest

from jaxscale.cli.two_runs import last_line
from jaxscale.system.attempt import Attempt


def test_a_signal_to_a_command_that_has_ended_does_not_reap_it():
    attempt = Attempt([sys.executable, "-S", "-c", "pass"])
    os.waitid(os.P_PID, attempt.process.pid, os.WEXITED | os.WNOWAIT)
    attempt.signal(signal.SIGTERM)
    assert attempt.process.returncode is None and not attempt.running()
    assert attempt.wait() == 0


def test_nothing_is_sent_once_the_number_may_be_anothers(monkeypatch):
    attempt = Attempt([sys.executable, "-S", "-c", "pass"])
    attempt.wait()
    sent = []
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda *arguments: sent.append(arguments))
    attempt.signal(signal.SIGTERM)
    attempt.kill_group()
    assert sent == []


@pytest.mark.slow
def test_the_last_line_of_a_traceback_is_the_error_and_not_the_note_that_jax_adds(tmp_path):
    program = "import jax; jax.jit(lambda x: x.reshape(3))(jax.numpy.ones(2))"
    with (tmp_path / "log").open("wb") as log:
        assert Attempt([sys.executable, "-c", program], output=log.fileno()).wait() == 1
    assert "For simplicity, JAX has removed" in (tmp_path / "log").read_text().splitlines()[-1]
    assert last_line(tmp_path / "log").startswith("TypeError: cannot reshape array")
