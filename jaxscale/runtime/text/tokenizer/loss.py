"""Measures the round-trip loss of a tokenizer: characters of samples that are missing after encoding and decoding.

Byte-level BPE that was trained without all 256 bytes drops unseen characters. Vocabularies without byte fallback encode
such characters as unknown. Normalizers change case, accents or spaces by design.
"""

import dataclasses
import unicodedata
from collections import Counter
from collections.abc import Sequence

from jaxscale import units
from jaxscale.runtime.text.tokenizer.base import Tokenizer

MUCH = 0.01  # fraction of characters above which a warning is logged
SAMPLED_TEXTS = 20  # sampled texts per batch
SAMPLED_CHARACTERS = 4000  # characters from the beginning of each sampled text
LETTERS = 8  # number of most frequent missing characters to show
SHOWN = 30  # characters of the example to show
MISSING, SPACES, CHANGED = "missing", "white space", "changed by its normalizer"
KINDS = (MISSING, SPACES, CHANGED)


@dataclasses.dataclass
class TextLoss:
    """Counts of the characters in sampled texts that encoding and decoding lose."""

    texts: int = 0
    characters: int = 0
    kinds: Counter[str] = dataclasses.field(default_factory=Counter)  # {kind from KINDS: characters}
    letters: Counter[str] = dataclasses.field(default_factory=Counter)  # missing characters
    example: tuple[str, str] | None = None  # excerpts before and after

    def add(self, other: "TextLoss") -> None:
        """Adds the counts of a different sample."""
        self.texts += other.texts
        self.characters += other.characters
        self.kinds += other.kinds
        self.letters += other.letters
        self.example = self.example or other.example

    @property
    def lost(self) -> int:
        """Returns the number of lost characters."""
        return self.kinds.total()

    @property
    def is_much(self) -> bool:
        """Returns True if more than the fraction MUCH of the characters is lost."""
        return self.lost > MUCH * self.characters

    def line(self, name: str, reason: str = "") -> str:
        """Returns a log line with the lost characters by kind and an example. `reason`: cause, if known."""
        found = [f"{self.kinds[kind]:,} {kind}" for kind in KINDS if self.kinds[kind]]
        letters = " ".join(repr(letter) for letter, _ in self.letters.most_common(LETTERS))
        shown = "{!r} is decoded as {!r}".format(*self.example) if self.example else ""
        parts = [
            f"{name} loses text: {self.lost / max(1, self.characters):.1%} of the {self.characters:,} characters of "
            f"{units.plural(self.texts, 'sampled text')} are lost by encoding and decoding ({', '.join(found)})",
            f"missing: {letters}" if letters else "",
            shown,
            reason,
        ]
        return "; ".join(filter(None, parts))


def measure_loss(tokenizer: Tokenizer, texts: Sequence[str]) -> TextLoss:
    """Measures the loss on the beginnings of evenly spaced texts."""
    loss = TextLoss()
    chosen = [text[:SAMPLED_CHARACTERS] for text in texts[:: max(1, -(-len(texts) // SAMPLED_TEXTS))]]
    for text, ids in zip(chosen, tokenizer.encode_block(chosen).split(), strict=True):
        loss.add(compare(text, tokenizer.decode(ids.tolist())))
    return loss


def compare(text: str, back: str) -> TextLoss:
    """Compares character counts before and after, ignoring order and additional characters."""
    loss = TextLoss(1, len(text))
    if text == back:
        return loss
    before, after = Counter(text), Counter(back)
    lost, new = before - after, after - before
    for letter, count in lost.items():
        if letter.isspace():
            loss.kinds[SPACES] += count
        elif any(form in new for form in unicodedata.normalize("NFKD", letter.casefold())) or (
            unicodedata.normalize("NFKC", letter)[:1] in new
        ):
            loss.kinds[CHANGED] += count
        else:
            loss.kinds[MISSING] += count
            loss.letters[letter] += count
    if lost:
        start = next((i for i, pair in enumerate(zip(text, back)) if pair[0] != pair[1]), min(len(text), len(back)))
        start = max(0, start - SHOWN // 3)
        loss.example = (text[start : start + SHOWN], back[start : start + SHOWN])
    return loss
