"""The ids that an objective needs beside those of the text: from its settings, or else from the tokenizer."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.base import Marks


@dataclasses.dataclass(frozen=True, eq=False)
class SpecialIds:
    """Ids that stand for no text, and which ids do. A field that the objective has no use for is 0 or empty."""

    is_special: np.ndarray  # bool[model's vocabulary]
    mask_id: int = 0
    sentinels: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # int32, first to last
    start_id: int = 0  # what a decoder reads before its first token
    end_id: int = 0
    modes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def ordinary(self) -> np.ndarray:
        """int32: the ids of text."""
        return np.flatnonzero(~self.is_special).astype(np.int32)


def find_special(
    named: Sequence[int], tokenizer: Any | None, token_bytes: np.ndarray | None, vocab_size: int
) -> np.ndarray:
    """bool[vocab_size]: these ids, and all that the tokenizer calls special.

    token_bytes: bytes of text of each id, 0 for what is special; None where no tokenizer is known, then all ids that
    are not named here are text.
    """
    is_special = np.zeros(vocab_size, bool)
    if token_bytes is not None:
        is_special[:] = True  # rows of the table beyond the tokenizer's ids stand for nothing
        is_special[: len(token_bytes)] = token_bytes[:vocab_size] == 0
    eos_id = getattr(tokenizer, "eos_id", None)
    is_special[[*named, *([] if eos_id is None else [eos_id])]] = True
    return is_special


class StandIn(NamedTuple):
    """What is known of the ids where there is no tokenizer."""

    name: str
    eos_id: int | None
    marks: Marks = Marks()


def stand_in_ids(vocab_size: int) -> StandIn:
    """The last ids of the vocabulary, for random tokens, which have no special ones; half of all are sentinels."""
    last = vocab_size - 1
    sentinels = tuple(range(max(last - 2, 0), vocab_size // 2, -1))
    return StandIn("synthetic", last, Marks(mask_id=max(last - 1, 0), sentinel_ids=sentinels))


def known_id(name: str, chosen: int | None, found: int | None, tokenizer: Any | None, vocab_size: int) -> int:
    """The id that the setting data.objective.`name` says, or the one that was `found` in the tokenizer.

    Raises BadInput if neither does, or the model has no such id.
    """
    found = found if chosen is None else chosen
    if found is None:
        raise BadInput(
            f"data.objective.{name} must be given ({why_none(tokenizer)}): an id that no text uses, "
            f"below model.vocab_size={vocab_size}"
        )
    check_in_vocabulary(name, [found], vocab_size)
    return int(found)


def check_in_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises BadInput for an id that the model does not have."""
    outside = [id for id in ids if not 0 <= id < vocab_size]
    if outside:
        raise BadInput(
            f"data.objective.{name} names id {outside[0]}, but the model has model.vocab_size={vocab_size}; "
            f"set that to {max(outside) + 1} or more"
        )


def check_apart(named: Mapping[str, Sequence[int]], token_bytes: np.ndarray | None) -> None:
    """Raises BadInput if one id stands for two things, or for text."""
    owner: dict[int, str] = {}
    for name, ids in named.items():
        for id in ids:
            if id in owner:
                raise BadInput(f"id {id} is used by data.objective.{owner[id]} and by {name}; they must differ")
            if token_bytes is not None and id < len(token_bytes) and token_bytes[id]:
                raise BadInput(
                    f"data.objective.{name} names id {id}, which the tokenizer uses for text; name one that it does "
                    f"not have, such as {len(token_bytes)}"
                )
            owner[id] = name


def why_none(tokenizer: Any | None) -> str:
    """Why the tokenizer did not tell."""
    return f"data.tokenizer={tokenizer.name} has none" if tokenizer is not None else "no tokenizer is known"
