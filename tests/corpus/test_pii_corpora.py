"""How well personal data is found in text that others have written and marked."""

import gzip
import json
import pathlib

import pytest

from jaxscale.corpus.curate.pii import Span, find_pii
from jaxscale.corpus.curate.pii_accuracy import accuracy, matches, presidio_spans

CORPORA = pathlib.Path(__file__).parents[2] / ".." / "shared" / "corpora"


def corpus(name):
    path = CORPORA / name
    if not path.exists():
        pytest.skip(f"{name} (../shared/corpora) is not here")
    return path


def test_spans_match_that_share_half_of_what_they_cover():
    span = Span(10, 20, "phone")
    assert matches(span, span) and matches(span, Span(10, 30, "phone")) and matches(Span(15, 20, "phone"), span)
    assert not matches(span, Span(10, 31, "phone")) and not matches(span, Span(10, 20, "card"))
    assert not matches(span, Span(20, 30, "phone"))


def test_precision_and_recall_count_each_marked_span_once():
    marked = [("x" * 50, [Span(0, 10, "card"), Span(20, 30, "card"), Span(40, 45, "phone")])]
    found = [Span(0, 10, "card"), Span(1, 10, "card"), Span(40, 45, "phone"), Span(46, 48, "phone")]
    counts = accuracy(marked, lambda text: found)
    assert counts["card"] == (1, 2, 2) and counts["phone"] == (1, 2, 1)
    assert counts["card"].precision == 0.5 and counts["phone"].recall == 1 and counts["email"].recall != 1


def test_gold_sentences_are_found_as_well_as_by_the_best_known_tools():
    sentences = json.loads(corpus("pii/presidio_generated_small.json").read_text(encoding="utf-8"))
    counts = accuracy(presidio_spans(sentences))
    least = {"email": (1, 1), "ip": (0.94, 0.88), "card": (0.93, 1), "national_id": (1, 1), "phone": (0.95, 0.95)}
    for kind, (recall, precision) in least.items():
        assert counts[kind].recall >= recall and counts[kind].precision >= precision, (kind, counts[kind])
    assert counts["iban"].found == counts["iban"].marked == 0


def test_an_encyclopedia_has_no_telephone_numbers_and_no_cards():
    assert find_pii(corpus("wikitext-2/valid.txt").read_text(encoding="utf-8")) == []


def test_grade_school_problems_have_no_telephone_numbers():
    with gzip.open(corpus("eval/gsm8k_train.jsonl.gz"), "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    found = [(problem["question"], span) for problem in problems for span in find_pii(problem["question"])]
    assert not found


def test_advertisements_by_message_give_their_numbers_and_private_messages_hardly_any():
    lines = corpus("spam/SMSSpamCollection.tsv").read_text(encoding="utf-8").split("\n")
    phones = {"spam": [], "ham": []}
    for label, text in (line.split("\t", 1) for line in lines if line.startswith(("spam\t", "ham\t"))):
        phones[label].append(any(span.kind == "phone" for span in find_pii(text)))
    assert sum(phones["spam"]) > 0.5 * len(phones["spam"]) and sum(phones["ham"]) < 0.001 * len(phones["ham"])
