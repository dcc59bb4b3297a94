"""The chip table: what every row must hold."""

import re
import types

import pytest

from jaxscale.kernels.hardware import CHIPS, choose_compute_dtype, compute_capability, find_chip, read_cpu_features
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.placeholder_devices import open_machine


@pytest.mark.parametrize("kind", CHIPS)
def test_a_row_has_its_sources_and_figures_of_the_right_size(kind):
    chip = find_chip(kind)
    assert chip.source and (chip.ici_bandwidth is None) == (not chip.links_source)
    assert 1e13 < chip.peak_flops < 5e15 and 1e9 < chip.hbm_bytes < 1e12  # FLOP/s and bytes, not TFLOP/s and GiB
    for faster, slower in [
        (chip.hbm_bandwidth, chip.ici_bandwidth),
        (chip.ici_bandwidth, chip.dcn_bandwidth),
        (chip.fp8_flops, chip.peak_flops / 1.001),
        (chip.int8_flops, chip.peak_flops / 1.001),
    ]:
        assert faster is None or slower is None or faster > slower


@pytest.mark.parametrize("kind", CHIPS)
def test_what_a_chip_costs_and_draws_has_a_date_and_a_source(kind):
    chip = find_chip(kind)
    assert (chip.watts is None) == (not chip.watts_source)
    assert chip.watts is None or 50 < chip.watts < 2000
    if chip.price is not None:
        assert 0.1 < chip.price.dollars_per_hour < 20 and chip.price.source
        assert re.fullmatch(r"20\d\d(-\d\d-\d\d)?", chip.price.date)
    for slower, faster in [(chip.fp32_flops, chip.fp16_flops), (chip.fp16_flops, chip.int8_flops)]:
        assert slower is None or faster is None or slower < faster
    if not chip.bfloat16:
        assert chip.peak_flops == chip.fp16_flops


def test_every_chip_that_is_promised_is_there():
    names = {chip.name for chip in CHIPS.values()}
    assert {"V100", "T4", "A100 40GB", "A100 80GB", "H100 SXM", "H200 SXM", "B200 SXM"} <= names
    assert {"TPU v3", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x", "GB200", "A10G", "P100"} <= names


# cloud.google.com/tpu/docs, page of the version: VM types and slices.
@pytest.mark.parametrize(
    ("topology", "hosts"),
    [
        ("v5e:1x1", 1), ("v5e:2x2", 1), ("v5e-8", 1), ("v5e:2x4", 1), ("v5e-16", 4), ("v5e-256", 64),
        ("v6e:1x1", 1), ("v6e-4", 1), ("v6e-8", 1), ("v6e-16", 4), ("v6e-256", 64), ("2*v6e-8", 2),
        ("v3-8", 1), ("v3-32", 4), ("v4-8", 1), ("v4-16", 2), ("v5p-8", 1), ("v5p-16", 2), ("v5p-256", 32),
        ("tpu7x-8", 1), ("tpu7x-16", 2), ("h100:8", 1), ("gb200:18x4", 18), ("a10g:4", 1), ("p100:1", 1), ("t4:2", 1),
    ],
)  # fmt: skip
def test_slices_have_the_hosts_that_the_cloud_gives_them(topology, hosts):
    machine = open_machine(topology)
    assert machine.num_hosts == hosts == len({device.process_index for device in machine.devices})


def test_a_gb200_tray_has_four_gpus():
    with pytest.raises(BadInput, match="a host has 1 to 4 GPUs, .* write gb200:2x4"):
        open_machine("gb200:8")


def test_an_unknown_chip_has_no_row():
    assert find_chip("TPU v99") is None


def device(platform, kind="cpu", **reported):
    return types.SimpleNamespace(platform=platform, device_kind=kind, **reported)


@pytest.mark.parametrize(
    ("where", "dtype", "reason"),
    [
        (device("tpu", "TPU v5 lite"), "bfloat16", "TPUs multiply bfloat16"),
        (device("tpu", "TPU v99"), "bfloat16", "TPUs"),
        (device("gpu", "NVIDIA H100 80GB HBM3"), "bfloat16", "compute capability 9"),  # planned for: it reports nothing
        (device("gpu", "NVIDIA RTX 9", compute_capability="8.6"), "bfloat16", "capability 8.6"),
        (device("gpu", "Tesla T4", compute_capability="7.5"), "float16", "none for bfloat16"),
        (device("gpu", "Tesla V100-SXM2-16GB"), "float16", "compute capability 7,"),
        (device("gpu", "Tesla P100-PCIE-16GB"), "float32", "no matrix units"),
        (device("gpu", "AMD", compute_capability="gfx90a"), "float32", "'AMD' is unknown"),
    ],
)
def test_the_compute_dtype_of_a_device_is_one_that_its_hardware_multiplies(where, dtype, reason):
    choice = choose_compute_dtype(where, {})
    assert choice.dtype == dtype and reason in choice.reason


AMX, ZEN4, ZEN3 = {"avx2", "avx512_bf16", "amx_bf16"}, {"avx2", "avx512_bf16"}, {"avx2", "fma"}


@pytest.mark.parametrize(
    ("features", "flags", "dtype", "reason"),
    [
        (AMX, "", "bfloat16", "amx_bf16"),
        (ZEN4, "", "bfloat16", "avx512_bf16"),
        (ZEN3, "", "float32", "neither amx_bf16 nor avx512_bf16"),
        (AMX, "--xla_cpu_max_isa=AVX2", "float32", "--xla_cpu_max_isa=AVX2 in XLA_FLAGS excludes this CPU's"),
        (AMX, "--xla_a=1 --xla_cpu_max_isa=avx512_bf16", "bfloat16", "avx512_bf16"),
        (AMX, "--xla_cpu_max_isa=AVX512_VNNI", "float32", "AVX512_VNNI"),
        (AMX, "--xla_cpu_max_isa=AVX2 --xla_cpu_max_isa=AMX", "bfloat16", "amx_bf16"),  # XLA reads the last
        (ZEN3, "--xla_cpu_max_isa=AVX2", "float32", "neither"),
    ],
)
def test_a_cpu_gets_bfloat16_where_xla_may_use_its_instructions(features, flags, dtype, reason):
    choice = choose_compute_dtype(device("cpu"), {"XLA_FLAGS": flags}, features)
    assert choice.dtype == dtype and reason in choice.reason


def test_cpu_features_are_those_that_linux_lists(tmp_path):
    (tmp_path / "cpuinfo").write_text("model name\t: EPYC\nflags\t\t: fpu avx2 amx_bf16\n\nflags\t\t: fpu\n")
    assert read_cpu_features(str(tmp_path / "cpuinfo")) == {"fpu", "avx2", "amx_bf16"}
    assert read_cpu_features(str(tmp_path / "none")) == frozenset()


@pytest.mark.parametrize("kind", [kind for kind in CHIPS if "TPU" not in kind])
def test_the_table_has_the_compute_capability_of_each_gpu(kind):
    capability = compute_capability(device("gpu", kind))
    assert capability is not None and (capability >= 8.0) == find_chip(kind).bfloat16
