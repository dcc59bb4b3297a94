"""What a step sends by arithmetic, beside what was read from the same steps compiled."""

import dataclasses
import pathlib

import pytest

from jaxscale.build import make_program
from jaxscale.kernels.config import NO_COMPILER_OPTIONS
from jaxscale.program.budget import resolve_budget
from jaxscale.settings.config_file import load_config
from jaxscale.tools.planning.communication import communication_time
from jaxscale.tools.planning.placeholder_devices import open_machine

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "7b.py")


def opened(machine, settings, config="7b"):
    place = open_machine(machine)
    cfg = load_config(CONFIG.replace("7b", config), {"train.reduce_dtype": "bfloat16"} | settings)
    return make_program(cfg, resolve_budget(cfg, None), place.devices), place


def without_offload(program):
    """The same, compiled with no options."""
    plan = program.plan.replace(compiler_options=NO_COMPILER_OPTIONS)
    return dataclasses.replace(program, model=dataclasses.replace(program.model, plan=plan))


def test_stages_of_fsdp_are_those_of_the_compiled_program():
    program, place = opened("v5p:2x2x4", {"batch_tokens": "64 rows"})
    # jax 0.12.0.1, libtpu 0.0.51, 2026-11-23: products kept, one microbatch, vocabulary of 32,000, not 32,768
    at_once, collective_phases = (
        {"ici:fsdp:xyz": 0.1817},
        {"ici:fsdp:z": 0.0779, "ici:fsdp:y": 0.1015, "ici:fsdp:x": 0.2006},
    )
    assert communication_time(program, place).links_s == pytest.approx(at_once, rel=0.03)
    found = communication_time(without_offload(program), place).links_s
    assert sorted(found.values()) == pytest.approx(sorted(collective_phases.values()), rel=0.03)


@pytest.mark.parametrize(
    ("machine", "blocking"), [("v5p:2x2x4", 0.0), ("v6e:8x8", 0.0), ("v5e:8x8", 0.5), ("h100:8x8", 0.0)]
)
def test_what_runs_beside_no_product_is_exposed_and_the_rest_as_far_as_products_are_short(machine, blocking):
    sending = communication_time(*opened(machine, {"batch_tokens": "768 rows"}))
    assert sending.blocking_s == pytest.approx(blocking * sending.total_s, rel=0.01)
    assert sending.exposed_s(10 * sending.total_s) == pytest.approx(sending.blocking_s)
    assert sending.exposed_s(0.0) == pytest.approx(sending.total_s)


def test_without_the_sparsecores_nothing_runs_beside_products_on_v5p_and_v6e():
    for machine in ("v5p:2x2x4", "v6e:8x8"):
        program, place = opened(machine, {"batch_tokens": "768 rows"})
        sending = communication_time(without_offload(program), place)
        assert sending.blocking_s == pytest.approx(sending.total_s)


def test_sums_over_data_and_tensor_are_waited_for():
    sending = communication_time(*opened("2*v5e:4x4", {"mesh.data": 2, "mesh.tensor": 4, "batch_tokens": "768 rows"}))
    links = sending.links_s
    assert set(links) == {"ici:fsdp:y", "ici:tensor:x", "dcn:data"}
    scatters = links["ici:fsdp:y"] / 3  # beside two gathers of as many bytes, which v5e hides
    assert sending.blocking_s == pytest.approx(links["dcn:data"] + links["ici:tensor:x"] + scatters)


def test_weights_go_through_the_network_between_nodes_before_context_puts_them_together():
    row = {"seq_len": 131_072, "batch_tokens": "8 rows", "mesh.context": 8, "train.reduce_dtype": "float32"}
    links = communication_time(*opened("h100:8x8", row, "llama3_8b")).links_s
    assert links["dcn:fsdp"] == pytest.approx(0.1359, rel=0.05)  # as compiled: jax 0.12.0.1, 2026-11-24
