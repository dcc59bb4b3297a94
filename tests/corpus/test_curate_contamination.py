"""Leaks of 13 words are found and named, of 12 words are not."""

import gzip
import json
import random

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate import hashes
from jaxscale.tools.corpus.curate.config import ContaminationConfig
from jaxscale.tools.corpus.curate.contamination import (
    MAX_ITEMS,
    bloom_lookup,
    count_items,
    load_evaluation,
    make_contamination,
    make_index,
)
from jaxscale.tools.corpus.curate.hashes import mix64
from jaxscale.tools.corpus.prepare.preparation_page import evaluation_warnings

RNG = random.Random(0)


def words(count):
    return [f"{RNG.getrandbits(40):x}" for _ in range(count)]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def check(texts, files, **settings):
    cfg = ContaminationConfig(files=tuple(files), **settings)
    return make_contamination(cfg)([Document(text) for text in texts])


@pytest.fixture
def items(tmp_path):
    """Five items of 40 words, and their file."""
    found = [words(40) for _ in range(5)]
    return found, write_lines(
        tmp_path / "exam.jsonl", [{"id": i, "question": " ".join(w)} for i, w in enumerate(found)]
    )


def inside(part, around=60):
    """The words of `part` among others, with other case and punctuation."""
    return " ".join(words(around)) + " -- " + ", ".join(part).upper() + "! " + " ".join(words(around))


@pytest.mark.parametrize("together", [50, 1 << 14])  # words that are hashed at once
@pytest.mark.parametrize("short_words", [8, None])
@pytest.mark.parametrize("place", [0, 13, 27])
def test_thirteen_words_of_an_item_are_found_and_the_item_is_named(items, place, short_words, together, monkeypatch):
    monkeypatch.setattr(hashes, "TOGETHER", together)
    found, file = items
    texts = [inside(words(30)), inside(found[3][place : place + 13]), inside([])]
    clean, leak, empty = check(texts, [file], short_words=short_words)
    assert clean.document.text == texts[0] and empty.document.text == texts[2]
    assert leak.document is None
    assert (leak.reason, leak.detail) == ("contamination: evaluation item", "exam.jsonl:4")


@pytest.mark.parametrize("short_words", [8, None])
def test_twelve_words_of_an_item_are_no_leak(items, short_words):
    found, file = items
    part = found[3]
    texts = [inside(part[i : i + 12]) for i in range(29)] + [
        inside(part[:12] + words(1) + part[13:25]),
        " ".join(part[:12]),
    ]
    assert all(outcome.document for outcome in check(texts, [file], short_words=short_words))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 30), st.integers(1, 40), st.integers(8, 20), st.integers(0, 4))
def test_a_leak_is_found_exactly_if_it_is_long_enough(tmp_path_factory, place, length, ngram, item):
    found = [[f"w{i}x{j}" for j in range(40)] for i in range(5)]
    file = write_lines(tmp_path_factory.mktemp("exam") / "exam.jsonl", [{"q": " ".join(row)} for row in found])
    part = found[item][place : place + length]
    (outcome,) = check([inside(part, 10)], [file], ngram_words=ngram)
    assert (outcome.document is None) == (len(part) >= ngram)
    assert outcome.detail == (f"exam.jsonl:{item + 1}" if len(part) >= ngram else "")


def test_a_cut_takes_the_leak_and_what_is_around_it_and_leaves_the_rest(items):
    found, file = items
    before, after = " ".join(words(60)), " ".join(words(60))
    text = f"{before}. {' '.join(found[1][5:25])}; {after}"
    (outcome,) = check([text], [file], action="cut", cut_characters=50, min_piece_characters=200)
    begin, end = text.index(found[1][5]), text.index(found[1][24]) + len(found[1][24])
    assert outcome.document.text == text[: begin - 50].strip() + "\n" + text[end + 50 :].strip()
    assert outcome.edits == (("evaluation item", 1),) and outcome.detail == "exam.jsonl:2"


def test_a_document_is_dropped_if_cuts_leave_nothing_or_are_too_many(items):
    found, file = items
    alone = " ".join(found[0])
    often = (" " + " ".join(words(90)) + " ").join(" ".join(row) for row in found[:4])
    outcomes = check([alone, often, often], [file], action="cut", max_cuts=3)
    assert [outcome.reason for outcome in outcomes] == ["contamination: nothing is left"] + [
        "contamination: too many cuts"
    ] * 2
    (kept,) = check([often], [file], action="cut", max_cuts=4)
    assert kept.edits == (("evaluation item", 4),)
    assert kept.detail == "exam.jsonl:1, exam.jsonl:2, exam.jsonl:3, exam.jsonl:4"


def test_a_share_of_the_item_can_be_asked_for(items):
    found, file = items  # an item has 28 sequences
    half, all_but_one = inside(found[0][:26]), inside(found[0][:39])
    assert [bool(o.document) for o in check([half, all_but_one], [file], min_item_share=0.5)] == [False, False]
    assert [bool(o.document) for o in check([half, all_but_one], [file], min_item_share=0.51)] == [True, False]
    assert [bool(o.document) for o in check([half, all_but_one], [file], min_item_share=1)] == [True, True]


