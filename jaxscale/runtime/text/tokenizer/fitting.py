"""Handles tokenizers with more ids than the embedding table of the model.

For example, Gemma 3's tokenizer has <image_soft_token>, which is not in the table of the text-only model, and some
adapters are published with an additional padding token. Such ids are never sampled, and encoding text to them raises.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxscale.runtime.text.tokenizer.base import EncodedBlock, Tokenizer
from jaxscale.system.exits import BadInput


def fits(tokenizer: Tokenizer, vocab_size: int) -> bool:
    """Returns True if the ids of ordinary text, begin tokens and the end token are all below vocab_size."""
    ends = max(tokenizer.eos_id, *tokenizer.begin_ids, 0)
    is_text = (tokenizer.token_bytes[vocab_size:] > 0) | tokenizer.fallback[vocab_size:]
    return ends < vocab_size and not is_text.any()


def describe_unused(tokenizer: Tokenizer, vocab_size: int) -> str:
    """Returns 'has special tokens outside the model's vocabulary, ...', or '' if there are no such tokens."""
    names = sorted(name for name, i in tokenizer.special_ids.items() if i >= vocab_size)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    line = f"has special tokens outside the model's vocabulary, which are not used: {', '.join(names[:3])}{more}"
    return line if names else ""


def limit_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer, wrapped in a BoundedTokenizer if it has more ids than the model."""
    return tokenizer if tokenizer.vocab_size <= vocab_size else cast(Tokenizer, BoundedTokenizer(tokenizer, vocab_size))


class BoundedTokenizer:
    """Tokenizer that raises BadInput for text with token ids outside the model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self.special_ids = BoundedIds(tokenizer.special_ids)
        self.special_ids.vocab_size = vocab_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # accessed while copying, before _tokenizer is set
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text as int32[tokens]."""
        return self._checked(self._tokenizer.encode(text))

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text as int32[tokens]."""
        return [self._checked(ids) for ids in self._tokenizer.encode_many(texts)]

    def encode_block(self, texts: Sequence[str]) -> EncodedBlock:
        """Encodes texts into one concatenated array."""
        block = self._tokenizer.encode_block(texts)
        self._checked(block.ids)
        return block

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if (largest := int(ids.max(initial=0))) >= self.special_ids.vocab_size:
            raise BadInput(self.special_ids.refusal(largest))
        return ids


class BoundedIds(dict[str, int]):
    """Dict {name: id} that raises BadInput on access to an id outside the model's vocabulary."""

    vocab_size = 0

    def __getitem__(self, name: str) -> int:
        if (found := super().__getitem__(name)) >= self.vocab_size:
            raise BadInput(self.refusal(found))
        return found

    def refusal(self, found: int) -> str:
        """Returns the error message for an id outside the model's vocabulary."""
        name = next((name for name, i in self.items() if i == found), "a token")
        return (
            f"contains {name}, token id {found} of the tokenizer, but the model has only {self.vocab_size} ids; "
            "remove the token from the text or the chat template"
        )
