"""Each rule speaks once when something begins and once when it is over, with numbers, causes and what to try."""

import dataclasses
import math
import random

import pytest
from recorded_runs import replay

from jaxscale import schema
from jaxscale.runtime.monitor.alerts import finding_to_json, format_message
from jaxscale.runtime.monitor.config import RULES, HealthConfig
from jaxscale.runtime.monitor.health import ALL, Health, RunFacts, facts_from_config
from jaxscale.runtime.monitor.health.rule import Baseline, BlockMeans, is_harmless, median, parse_forecast, slope
from jaxscale.system.exits import BadInput

FACTS = RunFacts(workdir="runs/a", total_steps=10_000, warmup_steps=100, decay="constant", clip_norm=1.0, branched=True)
SEEDED = random.Random(0)
NOISE = [SEEDED.gauss(0, 0.02) for _ in range(5000)]


def record(step, loss=None, **more):
    known = {"learning_rate": 1e-3, "grad_norm": 0.5, "batch_index": step - 1, "tokens_hash": f"{step:x}"}
    return {"step": step, "loss": 3 + NOISE[step % 5000] if loss is None else loss, **known, "skipped_total": 0} | more


def said(records, facts=FACTS, events=(), **settings):
    """[(kind, step, over)] and the findings."""
    found = replay(records, events, HealthConfig(**settings), facts)
    return [(finding.kind, finding.step, finding.over) for finding in found], found


def test_every_rule_has_words_and_a_name_by_which_it_is_switched_off():
    assert {rule.kind for rule in ALL} == set(RULES)
    for rule in ALL:
        assert rule.causes and rule.advice and rule.sources


@pytest.mark.parametrize("rule", ALL, ids=RULES)
def test_advice_and_sources_of_every_rule_are_tuples_of_whole_texts(rule):
    for texts in (rule.advice, rule.sources):
        assert isinstance(texts, tuple) and all(len(text) > 1 for text in texts)


def test_the_alert_for_nan_names_its_threshold_once_as_a_whole_text():
    records = [record(step) for step in range(1, 20)] + [record(20) | {"loss": None, "nonfinite": ["loss"]}]
    finding = next(finding for finding in replay(records, (), HealthConfig(), FACTS) if finding.kind == "nonfinite")
    rule = "common rules: a norm that is NaN is an alarm; stop at NaN"
    assert format_message(finding).splitlines()[-1] == f"Thresholds: {rule}"
    assert finding_to_json(finding)["sources"] == [rule]


def test_a_spike_is_told_once_and_once_more_when_it_is_over():
    told, found = said([record(step, 8.0 if 30 <= step < 36 else None) for step in range(1, 60)])
    assert told == [("spike", 30, False), ("spike", 38, True)]
    assert found[0].numbers["ratio"] == pytest.approx(8 / 3, rel=0.02) and found[0].numbers["since"] == 30
    for level in ("above 1.5 (a common rule)", "above 2 (another)", "below 3 (a third)"):
        assert level in found[0].seen
    assert found[1].numbers["highest"] == 8.0 and found[1].causes == ()


def test_a_single_record_between_the_thresholds_is_no_spike_and_two_are():
    assert said([record(step, 4.8 if step == 30 else None) for step in range(1, 60)])[0] == []
    assert said([record(step, 4.8 if step in (30, 31) else None) for step in range(1, 60)])[0][0] == (
        "spike",
        31,
        False,
    )


def test_a_spike_never_enters_its_own_baseline():
    baseline = Health(HealthConfig(), FACTS).losses
    for step in range(1, 40):
        baseline.add(9.0 if step > 30 else 3 + NOISE[step])
    assert baseline.baseline.center_and_noise()[0] == pytest.approx(3, rel=0.01) and 9.0 not in baseline.baseline.values


def test_noise_that_is_wide_is_no_spike_however_high_the_ratio():
    wide = [3 * math.exp(0.3 * SEEDED.gauss(0, 1)) for _ in range(400)]
    assert max(wide) > 1.5 * median(wide)
    assert [kind for kind, *_ in said([record(n + 1, loss) for n, loss in enumerate(wide)])[0] if kind == "spike"] == []


