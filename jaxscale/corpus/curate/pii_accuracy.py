"""How well personal data is found: precision and recall against spans that people have marked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxscale.corpus.curate.pii import KINDS, Span, find_pii

OVERLAP = 0.5  # intersection over union: the customary threshold for matching spans


class Accuracy(NamedTuple):
    """Counts of one kind of personal data over many texts."""

    right: int  # found spans that match a marked one
    found: int
    marked: int

    @property
    def precision(self) -> float:
        """Part of what was found that is marked; nan if nothing was found."""
        return self.right / self.found if self.found else float("nan")

    @property
    def recall(self) -> float:
        """Part of what is marked that was found; nan if nothing is marked."""
        return self.right / self.marked if self.marked else float("nan")


def matches(a: Span, b: Span) -> bool:
    """Whether both are of one kind and share at least half of what they cover together."""
    shared = min(a.end, b.end) - max(a.start, b.start)
    return a.kind == b.kind and shared > 0 and shared >= OVERLAP * (max(a.end, b.end) - min(a.start, b.start))


def accuracy(
    texts: Iterable[tuple[str, Sequence[Span]]], find: Callable[[str], Sequence[Span]] = find_pii
) -> dict[str, Accuracy]:
    """The counts by kind. A marked span is matched once, by the first found one that overlaps it by half."""
    counts = {kind: [0, 0, 0] for kind in KINDS}
    for text, marked in texts:
        open_spans = list(marked)
        for span in marked:
            counts[span.kind][2] += 1
        for span in find(text):
            counts[span.kind][1] += 1
            if partner := next((other for other in open_spans if matches(span, other)), None):
                open_spans.remove(partner)
                counts[span.kind][0] += 1
    return {kind: Accuracy(*values) for kind, values in counts.items()}


PRESIDIO_KINDS = {
    "EMAIL_ADDRESS": "email", "IP_ADDRESS": "ip", "IBAN_CODE": "iban", "CREDIT_CARD": "card", "US_SSN": "national_id",
    "PHONE_NUMBER": "phone",
}  # fmt: skip


def presidio_spans(sentences: Iterable[Mapping]) -> list[tuple[str, list[Span]]]:
    """(text, marked spans) pairs of the presidio-research evaluation sets (MIT), of the kinds that are looked for."""
    return [
        (
            sentence["full_text"],
            [
                Span(span["start_position"], span["end_position"], PRESIDIO_KINDS[span["entity_type"]])
                for span in sentence["spans"]
                if span["entity_type"] in PRESIDIO_KINDS
            ],
        )
        for sentence in sentences
    ]
