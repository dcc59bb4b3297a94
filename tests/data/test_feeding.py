"""From shards to batches: each token of an epoch exactly once, whatever the packing, mixture, hosts and kills."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.data import best_fit
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.order import batch_index, step_of
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.system.exits import BadInput

T = 32
GROUPS = {"letters": "a*.txt", "digits": "d*.txt", "signs": "s*.txt"}
MIXTURES = {"none": {}, "flat": {"letters": 0.5, "digits": 0.3, "signs": 0.2}, "staged": {
    "0": {"letters": 0.9, "digits": 0.1}, "9 steps": {"letters": 0.2, "digits": 0.3, "signs": 0.5}}}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three sources of documents of 1 to 120 bytes."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    for prefix, alphabet, number in (("a", "abcdefgh", 90), ("d", "01234567", 40), ("s", "+-*/=<>!", 25)):
        for i in range(number):
            (folder / f"{prefix}{i:03}.txt").write_text("".join(draw.choices(alphabet, k=draw.randint(1, 120))))
    return folder


def open_corpus(folder, packing="best_fit", mixture="flat", seed=0, **more):
    files = {name: str(folder / pattern) for name, pattern in GROUPS.items()}
    cfg = DataConfig(
        files=files, packing=packing, mixture=MIXTURES[mixture], cache_dir=str(folder / "cache"), val_fraction=0, **more
    )
    return open_data(cfg, seq_len=T, vocab_size=257, seed=seed, say=lambda line: None)


def real_tokens(batch):
    return batch.tokens[batch.segment_ids > 0]


def corpus_tokens(folder):
    texts = [path.read_bytes() for path in sorted(folder.glob("*.txt"))]
    return np.sort(np.concatenate([[*text, 256] for text in texts]))


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("mixture", ["none", "flat"])
def test_the_tokens_of_an_epoch_are_those_of_the_corpus(folder, packing, mixture):
    corpus = open_corpus(folder, packing, mixture)
    rows = corpus.train_rows
    every = rows.read(rows.locate(np.arange(len(rows))), range(len(rows)))
    np.testing.assert_array_equal(np.sort(real_tokens(every)), corpus_tokens(folder))
    assert every.weights.sum() == len(corpus_tokens(folder)) - rows.num_documents
    numbers = corpus.batches(4).order.row_numbers(np.arange(len(rows) * 3))
    for group, (first, stop) in enumerate(zip(rows.group_rows, rows.group_rows[1:])):
        seen = numbers[(numbers >= first) & (numbers < stop)]
        size = stop - first
        for epoch in range(len(seen) // size):  # of each source, and another order each time
            assert np.array_equal(np.sort(seen[epoch * size : (epoch + 1) * size]), np.arange(first, stop)), group
        assert not np.array_equal(seen[:size], seen[size : 2 * size])


@pytest.mark.slow
@pytest.mark.fault("F12")
@given(
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 6, 12])), max_size=4),
    st.sampled_from(["best_fit", "concat"]),
    st.sampled_from(list(MIXTURES)),
)
@settings(max_examples=6, deadline=None)
def test_kills_and_other_numbers_of_hosts_change_nothing(folder, hosts, kills, packing, mixture):
    whole = open_corpus(folder, packing, mixture).batches(12)
    done = 0
    for steps, hosts_after in [*kills, (2, 1)]:
        readers = [open_corpus(folder, packing, mixture).batches(12) for _ in range(hosts)]  # new processes
        for n in range(done, done + steps):
            share = 12 // hosts
            parts = [reader.rows(n, range(h * share, (h + 1) * share)) for h, reader in enumerate(readers)]
            for i, field in enumerate(whole.batch(n)):
                if field is not None:
                    np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), field)
        done, hosts = done + steps, hosts_after


@pytest.mark.cases(2)
@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("mixture", list(MIXTURES))
def test_places_and_rows_lead_to_each_other(folder, packing, mixture):
    corpus = open_corpus(folder, packing, mixture)
    order = corpus.batches(4).order
    stop = 2 * len(corpus.train_rows) + 5
    numbers = order.row_numbers(np.arange(stop))
    for row in range(len(corpus.train_rows)):
        np.testing.assert_array_equal(order.places_of(row, stop), np.flatnonzero(numbers == row))


def test_a_row_of_a_mixture_is_of_one_source_and_a_source_keeps_its_order_when_others_come(folder):
    alphabets = ("abcdefgh", "01234567", "+-*/=<>!")
    batches = open_corpus(folder, "best_fit", "staged").batches(8)
    for n in range(20):
        for row in batches.batch(n).tokens:
            kinds = {next(i for i, a in enumerate(alphabets) if chr(t) in a) for t in row if t not in (0, 256)}
            assert len(kinds) == 1
    letters = lambda mixture: [
        row.tobytes()
        for n in range(8)
        for row in open_corpus(folder, "best_fit", mixture).batches(8).batch(n).tokens
        if chr(row[0]) in alphabets[0]
    ]
    one, other = letters("flat"), letters("staged")
    shorter = min(len(one), len(other))
    assert shorter > 20 and one[:shorter] == other[:shorter]


def test_seeds_give_other_rows_and_a_plan_is_made_once(folder):
    one, same, other = (open_corpus(folder, "best_fit", "none", seed=seed) for seed in (0, 0, 1))
    assert one.train_rows.arrays.folder == same.train_rows.arrays.folder != other.train_rows.arrays.folder
    made = os.stat(one.train_rows.arrays.files["small"]).st_mtime_ns
    again = open_corpus(folder, "best_fit", "none").train_rows.arrays
    assert os.stat(again.files["small"]).st_mtime_ns == made
    assert not np.array_equal(one.batches(4).batch(0).tokens, other.batches(4).batch(0).tokens)
    assert open_corpus(folder, "concat", "none").fingerprint != one.fingerprint


@pytest.mark.fault("F14")
@pytest.mark.parametrize(("name", "value"), [("VERSION", 0), ("WINDOW", 7)])
def test_a_change_of_the_packing_is_a_change_of_the_data(folder, monkeypatch, name, value):
    before = {packing: open_corpus(folder, packing).fingerprint for packing in ("best_fit", "concat")}
    monkeypatch.setattr(best_fit, name, value)
    after = {packing: open_corpus(folder, packing).fingerprint for packing in ("best_fit", "concat")}
    assert after["best_fit"] != before["best_fit"] and after["concat"] == before["concat"]


def test_grain_sees_the_same_batches(folder):
    corpus = open_corpus(folder)
    batches, dataset = corpus.batches(4), corpus.as_grain(4, num_batches=50)
    part = corpus.as_grain(4, rows=[3, 1])
    assert len(dataset) == 50
    for n in (0, 3, 49):
        for ours, theirs, rows in zip(batches.batch(n), dataset[n], part[n]):
            assert ours is None or np.array_equal(ours, theirs) and np.array_equal(ours[[3, 1]], rows)
    assert np.array_equal(next(iter(dataset.to_iter_dataset())).tokens, batches.batch(0).tokens)


def add_noise(batch, n, rows):
    noise = np.stack([np.random.default_rng((n, row)).integers(0, 200, T, np.int32) for row in rows])
    return batch._replace(tokens=noise)


def no_weights(batch, n, rows):
    return batch._replace(weights=np.zeros_like(batch.weights))


def as_integers(batch, n, rows):
    return batch._replace(weights=batch.weights.astype(np.int32))


def by_place(batch, n, rows):
    return batch._replace(tokens=batch.tokens + np.arange(len(rows), dtype=np.int32)[:, None])


def failing(batch, n, rows):
    raise KeyError("words")


def leaving(batch, n, rows):
    sys.exit(0)


def as_dict(batch, n, rows):
    return batch._asdict()


@pytest.mark.slow
def test_grain_is_imported_before_a_run_has_threads():
    """While it is imported no other thread's import works; a run once ended with "LazyModule is not callable"."""
    code = (
        "import sys, threading, jaxscale.runtime.run.opening; "
        "sys.exit('grain' not in sys.modules or threading.active_count() > 1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_named_transforms_change_the_batches_in_order_and_the_same_on_any_number_of_hosts(folder):
    names = tuple(f"{__name__}:{function.__name__}" for function in (add_noise, no_weights))
    corpus, plain = open_corpus(folder, transforms=names), open_corpus(folder)
    whole, half = corpus.as_grain(4), corpus.as_grain(4, rows=[2, 3])
    for n in (0, 7):
        before = plain.batches(4).batch(n)
        np.testing.assert_array_equal(whole[n].tokens, add_noise(before, n, range(4)).tokens)
        np.testing.assert_array_equal(whole[n].targets, before.targets)
        np.testing.assert_array_equal(half[n].tokens, whole[n].tokens[2:])
        assert not whole[n].weights.any()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no.such:thing", "no.such cannot be imported"),
        ("math:nothing", "math has no function nothing"),
        (f"{__name__}:as_integers", r"changes weights from float32\[2, 32\] to int32\[2, 32\]"),
        (f"{__name__}:by_place", "returns different values for row 1 when called with only that row"),
        (f"{__name__}:failing", "fails on batch 0: KeyError: 'words'"),
        (f"{__name__}:leaving", "fails on batch 0: SystemExit: 0"),
        ("leaves:anything", "leaves cannot be imported .SystemExit: 0"),
        (f"{__name__}:as_dict", "returns dict, not a Batch"),
    ],
)
def test_a_transform_that_is_not_fit_is_named_in_one_line(folder, name, line, tmp_path, monkeypatch):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=f"data.transforms: .*{line}"):
        open_corpus(folder, transforms=(name,)).as_grain(4)
    with pytest.raises(BadInput, match="must contain functions in the form MODULE:FUNCTION"):
        open_corpus(folder, transforms=("no module",))


