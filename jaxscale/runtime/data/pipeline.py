"""Opens the corpus in the data settings, which provides training and validation batches."""

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import grain
import numpy as np

from jaxscale.core.batch import Batch
from jaxscale.runtime.data.best_fit import plan_settings
from jaxscale.runtime.data.cache import ensure_folder
from jaxscale.runtime.data.checks import check_data, check_facts, corpus_files, vocabulary_problem
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.dataset import Transform, check_transforms, map_dataset, open_transform, read_batch
from jaxscale.runtime.data.mixture import Detour, Mixture, RunBatches, plan_mixture
from jaxscale.runtime.data.objective_config import NextTokenConfig, PrefixLmConfig
from jaxscale.runtime.data.objectives import apply_objective, apply_with_origin
from jaxscale.runtime.data.objectives.ids import SpecialIds, TokenizerIds, find_ids, synthetic_ids
from jaxscale.runtime.data.order import ORDER, Batches, RowOrder
from jaxscale.runtime.data.row_filter import make_row_filter
from jaxscale.runtime.data.row_plan import VALIDATION_SEED, PlanSettings, open_plan, summary_facts, write_plan
from jaxscale.runtime.data.rows import SyntheticRows
from jaxscale.runtime.data.shards import Shard
from jaxscale.runtime.data.split import CorpusSplit, split_corpus
from jaxscale.runtime.data.stacking import padding_row, stack_rows
from jaxscale.runtime.data.token_files import open_tokens, prepared_set_folder
from jaxscale.runtime.data.tokenize import open_documents
from jaxscale.runtime.data.verified import Say, size_only
from jaxscale.runtime.text.chat.template import load_template
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.tokenizer.base import Tokenizer
from jaxscale.system.exits import BadInput
from jaxscale.units import BatchSizes

