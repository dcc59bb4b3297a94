"""What an earlier version left is gone on with, bit for bit: work folder, checkpoint, shards and manifest."""

import contextlib
import json
import tarfile

import pytest
from make_earlier_version import ARCHIVE, CONTINUED, go_on

from jaxscale import main


@pytest.fixture(scope="module")
def continued(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    with contextlib.chdir(folder / "earlier"):
        return go_on(folder / "earlier", lambda *flags: main.main(flags))


@pytest.mark.parametrize("name", ["run", "from_shards"])
def test_steps_after_an_earlier_version_are_its_own(continued, name):
    expected = json.loads(CONTINUED.read_text())[name]
    assert len(expected) == {"run": 8, "from_shards": 4}[name]
    for step, before in zip(continued[name], expected, strict=True):
        for measured in ("loss", "grad_norm"):  # another kind of CPU rounds its sums in another order
            assert step.pop(measured) == pytest.approx(before.pop(measured), rel=1e-6)
        assert step == before
