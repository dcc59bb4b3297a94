"""Preemption and maintenance events of the cloud's metadata server, treated like SIGTERM.

Polled only on TPU machines, or if GCE_METADATA_HOST is set. The cloud announces spot and maintenance events there a
minute before it stops the machine; it does not guarantee SIGTERM to every program.
"""

import os
import threading
from collections.abc import Callable, Mapping

from jaxscale.runtime.hosts.discovery import metadata_server, query_instance

POLL_SECONDS = 5.0
# {attribute: prefix of a value that announces the end}. Live migration is not an end.
ENDS = {"preempted": "TRUE", "maintenance-event": "TERMINATE"}


class Maintenance:
    """Calls announce(cause) once, in a thread, when the machine is about to be stopped.

    Events present at the first poll are ignored: a run that is restarted on a machine with a scheduled end would
    otherwise exit again and again.
    """

    def __init__(
        self, announce: Callable[[str], None], env: Mapping[str, str] = os.environ, poll_seconds: float = POLL_SECONDS
    ):
        self.announce, self.poll_seconds, self.server = announce, poll_seconds, metadata_server(env)
        self.stopped = threading.Event()

    def __enter__(self) -> "Maintenance":
        if self.server is not None:
            threading.Thread(target=self.work, args=(self.server,), name="maintenance", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopped.set()

    def work(self, server: str) -> None:
        """Polls the metadata server until it announces something new."""
        known = announced(server)
        while not self.stopped.wait(self.poll_seconds):
            now = announced(server)
            if news := sorted(now - known):
                return self.announce(f"the machine is about to be taken away ({news[0]})")
            known = now


def announced(server: str) -> set[str]:
    """Returns the announced events: {'maintenance-event: TERMINATE_ON_HOST_MAINTENANCE'}; empty without an answer."""
    answers = {name: query_instance(server, name) or "" for name in ENDS}
    return {f"{name}: {text.strip()}" for name, text in answers.items() if text.startswith(ENDS[name])}
