"""Both ways through gs://, at a server that speaks its protocol, with faults on the way."""

import json

import pytest
from gcs_emulator import Emulator, Fault
from hf_folders import FLOAT32, LLAMA, assert_same, make_folder, read_folder

from jaxscale.cli import convert
from jaxscale.runtime.checkpoint.verify import verify_folder
from jaxscale.system.paths import as_path

CONFIG = LLAMA | {"hidden_size": 64, "vocab_size": 512, "intermediate_size": 256}


@pytest.fixture
def gcs(monkeypatch):
    with Emulator() as emulator:
        for name, value in emulator.environment().items():
            monkeypatch.setenv(name, value)
        yield emulator


@pytest.mark.slow
def test_a_model_comes_from_a_bucket_into_one_and_goes_out_to_one(tmp_path, gcs):
    values = make_folder(tmp_path / "hf", CONFIG, FLOAT32, 2)
    for path in (tmp_path / "hf").iterdir():
        gcs.put("bucket", f"hf/{path.name}", path.read_bytes())
    gcs.faults.append(Fault("status", path="hf%2Fmodel-00001", status=503, times=1))
    assert convert.main(["--from=gs://bucket/hf", "--workdir=gs://bucket/run"]) == 0
    assert verify_folder(as_path("gs://bucket/run/checkpoints/0")).damages == ()
    assert "run/converting.json" not in gcs.names("bucket")
    flags = ["--to=gs://bucket/out", "--dtype=float32", "--shard_bytes=2e5"]
    assert convert.main(["--workdir=gs://bucket/run", *flags]) == 0
    (tmp_path / "out").mkdir()
    for name in gcs.names("bucket"):
        if name.startswith("out/") and not name.endswith("/"):
            (tmp_path / "out" / name.removeprefix("out/")).write_bytes(gcs.get("bucket", name))
    assert_same(read_folder(tmp_path / "out"), values)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "config.json" in names and ".converting.json" not in names and len(names) > 4
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    with pytest.raises(ValueError, match="is not empty: it contains"):
        convert.main(["--workdir=gs://bucket/run", *flags])


def test_a_bucket_without_a_model_is_told_apart_from_one_that_is_not_there(gcs):
    gcs.put("bucket", "other", b"x")
    with pytest.raises(ValueError, match="--from=gs://bucket/hf is not a folder, or is empty"):
        convert.main(["--from=gs://bucket/hf", "--workdir=gs://bucket/run"])
