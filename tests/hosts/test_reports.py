"""One process cannot save: all hear why, at the same step."""

import concurrent.futures
import itertools
import zlib

import processes
import pytest
from jax._src.lib import _jax

from jaxscale.runtime.checkpoint.saver import SharedReports
from jaxscale.runtime.hosts.agree import Board, Peer
from jaxscale.system.exits import Exit, Stop

COUNT = 3
FULL = "No space left on device: /run/5"


@pytest.fixture(scope="module")
def clients():
    """Three clients of one coordination service, as three processes have them."""
    address = f"127.0.0.1:{processes.free_ports()}"
    service = _jax.get_distributed_runtime_service(address, COUNT)
    made = [_jax.get_distributed_runtime_client(address, number, init_timeout=20) for number in range(COUNT)]
    together(lambda number: made[number].connect())
    yield made
    together(lambda number: made[number].shutdown())
    service.shutdown()


@pytest.fixture
def all_reports(clients, request):
    first = zlib.crc32(request.node.name.encode())  # every test has a board of its own
    return [SharedReports(Board(Peer(clients[n], n, COUNT, itertools.count(first)))) for n in range(COUNT)]


def news(reports, step):
    """As the training loop asks for it."""
    reports.board.refresh()
    return reports.news(step)


def together(work):
    """What work(number) returns, or the error it raises, for each, all at the same time."""
    with concurrent.futures.ThreadPoolExecutor(COUNT) as pool:
        futures = [pool.submit(work, number) for number in range(COUNT)]
    return [future.exception() or future.result() for future in futures]


@pytest.mark.fault("F9")
def test_the_news_reach_all_at_one_step_with_the_first_cause(all_reports):
    assert [news(reports, 5) for reports in all_reports] == [None] * COUNT
    all_reports[1].failed(4, FULL)
    all_reports[0].failed(4, "its barrier broke")  # an echo
    heard = {n: [(step, found) for step in range(6, 12) if (found := news(all_reports[n], step))] for n in (1, 0, 2)}
    assert heard == dict.fromkeys(range(COUNT), [(8, (4, f"process 1 of 3: {FULL}"))])


@pytest.mark.fault("F9")
def test_a_second_failure_is_told_as_well(all_reports):
    all_reports[1].failed(4, FULL)
    all_reports[2].failed(6, "Permission denied")
    heard = [[] for _ in range(COUNT)]
    for step in range(6, 14):  # all train in step
        for number, reports in enumerate(all_reports):
            if found := news(reports, step):
                heard[number].append((step, found))
    first, second = heard[0]
    assert first[1] == (4, f"process 1 of 3: {FULL}") and second[1] == (6, "process 2 of 3: Permission denied")
    assert heard == [[first, second]] * COUNT
    all_reports[0].board.refresh()
    assert sorted(all_reports[0].board.lines) == ["failed/6", "news/1"]  # what all have heard does not pile up


def test_who_missed_the_news_stops(all_reports):
    all_reports[1].failed(4, FULL)
    assert news(all_reports[1], 6) is None
    with pytest.raises(Stop, match="all processes must report at step 8") as stop:
        news(all_reports[2], 9)
    assert stop.value.code == Exit.PEER_LOST
