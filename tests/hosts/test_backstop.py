"""An abort takes long enough to say why, and still ends the process."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from jaxscale.runtime.hosts import watch

PROGRAM = """
import ctypes, os, threading, time
from jaxscale.runtime.hosts.watch import linger_on_abort
reader = linger_on_abort()
threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
assert os.read(reader, 9999).startswith(b"Fatal")
print("aborting", flush=True)
if {leave}:
    os._exit(13)
time.sleep(60)
"""


@pytest.mark.fault("F22")
@pytest.mark.parametrize(("leave", "code"), [(True, 13), pytest.param(False, -6, marks=pytest.mark.soak)])
def test_an_abort_is_seen_and_leaves_six_seconds(leave, code):
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(watch.__file__).parents[3])}
    command = [sys.executable, "-c", PROGRAM.format(leave=leave)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as child:
        line, began = child.stdout.readline(), time.monotonic()
        killer = threading.Timer(60, child.kill)  # if what is tested fails
        killer.start()
        error = child.communicate()[1]
        killer.cancel()
    assert line == "aborting\n" and child.returncode == code, error
    assert leave or 4 < time.monotonic() - began < 12
