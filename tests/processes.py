"""Several processes of a run on this machine, for the tests that start them."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

from xla_flags import xla_flags

from benchmarks.restart import free_ports as free_ports
from jaxscale import main

SECONDS = 400  # a process that has not ended by then is killed, and the test fails


@contextlib.contextmanager
def connected(port: int):
    """A connection to a port of this machine that is about to listen."""
    deadline = time.monotonic() + 10
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    with sock:
        yield sock


def other_address() -> str:
    """Another address at which this machine can be reached: all of 127.0.0.0/8 leads to it."""
    return "127.0.0.2"


def run_programs(program: str, count: int, env: dict[str, str], *arguments: str) -> list[str]:
    """What `count` processes print that run a program's text: its arguments are these, a port, `count`, its number."""
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments, str(free_ports()), str(count)]
    env = os.environ | env | {"XLA_FLAGS": xla_flags(1), "PYTHONPATH": os.pathsep.join(sys.path)}
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    running = [subprocess.Popen([*command, str(number)], **how) for number in range(count)]
    try:
        return [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()


class Processes:
    """`count` processes of the training command as one run, with `devices` simulated devices each."""

    def __init__(self, count, devices, folder, flags, own=lambda number: {}, numbers=None):
        """own: flags, env and cwd of one process alone. numbers: of those that are started; all unless given."""
        env = os.environ | {"XLA_FLAGS": xla_flags(devices), "PYTHONUNBUFFERED": "1"}
        port = free_ports()
        self.logs, self.running = {}, {}
        for number in reversed(range(count) if numbers is None else numbers):
            place = [f"--coordinator=localhost:{port}", f"--num_processes={count}", f"--process_id={number}"]
            self.logs[number] = pathlib.Path(folder) / f"process{number}.log"
            how = {"cwd": pathlib.Path(main.__file__).parent.parent} | own(number)
            command = [sys.executable, "-m", "jaxscale.main", *flags, *place, *how.pop("flags", [])]
            own_env = env | how.pop("env", {})
            with self.logs[number].open("wb") as log:
                self.running[number] = subprocess.Popen(command, stdout=log, stderr=log, env=own_env, **how)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self.running.values():
            process.kill()
            process.wait()

    def log(self, number):
        return self.logs[number].read_text(errors="replace")

    def wait_for(self, text, number=0):
        """Returns once the process has printed the text."""
        deadline = time.monotonic() + SECONDS
        while text not in self.log(number):
            assert time.monotonic() < deadline and self.running[number].poll() is None, self.log(number)
            time.sleep(0.01)

    def codes(self):
        """The exit codes of all, in order; negative for death by a signal."""
        deadline = time.monotonic() + SECONDS
        return [self.running[number].wait(max(0.1, deadline - time.monotonic())) for number in sorted(self.running)]
