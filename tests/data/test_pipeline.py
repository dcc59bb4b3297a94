"""One door from the settings to batches, and one clear line for everything that can be wrong with them."""

import functools

import numpy as np
import pytest
import tokenizers

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.pipeline import check_data, open_data
from jaxscale.runtime.data.shard_writer import ShardWriter
from jaxscale.runtime.data.split import file_holdout
from jaxscale.schema import from_dict, to_dict
from jaxscale.system.exits import BadInput

T = 16


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, so that globs are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def open_quietly(seq_len=T, vocab_size=257, seed=0, **settings):
    cfg = DataConfig(cache_dir="cache", **settings)
    return open_data(cfg, seq_len=seq_len, vocab_size=vocab_size, seed=seed, say=lambda line: None)


def write_many(folder, number=200, prefix="doc"):
    """Documents that say who they are."""
    for i in range(number):
        (folder / f"{prefix}{i:03}.txt").write_text(f"<{prefix}{i:03}> " + "some words " * (i % 7) + "\n")


def text_of(rows, tokenizer):
    """All text of all rows."""
    return tokenizer.decode(np.concatenate([rows[r].tokens for r in range(len(rows))]))


def documents(corpus):
    """(documents of training, of validation)."""
    return corpus.train_rows.num_documents, corpus.valid_rows.num_documents


def test_training_and_validation_share_no_document_and_lose_none(folder):
    write_many(folder)
    corpus = open_quietly(files="*.txt", val_fraction=0.1)
    train, valid = (text_of(rows, corpus.tokenizer) for rows in (corpus.train_rows, corpus.valid_rows))
    for i in range(200):
        assert (f"<doc{i:03}>" in train) + (f"<doc{i:03}>" in valid) == 1
    train, valid = documents(corpus)
    assert train + valid == 200 and 8 <= valid <= 35
    assert corpus.epoch_tokens == len(corpus.train_rows) * T >= corpus.train_rows.num_tokens


def test_the_held_out_documents_depend_on_their_names_alone(folder):
    write_many(folder)
    before = text_of(open_quietly(files="*.txt").valid_rows, DataTokenizer)
    write_many(folder, 50, prefix="new")  # old documents stay on their side when others come
    after = text_of(open_quietly(files="*.txt", vocab_size=300, seed=9).valid_rows, DataTokenizer)
    assert {name for name in names_in(after) if name.startswith("doc")} == names_in(before)
    assert 0.04 < file_holdout("some name", 100_000, 0.05).mean() < 0.06


class DataTokenizer:
    """Bytes back to text, the end of a document as a line end."""

    @staticmethod
    def decode(ids):
        return bytes(10 if i > 255 else i for i in ids).decode(errors="replace")


def names_in(text):
    return {part.split(">")[0] for part in text.split("<")[1:]}


def test_one_file_is_divided_at_its_end(folder):
    text = "".join(f"line {i:04}\n" for i in range(1000))
    (folder / "one.txt").write_text(text)
    corpus = open_quietly(files="one.txt", val_fraction=0.1, seed=3)
    train, valid = (text_of(rows, corpus.tokenizer).rstrip("\0") for rows in (corpus.train_rows, corpus.valid_rows))
    assert train + valid == text and len(valid) == 999  # and the end token: 1000 of 10,001
    assert "the last 0.1 of each document in text" in corpus.summary


@pytest.mark.slow
def test_a_source_of_few_documents_is_divided_at_their_ends_beside_one_of_many(folder):
    write_many(folder, 200)
    (folder / "book.txt").write_text("a book\n" * 500)
    corpus = open_quietly(files={"notes": "doc*.txt", "book": "book.txt"})
    documents = corpus.valid_rows.documents
    numbers, lengths = next(documents.members("valid", 0))
    sources = documents.sources(numbers)
    assert lengths[sources == 1].tolist() == [int(3501 * 0.05)]
    assert (lengths[sources == 0] > 10).all() and "in book, which has few" in corpus.summary
    train, valid = (text_of(rows, corpus.tokenizer) for rows in (corpus.train_rows, corpus.valid_rows))
    assert sum((f"<doc{i:03}>" in train) + (f"<doc{i:03}>" in valid) for i in range(200)) == 200


def test_validation_files_are_taken_whole(folder):
    write_many(folder, 20)
    write_many(folder, 3, prefix="val")
    corpus = open_quietly(files="doc*.txt", val_files="val*.txt")
    assert documents(corpus) == (20, 3)
    assert corpus.source_names == ("text", "validation")
    index = corpus.train_rows.documents
    for part, source in (("train", 0), ("valid", 1)):
        assert (index.sources(next(index.members(part, 0))[0]) == source).all()


