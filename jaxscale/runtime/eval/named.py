"""Named evaluators, which read their text and items as token ids and measure one or several models.

The boundary between context and continuation, in tokens, follows lm-eval (TemplateLM._encode_pair). White space at the
end of the context is moved to the front of the continuation, because tokenizers join it to the next word. Then the ids
of the whole text are split after the number of ids that the context alone has, so that words are split as in ordinary
text. If one token spans the boundary and no id is left after it, the continuation is encoded alone, as in lm-eval's
pull request 4055. A context without a token is replaced by the start token.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.eval.bits_per_byte import (
    EvalReading,
    TextSet,
    check_text_files,
    exp_error,
    mean_error,
    text_metrics,
)
from jaxscale.runtime.eval.config import Evals, NamedEval, TextEval, setting_name
from jaxscale.runtime.eval.items import EvalItem, SkippedItems, check_item_files, read_items
from jaxscale.runtime.eval.scorer import PackedSpans, Scorer, Scores, TokenSpan, pack_spans, row_length
from jaxscale.runtime.text.sources.decode import is_repair
from jaxscale.runtime.text.sources.part import BYTES
from jaxscale.system.exits import BadInput

MAX_IDS = 1 << 27  # tokens of all spans: half a gigabyte
TextIds = Callable[[str, str], Sequence[int]]  # (context, continuation) -> ids of both as one text
GROUP = "evals"  # prefix of metric names


@dataclasses.dataclass(frozen=True)
class ItemSet:
    """Items encoded as spans of ids, for scoring with one or several models."""

    kind: str  # choice or cloze
    items: tuple[EvalItem, ...]
    spans: tuple[TokenSpan, ...]  # spans of all continuations of all items, in order
    cut: int  # number of spans whose context was truncated
    alone: int  # number of spans whose continuation was encoded alone

    @property
    def fingerprint(self) -> str:
        """The sha256 of the spans and the right answers."""
        digest = hashlib.sha256(repr([item.right for item in self.items]).encode())
        for ids, first in self.spans:
            digest.update(f"{first} {len(ids)} ".encode() + np.ascontiguousarray(ids, np.int32).tobytes())
        return digest.hexdigest()

    def metrics(self, scorer: Scorer, packed: PackedSpans, params: object) -> dict[str, float]:
        """Returns the metrics for items of this kind, with standard errors."""
        scores = scorer.score_packed(params, packed)
        return choice_metrics(self.items, scores) if self.kind == "choice" else cloze_metrics(scores)


def encode_items(
    kind: str, items: Sequence[EvalItem], reading: EvalReading, skipped: SkippedItems | None = None
) -> ItemSet:
    """Encodes the items. skipped.add() counts an item that cannot be scored or raises BadInput."""
    skipped = SkippedItems() if skipped is None else skipped
    encoded, spans, num_cut, num_alone, num_ids = [], [], 0, 0, 0
    for item in items:
        try:
            pairs = [encode_pair(reading, item.context, continuation) for continuation in item.continuations]
            item_spans = [span_of(pair, reading.context) for pair in pairs]
        except BadInput as error:
            skipped.add(BadInput(f"evaluation item {item.name}: {error}"))
            continue
        encoded.append(item)
        spans += [span for span, _ in item_spans]
        num_ids += sum(len(span.ids) for span, _ in item_spans)
        if num_ids > MAX_IDS:
            raise BadInput(
                f"evaluation item {item.name}: all items so far, with contexts, have more than {MAX_IDS:,} tokens, "
                "the maximum in memory; set `limit` to fewer items"
            )
        num_cut += sum(cut for _, cut in item_spans)
        num_alone += sum(pair.alone for pair in pairs)
    if not encoded:
        raise BadInput(f"no item can be scored{skipped}")
    return ItemSet(kind, tuple(encoded), tuple(spans), num_cut, num_alone)


def choice_metrics(items: Sequence[EvalItem], scores: Scores) -> dict[str, float]:
    """Returns acc, acc_norm and acc_bytes with their standard errors, as lm-eval defines them.

    acc: the right continuation has the highest log-likelihood. acc_norm: the right continuation has the highest
    log-likelihood per character. acc_bytes: the same per UTF-8 byte. Ties go to the first; a NaN makes the result NaN.
    """
    right: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    begin = 0
    for item in items:
        end = begin + len(item.continuations)
        likelihoods, begin = -scores.nats[begin:end], end
        encoded = [answer.encode(errors="surrogatepass") for answer in item.answers]
        lengths = {"acc": 1.0, "acc_norm": list(map(len, item.answers)), "acc_bytes": list(map(len, encoded))}
        for name, length in lengths.items():
            chosen = np.argmax(likelihoods / np.asarray(length, np.float64))  # the index of a NaN, if there is one
            right[name].append(float(chosen == item.right) if not np.isnan(likelihoods[chosen]) else np.nan)
    return with_errors({name: mean_error(values) for name, values in right.items()}) | {"items": len(items)}


def cloze_metrics(scores: Scores) -> dict[str, float]:
    """Returns acc (each token of the target is the most likely) and perplexity of the targets (arXiv:1606.06031)."""
    acc = mean_error(np.where(np.isnan(scores.nats), np.nan, scores.likeliest))
    perplexity = exp_error(*mean_error(scores.nats))
    return with_errors({"acc": acc, "perplexity": perplexity}) | {"items": len(scores.nats)}


def with_errors(found: dict[str, tuple[float, float | None]]) -> dict[str, float]:
    """Returns {'acc': value, 'acc_stderr': error}, without errors that are None."""
    metrics = {}
    for name, (value, error) in found.items():
        metrics[name] = value
        if error is not None:
            metrics[f"{name}_stderr"] = error
    return metrics


class EncodedPair(NamedTuple):
    """Ids of a context and its continuation, as one text."""

    ids: np.ndarray  # int32[n]
    first: int  # index of the first id of the continuation
    alone: bool  # True if the continuation was encoded alone


def encode_pair(reading: EvalReading, context: str, continuation: str, text_ids: TextIds | None = None) -> EncodedPair:
    """Encodes both texts. text_ids: encoder of a chat. Raises BadInput for a continuation without tokens."""
    ids_of = text_ids or (lambda before, behind: reading.tokenizer.encode(before + behind))
    stripped = context.rstrip()
    context, continuation = stripped, context[len(stripped) :] + continuation
    begin, tail = () if text_ids else reading.begin_ids, ids_of(context, "") if context else ()
    begin = begin if len(begin) + len(tail) else reading.start_ids
    parts = [begin, ids_of(context, continuation)]
    alone = len(parts[1]) <= len(tail)  # a token spans the boundary
    if alone:
        parts = [begin, tail, ids_of("", continuation)]
    ids = np.concatenate([np.asarray(part, np.int32) for part in parts])
    first = len(begin) + len(tail)
    if first >= len(ids):
        raise BadInput(f"the continuation {continuation[:80]!r} has no tokens")
    return EncodedPair(ids, first, alone)


def span_of(pair: EncodedPair, longest: int) -> tuple[TokenSpan, bool]:
    """Returns (span, whether its context was truncated). Raises BadInput if the continuation exceeds `longest`."""
    ids, first, _ = pair
    cut = max(len(ids) - 1 - longest, 0)
    if first - cut < 1:
        raise BadInput(
            f"the continuation has {len(ids) - first} tokens, more than the context of {longest}; remove the item, or "
            "raise --context or seq_len of the run"
        )
    ids = ids[cut:].copy() if cut else ids  # a view would reference the whole array
    return TokenSpan(ids, first - cut), cut > 0


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A named evaluation with its data."""

    name: str
    every_steps: int
    measure: Callable[[Scorer, Any], dict[str, float]]  # (scorer, parameters) -> metrics without the name
    summary: str  # description of its data for display
    fingerprint: str  # sha256 of the data; '' for text that is read each time

    def metrics(self, scorer: Scorer, params: Any) -> dict[str, float]:
        """Returns {'evals/NAME/METRIC': value}, the same in all processes. Collective."""
        return {f"{GROUP}/{self.name}/{metric}": value for metric, value in self.measure(scorer, params).items()}


