"""Subprocesses that end with this process."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from jaxscale.system.exits import BadInput

POLL_SECONDS = 0.05

# Asks Linux to kill this process when the thread that started it ends, then execs the command. A preexec_fn could
# deadlock, since it runs between fork and exec of a process that may have threads.
EXEC_TIED_TO_PARENT = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which exec preserves
if os.getppid() != int(parent):
    os.kill(os.getpid(), signal.SIGKILL)  # the parent ended before the prctl
for name in ("SIGPIPE", "SIGXFSZ"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)  # Python ignores these signals, and exec would inherit that
os.execvp(command[0], command)
"""


class Attempt:
    """A running command in a new process group, without stdin.

    When the command ends, the other processes of its group are killed. So no process of an attempt can still write when
    the next attempt starts.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, output: int | None = None):
        """Starts the command. Linux kills it when this thread ends. Raises BadInput if the program does not exist."""
        if shutil.which(command[0], path=(env or os.environ).get("PATH")) is None:
            raise BadInput(f"{command[0]} is not an executable on PATH; put the program right after --")
        if sys.platform.startswith("linux"):
            command = [sys.executable, "-I", "-S", "-c", EXEC_TIED_TO_PARENT, str(os.getpid()), *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, process_group=0
        )

    def running(self) -> bool:
        """Returns True until the command has ended. Does not reap it."""
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return self.process.returncode is None and os.waitid(os.P_PID, self.process.pid, options) is None

    def signal(self, number: int) -> None:
        """Sends a signal to the command only. Popen.send_signal could reap it, and its group id could be reused."""
        if self.process.returncode is None:  # unreaped, so the pid cannot be reused
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        """Kills all processes of the command's group."""
        if self.process.returncode is None:  # after reaping, the group id may be reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits until the command ends, and kills the rest of its group. Returns the exit code, or -N for signal N."""
        try:
            # Polls without reaping, so the group id cannot be reused. A blocking wait is not interrupted by a signal
            # that the kernel delivers to another thread, so the handler would run only after the command ends.
            while self.running():
                time.sleep(POLL_SECONDS)
        finally:
            self.kill_group()
            code = self.process.wait()
        return code


# XLA:CPU aborts a process whose devices wait longer than this in a collective. The default, under 90 seconds (jaxlib
# 0.10.2, 2026-11-25), is too short if many simulated devices share few cores with other programs.
COLLECTIVE_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds"


def simulated_devices_env(devices: int) -> dict[str, str]:
    """Returns this process's environment with `devices` simulated CPU devices for JAX."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    if not any(flag.startswith(COLLECTIVE_TIMEOUT) for flag in flags):
        flags.append(f"{COLLECTIVE_TIMEOUT}=300")
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
