"""What is measured of a tokenizer can be counted by hand, and adds up over blocks."""

import pytest

from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.tokenizer.config import TrainTokenizerConfig
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.runtime.text.tokenizer.train import train_tokenizer
from jaxscale.tools.corpus.prepare.tokens import add_fertility, fertility_rows, measure_fertility


def rows(measured, tokenizer):
    sums = {}
    add_fertility(sums, measured)
    return fertility_rows(sums, tokenizer)


DOCUMENTS = [
    Document("two words", source="web", language="en"),
    Document("zwei Wörter", source="web", language="de"),
    Document("three more words", source="web", language="en"),
    Document("", source="book", language="en"),
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """(a byte-level BPE, a WordPiece)."""
    folder, texts = tmp_path_factory.mktemp("fertility"), ["two words and three more words"] * 30
    made = []
    for kind, size in [("bpe", 300), ("wordpiece", 60)]:
        path = str(folder / f"{kind}.json")
        train_tokenizer(texts, TrainTokenizerConfig(kind=kind, vocab_size=size), path)
        made.append(load_tokenizer(path))
    return made


def test_bytes_are_counted_by_hand():
    table = rows(measure_fertility(load_tokenizer("bytes"), DOCUMENTS), load_tokenizer("bytes"))
    german, english = ({row[:2]: row for row in table}[key] for key in [("web", "de"), ("web", "en")])
    assert (german.documents, german.tokens, german.bytes_per_token) == (1, 12, 1.0)
    assert german.tokens_per_word == 6 and german.fallback_share == 2 / 12 and german.returned_share == 1
    assert (english.documents, english.tokens, english.tokens_per_word) == (2, 25, 5.0)
    assert english.fallback_share == 0 and english.vocabulary_share == len(set("two wordsthree more words")) / 256
    empty = next(row for row in table if row.source == "book")
    assert empty.bytes_per_token is empty.tokens_per_word is None and empty.returned_share == 1
    assert table[-1].source == "all" and table[-1].tokens == 37 and table[-1].documents == 4


def test_blocks_measured_apart_add_up_to_the_whole(tokenizers):
    for tokenizer in tokenizers:
        whole = rows(measure_fertility(tokenizer, DOCUMENTS), tokenizer)
        parts = [measure_fertility(tokenizer, DOCUMENTS[i : i + 1]) for i in range(len(DOCUMENTS))]
        for blocks in (parts, parts[::-1]):
            assert rows(sum(blocks, []), tokenizer) == whole
    assert rows([], tokenizers[0]) == []


def test_known_text_is_few_tokens_and_unknown_text_shows(tokenizers):
    byte_level, wordpiece = (
        {row.language: row for row in rows(measure_fertility(one, DOCUMENTS), one)} for one in tokenizers
    )
    assert byte_level["en"].bytes_per_token > 3 and byte_level["de"].bytes_per_token < 2
    assert byte_level["de"].fallback_share > 0 == byte_level["en"].fallback_share
    assert wordpiece["de"].fallback_share > 0 and wordpiece["de"].returned_share == 0
    assert 0 < byte_level["en"].vocabulary_share < 1