@pytest.mark.parametrize("scale", [0.0, 1e-9, 0.01])
def test_a_loss_near_zero_that_doubles_by_chance_alerts_nobody_and_one_half_a_nat_higher_does(scale):
    losses = [scale * (5 if 60 <= n < 64 else 1) for n in range(1, 100)]
    low = [record(n, loss, **{"train/web/loss": loss}) for n, loss in enumerate(losses, 1)]
    assert said(low)[0] == []
    told, found = said([*low, *(record(n, 0.7 * (n < 103)) for n in range(100, 120))])
    assert told == [("spike", 100, False), ("spike", 105, True)] and "inf" not in found[0].seen


def test_a_loss_that_stays_up_is_a_divergence_and_its_level_becomes_the_usual_one():
    told, found = said([record(step, None if step < 40 else 5 + NOISE[step]) for step in range(1, 100)])
    assert [(kind, over) for kind, _, over in told] == [("spike", False), ("divergence", False), ("spike", True)]
    assert "has not returned" in found[2].seen and found[1].numbers["lowest"] < 3.05


def test_what_is_not_finite_is_told_at_once_and_named():
    bad = record(20) | {"loss": None, "grad_norm": None, "nonfinite": ["loss", "grad_norm"]}
    told, found = said([*map(record, range(1, 20)), bad, *map(record, range(21, 40))])
    assert told == [("nonfinite", 20, False), ("nonfinite", 25, True)]
    assert found[0].seen == "not finite: loss and grad_norm"


def test_a_gradient_norm_of_four_times_the_clip_norm_alerts_nobody_and_the_text_shows_both_sources():
    assert said([record(step, grad_norm=4.0 if step in (30, 31) else 0.5) for step in range(1, 60)])[0] == []
    told, found = said([record(step, grad_norm=200.0 if step == 30 else 0.5) for step in range(1, 60)])
    assert told == [("explosion", 30, False), ("explosion", 35, True)]
    assert "above 100 (a common rule; 0.1 to 10 is normal), above 3 times the clip norm, 3" in found[0].seen


def test_a_loss_that_never_falls_is_flat_unless_the_run_began_with_another_ones_weights():
    records = [record(step * 10, 10.4 + NOISE[step]) for step in range(1, 40)]
    facts = RunFacts(warmup_steps=100, vocab_size=32_768)
    told, found = said(records, facts)
    assert told == [("flat_start", 220, False)] and "ln 32768 = 10.4" in found[0].seen
    assert said(records, RunFacts(warmup_steps=100, branched=True))[0] == []


@pytest.mark.parametrize("decay, told", [("constant", True), ("cosine", False)])
def test_a_plateau_is_told_while_the_rate_is_up_and_not_late_under_a_falling_one(decay, told):
    curve = lambda step: 3 + max(0.0, 2 - step / 1500)
    records = [record(step * 10, curve(step * 10) * (1 + NOISE[step])) for step in range(1, 1000)]
    if decay == "cosine":
        for one in records:
            one["learning_rate"] = 1e-3 * max(0.01, 0.5 * (1 + math.cos(math.pi * min(one["step"] / 3500, 1))))
    facts = RunFacts(total_steps=10_000, warmup_steps=100, decay=decay, branched=True)
    kinds, found = said(records, facts)
    assert [kind for kind, *_ in kinds] == (["plateau"] if told else [])
    for finding in found:
        assert (
            "certainly by less than 1%" in finding.seen
            and "times the first: a plateau by a common rule" in finding.seen
        )


def test_too_few_noisy_records_are_no_plateau():
    assert said([record(step * 10) for step in range(1, 95)], RunFacts(branched=True))[0] == []


def test_swings_to_both_sides_are_an_oscillation():
    records = [record(s, (3 + NOISE[s]) * (1 + (0.2 * math.sin(s * 1.3) if s > 150 else 0))) for s in range(1, 300)]
    told, found = said(records)
    assert told[0][0] == "oscillation" and 150 < told[0][1] < 200 and len(told) == 1
    assert "around its trend" in found[0].seen


