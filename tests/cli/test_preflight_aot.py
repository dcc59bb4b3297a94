"""`jaxscale preflight` on the real compilers, for TPUs and GPUs that are not here."""

import hashlib
import importlib.util
import json

import pytest
import tiny

from jaxscale.cli import preflight
from jaxscale.system.exits import Exit

pytestmark = pytest.mark.aot
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
needs_cuda = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="jax's CUDA plugin, the GPU compiler, is not installed",
)


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on the tiny config in bfloat16; (exit code, what was printed, the report as written)."""
    file = tmp_path / "tiny_run.py"
    file.write_text(f"def get_config(): return {tiny.VALUES!r}")

    def run_command(topology, *arguments):
        flags = [f"--config={file}", f"--topology={topology}", "--config.model.compute_dtype=bfloat16"]
        code = preflight.main([*flags, f"--json={tmp_path / 'report.json'}", *arguments])
        return code, capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())

    return run_command


@needs_libtpu
def test_a_tpu_slice_is_compiled_for_kept_and_its_executable_written(run, tmp_path):
    code, out, found = run("v5litepod-8", f"--save-executable={tmp_path / 'step.bin'}")
    report = found["report"]
    assert code is Exit.DONE and "tiny_run on v5e:2x4: 8 x TPU v5e on 1 host; mesh fsdp=8" in out
    assert sum(row["num_bytes"] for row in report["memory"]) == report["peak_bytes"] < report["usable_bytes"] == 2**34
    assert report["compiled_flops"] >= report["model_flops"]
    kinds = {row["kind"] for row in report["traffic"] if row["axes"] == ["fsdp"]}
    assert "all-gather" in kinds and kinds & {"reduce-scatter", "all-reduce"}
    assert all(row["slow_bytes"] == 0 for row in report["traffic"])

    payload = (tmp_path / "step.bin").read_bytes()
    about = json.loads((tmp_path / "step.bin.json").read_text())
    assert about["topology"] == "v5e:2x4" and about["sha256"] == hashlib.sha256(payload).hexdigest()
    assert "untested" in out

    code, out, again = run("v5e:2x4")
    assert code is Exit.DONE and "cached result of" in out
    assert again["report"]["peak_bytes"] == report["peak_bytes"] and again["report"]["traffic"] == report["traffic"]


@needs_libtpu
def test_what_the_tpu_compiler_finds_too_large_is_a_table(run):
    code, out, found = run("v5e:2x4", "--config.seq_len=32768", "--config.batch_tokens=8 rows", "--search_seconds=1")
    report = found["report"]
    assert code is Exit.NO_GO == 3
    assert "Traceback" not in out and "Ran out of memory on HBM" in out and "use more or larger chips" not in out
    assert report["peak_bytes"] == report["shortage"]["needed"] > report["usable_bytes"] > 15 * 2**30
    assert sum(row["num_bytes"] for row in report["memory"]) == report["peak_bytes"]


@needs_libtpu
def test_several_slices_send_gradients_over_the_slow_network(run):
    code, out, found = run("2*v5e:2x2", "--config.mesh.data=2")
    report = found["report"]
    assert code is Exit.DONE and report["num_slices"] == 2 and "data=2 (over 2 slices)" in out
    slow = {tuple(row["axes"]): row["slow_bytes"] for row in report["traffic"] if row["slow_bytes"]}
    assert slow and all("data" in axes for axes in slow)
    assert any(link.startswith("dcn:") for link in report["roofline"]["links_s"])


@needs_cuda
def test_gpu_hosts_are_compiled_for_and_judged_by_what_jax_takes(run, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    code, out, found = run("h100:2x4")
    report = found["report"]
    assert code is Exit.DONE and "8 x H100 SXM on 2 hosts; mesh fsdp=8 (over 2 nodes)" in out
    assert report["usable_bytes"] == int(0.9 * report["chip_bytes"])
    assert any(row["slow_bytes"] > 0 for row in report["traffic"])
