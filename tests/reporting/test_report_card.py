"""The report card: a column for each run, what is not known left out, and nothing of a run can break its tables."""

import dataclasses
import re

import markdown_it
import pytest

from jaxscale.runtime.monitor.history import History, TextSample
from jaxscale.tools.reporting.card import make_card, table

READER = markdown_it.MarkdownIt().enable("table")
NOW = 1_790_000_000.0
CONFIG = {
    "config": {"model": {"name": "llama", "num_layers": 4, "embed_dim": 256}},
    "budget": {"total_steps": 20},
    "devices": {"kind": "TPU v5p", "number": 8},
}
BASE = History(
    workdir="runs/base",
    rows=(
        {"step": 10, "loss": 3.0, "tokens_seen": 1000, "validation/loss": 3.25},
        {"step": 20, "loss": 2.5, "tokens_seen": 2000},
    ),
    config=CONFIG,
    evals=(
        {"step": 10, "evals/held/bits_per_byte": 1.5},
        {
            "step": 20,
            "evals/held/bits_per_byte": 1.25,
            "evals/held/bits_per_byte_stderr": 0.125,
            "evals/held/loss": 2.0,
        },
    ),
    samples=(TextSample(20, "def f():\n    return | 1\n```\n# no heading"),),
)
CHAT = dataclasses.replace(BASE, workdir="runs/chat", evals=({"step": 20, "evals/questions/acc": 0.5},), samples=())


def row(card, name):
    (line,) = [line for line in card.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_runs_stand_beside_each_other():
    card = make_card([BASE, CHAT], now=NOW)
    assert card.startswith("# base and chat: report card\n")
    assert row(card, "model") == ["llama, 4 layers, width 256"] * 2 and row(card, "validation loss") == ["3.25"] * 2
    assert row(card, "held: bits per byte") == ["1.25 ± 0.125", "-"]
    assert row(card, "questions: accuracy") == ["-", "0.5"]
    assert "MFU" not in card and "nats per token" not in card  # nothing is known of it; told by bits per byte
    assert "    # no heading" in card and not [line for line in card.splitlines() if line.startswith("# no")]


def test_a_run_without_anything_is_a_card_too():
    card = make_card([History(workdir="runs/new")], now=NOW)
    assert card.startswith("# new: report card") and "Evaluations" not in card and "Samples" not in card


def test_a_bar_in_a_cell_is_no_new_column():
    assert table(["a|b"], [["x\ny"]]).splitlines() == ["| a&#124;b |", "|----------|", "| x\\\\ny    |"]


@pytest.mark.fault("H16")
def test_nothing_that_a_run_wrote_is_obeyed():
    hostile = "<img src=x onerror=alert(1)>|[a](javascript:b)\n# \x1b[2J\u202e\u2028"
    run = History(
        workdir=f"runs/{hostile.replace('/', '')}",
        rows=({"step": 1, "loss": 3.0},),
        config={
            "config": {"model": {"name": hostile, "num_layers": 4, "embed_dim": 256}},
            "devices": {"kind": hostile, "number": 8},
        },
        evals=({"step": 1, f"evals/{hostile.splitlines()[0]}/acc": 0.5},),
        samples=(TextSample(1, f"{hostile}\n</pre>\n```\n"),),
    )
    card = make_card([run], now=NOW)
    assert card.replace("\n", "").isprintable()
    page = READER.render(card)
    assert page.count("&lt;img src=x") == 8 and page.count("<pre>") == 1
    assert not re.search(r"<img|<a |</pre>[^\n]*```", page)
    assert [line[:2] for line in card.splitlines() if line.startswith("#")] == ["# ", "##", "##", "##"]
