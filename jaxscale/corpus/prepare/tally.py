"""Counts of documents by stage, source and reason, with a few samples; tallies can be merged."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.text.document import Document, Outcome
from jaxscale.text.sources.left_out import WAYS_OUT, LeftOut, left_out
from jaxscale.text.tokenizer.loss import KINDS, LETTERS, Loss

LISTED = ("decontaminate", "language")  # stages whose details, evaluation items and languages, are counted one by one
SCORED = {"classifier": "quality"}  # stages whose scores are counted, of what they drop (its detail) too; the column
SCORE_BINS = 20
SAMPLES = 5  # kept of each reason
PLACES = 3  # of them named in a line
SAMPLE_CHARACTERS = 1500


class Sample(NamedTuple):
    """A document that a stage dropped or edited, cut short."""

    order: int  # a hash: the samples with the smallest are kept, so that they do not depend on who saw what first
    source: str
    file: str
    offset: int
    before: str
    after: str | None  # None: dropped


class Tally:
    """Counts and samples. `counts` is keyed by tuples whose first member says what is counted:

    ("read", source, reason)                  documents or bytes that reading left out or repaired
    ("in", stage, source, "documents"|"bytes"), and the same with "out"
    ("dropped", stage, source, reason, "documents"|"bytes")
    ("edited", stage, source, reason, "documents"|"times")
    ("detail", stage, reason, detail)         documents
    ("score", stage, source, bin)             documents that the stage saw, by score; SCORE_BINS from 0 to 1
    ("length", source, power of two)          documents read, by size in bytes
    ("language", source, language)            documents that are kept
    ("written", source, "documents"|"bytes")  what goes into the shards
    ("lost", "texts"|"characters"|a kind)     of a sample: what the tokenizer did not give back, see text/tokenizer/loss
    ("lost letter", character)                of those that are missing
    """

    def __init__(self):
        self.counts: Counter = Counter()
        self.samples: dict[tuple[str, str], list[Sample]] = {}

    def take(self, stage: str, documents: Sequence[Document], outcomes: Sequence[Outcome]) -> list[Document]:
        """Counts what `stage` made of the documents and returns those that are left."""
        assert len(outcomes) == len(documents), f"{stage} gave {len(outcomes)} outcomes for {len(documents)} documents"
        self.add_documents(("in", stage), documents)
        kept = []
        for document, outcome in zip(documents, outcomes):
            if outcome.document is not None:
                kept.append(outcome.document)
            if outcome.document is not document or outcome.edits:
                self.note(stage, document, outcome)
        if stage in SCORED:
            self.add_scores(stage, documents, outcomes)
        self.add_documents(("out", stage), kept)
        return kept

    def note(self, stage: str, document: Document, outcome: Outcome) -> None:
        """Counts one drop or edit."""
        source, after = document.source, outcome.document
        if after is None:
            reasons = [(outcome.reason or "dropped", 1)]
            where = ("dropped", stage, source, reasons[0][0])
            self.counts[*where, "documents"] += 1
            self.counts[*where, "bytes"] += document.size
        else:
            reasons = outcome.edits
            for reason, times in reasons:
                self.counts["edited", stage, source, reason, "documents"] += 1
                self.counts["edited", stage, source, reason, "times"] += times
        for reason, _ in reasons:
            for detail in filter(None, outcome.detail.split(", ") if stage in LISTED else ()):
                self.counts["detail", stage, reason, detail] += 1
            self.sample(stage, reason, document, after)

    def add_scores(self, stage: str, documents: Sequence[Document], outcomes: Sequence[Outcome]) -> None:
        """Counts documents by their scores."""
        for document, (after, _, _, detail) in zip(documents, outcomes):
            score = float(detail) if after is None else dict(after.scores)[SCORED[stage]]
            self.counts["score", stage, document.source, str(min(int(score * SCORE_BINS), SCORE_BINS - 1))] += 1

    def sample(self, stage: str, reason: str, before: Document, after: Document | None) -> None:
        """Keeps the document as a sample if its turn comes."""
        name = f"{before.file}|{before.offset}|{stage}|{reason}".encode(errors="surrogatepass")
        order = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
        kept = self.samples.setdefault((stage, reason), [])
        if len(kept) == SAMPLES and order >= kept[-1].order:
            return
        texts = excerpt(before.text, None if after is None else after.text)
        kept.append(Sample(order, before.source, before.file, before.offset, *texts))
        kept.sort()
        del kept[SAMPLES:]

    def add_skipped(self, source: str, file: str, offset: int, skipped: Mapping[str, int]) -> None:
        """Counts what reading a part of a file left out or repaired; the file is kept as a sample of each reason."""
        for reason, number in skipped.items():
            self.counts["read", source, reason] += number
            if reason in WAYS_OUT:
                self.sample("read", reason, Document("", source, file, offset), None)

    def left_out(self, where: str) -> LeftOut | None:
        """What reading left out, None if that is nothing. where: before the names of settings."""
        skipped, places = Counter(), {}
        for key, number in self.counts.items():
            if key[0] == "read":
                skipped[key[2]] += number
        for (stage, reason), samples in self.samples.items():
            if stage == "read":
                places[reason] = list(dict.fromkeys(sample.file for sample in samples))[:PLACES]
        size = sum(n for key, n in self.counts.items() if key[:2] == ("in", "read") and key[-1] == "bytes")
        return left_out(skipped, self.total("in", "read"), size, where, places)

    def add_documents(self, name: tuple[str, ...], documents: Sequence[Document]) -> None:
        """Counts documents and bytes by source."""
        sizes: dict[str, list[int]] = {}
        for document in documents:
            sizes.setdefault(document.source, []).append(document.size)
        for source, own in sizes.items():
            self.counts[*name, source, "documents"] += len(own)
            self.counts[*name, source, "bytes"] += sum(own)

    def add_lengths(self, documents: Sequence[Document]) -> None:
        """Counts documents by the power of two below their size."""
        self.counts.update(("length", document.source, str(document.size.bit_length())) for document in documents)

    def add_languages(self, documents: Sequence[Document]) -> None:
        """Counts documents by language; '' where none was identified."""
        self.counts.update(("language", document.source, document.language) for document in documents)

    def add_loss(self, loss: Loss) -> None:
        """Counts what the tokenizer lost of a sample."""
        self.counts.update({("lost", "texts"): loss.texts, ("lost", "characters"): loss.characters})
        self.counts.update({("lost", kind): number for kind, number in loss.kinds.items()})
        self.counts.update({("lost letter", letter): number for letter, number in loss.letters.most_common(LETTERS)})
        if loss.example:
            self.samples.setdefault(("tokenizer", "lost"), []).append(Sample(0, "", "", 0, *loss.example))
            self.samples["tokenizer", "lost"] = sorted(self.samples["tokenizer", "lost"])[:SAMPLES]

    @property
    def loss(self) -> Loss:
        """The tokenizer's loss on all samples."""
        kinds = Counter({kind: self.counts["lost", kind] for kind in KINDS if self.counts["lost", kind]})
        letters = Counter({key[1]: number for key, number in self.counts.items() if key[0] == "lost letter"})
        found = self.samples.get(("tokenizer", "lost"))
        example = (found[0].before, found[0].after or "") if found else None
        return Loss(self.counts["lost", "texts"], self.counts["lost", "characters"], kinds, letters, example)

    def total(self, *name: str) -> int:
        """The documents of all counts that begin with `name`."""
        return sum(n for key, n in self.counts.items() if key[: len(name)] == name and key[-1] == "documents")

    def merge(self, other: "Tally") -> None:
        """Adds what another one counted."""
        self.counts.update(other.counts)
        for name, samples in other.samples.items():
            self.samples[name] = sorted([*self.samples.get(name, ()), *samples])[:SAMPLES]

    def to_json(self) -> dict[str, Any]:
        """As plain data; the same tally gives the same text."""
        return {
            "counts": sorted([[*map(str, name), number] for name, number in self.counts.items()]),
            "samples": [[*name, [list(s) for s in samples]] for name, samples in sorted(self.samples.items())],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Tally":
        """The inverse of to_json; the parts of a count's name are text."""
        tally = cls()
        tally.counts.update({tuple(name): number for *name, number in value["counts"]})
        for stage, reason, samples in value["samples"]:
            tally.samples[stage, reason] = [Sample(*sample) for sample in samples]
        return tally


def excerpt(before: str, after: str | None) -> tuple[str, str | None]:
    """Both texts cut short: from their beginnings, or from shortly before the first place where they differ."""
    start = 0
    if after is not None:
        start = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
        start = max(0, start - SAMPLE_CHARACTERS // 4)
        after = after[start : start + SAMPLE_CHARACTERS]
    return before[start : start + SAMPLE_CHARACTERS], after