def layers(step, **values):
    return {"step": step} | {f"stats/activation_rms/{layer}": value for layer, value in values.items()}


def test_dead_and_huge_layers_are_named_in_one_alert():
    records = [layers(step, a=1.0, b=1e-4 if 30 <= step < 50 else 0.5, c=300.0 if step >= 40 else 2.0)
               for step in range(10, 80, 10)]  # fmt: skip
    told, found = said(records)
    assert told == [("activations", 40, False)]
    assert found[0].numbers["huge"] == ["c"] and found[0].numbers["dead"] == ["b"]
    assert "above 100 in c (300); below 0.01 in b (0.0001)" in found[0].seen


def test_a_branch_that_adds_nothing_is_told_behind_a_stream_that_looks_well():
    def shut(step, **added):
        more = {"stats/activation_rms/03": 2.0, "stats/attention_rms/03": 0.4, "stats/mlp_rms/03": 0.3}
        return {"step": step} | more | {f"stats/{name}/03": value for name, value in added.items()}

    told, found = said([shut(100), shut(200, mlp_rms=1e-4), shut(300, mlp_rms=1e-4), shut(400)])
    assert told == [("activations", 300, False)] and found[0].numbers["shut"] == {"mlp of 03": 5e-5}
    assert found[0].seen == "relative to the residual stream, these add less than 0.001: mlp of 03 (5e-05)"
    assert said([shut(step, attention_rms=0.0) for step in (50, 100)])[0] == []  # in the warmup


def statistics_record(step, *zero, **more):
    known = {"stats/grad_norm/00": 0.5, "stats/grad_norm/head": 0.1}
    return record(step) | known | {f"stats/zero_grad/{name}": 1.0 for name in zero} | more


def test_a_parameter_whose_gradient_stays_exactly_zero_is_named_with_causes_and_advice():
    dead = ("blocks/0/mlp/up", "head")
    records = [statistics_record(step, *dead if 300 <= step < 700 else ()) for step in range(100, 1000, 100)]
    records += [record(step) for step in range(510, 600, 10)]  # between two records with statistics
    found, cases = said(sorted(records, key=lambda record: record["step"]))
    assert found == [("zero_gradient", 500, False), ("zero_gradient", 800, True)]
    seen = "the gradient of blocks/0/mlp/up and head was exactly zero in 3 consecutive records with statistics"
    assert cases[0].seen == f"{seen}, since step 300"
    assert cases[0].numbers["parameters"] == list(dead) and cases[0].numbers["since"] == 300
    causes = " ".join(cause.what for cause in cases[0].causes)
    for cause in ("the loss does not depend on the parameter", "both factors of a product are zero", "mask or gate"):
        assert cause in causes
    assert "float16" not in cases[0].causes[0].what and "optim.groups" in " ".join(cases[0].advice)
    assert cases[1].seen == "every trained parameter has a gradient again"


def test_float16_is_the_first_suspect_of_a_gradient_of_zero_where_it_computes():
    facts = dataclasses.replace(FACTS, compute_dtype="float16")
    _, found = said([statistics_record(step, "head") for step in (100, 200, 300)], facts)
    assert "float16" in found[0].causes[0].what


def test_a_gradient_that_is_zero_now_and_then_raises_no_alert():
    """LoRA's A at the first step, where B is zero; a batch without a target; two parameters in turn."""
    assert said([statistics_record(step, *["blocks/0/mlp/up_lora_a"] * (step == 1)) for step in range(1, 9)])[0] == []
    turns = [statistics_record(step, ("head", "final_norm")[step % 2]) for step in range(1, 20)]
    assert said(turns)[0] == []
    gaps = [statistics_record(step, *["head"] * (step % 3 > 0)) for step in range(1, 30)]
    assert said(gaps)[0] == [] and said(gaps, zero_grad_records=2)[0][0] == ("zero_gradient", 2, False)


