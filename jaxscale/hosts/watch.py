"""Watching the other processes: one that is gone ends all the rest at once, with a line that names it.

jax notices a dead process after its heartbeats have failed, and ends the others with a C++ stack; a program that waits
in a collective notices nothing. The connections of the roll call stay open instead: the kernel closes them with the
process, whatever killed it.

A process that is frozen (a stopped virtual machine, SIGSTOP) keeps its connections, and only jax's heartbeats tell.
Then, and when jax's coordination service dies with the first process, jax aborts all others from a thread of C++.
Nothing in Python can keep it from that, but the abort is made to take six seconds (backstop.py), in which the watch
asks around by a ping who is silent, says so, and leaves with exit code 13.
"""

import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping

from jaxscale.hosts.config import host_budgets
from jaxscale.hosts.place import Place
from jaxscale.hosts.roll_call import Wire
from jaxscale.system.exits import INTERRUPTED, Exit, silence_closed_streams, tell

GRACE_SECONDS = 5.0  # where one has stopped with an error, the others may be about to stop with the same
LAST_SECONDS = 10.0  # the first process leaves last, or jax would end the others for its sake; not longer than this
LOST_SECONDS = 1.5  # the same where a process is lost: the others have only a line to print
PING_SECONDS = 2.0  # for the answer to a ping; an abort leaves six
AGAIN = "the run goes on from its last checkpoint"
QUIET_CODES = (Exit.DONE, Exit.PREEMPTED)  # all processes end with these together
OWN_CODES = (Exit.ERROR, Exit.PEER_LOST, INTERRUPTED)  # of one process alone; for the others they mean a lost peer


class Watch:
    """A thread that reads the connections to the other processes until this one leaves."""

    def __init__(
        self,
        place: Place,
        wires: Mapping[int, tuple[Wire, str]],
        end: Callable[[int], None] = os._exit,
        aborts: int | None = None,
    ):
        """wires: as call_roll gives them. end: called with the exit code where another process is lost.

        aborts: a file that can be read when this process has begun to abort, as linger_on_abort gives it.
        """
        self.place, self.end, self.aborts = place, end, aborts
        self.heard_hang: Callable[[str], None] | None = None  # what to do when another process tells of a hang
        self.answered: set[int] = set()  # to the last ping
        self.names = {number: name for number, (_, name) in wires.items()}
        self.wires = {number: wire for number, (wire, _) in wires.items()}
        self.leaving = threading.Event()  # this process is on its way out, so that nobody is missed any more
        self.following = threading.Event()  # another one's error is about to end this process
        self.naming, self.named = threading.Lock(), False  # a lost process was named
        self.gone = threading.Event()  # nobody else is there any more
        self.said_goodbye: set[int] = set()
        self.selector = selectors.DefaultSelector()  # filled here: a connection may be over before the thread begins
        for number, wire in self.wires.items():
            self.selector.register(wire, selectors.EVENT_READ, number)
        if aborts is not None:
            self.selector.register(aborts, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self.work, name="watch", daemon=True)
        self.thread.start()

    def work(self) -> None:
        """Reads until nobody is there any more."""
        with self.selector as selector:
            while any(key.data is not None for key in selector.get_map().values()):
                for key, _ in selector.select():
                    if key.data is None:
                        selector.unregister(key.fileobj)
                        threading.Thread(target=self.aborting, name="watch-abort", daemon=True).start()
                        continue
                    messages = self.wires[key.data].read()
                    for message in messages or ():
                        self.hear(key.data, message)
                    if messages is None:
                        selector.unregister(key.fileobj)
                        if key.data not in self.said_goodbye:
                            self.lost(self.names[key.data])
        self.gone.set()

    def hear(self, number: int, message: Mapping) -> None:
        """A goodbye of process `number`, or what the first process has to tell of another."""
        if "ping" in message:
            self.wires[number].send(pong=True)
        elif "pong" in message:
            self.answered.add(number)
        elif "hang" in message:
            self.hangs(str(message["hang"]))
        elif "goodbye" in message:
            self.said_goodbye.add(number)
            if message["goodbye"] not in QUIET_CODES:
                self.stopped(self.names[number], message["goodbye"], message.get("line"))
        elif "stopped" in message:
            self.stopped(message["name"], message["stopped"], message.get("line"))
        elif "lost" in message:
            self.lost(message["lost"], message.get("how", "was lost"))

    def lost(self, name: str, how: str = "was lost") -> None:
        """Another process ended without a word: ends this one, after passing it on."""
        if self.following.is_set():  # it followed the same error a moment earlier, and that is what this one will tell
            return
        with self.naming:  # whoever hears of it leaves at once, and must not be taken for the one that was lost
            if self.named:
                return
            self.named = True
        self.pass_on(lost=name, how=how)
        self.leave(Exit.PEER_LOST, f"{name} {how}; start all again with the same command: {AGAIN}", LOST_SECONDS)

    def stopped(self, name: str, code: int, line: str | None) -> None:
        """Another process stopped with an error: ends this one with the same, unless it does so itself in time.

        The first that is heard of is the one that is told: where all stop, each telling all would be n^2 messages.
        """
        if self.following.is_set():
            return
        self.following.set()
        self.pass_on(stopped=code, name=name, line=line)
        own = Exit.PEER_LOST if code in OWN_CODES or code not in list(Exit) else Exit(code)

        def follow() -> None:
            if not self.leaving.wait(GRACE_SECONDS):
                self.leave(own, f"{name} has left: {line or f'exit {code}'}", LOST_SECONDS)

        threading.Thread(target=follow, name="watch-grace", daemon=True).start()

    def aborting(self) -> None:
        """This process has a few seconds left: ends it with the name of who is silent, if that is why."""
        self.answered.clear()
        for wire in self.wires.values():
            wire.send(ping=True)
        time.sleep(PING_SECONDS)
        # one that has begun to answer and then died is named by its connection
        silent = [number for number in self.wires if number not in self.answered | self.said_goodbye]
        if silent and not self.following.is_set():
            names = ", ".join(self.names[number] for number in silent)
            seconds = host_budgets(self.place.num_processes).heartbeat_seconds
            self.lost(names, f"has not answered for {seconds} s or more (frozen, or cut off)")

    def hangs(self, line: str) -> None:
        """Another process ends because of a hang: this one leaves its stacks and ends as well."""
        if self.following.is_set():
            return
        self.following.set()
        self.pass_on(hang=line)

        def follow() -> None:
            if self.heard_hang:
                self.heard_hang(line)
            self.leave(Exit.HANG, line, LOST_SECONDS)

        threading.Thread(target=follow, name="watch-hang", daemon=True).start()

    def tell_hang(self, line: str) -> None:
        """Tells all others that this process ends because of a hang: those at other ends of the star by the first."""
        self.following.set()
        for wire in self.wires.values():
            wire.send(hang=line)

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
        silence_closed_streams()


def is_open(wire: Wire) -> bool:
    """True while the other end has not closed; what it says meanwhile is of no interest."""
    with selectors.DefaultSelector() as selector:
        selector.register(wire, selectors.EVENT_READ)
        return not selector.select(0) or wire.read() is not None