def test_no_validation_is_possible_when_asked_for(folder):
    write_many(folder, 20)
    corpus = open_quietly(files="*.txt", val_fraction=0)
    assert corpus.valid_rows is None and corpus.train_rows.num_documents == 20 and "no validation" in corpus.summary


def test_sources_follow_their_documents_into_validation_and_bytes_their_targets(folder):
    write_many(folder, 100)
    write_many(folder, 100, prefix="web")
    corpus = open_quietly(files={"doc": "doc*.txt", "web": ["web*.txt"]}, val_fraction=0.2)
    assert corpus.source_names == ("doc", "web")
    seen = list(corpus.valid_batches(num_rows=1000, rows_per_batch=8))
    assert all(array.shape == (8, T) for batch, *rest in seen for array in [*batch[:5], *rest])
    rows = sum((batch.segment_ids.any(axis=1).sum() for batch, *_ in seen), 0)
    assert rows == len(corpus.valid_rows)
    for batch, sources, sizes in seen:
        real = batch.weights == 1
        np.testing.assert_array_equal(sizes, np.where(real & (batch.targets < 256), 1, 0))
        for row, at in zip(*np.nonzero(batch.tokens[:, : T - 3] == ord("<"))):
            name = bytes(batch.tokens[row, at + 1 : at + 4].astype(np.uint8)).decode()
            assert corpus.source_names[sources[row, at]] == name
    assert np.unique(np.concatenate([sources[batch.weights == 1] for batch, sources, _ in seen])).tolist() == [0, 1]