def test_records_without_statistics_or_with_an_infinite_gradient_count_neither_way():
    lost = statistics_record(2) | {"stats/grad_norm/00": None, "stats/grad_norm/head": None}
    records = [
        statistics_record(1, "head"),
        lost,
        statistics_record(3, "head"),
        record(4),
        statistics_record(5, "head"),
    ]
    assert said(records)[0] == [("zero_gradient", 5, False)]


def test_a_long_list_of_parameters_without_gradient_is_counted():
    names = [f"blocks/{layer}/mlp/up" for layer in range(20)]
    _, found = said([statistics_record(step, *names) for step in (1, 2, 3)])
    assert "blocks/3/mlp/up and 16 more was exactly zero" in found[0].seen
    assert found[0].numbers["count"] == 20 and len(found[0].numbers["parameters"]) == 8


def test_fewer_than_two_records_of_a_gradient_of_zero_are_refused():
    with pytest.raises(BadInput, match="zero_grad_records=1 must be at least 2"):
        HealthConfig(zero_grad_records=1)


def test_large_attention_logits_are_told_as_exact_or_as_a_bound():
    for name, words in (("stats/attention_logit_max/3", "the largest attention logit"),
                        ("stats/attention_logit_bound/3", "the bound max|q| max|k|")):  # fmt: skip
        _, found = said([{"step": step, name: 5000.0} for step in (10, 20)])
        assert words in found[0].seen and found[0].numbers["layers"] == ["3"]


def timed(step, seconds=2.0, wait=0.01, **more):
    return record(step * 10, step_seconds=seconds, data_wait_seconds=wait, tokens_per_second=1e6 / seconds, **more)


def test_starvation_is_told_with_its_part_of_the_step():
    told, found = said([timed(n, 3.0, 1.0) if n >= 20 else timed(n) for n in range(1, 40)])
    assert told == [("starvation", 240, False)] and found[0].numbers["part"] == pytest.approx(1 / 3)


def test_a_slow_step_must_last_and_be_slower_than_the_run_itself():
    assert said([timed(n, 9.0 if n in (20, 25, 30) else 2.0) for n in range(1, 40)])[0] == []
    assert said([timed(n, 9.0 if 20 <= n < 30 else 2.0) for n in range(1, 40)])[0] == [
        ("slow_step", 240, False), ("slow_step", 340, True),
    ]  # fmt: skip
    fast = [timed(n, 0.009 if 20 <= n < 30 else 0.002) for n in range(1, 40)]  # all of it within a second
    assert said(fast)[0] == []


def test_a_step_that_is_slower_since_its_batch_is_larger_is_not_called_slow():
    slower = [timed(n, 9.0 if n >= 20 else 2.0, batch_index=n * 10 - 1) for n in range(1, 60)]
    assert said(slower)[0] == [("slow_step", 240, False)]
    facts = facts_from_config({"budget": {"batch_tokens": 4096, "ramp": [[0, 1024], [190, 4096]]}})
    assert facts.grows_at == (190,)
    assert said(slower, dataclasses.replace(FACTS, grows_at=facts.grows_at))[0] == []


def test_a_busy_machine_is_told_as_that_and_not_as_a_fault_of_the_run():
    shared = lambda n: dict(host_own_share=0.45, host_other_share=0.5) if 20 <= n < 90 else dict(
        host_own_share=0.9, host_other_share=0.02
    )  # fmt: skip
    slow = [
        timed(n, 4.1 if 20 <= n < 90 else 2.0, wait=1.0 if 20 <= n < 90 else 0.01, **shared(n)) for n in range(1, 130)
    ]
    on_cpu = dataclasses.replace(FACTS, on_cpu=True)
    told, found = said(slow, on_cpu, off=("plateau",))
    assert told == [("busy_machine", 240, False), ("busy_machine", 940, True)]
    assert found[0].seen == ("other programs used 50% of the machine's CPU; a step took 2.0 times its usual 2.0s")
    assert is_harmless({"event": "alert", "what": told[0][0], "over": False})
    # where a chip computes, the host's load is evidence alone, and without it a slow step is what it was
    _, found = said([one | {"data_wait_seconds": 0.0} for one in slow], off=("plateau",))
    assert found[0].kind == "slow_step" and "other programs used" in found[0].causes[0].evidence
    alone = [one | {"host_own_share": 0.45, "host_other_share": 0.02, "data_wait_seconds": 0.0} for one in slow]
    assert said(alone, on_cpu, off=("plateau",))[0][0][0] == "slow_step"


