"""A command in a process of its own that does not outlive this one: started, watched, killed."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from jaxscale.system.exits import BadInput

LOOK_SECONDS = 0.05  # how often the command is looked at

# Becomes the command. Before that it asks Linux to kill it when the thread that started it ends, however that ends. A
# preexec_fn could do so too, and could deadlock: it runs between fork and exec of a process that may have threads.
TIED = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; kept across exec
if os.getppid() != int(parent):
    os.kill(os.getpid(), signal.SIGKILL)  # it had ended before we asked
for name in ("SIGPIPE", "SIGXFSZ"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)  # which Python ignores, and exec would keep
os.execvp(command[0], command)
"""


class Attempt:
    """The running command. Its output goes where ours goes, it reads nothing, and its group ends with it.

    Whatever is left of the group when the command has ended is killed: a process of the last attempt must not write
    beside one of the next.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, output: int | None = None):
        """Starts it, from the main thread. Raises BadInput if there is no such program."""
        if shutil.which(command[0], path=(env or os.environ).get("PATH")) is None:
            raise BadInput(f"{command[0]} is not a program that can be started; what follows -- must begin with one")
        if sys.platform.startswith("linux"):
            command = [sys.executable, "-I", "-S", "-c", TIED, str(os.getpid()), *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, process_group=0
        )

    def running(self) -> bool:
        """True until it has ended; afterwards `wait` returns at once."""
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return self.process.returncode is None and os.waitid(os.P_PID, self.process.pid, options) is None

    def signal(self, number: int) -> None:
        """Sends a signal to the command alone, as a shell's `kill` does.

        Not by Popen.send_signal, which reaps a command that has ended: `wait` is to find its group still its own.
        """
        if self.process.returncode is None:  # unreaped, so the number is nobody else's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        """Kills the command and all that it started and that stayed in its group."""
        if self.process.returncode is None:  # later `wait` has done so, and the number may be another group's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code, negative for death by a signal. The group is gone then."""
        try:
            # Unreaped, its number stays its own. Not one call that blocks: a signal that the kernel hands to another
            # thread would not end it, and the handler, which passes it on, would only run when all is over.
            while self.running():
                time.sleep(LOOK_SECONDS)
        finally:
            self.kill_group()
            code = self.process.wait()
        return code


class Child:
    """A command in a process of its own, its output in a file. It does not outlive this process."""

    def __init__(self, command: Sequence[str], log: pathlib.Path, env: Mapping[str, str] | None = None):
        """env: all of its environment; None: ours."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as file:
            self.attempt = Attempt(command, env, output=file.fileno())

    def tail(self) -> str:
        """The last line of its output; without the note that JAX puts after the error of a traceback."""
        lines = [line for line in self.log.read_text("utf-8", "replace").splitlines() if not NOTE.match(line)]
        return lines[-1] if lines else f"it printed nothing to {self.log}"


NOTE = re.compile(r"\s*(-*$|For simplicity, JAX has removed its internal frames)")  # or a blank line

# XLA:CPU ends a process one of whose devices waits for the others in a collective for longer. By default that is less
# than 90 seconds (jaxlib 0.10.2, 2026-11-25), which pass where many devices share few cores with other programs.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"


def simulated(devices: int) -> dict[str, str]:
    """This process's environment, with this number of simulated CPU devices for JAX."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    if not any(flag.startswith(PATIENCE) for flag in flags):
        flags.append(f"{PATIENCE}=300")
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
