"""Tokenizes a block of documents in the order of a seeded shuffle of the whole set."""

import base64
import functools
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxscale.corpus.prepare.blocks import to_table, write_table
from jaxscale.corpus.prepare.config import PrepareConfig, TokenizerConfig
from jaxscale.corpus.prepare.fertility import Key, Sums, measure
from jaxscale.data.shards import dtype_for
from jaxscale.system.paths import write_bytes_atomic
from jaxscale.text.document import Document
from jaxscale.text.tokenizer.base import Tokenizer, frame_documents
from jaxscale.text.tokenizer.load import load_tokenizer

MEASURED = 20  # documents of each block, chosen by the shuffle, on which the tokenizer is measured


def shuffle_keys(seed: int, place: tuple[int, int], count: int) -> np.ndarray:
    """uint64[count]: where each document of a block comes in the shuffled set, which is in the order of these keys.

    They depend on the seed and on the document's place in the input, so that the order is the same for any number of
    workers, and no block need know of another.
    """
    name = f"shuffle {seed} {place[0]} {place[1]}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Philox(key=key).random_raw(count)


def tokenise_block(
    cfg: PrepareConfig, path: str, base: pathlib.Path, documents: Sequence[Document], place: tuple[int, int]
) -> tuple[int, list]:
    """Writes BASE.ids (documents with their begin and end) and BASE.arrow (a row for each), in the order of their keys.

    Args: path: of the tokenizer. place: of the block, (piece, number within it).
    Returns the number of tokens, those included, and how well the tokenizer fits a sample, as plain data.
    Raises BadInput where the fast encoder is wrong, or gives an id that the vocabulary does not have.
    """
    tokenizer = tokenizer_of(path, cfg.tokenizer)
    keys = shuffle_keys(cfg.write.seed, place, len(documents))
    order = np.argsort(keys, kind="stable")
    documents = [documents[i] for i in order]
    encoded = tokenizer.encode_block([document.text for document in documents])
    ids, lengths = frame_documents(encoded, tokenizer, dtype_for(tokenizer.vocab_size - 1))
    rows = to_table(documents, with_text=False)
    rows = rows.append_column("key", pa.array(keys[order]))
    rows = rows.append_column("tokens", pa.array(lengths))
    rows = rows.append_column("bytes", pa.array([document.size for document in documents], pa.int64()))
    write_bytes_atomic(f"{base}.ids", ids.data)
    write_table(pathlib.Path(f"{base}.arrow"), rows, packed=False)  # each shard looks at a part of it
    return len(ids), pack(measure(tokenizer, documents[:MEASURED]))


def pack(sums: Mapping[Key, Sums]) -> list:
    """Sums of fertility.py as plain data."""
    used = lambda one: base64.b64encode(np.packbits(one.used).tobytes()).decode()
    return [[*key, *one[:-1], used(one)] for key, one in sums.items()]


def unpack(packed: Sequence[Sequence[Any]], vocab_size: int) -> dict[Key, Sums]:
    """The inverse of pack."""
    bits = lambda text: np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=vocab_size).astype(bool)
    return {(source, language): Sums(*counts, bits(used)) for source, language, *counts, used in packed}


@functools.lru_cache(maxsize=2)
def tokenizer_of(path: str, cfg: TokenizerConfig) -> Tokenizer:
    """The tokenizer, loaded once in a process."""
    return load_tokenizer(path, cfg.eos_token, cfg.bos_token, cfg.encode)
