"""A process is signalled and its group killed only while its number is surely its own."""

import os
import signal
import sys

from jaxscale.cli.attempt import Attempt


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
