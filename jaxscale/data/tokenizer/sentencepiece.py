"""SentencePiece models."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from jaxscale.data.tokenizer.base import choose_eos, fingerprint


class SentencePieceTokenizer:
    """A .model file. What its normalizer does to a text (most turn line ends into spaces) is part of the tokenizer."""

    def __init__(self, path: str, eos_token: str = ""):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"data.tokenizer={path} cannot be read as a SentencePiece model: {reason}") from None
        processor = self._processor
        self.name = path
        self.vocab_size = processor.get_piece_size()
        pieces = [processor.id_to_piece(i) for i in range(self.vocab_size)]
        if processor.eos_id() >= 0 and not eos_token:
            self.eos_id = processor.eos_id()
        else:
            self.eos_id = choose_eos(path, eos_token, {piece: i for i, piece in enumerate(pieces)})
        self.fingerprint = fingerprint("sentencepiece", Path(path), self.eos_id)
        self.token_bytes = np.array([self._count_bytes(i, piece) for i, piece in enumerate(pieces)], np.int32)

    def encode(self, text: str) -> np.ndarray:
        """int32[tokens]."""
        return np.array(self._processor.encode(text), np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """encode for each text, on all cores."""
        return [np.array(ids, np.int32) for ids in self._processor.encode(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, control tokens left out."""
        return self._processor.decode([int(i) for i in ids])

    def _count_bytes(self, i: int, piece: str) -> int:
        """Exact but for the space that most models put before a text, which counts as one byte more per document.

        An unknown character counts as one byte: the model does not say which it was.
        """
        if self._processor.is_control(i):
            return 0
        if self._processor.is_byte(i) or self._processor.is_unknown(i):
            return 1
        return len(piece.replace("▁", " ").encode())
