"""Selects the fastest installed encoder for byte-level BPE (gigatoken, then tiktoken), and verifies its ids.

The reference is the `tokenizers` package, which supports every tokenizer.json. A fast encoder is used only for files
with a known split pattern, and only if its ids equal the reference for the probe texts below. During encoding, a sample
of documents is also compared.
"""

import concurrent.futures
import functools
import json
import multiprocessing
import os
import re
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.runtime.text.tokenizer.base import Encode, EncodedBlock, concat_block
from jaxscale.runtime.text.tokenizer.bpe import PATTERNS, byte_alphabet, split_of
from jaxscale.runtime.text.tokenizer.config import EncodeConfig, Split
from jaxscale.system import packages
from jaxscale.system.exits import BadInput

# gigatoken caches every word (about 110 bytes per word, measured 2026-11). The encoder is recreated, in about 0.3 s,
# when the process has grown by CACHE_BYTES, or after CACHE_TEXT_BYTES of text if the process size is unknown.
CACHE_BYTES = 512 << 20
CACHE_TEXT_BYTES = 4 << 30
CACHE_CHECK_BYTES = 64 << 20  # bytes of text between checks
PIECES = 512  # number of vocabulary pieces that are encoded as probes
TEXTS_AT_ONCE = 64  # texts that are searched together for newer characters: texts of 4 kB fit the cache of a core
FIRST_NEWER = 0x800  # lower code points have not changed since 2018
# The classes of letters, digits and marks, and so the splits of a text, depend on a package's Unicode version. In
# 2026-11, tokenizers 0.23 and tiktoken 0.14 have 16.0, and gigatoken 0.10 has 17.0. Of 132,189 compared characters, 359
# (patterns of GPT-2 and cl100k) and 401 (o200k) differ, all new in 17.0.
# New letters, digits and marks of Unicode 17.0 (unicode.org/Public/17.0.0/ucd), in case Python already has 17.0.
NEW_IN_17 = (
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0xA7CE, 0xA7CF),
    (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4), (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x10EFA, 0x10EFB),
    (0x11B60, 0x11B67), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9), (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3),
    (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E), (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE),
    (0x1E6E0, 0x1E6F5), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
)  # fmt: skip
# Probe texts.
WORDS = "It's we'll THEY'RE I'd'Ve don't'S rock'n'roll 'tis ''s o’clock I'ſ x'ſſ ﬁne straße İstanbul Ǆ ǆ ǅ ᾳ ª º"
DIGITS = "1 12 123 1234 1234567 3.14159 1,000,000 ١٢٣٤٥ १२३४ ⅷ ½ ² ₃ ④ 𝟘𝟙𝟚 ⁵⁶x7 a1b22c333d4444 v1.2.3-rc4"
SPACES = (
    "a b  c   d\te\t\tf\n\ng \n h\r\ni\r\r\nj \r\n\r\n k\u00a0l\u2003\u2003m\u2028n\u3000o\u200bp\x0bq\x0c\x85r\u1680 s"
)
SIGNS = (
    '!!! ... ?!?! --- #!/bin/sh a/b//c/ {}[]() <|x|> ==> $5 €6 £7 "q" “q” «q» …— \\n \\ `x` ~~~ @user #tag & /\r\n/\n'
)
SCRIPTS = (
    "Ελληνικά ёлка हिन्दी தமிழ் ภาษาไทย العَرَبِيَّة עִבְרִית 日本語テキスト 中文，标点。 한국어 조선말 ქართული አማርኛ "
    "ខ្មែរ བོད་ᏣᎳᎩ 𐐷𐐯 𝓪𝓫 𒀀𒁀 𠀀𠮷 ꙮ"
)
EMOJI = "👩‍🔬 👨‍👩‍👧‍👦 🇩🇪🇫🇷 ☂️ 👍🏽 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ♥︎ 😀😃"
MARKS = "e\u0301 n\u0303o Z\u0351\u0352\u0353a\u0334lgo \u0301lone ﷽ ﬀ Å Å K 가 각"
CONTROLS = "\x00\x01\x7f\x80\x9f\ufeff\u00ad\u202e\u2066\ufffd\ufffe\uffff\U0010ffff\ue000\u0378\U000e0001 end\x00"
CODE = "def f(x: int) -> str:\n    if x == 0:\n\t\treturn 'a' * 10  # ok\n\n\n\nclass A_b2C:\n        pass\r\n"
EDGES = (
    "", " ", "  ", "\n", "\r\n", "\t ", "a", " a", "a ", "  a", "\n\n  a  \n", "'", "'s", " 's", "1", "é", "字", "\x00",
)  # fmt: skip
RUNS = ("a" * 300, " " * 300 + "x", "\n" * 99, "1" * 99, "!" * 99, "ab" * 150, "日" * 99, " \n" * 60, "😀" * 40)
TEXTS = (WORDS, DIGITS, SPACES, SIGNS, SCRIPTS, EMOJI, MARKS, CONTROLS, CODE)
HASHED_CHARACTERS = 256  # first characters of a document, whose hash selects documents to compare
SHOWN_CHARACTERS, SHOWN_IDS = 120, 12


