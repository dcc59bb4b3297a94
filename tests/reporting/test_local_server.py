"""A page for one person answers that person, whatever else has connected and says nothing, or little, or for ever."""

import contextlib
import http.client
import socket
import threading

import pytest

from jaxscale.system.local_server import MOST_CONNECTIONS, REQUEST_SECONDS, LocalHandler, LocalServer


class Page(LocalHandler):
    def do_GET(self):
        if self.is_for_us():
            self.answer(200, self.server.text, "text/plain")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, "read", "text/plain")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def served():
    """(the server, its clock); it looks for late connections fifty times a second."""
    clock = Clock()
    with LocalServer(Page, 0, clock, text="here") as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server, clock
        server.shutdown()


def connect(server, said=b""):
    found = socket.create_connection(server.server_address[:2], timeout=20)
    found.sendall(said)
    return found


def get(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", "/")
    with contextlib.closing(connection):
        return connection.getresponse().read()


@pytest.mark.fault("H18")
def test_idle_connections_make_room_for_one_that_asks(served):
    server, _ = served
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(4 * MOST_CONNECTIONS)]
        assert get(server) == b"here"
        assert len(server.clients) <= MOST_CONNECTIONS and idle[0].recv(1) == b""
        assert threading.active_count() < 3 * MOST_CONNECTIONS


@pytest.mark.fault("H18")
@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\r\nX: ", b"POST / HTTP/1.0\r\nContent-Length: 9\r\n\r\na"])
def test_who_says_a_byte_now_and_then_has_so_long_for_all_of_it(served, said, capfd):
    server, clock = served
    with connect(server, said) as slow:
        slow.settimeout(0.2)
        with pytest.raises(TimeoutError):
            slow.recv(1)  # it waits
        clock.now = REQUEST_SECONDS + 1
        slow.settimeout(20)
        assert slow.recv(1) == b""
    assert get(server) == b"here" and capfd.readouterr().err == ""


@pytest.mark.fault("H18")
def test_who_takes_an_answer_a_byte_now_and_then_is_left_behind(served, capfd):
    server, clock = served
    server.text = "x" * (64 << 20)  # more than the machine holds for a reader
    with connect(server, f"GET / HTTP/1.0\r\nHost: 127.0.0.1:{server.server_address[1]}\r\n\r\n".encode()) as slow:
        assert slow.recv(1) == b"H"
        clock.now = 1e6
        for _ in range(1000):
            if not server.clients:
                break
            threading.Event().wait(0.01)
        assert not server.clients
    assert capfd.readouterr().err == ""