def test_a_throughput_that_falls_and_stays_is_told_where_no_slow_step_is():
    told, found = said([timed(n, 2.0 if n < 80 else 3.0) for n in range(1, 130)], off=("plateau",))
    assert told == [("utilisation_drop", told[0][1], False)] and 800 < told[0][1] < 1000
    assert found[0].numbers["now"] / found[0].numbers["was"] == pytest.approx(2 / 3)


def test_memory_that_rises_steadily_is_told_with_the_step_at_which_it_is_full():
    gigabyte = 2**30
    creep = lambda n: dict(device_bytes_in_use=(40 + 0.1 * n) * gigabyte, device_bytes_limit=80 * gigabyte)
    told, found = said([timed(n, **creep(n)) for n in range(1, 150)], off=("plateau",))
    assert [kind for kind, *_ in told] == ["memory_creep"]
    assert found[0].numbers["full_at_step"] == pytest.approx(4000, rel=0.05)
    stairs = lambda n: dict(device_bytes_in_use=(40 + 5 * (n > 70)) * gigabyte)
    assert said([timed(n, **stairs(n)) for n in range(1, 150)], off=("plateau",))[0] == []
    slow = lambda n: dict(host_bytes_in_use=(4 + 0.003 * n) * gigabyte)  # a leak that 100 records do not show
    assert said([timed(n, **slow(n)) for n in range(1, 1200)], off=("plateau",))[0][0][0] == "memory_creep"


def test_a_peak_counts_where_nothing_is_known_of_what_is_in_use_and_there_alone():
    peak = lambda n: dict(host_peak_bytes=(4 + 0.1 * n) * 2**30)  # as where mapped files are read for the first time
    steady = dict(host_bytes_in_use=4 * 2**30)
    told = lambda **more: said([timed(n, **peak(n), **more) for n in range(1, 150)], off=("plateau",))[0]
    assert [kind for kind, *_ in told()] == ["memory_creep"] and told(**steady) == []


def test_skipped_steps_are_told_but_not_those_in_which_a_loss_scale_is_sought():
    skip = lambda n, scale: record(n, skipped_total=max(0, min(n - 20, 5)), **{"train/loss_scale": scale(n)})
    assert said([skip(n, lambda n: 1.0) for n in range(1, 60)])[0] == [
        ("skipped_steps", 22, False), ("skipped_steps", 35, True),
    ]  # fmt: skip
    assert said([skip(n, lambda n: 2.0**-n) for n in range(1, 60)])[0] == []


def test_a_validation_loss_that_rises_while_training_falls_is_told_and_one_that_rises_with_it_is_not():
    def curve(falls):
        for step in range(1, 200):
            yield record(step, 3 - falls * step / 200)
            if step % 10 == 0:
                yield {"step": step, "validation/loss": 3 + abs(step - 100) / 300}

    told, found = said(curve(1.0))
    assert told == [("overfitting", 130, False)] and found[0].numbers["lowest_step"] == 100
    assert [kind for kind, *_ in said(curve(-1.0))[0] if kind == "overfitting"] == []


def test_a_source_that_jumps_where_a_stage_begins_names_the_stage_first():
    def curve():
        for step in range(1, 80):
            yield record(step, **{"train/web/loss": 3 + NOISE[step], "train/code/loss": (2.0 if step < 50 else 3.2)})

    facts = RunFacts(stage_batches=(48,), branched=True)
    told, found = said(curve(), facts)
    assert told[0] == ("source_jump", 52, False) and found[0].numbers["sources"] == ["code"]
    assert found[0].causes[0].what == "the data changed"
    assert found[0].causes[0].evidence == "a stage of data.mixture started with batch 48; this is batch 51"


