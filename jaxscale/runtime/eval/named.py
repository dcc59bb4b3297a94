"""Opens evaluators by name: their text and items as ids, ready to measure one or several models."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxscale.runtime.eval.bits_per_byte import EvalReading, TextSet, check_text_files, text_metrics
from jaxscale.runtime.eval.choice import encode_items
from jaxscale.runtime.eval.config import Evals, NamedEval, TextEval, setting_name
from jaxscale.runtime.eval.items import SkippedItems, check_item_files, read_items
from jaxscale.runtime.eval.scorer import Scorer, pack_spans, row_length
from jaxscale.runtime.text.sources.decode import is_repair
from jaxscale.runtime.text.sources.part import BYTES
from jaxscale.system.exits import BadInput

GROUP = "evals"  # prefix of the metrics' names


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """The measurement under one name."""

    name: str
    every_steps: int
    measure: Callable[[Scorer, Any], dict[str, float]]  # (scorer, parameters) -> metrics without the name
    summary: str  # description of its data for display
    fingerprint: str  # of its data; '' for text that is read each time

    def metrics(self, scorer: Scorer, params: Any) -> dict[str, float]:
        """Returns {'evals/NAME/METRIC': value}. The same in all processes, which call it together."""
        return {f"{GROUP}/{self.name}/{metric}": value for metric, value in self.measure(scorer, params).items()}


def open_evaluators(
    evals: Evals, reading: EvalReading, named: Callable[[str, NamedEval], str] = setting_name, *, hold: bool = True
) -> tuple[Evaluator, ...]:
    """Opens every evaluator and reads its data. Raises BadInput, one line, for missing or invalid data.

    named: name of an evaluator in messages. hold: read text into memory once, so that a long run does not end because a
    file is gone; otherwise it is read each time, and may be larger than memory.
    """
    return tuple(open_one(name, settings, reading, named(name, settings), hold) for name, settings in evals.items())


def open_one(name: str, settings: NamedEval, reading: EvalReading, where: str, hold: bool) -> Evaluator:
    """Opens one evaluator. where: name of its data in messages."""
    if isinstance(settings, TextEval):
        return text_evaluator(name, settings, reading, where, hold)
    files = check_item_files(settings.file, where)
    skipped = SkippedItems(settings.damaged)
    found = read_items(files, settings.kind, settings.limit, skipped)
    items = encode_items(settings.kind, found, reading, skipped)
    longest = max(span.num_positions for span in items.spans)
    packed = pack_spans(items.spans, row_length(longest, reading.context))  # once for all models
    summary = f"{settings.kind}, {len(items.items):,} items{skipped}"
    summary += f", {items.cut:,} contexts cut at the left to {reading.context} tokens" if items.cut else ""
    summary += f", {items.alone:,} continuations encoded alone: a token spans the boundary" if items.alone else ""

    def measure(scorer: Scorer, params: Any) -> dict[str, float]:
        counts = {"left_out": skipped.count} if skipped.count else {}
        return items.metrics(scorer, packed, params) | counts

    return Evaluator(name, settings.every_steps, measure, summary, items.fingerprint)


def text_evaluator(name: str, settings: TextEval, reading: EvalReading, where: str, hold: bool) -> Evaluator:
    """Opens an evaluator of text."""
    stride = settings.stride or max(reading.context // 2, 1)
    if stride > reading.context:
        raise BadInput(f"{where}: stride={stride} is more than the {reading.context} tokens that the model reads")
    sources = check_text_files(settings.files, where)
    sets = {
        source: TextSet(tuple(files), settings, reading, stride, settings.limit) for source, files in sources.items()
    }

    if hold:
        sets = {source: one.loaded() for source, one in sets.items()}
        for one in sets.values():
            if not any(len(ids) for block in one.in_memory for ids, _ in block):
                raise BadInput(f"{where}: {one.no_text_message(one.left_out)}")

    def measure(scorer: Scorer, params: Any) -> dict[str, float]:
        skipped: Counter = Counter()
        metrics = text_metrics(sets, scorer, params, skipped)
        num_skipped = sum(count for reason, count in skipped.items() if reason != BYTES and not is_repair(reason))
        return metrics | ({"left_out": num_skipped} if num_skipped else {})

    number = sum(map(len, sources.values()))
    named = f" in {len(sources)} sources" if len(sources) > 1 else ""
    files = "1 file" if number == 1 else f"{number:,} files"
    summary = f"text, {files}{named}, windows of {reading.context} tokens by {stride}"
    fingerprint = " ".join(one.fingerprint for one in sets.values()) if hold else ""
    return Evaluator(name, settings.every_steps, measure, summary, fingerprint)


def check_files(evals: Evals, named: Callable[[str, NamedEval], str] = setting_name) -> None:
    """Raises BadInput, one line, for an evaluator with missing files or files of an unknown kind. Reads none.

    named: name of an evaluator in messages.
    """
    for name, settings in evals.items():
        if isinstance(settings, TextEval):
            check_text_files(settings.files, named(name, settings))
        else:
            check_item_files(settings.file, named(name, settings))
