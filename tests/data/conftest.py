"""A bucket on this machine, and a clock that nobody waits for."""

import pytest
from gcs_emulator import BIG, Emulator

from jaxscale.bucket import Clock


class FakeClock:
    """Sleeps are noted, not slept."""

    def __init__(self):
        self.slept = []
        self.clock = Clock(now=lambda: 1000.0, sleep=self.slept.append, chance=lambda: 1.0)


@pytest.fixture
def gcs(monkeypatch):
    with Emulator() as emulator:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.endpoint)
        emulator.put("b", "set/big.bin", BIG)
        yield emulator


@pytest.fixture
def clock():
    return FakeClock()