def test_leaving_the_forecast_is_told_and_coming_back_too():
    # At step s, with 10 s tokens, the band is between 3.9 - s / 100 and 4.1 - s / 100.
    band = parse_forecast({"tokens": [0, 1000], "low": [3.9, 2.9], "middle": [4, 3], "high": [4.1, 3.1]})
    middle = lambda step: 4 - step / 100
    curve = [record(step, middle(step) + 0.2 * (30 <= step < 60), tokens_seen=step * 10) for step in range(1, 90)]
    facts = RunFacts(forecast=band, branched=True)
    told = [(kind, over) for kind, _, over in said(curve, facts)[0] if kind == "forecast"]
    assert told == [("forecast", False), ("forecast", True)]
    assert said(curve, FACTS, off=("divergence",))[0] == []  # no band, nothing to leave


def test_causes_come_in_the_order_of_their_evidence():
    spike = lambda step: record(step, 9.0 if step == 110 else None, grad_norm=40.0 if step == 110 else 0.5)
    facts = dataclasses.replace(FACTS, workdir="runs/a b")
    finding = next(f for f in said([spike(step) for step in range(1, 120)], facts)[1] if f.kind == "spike")
    causes = {cause.what: cause.evidence for cause in finding.causes}
    assert causes["the warmup is too short"] == "the warmup ended at step 100, 10 steps earlier"
    assert causes["a gradient explosion"] == "the norm reached 40 at step 110 and was clipped to 1"
    assert [cause.what for cause in finding.causes][:2] == ["the warmup is too short", "a gradient explosion"]
    assert causes["the data changed"] == "the mixture of sources does not change"
    assert list(causes).index("the data changed") > list(causes).index("the learning rate is too high")
    batch = causes["a bad batch: broken, repeated or very long documents"]
    assert (
        batch == "step 110 trained on batch 109: `jaxscale trace --workdir='runs/a b' --batch=109` lists its documents"
    )


def test_a_batch_that_came_before_is_the_first_suspect():
    repeated = lambda step: {"tokens_hash": "3"} if step == 300 else {}
    records = [record(step, 9.0 if step == 300 else None, **repeated(step)) for step in range(1, 310)]
    assert "batch 299 has the same tokens as batch 2" in said(records)[1][0].causes[0].evidence


def test_an_event_just_before_is_evidence():
    records = [record(step, 9.0 if step == 300 else None) for step in range(1, 310)]
    for event, told in (
        ({"event": "lr_cut", "step": 295}, "events.jsonl has 'lr_cut' at step 295"),
        ({"event": "rewind", "step": 340, "to": 295}, "events.jsonl has 'rewind' at step 340, to step 295"),
    ):
        found = said(records, events=[event])[1]
        assert found[0].causes[0] == ("the run has just resumed or rewound", told)


def test_what_comes_and_goes_is_told_less_and_less_often():
    records = [record(step, grad_norm=300.0 if step > 20 and step % 8 == 0 else 0.5) for step in range(1, 400)]
    starts = [step for kind, step, over in said(records)[0] if not over]
    assert starts == [24, 32]  # the second episode is over after ten good records, which never come


def test_rules_are_switched_off_by_name_and_all_of_them_at_once():
    records = [record(step, 8.0 if 30 <= step < 36 else None) for step in range(1, 60)]
    assert said(records, off=("spike",))[0] == [] and said(records, on=False)[0] == []
    with pytest.raises(ValueError, match="off=\\['spikes'\\] is not a rule; the rules are nonfinite, spike"):
        HealthConfig(off=("spikes",))


