"""Plans the passes of a preparation: stages between joins, and tokenizer training."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxscale.corpus.prepare.config import JOINS


class Pass(NamedTuple):
    """Once over all documents: `stages` one after the other, then what the next pass needs."""

    stages: tuple[str, ...]
    ends: Literal["joins", "sample", "tokens"]  # sketches for joins; documents a tokenizer is trained on; token ids
    joins: tuple[str, ...] = ()


def plan_passes(stages: Sequence[str], *, train_tokenizer: bool) -> list[Pass]:
    """The passes for stages in the recipe's order. Joins of whole documents that stand together see the same ones."""
    passes: list[Pass] = []
    waiting: list[str] = []
    joins: list[str] = []
    for name in [*stages, ""]:
        alone = "line_dedup" in (name, *joins)  # else a line could be cut for a copy in a document that is dropped
        if joins and (name not in JOINS or alone):
            passes.append(Pass(tuple(waiting), "joins", tuple(joins)))
            waiting, joins = [], []
        if name in JOINS:
            joins.append(name)
        elif name:
            waiting.append(name)
    if not train_tokenizer:
        return [*passes, Pass(tuple(waiting), "tokens")]
    return [*passes, Pass(tuple(waiting), "sample"), Pass((), "tokens")]
