"""Random tokens: a throughput run that needs no file and no tokenizer."""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxscale.data.batch import Batch, stack_rows

NUM_ROWS = 1 << 24  # an epoch; large enough that no run meets a row twice


class SyntheticRows:
    """Rows of tokens drawn uniformly from [0, vocab_size), each from its own (seed, row) key. Picklable."""

    def __init__(self, *, seq_len: int, vocab_size: int, seed: int, num_rows: int = NUM_ROWS):
        self.seq_len, self.vocab_size, self.seed, self.num_rows = seq_len, vocab_size, seed, num_rows
        digest = hashlib.blake2b(f"synthetic tokens {seed}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "little")

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"SyntheticRows(seq_len={self.seq_len}, vocab_size={self.vocab_size}, seed={self.seed})"

    def __getitem__(self, row: int) -> Batch:
        """Row `row` as a Batch of [T]: one document, every target counts."""
        T, row = self.seq_len, int(row) % self.num_rows
        raw = np.random.Philox(key=self._key + (row << 64)).random_raw(T // 2 + 1).view(np.uint32)[: T + 1]
        drawn = ((raw.astype(np.uint64) * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int32)
        ones_T = np.ones(T, np.int32)
        return Batch(drawn[:-1], drawn[1:], np.arange(T, dtype=np.int32), ones_T, np.ones(T, np.float32))

    def locate(self, rows: np.ndarray) -> np.ndarray:
        """The rows themselves: they are nowhere but in their numbers."""
        return rows

    def read(self, located: np.ndarray, chosen: Sequence[int]) -> Batch:
        """Some of the located rows, by their places among them: a Batch of [len(chosen), T]."""
        return stack_rows([self[located[place]] for place in chosen])

    def row_sources(self, row: int) -> np.ndarray:
        """int32[T]: there is one source, 0."""
        return np.zeros(self.seq_len, np.int32)
