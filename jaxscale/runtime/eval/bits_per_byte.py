"""Perplexity and bits per byte of text by source, and perplexity of token ids. Every token is scored once.

A document is read in windows of `context` tokens that advance by `stride`. The first window scores all its tokens, and
later windows score the `stride` newest, so that each of these follows at least context - stride tokens. With stride =
context, windows are disjoint, except that the last window of a document starts earlier to have a full context. The
first token of a document is predicted from the start ids: the begin ids of the tokenizer, or else its end token.
"""

import dataclasses
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from jaxscale.runtime.data.checks import check_data, corpus_files
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.remote import map_ids
from jaxscale.runtime.data.token_files import open_tokens
from jaxscale.runtime.eval.scorer import Scorer, TokenSpan, row_length
from jaxscale.runtime.text.config import Globs, ReadConfig
from jaxscale.runtime.text.sources.files import SourceFile, list_files, text_problem
from jaxscale.runtime.text.sources.read import read_file
from jaxscale.runtime.text.tokenizer.base import Tokenizer
from jaxscale.system.exits import BadInput

MAX_TOKENS = 1 << 28  # of one source, one gigabyte
TOKENS_AT_ONCE = 1 << 21  # size of a block of documents; a longer document is a block by itself
Numbers: TypeAlias = Sequence[float] | np.ndarray
Ids = Sequence[int] | np.ndarray
Block = list[tuple[np.ndarray, int]]  # (ids, bytes) of documents
Tokens: TypeAlias = Globs | Sequence[Sequence[int]]  # files of token ids, or documents


def mean_error(values: Numbers) -> tuple[float, float | None]:
    """Returns (mean, standard error of the mean). The error is None for a single value."""
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return float(array.mean()), None
    return float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array)))


def ratio_error(above: Numbers, below: Numbers) -> tuple[float, float | None]:
    """Returns (sum of `above` / sum of `below`, standard error of this ratio).

    Each item has a value in both, such as the nats and bytes of a document. The error is a first-order estimate from
    the deviations above - ratio * below (Cochran 1977, Sampling Techniques, chapter 6).
    """
    numerators, denominators = np.asarray(above, np.float64), np.asarray(below, np.float64)
    ratio = float(numerators.sum() / denominators.sum())
    if len(numerators) < 2:
        return ratio, None
    deviations = numerators - ratio * denominators
    n = len(numerators)
    return ratio, float(math.sqrt(n / (n - 1) * np.square(deviations).sum()) / denominators.sum())


def exp_error(mean: float, error: float | None) -> tuple[float, float | None]:
    """Returns (exp(mean), first-order standard error), such as a perplexity and its error."""
    value = math.inf if mean > 700 else math.exp(mean)
    return value, None if error is None or not math.isfinite(value) else value * error


class EvalReading(NamedTuple):
    """The tokenizer of a model and its context length."""

    tokenizer: Tokenizer
    start_ids: tuple[int, ...]  # ids before every text; never scored; at least one
    begin_ids: tuple[int, ...]  # begin ids of a document, before a context; may be empty
    context: int  # context length: maximum number of tokens that the model reads

    @classmethod
    def of(cls, tokenizer: Tokenizer, context: int) -> "EvalReading":
        """Returns the settings for a tokenizer. Without begin ids, texts start with the end-of-document token."""
        return cls(tokenizer, tokenizer.begin_ids or (tokenizer.eos_id,), tokenizer.begin_ids, context)


class DocumentSums(NamedTuple):
    """Sums over the tokens of a document."""

    nats: float
    tokens: int
    bytes: int