def test_a_batch_that_was_read_is_not_written_again(folder):
    batches = open_corpus(folder).batches(4)
    first = batches.batch(0)
    copy = [np.array(field) for field in first if field is not None]
    batches.batch(1)
    assert all(np.array_equal(a, b) for a, b in zip([field for field in first if field is not None], copy))


def test_a_mixture_of_unknown_sources_or_without_an_end_is_refused(folder):
    files = {name: str(folder / pattern) for name, pattern in GROUPS.items()}
    cfg = DataConfig(files=files, mixture={"letters": 1.0, "books": 1.0}, cache_dir=str(folder / "cache"))
    with pytest.raises(ValueError, match="data.mixture names 'books', which is not a source of the training data"):
        open_data(cfg, seq_len=T, vocab_size=257, seed=0, say=lambda line: None)
    corpus = open_corpus(folder, max_epochs={"letters": 1.0, "digits": 1.0, "signs": 1.0})
    with pytest.raises(ValueError, match="limits data.mixture to"):
        corpus.plan_mixture(4, 10_000)
    for wrong in (dict(mixture={"a": float("inf")}), dict(mixture={"a": 1.0}, max_epochs={"a": float("nan")})):
        with pytest.raises(BadInput, match="finite"):
            DataConfig(files="x", **wrong)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda r: (r[0], r[0] + r[1])), max_size=4))
@settings(max_examples=100, deadline=None)
def test_the_step_of_a_batch_undoes_the_batch_of_a_step(skipped):
    for step in range(40):
        assert step_of(batch_index(step, skipped), skipped) == step
    for start, stop in skipped:
        assert step_of(start, skipped) is None and step_of(stop - 1, skipped) is None
