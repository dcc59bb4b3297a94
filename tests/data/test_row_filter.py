"""The gate: degenerate rows weigh nothing, honest ones everything, on any number of hosts."""

import pathlib

import numpy as np
import pytest

from jaxscale.core.batch import Batch
from jaxscale.runtime.data.config import DataConfig, RowFilterConfig  # fmt: skip
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.row_filter import (
    ReplacementTokens,
    degenerate_rows,
    find_replacement_tokens,
    longest_run,
    num_damaged,
    repeated_share,
)
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer, load_tokenizer

T = 2048
ON = RowFilterConfig(on=True)


def batch_of(*rows):
    """A batch of rows of tokens, padded."""
    tokens = np.zeros((len(rows), T), np.int32)
    segments = np.zeros((len(rows), T), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    return Batch(tokens, np.roll(tokens, -1, axis=1), segments, segments, (segments > 0).astype(np.float32))


def verdicts(*rows, cfg=ON, depths=None, damage=None):
    depths = np.zeros(len(rows), np.int64) if depths is None else np.array(depths)
    return degenerate_rows(cfg, batch_of(*rows), depths, damage).tolist()


def prose(n=T, seed=0, vocabulary=5000):
    """Words by Zipf's law, as in a text."""
    share = 1 / np.arange(1, vocabulary + 1)
    return np.random.default_rng(seed).choice(vocabulary, n, p=share / share.sum()) + 10


def test_honest_rows_pass():
    code = np.tile(prose(400), 6)[:T] + (np.random.default_rng(1).random(T) < 0.1) * 3  # much alike, never the same
    assert verdicts(*[prose(seed=seed) for seed in range(40)], prose(300), prose(20), code) == [False] * 43


def test_planted_rows_are_caught():
    rng = np.random.default_rng(0)
    mostly_one = np.where(rng.random(T) < 0.6, 7, prose())
    few = rng.integers(1, 30, T)
    run = prose().copy()
    run[700:1000] = 9
    phrase = np.tile(prose(150), 20)[:T]
    short = np.full(100, 5)
    assert verdicts(mostly_one, few, run, phrase, short, np.full(T, 3)) == [True] * 6
    assert verdicts(np.full(63, 5)) == [False]  # too little to judge


def test_each_limit_is_its_own():
    run = prose().copy()
    run[700:1000] = 9
    assert verdicts(run, cfg=RowFilterConfig(on=True, max_run=400)) == [False]
    assert verdicts(run, cfg=RowFilterConfig(on=True, max_run=299)) == [True]
    phrase = np.tile(prose(150), 20)[:T]
    assert verdicts(phrase, cfg=RowFilterConfig(on=True, max_repeated_share=0.95)) == [False]
    assert longest_run(np.array([1, 1, 2, 2, 2, 3])) == 3 and longest_run(np.array([4])) == 1
    assert repeated_share(np.arange(100)) == 0 and repeated_share(np.tile(np.arange(10), 10)) > 0.85


def test_a_row_deep_inside_one_document_is_gated_where_that_is_asked_for():
    deep = RowFilterConfig(on=True, max_depth_rows=3)
    rows = [prose(seed=seed) for seed in range(3)]
    assert verdicts(*rows, depths=[0, 3 * T, 3 * T + 1], cfg=deep) == [False, False, True]
    assert verdicts(*rows, depths=[0, 0, 10**9]) == [False] * 3
    several = batch_of(prose())
    several.segment_ids[0, 1000:] = 2
    assert not degenerate_rows(deep, several, np.array([10**9])).any()


def test_text_that_was_no_text_is_known_by_its_replacement_characters():
    tokenizer = ByteTokenizer()
    damage = find_replacement_tokens(tokenizer)
    assert damage.ids.tolist() == [0xEF, 0xBF, 0xBD] and damage.in_order
    honest = "".join(f"{chr(0x4E00 + 37 * i % 5000)}，" for i in range(700))
    damaged = "ab\ufffdc\ufffd\ufffd word " * 200
    rows = [tokenizer.encode(text)[:T] for text in (honest, damaged, "An honest line of text, number seventy. " * 2)]
    cfg = RowFilterConfig(on=True, max_repeated_share=1, min_distinct_share=0)
    assert verdicts(*rows, cfg=cfg, damage=damage) == [False, True, False]
    own = ReplacementTokens(np.array([4210, 6353]), False)
    assert (
        num_damaged(np.array([1, 4210, 6353, 9]), own) == 2 and num_damaged(np.array([239, 191, 189, 191]), damage) == 3
    )
    replaced = np.where(np.random.default_rng(0).random(T) < 0.3, 4210, prose())
    assert verdicts(replaced, damage=own) == [True] and verdicts(replaced) == [False]


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_gated_rows_are_the_same_on_any_hosts_and_only_weights_change(tmp_path, hosts):
    (tmp_path / "a.txt").write_bytes(b"x" * 9000 + bytes(np.random.default_rng(0).integers(32, 127, 9000).tolist()))
    settings = dict(files=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"), val_fraction=0.0)
    opened = [
        open_data(DataConfig(**settings, gate=gate), seq_len=256, vocab_size=257, seed=0, say=lambda line: None)
        for gate in (RowFilterConfig(on=True, max_run=64), RowFilterConfig())
    ]
    gated, plain = (corpus.batches(8) for corpus in opened)
    assert opened[0].fingerprint == opened[1].fingerprint and plain.row_filter is None
    counts = []
    for n in range(9):
        parts = [gated.rows(n, range(h * 8 // hosts, (h + 1) * 8 // hosts)) for h in range(hosts)]
        weights = np.concatenate([part.weights for part in parts])
        whole = plain.batch(n)
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), whole.tokens)
        bad = ~weights.any(axis=1)
        np.testing.assert_array_equal(weights[~bad], whole.weights[~bad])
        same_letter = (whole.tokens == ord("x")).mean(axis=1) > 0.5
        np.testing.assert_array_equal(bad, same_letter)
        counts.append(int(bad.sum()))
    assert 25 < sum(counts) < 45  # half of 72


CORPORA = pathlib.Path(__file__).parents[3] / "shared" / "corpora"


@pytest.mark.skipif(not CORPORA.is_dir(), reason="the corpora are not beside this repository")
def test_hardly_a_row_of_real_text_is_gated(tmp_path):
    ids = np.fromfile(CORPORA / "web_openwebtext" / "meg-gpt2-openwebtext_text_document.bin", "<u2").astype(np.int32)
    rows = ids[: len(ids) // T * T].reshape(-1, T)
    ones = np.ones_like(rows)
    bad = degenerate_rows(ON, Batch(rows, rows, ones, ones, ones), np.zeros(len(rows), np.int64))
    assert bad.mean() < 0.005


def test_limits_out_of_bounds_are_refused():
    for wrong in (dict(max_top_share=1.5), dict(max_run=0), dict(max_depth_rows=-1), dict(min_distinct_share=-0.1)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RowFilterConfig(**wrong)


def test_tokenizers_with_a_token_for_the_mark_are_known(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"a": 0, "\ufffd": 1, "\ufffd\ufffd": 2, "<eos>": 3}
    model = tokenizers.models.BPE(vocab=vocab, merges=[("\ufffd", "\ufffd")])
    tokenizers.Tokenizer(model).save(str(tmp_path / "t.json"))
    damage = find_replacement_tokens(load_tokenizer(str(tmp_path / "t.json"), "<eos>"))
    assert damage.ids.tolist() == [1, 2] and not damage.in_order
