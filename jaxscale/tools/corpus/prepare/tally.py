"""Mergeable counts of documents by stage, source and reason, with a few samples."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.runtime.text.document import Document, Outcome
from jaxscale.runtime.text.sources.part import FIXES, ReadLosses, summarize_losses
from jaxscale.runtime.text.tokenizer.loss import KINDS, LETTERS, TextLoss

DETAIL_STAGES = ("decontaminate", "language")  # their details (evaluation items, languages) are counted individually
SCORE_COLUMNS = {"classifier": "quality"}  # for histograms; a dropped document's score is its outcome's detail
SCORE_BINS = 20
SAMPLES = 5  # saved per reason
SAMPLE_FILES = 3  # file names in a line
SAMPLE_CHARACTERS = 1500


class TallySample(NamedTuple):
    """Excerpt of a document that a stage dropped or edited."""

    order: int  # a hash: the smallest are saved, so samples do not depend on the processing order
    source: str
    file: str
    offset: int
    before: str
    after: str | None  # None: dropped


class Tally:
    """Counts and samples. `counts` is keyed by tuples whose first element is the kind of count:

    ("read", source, reason)                  documents or bytes that reading skipped or repaired
    ("in", stage, source, "documents"|"bytes"), and the same with "out"
    ("dropped", stage, source, reason, "documents"|"bytes")
    ("edited", stage, source, reason, "documents"|"times")
    ("detail", stage, reason, detail)         documents
    ("score", stage, source, bin)             documents by the stage's score; SCORE_BINS bins from 0 to 1
    ("length", source, power of two)          documents read, by size in bytes
    ("language", source, language)            documents that are saved
    ("written", source, "documents"|"bytes")  content of the shards
    ("lost", "texts"|"characters"|a kind)     of a sample: text that the tokenizer loses, see text/tokenizer/loss
    ("lost letter", character)                characters that are lost
    """

    def __init__(self):
        self.counts: Counter = Counter()
        self.samples: dict[tuple[str, str], list[TallySample]] = {}

    def record(self, stage: str, documents: Sequence[Document], outcomes: Sequence[Outcome]) -> list[Document]:
        """Counts the outcomes of `stage` and returns the documents that remain."""
        assert len(outcomes) == len(documents), f"{stage} made {len(outcomes)} outcomes for {len(documents)} documents"
        self.add_documents(("in", stage), documents)
        remaining = []
        for document, outcome in zip(documents, outcomes):
            if outcome.document is not None:
                remaining.append(outcome.document)
            if outcome.document is not document or outcome.edits:
                self.count_change(stage, document, outcome)
        if stage in SCORE_COLUMNS:
            for document, (after, _, _, detail) in zip(documents, outcomes):
                score = float(detail) if after is None else dict(after.scores)[SCORE_COLUMNS[stage]]
                self.counts["score", stage, document.source, str(min(int(score * SCORE_BINS), SCORE_BINS - 1))] += 1
        self.add_documents(("out", stage), remaining)
        return remaining

    def count_change(self, stage: str, document: Document, outcome: Outcome) -> None:
        """Counts one drop or edit."""
        source, after = document.source, outcome.document
        if after is None:
            reasons = [(outcome.reason or "dropped", 1)]
            prefix = ("dropped", stage, source, reasons[0][0])
            self.counts[*prefix, "documents"] += 1
            self.counts[*prefix, "bytes"] += document.size
        else:
            reasons = outcome.edits
            for reason, times in reasons:
                self.counts["edited", stage, source, reason, "documents"] += 1
                self.counts["edited", stage, source, reason, "times"] += times
        for reason, _ in reasons:
            for detail in filter(None, outcome.detail.split(", ") if stage in DETAIL_STAGES else ()):
                self.counts["detail", stage, reason, detail] += 1
            self.sample(stage, reason, document, after)

    def sample(self, stage: str, reason: str, before: Document, after: Document | None) -> None:
        """Saves the document as a sample if its order is among the smallest."""
        name = f"{before.file}|{before.offset}|{stage}|{reason}".encode(errors="surrogatepass")
        order = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
        samples = self.samples.setdefault((stage, reason), [])
        if len(samples) == SAMPLES and order >= samples[-1].order:
            return
        texts = excerpt(before.text, None if after is None else after.text)
        samples.append(TallySample(order, before.source, before.file, before.offset, *texts))
        samples.sort()
        del samples[SAMPLES:]

    def add_skipped(self, source: str, file: str, offset: int, skipped: Mapping[str, int]) -> None:
        """Counts what reading a part of a file skipped or repaired, and samples the file for each reason."""
        for reason, number in skipped.items():
            self.counts["read", source, reason] += number
            if reason in FIXES:
                self.sample("read", reason, Document("", source, file, offset), None)

    def left_out(self, prefix: str) -> ReadLosses | None:
        """Returns what reading skipped, or None. where: prefix of setting names in the message."""
        places = {}
        for (stage, reason), samples in self.samples.items():
            if stage == "read":
                places[reason] = list(dict.fromkeys(sample.file for sample in samples))[:SAMPLE_FILES]
        sizes = self.sums("in", "read", by=-1)
        return summarize_losses(self.sums("read", by=2), sizes["documents"], sizes["bytes"], prefix, places)

    def add_documents(self, name: tuple[str, ...], documents: Sequence[Document]) -> None:
        """Counts documents and bytes by source."""
        sizes: dict[str, list[int]] = {}
        for document in documents:
            sizes.setdefault(document.source, []).append(document.size)
        for source, sizes_of_source in sizes.items():
            self.counts[*name, source, "documents"] += len(sizes_of_source)
            self.counts[*name, source, "bytes"] += sum(sizes_of_source)

    def add_loss(self, loss: TextLoss) -> None:
        """Counts the tokenizer's loss on a sample."""
        self.counts.update({("lost", "texts"): loss.texts, ("lost", "characters"): loss.characters})
        self.counts.update({("lost", kind): number for kind, number in loss.kinds.items()})
        self.counts.update({("lost letter", letter): number for letter, number in loss.letters.most_common(LETTERS)})
        if loss.example:
            self.samples.setdefault(("tokenizer", "lost"), []).append(TallySample(0, "", "", 0, *loss.example))
            self.samples["tokenizer", "lost"] = sorted(self.samples["tokenizer", "lost"])[:SAMPLES]

    @property
    def loss(self) -> TextLoss:
        """Sum of the tokenizer's losses on all samples."""
        kinds = Counter({kind: self.counts["lost", kind] for kind in KINDS if self.counts["lost", kind]})
        letters = self.sums("lost letter", by=1)
        found = self.samples.get(("tokenizer", "lost"))
        example = (found[0].before, found[0].after or "") if found else None
        return TextLoss(self.counts["lost", "texts"], self.counts["lost", "characters"], kinds, letters, example)

    def sums(self, *name: str, by: int) -> Counter:
        """Returns the sums of all counts whose key begins with `name`, by one element of the key."""
        found: Counter = Counter()
        for key, number in self.counts.items():
            if key[: len(name)] == name:
                found[key[by]] += number
        return found

    def total(self, *name: str) -> int:
        """Returns the number of documents in all counts whose key begins with `name`."""
        return self.sums(*name, by=-1)["documents"]

    def merge(self, other: "Tally") -> None:
        """Adds another tally."""
        self.counts.update(other.counts)
        for name, samples in other.samples.items():
            self.samples[name] = sorted([*self.samples.get(name, ()), *samples])[:SAMPLES]

    def to_json(self) -> dict[str, Any]:
        """Returns plain data; equal tallies give equal JSON."""
        return {
            "counts": sorted([[*map(str, name), number] for name, number in self.counts.items()]),
            "samples": [[*name, [list(s) for s in samples]] for name, samples in sorted(self.samples.items())],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Tally":
        """Returns the inverse of to_json; key elements become strings."""
        tally = cls()
        tally.counts.update({tuple(name): number for *name, number in value["counts"]})
        for stage, reason, samples in value["samples"]:
            tally.samples[stage, reason] = [TallySample(*sample) for sample in samples]
        return tally


def excerpt(before: str, after: str | None) -> tuple[str, str | None]:
    """Returns excerpts of both texts, from the start or from shortly before the first difference."""
    start = 0
    if after is not None:
        start = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
        start = max(0, start - SAMPLE_CHARACTERS // 4)
        after = after[start : start + SAMPLE_CHARACTERS]
    return before[start : start + SAMPLE_CHARACTERS], after
