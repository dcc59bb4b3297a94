"""A bucket on this machine, a clock that nobody waits for, and corpora that can be put back."""

import shutil

import pytest
from damage import MAKERS, OPENED, World, seen
from gcs_emulator import BIG, Emulator

from jaxscale.runtime.data import verified
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.system.bucket import Clock


@pytest.fixture(autouse=True)
def every_reading_is_told(monkeypatch):
    """Of small sets too, so that it can be counted."""
    monkeypatch.setattr(verified, "REPORTED_BYTES", 0)


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


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Makes a world at its first use; gives it with what a run has seen of it."""
    made = {}

    def world(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            for part in ("data", "cache"):
                (folder / "now" / part).mkdir(parents=True)
            one = World(folder / "now", folder / "kept", MAKERS[name](folder / "now" / "data"))
            corpus = open_data(one.cfg, say=lambda line: None, **OPENED)
            shutil.copytree(one.folder, one.kept)
            made[name] = one, seen(corpus)
        one, was = made[name]
        one.put_back()
        return one, was

    return world
