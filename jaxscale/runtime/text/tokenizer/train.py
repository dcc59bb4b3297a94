"""Trains a tokenizer on a sample of the corpus, and writes a tokenizer.json or a SentencePiece .model."""

import hashlib
import heapq
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jaxscale.runtime.text.tokenizer.config import TrainTokenizerConfig, special_names
from jaxscale.system import packages
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import write_bytes_atomic

PIECE_CHARACTERS = 1 << 20  # documents are sampled in pieces of this length


class TrainedTokenizer(NamedTuple):
    """A trained tokenizer file, with facts about the training."""

    path: str
    trainer: str  # package and version
    vocab_size: int  # less than requested if the text has fewer pieces
    documents: int  # documents in the sample; long documents count once per piece
    text_bytes: int
    sha256: str  # hash of the file


def train_tokenizer(texts: Iterable[str], cfg: TrainTokenizerConfig, path: str | Path) -> TrainedTokenizer:
    """Trains a tokenizer on a sample of `texts` and writes it to `path`. The order of `texts` has no effect."""
    path = Path(path)
    if path.suffix != cfg.ending:
        raise BadInput(f"{path}: a tokenizer of kind={cfg.kind} must have the suffix {cfg.ending}; rename it")
    package = cfg.trainer if cfg.kind == "bpe" else "sentencepiece" if cfg.is_sentencepiece else "tokenizers"
    if not packages.is_installed(package):
        raise BadInput(f"trainer={package} is not installed: pip install 'jaxscale[prepare]'")
    sampled = sample(texts, cfg.sample_bytes, cfg.seed)
    if not sampled:
        raise BadInput(
            f"{path} cannot be trained: there is no text, or no text fits in sample_bytes={cfg.sample_bytes}; add "
            "text, or increase sample_bytes"
        )
    content, vocab_size = train(sampled, cfg)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, content)  # readers assume that the file is complete
    return TrainedTokenizer(
        path=str(path),
        trainer=f"{package} {importlib.metadata.version(package)}",
        vocab_size=vocab_size,
        documents=len(sampled),
        text_bytes=sum(len(text.encode()) for text in sampled),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def train(texts: list[str], cfg: TrainTokenizerConfig) -> tuple[bytes, int]:
    """Returns (content of the tokenizer.json or SentencePiece .model, number of ids)."""
    from jaxscale.runtime.text.tokenizer import bpe, huggingface, sentencepiece  # heavy dependencies

    if cfg.is_sentencepiece:
        return sentencepiece.train_sentencepiece(texts, cfg)
    if cfg.kind == "wordpiece":
        tokenizer = huggingface.train_wordpiece(texts, cfg)
    else:
        tokenizer = bpe.train_bpe(texts, cfg.vocab_size, special_names(cfg), cfg.split, cfg.trainer)
    return tokenizer.to_str(pretty=True).encode(), tokenizer.get_vocab_size(with_added_tokens=True)


def sample(texts: Iterable[str], sample_bytes: int, seed: int) -> list[str]:
    """Returns the texts with the smallest hashes, at most `sample_bytes` of UTF-8, sorted by hash.

    The sample depends on the seed but not on the order of `texts`. Long documents are split into pieces.
    """
    key = seed.to_bytes(16, "little", signed=True)
    heap: list[tuple[int, bytes]] = []  # max-heap by hash
    size, limit = 0, 1 << 128  # larger hashes are excluded
    pieces = (text[at : at + PIECE_CHARACTERS] for text in texts for at in range(0, len(text), PIECE_CHARACTERS))
    for raw in map(str.encode, pieces):
        order = int.from_bytes(hashlib.blake2b(raw, digest_size=16, key=key).digest(), "big")
        if order >= limit:
            continue
        heapq.heappush(heap, (-order, raw))
        size += len(raw)
        while size > sample_bytes:
            negative_hash, raw = heapq.heappop(heap)
            size, limit = size - len(raw), -negative_hash
    return [raw.decode() for _, raw in sorted(heap, reverse=True)]
