"""Watching the other processes: one that is gone ends all the rest at once, with a line that names it.

jax notices a dead process after its heartbeats have failed, and ends the others with a C++ stack; a program that waits
in a collective notices nothing. The connections of the roll call stay open instead: the kernel closes them with the
process, whatever killed it.

With the first process dies jax's coordination service, and jax then ends the others at once, with exit code 1, which
tells a supervisor not to start again. Nothing in Python can keep it from that (a callback that jax takes for this
cannot be called, up to 0.12: its argument has no Python type). So this is a race, which the watch is made to win: its
connections are the older ones, which the kernel closes first, and it prints and leaves before anything else.
"""

import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping

from jaxscale.exits import INTERRUPTED, Exit, silence_closed_streams, tell
from jaxscale.hosts.place import Place
from jaxscale.hosts.wire import Wire

GRACE_SECONDS = 5.0  # where one has stopped with an error, the others may be about to stop with the same
LAST_SECONDS = 10.0  # the first process leaves last, or jax would end the others for its sake; not longer than this
LOST_SECONDS = 1.5  # the same where a process is lost: the others have only a line to print
AGAIN = "the run goes on from its last checkpoint"
QUIET_CODES = (Exit.DONE, Exit.PREEMPTED)  # all processes end with these together
OWN_CODES = (Exit.ERROR, Exit.PEER_LOST, INTERRUPTED)  # of one process alone; for the others they mean a lost peer


class Watch:
    """A thread that reads the connections to the other processes until this one leaves."""

    def __init__(self, place: Place, wires: Mapping[int, tuple[Wire, str]], end: Callable[[int], None] = os._exit):
        """wires: as call_roll gives them. end: called with the exit code where another process is lost."""
        self.place, self.end = place, end
        self.names = {number: name for number, (_, name) in wires.items()}
        self.wires = {number: wire for number, (wire, _) in wires.items()}
        self.leaving = threading.Event()  # this process is on its way out, so that nobody is missed any more
        self.following = threading.Event()  # another one's error is about to end this process
        self.gone = threading.Event()  # nobody else is there any more
        self.said_goodbye: set[int] = set()
        self.thread = threading.Thread(target=self.work, name="watch", daemon=True)
        self.thread.start()

    def work(self) -> None:
        """Reads until nobody is there any more."""
        with selectors.DefaultSelector() as selector:
            for number, wire in self.wires.items():
                selector.register(wire, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    messages = key.fileobj.read()
                    for message in messages or ():
                        self.hear(key.data, message)
                    if messages is None:
                        selector.unregister(key.fileobj)
                        if key.data not in self.said_goodbye:
                            self.lost(self.names[key.data])
        self.gone.set()

    def hear(self, number: int, message: Mapping) -> None:
        """A goodbye of process `number`, or what the first process has to tell of another."""
        if "goodbye" in message:
            self.said_goodbye.add(number)
            if message["goodbye"] not in QUIET_CODES:
                self.stopped(self.names[number], message["goodbye"], message.get("line"))
        elif "stopped" in message:
            self.stopped(message["name"], message["stopped"], message.get("line"))
        elif "lost" in message:
            self.lost(message["lost"])

    def lost(self, name: str) -> None:
        """Another process ended without a word: ends this one, after passing it on."""
        if self.following.is_set():  # it followed the same error a moment earlier, and that is what this one will tell
            return
        self.pass_on(lost=name)
        self.leave(Exit.PEER_LOST, f"{name} was lost; start all again with the same command: {AGAIN}", LOST_SECONDS)

    def stopped(self, name: str, code: int, line: str | None) -> None:
        """Another process stopped with an error: ends this one with the same, unless it does so itself in time."""
        self.following.set()
        self.pass_on(stopped=code, name=name, line=line)
        own = Exit.PEER_LOST if code in OWN_CODES or code not in list(Exit) else Exit(code)

        def follow() -> None:
            if not self.leaving.wait(GRACE_SECONDS):
                self.leave(own, f"{name} has left: {line or f'exit {code}'}", LOST_SECONDS)

        threading.Thread(target=follow, name="watch-grace", daemon=True).start()

    def pass_on(self, **message: object) -> None:
        """Tells all others, if this is the first process, the only one that they are connected with."""
        if self.place.is_first:
            for wire in self.wires.values():
                wire.send(**message)

    def leave(self, code: Exit, line: str, seconds: float) -> None:
        """Ends this process, in this thread, whatever the others are waiting for."""
        if self.leaving.is_set():
            return
        self.leaving.set()
        tell(f"stopped ({code.name.lower()}, exit {int(code)}): {line}")
        if self.place.is_first:
            deadline = time.monotonic() + seconds  # it cannot wait for its own thread to note that all are gone
            while time.monotonic() < deadline and any(is_open(wire) for wire in self.wires.values()):
                time.sleep(0.02)
        silence_closed_streams()
        self.end(int(code))

    def goodbye(self, code: int, line: str | None = None) -> None:
        """To be called when this process is about to end by itself. The first one waits for the others, for a while."""
        self.leaving.set()
        for wire in self.wires.values():
            wire.send(goodbye=code, line=line)
        if self.place.is_first and code != Exit.DONE:
            self.gone.wait(LAST_SECONDS)
        sys.stdout.flush()


def is_open(wire: Wire) -> bool:
    """True while the other end has not closed; what it says meanwhile is of no interest."""
    with selectors.DefaultSelector() as selector:
        selector.register(wire, selectors.EVENT_READ)
        return not selector.select(0) or wire.read() is not None