def make_encode(path: str, spec: Mapping[str, Any], exact: Encode, cfg: EncodeConfig) -> tuple[str, Encode]:
    """Returns (package, encode) for a tokenizer.json with the parsed content `spec`. `exact` is the reference encoder.

    Raises BadInput if cfg.encoder is not installed or does not support the file, or if its ids differ from `exact`.
    """
    if cfg.encoder == "exact":
        return "tokenizers", exact
    split = split_of(spec)
    named = [entry["content"] for entry in spec.get("added_tokens") or []]
    plain = [entry["content"] for entry in spec.get("added_tokens") or [] if not entry.get("special")]
    for name, make in (("gigatoken", make_gigatoken), ("tiktoken", make_tiktoken)):
        if cfg.encoder not in ("auto", name):
            continue
        if not packages.is_installed(name):
            made = f"{name} is not installed: pip install 'jaxscale[prepare]'"
        elif split is None:
            made = "the tokenizer is not a byte-level BPE with the split pattern of GPT-2, cl100k or o200k"
        else:
            made = make(spec, split, exact)
        if isinstance(made, str):
            if cfg.encoder == "auto":
                continue
            raise BadInput(f"encoder={name} is not usable for {path}: {made}; alternatively, set encoder=auto or exact")
        encode = with_exact_fallback(made, exact, plain)
        check_equal_ids(path, name, probes(named, pieces_of(spec)), encode, exact)
        return name, with_spot_checks(path, name, encode, exact, cfg.check_every) if cfg.check_every else encode
    return "tokenizers", exact


def without_added(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the added tokens from a tokenizer.json, so that their names are encoded as plain text."""
    added = {entry["content"] for entry in spec.get("added_tokens") or []}
    merged = {left + right for left, right in pairs_of(spec)} | byte_alphabet().keys()
    vocab = {piece: i for piece, i in spec["model"]["vocab"].items() if piece not in added or piece in merged}
    return {**spec, "added_tokens": [], "post_processor": None, "model": {**spec["model"], "vocab": vocab}}


def pairs_of(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the merges in order, as pairs of pieces. In older files, a merge is one string with a space."""
    halves = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in spec["model"]["merges"])
    return [(left, right) for left, right in halves]


