"""What a step sends by arithmetic, beside what was read from the same steps compiled."""

import dataclasses
import pathlib

import pytest

from jaxscale.build import make_program
from jaxscale.config import resolve_budget
from jaxscale.config_file import load_config
from jaxscale.planning.machine import open_machine
from jaxscale.planning.sending import OFFLOADED, plan_sending

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "7b.py")


def opened(machine, settings):
    place = open_machine(machine)
    cfg = load_config(CONFIG, {"train.reduce_dtype": "bfloat16"} | settings)
    return make_program(cfg, resolve_budget(cfg, None), place.devices), place


def test_stages_of_fsdp_are_those_of_the_compiled_program():
    sending = plan_sending(*opened("v5p:2x2x4", {"batch_tokens": "64 rows"}))
    # jax 0.12.0.1, libtpu 0.0.51, vocabulary 32,000 for 32,768, 2026-11-23: products kept, one microbatch
    compiled = {"ici:fsdp:z": 0.0779, "ici:fsdp:y": 0.1015, "ici:fsdp:x": 0.2006}
    assert sending.links_s == pytest.approx(compiled, rel=0.03)


@pytest.mark.parametrize(
    ("machine", "blocking"), [("v5p:2x2x4", 1.0), ("v6e:8x8", 1.0), ("v5e:8x8", 0.5), ("h100:8x8", 0.0)]
)
def test_what_runs_beside_no_product_is_exposed_and_the_rest_as_far_as_products_are_short(machine, blocking):
    sending = plan_sending(*opened(machine, {"batch_tokens": "768 rows"}))
    assert sending.blocking_s == pytest.approx(blocking * sending.total_s, rel=0.01)
    assert sending.exposed_s(10 * sending.total_s) == pytest.approx(sending.blocking_s)
    assert sending.exposed_s(0.0) == pytest.approx(sending.total_s)


def test_collectives_on_the_sparsecores_run_beside_products():
    program, place = opened("v5p:2x2x4", {"batch_tokens": "64 rows"})
    values = {OFFLOADED + "all_gather": True, OFFLOADED + "reduce_scatter": True}
    options = dataclasses.replace(program.compiler_options, values=values)
    assert plan_sending(dataclasses.replace(program, compiler_options=options), place).blocking_s == 0.0


def test_sums_over_data_and_tensor_are_waited_for():
    sending = plan_sending(*opened("2*v5e:4x4", {"mesh.data": 2, "mesh.tensor": 4, "batch_tokens": "768 rows"}))
    links = sending.links_s
    assert set(links) == {"ici:fsdp:y", "ici:tensor:x", "dcn:data"}
    scatters = links["ici:fsdp:y"] / 3  # beside two gathers of as many bytes, which v5e hides
    assert sending.blocking_s == pytest.approx(links["dcn:data"] + links["ici:tensor:x"] + scatters)
