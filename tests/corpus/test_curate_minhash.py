"""Near duplicates are found as often as the curve says."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sketched import united

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import NearConfig
from jaxscale.tools.corpus.curate.duplicates import (
    bands_and_rows,
    choose_bands,
    detection_curve,
    detection_table,
    near_sketch,
    signatures,
    verification_curve,
)
from jaxscale.tools.corpus.curate.hashes import word_hashes
from jaxscale.tools.corpus.prepare.sketches import split_items, write_sketch

pytest.importorskip("rensa", reason="near duplicates need the extra jaxscale[prepare]")


SIGNATURE = [[710181428, 1700083143, 506902070, 727257520]]


def shingles(text, n=5):
    words = text.split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def jaccard(one, other):
    one, other = shingles(one), shingles(other)
    return len(one & other) / len(one | other)


def pair(rng, similarity, words=200):
    """Two texts of new words; the second has another end, such that their 5-grams have about this similarity."""
    vocabulary = [f"w{rng.getrandbits(48):x}" for _ in range(2 * words)]
    grams = words - 4
    shared = round(2 * similarity * grams / (1 + similarity))  # s / (2g - s) is the similarity
    return " ".join(vocabulary[:words]), " ".join(vocabulary[: shared + 4] + vocabulary[words + shared + 4 :])


def removed(texts, cfg, folder, blocks=3, neighbours=2):
    """The places of the texts that the whole pass drops."""
    size = -(-len(texts) // blocks)
    paths = [folder / f"{block}.npy" for block in range(blocks)]
    for block in range(blocks):
        documents = [Document(text) for text in texts[block * size : (block + 1) * size]]
        write_sketch(paths[block], near_sketch(documents, cfg))
    items, _ = united(paths, cfg.threshold, neighbours)
    return (split_items(items)[0] * size + split_items(items)[1]).tolist()


@pytest.mark.parametrize("similarity", [0.4, 0.6, 0.7, 0.8, 0.9])
def test_candidates_are_as_frequent_as_the_detection_curve_says(similarity, tmp_path):
    rng, count = random.Random(1), 400
    cfg = NearConfig(threshold=0.7)
    bands, rows = bands_and_rows(cfg)
    pairs = [pair(rng, similarity) for _ in range(count)]
    exact = np.array([jaccard(*texts) for texts in pairs])
    assert abs(exact.mean() - similarity) < 0.01
    one, other = (near_sketch([Document(texts[i]) for texts in pairs], cfg).keys.reshape(-1, bands) for i in (0, 1))
    found = np.mean((one == other).any(1))
    expected = detection_curve(exact, bands, rows).mean()
    assert abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / count) + 0.005


@pytest.mark.cases(2)
@pytest.mark.parametrize("similarity", [0.6, 0.7, 0.75, 0.8, 0.9])
def test_pairs_pass_the_verification_as_often_as_its_curve_says(similarity):
    rng, count = random.Random(2), 400
    cfg = NearConfig(threshold=0.75)
    pairs = [pair(rng, similarity) for _ in range(count)]
    exact = np.array([jaccard(*texts) for texts in pairs])
    one, other = (signatures([word_hashes(texts[i]) for texts in pairs], cfg) for i in (0, 1))
    shares = (one == other).mean(1)
    assert abs(shares.mean() - exact.mean()) < 0.01  # the estimate has no bias
    expected = verification_curve(exact, cfg.threshold, cfg.permutations).mean()
    assert abs(np.mean(shares >= 0.75) - expected) < 4 * np.sqrt(expected * (1 - expected) / count) + 0.005


def test_planted_copies_are_dropped_and_nothing_else(tmp_path):
    rng = random.Random(3)
    pairs = [pair(rng, similarity) for similarity in [0.9] * 60 + [0.3] * 60]
    texts = [one for one, _ in pairs] + [other for _, other in pairs]
    assert removed(texts, NearConfig(), tmp_path) == list(range(120, 180))


def test_the_first_copy_stays_and_blocks_do_not_matter(tmp_path):
    rng = random.Random(4)
    a, b = pair(rng, 0.9)
    texts = [pair(rng, 0)[0], a, pair(rng, 0)[0], b, a, "short one", "short  one!", "", ""]
    for blocks in (1, 2, 4):
        assert removed(texts, NearConfig(), tmp_path, blocks) == [3, 4, 6]


def test_a_document_shorter_than_an_ngram_is_one_by_itself():
    texts = ["Four words in all", "Four words, in all!", "...", "Four other words too"]
    sketch = near_sketch([Document(text) for text in texts], NearConfig())
    keys = sketch.keys.reshape(-1, bands_and_rows(NearConfig())[0])
    assert len(keys) == 3 and np.array_equal(keys[0], keys[1]) and not np.any(keys[0] == keys[2])
    assert sketch.signatures.shape == (4, 128) and np.unique(sketch.places).tolist() == [0, 1, 3]


def test_signatures_are_these_numbers_on_every_machine():
    found = signatures([word_hashes("one two three four five six seven")], NearConfig(permutations=4, bands=2, rows=2))
    assert found.tolist() == SIGNATURE


def test_a_signature_is_the_same_in_any_company():
    rng = random.Random(5)
    words = [word_hashes(text) for text in [*pair(rng, 0.5), "few words", "", *pair(rng, 0.1)]]
    whole = signatures(words, NearConfig())
    assert all(np.array_equal(whole[i], signatures([row], NearConfig())[0]) for i, row in enumerate(words))


@pytest.mark.parametrize(
    ("threshold", "weight", "expected"), [(0.5, 0.5, (25, 5)), (0.75, 0.95, (18, 7)), (0.9, 0.5, (5, 25))]
)
def test_bands_follow_from_the_threshold(threshold, weight, expected):
    assert choose_bands(threshold, 128, weight) == expected


@pytest.mark.slow
@given(st.floats(0.3, 0.95), st.integers(8, 64), st.floats(0.2, 0.95))
def test_bands_fit_into_the_signature(threshold, permutations, weight):
    bands, rows = choose_bands(threshold, permutations, weight)
    assert bands >= 1 and rows >= 1 and bands * rows <= permutations


def test_the_curves_rise_from_never_to_always():
    table = detection_table(NearConfig(threshold=0.8))
    assert [row[0] for row in table][::14] == pytest.approx([0.3, 1.0])
    for column in (1, 2):
        values = [row[column] for row in table]
        assert values == sorted(values) and values[0] < 0.03 and values[-1] == pytest.approx(1)
    assert detection_curve(0.5, 1, 1) == 0.5 and detection_curve(0.5, 2, 1) == 0.75


@pytest.mark.parametrize(
    "wrong",
    [dict(threshold=0), dict(threshold=1.1), dict(bands=4), dict(rows=4), dict(bands=65, rows=2), dict(ngram_words=0),
     dict(permutations=0), dict(miss_weight=1), dict(seed=-1), dict(bands=0, rows=3)],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NearConfig(**wrong)
