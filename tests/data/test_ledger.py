"""The ledger says what a batch holds, letter for letter, and both of its directions agree over a whole epoch."""

import dataclasses
import random

import numpy as np
import pytest

from jaxscale.runtime.data import array_folder
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.ledger import Ledger, publish_names
from jaxscale.runtime.data.objective_config import MaskedLmConfig, NextTokenConfig, SpanCorruptionConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.shard_writer import ShardWriter, lineage_table
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer

T, ROWS = 32, 6
OBJECTIVES = {
    "next_token": NextTokenConfig(),
    "masked_lm": MaskedLmConfig(mask_id=257),
    "span_corruption": SpanCorruptionConfig(first_sentinel_id=257, num_sentinels=32),
}


def documents():
    """70 documents of 1 to 150 letters from two sources and three files."""
    draw = random.Random(5)
    for number in range(70):
        source = ("web", "books")[number % 2]
        text = "".join(draw.choices("abcdefghij \n", k=draw.randint(1, 150)))
        yield Document(text, source, f"{source}/{number % 3}.jsonl", offset=100 * number, id=f"id-{number}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The documents as three shards, the last without lineage."""
    folder, every = tmp_path_factory.mktemp("shards"), list(documents())
    for name, part in (("a", every[:30]), ("b", every[30:55]), ("c", every[55:])):
        write_shard(folder, name, part, lineage=name != "c")
    return folder


def write_shard(folder, name, part, lineage=True):
    writer, tokenizer = ShardWriter(folder, name, vocab_size=257, eos_id=256, sources=["web", "books"]), ByteTokenizer()
    for document in part:
        writer.add(tokenizer.encode(document.text), document.source)
    made_by = {"name": "bytes", "eos_token": "", "vocab_size": 257, "fingerprint": tokenizer.fingerprint}
    header = {"tokenizer": made_by, "eos_id": 256, "text_bytes": 0, "skipped": {}}
    header["files"] = [{"name": "part of " + name, "source": "web", "documents": len(part)}]
    writer.finish(tokenizer.token_bytes, header, lineage=lineage_table(part) if lineage else None)


def open_ledger(folder, packing="best_fit", mixture=None, skipped=(), val_fraction=0.0, objective="next_token"):
    cfg = DataConfig(
        name="tokens", files=str(folder / "*.bin"), tokenizer="bytes", packing=packing, mixture=mixture or {},
        val_fraction=val_fraction, cache_dir=str(folder / "cache"), objective=OBJECTIVES[objective],
    )  # fmt: skip
    corpus = open_data(cfg, seq_len=T, vocab_size=300, seed=3, say=lambda line: None)
    return Ledger(corpus, corpus.batches(ROWS), skipped)


def with_names(ledger, folder):
    """The same ledger over a set that has an index of names beside it, which was written in many buckets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_folder, "BUCKET_RECORDS", 20)
        publish_names(folder, ledger.corpus.shards)
    return Ledger(dataclasses.replace(ledger.corpus, published=str(folder)), ledger.batches, ledger.skipped)


def text_of(folder, entry):
    """The text of the listed piece, found by its id, or by its number where the shard does not know more."""
    every = {document.id: document for document in documents()}
    if not entry.id:
        assert entry.shard == str(folder / "c.bin") and (entry.file, entry.offset) == ("part of c", -1)
    found = every[entry.id or f"id-{55 + entry.number}"]
    assert entry.source == found.source
    assert not entry.id or (entry.file, entry.offset) == (found.file, found.offset)
    return (found.text + "$")[entry.first_token : entry.first_token + entry.tokens]


@pytest.mark.cases(8)
@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("mixture", [None, {"web": 0.7, "books": 0.3}], ids=["together", "mixture"])
@pytest.mark.parametrize("val_fraction", [0.0, 0.2])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_listed_documents_are_the_tokens_of_the_batch(folder, packing, mixture, val_fraction, objective):
    ledger = open_ledger(folder, packing, mixture, val_fraction=val_fraction, objective=objective)
    for step in random.Random(1).sample(range(1000), 12):
        batch, packed = ledger.batches.batch(step), ledger.batches.text(step)
        if objective == "next_token":
            assert np.array_equal(batch.tokens, packed.tokens)
        else:  # of which only BERT's has the text as it was, in its targets
            assert not np.array_equal(batch.tokens, packed.tokens)
            assert objective != "masked_lm" or np.array_equal(batch.targets, packed.tokens)
        written = [["" for _ in range(T)] for _ in range(ROWS)]
        for entry in ledger.batch(ledger.batch_of(step)):
            text = text_of(folder, entry)
            assert len(text) == entry.tokens
            for i, letter in enumerate(text):
                written[entry.row][entry.begin + i] = letter
            assert ledger.text(entry, ledger.batches.text(step).tokens, 20) == text.rstrip("$")[:20]
        for row in range(ROWS):
            shown = [chr(t) if t < 256 else "$" for t in packed.tokens[row][packed.segment_ids[row] > 0]]
            assert shown == [letter for letter in written[row] if letter]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "mixture"), [("best_fit", {"0": {"web": 1.0}, "9 steps": {"web": 0.4, "books": 0.6}}), ("concat", None)]
)
def test_the_steps_of_a_document_are_those_that_list_it(folder, packing, mixture):
    skipped = [(2, 4), (10, 11)]
    ledger = open_ledger(folder, packing, mixture, skipped)
    steps = len(ledger.corpus.train_rows) * 2 // ROWS + 2  # two epochs
    listed = {}
    for step in range(steps):
        for entry in ledger.batch(ledger.batch_of(step)):
            listed.setdefault((entry.shard, entry.number), []).append((step, entry))
    for shard, count in (("a", 30), ("b", 25), ("c", 15)):
        for number in range(count):
            path = str(folder / f"{shard}.bin")
            expected = sorted(listed.get((path, number), []), key=lambda sight: (sight[0], sight[1].row))
            names = [f"{path}:{number}"] + ([expected[0][1].name] if expected else [])
            for name in names:
                assert ledger.steps_of(name, steps) == expected
    one = next(entry for _, entry in listed[(str(folder / "a.bin"), 4)])
    assert ledger.steps_of(f"{one.file}:{one.offset}", steps) == ledger.steps_of(one.id, steps)


def test_a_document_that_is_not_there_or_held_out_is_an_error(folder):
    ledger = open_ledger(folder, val_fraction=0.2)
    with pytest.raises(ValueError, match="no document of the corpus has this id or location"):
        ledger.steps_of("id-999", 5)
    rows, shard = ledger.corpus.train_rows, ledger.corpus.shards[0]
    assert rows.num_documents < open_ledger(folder).corpus.train_rows.num_documents
    missing = next(n for n in range(len(shard.source_ids)) if rows.documents.rank("train", 0, n) is None)
    with pytest.raises(ValueError, match="is empty or in the validation set"):
        ledger.steps_of(f"{shard.bin_path}:{missing}", 5)


def test_synthetic_tokens_have_no_documents():
    corpus = open_data(DataConfig(name="synthetic"), seq_len=T, vocab_size=9, seed=0, say=lambda line: None)
    with pytest.raises(ValueError, match="so there are no documents to trace"):
        Ledger(corpus, corpus.batches(2))


@pytest.mark.parametrize("indexed", [False, True])
def test_ids_and_places_are_taken_literally(folder, tmp_path, indexed):
    ledger = open_ledger(folder)
    if indexed:
        ledger = with_names(ledger, tmp_path)
        assert all(ledger.find(f"id-{n}") == [(n // 30, n % 30)] for n in range(55)) and ledger._names is not None
    steps = len(ledger.corpus.train_rows) // ROWS + 1
    sights = ledger.steps_of("id-7", steps)
    assert sights and {entry.id for _, entry in sights} == {"id-7"}
    assert ledger.steps_of("books/1.jsonl:700", steps) == sights
    wrong = ("id-.", "id-*", "ID-7", "-7", "books/1.jsonl:70", "books/.*:700", "1.jsonl:700")
    for name in (*wrong, *(f"books/1.jsonl:{'9' * digits}" for digits in (20, 5000))):
        with pytest.raises(ValueError, match="no document of the corpus"):
            ledger.steps_of(name, steps)


def test_a_shard_that_two_sources_name_is_found_in_both(folder):
    path, make = str(folder / "a.bin"), dict(name="tokens", val_fraction=0.0, cache_dir=str(folder / "cache"))
    cfg = DataConfig(files={"one": path, "two": path}, **make)
    corpus = open_data(cfg, seq_len=T, vocab_size=300, seed=3, say=lambda line: None)
    ledger, steps = Ledger(corpus, corpus.batches(ROWS)), len(corpus.train_rows) // ROWS + 1
    listed = [
        (step, entry) for step in range(steps) for entry in ledger.batch(ledger.batch_of(step)) if entry.number == 4
    ]
    assert len(listed) > 1 and ledger.steps_of(f"{path}:4", steps) == listed


def test_of_documents_with_one_id_those_in_training_are_listed(tmp_path):
    twins = [dataclasses.replace(document, id=f"id-{n % 24}") for n, document in enumerate(documents())]
    write_shard(tmp_path, "a", twins)
    ledger = with_names(open_ledger(tmp_path, val_fraction=0.4), tmp_path)
    steps, kinds = len(ledger.corpus.train_rows) // ROWS + 1, set()
    for name in sorted({twin.id for twin in twins}):
        rows = ledger.corpus.train_rows
        firsts = rows.documents.files.first_documents
        trained = [len(rows.rows_of(int(firsts[at]) + number)) > 0 for at, number in ledger.find(name)]
        kinds.add((trained[0], any(trained)))
        if any(trained):
            offsets = {entry.offset for _, entry in ledger.steps_of(name, steps)}
            numbers = [n for n, twin in enumerate(twins) if twin.id == name]
            assert offsets == {100 * n for n, inside in zip(numbers, trained) if inside}
        else:
            with pytest.raises(ValueError, match="each of the [23] documents of this name.* in the validation set"):
                ledger.steps_of(name, steps)
    assert {(False, True), (True, True), (False, False)} <= kinds