def text_windows(num_ids: int, num_start: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields windows (begin, first, end). A window reads ids [begin, end - 1) and scores ids [first, end)."""
    first = num_start
    while first < num_ids:
        end = min(context + 1 if first == num_start else first + stride, num_ids)
        yield max(0, end - 1 - context), first, end
        first = end


def document_spans(ids: np.ndarray, start_ids: Ids, context: int, stride: int) -> list[TokenSpan]:
    """Returns the windows of one document as spans."""
    whole = np.concatenate([np.asarray(start_ids, np.int32), np.asarray(ids, np.int32)])
    windows = text_windows(len(whole), len(start_ids), context, stride)
    return [TokenSpan(whole[begin:end], first - begin) for begin, first, end in windows]


def check_text_files(files: Globs, setting: str) -> dict[str, list[SourceFile]]:
    """Returns the files of each source. Raises BadInput for a glob without files or a file that is not text."""
    found, problems = list_files(files, setting, "text")
    problems += [problem for file in found if (problem := text_problem(file))]
    if problems or not found:
        raise BadInput(problems[0] if problems else f"{setting} has no file")
    sources: dict[str, list[SourceFile]] = {}
    for file in found:
        sources.setdefault(file.source, []).append(file)
    return sources


def in_blocks(documents: Iterable[tuple[np.ndarray, int]]) -> Iterator[Block]:
    """Groups (ids, bytes) of documents into blocks of bounded size."""
    block, tokens = [], 0
    for document in documents:
        block.append(document)
        tokens += len(document[0])
        if tokens >= TOKENS_AT_ONCE:
            yield block
            block, tokens = [], 0
    if block:
        yield block


def measure_documents(
    block: Sequence[tuple[Ids, np.ndarray, int]], scorer: Scorer, params: Any, context: int, stride: int
) -> list[DocumentSums]:
    """Measures the documents that have tokens. block: (start ids, document ids, number of bytes) of each document."""
    spans, owners = [], []
    for number, (start_ids, ids, _) in enumerate(block):
        windows = document_spans(ids, start_ids, context, stride)
        spans += windows
        owners += [number] * len(windows)
    longest = max((span.num_positions for span in spans), default=1)
    scores = scorer.score(params, spans, row_length(longest, context))
    nats = np.bincount(owners, weights=scores.nats, minlength=len(block)) if owners else []
    return [DocumentSums(float(sum_), len(ids), size) for sum_, (_, ids, size) in zip(nats, block) if len(ids)]


@dataclasses.dataclass(frozen=True)
class TextSet:
    """The text of one source, to be measured with one or several models."""

    files: Sequence[SourceFile]
    read: ReadConfig
    reading: EvalReading
    stride: int
    limit: int = 0  # maximum number of documents; 0: all
    in_memory: tuple[Block, ...] | None = None  # the documents; None: read each time
    left_out: Counter = dataclasses.field(default_factory=Counter)

    def loaded(self) -> "TextSet":
        """Returns the set with its documents in memory."""
        blocks, tokens, left_out = [], 0, Counter()
        for block in self.blocks(left_out):
            blocks.append(block)
            tokens += sum(len(ids) for ids, _ in block)
            if tokens > MAX_TOKENS:
                files = ", ".join(file.path for file in self.files[:3])
                raise BadInput(
                    f"{files}: more than {MAX_TOKENS:,} tokens, the maximum in memory; set `limit` to fewer documents"
                )
        return dataclasses.replace(self, in_memory=tuple(blocks), left_out=left_out)

    def blocks(self, skipped: Counter) -> Iterator[Block]:
        """Yields the documents, and counts skipped ones."""
        if self.in_memory is not None:
            skipped.update(self.left_out)
            yield from self.in_memory
            return
        documents = itertools.chain.from_iterable(read_file(file, self.read, skipped) for file in self.files)
        documents = itertools.islice(documents, self.limit or None)
        yield from in_blocks((self.reading.tokenizer.encode(one.text), one.size) for one in documents)

    def measure(self, scorer: Scorer, params: Any, skipped: Counter) -> list[DocumentSums]:
        """Measures each document with tokens. Raises BadInput if there are none."""
        found, left_out = [], Counter()
        for block in self.blocks(left_out):
            documents = [(self.reading.start_ids, ids, size) for ids, size in block]
            found += measure_documents(documents, scorer, params, self.reading.context, self.stride)
        if not found:
            raise BadInput(self.no_text_message(left_out))
        skipped.update(left_out)
        return found

    def no_text_message(self, left_out: Counter) -> str:
        """Returns the error message for a source without text, with the reasons for skipped documents."""
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items())
        files = ", ".join(file.path for file in self.files[:3])
        return f"no text to evaluate in {files}" + (f" (left out: {reasons})" if reasons else "")

    @property
    def fingerprint(self) -> str:
        """The sha256 of the documents and the window settings."""
        digest = hashlib.sha256(f"{self.reading.start_ids} {self.reading.context} {self.stride}".encode())
        for ids, _ in itertools.chain.from_iterable(self.blocks(Counter())):
            digest.update(len(ids).to_bytes(8, "little") + np.ascontiguousarray(ids, np.int32).tobytes())
        return digest.hexdigest()


def summarise_text(measured: Sequence[DocumentSums]) -> dict[str, float]:
    """Returns loss [nats/token], perplexity and bits_per_byte, with standard errors over documents, and counts."""
    nats, tokens, sizes = zip(*measured)
    loss, loss_error = ratio_error(nats, tokens)
    perplexity, perplexity_error = exp_error(loss, loss_error)
    metrics = {"loss": loss, "perplexity": perplexity}
    errors = {"loss_stderr": loss_error, "perplexity_stderr": perplexity_error}
    if sum(sizes):
        metrics["bits_per_byte"], bits_error = ratio_error(np.asarray(nats) / math.log(2), sizes)
        errors["bits_per_byte_stderr"] = bits_error
    counts = {"documents": len(measured), "tokens": sum(tokens), "bytes": sum(sizes)}
    return metrics | {name: error for name, error in errors.items() if error is not None} | counts


def text_metrics(sets: Mapping[str, TextSet], scorer: Scorer, params: Any, skipped: Counter) -> dict[str, float]:
    """Returns the metrics of all sources together and, if there are several, of each. Raises BadInput without text."""
    measured = {name: one.measure(scorer, params, skipped) for name, one in sets.items()}
    metrics = summarise_text([document for found in measured.values() for document in found])
    if len(measured) > 1:
        for name, found in measured.items():
            metrics |= {f"{name}/{metric}": value for metric, value in summarise_text(found).items()}
    return metrics


def open_documents(name: str, given: Tokens, vocab_size: int, limit: int = 0) -> Callable[[], Iterator[np.ndarray]]:
    """Returns a function that yields at most `limit` documents (0: all). Raises BadInput for missing files."""
    if isinstance(given, (str, dict)) or len(given) and all(isinstance(one, str) for one in given):
        documents = open_token_files(name, cast(Globs, given), vocab_size)
    else:
        documents = lambda: checked_documents(name, given, vocab_size)
    return lambda: itertools.islice(documents(), limit or None)


def checked_documents(name: str, documents: Iterable[Any], vocab_size: int) -> Iterator[np.ndarray]:
    """Yields documents as arrays. Raises BadInput for a document that is not a list of ids in the vocabulary."""
    for number, document in enumerate(documents):
        ids = np.asarray(document)
        if ids.ndim != 1 or not (ids.dtype.kind in "iu" or ids.size == 0):
            raise BadInput(f"{name}[{number}] must be a list of token ids; pass a single document as [ids]")
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            worst = ids.max() if ids.max() >= vocab_size else ids.min()
            raise BadInput(
                f"{name}[{number}] has the token id {worst}, but the model's vocabulary has {vocab_size} ids"
            )
        yield ids


def open_token_files(name: str, files: Globs, vocab_size: int) -> Callable[[], Iterator[np.ndarray]]:
    """Returns a function that yields the documents of token files. Raises BadInput for missing files or invalid ids."""
    cfg = DataConfig(name="tokens", files=files)
    if problems := check_data(cfg, 1, vocab_size):
        raise BadInput(problems[0].replace("data.files", name))
    shards = open_tokens(cfg, corpus_files(cfg)[0][0], (), vocab_size, lambda line: None)[0]
    for shard in shards:
        if (largest := shard.header["max_id"]) >= vocab_size:
            raise BadInput(f"{shard.place} has the token id {largest}, but the model's vocabulary has {vocab_size} ids")

    def documents() -> Iterator[np.ndarray]:
        for shard in shards:
            ids = map_ids(shard.bin_path, shard.header["dtype"])
            for begin, end in zip(shard.offsets[:-1], shard.offsets[1:]):
                yield ids[begin:end]

    return documents


def token_metrics(
    name: str, documents: Iterable[np.ndarray], scorer: Scorer, params: Any, context: int, stride: int
) -> dict[str, float]:
    """Returns metrics of documents. Does not score the first id. Raises BadInput if no document has two ids."""
    measured = []
    for block in in_blocks((np.asarray(document, np.int32), 0) for document in documents):
        triples = [(ids[:1], ids[1:], size) for ids, size in block]
        measured += measure_documents(triples, scorer, params, context, stride)
    if not measured:
        raise BadInput(f"{name} has no document with at least two tokens, so no token can be scored")
    return summarise_text(measured)
