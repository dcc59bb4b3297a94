"""What preflight says of a step is what the compiler and the arrays themselves say."""

import contextlib
import dataclasses
import os

import ahead_of_time
import jax
import pytest
import tiny
from jax.experimental.compilation_cache import compilation_cache

from jaxscale.program.budget import resolve_budget
from jaxscale.program.memory import memory_need
from jaxscale.runtime.run.startup_log import log_model
from jaxscale.system.exits import BadInput
from jaxscale.tools.preflight import compiled as ahead
from jaxscale.tools.preflight.preflight import ahead_program, make_report, preflight, usable_memory
from jaxscale.tools.preflight.step_report import report_lines


@pytest.fixture(scope="module")
def topology():
    return ahead_of_time.topology()


@pytest.fixture(scope="module")
def program(topology):
    return ahead_program(tiny.config(), topology)


@pytest.fixture(scope="module")
def compiled(program, topology):
    return ahead.compile_ahead(program, topology, keep=False)


@pytest.fixture
def report(program, topology, compiled):
    return make_report("tiny", program, topology, compiled)


def told(text, lines):
    return any(text in line for line in lines)


@pytest.mark.slow
def test_the_kinds_of_memory_add_up_to_the_compilers_peak(report, compiled):
    assert sum(row.num_bytes for row in report.memory) == report.peak_bytes == compiled.memory.peak > 0
    assert report.fits


def test_parameters_and_moments_are_those_that_training_checks_for(report, program):
    need = memory_need(program)  # which tests/planning/test_check.py holds against the arrays themselves
    rows = {row.kind: row.num_bytes for row in report.memory}
    assert (rows["parameters"], rows["moments"], report.host_bytes) == (need.params, need.moments, 0)


def test_operations_are_counted_with_the_turns_of_the_loop_over_layers(report, program):
    cfg = program.cfg
    assert cfg.model.scan_layers and cfg.model.num_layers == 2
    model = cfg.model.flops_per_token(cfg.seq_len) * cfg.tokens_per_step / 8
    assert report.model_flops == model
    assert report.compiled_flops > model  # products with the masked half of the scores are done too


def test_what_is_sent_is_told_by_kind_and_axis(report):
    axes = {row.axes for row in report.traffic}
    assert ("fsdp",) in axes and axes <= {("fsdp",), ()}
    assert all(row.slow_bytes == 0 for row in report.traffic)
    assert sum(row.fast_bytes for row in report.traffic) > 0


def test_the_lines_hold_every_figure_once(report):
    lines = report_lines(report)
    for text in ("tiny on simulated:8: 8 x simulated CPU on 1 host; mesh fsdp=8", "parameters", "moments", "gradients",
                 "activations, temporaries", "model's formula", "link ici:fsdp", "MFU is at most"):  # fmt: skip
        assert sum(text in line for line in lines) == 1, text
    assert lines[-1].startswith("go: ")


def test_stages_are_told_in_the_head_of_the_report_and_at_the_start_of_a_run(report, program, topology, compiled):
    cut = {"mesh.pipeline": 4, "mesh.fsdp": 2, "model.num_layers": 8, "model.remat": "full"}
    one, two = (
        ahead_program(tiny.config(cut | {"train.num_microbatches": 4, "pipeline.chunks": chunks}), topology)
        for chunks in (1, 2)
    )
    line = (
        "pipeline: 1f1b, 4 stages, 4 microbatches: bubble 42.9%, at most 4 passes per stage wait for their backward "
        "pass"
    )
    assert report_lines(make_report("tiny", one, topology, compiled))[2].strip() == line  # the bubble is 3/7
    said = []
    for each in (one, two, program):
        log_model(each, resolve_budget(each.cfg, None), said.append)
    lines = [text for text in said if text.startswith("pipeline")]
    assert lines[0] == line and lines[1].startswith(
        "pipeline: 1f1b, 4 stages of 2 chunks, 4 microbatches: bubble 27.3%"
    )
    assert len(lines) == 2 and not told("pipeline", report_lines(report))


def test_a_smaller_chip_is_a_no_go_with_what_is_missing(program, compiled):
    report = make_report("tiny", program, ahead_of_time.topology(compiled.memory.peak - 1), compiled)
    assert not report.fits
    assert report_lines(report)[-1] == "no-go: 1 B missing per device"
    enough = ahead_of_time.topology(compiled.memory.peak)
    assert make_report("tiny", program, enough, compiled).fits
    with_code = dataclasses.replace(compiled, memory=dataclasses.replace(compiled.memory, code=100))
    lines = report_lines(make_report("tiny", program, enough, with_code))
    assert lines[-1] == "no-go: 100 B missing per device" and told("in addition to the peak", lines)


def test_a_device_that_the_compiler_finds_too_small_is_a_table(program, topology, compiled):
    shortage = ahead.Shortage("hbm", 3 * 2**30, 2**30, ((2**20, "f32[512,512]"),), "Ran out of memory on HBM")
    failed = dataclasses.replace(compiled, memory=None, facts=None, shortage=shortage)
    report = make_report("tiny", program, topology, failed)
    assert not report.fits and report.roofline is None
    assert sum(row.num_bytes for row in report.memory) == report.peak_bytes == shortage.needed
    lines = report_lines(report)
    assert told("300% of 1.0 GiB", lines) and told("f32[512,512]", lines) and told("Ran out of memory on HBM", lines)
    assert lines[-1] == "no-go: 2.0 GiB missing per device"