def make_gigatoken(spec: Mapping[str, Any], split: Split, exact: Encode) -> Encode | str:
    """Returns an encoder that uses gigatoken, or an error message if gigatoken does not support the file."""
    import gigatoken

    text = json.dumps(without_added(spec))
    try:
        tokenizer = gigatoken.Tokenizer.from_json(text)
    except (ValueError, TypeError, RuntimeError) as error:  # an unsupported regex or model
        return f"gigatoken reports: {error}"
    size, checked_at, text_bytes = resident_bytes(), 0, 0

    def encode(texts: Sequence[str]) -> EncodedBlock:
        nonlocal tokenizer, size, checked_at, text_bytes
        layout: Any = tokenizer.encode_batch(list(texts)).layout  # a ListOffsetArray
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        text_bytes += sum(map(len, texts))
        if text_bytes - checked_at > CACHE_CHECK_BYTES:
            checked_at, now = text_bytes, resident_bytes()
            if text_bytes > CACHE_TEXT_BYTES or now - size > CACHE_BYTES:
                tokenizer = gigatoken.Tokenizer.from_json(text)
                size, checked_at, text_bytes = resident_bytes(), 0, 0
        return EncodedBlock(ids.astype(np.uint32, copy=False), np.diff(offsets))

    return encode


def resident_bytes() -> int:
    """Returns the resident memory of this process in bytes, or 0 if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def make_tiktoken(spec: Mapping[str, Any], split: Split, exact: Encode) -> Encode | str:
    """Returns an encoder that uses tiktoken, or an error message if tiktoken does not support the file.

    tiktoken has no list of merges: it merges the adjacent pieces whose result has the smallest id. This is equivalent
    if the ids are in the order of the merges, and if each longer piece is the result of one merge.
    """
    import tiktoken

    byte_of, vocab = byte_alphabet(), without_added(spec)["model"]["vocab"]
    made = [vocab.get(left + right, -1) for left, right in pairs_of(spec)]
    if any(later <= earlier for earlier, later in zip(made, made[1:])) or len(made) + 256 != len(vocab):
        return "its ids are not in the order of its merges, which tiktoken requires"
    ranks = {bytes(byte_of[character] for character in piece): i for piece, i in vocab.items()}
    if max(ranks[bytes([byte])] for byte in range(256)) > min(made, default=256):
        return "some of its bytes have higher ids than its merges"
    encoding = tiktoken.Encoding("jaxscale", pat_str=PATTERNS[split], mergeable_ranks=ranks, special_tokens={})
    threads = 1 if multiprocessing.parent_process() else os.cpu_count() or 1

    def encode_one(text: str) -> np.ndarray:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:
            if isinstance(error, UnicodeError):
                raise
            return exact([text]).ids  # very long runs of spaces overflow the stack of tiktoken's regex engine

    def encode(texts: Sequence[str]) -> EncodedBlock:
        if threads == 1 or len(texts) < 2 * threads:
            return concat_block([encode_one(text) for text in texts])
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:  # tiktoken releases the GIL
            return concat_block(list(pool.map(encode_one, texts)))

    return encode


def with_exact_fallback(encode: Encode, exact: Encode, names: Sequence[str]) -> Encode:
    """Returns an encoder that uses `exact` for texts that contain any of newer_characters() or `names`."""
    found = re.compile("|".join(map(re.escape, names))).search if names else None

    def encode_around(texts: Sequence[str]) -> EncodedBlock:
        named = set(with_newer(texts))
        if found:
            named.update(i for i, text in enumerate(texts) if found(text))
        if not named:
            return encode(texts)
        selected, others = sorted(named), [i for i in range(len(texts)) if i not in named]
        encoded = [*encode([texts[i] for i in others]).split(), *exact([texts[i] for i in selected]).split()]
        return concat_block([encoded[i] for i in np.argsort(others + selected)])

    return encode_around


@functools.cache
def newer_characters() -> np.ndarray:
    """Returns bool[0x110000], True for code points that are new in Unicode 17.0 or that Python does not know."""
    newer = np.ones(0x110000, bool)
    newer[0xF0000:] = False  # private use
    for first, end in ((0, 0x34000), (0xE0000, 0xE0200), (0xFFFFE, 0x100000), (0x10FFFE, 0x110000)):  # all assigned
        categories = map(unicodedata.category, map(chr, range(first, end)))
        newer[first:end] = np.fromiter((name == "Cn" for name in categories), bool, end - first)
    newer[:FIRST_NEWER] = False
    for first, last in NEW_IN_17:
        newer[first : last + 1] = True
    return newer


def with_newer(texts: Sequence[str]) -> list[int]:
    """Returns the indices of the texts that contain newer characters."""
    places, found = [i for i, text in enumerate(texts) if not text.isascii()], []
    for begin in range(0, len(places), TEXTS_AT_ONCE):
        group = places[begin : begin + TEXTS_AT_ONCE]
        joined = "".join([texts[i] for i in group])
        newer = np.flatnonzero(newer_characters().take(np.frombuffer(joined.encode("utf-32-le"), np.uint32)))
        if len(newer):
            ends = np.cumsum([len(texts[i]) for i in group])
            found += [group[k] for k in np.unique(np.searchsorted(ends, newer, side="right")).tolist()]
    return found


def pieces_of(spec: Mapping[str, Any]) -> list[str]:
    """Returns evenly spaced pieces of the vocabulary as text, without pieces that are not valid UTF-8."""
    byte_of, vocab = byte_alphabet(), without_added(spec)["model"]["vocab"]
    ordered = sorted(vocab, key=vocab.get)
    selected = ordered[:: max(1, len(ordered) // PIECES)]
    texts = [bytes(byte_of[character] for character in piece).decode(errors="replace") for piece in selected]
    return [text for text in texts if "\ufffd" not in text]


def probes(names: Iterable[str], pieces: Iterable[str]) -> list[str]:
    """Returns about 25 kB of probe texts, which include the added tokens `names` and pieces of the vocabulary."""
    texts = [*TEXTS, *EDGES, *RUNS, " ".join(TEXTS), "".join(reversed(TEXTS))]
    texts += [text.replace(" ", "") for text in TEXTS] + [text.upper() for text in TEXTS]
    texts += [f"x{name}y" for name in names] + [f" {name} " for name in names] + list(names)
    for piece in pieces:
        texts += [piece, f" {piece}", f"{piece}{piece}"]
    return texts


def check_equal_ids(path: str, name: str, texts: Sequence[str], encode: Encode, exact: Encode) -> None:
    """Raises BadInput if the encoder `name` and the encoder `exact` return different ids for a text."""
    ours, theirs = encode(texts), exact(texts)
    if np.array_equal(ours.lengths, theirs.lengths) and np.array_equal(ours.ids, theirs.ids):
        return
    for text, got, wanted in zip(texts, ours.split(), theirs.split(), strict=True):
        if not np.array_equal(got, wanted):
            same = min(len(got), len(wanted))
            first = next(iter(np.flatnonzero(got[:same] != wanted[:same])), same)
            long = len(text) > SHOWN_CHARACTERS
            shown = f"{text[:SHOWN_CHARACTERS]!r}... ({len(text):,} characters)" if long else f"{text!r}"
            ids = [ids[first : first + SHOWN_IDS].tolist() for ids in (got, wanted)]
            shown = f"the text {shown} from token {first}: {ids[0]} and {ids[1]}"
            raise BadInput(
                f"{path}: the ids of {name} and of the tokenizers package differ for {shown}; set encode.encoder=exact "
                f"in the recipe of `jaxscale prepare`; if you train from text, uninstall {name}"
            )


def with_spot_checks(path: str, name: str, encode: Encode, exact: Encode, every: int) -> Encode:
    """Returns an encoder that compares about one in `every` texts, selected by a hash, with `exact`."""

    def encode_and_compare(texts: Sequence[str]) -> EncodedBlock:
        block = encode(texts)
        hashed = [zlib.crc32(text[:HASHED_CHARACTERS].encode(errors="surrogatepass")) for text in texts]
        selected = [i for i, number in enumerate(hashed) if number % every == 0]
        if selected:
            ends = np.cumsum(block.lengths)
            picked = concat_block([block.ids[ends[i] - block.lengths[i] : ends[i]] for i in selected])
            check_equal_ids(path, name, [texts[i] for i in selected], lambda _: picked, exact)
        return block

    return encode_and_compare
