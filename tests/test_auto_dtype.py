"""model.compute_dtype='auto' becomes one dtype per run, and stays it."""

import json

import pytest
import tiny

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.kernels.attention import resolve_attention
from jaxscale.kernels.config import AttentionNeeds
from jaxscale.kernels.hardware import DtypeChoice
from jaxscale.program.auto_dtype import for_device, resolve_dtypes
from jaxscale.program.fitting_mesh import fitting_program
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.tools.planning.placeholder_devices import open_machine

pytestmark = pytest.mark.slow

AUTO = {"model.compute_dtype": "auto", "train_tokens": "2 steps", "checkpoint.save_every_steps": 1}
ELSEWHERE = AUTO | {"model.compute_dtype": "float16"}  # which no CPU gets
HERE = DtypeChoice("float32", "no bfloat16")


def record_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_it_is_the_default_and_muon_s_products_follow_it():
    values = schema.to_dict(tiny.config({}))
    del values["model"]["compute_dtype"]
    cfg = schema.from_dict(RunConfig, schema.merge(values, {"optim.name": "muon", "optim.muon_dtype": "auto"}))
    assert cfg.model.compute_dtype == "auto"
    for dtype, muon in [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "float32")]:
        found, resolved = resolve_dtypes(cfg, DtypeChoice(dtype, "a reason"))
        assert (found.model.compute_dtype, found.optim.muon_dtype) == (dtype, muon)
        assert [str(one) for one in resolved] == [
            f"model.compute_dtype=auto: {dtype}, a reason",
            f"optim.muon_dtype=auto: {muon}, because model.compute_dtype is {dtype}",
        ]


def test_what_a_run_has_recorded_is_used_and_the_setting_is_named():
    recorded = {"model": {"compute_dtype": "float16"}, "optim": {"muon_dtype": "bfloat16"}}
    cfg, (one,) = resolve_dtypes(tiny.config(AUTO), HERE, recorded, "this run")
    assert cfg.model.compute_dtype == "float16"
    assert str(one) == (
        "model.compute_dtype=auto: float16, recorded in this run; the default on this hardware is float32: no "
        "bfloat16; use --config.model.compute_dtype=float32 to change it"
    )


def test_a_run_records_its_dtype_with_the_reason_and_prints_both(tmp_path):
    said = []
    open_run(tiny.config(AUTO), str(tmp_path), said.append).writer.close()
    record = record_of(tmp_path)
    dtype, reason = record["config"]["model"]["compute_dtype"], record["dtypes"]["model.compute_dtype"]["reason"]
    assert dtype in ("float32", "bfloat16") and "this CPU has" in reason
    assert f"model.compute_dtype=auto: {dtype}, {reason}" in said


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "run"
    train_to_completion(open_run(tiny.config(ELSEWHERE), str(folder), lambda line: None))
    return folder


def test_a_run_from_other_hardware_keeps_its_dtype(begun):
    said = []
    cfg = tiny.config(AUTO | {"train_tokens": "3 steps"})
    run = open_run(cfg, str(begun), said.append)
    assert run.parts.program.cfg.model.compute_dtype == "float16"
    assert any("float16, recorded in this run; the default on this hardware" in line for line in said)
    assert record_of(begun)["config"]["model"]["compute_dtype"] == "float16"


@pytest.mark.parametrize("what", ["params", "run"])
def test_a_run_that_begins_with_another_s_weights_takes_its_dtype(begun, tmp_path, what):
    said = []
    source = {"init.from_path": str(begun), "init.what": what, "train_tokens": "4 steps"}
    run = open_run(tiny.config(AUTO | source), str(tmp_path / "branch"), said.append)
    assert run.parts.program.cfg.model.compute_dtype == "float16"
    assert any("model.compute_dtype=auto: float16, recorded in " in line for line in said)


@pytest.mark.parametrize(("machine", "dtype"), [("t4:1x1", "float16"), ("v5e:2x2", "bfloat16"), ("l4:1x1", "bfloat16")])
def test_a_plan_resolves_it_for_the_machine_that_is_planned(machine, dtype):
    topology = open_machine(machine)
    cfg = tiny.config(AUTO | {"model.attention": "auto", "batch_tokens": 1024})
    assert for_device(cfg, topology.devices[0]).model.compute_dtype == dtype
    program = fitting_program(cfg, topology.devices)
    assert program.cfg.model.compute_dtype == dtype
    if machine.startswith("t4"):
        assert program.plan.attention.name == "xla" and "Ampere" in program.plan.attention.reason


def test_attention_on_a_card_before_ampere_needs_no_setting():
    needs = AttentionNeeds(head_dim=64, dtype="float16")
    found = {
        name: resolve_attention("auto", "gpu", needs, open_machine(name).devices[0])[1].name
        for name in ("t4:1", "l4:1")
    }
    assert found == {"t4:1": "xla", "l4:1": "cudnn"}
