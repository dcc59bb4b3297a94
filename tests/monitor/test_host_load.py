"""Whose work the processors do: counted over those that this process may use, and not guessed where it is not told."""

import sys

import pytest

from jaxscale.runtime.monitor import machine
from jaxscale.runtime.monitor.machine import CpuSeconds, HostLoad, processor_seconds, read_cpu_seconds

STAT = """cpu  900 90 90 900 90 9 9 9 90 0
cpu0 100 10 20 300 40 1 2 3 50 0
cpu1 200 0 0 800 0 0 0 0 0 0
cpu2 999 0 0 0 0 0 0 0 0 0
intr 12345 0 7
ctxt 99
"""


def test_the_ticks_of_the_processors_that_the_process_may_use_are_summed():
    busy, every = processor_seconds(STAT, {0, 1})
    assert (busy, every) == pytest.approx((3.36, 14.76))  # ticks of 0.01 s; guests are in user already


def test_shares_are_of_the_time_between_two_reports_and_none_where_that_is_nothing():
    counts = iter(
        [CpuSeconds(1, 10, 100), CpuSeconds(1.5, 13, 104), CpuSeconds(1.5, 13, 104.1), CpuSeconds(2.5, 13.5, 106), None]
    )
    load = HostLoad(lambda: next(counts))
    assert load.metrics() == {"host_own_share": 0.125, "host_other_share": 0.625}
    assert load.metrics() == {"host_own_share": None, "host_other_share": None}
    assert load.metrics() == {"host_own_share": 0.5, "host_other_share": 0.0}  # ticks are coarse: never below 0
    assert load.metrics() == {"host_own_share": None, "host_other_share": None}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/stat")
def test_own_work_is_counted_as_own():
    before = read_cpu_seconds()
    while (after := read_cpu_seconds()).process < before.process + 0.05:
        pass
    assert after.process - before.process < 1 and after.total >= before.total and before.busy <= before.total


def test_where_the_count_may_not_be_read_it_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "STAT", str(tmp_path))  # a folder: no file that could be read, also for root
    assert read_cpu_seconds() is None and HostLoad().metrics() == {"host_own_share": None, "host_other_share": None}
