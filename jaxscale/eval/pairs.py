"""Where a context ends and its continuation begins, in tokens.

The rule is that of lm-eval (TemplateLM._encode_pair): white space at the end of the context is moved to the front of
the continuation, since tokenizers join it to the word behind; then the ids of the whole text are cut behind as many
ids as the context alone has. So what is scored is what the model would read, and never a word cut in an unusual place.
A context without a token is replaced by the start mark.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.eval.scorer import Span
from jaxscale.eval.text import Reading
from jaxscale.system.exits import BadInput

TextIds = Callable[[str, str], Sequence[int]]  # (a context, what follows it) -> their ids as one text


class Pair(NamedTuple):
    """Ids of a context and of its continuation, as one text."""

    ids: np.ndarray  # int32[n]
    first: int  # of the continuation


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
    ids = np.concatenate([np.asarray(part, np.int32) for part in (begin, ids_of(context, continuation))])
    first = len(begin) + len(tail)
    if first >= len(ids):
        raise BadInput(f"the continuation {continuation[:80]!r} adds no token to its context")
    return Pair(ids, first)


def span_of(pair: Pair, longest: int) -> tuple[Span, bool]:
    """(the span of at most `longest` tokens that are read, whether its context was cut at the left).

    Raises BadInput where the continuation alone is longer.
    """
    ids, first = pair
    cut = max(len(ids) - 1 - longest, 0)
    if first - cut < 1:
        raise BadInput(
            f"its continuation has {len(ids) - first} tokens, and {longest} are read; take it out, or have more read "
            "(--context, or seq_len of the run)"
        )
    return Span(ids[cut:].copy() if cut else ids, first - cut), cut > 0  # a view would hold all that is cut
