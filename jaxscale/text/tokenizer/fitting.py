"""A tokenizer whose vocabulary is larger than the embedding table of its model.

Gemma 3's has <image_soft_token>, for which the table of the text-only model has no row; adapters are published with a
padding token that their model never got. Such an id is never drawn, and a text that comes to one is refused.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.base import Block, Tokenizer


def fits(tokenizer: Tokenizer, vocab_size: int) -> bool:
    """Returns True if a model with vocab_size ids covers every id of text, and of its begin and end tokens."""
    ends = max(tokenizer.eos_id, *tokenizer.begin_ids, 0)
    of_text = (tokenizer.token_bytes[vocab_size:] > 0) | tokenizer.fallback[vocab_size:]
    return ends < vocab_size and not of_text.any()


def tell_beyond(tokenizer: Tokenizer, vocab_size: int) -> str:
    """A line on the special tokens for which the model has no id, which follows the tokenizer's name; '': none."""
    names = sorted(name for name, i in tokenizer.special_ids.items() if i >= vocab_size)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    line = f"has special tokens for which the model has no id, and which are never used: {', '.join(names[:3])}{more}"
    return line if names else ""


def fitted(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """The tokenizer; where it has more ids than the model, one that refuses whatever comes to them."""
    return tokenizer if tokenizer.vocab_size <= vocab_size else cast(Tokenizer, Fitted(tokenizer, vocab_size))


class Fitted:
    """A tokenizer, but that BadInput is raised for a text with an id that the model does not have."""

    def __init__(self, whole: Tokenizer, vocab_size: int):
        self._whole = whole
        self.special_ids = Known(whole.special_ids)
        self.special_ids.vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # which a copy asks for before it has _whole
            raise AttributeError(name)
        return getattr(self._whole, name)

    def encode(self, text: str) -> np.ndarray:
        """int32[tokens]."""
        return self._checked(self._whole.encode(text))

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """encode for each text."""
        return [self._checked(ids) for ids in self._whole.encode_many(texts)]

    def encode_block(self, texts: Sequence[str]) -> Block:
        """encode for each text, as one array."""
        block = self._whole.encode_block(texts)
        self._checked(block.ids)
        return block

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if (largest := int(ids.max(initial=0))) >= self.special_ids.vocab_size:
            raise BadInput(self.special_ids.refusal(largest))
        return ids


class Known(dict[str, int]):
    """{name: id}; BadInput for asking for an id that the model does not have."""

    vocab_size = 0

    def __getitem__(self, name: str) -> int:
        if (found := super().__getitem__(name)) >= self.vocab_size:
            raise BadInput(self.refusal(found))
        return found

    def refusal(self, found: int) -> str:
        """The line on an id."""
        name = next((name for name, i in self.items() if i == found), "a token")
        return (
            f"a text has {name}, which is token id {found} of the tokenizer, and the model has {self.vocab_size} ids; "
            "leave it out of the text or the chat template"
        )
