"""Word from the metadata server of a cloud machine that it is about to be taken away: as good a reason as SIGTERM.

Asked only on machines with TPUs, and where GCE_METADATA_HOST names a server. A cloud tells its spot and maintenance
events there a minute before it cuts the power; that it also sends SIGTERM to every program is not promised.
"""

import os
import threading
from collections.abc import Callable, Mapping

from jaxscale.hosts.place import ask_instance, metadata_server

POLL_SECONDS = 5.0
# What to ask, and the beginning of the answer that means the end. A machine that is moved to another host stays.
ENDS = {"preempted": "TRUE", "maintenance-event": "TERMINATE"}


class Maintenance:
    """Calls announce(what) once, in a thread, when the machine is about to go; entered while somebody can act on it.

    What the server said already at the first question is no news: a run that is started again on a machine with a
    date for its end would otherwise leave at once, again and again.
    """

    def __init__(
        self, announce: Callable[[str], None], env: Mapping[str, str] = os.environ, poll_seconds: float = POLL_SECONDS
    ):
        self.announce, self.poll_seconds, self.server = announce, poll_seconds, metadata_server(env)
        self.over = threading.Event()

    def __enter__(self) -> "Maintenance":
        if self.server is not None:
            threading.Thread(target=self.work, args=(self.server,), name="maintenance", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()

    def work(self, server: str) -> None:
        """Polls the metadata server until it announces something new."""
        known = announced(server)
        while not self.over.wait(self.poll_seconds):
            now = announced(server)
            if news := sorted(now - known):
                return self.announce(f"the machine is about to be taken away ({news[0]})")
            known = now


def announced(server: str) -> set[str]:
    """Returns the announced events: {'maintenance-event: TERMINATE_ON_HOST_MAINTENANCE'}; empty without an answer."""
    answers = {name: ask_instance(server, name) or "" for name in ENDS}
    return {f"{name}: {text.strip()}" for name, text in answers.items() if text.startswith(ENDS[name])}
