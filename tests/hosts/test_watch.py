"""A process that is gone, or that stopped with an error, ends the others with its name; leaving well ends nobody."""

import contextlib
import os
import socket
import threading
import time

import pytest

from jaxscale.runtime.hosts import watch
from jaxscale.runtime.hosts.discovery import ProcessInfo
from jaxscale.runtime.hosts.roll_call import Connection
from jaxscale.runtime.hosts.watch import Watch
from jaxscale.system.exits import Exit

COUNT = 3


class Three:
    """Three watches, connected as the roll call connects them; `ends` holds the exit codes they end with."""

    def __init__(self):
        self.ends, self.aborts, pairs = {}, {}, [socket.socketpair(socket.AF_UNIX) for _ in range(COUNT - 1)]
        self.wires = [{n + 1: pair[0] for n, pair in enumerate(pairs)}] + [{0: pair[1]} for pair in pairs]
        self.watches = [self.watch(number) for number in range(COUNT)]

    def watch(self, number):
        place = ProcessInfo(host="h0", port=1, num_processes=COUNT, process_id=number, found_in="test")
        self.aborts[number] = os.pipe()
        wires = {other: (LocalWire(sock), place.name(other, f"h{other}")) for other, sock in self.wires[number].items()}
        return Watch(place, wires, end=lambda code: self.end(number, code), aborts=self.aborts[number][0])

    def end(self, number, code):
        """What the end of a process does to its connections."""
        self.ends[number] = code
        self.shut(number)

    def shut(self, number):
        """Ends the connections of one."""
        for sock in self.wires[number].values():
            with contextlib.suppress(OSError):  # the test may be over
                sock.shutdown(socket.SHUT_RDWR)

    def settled(self, *numbers):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not set(numbers) <= set(self.ends):
            time.sleep(0.01)
        return self.ends


class LocalWire(Connection):
    """A wire over a pair of sockets, which have no keepalive to set."""

    def __init__(self, sock):
        self.sock, self.buffer = sock, b""
        sock.settimeout(5)


@pytest.fixture
def team(monkeypatch):
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(watch, "LAST_SECONDS", 3.0)
    team = Three()
    yield team
    for number in range(COUNT):
        team.watches[number].leaving.set()
        team.shut(number)
    for number in range(COUNT):
        assert team.watches[number].gone.wait(5)  # nothing is closed that a thread still waits for
        for sock in team.wires[number].values():
            sock.close()
        for file in team.aborts[number]:
            os.close(file)


def test_a_connection_that_is_closed_at_once_ends_no_watch_with_an_error():
    """Its thread may begin only then; an error in it fails this test, as of any thread's."""
    place = ProcessInfo(host="h0", port=1, num_processes=2, process_id=1, found_in="test")
    done = threading.Event()
    busy = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(done.is_set, True)])  # others begin late
    busy.start()
    for _ in range(60):
        near, far = socket.socketpair(socket.AF_UNIX)
        seen = Watch(place, {0: (LocalWire(near), "h0")}, end=lambda code: None)
        seen.leaving.set()
        near.close()
        far.close()
    done.set()
    busy.join()
    assert seen.wires[0].sock is near and not seen.said_goodbye


@pytest.mark.fault("F7")
@pytest.mark.fault("F22")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_process_that_is_gone_ends_all_others_with_code_13(team, lost, capfd):
    team.watches[lost].leaving.set()  # it is dead, and neither ends nor tells anybody
    team.watches[lost].pass_on = lambda **message: None
    for sock in team.wires[lost].values():
        sock.shutdown(socket.SHUT_RDWR)
    others = [number for number in range(COUNT) if number != lost]
    assert team.settled(*others) == dict.fromkeys(others, Exit.PEER_LOST)
    lines = capfd.readouterr().err.splitlines()
    told = f"stopped (peer_lost, exit 13): process {lost} of 3 (h{lost}) was lost; restart all with the same command"
    assert len(lines) == 2 and all(line.startswith(told) for line in lines)


