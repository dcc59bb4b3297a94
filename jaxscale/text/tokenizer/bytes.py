"""The byte tokenizer: UTF-8 bytes are token ids; nothing to train or load."""

import hashlib
import types
from collections.abc import Sequence

import numpy as np

from jaxscale.text.tokenizer.base import Block, Marks

EOS_ID = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a document. Every text comes back as it was."""

    name = "bytes"
    vocab_size = 257
    eos_id = EOS_ID
    eos_token = ""
    begin_ids = ()
    fingerprint = hashlib.sha256(b"jaxscale byte tokenizer, end 256").hexdigest()
    token_bytes = np.array([1] * 256 + [0], np.int32)
    fallback = np.arange(257) // 128 == 1  # bytes of longer characters
    marks = Marks()
    special_ids = types.MappingProxyType({"<|endoftext|>": EOS_ID})
    prefix_after_special = False

    def encode(self, text: str) -> np.ndarray:
        """int32[bytes of the text in UTF-8]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """encode for each text."""
        return [self.encode(text) for text in texts]

    def encode_block(self, texts: Sequence[str]) -> Block:
        """encode for each text, as one array."""
        encoded = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
        return Block(ids, np.array([len(text) for text in encoded], np.int64))

    def decode(self, ids: Sequence[int]) -> str:
        """The text; a cut character shows as U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < EOS_ID).decode(errors="replace")
