"""Every fault and threat of docs/faults.md has a test."""

import ast
import json
import re

import make_table
import pytest
from fault_table import ALL, TESTS, covering, marked

PAGE = TESTS.parent / "docs" / "faults.md"


def problems(covered):
    """One line for each fault without a test, and for each mark or exception that has no place."""
    lines = [f"{fault} has no test: {ALL[fault].what}" for fault in ALL if fault not in covered]
    lines += [f"{fault} is no fault or threat: {covered[fault]}" for fault in covered if fault not in ALL]
    return lines


def test_every_fault_and_threat_is_covered_by_a_test_of_this_tree():
    assert not problems(covering())


def test_a_fault_without_a_test_is_seen():
    covered = {fault: ["x"] for fault in ALL}
    assert not problems(covered)
    assert problems({fault: tests for fault, tests in covered.items() if fault != "F9"}) == [
        f"F9 has no test: {ALL['F9'].what}"
    ]
    assert problems(covered | {"F99": ["x"]}) == ["F99 is no fault or threat: ['x']"]


def test_marks_are_found_on_functions_classes_parameters_and_files():
    source = """
import pytest
pytestmark = [pytest.mark.fault("F1")]
@pytest.mark.fault("F2", "H3")
def test_a(): pass
@pytest.mark.fault("F4")
class TestB:
    @pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.fault("F5"))])
    def test_c(self, x): pass
def helper(): pass
"""
    assert marked(ast.parse(source)) == [("test_a", ["F1", "F2", "H3"]), ("TestB::test_c", ["F1", "F4", "F5"])]


def test_the_page_has_a_row_for_every_fault_and_every_row_has_tests():
    rows = dict(re.findall(r"^\| ([FH]\d+) \|.*\| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert set(rows) == set(ALL)
    assert not [fault for fault, tests in rows.items() if not re.match(r"\d+", tests)]


def test_the_page_shows_what_each_test_came_to(tmp_path):
    lines = [
        {"test": "a.py::test_x", "faults": ["F2"], "outcome": "passed"},
        {"test": "a.py::test_y", "faults": ["F2", "H1"], "outcome": "failed"},
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcomes = make_table.read_results([tmp_path / "results.jsonl"])
    covered = {"F2": ["a.py::test_x", "a.py::test_y", "a.py::test_z"], "H1": ["a.py::test_y"]}
    page = make_table.page(covered, outcomes, "today")
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert "**FAILED**" in rows["F2"] and "1, 1 failed, 1 not run" in rows["F2"]
    assert "**NO TEST**" in rows["F3"]


@pytest.mark.parametrize("outcomes", [["passed", "failed"], ["failed", "passed"]])
def test_a_test_of_many_parameters_passed_only_if_all_did(tmp_path, outcomes):
    lines = [{"test": "a.py::test_x", "faults": ["F2"], "outcome": outcome} for outcome in outcomes]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert make_table.read_results([tmp_path / "results.jsonl"]) == {"a.py::test_x": "failed"}
