"""What qualify measured on chips of a kind stands in plans in the place of published ranges."""

import dataclasses
import json
import math

import pytest

from jaxscale.api import planning as api
from jaxscale.kernels.hardware import CHIPS
from jaxscale.settings import config_file
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning import measured as kept
from jaxscale.tools.planning.plan import PlanOptions
from jaxscale.tools.planning.published_mfu import published_mfu

SEVEN = config_file.load_config("configs/7b.py", {})
H100 = "NVIDIA H100 80GB HBM3"


def measured(**settings):
    given = dict(
        spec="1B", device_kind=H100, platform="gpu", num_devices=8, memory_bytes=80 * 10**9, dtype="bfloat16",
        pass_flops=2e15, step_seconds=0.5, flops_per_second=0.3 * 8 * 989.4e12, date="2026-11-23", versions={},
        by=kept.QUALIFY, save_bytes_per_second=4e9,
    )  # fmt: skip
    return kept.Measured(**given | settings)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing is kept before a test, and nothing of it after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_plan_takes_what_was_measured_on_such_chips():
    before = api.plan(SEVEN, "h100:8x8")
    kept.save_measured(measured())
    plan = api.plan(SEVEN, "h100:8x8")
    assert before.time.speed.source.startswith(published_mfu(CHIPS[H100])[1])
    assert plan.time.speed.mfu.low == pytest.approx(0.85 * 0.3) and plan.time.speed.mfu.high == pytest.approx(
        1.15 * 0.3
    )
    assert "30.0% for 1B on 8 of these chips, measured by jaxscale qualify, 2026-11-23" in plan.time.speed.source
    assert plan.time.wall_seconds.low > before.time.wall_seconds.low
    assert plan.saves.save_seconds == pytest.approx(plan.saves.checkpoint_bytes / (8 * 4e9))  # 64 devices, 8 measured
    assert "measured by jaxscale qualify with 8 devices" in plan.saves.save_source
    given = api.plan(SEVEN, "h100:8x8", PlanOptions(mfu=0.5, save_bytes_per_second=1e9))
    assert given.time.speed.mfu.low == 0.5 and given.saves.save_source == "from --save_bandwidth"


def test_other_chips_and_small_steps_say_nothing_about_it():
    kept.save_measured(measured(device_kind="NVIDIA H200"))
    kept.save_measured(measured(spec="S", by="jaxscale bench step --save"))
    assert api.plan(SEVEN, "h100:8x8").time.speed.source.startswith(published_mfu(CHIPS[H100])[1])


def test_of_several_the_pass_that_is_nearest_in_size_counts():
    kept.save_measured(measured(spec="0.1B", pass_flops=1e12, flops_per_second=0.1 * 8 * 989.4e12))
    kept.save_measured(measured())
    assert "1B on 8 of these chips" in api.plan(SEVEN, "h100:8x8").time.speed.source


def test_what_was_kept_before_is_still_read():
    old = kept.dataclasses.asdict(measured())
    del old["by"], old["save_bytes_per_second"]
    kept.make_private(kept.measured_file().parent)
    kept.write_json(kept.measured_file(), {"format": 2, "measured": [old]})
    (one,) = kept.read_measured()
    assert one.by == "jaxscale bench step --save" and one.save_bytes_per_second is None


def test_measurements_are_kept_and_a_damaged_file_is_named():
    assert kept.read_measured() == []
    one = kept.Measured("T", "cpu", "cpu", 1, 2**34, "float32", 1e11, 1.0, 1e11, "2026-11-20", {"jax": "0"})
    kept.save_measured(one)
    kept.save_measured(dataclasses.replace(one, spec="S"))
    kept.save_measured(newer := dataclasses.replace(one, date="2026-11-21"))  # in the place of the first
    assert [found.spec for found in kept.read_measured()] == ["S", "T"]
    assert newer in kept.read_measured()
    other = dataclasses.replace(one, device_kind="TPU v5", date="2026-11-22")
    assert kept.newest_machine([*kept.read_measured(), other]) == [other]
    damaged = [{"spec": "T"}, *(vars(one) | change for change in ({"flops_per_second": "x"}, {"date": None}))]
    for each in [*damaged, vars(one) | {"num_devices": 0}, vars(one) | {"pass_flops": math.nan}]:
        kept.measured_file().write_text(json.dumps({"format": kept.FORMAT, "measured": [each]}))
        with pytest.raises(BadInput, match="measured.json is not a valid measurements file"):
            kept.read_measured()
