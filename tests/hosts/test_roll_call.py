"""Every process learns who is missing and what differs, before jax waits for anybody."""

import concurrent.futures
import socket
import threading
import time

import processes
import pytest

from jaxscale.runtime.hosts import roll_call
from jaxscale.runtime.hosts.discovery import ProcessInfo
from jaxscale.runtime.hosts.roll_call import call_roll, interface
from jaxscale.system.exits import Exit, Stop

FACTS = {"jax": "1", "seed": 0}


def roll(numbers, count=None, seconds=10.0, facts=lambda number: FACTS):
    """What each of these processes gets: its connections, or the Stop that it raises."""
    port, count = processes.free_ports(), count or len(numbers)

    def one(number):
        place = ProcessInfo(
            host="127.0.0.1", port=port, num_processes=count, process_id=number, found_in="test",
            names=("a", "b", "c", "d")[:count],
        )  # fmt: skip
        try:
            return call_roll(place, facts(number), seconds)
        except Stop as stop:
            return stop

    with concurrent.futures.ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(one, numbers))


def close(results):
    for wires in results:
        for wire, _ in wires.values():
            wire.close()


def test_all_that_are_there_and_alike_are_connected_with_the_first():
    results = roll([2, 1, 0])
    assert [sorted(wires) for wires in results] == [[0], [0], [1, 2]]
    close(results)


def test_whoever_is_missing_is_named_on_every_process_that_is_there():
    for stop in roll([0, 2], count=4, seconds=0.7):
        assert stop.code is Exit.PEER_LOST == 13
        assert "after 0.7 s, missing process 1 of 4 (b), process 3 of 4 (d); present: process 0 of 4" in str(stop)


def test_a_missing_first_process_is_named_too():
    (stop,) = roll([1], count=2, seconds=0.5)
    assert stop.code is Exit.PEER_LOST
    assert "no answer from process 0 of 2 (a)" in str(stop) and "Connection refused" in str(stop)


def test_what_differs_is_named_on_every_process(monkeypatch):
    results = roll([0, 1, 2], facts=lambda number: FACTS | {"seed": number // 2})
    for stop in results:
        assert stop.code is Exit.BAD_INPUT == 2
        assert str(stop).startswith("roll call: process 2 of 3 (") and "seed is '1', but '0' on proc" in str(stop)
        assert "jax" not in str(stop)


def test_a_fact_that_only_one_has_differs_too(monkeypatch):
    results = roll([0, 1], facts=lambda number: FACTS | ({"new": 1} if number else {}))
    assert ["new is '1', but None on process 0" in str(stop) for stop in results] == [True, True]


def test_a_number_that_is_taken_is_refused(monkeypatch):
    monkeypatch.setattr(roll_call, "AFTER_A_PROBLEM", 0.2)
    for stop in roll([0, 1, 1], count=4):
        assert " has the same process_id" in str(stop) and stop.code is Exit.BAD_INPUT


def test_who_calls_before_the_first_is_there_is_heard_and_a_stranger_is_not():
    port = processes.free_ports()
    make = lambda number: ProcessInfo(host="127.0.0.1", port=port, num_processes=3, process_id=number, found_in="test")
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        early = pool.submit(call_roll, make(1), FACTS, 30.0)
        time.sleep(0.3)
        first = pool.submit(call_roll, make(0), FACTS, 30.0)
        for data in (b"GET / HTTP/1.1\r\n\r\n", b'{"process": 1}\n', b"[1]\n", b"[" * 50_000 + b"\n", b""):
            with processes.connected(port + 1) as stranger:
                stranger.sendall(data)
        late = pool.submit(call_roll, make(2), FACTS, 30.0)
        close([early.result(), first.result(), late.result()])


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] - 1
        place = ProcessInfo(host="127.0.0.1", port=port, num_processes=2, process_id=0, found_in="test")
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {port + 1} .* coordinator 127.0.0.1"):
            call_roll(place, FACTS, 1.0)


@pytest.mark.fault("H8")
@pytest.mark.parametrize(
    ("host", "address", "listens"),
    [("localhost", "127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.1", "127.0.0.1"), ("::1", "::1", "::1"),
     ("node1", "10.0.0.7", "10.0.0.7"), ("node1", "127.0.1.1", "0.0.0.0")],
)  # fmt: skip
def test_it_listens_where_the_name_leads_and_nowhere_else(host, address, listens):
    assert interface(host, lambda *args, **more: [(0, 0, 0, "", (address, 0))]) == listens


@pytest.mark.slow
@pytest.mark.fault("H8")
def test_the_roll_call_of_a_local_run_is_closed_to_other_machines():
    port = processes.free_ports()
    place = ProcessInfo(host="localhost", port=port, num_processes=2, process_id=0, found_in="test")
    thread = threading.Thread(target=lambda: pytest.raises(Stop, call_roll, place, FACTS, 1.5))
    thread.start()
    with processes.connected(port + 1) as own:
        assert own.getpeername()[0] == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection((processes.other_address(), port + 1), timeout=1)
    thread.join()
