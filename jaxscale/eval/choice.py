"""Answers by likelihood: the continuation that a model finds likeliest, and whether it guesses a text's end.

Where a context ends and its continuation begins, in tokens, follows lm-eval's rule (TemplateLM._encode_pair): white
space at the end of the context is moved to the front of the continuation, since tokenizers join it to the word behind;
then the ids of the whole text are cut behind as many ids as the context alone has. So what is scored is what the model
would read, and never a word cut in an unusual place. Where one token spans the join, so that the cut leaves nothing,
the continuation is encoded alone, as in lm-eval's pull request 4055. A context without a token is replaced by the start
mark.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.eval.items import Item, LeftOut
from jaxscale.eval.scorer import Laid, Scorer, Scores, Span
from jaxscale.eval.text import Reading
from jaxscale.eval.uncertainty import exp_error, mean_error
from jaxscale.system.exits import BadInput

MOST_IDS = 1 << 27  # tokens of all spans: half a gigabyte
TextIds = Callable[[str, str], Sequence[int]]  # (a context, what follows it) -> their ids as one text


@dataclasses.dataclass(frozen=True)
class ItemSet:
    """Items as spans, to be scored under one model after another."""

    kind: str  # choice or cloze
    items: tuple[Item, ...]
    spans: tuple[Span, ...]  # of every continuation of every item, in order
    cut: int  # spans whose context is longer than the model reads
    alone: int  # spans whose continuation was encoded alone

    @property
    def fingerprint(self) -> str:
        """sha256 of the spans and of what is right."""
        digest = hashlib.sha256(repr([item.right for item in self.items]).encode())
        for span in self.spans:
            digest.update(
                f"{span.first} {len(span.ids)} ".encode() + np.ascontiguousarray(span.ids, np.int32).tobytes()
            )
        return digest.hexdigest()

    def metrics(self, scorer: Scorer, laid: Laid, params: object) -> dict[str, float]:
        """What the kind measures, with standard errors."""
        scores = scorer.score_laid(params, laid)
        return choice_metrics(self.items, scores) if self.kind == "choice" else cloze_metrics(scores)


def encode_items(kind: str, items: Sequence[Item], reading: Reading, left_out: LeftOut | None = None) -> ItemSet:
    """Returns the items as ids.

    left_out: counts the items with an answer that has no token or is longer than the model reads, if it says to skip
    them; None: as 'stop'. Raises BadInput naming such an item, and where no item is left.
    """
    left_out = LeftOut() if left_out is None else left_out
    encoded, spans, num_cut, num_alone, held = [], [], 0, 0, 0
    for item in items:
        try:
            pairs = [encode_pair(reading, item.context, continuation) for continuation in item.continuations]
            own = [span_of(pair, reading.context) for pair in pairs]
        except BadInput as error:
            left_out.add(BadInput(f"evaluation item {item.name}: {error}"))
            continue
        encoded.append(item)
        spans += [span for span, _ in own]
        held += sum(len(span.ids) for span, _ in own)
        if held > MOST_IDS:
            raise BadInput(
                f"evaluation item {item.name}: the items up to it have more than {MOST_IDS:,} tokens, contexts "
                "included, which are held in memory; set a limit of items"
            )
        num_cut += sum(cut for _, cut in own)
        num_alone += sum(pair.alone for pair in pairs)
    if not encoded:
        raise BadInput(f"no item can be scored{left_out}")
    return ItemSet(kind, tuple(encoded), tuple(spans), num_cut, num_alone)


def choice_metrics(items: Sequence[Item], scores: Scores) -> dict[str, float]:
    """acc, acc_norm and acc_bytes with their standard errors.

    acc: the likeliest continuation is the right one; acc_norm: the likeliest per character of the answer; acc_bytes:
    per byte of it in UTF-8. These are lm-eval's three of those names. Of equal ones the first is chosen. A likelihood
    that is not a number leaves no accuracy: all are nan.
    """
    right: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    begin = 0
    for item in items:
        end = begin + len(item.continuations)
        likelihoods, begin = -scores.nats[begin:end], end
        lengths = {
            "acc": 1.0,
            "acc_norm": np.array([len(answer) for answer in item.answers], np.float64),
            "acc_bytes": np.array([len(answer.encode(errors="surrogatepass")) for answer in item.answers], np.float64),
        }
        for name, length in lengths.items():
            chosen = np.argmax(likelihoods / length)  # a nan, where there is one
            right[name].append(float(chosen == item.right) if not np.isnan(likelihoods[chosen]) else np.nan)
    return with_errors({name: mean_error(values) for name, values in right.items()}) | {"items": len(items)}


def cloze_metrics(scores: Scores) -> dict[str, float]:
    """acc: every token of the target is the likeliest in its place; perplexity of a target: exp of the mean of their
    nats, each target being one (LAMBADA, arXiv:1606.06031, as lm-eval has it)."""
    nats, nats_error = mean_error(scores.nats)
    found = {
        "acc": mean_error(np.where(np.isnan(scores.nats), np.nan, scores.likeliest)),
        "perplexity": exp_error(nats, nats_error),
    }
    return with_errors(found) | {"items": len(scores.nats)}


def with_errors(found: dict[str, tuple[float, float | None]]) -> dict[str, float]:
    """{'acc': value, 'acc_stderr': error where there is one}."""
    metrics = {}
    for name, (value, error) in found.items():
        metrics[name] = value
        if error is not None:
            metrics[f"{name}_stderr"] = error
    return metrics


class Pair(NamedTuple):
    """Ids of a context and of its continuation, as one text."""

    ids: np.ndarray  # int32[n]
    first: int  # of the continuation
    alone: bool  # whether the continuation was encoded alone


def move_space(context: str, continuation: str) -> tuple[str, str]:
    """The pair with the context's last white space at the front of the continuation."""
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def encode_pair(reading: Reading, context: str, continuation: str, text_ids: TextIds | None = None) -> Pair:
    """The ids, what begins a document in front. Raises BadInput without a token to score.

    text_ids: for contexts that a chat template wrote, whose beginning is among what it writes.
    """
    ids_of = text_ids or (lambda before, behind: reading.tokenizer.encode(before + behind))
    context, continuation = move_space(context, continuation)
    begin, tail = () if text_ids else reading.begin_ids, ids_of(context, "") if context else ()
    begin = begin if len(begin) + len(tail) else reading.start_ids
    parts = [begin, ids_of(context, continuation)]
    alone = len(parts[1]) <= len(tail)  # a token spans the join
    if alone:
        parts = [begin, tail, ids_of("", continuation)]
    ids = np.concatenate([np.asarray(part, np.int32) for part in parts])
    first = len(begin) + len(tail)
    if first >= len(ids):
        raise BadInput(f"the continuation {continuation[:80]!r} has no token")
    return Pair(ids, first, alone)


def span_of(pair: Pair, longest: int) -> tuple[Span, bool]:
    """(the span of at most `longest` tokens that are read, whether its context was cut at the left).

    Raises BadInput where the continuation alone is longer.
    """
    ids, first, _ = pair
    cut = max(len(ids) - 1 - longest, 0)
    if first - cut < 1:
        raise BadInput(
            f"its continuation has {len(ids) - first} tokens, and {longest} are read; take it out, or have more read "
            "(--context, or seq_len of the run)"
        )
    return Span(ids[cut:].copy() if cut else ids, first - cut), cut > 0  # a view would hold all that is cut
