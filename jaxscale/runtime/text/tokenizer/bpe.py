"""Trains byte-level BPE (arXiv:1508.07909; on bytes as GPT-2) and writes it as a tokenizer.json."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxscale.runtime.text.tokenizer.config import Split
from jaxscale.runtime.text.tokenizer.pretokenize import PATTERNS, byte_alphabet
from jaxscale.system.exits import BadInput


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str],
    split: Split,
    trainer: Literal["rustbpe", "tokenizers"],
) -> tokenizers.Tokenizer:
    """Trains a byte-level tokenizer with at most `vocab_size` ids: bytes, merges, then `special`.

    Both trainers count words and merge the most frequent pair first; each has its own deterministic tie-breaking.
    """
    num_pieces = vocab_size - len(special)
    if trainer == "rustbpe":
        vocab, merges = merges_by_rustbpe(texts, num_pieces, split)
    else:
        vocab, merges = merges_by_tokenizers(texts, num_pieces, split)
    if clash := [name for name in special if name in vocab]:
        raise BadInput(f"the special token {clash[0]!r} is also a piece of text; give it another name")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = make_pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def make_pre_tokenizer(split: Split) -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer of a byte-level tokenizer: words, then the characters of their bytes."""
    if split == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[split]), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def merges_by_tokenizers(texts: Iterable[str], num_pieces: int, split: Split) -> tuple[dict, list[tuple[str, str]]]:
    """Returns ({piece: id}, merges) trained by the tokenizers package."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = make_pre_tokenizer(split)
    alphabet = sorted(byte_alphabet())
    trainer = trainers.BpeTrainer(vocab_size=num_pieces, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def merges_by_rustbpe(texts: Iterable[str], num_pieces: int, split: Split) -> tuple[dict, list[tuple[str, str]]]:
    """Returns ({piece: id}, merges) trained by rustbpe, which returns only the joined pieces."""
    import rustbpe

    trainer = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue] - compiled, without type stubs
    trainer.train_from_iterator(iter(texts), num_pieces, pattern=PATTERNS[split])
    ranks = {bytes(piece): i for piece, i in trainer.get_mergeable_ranks()}
    if len(ranks) != trainer.vocab_size:
        raise RuntimeError("rustbpe returned two ids for one piece")
    character_of = {byte: character for character, byte in byte_alphabet().items()}
    spelt = {piece: "".join(character_of[byte] for byte in piece) for piece in ranks}
    joined = sorted((i, piece) for piece, i in ranks.items() if len(piece) > 1)
    merges = [(spelt[left], spelt[right]) for left, right in (halves(piece, ranks) for _, piece in joined)]
    return {spelt[piece]: i for piece, i in ranks.items()}, merges


def halves(piece: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """Returns the two pieces that were merged into `piece`, by applying the earlier merges to its bytes."""
    parts, piece_rank = [piece[i : i + 1] for i in range(len(piece))], ranks[piece]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], piece_rank), i) for i in range(len(parts) - 1))
        if rank >= piece_rank:
            raise RuntimeError(f"the piece {piece!r} is not the result of one merge")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
