"""What preflight kept about the very step is found again without compiling, and nothing is looked for in vain."""

import dataclasses

import pytest
import tiny

from jaxscale.tools.planning.topology import open_topology
from jaxscale.tools.preflight import compiled as ahead
from jaxscale.tools.preflight.compiled import Compiled, Memory
from jaxscale.tools.preflight.hlo import HloFacts
from jaxscale.tools.preflight.preflight import ahead_program, find_compiled_step

FACTS = HloFacts(
    collectives=[], dot_flops=1e9, hbm_bytes=1e3, unknown_trips=0, dot_flops_by_type={"bf16": 1e9}
)  # fmt: skip
WHERE = "v5e:2x2"


def config():
    return tiny.config({"model.attention": "auto", "model.head_dim": 128, "seq_len": 128, "batch_tokens": "16 rows"})


@pytest.mark.soak
def test_a_result_is_found_by_its_step_and_by_no_other(monkeypatch, tmp_path):
    pytest.importorskip("libtpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    topology = open_topology(WHERE)
    program = ahead_program(config(), topology)
    memory = Memory(peak=123_456_789, arguments=1, code=0)
    result = Compiled(memory, FACTS, None, 1.0, 1.0, {}, "2026-11-21")
    ahead.write_result(ahead.lower(program, topology)[1], result, print)
    found = find_compiled_step(config(), WHERE, print)
    assert (found.peak_bytes, found.date) == (123_456_789, "2026-11-21") and 0 < found.mfu_ceiling
    assert find_compiled_step(dataclasses.replace(config(), rules="zero1"), WHERE, print) is None
    assert find_compiled_step(config(), "b200:1x8", print) is None  # nothing compiles for it
    said = []
    next((tmp_path / "jaxscale" / "preflight").glob("*.json")).write_text("{}")
    assert find_compiled_step(config(), WHERE, said.append) is None and "cannot be read" in said[0]


def test_nothing_is_traced_where_nothing_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_compiled_step(None, None, print) is None  # neither is looked at