def open_evaluators(
    evals: Evals, reading: EvalReading, named: Callable[[str, NamedEval], str] = setting_name, *, hold: bool = True
) -> tuple[Evaluator, ...]:
    """Opens every evaluator and reads its data. Raises BadInput for missing or invalid data.

    named: function that returns the name of an evaluator in messages. hold: True to read text into memory once, so that
    a run does not fail if a file disappears; False to read the text for each evaluation, if it is too large for memory.
    """
    return tuple(open_one(name, settings, reading, named(name, settings), hold) for name, settings in evals.items())


def open_one(name: str, settings: NamedEval, reading: EvalReading, where: str, hold: bool) -> Evaluator:
    """Opens one evaluator. `where` is the name of its data in messages."""
    if isinstance(settings, TextEval):
        return text_evaluator(name, settings, reading, where, hold)
    files = check_item_files(settings.file, where)
    skipped = SkippedItems(settings.damaged)
    found = read_items(files, settings.kind, settings.limit, skipped)
    items = encode_items(settings.kind, found, reading, skipped)
    longest = max(span.num_positions for span in items.spans)
    packed = pack_spans(items.spans, row_length(longest, reading.context))  # once for all models
    summary = f"{settings.kind}, {len(items.items):,} items{skipped}"
    summary += f", {items.cut:,} contexts truncated on the left to {reading.context} tokens" if items.cut else ""
    summary += f", {items.alone:,} continuations encoded alone: a token spans the boundary" if items.alone else ""

    def measure(scorer: Scorer, params: Any) -> dict[str, float]:
        counts = {"left_out": skipped.count} if skipped.count else {}
        return items.metrics(scorer, packed, params) | counts

    return Evaluator(name, settings.every_steps, measure, summary, items.fingerprint)


def text_evaluator(name: str, settings: TextEval, reading: EvalReading, where: str, hold: bool) -> Evaluator:
    """Opens an evaluator of text."""
    stride = settings.stride or max(reading.context // 2, 1)
    if stride > reading.context:
        raise BadInput(f"{where}: stride={stride} must be at most the context of {reading.context} tokens")
    sources = check_text_files(settings.files, where)
    make = lambda files: TextSet(tuple(files), settings, reading, stride, settings.limit)
    sets = {source: make(files) for source, files in sources.items()}
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
    """Raises BadInput for missing files and unsupported file types. named: as in open_evaluators()."""
    for name, settings in evals.items():
        if isinstance(settings, TextEval):
            check_text_files(settings.files, named(name, settings))
        else:
            check_item_files(settings.file, named(name, settings))
