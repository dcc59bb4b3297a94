"""Items are read as their files have them, cut into tokens by a stated rule, and answers counted as on paper."""

import gzip
import json
import math
import os
import pathlib
import re

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxscale.runtime.eval.bits_per_byte import EvalReading
from jaxscale.runtime.eval.items import EvalItem, SkippedItems, check_item_files, read_items
from jaxscale.runtime.eval.named import choice_metrics, cloze_metrics, encode_items, encode_pair, span_of
from jaxscale.runtime.eval.scorer import Scores
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.system.exits import BadInput

PIQA = {"goal": "Open a tin.", "sol1": "With an opener.", "sol2": "With a song.", "label": 0}
SCIQ = {"support": " Ice floats.", "question": "What floats?", "correct_answer": "ice"}
SCIQ |= {f"distractor{i}": word for i, word in enumerate(("iron", "lead", "gold"), 1)}
CHOICES = {"text": ["red", "blue"], "label": ["A", "B"]}
ARC = {"id": "x", "question": "What is the sky?", "choices": CHOICES, "answerKey": "B"}
OWN = {"context": "1 + 1 =", "choices": [" 3", " 2"], "answer": 1}


def written(path, records):
    """The records as a file of the kind that its name says."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".jsonl":
        path.write_text(lines)
    else:
        table = pyarrow.Table.from_pylist(records)
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet", "arrow"])
@pytest.mark.parametrize(
    "record, context, continuations, right",
    [
        (PIQA, "Question: Open a tin.\nAnswer:", (" With an opener.", " With a song."), 0),
        (SCIQ, "Ice floats.\nQuestion: What floats?\nAnswer:", (" iron", " lead", " gold", " ice"), 3),
        (ARC, "Question: What is the sky?\nAnswer:", (" red", " blue"), 1),
        (OWN, "1 + 1 =", (" 3", " 2"), 1),
    ],
    ids=["piqa", "sciq", "arc", "own"],
)
def test_choices_are_told_by_their_fields(tmp_path, ending, record, context, continuations, right):
    file = written(tmp_path / f"items.{ending}", [record, record])
    items = read_items(check_item_files(str(file), "--choice"), "choice")
    assert [item.name for item in items] == [f"items.{ending}:1", f"items.{ending}:2"]
    assert items[1][1:3] == (context, continuations) and items[1].right == right
    assert items[1].answers == tuple(text.strip() for text in continuations)
    assert len(read_items([file], "choice", limit=1)) == 1


def test_the_word_to_guess_is_the_last_one_with_its_space(tmp_path):
    file = written(tmp_path / "c.jsonl", [{"text": "He said\nhello to Ann"}, {"context": "a b", "target": "c"}])
    first, second = read_items([file], "cloze")
    assert (first.context, first.continuations) == ("He said\nhello to", (" Ann",))
    assert (second.context, second.continuations) == ("a b", ("c",))


@pytest.mark.parametrize(
    "kind, line, told",
    [
        ("choice", '{"a": 1}', "has the fields a, but needs context, choices and answer"),
        ("choice", "[1]", "is a list, but an item must be an object"),
        ("choice", "{", "is not JSON"),
        ("choice", json.dumps(PIQA | {"label": 2}), "has label=2, which is not a zero-based index of its 2 answers"),
        ("choice", json.dumps(PIQA | {"goal": 3}), "must have text in 'goal', not 3"),
        ("choice", json.dumps(ARC | {"answerKey": "E"}), "has answerKey 'E', but labels A, B"),
        ("choice", json.dumps(OWN | {"choices": [" 3"]}), "has fewer than two choices"),
        ("choice", json.dumps(PIQA | {"sol2": ""}), "has an empty answer"),
        ("choice", json.dumps(OWN | {"answer": " 4"}), "has the answer ' 4', which is not one of its choices"),
        (
            "choice",
            json.dumps(OWN | {"choices": ["a", "a"], "answer": "a"}),
            "which occurs more than once in its choices",
        ),
        ("choice", json.dumps(PIQA | {"label": "9" * 5000}), "which is not a zero-based index of its 2 answers"),
        ("choice", json.dumps(ARC | {"answerKey": "E" * 300_000}), "has answerKey 'EEE"),
        ("choice", json.dumps(OWN | {"choices": [" 3", ""]}), "must have a list of nonempty texts in 'choices'"),
        ("cloze", '{"text": "ends in "}', "ends in a space"),
        ("cloze", '{"words": "a"}', "has the fields words, but needs text, or context and target"),
    ],
)
def test_a_record_that_is_no_item_is_named(tmp_path, kind, line, told):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(OWN | {"text": "a b"}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"bad.jsonl(:| line )2 .*{re.escape(told)}") as caught:
        read_items([file], kind)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_files_that_are_missing_empty_torn_or_of_another_kind_are_told(tmp_path):
    with pytest.raises(ValueError, match="--choice=.*none.jsonl does not exist"):
        check_item_files(str(tmp_path / "none.jsonl"), "--choice")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"--choice=.*a.csv must be .jsonl"):
        check_item_files(str(tmp_path / "a.csv"), "--choice")
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no items found in"):
        read_items([tmp_path / "a.jsonl"], "choice")
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(json.dumps(OWN).encode() * 999)[:-20])
    with pytest.raises(ValueError, match="t.jsonl.gz is truncated"):
        read_items([tmp_path / "t.jsonl.gz"], "choice")


class Words:
    """A tokenizer in the manner of GPT-2's: a word takes the space before it along."""

    eos_id, begin_ids = 0, ()

    def __init__(self):
        self.ids = {"<end>": 0}

    def encode(self, text):
        pieces = re.findall(r" ?\w+|\s+|.", text.replace("\u200b", ""))
        return np.array([self.ids.setdefault(piece, len(self.ids)) for piece in pieces], np.int32)

    def words(self, ids):
        return [list(self.ids)[i] for i in ids]