def test_an_error_of_one_is_told_by_all_with_its_own_code(team, capfd):
    team.watches[2].goodbye(int(Exit.STORAGE), "stopped (storage, exit 14): step 6 was not saved: no space")
    team.end(2, Exit.STORAGE)
    assert team.settled(0, 1) == dict.fromkeys(range(COUNT), Exit.STORAGE)
    told = capfd.readouterr().err
    assert told.count("process 2 of 3 (h2) ended: stopped (storage, exit 14): step 6 was not saved: no space") == 2


def test_a_crash_of_one_is_a_lost_peer_for_the_others(team):
    team.watches[1].goodbye(int(Exit.ERROR), "IndexError: x")
    team.end(1, Exit.ERROR)
    assert team.settled(0, 2) == {1: 1, 0: 13, 2: 13}


def test_all_that_stop_with_the_same_error_end_by_themselves(team, capfd):
    parting = [threading.Thread(target=team.watches[n].goodbye, args=(int(Exit.NON_FINITE), "x")) for n in (1, 2)]
    for thread in parting:
        thread.start()
        thread.join()
    first = threading.Thread(target=team.watches[0].goodbye, args=(int(Exit.NON_FINITE), "x"))
    first.start()
    for number in (1, 2):
        team.end(number, 17)
    first.join()
    time.sleep(0.5)
    assert team.ends == {1: 17, 2: 17} and capfd.readouterr().err == ""


def test_of_many_that_stop_only_the_first_is_told_to_all(team):
    told = []
    team.watches[0].pass_on = lambda **message: told.append(message["name"])
    for number in (1, 2):
        team.watches[0].hear(number, {"goodbye": int(Exit.NON_FINITE), "line": "x"})
    assert told == ["process 1 of 3 (h1)"]  # each to each would be n^2 messages
    team.watches[0].leaving.set()


@pytest.mark.cases(1)
@pytest.mark.parametrize("code", [Exit.DONE, Exit.PREEMPTED])
def test_leaving_together_is_no_loss_and_the_first_leaves_last(team, code, capfd):
    began = time.monotonic()
    threading.Timer(0.4, lambda: [team.watches[n].goodbye(int(code)) or team.end(n, int(code)) for n in (1, 2)]).start()
    team.watches[0].goodbye(int(code))
    waited = time.monotonic() - began
    assert waited > 0.35 if code else waited < 0.3
    time.sleep(0.6)
    assert team.ends == {1: code, 2: code} and capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.fault("F21")
@pytest.mark.parametrize("frozen", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_who_is_silent_when_jax_gives_up_is_named_by_all(team, frozen, capfd, monkeypatch):
    monkeypatch.setattr(watch, "PING_SECONDS", 1.0)
    team.watches[frozen].hear = lambda number, message: None  # it neither hears nor answers
    team.watches[frozen].lost = lambda *name: None
    others = [number for number in range(COUNT) if number != frozen]
    for number in others:  # jax's heartbeats end all that are alive
        os.write(team.aborts[number][1], b"Fatal Python error: Aborted")
    assert team.settled(*others) == dict.fromkeys(others, Exit.PEER_LOST)
    told = f"stopped (peer_lost, exit 13): process {frozen} of 3 (h{frozen}) has not responded for 10 s or more (frozen"
    assert capfd.readouterr().err.count(told) == 2


def test_an_abort_of_ones_own_making_is_blamed_on_nobody(team, capfd, monkeypatch):
    monkeypatch.setattr(watch, "PING_SECONDS", 0.3)
    os.write(team.aborts[1][1], b"Fatal Python error: Aborted")
    time.sleep(0.8)
    assert team.ends == {} and capfd.readouterr().err == ""


@pytest.mark.cases(1)
@pytest.mark.fault("F8")
@pytest.mark.parametrize("hanging", [0, 1])
def test_a_hang_of_one_is_heard_by_all_others(team, hanging, capfd):
    heard = {}
    for number in range(COUNT):
        team.watches[number].hang_callback = lambda line, number=number: heard.update({number: line})
    team.watches[hanging].report_hang("process 1: data of step 3 has made no progress")
    others = [number for number in range(COUNT) if number != hanging]
    assert team.settled(*others) == dict.fromkeys(others, Exit.HANG)
    assert heard == dict.fromkeys(others, "process 1: data of step 3 has made no progress")
