"""A training in a process of its own that a proof starts, watches and kills."""

import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

from jaxscale.cli.attempt import Attempt
from jaxscale.system.exits import Exit, Stop


class Child:
    """A command in a process of its own, its output in a file. It does not outlive this process."""

    def __init__(self, command: Sequence[str], log: pathlib.Path, env: Mapping[str, str] | None = None):
        """env: all of its environment; None: ours."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("ab") as file:
            self.attempt = Attempt(command, env, output=file.fileno())

    def finish(self) -> None:
        """Waits for the end. Raises Stop with the child's exit code if it is not 0."""
        code = self.attempt.wait()  # whatever ends the wait, the process is gone
        if code:
            known = Exit(code) if code in list(Exit) else Exit.ERROR
            raise Stop(known, f"the run ended with exit {code}: {self.tail()}")

    def kill_when(self, reached: Callable[[], str]) -> str:
        """Kills the process as soon as reached() says where it is, and returns that. Raises Stop if it ends before."""
        try:
            while self.attempt.running():
                if where := reached():
                    return where
                time.sleep(0.001)
        finally:
            if self.attempt.running():
                self.attempt.kill_group()
                self.attempt.wait()
        self.finish()
        raise Stop(Exit.ERROR, "the run ended before it could be killed; give it more --steps")

    def tail(self) -> str:
        """The last line of its output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it printed nothing to {self.log}"


def environment(devices: int) -> dict[str, str]:
    """This process's environment with so many simulated devices for jax."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