VALIDATION_ROWS_SYNTHETIC = 4096
DIGITS = 16  # hexadecimal digits of a hash that identifies the content of a file
MOST_PARTS = 2000  # largest number of files and shards listed in a checkpoint; with more, their sources are listed


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation rows with their metadata."""

    train_rows: Any  # DocumentRows or SyntheticRows
    valid_rows: Any | None
    cfg: DataConfig
    seq_len: int
    seed: int
    source_names: tuple[str, ...]
    tokenizer: Tokenizer | None
    token_bytes: np.ndarray | None  # int32[vocabulary]: number of text bytes of each id
    fingerprint: str  # equal for equal tokens, split and order
    summary: str  # one line for the log
    ids: SpecialIds  # special ids of data.objective
    shards: tuple[Shard, ...] = ()  # shards of the training rows
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # inputs of the fingerprint, see data_parts
    published: str = ""  # folder or URL of the prepared set with its indexes, or ''
    chat: Mapping[str, Any] | None = None  # ChatTemplate.note
    tokens_of_sources: Mapping[str, int] = dataclasses.field(default_factory=dict)  # training tokens without padding

    @property
    def epoch_tokens(self) -> int:
        """Returns the number of tokens in all training rows, including padding."""
        return len(self.train_rows) * self.seq_len

    @property
    def rows_of_sources(self) -> dict[str, int]:
        """Returns {source: number of training rows} for a mixture."""
        return dict(zip(self.source_names, np.diff(self.train_rows.group_rows).tolist()))

    def batches(self, rows_per_batch: BatchSizes | int, mixture: Mixture | None = None) -> Batches:
        """Returns the endless training batches. mixture: from plan_mixture(); None: planned without max_epochs."""
        if self.cfg.mixture and mixture is None:
            one_epoch = BatchSizes.of(rows_per_batch).find(len(self.train_rows))[0]
            mixture = self.plan_mixture(rows_per_batch, max(1, one_epoch), capped=False)
        row_filter = make_row_filter(self.cfg.gate, self.tokenizer) if self.shards else None
        transform = functools.partial(apply_objective, self.cfg.objective, self.ids, seed=self.seed)
        return Batches(RowOrder(self.train_rows, self.seed, mixture), rows_per_batch, row_filter, transform)

    def plan_mixture(
        self,
        rows_per_batch: BatchSizes | int,
        total_steps: int,
        num_batches: int | None = None,
        *,
        capped: bool = True,
        detours: Sequence[Detour] = (),
        begun: Mapping[str, int] | None = None,
    ) -> Mixture | None:
        """Returns the mixture of a run, or None without data.mixture. num_batches: includes skipped batches."""
        if not self.cfg.mixture:
            return None
        num_batches = total_steps if num_batches is None else num_batches
        return plan_mixture(
            self.cfg.mixture,
            self.cfg.max_epochs if capped else {},
            RunBatches(BatchSizes.of(rows_per_batch), self.seq_len, total_steps, num_batches),
            sizes=self.rows_of_sources,
            tokens_of=self.tokens_of_sources,
            detours=detours,
            begun=begun,
        )

    def as_grain(
        self,
        rows_per_batch: int,
        num_batches: int = sys.maxsize,
        *,
        mixture: Mixture | None = None,
        rows: Sequence[int] | None = None,
    ) -> grain.MapDataset:
        """Returns a dataset whose element n is batch n after data.transforms. rows: row indices; None: all rows."""
        batches = self.batches(rows_per_batch, mixture)
        rows = range(rows_per_batch) if rows is None else rows
        return map_dataset(
            functools.partial(read_batch, batches.rows, rows, self.open_transforms(batches)), num_batches
        )

    def open_transforms(self, batches: Batches, first: int = 0) -> tuple[Transform, ...]:
        """Imports the functions of data.transforms and tests them on batch `first`. Raises BadInput if a test fails."""
        names = self.cfg.transforms
        transforms = tuple(map(open_transform, names))
        if transforms:
            check_transforms(transforms, names, batches.batch(first), first)
        return transforms

    def valid_batches(self, num_rows: int, rows_per_batch: int) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
        """Yields (batch, sources int32[rows, T], target_bytes int32[rows, T]) for up to num_rows validation rows.

        The rows are evenly spaced in the validation set, and are the same in each call. The last batch is padded with
        rows of weight 0. target_bytes is the number of text bytes of each target, or 0 if its weight is 0, the
        tokenizer is unknown, or the objective is neither next-token prediction nor prefix LM.
        """
        assert self.valid_rows is not None, "the corpus needs a validation set"
        total, count = len(self.valid_rows), min(len(self.valid_rows), num_rows)
        chosen = [i * total // count for i in range(count)]
        for first in range(0, len(chosen), rows_per_batch):
            part = chosen[first : first + rows_per_batch]
            missing = rows_per_batch - len(part)
            batch = stack_rows([self.valid_rows[row] for row in part] + [padding_row(self.seq_len)] * missing)
            padding_sources = [np.zeros(self.seq_len, np.int32)] * missing
            sources = np.stack([self.valid_rows.row_sources(row) for row in part] + padding_sources)
            places = [*part, *range(-missing, 0)]
            batch, origin = apply_with_origin(self.cfg.objective, self.ids, batch, 0, places, VALIDATION_SEED)
            sources = np.take_along_axis(sources, origin, axis=1)
            sizes = np.zeros_like(batch.targets)
            if self.token_bytes is not None and isinstance(self.cfg.objective, (NextTokenConfig, PrefixLmConfig)):
                sizes = self.token_bytes[batch.targets]
            yield batch, sources, np.where(batch.weights > 0, sizes, 0).astype(np.int32)


def open_data(
    cfg: DataConfig, *, seq_len: int, vocab_size: int, seed: int, say: Callable[[str], None] = print
) -> Corpus:
    """Opens the corpus. Text that is not in the cache is tokenized first.

    seed: determines the order of documents and rows. Raises BadInput for unusable settings or files, for invalid UTF-8
    with data.invalid_utf8='stop', for token ids outside the vocabulary, and for a damaged cache.
    """
    if problems := check_data(cfg, seq_len, vocab_size):
        raise BadInput(problems[0])
    if cfg.name == "synthetic":
        return synthetic_corpus(cfg, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    files, val_files = corpus_files(cfg, say)[0]
    train_shards, valid_shards, tokenizer = open_shards(cfg, files, val_files, vocab_size, say)
    shards, published = [*train_shards, *valid_shards], prepared_set_folder(cfg, files)
    names = source_names(shards)
    split = split_corpus(cfg, train_shards, valid_shards, names, seq_len)
    plan_settings = make_plan_settings(cfg, split, seq_len=seq_len, seed=seed)
    check = functools.partial(check_facts, cfg, names, seq_len)
    plan = open_plan(cfg, split, plan_settings, check, published, say)
    check(plan.facts)
    tables = [tokenizer.token_bytes] if tokenizer else [shard.token_bytes for shard in shards]
    token_bytes = tables[0] if all(table is not None for table in tables) else None  # equal in all shards
    known = tokenizer or TokenizerIds("unknown", cfg.eos_id)
    return Corpus(
        train_rows=plan.train,
        valid_rows=plan.valid,
        cfg=cfg,
        seq_len=seq_len,
        seed=seed,
        source_names=names,
        tokenizer=tokenizer,
        token_bytes=token_bytes,
        fingerprint=plan_settings.fingerprint,
        summary=f"data.{cfg.name}: " + "; ".join(summary_facts(cfg, split, plan, shards, tokenizer)),
        shards=tuple(train_shards),
        ids=find_ids(cfg.objective, known, token_bytes, vocab_size, seq_len),
        parts=data_parts(cfg, train_shards, valid_shards, tokenizer),
        published=published,
        chat=load_template(tokenizer, cfg.chat).note if cfg.name == "chat" and tokenizer else None,
        tokens_of_sources=dict(zip(names, plan.facts["tokens"]["train"])),
    )


def open_shards(
    cfg: DataConfig, files: Sequence[SourceFile], val_files: Sequence[SourceFile], vocab_size: int, say: Say
) -> tuple[list[Shard], list[Shard], Tokenizer | None]:
    """Returns (training shards, validation shards, tokenizer or None). Raises BadInput if the model differs."""
    open_files = open_tokens if cfg.name == "tokens" else open_documents
    shards, val_shards, tokenizer = open_files(cfg, files, val_files, vocab_size, say)
    for shard in [*shards, *val_shards]:
        if shard.header["max_id"] >= vocab_size:
            place = shard.header.get("largest_place") or shard.place
            raise BadInput(vocabulary_problem(place, shard.header["max_id"], vocab_size))
        if shard.loss_mask_path and cfg.objective.name != "next_token":
            raise BadInput(
                f"{shard.header['files'][0]['name']} has a loss mask, which data.objective.name="
                f"{cfg.objective.name!r} does not support; set it to 'next_token'"
            )
    if cfg.verify == "size":
        without_hashes = lambda shard: shard._replace(expected=size_only(shard.expected))
        shards, val_shards = list(map(without_hashes, shards)), list(map(without_hashes, val_shards))
    return shards, val_shards, tokenizer


def source_names(shards: Sequence[Shard]) -> tuple[str, ...]:
    """Returns the sources of the shards, in the order of first occurrence."""
    return tuple(dict.fromkeys(name for shard in shards for name in shard.header["sources"]))


def packing_rules(cfg: DataConfig) -> list[str]:
    """Returns a description of the packing rules for the fingerprint of a corpus."""
    return [json.dumps(plan_settings(), sort_keys=True) if cfg.packing == "best_fit" else cfg.packing]


def make_plan_settings(cfg: DataConfig, parts: CorpusSplit, *, seq_len: int, seed: int) -> PlanSettings:
    """Returns the settings of a row plan. Validation uses `concat` packing (except for conversations), which avoids
    padding in small sets and makes losses comparable between runs."""
    rules = packing_rules(cfg) if cfg.packing == "best_fit" else []
    content = [*parts.content, f"order {ORDER}", cfg.packing, *rules]
    return PlanSettings(
        fingerprint=hashlib.sha256("|".join(content).encode(errors="surrogateescape")).hexdigest(),
        packing=cfg.packing,
        validation="best_fit" if cfg.name == "chat" else "concat",
        seq_len=seq_len,
        seed=seed,
        num_groups=len(parts.names) if cfg.mixture else 1,
    )


def publish_plan(folder: Path, cfg: DataConfig, shards: Sequence[Shard], *, seq_len: int, seed: int) -> Path:
    """Creates a missing row plan in a prepared set's folder; returns its path. Raises BadInput for unusable data."""
    names = source_names(shards)
    parts = split_corpus(cfg, shards, (), names, seq_len)
    check = functools.partial(check_facts, cfg, names, seq_len)
    settings = make_plan_settings(cfg, parts, seq_len=seq_len, seed=seed)
    make = functools.partial(write_plan, split=parts, settings=settings, check=check)
    return ensure_folder(folder, "rows", settings.cache_key, make, is_cache=False)


