"""Rates are counted between reports, by the clock that was passed in."""

import pytest

from jaxscale.runtime.monitor.goodput import Throughput


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_rates_are_those_of_the_last_interval_only():
    clock = Clock()
    throughput = Throughput(flops_per_token=6e9, peak_flops=1e12, num_chips=4, clock=clock)
    clock.now += 50  # start-up and the first step, which compiles
    throughput.add(100)
    for _ in range(4):
        clock.now += 0.5
        throughput.add(100, data_wait_seconds=0.125)
    report = throughput.report()
    assert report == pytest.approx(
        {"tokens_per_second": 200.0, "step_seconds": 0.5, "data_wait_seconds": 0.125, "mfu": 200 * 6e9 / 4e12}
    )
    clock.now += 1.0
    throughput.add(100)
    assert throughput.report()["tokens_per_second"] == pytest.approx(100.0)


@pytest.mark.parametrize(("flops", "peak"), [(None, 1e12), (6e9, None)])
def test_mfu_is_unknown_without_flops_or_peak(flops, peak):
    clock = Clock()
    throughput = Throughput(flops, peak, clock=clock)
    throughput.add(10)
    clock.now += 1
    throughput.add(10)
    report = throughput.report()
    assert report["mfu"] is None and report["tokens_per_second"] == pytest.approx(10)


def test_an_evaluation_in_the_interval_does_not_count():
    clock = Clock()
    throughput = Throughput(None, None, clock=clock)
    throughput.add(100)
    clock.now += 11
    throughput.exclude(10)
    throughput.add(100)
    assert throughput.report()["tokens_per_second"] == pytest.approx(100)


def test_an_interval_without_a_step_has_no_rates():
    assert set(Throughput(1.0, 1.0, clock=Clock()).report().values()) == {None}


def test_the_first_step_compiles_and_is_no_measure_of_speed():
    clock = Clock()
    throughput = Throughput(None, None, clock=clock)
    throughput.start()
    clock.now += 60  # compilation
    throughput.add(100)
    assert set(throughput.report().values()) == {None}
    clock.now += 1
    throughput.add(100)
    assert throughput.report()["tokens_per_second"] == pytest.approx(100)


def test_the_first_step_stays_out_of_a_longer_interval_too():
    clock = Clock()
    throughput = Throughput(None, None, clock=clock)
    clock.now += 60
    for _ in range(3):
        clock.now += 1
        throughput.add(100, data_wait_seconds=0.25)
    report = throughput.report()
    assert (report["tokens_per_second"], report["data_wait_seconds"]) == (pytest.approx(100), 0.25)


def test_a_step_that_is_left_out_counts_for_nothing():
    clock = Clock()
    throughput = Throughput(None, None, clock=clock)
    throughput.add(100)
    clock.now += 1
    throughput.add(100)
    clock.now += 30  # the first of larger batches, which compiles
    throughput.add(400, excluded=True)
    clock.now += 4
    throughput.add(400)
    assert throughput.report()["tokens_per_second"] == pytest.approx(100)
