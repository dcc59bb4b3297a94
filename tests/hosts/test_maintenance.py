"""Word from the metadata server that the machine goes away is heard once, and only where there is such a server."""

import contextlib
import http.server
import threading
import time

import pytest

from jaxscale.runtime.hosts.discovery import Maintenance
from jaxscale.runtime.training.stopping import StopRequest


class Metadata(http.server.BaseHTTPRequestHandler):
    """A metadata server, as far as it is asked."""

    values, asked = {}, []

    def do_GET(self):
        name = self.path.removeprefix("/computeMetadata/v1/instance/")
        known = name in self.values and self.headers["Metadata-Flavor"] == "Google"
        self.asked.append(name)
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(self.values[name].encode() if known else b"")

    def log_message(self, *message):
        """Is quiet."""


@pytest.fixture
def metadata():
    """(environment that leads to a metadata server of this machine, what it answers)."""
    Metadata.values, Metadata.asked = {"preempted": "FALSE", "maintenance-event": "NONE"}, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}, Metadata.values
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def heard(env):
    """What the machine's end is called, as soon as it is announced."""
    found = []
    with Maintenance(found.append, env, poll_seconds=0.02):
        deadline = time.monotonic() + 10
        while not Metadata.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        yield found


def wait_for(found):
    deadline = time.monotonic() + 10
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("name", "value"), [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")]
)
def test_the_end_of_the_machine_is_told_once(metadata, name, value):
    env, values = metadata
    with heard(env) as found:
        assert found == []
        values[name] = value
        assert wait_for(found) == [f"the machine is about to be stopped ({name}: {value})"]
        time.sleep(0.2)
        assert len(found) == 1


def test_a_move_to_another_host_and_old_news_end_nothing(metadata):
    env, values = metadata
    values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"  # known before the run began
    with heard(env) as found:
        values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
        time.sleep(0.2)
        assert found == []
        del values["preempted"]  # the server has no such value: no answer is no news
        time.sleep(0.2)
        assert found == []


def test_where_there_is_no_such_server_nobody_asks():
    with Maintenance(pytest.fail, {"JAX_PLATFORMS": "cpu"}) as maintenance:
        assert maintenance.server is None


def test_the_first_signal_after_the_announcement_does_not_kill():
    with StopRequest() as stop:
        stop.request("the machine is about to be stopped (preempted: TRUE)")
        assert stop.stop_after(3) == "the machine is about to be stopped (preempted: TRUE)"
        stop.handle_signal(15, None)  # SIGTERM, as the machine shuts down
        assert stop.stop_after(4) == "the machine is about to be stopped (preempted: TRUE)"