def test_each_short_text_of_an_item_is_found_whole_or_never(tmp_path):
    short, question, choice, phrase = words(10), words(5), words(7), words(6)
    records = [{"q": " ".join(short), "a": "yes"}, {"q": " ".join(question), "support": " ".join(words(40))}]
    records += [{"q": " ".join(words(4)), "choices": [" ".join(choice)]}]
    records += [{"task": " ".join(phrase), "q": " ".join(words(20))}] * (MAX_ITEMS + 1)
    file = write_lines(tmp_path / "exam.jsonl", records)
    texts = [inside(short), inside(short[:9]), inside(question), inside(question[:4]), inside(choice), inside(phrase)]
    names = ["exam.jsonl:1", "", "exam.jsonl:2", "", "", ""]
    assert [outcome.detail for outcome in check(texts, [file])] == names
    assert all(outcome.document for outcome in check(texts, [file], short_words=None))
    assert [outcome.detail for outcome in check(texts, [file], short_words=6)] == ["exam.jsonl:1", *[""] * 5]
    settings = ContaminationConfig(files=(file,))
    assert count_items(settings) == {"items": 3 + MAX_ITEMS + 1, "too_short": 1}
    assert evaluation_warnings(settings, count_items(settings)) == [
        f"1 of {4 + MAX_ITEMS} evaluation items are too short to search for: none of their texts has 5 words"
    ]


def test_no_item_is_named_and_nothing_is_looked_for_but_that_is_said():
    settings = ContaminationConfig(files=("none",))
    assert make_contamination(settings)([Document("a")])[0].document.text == "a"
    (told,) = evaluation_warnings(settings, count_items(settings))
    assert "nothing was searched for" in told


def test_a_sequence_that_two_items_have_names_both_and_many_names_are_cut_short(tmp_path):
    same = " ".join(words(13))
    file = write_lines(tmp_path / "exam.jsonl", [{"q": same}] * 12)
    (outcome,) = check([same], [file])
    assert outcome.detail == ", ".join(f"exam.jsonl:{i}" for i in range(1, 13))


def test_every_kind_of_file_is_read_and_items_are_counted_from_one(tmp_path):
    texts = [" ".join(words(20)) for _ in range(8)]
    table = pyarrow.table({"n": [1, 2], "goal": texts[:2], "options": [[texts[2], "b"], ["c"]]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "b.arrow", table.schema) as stream:
        stream.write_table(table)
    with pyarrow.ipc.new_file(tmp_path / "c.arrow", table.schema) as file:
        file.write_table(table)
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write("\n" + json.dumps({"deep": {"list": [{"q": texts[3]}]}}) + "\n")
    (tmp_path / "e.txt").write_text(f"{texts[4]}\n{texts[5]}\n\n{texts[6]}\n")
    outcomes = check(texts[:7], [str(tmp_path / "*.*")])
    tables = lambda row: ", ".join(f"{name}:{row}" for name in ("a.parquet", "b.arrow", "c.arrow"))
    assert [outcome.detail for outcome in outcomes] == [
        tables(1), tables(2), tables(1), "d.jsonl.gz:2", "e.txt:1", "e.txt:2", "e.txt:4"
    ]  # fmt: skip
    assert check([texts[2], texts[0]], [str(tmp_path / "a.parquet")], fields=("goal",))[0].document
    wrapped = texts[7].split()
    (tmp_path / "f.txt").write_text("\n".join(" ".join(wrapped[i : i + 5]) for i in range(0, 20, 5)))
    assert check([texts[7]], [str(tmp_path / "f.txt")])[0].detail == "f.txt:1, f.txt:2"


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.csv", b"x", "must be .jsonl"),
        ("a.jsonl", b'{"q": 1}\n{"q"', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", b'{"q": 1}\n', "has no text"),
        ("a.jsonl.gz", gzip.compress(b'{"q": "x"}\n', mtime=0)[:-6], "is truncated"),
        ("a.txt", b"\xff\xfe", "line 1 is not UTF-8"),
        ("a.parquet", b"PAR1", "not valid Parquet"),
        ("a.arrow", b"ARROW1xx", "not valid Arrow"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, data, told):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=told) as caught:
        load_evaluation(ContaminationConfig(files=(str(tmp_path / name),)))
    assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="absent.jsonl does not exist"):
        load_evaluation(ContaminationConfig(files=(str(tmp_path / "absent.jsonl"),)))


def test_the_filter_lets_every_head_through_and_few_others():
    known, others = mix64(np.arange(1 << 20, dtype=np.uint64)), mix64(np.arange(1 << 20, 1 << 21, dtype=np.uint64))
    zeros = np.zeros(len(known), np.int64)
    evaluation = make_index(13, known, known, zeros, zeros, ["x"])
    assert np.array_equal(bloom_lookup(evaluation, known), np.arange(len(known)))
    assert len(bloom_lookup(evaluation, others)) / len(others) < 0.005
    assert evaluation.filter.nbytes == 8 << 20


@pytest.mark.parametrize(
    "wrong", [dict(ngram_words=1), dict(short_words=0), dict(min_item_share=1.5), dict(max_cuts=-1)]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ContaminationConfig(**wrong)