def test_too_little_on_chip_memory_is_not_called_a_lack_of_device_memory(program, topology, compiled):
    shortage = ahead.Shortage("vmem", 2**25, 2**24, (), "Ran out of memory in memory space vmem")
    report = make_report("tiny", program, topology, dataclasses.replace(compiled, memory=None, facts=None,
                                                                        shortage=shortage))  # fmt: skip
    assert report.peak_bytes is None and report.usable_bytes == topology.chip.hbm_bytes
    assert report_lines(report)[-1] == "no-go: the on-chip memory vmem is too small"


def test_moments_in_the_hosts_memory_are_not_counted_on_the_device(topology, compiled):
    program = ahead_program(tiny.config({"optim.offload_moments": True}), topology)
    report = make_report("tiny", program, topology, compiled)
    rows = {row.kind: row.num_bytes for row in report.memory}
    assert report.host_bytes == pytest.approx(2 * rows["parameters"], rel=0.1)
    assert rows["moments"] < 0.01 * report.host_bytes
    assert rows["gradients"] == pytest.approx(rows["parameters"], rel=0.1)  # they stay
    assert report.settings["offload_moments"] is True


@pytest.mark.slow
def test_the_same_question_is_answered_from_what_was_kept(program, topology, compiled, report):
    text = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
    ahead.write_result(ahead.result_key(text, program, topology), compiled, print)
    again = preflight(tiny.config(), topology, config_name="tiny")
    assert again == dataclasses.replace(report, kept=True)
    assert "cached result of" in report_lines(again)[-2]


def test_whatever_changes_the_program_changes_the_key(program, topology, monkeypatch):
    key = lambda text="module", made=program, place=topology: ahead.result_key(text, made, place)
    options = dataclasses.replace(program.plan.compiler_options, values={"an_option": 1})
    changed = lambda **fields: dataclasses.replace(
        program, model=dataclasses.replace(program.model, plan=program.plan.replace(**fields))
    )
    mesh = jax.sharding.Mesh(program.mesh.devices[..., ::-1, :, :, :], program.mesh.axis_names)
    others = [
        key("other module"),
        key(place=dataclasses.replace(topology, name="simulated:9")),
        key(made=changed(compiler_options=options)),
        key(made=changed(mesh=mesh)),
    ]
    kept = key()
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_dump_to=x")
    others.append(key())
    monkeypatch.undo()
    assert key() == kept and len({kept, *others}) == 6


def test_a_damaged_result_is_told_and_not_used(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = []
    ahead.write_result("abc", compiled, said.append)
    assert ahead.read_result("abc", said.append) == dataclasses.replace(compiled, kept=True)
    ahead.result_file("abc").write_text('{"memory": null}')
    assert ahead.read_result("abc", said.append) is None
    assert ahead.read_result("other", said.append) is None
    assert len(said) == 1 and "abc.json" in said[0]


def test_a_result_that_cannot_be_kept_is_told(compiled, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = []
    ahead.write_result("abc", compiled, said.append)
    assert len(said) == 1 and "XDG_CACHE_HOME" in said[0]


def test_nothing_goes_into_the_compilation_cache_whatever_went_there_before(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    try:
        kept, nothing = [], contextlib.nullcontext
        for factor, around in enumerate((nothing, ahead.without_compilation_cache, nothing)):
            with around():
                jax.jit(lambda x, factor=factor: x * factor)(jax.numpy.ones(7))
            kept.append(len([path for path in tmp_path.iterdir() if path.name.startswith("jit__lambda")]))
        assert kept[0] > 0 and kept[1] == kept[0] and kept[2] > kept[1]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("message", "needed", "available", "space"),
    [
        (  # libtpu 0.0.42.1
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (22.11G) "
            "exceeds available HBM (15.75G).",
            22.11, 15.75, "hbm",
        ),
        (  # libtpu 0.0.51
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (65.04G) exceeds available HBM (15.75G). HLO module: jit_precise_step.\nSee https://openxla",
            65.04, 15.75, "hbm",
        ),
        (  # as earlier libtpu are quoted in public
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.82G of 15.48G hbm. Exceeded hbm "
            "capacity by 2.34G.\n\n  Largest program allocations in hbm:\n\n  1. Size: 2.00G\n     Operator: x\n"
            "     Shape: f32[4,8]{1,0}\n     Unpadded size: 2.00G\n  2. Size: 1.00G\n     Shape: bf16[2]{0}\n",
            17.82, 15.48, "hbm",
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem.",
         20 / 1024, 16 / 1024, "vmem"),
    ],
)  # fmt: skip
def test_the_compilers_message_is_read_as_numbers(message, needed, available, space):
    shortage = ahead.read_shortage(message)
    assert (shortage.needed, shortage.available) == (round(needed * 2**30), round(available * 2**30))
    assert shortage.space == space
    assert "\n" not in shortage.said and shortage.said and not shortage.said.startswith("RESOURCE")
    largest = ((2 * 2**30, "f32[4,8]{1,0}"), (2**30, "bf16[2]{0}")) if "Largest" in message else ()
    assert shortage.largest == largest


def test_a_message_without_figures_is_kept_as_text():
    shortage = ahead.read_shortage("RESOURCE_EXHAUSTED: Out of memory, and nothing more\nat all")
    assert shortage == ahead.Shortage("hbm", None, None, (), "Out of memory, and nothing more")


def test_jax_takes_a_part_of_a_gpus_memory_and_the_variable_changes_it(topology, monkeypatch):
    gpu = dataclasses.replace(topology, platform="gpu")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert usable_memory(gpu)[0] == 0.75 * 2**30 and usable_memory(topology)[0] == 2**30
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert usable_memory(gpu)[0] == 2**29
    for text in ("much", "nan", "inf", "-1", "0", "2"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
        with pytest.raises(BadInput, match=f"XLA_PYTHON_CLIENT_MEM_FRACTION='{text}' must be a number above 0"):
            usable_memory(gpu)
