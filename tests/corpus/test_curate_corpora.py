"""Real text: what is planted is found, and what was clean stays clean."""

import gzip
import json
import pathlib
import random

import numpy as np
import pyarrow.parquet
import pytest
from sketched import united

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import ContaminationConfig, NearConfig, SubstringConfig
from jaxscale.tools.corpus.curate.contamination import make_contamination
from jaxscale.tools.corpus.curate.duplicates import make_substring, near_sketch
from jaxscale.tools.corpus.curate.hashes import ngram_hashes, word_hashes
from jaxscale.tools.corpus.prepare.sketches import split_items, write_sketch

CORPORA = pathlib.Path(__file__).parents[3] / "shared" / "corpora"
C4 = CORPORA / "web_c4" / "c4-train-00000-of-01637.parquet"
pytestmark = pytest.mark.skipif(not C4.exists(), reason=f"no real text at {CORPORA}")


@pytest.fixture(scope="module")
def pages():
    """200 web pages."""
    return pyarrow.parquet.read_table(C4).column("text").to_pylist()


def leaks(rng):
    """Yields (an item's name, 13 words in a row of it) for ever."""
    with gzip.open(CORPORA / "eval" / "gsm8k_train.jsonl.gz", "rt") as file:
        questions = [json.loads(line)["question"] for line in file]
    while True:
        row = rng.randrange(len(questions))
        words = questions[row].split()
        if len(words) > 13:
            start = rng.randrange(len(words) - 13)
            yield f"gsm8k_train.jsonl.gz:{row + 1}", " ".join(words[start : start + 13])


@pytest.mark.slow
def test_leaks_planted_in_web_pages_are_named_and_clean_pages_stay(pages):
    rng = random.Random(0)
    files = tuple(str(CORPORA / "eval" / name) for name in ("HumanEval.jsonl.gz", "gsm8k_train.jsonl.gz"))
    stage = make_contamination(ContaminationConfig(files=files))
    assert all(outcome.document for outcome in stage([Document(page) for page in pages]))
    planted = []
    for page, (name, leak) in zip(pages, leaks(rng)):
        place = page.find(" ", rng.randrange(len(page)))
        planted.append((name, page[: max(place, 0)] + " " + leak + " " + page[max(place, 0) :], leak))
    outcomes = stage([Document(text) for _, text, _ in planted])
    assert all(outcome.document is None and name in outcome.detail for (name, _, _), outcome in zip(planted, outcomes))


def test_edited_copies_of_web_pages_are_dropped_and_no_others(pages, tmp_path):
    pages = [page for page in pages if len(page.split()) >= 60]
    rng, copies = random.Random(1), []
    for page in pages[:100]:
        words = page.split(" ")
        start = rng.randrange(len(words) - len(words) // 16)
        copies.append(" ".join(words[:start] + words[start + len(words) // 16 :]))  # a sixteenth is missing
    cfg, texts = NearConfig(), pages + copies
    write_sketch(tmp_path / "0.npy", near_sketch([Document(text) for text in texts], cfg))
    items, keepers = united([tmp_path / "0.npy"], cfg.threshold, 2)
    similarity = [jaccard(page, copy) for page, copy in zip(pages, copies)]
    dropped = dict(zip(split_items(items)[1].tolist(), split_items(keepers)[1].tolist()))
    sure = {len(pages) + i: i for i, value in enumerate(similarity) if value >= 0.85}
    assert len(sure) >= 80
    assert {copy: dropped.get(copy) for copy in sure} == sure
    assert set(dropped) <= set(range(len(pages), len(texts)))


def jaccard(one, other):
    one, other = (np.unique(ngram_hashes(word_hashes(text), 5)) for text in (one, other))
    shared = len(np.intersect1d(one, other))
    return shared / (len(one) + len(other) - shared)


def test_passages_that_pages_quote_from_another_are_cut(pages):
    pytest.importorskip("pydivsufsort", reason="repeated passages need the extra jaxscale[prepare]")
    cfg = SubstringConfig(min_bytes=200, min_document_characters=0)
    before = [o.document.text for o in make_substring(cfg)([Document(page) for page in pages])]
    source = max(before, key=len)
    quote = source[1000:1500]
    quoting = [f"{text}\n{quote}\n" for text in before[:50]]
    outcomes = make_substring(cfg)([Document(text) for text in [source, *quoting]])
    lost = [len(text) - len(o.document.text) for text, o in zip(quoting, outcomes[1:]) if text[:50] != source[:50]]
    assert outcomes[0].document.text == source
    assert all(498 <= n <= 515 for n in lost) and len(lost) >= 49  # a few characters around are the same by chance