@pytest.mark.parametrize(
    "context, continuation, before, scored",
    [
        ("the cat", " sat down", ["the", " cat"], [" sat", " down"]),
        ("the cat ", "sat down", ["the", " cat"], [" sat", " down"]),  # the space moves to the word behind
        ("the", "re", ["the"], ["re"]),  # "there" is one token: the continuation is encoded alone
        ("a the", "re is", ["a", " there"], [" is"]),  # as lm-eval cuts it
        ("", "sat down", ["<end>"], ["sat", " down"]),
        ("  ", "sat", ["<end>"], ["  ", "sat"]),
        ("\u200b", "sat", ["<end>"], ["sat"]),  # of no token
    ],
)
def test_where_a_context_ends(context, continuation, before, scored):
    words = Words()
    reading = EvalReading.of(words, context=16)
    ids, first, alone = encode_pair(reading, context, continuation)
    assert alone == (continuation == "re")
    if context == "  ":
        assert words.words(ids[:first]) == before and "".join(words.words(ids[first:])) == "  sat"
    else:
        assert (words.words(ids[:first]), words.words(ids[first:])) == (before, scored)


def test_what_stands_before_a_text_stays_there():
    words = Words()
    assert words.encode("<")[0] == 1
    ids, first, _ = encode_pair(EvalReading(words, start_ids=(7,), begin_ids=(7,), context=8), "x", " y")
    assert ids[0] == 7 and first == 2 and len(ids) == 3


def test_a_context_is_cut_at_the_left_and_a_continuation_never():
    reading = EvalReading.of(load_tokenizer("bytes"), context=4)
    span, cut = span_of(encode_pair(reading, "abcdef", "xy"), 4)
    assert bytes(span.ids.tolist()) == b"defxy" and span.first == 3 and cut
    assert not span_of(encode_pair(reading, "abc", "xy"), 4)[1]
    with pytest.raises(ValueError, match="the continuation has 5 tokens, more than the context of 4; remove the item"):
        span_of(encode_pair(reading, "a", "vwxyz"), 4)
    with pytest.raises(ValueError, match="evaluation item f:1: the continuation has 5 tokens"):
        encode_items("cloze", [EvalItem("f:1", "a", ("vwxyz",), ("vwxyz",), 0)], reading)


def test_one_item_that_cannot_be_scored_ends_no_evaluation(tmp_path):
    """A token that spans the boundary is scored; what has no token, or too many, is left out and counted."""
    pairs = [("the", "re"), ("the", " cat"), ("the", "\u200b"), ("a", " b" * 20)]
    items = [EvalItem(f"f:{n}", context, (target,), (target,), 0) for n, (context, target) in enumerate(pairs, 1)]
    reading = EvalReading.of(Words(), context=8)
    encoded = encode_items("cloze", items[:2], reading)
    assert len(encoded.spans) == 2 and encoded.alone == 1
    for item, reason in ((items[2], "f:3: the continuation .* has no token"), (items[3], "f:4: .* has 20 tokens")):
        with pytest.raises(BadInput, match=reason):
            encode_items("cloze", [items[1], item], reading)
    left_out = SkippedItems("skip")
    encoded = encode_items("cloze", items, reading, left_out)
    assert [item.name for item in encoded.items] == ["f:1", "f:2"] and len(encoded.spans) == 2
    assert left_out.count == 2 and "f:3: the continuation" in str(left_out)
    with pytest.raises(BadInput, match="no item can be scored, 1 left out"):
        encode_items("cloze", items[2:3], reading, SkippedItems("skip"))


