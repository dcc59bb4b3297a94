"""Pre-tokenization patterns of GPT-2, cl100k and o200k, and how tokenizer.json files spell them."""

from collections.abc import Mapping
from typing import Any

from jaxscale.runtime.text.tokenizer.config import Split

# GPT-2: github.com/openai/gpt-2 src/encoder.py; the others: github.com/openai/tiktoken tiktoken_ext/openai_public.py.
# Possessive quantifiers are left out of the latter two, since Oniguruma (tokenizers) reads `{1,3}+` as something else;
# they save time and change no match. cl100k is also the pattern of Llama 3.
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
# Other spellings in published files: GPT-2's original, with separate contractions.
SPELLINGS: dict[str, Split] = {
    **{pattern: name for name, pattern in PATTERNS.items()},
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
}


def byte_alphabet() -> dict[str, int]:
    """Returns {character: byte} of byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def split_of(spec: Mapping[str, Any]) -> Split | None:
    """Returns the split pattern of a plain byte-level BPE tokenizer.json; None for other tokenizers.

    spec: the parsed JSON. Plain: no normalizer, prefix space, dropout or affixes.
    """
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
    """Returns True for a ByteLevel step without prefix space. use_regex: splits words as GPT-2."""
    return (
        step.get("type") == "ByteLevel"
        and not step.get("add_prefix_space", True)
        and bool(step.get("use_regex", True)) == use_regex
    )