def test_the_validation_set_is_the_same_for_every_seed_and_spread_evenly(folder):
    write_many(folder)
    first, second = (list(open_quietly(files="*.txt", seed=seed).valid_batches(5, 2)) for seed in (0, 1))
    assert len(first) == 3 and first[2][0].weights[1].sum() == 0  # the last row only fills up
    for one, other in zip(first, second):
        np.testing.assert_array_equal(one[0].tokens, other[0].tokens)
    rows, tokens = open_quietly(files="*.txt", seed=0).valid_rows, np.concatenate([one[0].tokens for one in first])
    for i in range(5):
        np.testing.assert_array_equal(tokens[i], rows[i * len(rows) // 5].tokens)


def test_batches_depend_on_the_seed_and_the_number_alone(folder):
    write_many(folder)
    one, same, other = (open_quietly(files="*.txt", seed=seed).batches(4) for seed in (0, 0, 1))
    same.batch(50)
    np.testing.assert_array_equal(one.batch(7).tokens, same.batch(7).tokens)
    assert not np.array_equal(one.batch(7).tokens, other.batch(7).tokens)


@pytest.mark.fault("F14")
def test_the_fingerprint_tells_corpora_apart_and_not_places(folder):
    for place in ("here", "there"):
        (folder / place).mkdir()
        write_many(folder / place, 120)
    prints = {place: open_quietly(files=f"{place}/*.txt").fingerprint for place in ("here", "there")}
    assert prints["here"] == prints["there"]
    assert open_quietly(files="here/*.txt", val_fraction=0.1).fingerprint != prints["here"]
    (folder / "there" / "doc000.txt").write_text("another text")
    assert open_quietly(files="there/*.txt").fingerprint != prints["here"]


@pytest.mark.slow
def test_the_standard_library_is_a_corpus_for_everyone(folder):
    corpus = open_quietly(name="stdlib", seq_len=256)
    assert corpus.source_names == ("modules", "packages")
    assert 4e6 < corpus.train_rows.num_tokens < 40e6 and 0.02 < corpus.valid_rows.num_tokens / 12e6 < 0.12
    assert "import" in text_of([corpus.train_rows[r] for r in range(200)], corpus.tokenizer)


def test_raw_token_files_become_one_stream_divided_at_the_end_token(folder):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        ids = rng.integers(1, 100, 5000)
        ids[49::50] = 0
        ids.astype("<u2").tofile(f"{name}.bin")
    corpus = open_quietly(name="tokens", files="*.bin", eos_id=0, vocab_size=100)
    assert sum(documents(corpus)) == 200 and corpus.tokenizer is None
    assert corpus.train_rows.num_tokens + corpus.valid_rows.num_tokens == 10_000
    batch, _, sizes = next(corpus.valid_batches(4, 4))
    assert not sizes.any() and batch.tokens.max() < 100
    whole = open_quietly(name="tokens", files="*.bin", vocab_size=100)  # no end token: the tails are held out
    assert documents(whole)[0] == 2 and whole.valid_rows.num_tokens == 500


def test_the_type_of_a_raw_bin_follows_the_models_vocabulary(folder):
    ids = np.arange(4000) + 60_000
    ids.astype("<u4").tofile("four.bin")
    ids.astype("<u2").tofile("two.bin")
    num_tokens = lambda name, size: open_quietly(name="tokens", files=name, vocab_size=size).train_rows.num_tokens
    assert num_tokens("four.bin", 65_537) == num_tokens("two.bin", 65_536) == 3800
    with pytest.raises(ValueError, match="four.bin does not look like uint16 ids.*; use data.token_dtype=uint32"):
        num_tokens("four.bin", 65_536)
    with pytest.raises(ValueError, match="two.bin contains token id 63999, but the model has model.vocab_size=60000"):
        num_tokens("two.bin", 60_000)


def test_our_own_shards_are_known_by_their_header_with_tokenizer_and_sources(folder):
    write_many(folder, 120)
    text = open_quietly(files={"doc": "*.txt"})
    shard = text.train_rows.documents.files.paths[0]
    tokens = open_quietly(name="tokens", files=shard)
    assert tokens.source_names == ("doc",) and tokens.tokenizer.name == "bytes"
    every_part = shard.replace("tokens.bin", "*")
    assert open_quietly(name="tokens", files=every_part).fingerprint == tokens.fingerprint
    with pytest.raises(BadInput, match="tokens.bin is in data.files and in data.val_files"):
        open_quietly(name="tokens", files=shard, val_files=shard.replace(".bin", ".json"))
    np.testing.assert_array_equal(tokens.batches(4).batch(3).tokens, text.batches(4).batch(3).tokens)
    with pytest.raises(ValueError, match="contains token id 256, but .*; set model.vocab_size to"):
        open_quietly(name="tokens", files=shard, vocab_size=256)
    path = save_tokenizer(folder)
    np.arange(100, dtype="<u2").tofile("raw.bin")
    with pytest.raises(ValueError, match="contains token id 99, but data.tokenizer=.* has ids up to"):
        open_quietly(name="tokens", files="raw.bin", tokenizer=path)
    with pytest.raises(BadInput, match=f"did not produce {folder / shard}, .*end token 256"):
        open_quietly(name="tokens", files={"raw": "raw.bin", "own": shard}, tokenizer=path)


def test_a_shard_of_others_that_tells_less_is_trained_on_or_refused_in_one_line(folder):
    writer = ShardWriter(folder, "own", vocab_size=257, eos_id=256, sources=["text"])
    for _ in range(20):
        writer.add(np.arange(50), "text")
    made_with = {"name": "gone.json", "eos_token": "", "vocab_size": 257, "fingerprint": "0"}
    writer.finish(None, {"tokenizer": made_with, "text_bytes": 0, "skipped": {}, "files": []})
    opened = functools.partial(open_quietly, name="tokens", files="own.bin")
    assert opened(val_fraction=0.0).train_rows.num_documents == 20
    with pytest.raises(BadInput, match="own.bin lists files for 0 documents, but there are 20.*or data.val_fraction=0"):
        opened()
    with pytest.raises(BadInput, match="did not produce .*, which was encoded with gone.json .end token unknown"):
        opened(tokenizer="bytes")


def save_tokenizer(folder):
    path = str(folder / "tokenizer.json")
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "<eos>": 1}, merges=[])).save(path)
    return path