@pytest.mark.parametrize("damage", ["{", '{"words": 1}', "[1]", b"\xff", "[" * 100 + "]" * 100])
def test_a_record_that_is_no_item_is_left_out_and_counted_where_the_settings_say_so(tmp_path, damage):
    content = damage if isinstance(damage, bytes) else damage.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a b"}\n' + content + b'\n{"text": "c d"}\n')
    left_out = SkippedItems("skip")
    items = read_items([tmp_path / "a.jsonl"], "cloze", skipped=left_out)
    assert [item.name for item in items] == ["a.jsonl:1", "a.jsonl:3"] and left_out.count == 1
    with pytest.raises(BadInput, match="a.jsonl(:| line )2 "):
        read_items([tmp_path / "a.jsonl"], "cloze")


def test_answers_are_counted_as_on_paper():
    item = lambda answers, right: EvalItem("i", "q", tuple(f" {answer}" for answer in answers), answers, right)
    items = [item(("aa", "éééé"), 0), item(("aa", "éééé"), 1), item(("a", "b", "c"), 2)]
    nats = np.array([2.0, 3.0, 2.0, 3.0, 1.0, 1.0, 0.5])
    found = choice_metrics(items, Scores(nats, np.zeros(7, bool), np.ones(7, int)))
    # per character -1, -0.75: the second; per byte -1, -0.375: the second
    assert (found["acc"], found["acc_norm"], found["acc_bytes"]) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    assert found["acc_stderr"] == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 2)) and found["items"] == 3
    nats = np.array([2.0, 5.0, 2.0, 5.0, 1.0, 1.0, 0.5])  # per character -1, -1.25; per byte -1, -0.625
    found = choice_metrics(items, Scores(nats, np.zeros(7, bool), np.ones(7, int)))
    assert found["acc_norm"] == pytest.approx(2 / 3) and found["acc_bytes"] == pytest.approx(2 / 3)
    one = choice_metrics(items[1:2], Scores(np.array([2.0, 5.0]), np.zeros(2, bool), np.ones(2, int)))
    assert (one["acc"], one["acc_norm"], one["acc_bytes"]) == (0, 0, 1) and "acc_stderr" not in one
    found = cloze_metrics(Scores(np.array([1.0, 3.0]), np.array([True, False]), np.array([1, 2])))
    assert found["acc"] == 0.5 and found["perplexity"] == pytest.approx(math.e**2)
    assert found["perplexity_stderr"] == pytest.approx(math.e**2 * math.sqrt(2) / math.sqrt(2))


def test_likelihoods_that_are_not_numbers_leave_no_accuracy():
    """Such a model has no likelier token than the right one either."""
    items = [EvalItem("i", "q", (" a", " b"), ("a", "b"), 0)] * 2
    found = choice_metrics(items, Scores(np.array([1.0, 2.0, np.nan, 2.0]), np.ones(4, bool), np.ones(4, int)))
    assert all(math.isnan(found[name]) for name in ("acc", "acc_norm", "acc_bytes"))
    found = cloze_metrics(Scores(np.array([1.0, np.nan]), np.ones(2, bool), np.ones(2, int)))
    assert math.isnan(found["acc"]) and math.isnan(found["perplexity"])


@pytest.mark.parametrize(
    "name, kind, count",
    [("lambada_test.jsonl.gz", "cloze", 5153), ("piqa_validation.arrow", "choice", 1838),
     ("arc_challenge_validation.arrow", "choice", 299)],
)  # fmt: skip
def test_published_files_are_read_whole(name, kind, count):
    folder = os.environ.get("JAXSCALE_EVAL_CORPORA")
    if not folder:
        pytest.skip("needs JAXSCALE_EVAL_CORPORA: a folder with lambada_test.jsonl.gz and the like")
    items = read_items([pathlib.Path(folder) / name], kind)
    assert len(items) == count
    encoded = encode_items(kind, items, EvalReading.of(load_tokenizer("bytes"), context=4096))
    assert encoded.cut == 0 and len(encoded.spans) == sum(len(item.continuations) for item in items)
