"""From the settings to a corpus: the one door through which the rest of the program gets its batches."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.data.batch import Batch, padding_row, stack_rows
from jaxscale.data.cache import Say, count, describe_skipped, scanned, tokenised
from jaxscale.data.checks import check_data, check_lengths, corpus_files, raw_dtype, vocabulary_problem
from jaxscale.data.config import DataConfig
from jaxscale.data.order import Batches, shuffled_rows
from jaxscale.data.packing import PackedRows, join_tables
from jaxscale.data.shards import Shard, open_shard, read_header
from jaxscale.data.sources import SourceFile
from jaxscale.data.split import hold_out
from jaxscale.data.synthetic import SyntheticRows
from jaxscale.data.tokenizer.base import Tokenizer
from jaxscale.data.tokenizer.load import load_tokenizer, tokenizer_problem

VALIDATION_SEED = 0  # not the run's: losses of two runs are compared over the same rows
VALIDATION_ROWS_SYNTHETIC = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation rows, and what is known of them."""

    train_rows: Any  # PackedRows or SyntheticRows
    valid_rows: Any | None
    seq_len: int
    seed: int
    source_names: tuple[str, ...]
    tokenizer: Tokenizer | None
    token_bytes: np.ndarray | None  # int32[vocabulary]: bytes of text that each id stands for
    fingerprint: str  # equal wherever the same tokens are divided the same way
    summary: str  # one line for people

    @property
    def epoch_tokens(self) -> int:
        """Tokens in all rows of training, the padding of the last one included."""
        return len(self.train_rows) * self.seq_len

    def batches(self, rows_per_batch: int) -> Batches:
        """The endless training batches, each epoch shuffled anew."""
        return Batches(shuffled_rows(self.train_rows, self.seed), rows_per_batch)

    def valid_batches(self, num_rows: int, rows_per_batch: int) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
        """Yields (batch, sources int32[rows, T], target_bytes int32[rows, T]) over at most num_rows rows.

        They are spread evenly over the validation set and always the same. Rows that fill up the last batch weigh 0.
        target_bytes: what each target stands for in bytes of text; 0 where the weight is 0, or no tokenizer is known.
        """
        assert self.valid_rows is not None, "there is no validation set"
        chosen = evenly_spread(len(self.valid_rows), num_rows)
        for first in range(0, len(chosen), rows_per_batch):
            part = chosen[first : first + rows_per_batch]
            missing = rows_per_batch - len(part)
            batch = stack_rows([self.valid_rows[row] for row in part] + [padding_row(self.seq_len)] * missing)
            nowhere = [np.zeros(self.seq_len, np.int32)] * missing
            sources = np.stack([self.valid_rows.row_sources(row) for row in part] + nowhere)
            sizes = np.zeros_like(batch.targets) if self.token_bytes is None else self.token_bytes[batch.targets]
            yield batch, sources, np.where(batch.weights > 0, sizes, 0).astype(np.int32)


