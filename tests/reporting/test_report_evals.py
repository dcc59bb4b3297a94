"""What named evaluators found is in the page, whoever measured it, and nothing in a file can break the page."""

import json

from jaxscale.runtime.monitor.history import History, read_history
from jaxscale.tools.reporting.page import make_evals_page, make_page


def write(folder, name, records):
    (folder / name).write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in records))


def run_in(folder):
    """A run that measured itself at 0 and 10, and was measured again at 10 and 20."""
    folder.mkdir(exist_ok=True)
    rows = [{"step": 0, "evals/wiki/acc": 0.1, "evals/wiki/acc_stderr": 0.01}, {"step": 10, "loss": 2.0}]
    write(folder, "metrics.jsonl", [*rows, {"step": 10, "evals/wiki/acc": 0.2, "evals/wiki/acc_stderr": 0.01}])
    again = [{"step": 20, "evals/wiki/acc": 0.4, "evals/wiki/acc_stderr": 0.02}, {"step": 10, "evals/wiki/acc": 0.3}]
    damaged = ["{torn\n", {"evals/wiki/acc": 1.0}, {"step": -1, "evals/wiki/acc": 1.0}, {"step": True}, [1]]
    odd = [{"step": 5, "evals/wiki/acc": "high", "evals/<b>/acc": 1.0, "evals/wiki": 2, "evals/wiki/loss": 1e999}]
    write(folder, "evals.jsonl", [*again, *damaged, *odd])
    return read_history(folder)


def test_the_newest_measurement_of_a_step_counts_and_damaged_ones_are_left_out(tmp_path):
    history = run_in(tmp_path)
    assert history.evaluated("evals/wiki/acc") == ([0, 10, 20], [0.1, 0.3, 0.4])
    assert history.evaluated("evals/wiki/acc_stderr") == ([0, 10, 20], [0.01, 0.01, 0.02])
    assert history.evaluated("evals/wiki/loss") == ([], [])
    assert any("evals.jsonl" in problem for problem in history.problems)


def test_what_was_trained_validated_and_measured_at_one_step_all_counts(tmp_path):
    vitals = {"goodput/fraction": 0.5, "device/utilisation": 0.9}
    found = [{"loss": 2.0}, {"validation/loss": 2.1}, {"evals/wiki/acc": 0.2, "evals_seconds": 1.0}]
    write(tmp_path, "metrics.jsonl", [{"step": 10} | row | vitals for row in found])
    history = read_history(tmp_path)
    for name, value in (("loss", 2.0), ("validation/loss", 2.1), ("evals/wiki/acc", 0.2)):
        assert history.series(name) == ([10], [value])
    assert not history.abandoned


def test_pages_show_curves_and_numbers_and_escape_names(tmp_path):
    one, other = run_in(tmp_path / "one"), run_in(tmp_path / "other")
    alone = make_evals_page(one, now=0.0)
    assert "Evaluations: accuracy" in alone and "0.4 ± 0.02" in alone and "Created 1970" in alone
    page, both = make_page([one]), make_page([one, other])
    assert 'href="#evals"' in page and "Evaluations: accuracy" in page
    assert "wiki: accuracy" in both
    for text in (alone, page, both):
        assert "<b>/acc" not in text and "&lt;b&gt;" in text


def test_a_run_without_evaluators_has_no_such_section():
    assert 'href="#evals"' not in make_page([History(workdir="run", rows=({"step": 1, "loss": 2.0},))])
