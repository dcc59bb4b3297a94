"""Trains a tokenizer on a sample of the corpus and writes a tokenizer.json or a SentencePiece .model."""

import hashlib
import heapq
import importlib.metadata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxscale.system import packages
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import write_bytes_atomic
from jaxscale.text.tokenizer.config import TrainTokenizerConfig, special_names

PIECE_CHARACTERS = 1 << 20  # of a document, sampled as one


class Trained(NamedTuple):
    """The trained tokenizer and how it was made."""

    path: str
    trainer: str  # the package and its version
    vocab_size: int  # fewer than asked for if the text gave no more
    documents: int  # in the sample; a very long one counts once per piece
    text_bytes: int
    sha256: str  # of the file


def train_tokenizer(texts: Iterable[str], cfg: TrainTokenizerConfig, path: str | Path) -> Trained:
    """Trains on a sample of `texts` and writes `path`; equal texts in any order give equal bytes.

    path: ends in cfg.ending. Raises: BadInput if it does not, if a package is missing, or if the
    texts hold too little for the vocabulary.
    """
    path = Path(path)
    if path.suffix != cfg.ending:
        raise BadInput(f"{path}: a tokenizer of kind={cfg.kind} is written as {cfg.ending}; rename it")
    package = cfg.trainer if cfg.kind == "bpe" else "sentencepiece" if cfg.is_sentencepiece else "tokenizers"
    if not packages.is_installed(package):
        raise BadInput(f"trainer={package} is not installed: pip install 'jaxscale[prepare]'")
    chosen = sample(texts, cfg.sample_bytes, cfg.seed)
    if not chosen:
        raise BadInput(f"no text to train {path} on, or none that fits in sample_bytes={cfg.sample_bytes}")
    content, vocab_size = trained(chosen, cfg)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, content)  # who finds the file takes it for whole
    return Trained(
        path=str(path),
        trainer=f"{package} {importlib.metadata.version(package)}",
        vocab_size=vocab_size,
        documents=len(chosen),
        text_bytes=sum(len(text.encode()) for text in chosen),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def trained(texts: list[str], cfg: TrainTokenizerConfig) -> tuple[bytes, int]:
    """(a tokenizer.json or a SentencePiece .model, its number of ids)."""
    from jaxscale.text.tokenizer import bpe, sentencepiece, wordpiece  # around heavy packages

    if cfg.is_sentencepiece:
        return sentencepiece.train_sentencepiece(texts, cfg)
    if cfg.kind == "wordpiece":
        tokenizer = wordpiece.train_wordpiece(texts, cfg)
    else:
        tokenizer = bpe.train_bpe(texts, cfg.vocab_size, special_names(cfg), cfg.split, cfg.trainer)
    return tokenizer.to_str(pretty=True).encode(), tokenizer.get_vocab_size(with_added_tokens=True)


def sample(texts: Iterable[str], sample_bytes: int, seed: int) -> list[str]:
    """Of `texts`, those with the smallest hashes, up to `sample_bytes` of UTF-8, in the order of the hashes.

    So the order of `texts` does not matter, nor how they were divided among workers, and another seed chooses others.
    Memory: at most sample_bytes and one piece of a document; documents are cut after PIECE_CHARACTERS characters.
    """
    key = seed.to_bytes(16, "little", signed=True)
    kept: list[tuple[int, bytes]] = []  # a heap, largest hash first
    size, limit = 0, 1 << 128  # what has this hash or a larger one is out: with the smaller ones it is too much
    for text in pieces(texts):
        raw = text.encode()
        order = int.from_bytes(hashlib.blake2b(raw, digest_size=16, key=key).digest(), "big")
        if order >= limit:
            continue
        heapq.heappush(kept, (-order, raw))
        size += len(raw)
        while size > sample_bytes:
            out, raw = heapq.heappop(kept)
            size, limit = size - len(raw), -out
    return [raw.decode() for _, raw in sorted(kept, reverse=True)]


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """The texts, long ones in pieces; empty ones are left out."""
    for text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            yield text[start : start + PIECE_CHARACTERS]
