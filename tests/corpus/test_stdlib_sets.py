"""Small sets out of Python's own library: what is asked was never trained on, and the same Python gives the same."""

import json

import pytest

from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus import stdlib_sets

SOURCE = '''
"""A module."""
import os

def loads(text):
    """Read a value from JSON text.

    More is told here, and is no part of the line.
    """

def dumps(value):
    """Short."""

def _hidden():
    """Nobody asks what this is for."""

class Reader:
    """Reads one value after the other."""

    def close(self):
        """Give the file back to the system."""
'''


def read(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    counts = stdlib_sets.write_sets(folder, 600_000)
    return folder, counts


def test_a_line_of_documentation_is_an_entry():
    found = dict(stdlib_sets.documented_names("json", SOURCE))
    assert found == {
        "json.loads": "Read a value from JSON text.",
        "json.Reader": "Reads one value after the other.",
        "json.Reader.close": "Give the file back to the system.",
    }
    assert list(stdlib_sets.documented_names("broken", "def f(:")) == []


def test_nothing_that_is_asked_was_trained_on(sets):
    folder, counts = sets
    trained, held = ({record["id"] for record in read(folder, name)} for name in ("text.jsonl", "held.jsonl"))
    assert trained and held and not trained & held
    assert all(stdlib_sets.is_validation(name) for name in held)
    asked = [record["context"] for record in read(folder, "questions.jsonl")]
    told = {record["messages"][0]["content"] for record in read(folder, "chat.jsonl")}
    assert asked and not [context for context in asked if any(question in context for question in told)]
    assert {name: len(read(folder, name)) for name in counts} == counts


def test_each_question_has_its_answer_among_four(sets):
    folder, _ = sets
    lines = {
        line
        for record in read(folder, "held.jsonl")
        for _, line in stdlib_sets.documented_names(record["id"], record["text"])
    }
    places = set()
    for record in read(folder, "questions.jsonl"):
        assert len(set(record["choices"])) == 4 and set(record["choices"]) <= lines
        places.add(record["answer"])
    assert len(places) > 1, "the right answer is always in the same place"


def test_the_same_python_gives_the_same(sets, tmp_path):
    folder, counts = sets
    assert stdlib_sets.write_sets(tmp_path, 600_000) == counts
    assert all((tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in counts)
    assert sum((folder / name).stat().st_size for name in ("text.jsonl", "held.jsonl")) < 900_000


def test_most_bytes_counts_bytes_and_not_characters():
    characters = sum(map(len, stdlib_sets.read_sources(None).values()))
    assert sum(len(text.encode()) for text in stdlib_sets.read_sources(characters).values()) <= characters


def test_too_little_is_told_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="too few for training and held-out data") as error:
        stdlib_sets.write_sets(tmp_path, 2000)
    assert isinstance(error.value, BadInput)
    with pytest.raises(ValueError, match="--output=FOLDER is required"):
        stdlib_sets.main(["--most_bytes=1000"])
