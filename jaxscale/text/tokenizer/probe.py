"""Probe texts that compare a fast encoder with the reference encoder before it is used."""

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.base import Block, Encode, block_of

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
HASHED_CHARACTERS = 256  # of a document, to choose those that are compared
SHOWN_CHARACTERS, SHOWN_IDS = 120, 12


def probes(names: Iterable[str], pieces: Iterable[str]) -> list[str]:
    """About 25 kB of texts: every class of character, runs, cuts, the names of special tokens, pieces of a vocabulary.

    names: of special tokens, which must be plain text. pieces: texts of single tokens, alone and after a space.
    """
    texts = [*TEXTS, *EDGES, *RUNS, " ".join(TEXTS), "".join(reversed(TEXTS))]
    texts += [text.replace(" ", "") for text in TEXTS] + [text.upper() for text in TEXTS]
    texts += [f"x{name}y" for name in names] + [f" {name} " for name in names] + list(names)
    for piece in pieces:
        texts += [piece, f" {piece}", f"{piece}{piece}"]
    return texts


def compare(path: str, name: str, texts: Sequence[str], encode: Encode, exact: Encode) -> None:
    """Checks that the encoder `name` gives the ids of `exact` for every text. Raises BadInput that shows the text."""
    ours, theirs = encode(texts), exact(texts)
    if np.array_equal(ours.lengths, theirs.lengths) and np.array_equal(ours.ids, theirs.ids):
        return
    for text, got, wanted in zip(texts, ours.split(), theirs.split(), strict=True):
        if not np.array_equal(got, wanted):
            raise BadInput(
                f"{path}: {name} and the tokenizers package differ for {around(text, got, wanted)}; set encoder=exact"
            )


def around(text: str, got: np.ndarray, wanted: np.ndarray) -> str:
    """The text, cut if it is long, with the ids of both from where they part."""
    same = min(len(got), len(wanted))
    parted = np.flatnonzero(got[:same] != wanted[:same])
    first = int(parted[0]) if len(parted) else same
    long = len(text) > SHOWN_CHARACTERS
    shown = f"{text[:SHOWN_CHARACTERS]!r}... ({len(text):,} characters)" if long else f"{text!r}"
    ids = [ids[first : first + SHOWN_IDS].tolist() for ids in (got, wanted)]
    return f"the text {shown} from token {first}: {ids[0]} and {ids[1]}"


def compared_sometimes(path: str, name: str, encode: Encode, exact: Encode, every: int) -> Encode:
    """`encode`, comparing one text in `every` with `exact`; which ones follows from how they begin."""

    def encode_and_compare(texts: Sequence[str]) -> Block:
        block = encode(texts)
        chosen = [i for i, text in enumerate(texts) if choice(text) % every == 0]
        if chosen:
            parts = block.split()
            picked = [parts[i] for i in chosen]
            compare(path, name, [texts[i] for i in chosen], lambda _: block_of(picked), exact)
        return block

    return encode_and_compare


def choice(text: str) -> int:
    """A number that depends on how the text begins, the same on every machine."""
    return zlib.crc32(text[:HASHED_CHARACTERS].encode(errors="surrogatepass"))
