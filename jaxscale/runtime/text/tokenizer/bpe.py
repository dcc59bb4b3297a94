"""Trains byte-level BPE (arXiv:1508.07909, on bytes as in GPT-2), and defines patterns that split text into words."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxscale.runtime.text.tokenizer.config import Split
from jaxscale.system.exits import BadInput

# GPT-2: github.com/openai/gpt-2 src/encoder.py; the others: github.com/openai/tiktoken tiktoken_ext/openai_public.py.
# The last two have no possessive quantifiers here, because Oniguruma (tokenizers) parses `{1,3}+` differently; such
# quantifiers save time without changing matches. cl100k is also the pattern of Llama 3.
PATTERNS: dict[Split, str] = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
# Includes a different form in published files: GPT-2's original, with separate contractions.
SPELLINGS: dict[str, Split] = {
    **{pattern: name for name, pattern in PATTERNS.items()},
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
}


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str],
    split: Split,
    trainer: Literal["rustbpe", "tokenizers"],
) -> tokenizers.Tokenizer:
    """Trains a byte-level tokenizer with up to `vocab_size` ids. The trainers differ, but each is deterministic."""
    num_pieces = vocab_size - len(special)
    if trainer == "rustbpe":
        vocab, merges = merges_by_rustbpe(texts, num_pieces, split)
    else:
        vocab, merges = merges_by_tokenizers(texts, num_pieces, split)
    if clash := [name for name in special if name in vocab]:
        raise BadInput(f"the special token {clash[0]!r} is also an ordinary token; rename it")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = make_pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def make_pre_tokenizer(split: Split) -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer of byte-level BPE, which splits text into words and maps bytes to characters."""
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
    """Returns ({piece: id}, merges) trained by rustbpe, which only returns merged pieces."""
    import rustbpe

    trainer = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue] - compiled, without type stubs
    trainer.train_from_iterator(iter(texts), num_pieces, pattern=PATTERNS[split])
    ranks = {bytes(piece): i for piece, i in trainer.get_mergeable_ranks()}
    if len(ranks) != trainer.vocab_size:
        raise RuntimeError("rustbpe returned two ids for the same token")
    character_of = {byte: character for character, byte in byte_alphabet().items()}
    spelt = {piece: "".join(character_of[byte] for byte in piece) for piece in ranks}
    joined = sorted((i, piece) for piece, i in ranks.items() if len(piece) > 1)
    merges = [(spelt[left], spelt[right]) for left, right in (halves(piece, ranks) for _, piece in joined)]
    return {spelt[piece]: i for piece, i in ranks.items()}, merges


def halves(piece: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """Returns the two pieces that are merged into `piece`, found by applying all earlier merges to its bytes."""
    parts, piece_rank = [piece[i : i + 1] for i in range(len(piece))], ranks[piece]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], piece_rank), i) for i in range(len(parts) - 1))
        if rank >= piece_rank:
            raise RuntimeError(f"the token {piece!r} is not the result of a single merge")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def byte_alphabet() -> dict[str, int]:
    """Returns {character: byte} as used in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def split_of(spec: Mapping[str, Any]) -> Split | None:
    """Returns the name of a tokenizer.json's split pattern, or None if it is not plain byte-level BPE."""
    model = spec.get("model") or {}
    if model.get("type") != "BPE" or spec.get("normalizer"):
        return None
    affixes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if any(model.get(name) for name in affixes) or not byte_alphabet().keys() <= model["vocab"].keys():
        return None
    pre_tokenizer = spec.get("pre_tokenizer") or {}
    if is_byte_level(pre_tokenizer, use_regex=True):
        return "gpt2"
    steps = pre_tokenizer.get("pretokenizers", []) if pre_tokenizer.get("type") == "Sequence" else []
    if len(steps) == 2 and steps[0].get("type") == "Split" and is_byte_level(steps[1], use_regex=False):
        pattern = steps[0].get("pattern", {}).get("Regex")
        plain = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        return SPELLINGS.get(pattern) if plain else None
    return None


def is_byte_level(step: Mapping[str, Any], *, use_regex: bool) -> bool:
    """Returns True for a ByteLevel step without a prefix space that has this value of `use_regex`."""
    return (
        step.get("type") == "ByteLevel"
        and not step.get("add_prefix_space", True)
        and bool(step.get("use_regex", True)) == use_regex
    )
