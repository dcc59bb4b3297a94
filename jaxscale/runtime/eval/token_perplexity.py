"""Perplexity of token ids, for models without a tokenizer: of arrays, or of training's token files."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from jaxscale.runtime.data.checks import check_data, corpus_files
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.remote import map_ids
from jaxscale.runtime.data.token_files import open_tokens
from jaxscale.runtime.eval.bits_per_byte import in_blocks, measure_documents, summarise_text
from jaxscale.runtime.eval.scorer import Scorer
from jaxscale.runtime.text.config import Globs
from jaxscale.system.exits import BadInput

Tokens: TypeAlias = Globs | Sequence[Sequence[int]]  # files, or documents


def open_documents(name: str, given: Tokens, vocab_size: int, limit: int = 0) -> Callable[[], Iterator[np.ndarray]]:
    """Returns a function that yields the documents, at most `limit` (0: all), as ids. name: for messages.

    Raises: BadInput for files that are missing or not token files, and for an id outside the model's vocabulary.
    """
    documents = files_of(name, given, vocab_size) if are_files(given) else lambda: checked(name, given, vocab_size)
    return lambda: itertools.islice(documents(), limit or None)


def are_files(given: Tokens) -> TypeGuard[Globs]:
    """True for file names, False for documents."""
    return isinstance(given, (str, dict)) or bool(len(given)) and all(isinstance(one, str) for one in given)


def checked(name: str, documents: Iterable[Any], vocab_size: int) -> Iterator[np.ndarray]:
    """Yields documents that a person gave. Raises BadInput for anything but ids of the vocabulary."""
    for number, document in enumerate(documents):
        ids = np.asarray(document)
        if ids.ndim != 1 or not (ids.dtype.kind in "iu" or ids.size == 0):
            raise BadInput(f"{name}[{number}] must be a list of token ids; a single document is [ids]")
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            worst = ids.max() if ids.max() >= vocab_size else ids.min()
            raise BadInput(f"{name}[{number}] has the token id {worst}, and the model's vocabulary is {vocab_size}")
        yield ids


def files_of(name: str, files: Globs, vocab_size: int) -> Callable[[], Iterator[np.ndarray]]:
    """Returns a function that yields the documents of token files. Raises BadInput as open_documents does."""
    cfg = DataConfig(name="tokens", files=files)
    if problems := check_data(cfg, 1, vocab_size):
        raise BadInput(problems[0].replace("data.files", name))
    shards = open_tokens(cfg, corpus_files(cfg)[0][0], (), vocab_size, lambda line: None)[0]
    for shard in shards:
        if shard.header["max_id"] >= vocab_size:
            largest = shard.header["max_id"]
            raise BadInput(f"{shard.place} has the token id {largest}, and the model's vocabulary is {vocab_size}")

    def documents() -> Iterator[np.ndarray]:
        for shard in shards:
            ids = map_ids(shard.bin_path, shard.header["dtype"])
            for begin, end in zip(shard.offsets[:-1], shard.offsets[1:]):
                yield ids[begin:end]

    return documents


def token_metrics(
    name: str, documents: Iterable[np.ndarray], scorer: Scorer, params: Any, context: int, stride: int
) -> dict[str, float]:
    """Returns loss and perplexity, as for text: the first id of a document is read, and all others are scored once.

    Raises: BadInput if no document has two ids.
    """
    measured = []
    for block in in_blocks((np.asarray(document, np.int32), 0) for document in documents):
        triples = [(ids[:1], ids[1:], size) for ids, size in block]
        measured += measure_documents(triples, scorer, params, context, stride)
    if not measured:
        raise BadInput(f"{name} has no document of two tokens or more: nothing is predicted")
    return summarise_text(measured)
