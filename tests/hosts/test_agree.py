"""Processes wait for each other without being deaf meanwhile."""

import signal
import threading

import processes
import pytest
from jax._src.lib import _jax

from jaxscale.runtime.hosts.agree import blocking_get


@pytest.fixture
def client():
    """The one client of a coordination service."""
    address = f"127.0.0.1:{processes.free_ports()}"
    service = _jax.get_distributed_runtime_service(address, 1)
    made = _jax.get_distributed_runtime_client(address, 0, init_timeout=20)
    made.connect()
    yield made
    made.shutdown()
    service.shutdown()


@pytest.mark.fault("F37")
def test_a_signal_is_answered_while_another_process_is_waited_for(client):
    before = signal.signal(signal.SIGTERM, lambda *_: client.key_value_set("test/key", "by the handler"))
    try:
        threading.Timer(0.1, signal.raise_signal, (signal.SIGTERM,)).start()
        assert blocking_get(client, "test/key", 10) == "by the handler"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert blocking_get(client, "test/none", 0.01) is None and blocking_get(client, "test/key", 10) == "by the handler"
