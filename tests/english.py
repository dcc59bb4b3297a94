"""Real English documents for the tests that compare and measure; they stay out of the repository."""

import gzip
import json
import pathlib
import re

import numpy as np
import pytest

CORPORA = pathlib.Path(__file__).parents[2] / "shared" / "corpora"


def english_documents(most: int = 6000) -> list[str]:
    """Web pages, books, encyclopedia and forum texts from ../shared/corpora; skips the test where they are absent."""
    if not CORPORA.is_dir():
        pytest.skip(f"needs the corpora at {CORPORA}")
    texts = [*c4(), *dolma(), *openwebtext(), *books(), *wikipedia(), *forum()]
    step = max(1, -(-len(texts) // most))
    return [text for text in texts[::step] if text.strip()]


def c4() -> list[str]:
    import pyarrow.parquet as pq

    (path,) = (CORPORA / "web_c4").glob("*.parquet")
    return pq.read_table(path, columns=["text"]).column("text").to_pylist()


def dolma() -> list[str]:
    (path,) = (CORPORA / "web_dolma").glob("*.json.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def openwebtext() -> list[str]:
    """The documents of Megatron's fixture, decoded with GPT-2's vocabulary."""
    from tokenizers import ByteLevelBPETokenizer

    folder = CORPORA / "tokenizers"
    tokenizer = ByteLevelBPETokenizer(str(folder / "gpt2_vocab.json"), str(folder / "gpt2_merges.txt"))
    (path,) = (CORPORA / "web_openwebtext").glob("*.bin")
    header = path.with_suffix(".idx").read_bytes()
    count = int.from_bytes(header[18:26], "little")  # after magic (9), version (8) and type (1)
    sizes = np.frombuffer(header, np.int32, count, offset=34)
    rows = np.split(np.fromfile(path, np.uint16), np.cumsum(sizes)[:-1])
    return tokenizer.decode_batch([row.tolist() for row in rows])


def pieces(text: str, characters: int, end: str = "\n\n") -> list[str]:
    """The text cut into pieces of about so many characters, at paragraph ends."""
    cut: list[str] = []
    held: list[str] = []
    for paragraph in text.split(end):
        held.append(paragraph)
        if sum(map(len, held)) >= characters:
            cut.append(end.join(held))
            held = []
    return [*cut, end.join(held)] if held else cut


def books() -> list[str]:
    texts = []
    for path in sorted((CORPORA / "gutenberg").glob("*.txt.gz")):
        raw = gzip.decompress(path.read_bytes())
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:  # one of the books is older than UTF-8
            text = raw.decode("cp1252", "replace")
        texts += pieces(text.replace("\r\n", "\n"), 3000)
    return texts


def wikipedia() -> list[str]:
    text = (CORPORA / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")
    articles = re.split(r"\n(?= = [^=])", text)
    return [piece for article in articles for piece in pieces(article, 3000, "\n \n")]


def forum() -> list[str]:
    texts = []
    for path in sorted((CORPORA / "web_forum").glob("*.txt")):
        texts += pieces(path.read_bytes().decode("utf-8", "replace"), 3000, "\n")
    return texts
