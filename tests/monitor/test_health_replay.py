"""Replayed over made-up and recorded runs, the rules catch what is wrong and are silent where nothing is."""

import json

import health_table
import pytest
import recorded_runs
from curves import FAULTS, NOISE, Kind, clean
from recorded_runs import replay

from jaxscale.runtime.monitor.config import HealthConfig
from jaxscale.runtime.monitor.health import Health

STRONGEST = {fault.name: fault for fault in FAULTS}.values()  # the last of each name


@pytest.fixture(scope="module")
def recorded():
    return recorded_runs.runs()


@pytest.mark.parametrize("name", recorded_runs.QUICKSTART)
def test_a_clean_run_of_the_quick_start_raises_no_alarm(recorded, name):
    assert max(record["step"] for record in recorded[name]) == health_table.QUICKSTART.total_steps
    assert replay(recorded[name], facts=health_table.QUICKSTART) == []


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("name", recorded_runs.SMALL)
def test_a_clean_run_of_a_small_quick_start_raises_no_alarm(recorded, name, steps):
    assert replay(recorded_runs.every(recorded[name], steps), facts=health_table.SMALL) == []


SPOILT = {
    "flat": {"flat_start"},
    "hot": {"activations", "attention_logits"},  # whose loss alone looks well
    "hotter": {"divergence", "skipped_steps", "activations"},
    "busy": {"slow_step"},
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_run_of_the_quick_start_does(recorded, name):
    facts = health_table.facts_of_recorded(name)
    assert {finding.kind for finding in replay(recorded[name], facts=facts)} >= SPOILT[name]


def test_the_recorded_runs_have_what_the_rules_about_layers_read(recorded):
    for name in recorded_runs.SMALL:
        watched = [record for record in recorded[name] if "stats/activation_rms/01" in record]
        assert len(watched) == 40 and all("stats/mlp_rms/00" in record for record in watched)


@pytest.mark.cases(1)
@pytest.mark.parametrize("batch", NOISE)
def test_a_clean_made_up_run_raises_no_alarm(batch):
    for seed, schedule in ((4, "cosine"), (5, "wsd"), (7, "constant")):
        kind = Kind(seed, schedule, batch, 400)
        assert health_table.begun(clean(kind), health_table.facts_of_kind(kind)) == []


@pytest.mark.cases(3)
@pytest.mark.parametrize("fault", [f for f in STRONGEST if f.name != "plateau"], ids=lambda fault: fault.name)
def test_a_strong_fault_is_told(fault):
    delay, _ = health_table.judged(fault, 5, "medium batch")
    assert delay is not None and delay <= 100


@pytest.mark.slow
def test_a_loss_that_has_stopped_falling_is_told_and_one_that_falls_slowly_is_not():
    dead, _, slow = (fault for fault in FAULTS if fault.name == "plateau")
    assert health_table.judged(dead, 5, "large batch")[0] is not None
    assert health_table.judged(slow, 5, "large batch")[0] is None


@pytest.mark.slow
def test_a_diagnosis_that_reads_its_own_metrics_again_is_as_one_that_never_stopped():
    fault = next(fault for fault in FAULTS if fault.name == "loss that rises and stays" and fault.strength == 2)
    records = [json.loads(json.dumps(record)) for record in health_table.faulty(fault, 4)[0]]
    facts = health_table.facts_of_kind(Kind(4))
    whole, found = Health(HealthConfig(), facts), []
    stops = (20, len(records) // 2 + 8, len(records) // 2 + 40)
    for number, record in enumerate(records):
        if number in stops:
            again = Health(HealthConfig(), facts)
            for earlier in records[:number]:
                again.observe(earlier)
            assert state_of(again) == state_of(whole)
            assert [again.observe(later) for later in records[number:]] == later_findings(records, number, facts)
        found += whole.observe(record)
    assert found == replay(records, facts=facts) and {finding.kind for finding in found} >= {"spike", "divergence"}


def state_of(health):
    """All that it holds, as text."""

    def told(value):
        if isinstance(value, dict) or hasattr(value, "__dict__"):
            return {name: told(inner) for name, inner in (value if isinstance(value, dict) else vars(value)).items()}
        return repr(value)

    return [told(rule) for rule in health.rules] + [told(health.losses), told(health.recent), health.active]


def later_findings(records, number, facts):
    """What one that never stopped says from a record on."""
    health = Health(HealthConfig(), facts)
    return [health.observe(record) for record in records][number:]


@pytest.mark.soak
def test_the_page_of_what_is_caught_is_what_the_rules_do():
    assert health_table.DOC.read_text() == health_table.table()
