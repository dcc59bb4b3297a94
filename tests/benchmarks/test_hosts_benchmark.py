"""Sixteen simulated hosts: what the control plane asks of the first one, counted. Nothing here asserts a speed."""

import pytest

from benchmarks import hosts
from jaxscale.system.exits import BadInput

pytestmark = pytest.mark.slow

HOSTS = 16
LOOKS = 15  # of the first at what is there, longer and longer apart: a second and a half, more than any of it takes


@pytest.fixture(scope="module")
def record():
    return hosts.measure_hosts([HOSTS], workers=1)


def test_every_part_asks_a_few_requests_of_each_host(record):
    others, counted = HOSTS - 1, {part["name"]: part["requests"] for part in record["parts"] if part["requests"]}
    assert counted.pop("a decision") == counted.pop("a step") == HOSTS
    assert counted.pop("a save that fails on one host") - HOSTS < 2 * others + LOOKS
    assert counted.pop("a save") < 4 * (2 * others + LOOKS)  # each gives its own and reads the answer
    assert counted.pop("all are here") < 2 * others + LOOKS and not counted


def test_nobody_is_sent_what_all_have_said(record):
    most = {part["name"]: part["characters"] / (HOSTS - 1) for part in record["parts"]}
    assert most["all are here"] < 120 and most["a save"] < 4 * 160  # keys, answers and sums of its own
    assert most["a save that fails on one host"] < 600  # the cause goes to each once, and comes from those who know it


def test_a_host_that_is_lost_ends_all_and_they_start_again(record):
    names = [part["name"] for part in record["parts"]]
    assert names.index("a host is lost: until all know") < names.index("restart: roll call")
    table = hosts.host_lines(record)
    assert len(table) == 4 + len(names) and table[2].startswith("| part | 16 hosts | a host |")


@pytest.mark.parametrize("text", ["1", "16,x", "30000", ""])
def test_numbers_of_hosts_are_whole_and_more_than_one(text):
    with pytest.raises(BadInput, match="must be numbers from 2 to 20,000"):
        hosts.read_hosts("hosts", text)


def test_slopes_are_powers_of_the_number_of_hosts():
    rows = [{"hosts": hosts, "seconds": hosts**2 / 7, "requests": 0} for hosts in (2, 16, 64)]
    assert hosts.slope(rows, "seconds") == pytest.approx(2) and hosts.slope(rows, "requests") is None
