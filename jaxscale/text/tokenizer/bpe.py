"""Trains byte-level BPE (arXiv:1508.07909; on bytes as GPT-2) and writes it as a tokenizer.json."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.config import Split
from jaxscale.text.tokenizer.split import PATTERNS, byte_alphabet


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str],
    split: Split,
    trainer: Literal["rustbpe", "tokenizers"],
) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with at most `vocab_size` ids: the bytes, the merges, then `special`.

    Both trainers count words and merge the commonest pair first; ties they decide each in its own fixed way.
    """
    num_pieces = vocab_size - len(special)
    if trainer == "rustbpe":
        vocab, merges = merges_by_rustbpe(texts, num_pieces, split)
    else:
        vocab, merges = merges_by_tokenizers(texts, num_pieces, split)
    if clash := [name for name in special if name in vocab]:
        raise BadInput(f"the special token {clash[0]!r} is a piece of text too; give it another name")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = cutter(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def cutter(split: Split) -> pre_tokenizers.PreTokenizer:
    """The first steps of a byte-level tokenizer: words, then the characters that stand for their bytes."""
    if split == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    words = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[split]), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def merges_by_tokenizers(texts: Iterable[str], num_pieces: int, split: Split) -> tuple[dict, list[tuple[str, str]]]:
    """(piece -> id, merges) trained by the tokenizers package."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cutter(split)
    alphabet = sorted(byte_alphabet())
    trainer = trainers.BpeTrainer(vocab_size=num_pieces, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def merges_by_rustbpe(texts: Iterable[str], num_pieces: int, split: Split) -> tuple[dict, list[tuple[str, str]]]:
    """(piece -> id, merges) trained by rustbpe, which keeps only the joined pieces."""
    import rustbpe

    trainer = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue] - compiled, without type stubs
    trainer.train_from_iterator(iter(texts), num_pieces, pattern=PATTERNS[split])
    ranks = {bytes(piece): i for piece, i in trainer.get_mergeable_ranks()}
    if len(ranks) != trainer.vocab_size:
        raise RuntimeError("rustbpe gave two ids to one piece")
    character_of = {byte: character for character, byte in byte_alphabet().items()}
    spelt = {piece: "".join(character_of[byte] for byte in piece) for piece in ranks}
    joined = sorted((i, piece) for piece, i in ranks.items() if len(piece) > 1)
    merges = [(spelt[left], spelt[right]) for left, right in (halves(piece, ranks) for _, piece in joined)]
    return {spelt[piece]: i for piece, i in ranks.items()}, merges


def halves(piece: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two pieces that were joined to `piece`: what the merges before it make of its bytes."""
    parts, own = [piece[i : i + 1] for i in range(len(piece))], ranks[piece]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], own), i) for i in range(len(parts) - 1))
        if rank >= own:
            raise RuntimeError(f"the piece {piece!r} is not made by one merge")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
