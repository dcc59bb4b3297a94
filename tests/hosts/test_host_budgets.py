"""What the processes of a run allow each other follows their number."""

import pytest

from jaxscale.runtime.hosts.config import host_budgets


@pytest.mark.parametrize(
    ("processes", "budgets"), [(1, (300, 10, 5)), (16, (300, 10, 5)), (256, (540, 10, 7)), (1536, (720, 31, 10))]
)
def test_budgets_follow_the_number_of_processes(processes, budgets):
    found = host_budgets(processes)
    assert (found.roll_call_seconds, found.heartbeat_seconds, found.max_fruitless) == budgets
