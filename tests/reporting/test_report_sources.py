"""Tokens by source are counted from the stages of the mixture, also over caps and around batches that were left out."""

import html
import re

import numpy as np
import pytest

from jaxscale.runtime.data.mixture import RunBatches, plan_mixture
from jaxscale.runtime.monitor.history import History
from jaxscale.tools.reporting.sources import rows_by_source, source_table, trained_ranges
from jaxscale.units import BatchSizes

NAMES, ROWS, SEQ_LEN = ("web", "code", "math"), 8, 16
SETTING = {"0": {"web": 0.8, "code": 0.2}, "40%": {"web": 0.5, "code": 0.3, "math": 0.2}}


def history(last_batch, skips=(), mixture=SETTING, caps=None, with_stages=True, rewinds=()):
    planned = plan_mixture(
        mixture,
        caps or {},
        RunBatches(BatchSizes.of(ROWS), SEQ_LEN, total_steps=100, num_batches=110),
        sizes=dict(zip(NAMES, [4000, 200, 60])),
    )
    config = {
        "config": {"seq_len": SEQ_LEN, "data": {"mixture": mixture, "max_epochs": caps or {}, "skip_batches": skips}},
        "budget": {"batch_tokens": ROWS * SEQ_LEN},
    }
    if with_stages:
        config["mixture"] = {"stages": planned.record(), "rows": dict(zip(NAMES, [4000, 200, 60]))}
    events = tuple({"event": "rewind", "step": 50, "skip_batches": [part]} for part in rewinds)
    row = {"step": last_batch + 1, "batch_index": last_batch, "tokens_seen": 1.0, "train/web/loss": 2.5}
    return planned, History(workdir="x", rows=(row,), config=config, events=events)


def counted(planned, last_batch, skips=()):
    """Row by row."""
    left_out = {n for first, last in skips for n in range(first, last)}
    places = [n * ROWS + i for n in range(last_batch + 1) if n not in left_out for i in range(ROWS)]
    return np.bincount(planned.locate(np.array(places))[0], minlength=len(NAMES))


@pytest.mark.parametrize("last_batch", [0, 25, 39, 40, 97])
@pytest.mark.parametrize("caps", [None, {"math": 1.5}], ids=["free", "capped"])
def test_rows_are_those_that_were_read(last_batch, caps):
    planned, run = history(last_batch, caps=caps)
    found = rows_by_source(run)
    stages = sum(stage.first_row < (last_batch + 1) * ROWS for stage in planned.stages)
    assert [found.get(name, 0.0) for name in NAMES] == pytest.approx(counted(planned, last_batch), abs=stages)
    assert sum(found.values()) == pytest.approx((last_batch + 1) * ROWS)


def test_batches_that_were_left_out_count_for_nobody():
    skips, rewinds = [[10, 13], [38, 42]], [[12, 20], [90, 99]]
    planned, run = history(95, skips, rewinds=rewinds)
    found = rows_by_source(run)
    assert [found[name] for name in NAMES] == pytest.approx(counted(planned, 95, skips + rewinds), abs=8)
    assert sum(found.values()) == pytest.approx((96 - 10 - 4 - 6) * ROWS)
    assert trained_ranges(96, [(12, 20), (10, 13), (90, 99)]) == [(0, 10), (20, 90)]


def test_rows_of_batches_that_grow_are_those_of_their_sizes():
    planned, run = history(50, skips=[[38, 42]])
    run.config["budget"] = {"batch_tokens": ROWS * SEQ_LEN, "ramp": [[0, 2 * SEQ_LEN], [40, ROWS * SEQ_LEN]]}
    assert sum(rows_by_source(run).values()) == pytest.approx(38 * 2 + 9 * ROWS)


def test_the_table_tells_tokens_shares_and_epochs_and_leaves_out_what_it_knows_of_no_source():
    inside = lambda tag: rf"<{tag}(?: [^>]*)?>(.*?)</{tag}>"
    texts = lambda run, tag: [html.unescape(cell) for cell in re.findall(inside(tag), source_table(run))]
    first = lambda run: dict(zip(texts(run, "th"), texts(run, "td")))
    known = {"source": "web", "planned share": "80%, then 50%", "last training loss": "2.5"}
    _, run = history(97)
    assert first(run) == known | {"tokens seen": "7.81K", "of all": "62.2%", "epochs": "0.122"}
    _, capped = history(97, caps={"math": 1.5})
    assert first(capped)["most epochs"] == "none" and "1.5" in texts(capped, "td")
    _, old = history(97, with_stages=False)
    assert first(old) == known
    _, one = history(97, mixture={"web": 0.75, "code": 0.25}, with_stages=False)
    assert first(one) == known | {"planned share": "75%", "tokens seen": "9.41K", "of all": "75%"}