@pytest.mark.parametrize(
    "settings",
    [{"spike_ratio": 1}, {"plateau_drop": 0}, {"data_wait": 1}, {"grad_norm": 0}, {"plateau_records": 49},
     {"activation_low": 200}, {"speed_seconds": -1}],
    ids=str,
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        HealthConfig(**settings)


def test_all_settings_may_change_when_a_run_goes_on():
    assert schema.changeable(HealthConfig) == {name for name, *_ in schema.describe(HealthConfig)}


def test_the_facts_of_a_run_are_read_from_its_config():
    config = {
        "config": {
            "seq_len": 8, "optim": {"decay": "wsd", "clip_norm": 0.5}, "init": {"from_path": "x"},
            "model": {"compute_dtype": "bfloat16", "vocab_size": 100},
            "data": {"mixture": {"0": {"a": 1}, "50%": {"b": 1}, "20 steps": {"c": 1}, "1 epoch": {"d": 1}}},
        },
        "budget": {"batch_tokens": 64, "total_steps": 100, "warmup_steps": 7},
    }  # fmt: skip
    facts = facts_from_config(config, "w")
    assert facts == RunFacts("w", 100, 7, "wsd", 0.5, "bfloat16", 100, True, (20, 50), ())
    assert facts_from_config({}) == RunFacts() and facts_from_config({"devices": {"kind": "cpu", "number": 2}}).on_cpu


def test_a_record_that_lacks_everything_or_is_odd_is_taken_calmly():
    odd = [
        {"step": 1},
        {"step": 2, "loss": None, "nonfinite": ["loss"]},
        {"step": 3, "loss": 0.0, "grad_norm": None, "train/x/loss": 0.0, "mfu": 0.0, "step_seconds": 1.0},
        {"step": 4, "loss": -1.0, "step_seconds": 0.0, "data_wait_seconds": 1.0, "note": "text", "skipped_total": 1},
        {"step": 5, "validation/loss": None, "nonfinite": ["validation/loss"], "stats/activation_rms/0": None},
    ]
    found = replay(odd * 30, facts=RunFacts(total_steps=0))
    assert "nonfinite" in {finding.kind for finding in found}


@pytest.mark.slow
def test_no_numbers_however_odd_break_a_rule():
    chance = random.Random(1)
    names = (
        "loss grad_norm learning_rate step_seconds data_wait_seconds tokens_per_second mfu device_bytes_in_use "
        "host_own_share host_other_share".split()
    )
    names += "device_bytes_limit host_peak_bytes skipped_total batch_index tokens_seen validation/loss".split()
    names += "train/web/loss train/loss_scale stats/activation_rms/1 stats/attention_logit_max/1".split()
    values = [0.0, None, 1e-300, 1e300, -1.0, 1.0, 3.0, 3.1, 2.9, 1e9, 7]
    facts = RunFacts(total_steps=900, warmup_steps=5, forecast=((0.0, 0.0, 0.0), (0.0, 1.0, 1.0), (9.0, 1.0, 1.0)))
    for run in range(12):
        likely = {name: chance.choice(values) for name in names}
        health = Health(HealthConfig(plateau_records=50, speed_seconds=0.0), facts)
        for step in range(1, 400):
            odd = {name: chance.choice(values) if chance.random() < 0.03 * run else likely[name] for name in names}
            health.observe({"step": step} | {name: value for name, value in odd.items() if chance.random() < 0.95})


def test_the_statistics_are_what_they_are_called():
    assert median([3, 1, 2]) == 2 and median([4, 1, 2, 3]) == 2.5
    line = slope(range(100), [5 - 0.01 * x + NOISE[x] for x in range(100)])
    assert line.per_x == pytest.approx(-0.01, abs=3 * line.error) and 0 < line.error < 0.001
    baseline = Baseline()
    for value in [2 + NOISE[n] for n in range(50)]:
        baseline.add(value)
    assert baseline.center_and_noise()[1] == pytest.approx(0.02, rel=0.5)
    blocks = BlockMeans(most=8)
    for step in range(1, 1001):
        blocks.add(step, float(step))
    assert len(blocks.done) <= 8 and all(x == pytest.approx(y) for x, y in blocks.done)
    assert [x for x, _ in blocks.done] == sorted(x for x, _ in blocks.done)
