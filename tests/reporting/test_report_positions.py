"""The page has the held-out loss by position: of one run a line for each range, of several a column for each run."""

import html
import re

from jaxscale.runtime.monitor.history import History
from jaxscale.tools.reporting.page import make_page
from jaxscale.tools.reporting.sections import position_metrics, positions_table

RANGES = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 300)]


def metric_of(one):
    return "validation_by_position/{}-{}/loss".format(*one)


def history(name, scale, ranges=RANGES):
    rows = [
        {"step": step, "validation/loss": 3.0}
        | {metric_of(one): scale - step / 100 + i for i, one in enumerate(ranges)}
        for step in (0, 50, 100)
    ]
    return History(workdir=f"runs/{name}", rows=tuple(rows))


def cells(drawn):
    found = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr.*?</tr>", drawn)]
    return [[html.unescape(cell) for cell in row] for row in found]


def test_the_table_goes_from_few_tokens_to_many_with_the_first_and_the_newest_loss():
    run = history("a", 5.0)
    metrics = position_metrics([run])
    assert list(metrics.values()) == list(map(metric_of, RANGES))  # as numbers: 9 comes before 17
    rows = cells(positions_table([run], metrics))
    assert rows[0] == ["context tokens", "first", "newest"]
    assert rows[1] == ["1", "5", "4"] and rows[3] == ["3 to 4", "7", "6"] and rows[-1] == ["257 to 300", "14", "13"]


def test_runs_stand_beside_each_other_also_where_their_rows_differ_in_length():
    short, long = history("short", 5.0, RANGES[:4]), history("long", 6.0)
    rows = cells(positions_table([short, long], position_metrics([short, long])))
    assert rows[0] == ["context tokens", "short", "long"]
    assert rows[4] == ["5 to 8", "7", "8"] and rows[5] == ["9 to 16", "n/a", "9"]


def test_the_page_draws_the_longest_ranges_and_says_nothing_of_runs_without_any():
    page = make_page([history("a", 5.0)], now=0.0)
    part = page[page.index('id="positions"') :].partition("</section>")[0]
    assert part.count('<path class="line') == 2 * 8  # in the drawing and in its legend
    assert "Validation loss by position" in part
    assert "129 to 256" in part and part.count("<tr") == 1 + len(RANGES)
    assert 'id="positions"' in make_page([history("a", 5.0), history("b", 5.0)], now=0.0)
    assert 'id="positions"' not in make_page([History(workdir="x", rows=({"step": 1, "loss": 2.0},))], now=0.0)
