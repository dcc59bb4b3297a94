"""Tokenizers in the tokenizer.json format, through the `tokenizers` package."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from jaxscale.data.tokenizer.base import choose_eos, fingerprint


class HuggingFaceTokenizer:
    """A tokenizer.json. A special token's name inside a text is read as plain text, so no text can end its document."""

    def __init__(self, path: str, eos_token: str = ""):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises bare Exception for every fault of the file
            raise ValueError(f"data.tokenizer={path} cannot be read as a tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()  # both are saved in some files, made for a model of fixed length
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = path
        self.vocab_size = max(ids.values()) + 1
        self.eos_id = choose_eos(path, eos_token, ids)
        self.fingerprint = fingerprint("tokenizers", Path(path), self.eos_id)
        self.token_bytes = self._count_bytes(json.loads(Path(path).read_text(encoding="utf-8")))

    def encode(self, text: str) -> np.ndarray:
        """int32[tokens], no special token among them."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """encode for each text, on all cores."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens left out."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def _count_bytes(self, spec: dict) -> np.ndarray:
        """Exact for byte-level models and those with SentencePiece's alphabet; else the bytes of the token's name.

        A normalizer that changes the text (lower case, NFC) changes its bytes before they are counted.
        """
        byte_level = '"ByteLevel"' in json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")])
        added = self._tokenizer.get_added_tokens_decoder()
        counts = np.zeros(self.vocab_size, np.int32)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in added:
                counts[i] = 0 if added[i].special else len(token.encode())
            elif byte_level:
                counts[i] = len(token)  # one character stands for one byte
            else:
                counts[i] = piece_bytes(token)
        return counts


def piece_bytes(piece: str) -> int:
    """Bytes of text behind a piece in SentencePiece's alphabet: '▁' is a space, '<0x0A>' one byte, '##' only a mark."""
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return 1
    return len(piece.replace("▁", " ").removeprefix("##").encode()) or len(piece)
