"""What a step says of its experts: numbers, and counts of many steps."""

import numpy as np
import pytest

from jaxscale.runtime.training.expert_load import DEAD_STEPS, MAX_RECORDS, ExpertLoad


def fetched(counts_LE, chosen=2, real_tokens=None, **more):
    """As a step gives it. Sums over text of which a part has no target, divided by those that have one."""
    counts_LE = np.array(counts_LE, np.int32)
    text, layers = counts_LE.sum(axis=1) / chosen, len(counts_LE)
    real_tokens = text[0] if real_tokens is None else real_tokens
    mean = lambda values: np.broadcast_to(np.float32(values), (layers,)) * text / real_tokens
    return {
        "expert_counts": counts_LE, "real_tokens": np.float32(real_tokens), "router_entropy": mean([1.5, 0.5]),
        "router_scores": mean([0.4, 0.2]), **more,
    }  # fmt: skip


EVEN, CROWDED = [4, 4, 4, 4], [8, 8, 0, 0]


def test_the_worst_layer_is_told_by_its_busiest_expert_and_by_how_many_would_be_as_uneven():
    numbers = ExpertLoad(experts_per_token=2).add_step(fetched([EVEN, CROWDED]))
    assert numbers["experts_busiest"] == 2.0 and numbers["experts_idle"] == 2
    assert numbers["experts_effective"] == pytest.approx(2.0)
    even = ExpertLoad(experts_per_token=2).add_step(fetched([EVEN, EVEN]))
    assert even["experts_effective"] == pytest.approx(4.0) and even["experts_busiest"] == 1.0


def test_means_are_of_the_tokens_that_were_routed_whatever_part_of_them_has_a_target():
    for real_tokens in (8.0, 2.0):
        bias = np.array([[-0.1, 0.1], [-0.3, 0.1]], np.float32)
        more = fetched([EVEN, EVEN], real_tokens=real_tokens, router_bias=bias, loss=np.float32(1))
        numbers = ExpertLoad(experts_per_token=2).add_step(more)
        assert numbers["router_entropy"] == pytest.approx(1.0) and numbers["router_entropy_lowest"] == pytest.approx(
            0.5
        )
        assert numbers["router_scores"] == pytest.approx(0.2) and numbers["router_bias"] == pytest.approx(0.4)
        assert numbers["router_bias_to_scores"] == pytest.approx(2.0)  # of the second layer: 0.4 over 0.2
        assert more.keys() == {"real_tokens", "loss"}, "what is left are numbers"


def test_rounds_are_the_most_and_the_mean_of_all_exchanges():
    numbers = ExpertLoad(experts_per_token=2).add_step(fetched([EVEN, EVEN], expert_rounds=np.array([0, 6, 0, 2, 0])))
    assert numbers["expert_rounds"] == 3 and numbers["expert_rounds_mean"] == 1.5
    assert "expert_rounds" not in ExpertLoad(experts_per_token=2).add_step(fetched([EVEN, EVEN]))


def test_an_expert_is_dead_after_so_many_steps_in_a_row_and_before_nobody_knows():
    use = ExpertLoad(experts_per_token=2)
    for step in range(1, DEAD_STEPS):
        assert "experts_dead" not in use.add_step(fetched([EVEN, CROWDED]))
    assert use.add_step(fetched([EVEN, CROWDED]))["experts_dead"] == 2
    assert use.add_step(fetched([EVEN, [8, 7, 1, 0]]))["experts_dead"] == 1
    assert use.add_step(fetched([EVEN, CROWDED]))["experts_dead"] == 1, "a token is enough"


def test_a_record_has_the_counts_of_all_steps_since_the_one_before():
    use = ExpertLoad(experts_per_token=2, first_layer=3)
    for _ in range(3):
        use.add_step(fetched([EVEN, CROWDED]))
    assert use.record() == {"steps": 3, "first_layer": 3, "counts": [[12] * 4, [24, 24, 0, 0]]}
    use.add_step(fetched([EVEN, EVEN]))
    assert use.record() == {"steps": 1, "first_layer": 3, "counts": [[4] * 4] * 2}


@pytest.mark.parametrize("total", [50, 5_000, 12_800, 1_000_000])
def test_records_are_few_come_early_and_never_far_apart(total):
    use = ExpertLoad(experts_per_token=2, every_steps=100, total_steps=total)
    due = [step for step in range(1, total + 1) if use.record_due(step)]
    assert len(due) <= MAX_RECORDS + 14
    assert due[:2] == [step for step in (100, 200) if step <= total]
    assert all(later - before <= max(100, total / 100) for before, later in zip(due, due[1:]))
    assert not any(ExpertLoad(experts_per_token=2, every_steps=0, total_steps=total).record_due(step) for step in due)