def data_parts(
    cfg: DataConfig, train_shards: Sequence[Shard], valid_shards: Sequence[Shard], tokenizer: Tokenizer | None
) -> dict[str, str]:
    """Returns {readable name: hash or value} for the inputs of a corpus's fingerprint."""
    made_with = tokenizer.fingerprint if tokenizer else train_shards[0].header["tokenizer"]["fingerprint"]
    hashes = [*file_hashes(train_shards, ""), *file_hashes(valid_shards, "validation ")]
    if len(hashes) > MOST_PARTS:
        hashes = [(f"source {source}", source, sha256) for _, source, sha256 in hashes]
    sums: dict[str, list[str]] = {}
    for name, _, sha256 in hashes:
        sums.setdefault(name, []).append(sha256)
    found = {name: some[0][:DIGITS] if len(some) == 1 else joined_digest(some) for name, some in sums.items()}
    return {
        "the tokenizer": made_with[:DIGITS],
        **found,
        "data.packing": cfg.packing,
        "the rules of packing": joined_digest(packing_rules(cfg)),
        "the order of rows": str(ORDER),
        "data.val_fraction": "val_files" if valid_shards else str(cfg.val_fraction),
    }


def file_hashes(shards: Sequence[Shard], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yields (name, source, hash) of each text file, or of the shard if its header has no hashes of text files."""
    for shard in shards:
        files = shard.header["files"]
        if files and all("sha256" in file for file in files):
            for file in files:
                yield f"{prefix}file {file['name']}", file["source"], file["sha256"]
        else:
            name = PurePath(shard.header["bin"]).stem
            yield f"{prefix}shard {name}", ", ".join(shard.header["sources"]), shard.fingerprint


def joined_digest(sums_of_name: Sequence[str]) -> str:
    """Returns a hash of several hashes, in order."""
    return hashlib.sha256("|".join(sums_of_name).encode()).hexdigest()[:DIGITS]


def synthetic_corpus(cfg: DataConfig, *, seq_len: int, vocab_size: int, seed: int) -> Corpus:
    """Returns a corpus of uniform random tokens."""
    make = dict(seq_len=seq_len, vocab_size=vocab_size)
    return Corpus(
        train_rows=SyntheticRows(**make, seed=seed),
        valid_rows=SyntheticRows(**make, seed=~seed, num_rows=VALIDATION_ROWS_SYNTHETIC),
        cfg=cfg,
        seq_len=seq_len,
        seed=seed,
        source_names=("synthetic",),
        tokenizer=None,
        token_bytes=None,
        fingerprint=f"synthetic-{vocab_size}-order-{ORDER}",
        ids=find_ids(cfg.objective, synthetic_ids(vocab_size), None, vocab_size, seq_len),
        summary=f"data.synthetic: uniform ids below {vocab_size:,}; the minimum loss is log(vocabulary)",
    )
