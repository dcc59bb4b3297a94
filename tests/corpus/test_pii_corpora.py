"""How well personal data is found in text that others have written and marked."""

import gzip
import json
import pathlib
from collections import Counter

import pytest

from jaxscale.tools.corpus.curate.pii import KINDS, PiiSpan, find_pii

PRESIDIO_KINDS = {
    "EMAIL_ADDRESS": "email", "IP_ADDRESS": "ip", "IBAN_CODE": "iban", "CREDIT_CARD": "card", "US_SSN": "national_id",
    "PHONE_NUMBER": "phone",
}  # fmt: skip
CORPORA = pathlib.Path(__file__).parents[2] / ".." / "shared" / "corpora"


def corpus(name):
    path = CORPORA / name
    if not path.exists():
        pytest.skip(f"{name} (../shared/corpora) is not here")
    return path


def matches(a, b):
    """Whether two spans are of one kind and share at least half of what they cover together, as is customary."""
    shared = min(a.end, b.end) - max(a.start, b.start)
    return a.kind == b.kind and shared > 0 and 2 * shared >= max(a.end, b.end) - min(a.start, b.start)


def accuracy(sentences):
    """{kind: (found spans that match a marked one, found, marked)} of presidio-research's evaluation sets (MIT)."""
    right, found, marked = Counter(), Counter(), Counter()
    for sentence in sentences:
        own = [span for span in sentence["spans"] if span["entity_type"] in PRESIDIO_KINDS]
        waiting = [
            PiiSpan(span["start_position"], span["end_position"], PRESIDIO_KINDS[span["entity_type"]]) for span in own
        ]
        marked.update(span.kind for span in waiting)
        for span in find_pii(sentence["full_text"]):
            found[span.kind] += 1
            if partner := next((other for other in waiting if matches(span, other)), None):
                waiting.remove(partner)
                right[span.kind] += 1
    return {kind: (right[kind], found[kind], marked[kind]) for kind in KINDS}


def test_gold_sentences_are_found_as_well_as_by_the_best_known_tools():
    sentences = json.loads(corpus("pii/presidio_generated_small.json").read_text(encoding="utf-8"))
    counts = accuracy(sentences)
    least = {"email": (1, 1), "ip": (0.94, 0.88), "card": (0.93, 1), "national_id": (1, 1), "phone": (0.95, 0.95)}
    for kind, (recall, precision) in least.items():
        right, found, marked = counts[kind]
        assert right >= recall * marked > 0 and right >= precision * found, (kind, counts[kind])
    assert counts["iban"] == (0, 0, 0)


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
