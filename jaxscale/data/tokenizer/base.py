"""What every tokenizer here can do, and how one is chosen by the setting `data.tokenizer`."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

# In the order they are looked for: GPT-2, Llama and SentencePiece, Llama 3, Gemma, ChatML models.
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


class Tokenizer(Protocol):
    """Token ids are int32[tokens]. No special token ever comes out of a text, whatever the text says."""

    name: str  # what data.tokenizer says, to find it again
    vocab_size: int  # the largest id + 1
    eos_id: int  # ends every document
    fingerprint: str  # of the file and the end token: equal fingerprints, equal ids
    token_bytes: np.ndarray  # int32[vocab_size]: bytes of text that each id stands for; 0 for special tokens

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, without any that begins or ends it."""

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """encode for each text, faster where the library has threads of its own."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens left out; bytes that are no UTF-8 show as U+FFFD."""


def choose_eos(path: str, eos_token: str, ids: dict[str, int]) -> int:
    """The id of `eos_token`, or of the first usual name that `ids` knows. Raises ValueError if there is none."""
    if eos_token:
        if eos_token not in ids:
            raise ValueError(f"data.eos_token={eos_token!r} is not a token of {path}")
        return ids[eos_token]
    for name in EOS_NAMES:
        if name in ids:
            return ids[name]
    raise ValueError(f"{path} has none of the usual end-of-document tokens {EOS_NAMES}; name it in data.eos_token")


def fingerprint(kind: str, path: Path, eos_id: int) -> str:
    """sha256 of the file's bytes, of how they are read, and of the end token."""
    return hashlib.sha256(path.read_bytes() + f"|{kind}|{eos_id}".encode()).hexdigest()