def evenly_spread(total: int, wanted: int) -> list[int]:
    """At most `wanted` of the numbers below `total`, evenly spread, in order."""
    chosen = min(total, wanted)
    return [i * total // chosen for i in range(chosen)]


def open_data(
    cfg: DataConfig, *, seq_len: int, vocab_size: int, seed: int, say: Callable[[str], None] = print
) -> Corpus:
    """The corpus, tokenised first if it never was.

    Args: seq_len: tokens in a row. vocab_size: the model's. seed: of the order of documents and rows.
    Raises: ValueError for what check_data finds, a corpus that is empty or shorter than a row, an empty validation set,
    text that is not UTF-8 where that is to stop, a token id that the model does not have, a damaged cache.
    """
    if problems := check_data(cfg, seq_len, vocab_size):
        raise ValueError(problems[0])
    if cfg.name == "synthetic":
        return synthetic_corpus(seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    files, val_files = corpus_files(cfg)[0]
    if cfg.name == "tokens":
        shards, val_shards, tokenizer = open_tokens(cfg, files, val_files, vocab_size, say)
    else:
        tokenizer = load_tokenizer(cfg.tokenizer or "bytes", cfg.eos_token)
        shards = [tokenised(files, tokenizer, cfg, say)]
        val_shards = [tokenised(val_files, tokenizer, cfg, say)] if val_files else []
    for shard in [*shards, *val_shards]:
        if shard.header["max_id"] >= vocab_size:
            raise ValueError(vocabulary_problem(shard.bin_path, shard.header["max_id"], vocab_size))
    return assemble(cfg, shards, val_shards, tokenizer, seq_len, seed)


def assemble(
    cfg: DataConfig,
    trained: Sequence[Shard],
    held: Sequence[Shard],
    tokenizer: Tokenizer | None,
    seq_len: int,
    seed: int,
) -> Corpus:
    """The corpus over the shards for training and those for validation; without the latter, a part of the former."""
    shards = [*trained, *held]
    names = tuple(dict.fromkeys(name for shard in shards for name in shard.header["sources"]))
    train, valid, rule = join_tables([shard.table(names) for shard in trained]), None, ""
    content = [*(shard.fingerprint for shard in trained), "validation", *(shard.fingerprint for shard in held)]
    if held:
        valid, rule = join_tables([shard.table(names) for shard in held]), "data.val_files"
    elif cfg.val_fraction:
        files = [(file["name"], file["documents"]) for shard in trained for file in shard.header["files"]]
        train, valid, rule = hold_out(train, files, names, cfg.val_fraction)
        content += [str(cfg.val_fraction), *(f"{name}:{documents}" for name, documents in files)]
    check_lengths(cfg, train, valid, seq_len)

    train_rows = PackedRows(train, seq_len=seq_len, seed=seed)
    skipped = sum((Counter(shard.header["skipped"]) for shard in shards), Counter())
    text_bytes = sum(shard.header["text_bytes"] for shard in shards)
    facts = [
        f"{count(len(train), 'document')}, {train.num_tokens:,} tokens, {count(len(train_rows), 'row')} of {seq_len}"
    ]
    if valid is not None:
        facts.append(f"validation {count(len(valid), 'document')}, {valid.num_tokens:,} tokens ({rule})")
    else:
        facts.append("no validation")
    facts += [f"{text_bytes:,} bytes of text"] if text_bytes else []
    facts += [f"tokenizer {tokenizer.name if tokenizer else 'not known'}"]
    facts += [f"skipped {describe_skipped(skipped)}"] if skipped else []
    return Corpus(
        train_rows=train_rows,
        valid_rows=PackedRows(valid, seq_len=seq_len, seed=VALIDATION_SEED) if valid is not None else None,
        seq_len=seq_len,
        seed=seed,
        source_names=names,
        tokenizer=tokenizer,
        token_bytes=tokenizer.token_bytes if tokenizer else common_token_bytes(shards),
        fingerprint=hashlib.sha256("|".join(content).encode(errors="surrogateescape")).hexdigest(),
        summary=f"data.{cfg.name}: " + "; ".join(facts),
    )


def synthetic_corpus(*, seq_len: int, vocab_size: int, seed: int) -> Corpus:
    """Uniform random tokens; there is nothing to read."""
    make = dict(seq_len=seq_len, vocab_size=vocab_size)
    return Corpus(
        train_rows=SyntheticRows(**make, seed=seed),
        valid_rows=SyntheticRows(**make, seed=~seed, num_rows=VALIDATION_ROWS_SYNTHETIC),
        seq_len=seq_len,
        seed=seed,
        source_names=("synthetic",),
        tokenizer=None,
        token_bytes=None,
        fingerprint=f"synthetic-{vocab_size}",
        summary=f"data.synthetic: uniform ids below {vocab_size:,}; its loss cannot fall below log(vocabulary)",
    )


def open_tokens(
    cfg: DataConfig, files: Sequence[SourceFile], val_files: Sequence[SourceFile], vocab_size: int, say: Say
) -> tuple[list[Shard], list[Shard], Tokenizer | None]:
    """(training shards, validation shards, tokenizer if it is known) of token files, with or without a header."""
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.eos_token) if cfg.tokenizer else None
    eos_id = cfg.eos_id if cfg.eos_id is not None or tokenizer is None else tokenizer.eos_id

    def open_one(file: SourceFile) -> Shard:
        if read_header(Path(file.path)) is None:
            return scanned(file, raw_dtype(cfg, vocab_size), eos_id, cfg, say)
        return open_shard(Path(file.path))

    shards, val_shards = [open_one(file) for file in files], [open_one(file) for file in val_files]
    headers = [shard.header["tokenizer"] for shard in [*shards, *val_shards]]
    made_with = {header["fingerprint"]: header for header in headers if header["fingerprint"]}
    if len(made_with) > 1:
        names = sorted(header["name"] for header in made_with.values())
        raise ValueError(f"data.files mixes shards of different tokenizers: {', '.join(names)}; train on one at a time")
    for fingerprint, header in made_with.items():
        if tokenizer and tokenizer.fingerprint != fingerprint:
            raise ValueError(
                f"data.tokenizer={cfg.tokenizer} is not the one that {shards[0].bin_path} was made with, which is "
                f"{header['name']} with end token {shards[0].header['eos_id']}; name that, or leave it empty"
            )
        if tokenizer is None and tokenizer_problem(header["name"]) is None:
            found = load_tokenizer(header["name"], header["eos_token"])
            tokenizer = found if found.fingerprint == fingerprint else None
    for shard in [*shards, *val_shards]:
        if tokenizer and shard.header["max_id"] >= tokenizer.vocab_size:
            raise ValueError(
                f"{shard.bin_path} holds token id {shard.header['max_id']}, which data.tokenizer={tokenizer.name} does "
                f"not have (its largest is {tokenizer.vocab_size - 1}); name the one it was made with, or none"
            )
    return shards, val_shards, tokenizer


def common_token_bytes(shards: Sequence[Shard]) -> np.ndarray | None:
    """The table that the shards carry, if every one does; they were checked to be of one tokenizer."""
    tables = [shard.token_bytes for shard in shards]
    return tables[0] if all(table is not None for table in tables) else None
