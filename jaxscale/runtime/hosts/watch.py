"""Watch for lost processes: if one process is lost, all others end at once, with an error that names it.

jax detects a dead process when its heartbeats stop, and ends the others with a C++ stack; a program that is blocked in
a collective detects nothing. The kernel closes the open connections of the roll call when a process dies.

A frozen process (a stopped virtual machine, SIGSTOP) keeps its connections open, so only jax's heartbeats detect it.
In that case, and when the coordination service dies with process 0, jax aborts all others from a C++ thread. Python
cannot prevent the abort, but linger_on_abort delays it by six seconds. In this time the watch pings the others, logs
which process is silent, and exits with code 13.
"""

import ctypes
import faulthandler
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

from jaxscale.runtime.hosts.config import host_budgets
from jaxscale.runtime.hosts.discovery import ProcessInfo
from jaxscale.runtime.hosts.roll_call import Connection, Wires
from jaxscale.system.exits import INTERRUPTED, Exit, print_stderr, silence_closed_streams

GRACE_SECONDS = 5.0  # after an error of another process: this process may be about to stop with the same error
LAST_SECONDS = 10.0  # timeout of process 0, which exits last because jax would abort the others
LOST_SECONDS = 1.5  # the same timeout after a lost process, when the others only print a line
PING_SECONDS = 2.0  # timeout for the answer to a ping; an abort is delayed by six seconds
AGAIN = "the run resumes from its last checkpoint"
QUIET_CODES = (Exit.DONE, Exit.PREEMPTED)  # all processes end with these together
LOCAL_CODES = (Exit.ERROR, Exit.PEER_LOST, INTERRUPTED)  # errors that other processes treat as a lost peer


class Watch:
    """Reads the connections to the other processes in a thread, until this process exits."""

    def __init__(
        self, place: ProcessInfo, wires: Wires, end: Callable[[int], None] = os._exit, aborts: int | None = None
    ):
        """`wires` is the result of call_roll. If another process is lost, `end` is called with the exit code.

        `aborts` is the pipe from linger_on_abort, which becomes readable when this process begins to abort.
        """
        self.place, self.end, self.aborts = place, end, aborts
        self.hang_callback: Callable[[str], None] | None = None  # called when another process reports a hang
        self.answered: set[int] = set()  # processes that answered the last ping
        self.names = {number: name for number, (_, name) in wires.items()}
        self.wires = {number: wire for number, (wire, _) in wires.items()}
        self.leaving = threading.Event()  # this process is exiting, so closed connections are expected
        self.following = threading.Event()  # another process's error is about to end this process
        self.naming, self.named = threading.Lock(), False  # whether a lost process was reported
        self.gone = threading.Event()  # all connections are closed
        self.said_goodbye: set[int] = set()
        self.selector = selectors.DefaultSelector()  # filled here: a connection may close before the thread begins
        for number, wire in self.wires.items():
            self.selector.register(wire, selectors.EVENT_READ, number)
        if aborts is not None:
            self.selector.register(aborts, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self.work, name="watch", daemon=True)
        self.thread.start()

    def work(self) -> None:
        """Reads until all connections are closed."""
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
        """Handles a message from process `number`. Process 0 also forwards messages of other processes."""
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
        """Ends this process after another process was lost, and forwards the message."""
        if self.following.is_set():  # the other ended because of the error that this process is following
            return
        with self.naming:  # only the first loss counts: the others then exit because of it
            if self.named:
                return
            self.named = True
        self.pass_on(lost=name, how=how)
        self.leave(Exit.PEER_LOST, f"{name} {how}; restart all with the same command: {AGAIN}", LOST_SECONDS)

    def stopped(self, name: str, code: int, line: str | None) -> None:
        """Ends this process because another process failed, unless it exits by itself within GRACE_SECONDS."""
        exit_code = Exit.PEER_LOST if code in LOCAL_CODES or code not in list(Exit) else Exit(code)

        def end() -> None:
            if not self.leaving.wait(GRACE_SECONDS):
                self.leave(exit_code, f"{name} ended: {line or f'exit {code}'}", LOST_SECONDS)

        self.follow(end, stopped=code, name=name, line=line)

    def aborting(self) -> None:
        """Reports silent processes before the delayed abort of this process."""
        self.answered.clear()
        for wire in self.wires.values():
            wire.send(ping=True)
        time.sleep(PING_SECONDS)
        # a process that died has closed its connection instead
        silent = [number for number in self.wires if number not in self.answered | self.said_goodbye]
        if silent and not self.following.is_set():
            names = ", ".join(self.names[number] for number in silent)
            seconds = host_budgets(self.place.num_processes).heartbeat_seconds
            self.lost(names, f"has not responded for {seconds} s or more (frozen or disconnected)")

    def hangs(self, line: str) -> None:
        """Writes stacks and ends this process after another process reported a hang."""

        def end() -> None:
            if self.hang_callback:
                self.hang_callback(line)
            self.leave(Exit.HANG, line, LOST_SECONDS)

        self.follow(end, hang=line)

    def follow(self, end: Callable[[], None], **message: object) -> None:
        """Forwards the error of another process and calls `end` in a thread. Ignores all but the first error."""
        if not self.following.is_set():
            self.following.set()
            self.pass_on(**message)
            threading.Thread(target=end, name="watch-follow", daemon=True).start()

    def report_hang(self, line: str) -> None:
        """Sends a hang of this process to all connected processes. Process 0 forwards it to the others."""
        self.following.set()
        for wire in self.wires.values():
            wire.send(hang=line)

    def pass_on(self, **message: object) -> None:
        """Forwards a message from process 0 to all others. Does nothing in other processes."""
        if self.place.is_first:
            for wire in self.wires.values():
                wire.send(**message)

    def leave(self, code: Exit, line: str, seconds: float) -> None:
        """Ends this process. May be called in any thread."""
        if self.leaving.is_set():
            return
        self.leaving.set()
        print_stderr(f"stopped ({code.name.lower()}, exit {int(code)}): {line}")
        if self.place.is_first:
            deadline = time.monotonic() + seconds  # this may be the reading thread itself, so it cannot wait for `gone`
            while time.monotonic() < deadline and any(is_open(wire) for wire in self.wires.values()):
                time.sleep(0.02)
        silence_closed_streams()
        self.end(int(code))

    def goodbye(self, code: int, line: str | None = None) -> None:
        """Announces the exit of this process. After an error, process 0 waits up to LAST_SECONDS for the others."""
        self.leaving.set()
        for wire in self.wires.values():
            wire.send(goodbye=code, line=line)
        if self.place.is_first and code != Exit.DONE:
            self.gone.wait(LAST_SECONDS)
        silence_closed_streams()


def is_open(wire: Connection) -> bool:
    """Returns False if the other process has closed the connection. Discards received messages."""
    with selectors.DefaultSelector() as selector:
        selector.register(wire, selectors.EVENT_READ)
        return not selector.select(0) or wire.read() is not None


def linger_on_abort() -> int | None:
    """Delays aborts by six seconds. Returns a pipe that becomes readable when an abort begins; None outside Linux.

    When another process is lost, jax aborts this process from a C++ thread. The delay leaves time to log which process
    was lost and to exit with a code for the supervisor. The signal handler is the C library's sleep(). Its argument is
    the signal number, and SIGABRT is 6. Before it sleeps, faulthandler writes the stack of the thread to the pipe.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # an unread stack must not block the exit
    faulthandler.enable(file=writer, all_threads=False)
    return reader