def test_synthetic_tokens_need_no_file_and_cover_the_vocabulary():
    corpus = open_quietly(name="synthetic", vocab_size=50, seq_len=33)
    batch = corpus.batches(64).batch(5)
    assert batch.tokens.min() == 0 and batch.tokens.max() == 49 and batch.weights.all()
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    counts = np.bincount(batch.tokens.ravel(), minlength=50)
    assert (counts > 0).all() and counts.max() < 3 * counts.mean()
    assert len(np.unique(batch.tokens, axis=0)) == 64 and corpus.tokenizer is None
    other = open_quietly(name="synthetic", vocab_size=50, seq_len=33, seed=1)
    assert not np.array_equal(other.train_rows[5].tokens, corpus.train_rows[5].tokens)
    assert not np.array_equal(corpus.valid_rows[5].tokens, corpus.train_rows[5].tokens)
    assert next(corpus.valid_batches(4, 4))[0].tokens.shape == (4, 33)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(files=""), "data.files is empty"),
        (dict(files="none.txt"), "data.files=none.txt does not exist"),
        (dict(files="none/*.txt"), "data.files=none/\\*.txt matches no file"),
        (dict(files="gs://bucket/*.txt"), "only the manifest.json of a prepared set"),
        (dict(files="empty.txt"), "empty corpus: 1 file of 0 bytes"),
        (dict(files="a.json"), "may be one JSON value or several; rename it to .jsonl"),
        (dict(files="x.bin"), "x.bin is not text by its suffix.*data.name='tokens'"),
        (dict(files="long.txt", val_files="none.txt"), "data.val_files=none.txt does not exist"),
        (dict(files="*.txt", val_files="long.txt"), "is in data.files and in data.val_files"),
        (dict(files="long.txt", tokenizer="none.json"), "data.tokenizer=none.json does not exist"),
        (
            dict(files="long.txt", vocab_size=256),
            "ids up to 256, but the model has model.vocab_size=256; set model.vocab_size to 257",
        ),
        (dict(files="long.txt", cache_dir="long.txt"), "data.cache_dir=long.txt is a file"),
        (dict(name="tokens", files="long.txt"), "long.txt is not a .bin of token ids"),
        (dict(name="tokens", files="x.bin", seq_len=64), "has 50 tokens, fewer than one sequence of seq_len=64"),
        (dict(name="tokens", files={"web": (), "x": "x.bin"}), "data.files.web is empty; set its files"),
        (dict(files="long.txt", val_files={"web": ()}), "data.val_files.web is empty; set its files"),
    ],
)
def test_what_is_wrong_is_found_before_any_text_is_read(folder, settings, message):
    (folder / "empty.txt").write_text("")
    (folder / "a.json").write_text("{}")
    (folder / "long.txt").write_text("text " * 100)
    np.arange(50, dtype="<u2").tofile("x.bin")
    sizes = {"seq_len": settings.pop("seq_len", T), "vocab_size": settings.pop("vocab_size", 257)}
    cfg = DataConfig(**{"cache_dir": "cache", **settings})
    problems = check_data(cfg, **sizes)
    assert len(problems) == 1 and "\n" not in problems[0]
    with pytest.raises(ValueError, match=message) as raised:
        open_data(cfg, seed=0, say=lambda line: None, **sizes)
    assert str(raised.value) == problems[0] and not (folder / "cache").exists()


def test_all_problems_are_told_together(folder):
    cfg = DataConfig(files=("none.txt", "gs://x"), tokenizer="none.json")
    assert len(check_data(cfg, T, 257)) == 3


def test_a_row_longer_than_the_corpus_and_an_empty_validation_set_are_errors(folder):
    (folder / "short.txt").write_text("x" * 50)
    with pytest.raises(ValueError, match="has 49 training tokens, fewer than one sequence of seq_len=64"):
        open_quietly(files="short.txt", seq_len=64)
    with pytest.raises(ValueError, match="validation set is empty .* increase data.val_fraction, or set it to 0"):
        open_quietly(files="short.txt", val_fraction=0.01)


def test_settings_survive_the_way_through_plain_data():
    values = {"files": {"web": ["a/*.txt", "b.txt"], "code": "c.py"}, "skip_batches": "((3, 5), (9, 10))"}
    cfg = from_dict(DataConfig, values)
    assert cfg.files == {"web": ("a/*.txt", "b.txt"), "code": "c.py"} and cfg.skip_batches == ((3, 5), (9, 10))
    assert from_dict(DataConfig, to_dict(cfg)) == cfg
    for wrong in ({"val_fraction": 0.9}, {"eos_id": -1}, {"skip_batches": [[5, 5]]}, {"invalid_utf8": "ignore"}):
        with pytest.raises(ValueError):
            from_dict(DataConfig, wrong)


def test_more_token_files_than_may_be_open_are_refused_before_a_batch(folder, monkeypatch):
    for number in range(40):
        np.arange(T * 4, dtype=np.uint16).tofile(folder / f"{number:02}.bin")
    monkeypatch.setattr("resource.getrlimit", lambda which: (64, 64))
    with pytest.raises(BadInput, match="40 shards and about 32 other files need 72, but the limit is 64; raise it"):
        open_quietly(name="tokens", files="*.bin", vocab_size=T * 4)
