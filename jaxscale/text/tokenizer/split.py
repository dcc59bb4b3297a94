"""Pre-tokenization patterns of GPT-2, cl100k and o200k, and how tokenizer.json files spell them."""

from collections.abc import Mapping
from typing import Any

from jaxscale.text.tokenizer.config import Split

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
# Other spellings seen in published files: GPT-2's own, with its contractions one by one.
SPELLINGS: dict[str, Split] = {
    **{pattern: name for name, pattern in PATTERNS.items()},
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
}


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table) -> the byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def split_of(spec: Mapping[str, Any]) -> Split | None:
    """The pattern of a tokenizer.json that is plain byte-level BPE; None if it is anything else, or changes the text.

    spec: the file's parsed JSON. Plain: no normalizer, no space put before the text, no dropout, no affixes to pieces.
    """
    model = spec.get("model") or {}
    if model.get("type") != "BPE" or spec.get("normalizer"):
        return None
    affixes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if any(model.get(name) for name in affixes) or not byte_alphabet().keys() <= model["vocab"].keys():
        return None
    cutter = spec.get("pre_tokenizer") or {}
    if is_byte_level(cutter, use_regex=True):
        return "gpt2"
    steps = cutter.get("pretokenizers", []) if cutter.get("type") == "Sequence" else []
    if len(steps) == 2 and steps[0].get("type") == "Split" and is_byte_level(steps[1], use_regex=False):
        pattern = steps[0].get("pattern", {}).get("Regex")
        plain = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        return SPELLINGS.get(pattern) if plain else None
    return None


def is_byte_level(step: Mapping[str, Any], *, use_regex: bool) -> bool:
    """True for a ByteLevel step that puts no space before the text; use_regex: it cuts words as GPT-2 does."""
    return (
        step.get("type") == "ByteLevel"
        and not step.get("add_prefix_space", True)
        and bool(step.get("use_regex", True)) == use_regex
    )
