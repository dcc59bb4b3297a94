"""Mergeable counts of documents by stage, source and reason, with a few samples."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.runtime.text.document import Document, Outcome
from jaxscale.runtime.text.sources.part import FIXES, ReadLosses, summarize_losses
from jaxscale.runtime.text.tokenizer.loss import KINDS, LETTERS, TextLoss

DETAIL_STAGES = ("decontaminate", "language")  # stages whose details (evaluation items, languages) are counted
SCORE_COLUMNS = {"classifier": "quality"}  # columns with a histogram; dropped documents have the score as `detail`
SCORE_BINS = 20
SAMPLES = 5  # maximum number of samples per reason
SAMPLE_FILES = 3  # maximum number of file names in a message
SAMPLE_CHARACTERS = 1500


class TallySample(NamedTuple):
    """Excerpt of a document that a stage dropped or edited."""

    order: int  # a hash; samples with the smallest hashes are saved, in any processing order
    source: str
    file: str
    offset: int
    before: str
    after: str | None  # None if the document was dropped


class Tally:
    """Counts and samples. `counts` is keyed by tuples whose first element is the kind of count:

    ("read", source, reason)                  documents or bytes that were skipped or repaired while reading
    ("in"|"out", stage, source, "documents"|"bytes")  content before and after the stage
    ("dropped", stage, source, reason, "documents"|"bytes")
    ("edited", stage, source, reason, "documents"|"times")
    ("detail", stage, reason, detail)         documents
    ("score", stage, source, bin)             documents in each of SCORE_BINS bins of the stage's score, from 0 to 1
    ("length", source, power of two)          documents read, by size in bytes
    ("language", source, language)            documents written
    ("written", source, "documents"|"bytes")  content of the shards
    ("lost", "texts"|"characters"|kind)       text in samples that the tokenizer loses (runtime/text/tokenizer/loss.py)
    ("lost letter", character)                characters that the tokenizer loses
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
        """Counts one dropped or edited document."""
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
        """Saves the document as a sample if its hash is among the smallest hashes for this stage and reason."""
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
        """Counts documents that were skipped or repaired while reading part of a file. Saves the file as a sample."""
        for reason, number in skipped.items():
            self.counts["read", source, reason] += number
            if reason in FIXES:
                self.sample("read", reason, Document("", source, file, offset), None)

    def left_out(self, prefix: str) -> ReadLosses | None:
        """Returns a summary of the skipped input, or None. prefix: prefix of setting names in its message."""
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
        """Counts the text that the tokenizer loses in a sample."""
        self.counts.update({("lost", "texts"): loss.texts, ("lost", "characters"): loss.characters})
        self.counts.update({("lost", kind): number for kind, number in loss.kinds.items()})
        self.counts.update({("lost letter", letter): number for letter, number in loss.letters.most_common(LETTERS)})
        if loss.example:
            self.samples.setdefault(("tokenizer", "lost"), []).append(TallySample(0, "", "", 0, *loss.example))
            self.samples["tokenizer", "lost"] = sorted(self.samples["tokenizer", "lost"])[:SAMPLES]

    @property
    def loss(self) -> TextLoss:
        """Sum of the tokenizer's losses in all samples."""
        kinds = Counter({kind: self.counts["lost", kind] for kind in KINDS if self.counts["lost", kind]})
        letters = self.sums("lost letter", by=1)
        found = self.samples.get(("tokenizer", "lost"))
        example = (found[0].before, found[0].after or "") if found else None
        return TextLoss(self.counts["lost", "texts"], self.counts["lost", "characters"], kinds, letters, example)

    def sums(self, *name: str, by: int) -> Counter:
        """Returns the sums of all counts whose key starts with `name`, grouped by element `by` of the key."""
        found: Counter = Counter()
        for key, number in self.counts.items():
            if key[: len(name)] == name:
                found[key[by]] += number
        return found

    def total(self, *name: str) -> int:
        """Returns the number of documents in all counts whose key starts with `name`."""
        return self.sums(*name, by=-1)["documents"]

    def merge(self, other: "Tally") -> None:
        """Adds the counts and samples of a second tally."""
        self.counts.update(other.counts)
        for name, samples in other.samples.items():
            self.samples[name] = sorted([*self.samples.get(name, ()), *samples])[:SAMPLES]

    def to_json(self) -> dict[str, Any]:
        """Returns the tally as plain data. Equal tallies give equal JSON."""
        return {
            "counts": sorted([[*map(str, name), number] for name, number in self.counts.items()]),
            "samples": [[*name, [list(s) for s in samples]] for name, samples in sorted(self.samples.items())],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Tally":
        """Returns a tally from the result of to_json. Key elements become strings."""
        tally = cls()
        tally.counts.update({tuple(name): number for *name, number in value["counts"]})
        for stage, reason, samples in value["samples"]:
            tally.samples[stage, reason] = [TallySample(*sample) for sample in samples]
        return tally


def excerpt(before: str, after: str | None) -> tuple[str, str | None]:
    """Returns excerpts of a text before and after an edit, from shortly before the first difference."""
    start = 0
    if after is not None:
        start = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
        start = max(0, start - SAMPLE_CHARACTERS // 4)
        after = after[start : start + SAMPLE_CHARACTERS]
    return before[start : start + SAMPLE_CHARACTERS], after
