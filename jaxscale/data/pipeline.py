"""From the settings to a corpus: the one door through which the rest of the program gets its batches."""

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

from jaxscale.data.batch import Batch, padding_row, stack_rows
from jaxscale.data.best_fit import plan_settings
from jaxscale.data.cache import cache_folder
from jaxscale.data.checks import check_data, check_lengths, corpus_files, vocabulary_problem
from jaxscale.data.config import DataConfig, stages_of
from jaxscale.data.dataset import Transform, check_transforms, map_dataset, open_transform, read_batch
from jaxscale.data.mixture import Detour, Mixture, check_sources, plan_mixture
from jaxscale.data.objectives import apply, apply_with_origin, find_ids, reads_text_in_order
from jaxscale.data.objectives.ids import SpecialIds, StandIn, stand_in_ids
from jaxscale.data.order import ORDER, Batches, RowOrder
from jaxscale.data.row_filter import make_row_filter
from jaxscale.data.row_plan import VALIDATION_SEED, Facts, PlanSettings, make_plan, open_plan
from jaxscale.data.rows import SyntheticRows
from jaxscale.data.shards import Shard
from jaxscale.data.split import Division, divide
from jaxscale.data.summary import facts_of
from jaxscale.data.token_files import common_token_bytes, open_tokens, set_of
from jaxscale.data.tokenize import open_documents
from jaxscale.data.verified import of_size
from jaxscale.system.exits import BadInput
from jaxscale.text.chat.template import load_template
from jaxscale.text.tokenizer.base import Tokenizer
from jaxscale.units import BatchSizes

VALIDATION_ROWS_SYNTHETIC = 4096
DIGITS = 16  # of a hash: enough to tell two versions of one file apart
MOST_PARTS = 2000  # files and shards that are named one by one in each checkpoint; of more, their sources are


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation rows, and what is known of them."""

    train_rows: Any  # DocumentRows or SyntheticRows
    valid_rows: Any | None
    cfg: DataConfig
    seq_len: int
    seed: int
    source_names: tuple[str, ...]
    tokenizer: Tokenizer | None
    token_bytes: np.ndarray | None  # int32[vocabulary]: bytes of text that each id stands for
    fingerprint: str  # equal wherever the same tokens are divided the same way
    summary: str  # one line for the log
    ids: SpecialIds  # that data.objective needs
    shards: tuple[Shard, ...] = ()  # that the training rows are read from
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the fingerprint, see data_parts
    published: str = ""  # where the prepared set lies that the shards are, with its indexes
    chat: Mapping[str, Any] | None = None  # how conversations were written: ChatTemplate.note
    tokens_of_sources: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of training, without padding

    @property
    def epoch_tokens(self) -> int:
        """Tokens in all rows of training, the padding of the last one included."""
        return len(self.train_rows) * self.seq_len

    @property
    def rows_of_sources(self) -> dict[str, int]:
        """Rows of training that each source of a mixture has."""
        return dict(zip(self.source_names, np.diff(self.train_rows.group_rows).tolist()))

    def batches(self, rows_per_batch: BatchSizes | int, mixture: Mixture | None = None) -> Batches:
        """The endless training batches, each epoch in another order.

        rows_per_batch: of all batches, or the sizes of a ramp. mixture: of plan_mixture; else that of the settings as
        for a run of one epoch, without caps.
        """
        if self.cfg.mixture and mixture is None:
            one_epoch = BatchSizes.of(rows_per_batch).find(len(self.train_rows))[0]
            mixture = self.plan_mixture(rows_per_batch, max(1, one_epoch), capped=False)
        row_filter = make_row_filter(self.cfg.gate, self.tokenizer) if self.shards else None
        transform = functools.partial(apply, self.cfg.objective, self.ids, seed=self.seed)
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
        """The stages of a run of `total_steps` steps; None where the settings have no mixture.

        num_batches: up to the end of the run, those that it skips counted too. detours: of its rewinds. begun: as
        of the function. Raises BadInput as the function does.
        """
        if not self.cfg.mixture:
            return None
        return plan_mixture(
            self.cfg.mixture,
            self.cfg.max_epochs if capped else {},
            sizes=self.rows_of_sources,
            tokens_of=self.tokens_of_sources,
            seq_len=self.seq_len,
            rows_per_batch=rows_per_batch,
            total_steps=total_steps,
            num_batches=total_steps if num_batches is None else num_batches,
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
        """A grain.MapDataset whose element n is batch n as a run has it, data.transforms included: a Batch of numpy.

        mixture: as in batches(). rows: those that this process wants of each batch, by their numbers in it; None: all.
        """
        batches = self.batches(rows_per_batch, mixture)
        rows = range(rows_per_batch) if rows is None else rows
        return map_dataset(
            functools.partial(read_batch, batches.rows, rows, self.open_transforms(batches)), num_batches
        )

    def open_transforms(self, batches: Batches, first: int = 0) -> tuple[Transform, ...]:
        """The functions of data.transforms, tried on batch `first`. Raises BadInput naming one that is unfit."""
        names = self.cfg.transforms
        transforms = tuple(map(open_transform, names))
        if transforms:
            check_transforms(transforms, names, batches.batch(first), first)
        return transforms

    def valid_batches(self, num_rows: int, rows_per_batch: int) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
        """Yields (batch, sources int32[rows, T], target_bytes int32[rows, T]) over at most num_rows rows.

        They are spread evenly over the validation set and always the same. Rows that fill up the last batch weigh 0.
        target_bytes: what each target stands for in bytes of text; 0 where the weight is 0, no tokenizer is known, or
        the objective does not read the text in its order.
        """
        assert self.valid_rows is not None, "there is no validation set"
        chosen = evenly_spread(len(self.valid_rows), num_rows)
        for first in range(0, len(chosen), rows_per_batch):
            part = chosen[first : first + rows_per_batch]
            missing = rows_per_batch - len(part)
            batch = stack_rows([self.valid_rows[row] for row in part] + [padding_row(self.seq_len)] * missing)
            nowhere = [np.zeros(self.seq_len, np.int32)] * missing
            sources = np.stack([self.valid_rows.row_sources(row) for row in part] + nowhere)
            places = [*part, *range(-missing, 0)]
            batch, origin = apply_with_origin(self.cfg.objective, self.ids, batch, 0, places, VALIDATION_SEED)
            sources = np.take_along_axis(sources, origin, axis=1)
            sizes = np.zeros_like(batch.targets)
            if self.token_bytes is not None and reads_text_in_order(self.cfg.objective):
                sizes = self.token_bytes[batch.targets]
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
    Raises: BadInput for what check_data finds, a corpus that is empty or shorter than a row, an empty validation set,
    text that is not UTF-8 where that is to stop, a token id that the model does not have, a damaged cache.
    """
    if problems := check_data(cfg, seq_len, vocab_size):
        raise BadInput(problems[0])
    if cfg.name == "synthetic":
        return synthetic_corpus(cfg, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    files, val_files = corpus_files(cfg, say)[0]
    if cfg.name == "tokens":
        shards, val_shards, tokenizer = open_tokens(cfg, files, val_files, vocab_size, say)
    else:
        shards, val_shards, tokenizer = open_documents(cfg, files, val_files, vocab_size, say)
    if cfg.verify == "size":
        shards, val_shards = (
            [shard._replace(expected=of_size(shard.expected)) for shard in some] for some in (shards, val_shards)
        )
    for shard in [*shards, *val_shards]:
        if shard.header["max_id"] >= vocab_size:
            place = shard.header.get("largest_place") or shard.place
            raise BadInput(vocabulary_problem(place, shard.header["max_id"], vocab_size))
        if shard.trained_path and cfg.objective.name != "next_token":
            raise BadInput(
                f"labels tell what is learned of {shard.header['files'][0]['name']}; data.objective.name="
                f"{cfg.objective.name!r} must be next_token"
            )
    make = dict(seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    return assemble(cfg, shards, val_shards, tokenizer, say, published=set_of(cfg, files), **make)


def assemble(
    cfg: DataConfig,
    trained: Sequence[Shard],
    held: Sequence[Shard],
    tokenizer: Tokenizer | None,
    say: Callable[[str], None],
    *,
    seq_len: int,
    vocab_size: int,
    seed: int,
    published: str = "",
) -> Corpus:
    """The corpus over the shards for training and those for validation; without the latter, a part of the former.

    published: where a prepared set lies that may have a row plan beside it.
    """
    shards = [*trained, *held]
    names = source_names(shards)
    parts = divide(cfg, trained, held, names, seq_len)
    wanted = plan_of(cfg, parts, seq_len=seq_len, seed=seed)
    plan = open_plan(
        parts,
        wanted,
        functools.partial(check_facts, cfg, names, seq_len),
        cache_folder(cfg),
        verify=cfg.verify,
        say=say,
        published=published,
        cache_bytes=cfg.cache_bytes if published else 0,
    )
    check_facts(cfg, names, seq_len, plan.facts)
    settings = {
        "data.packing": cfg.packing,
        "the rules of packing": digest(rules_of(cfg)),
        "the order of rows": str(ORDER),
        "data.val_fraction": "val_files" if held else str(cfg.val_fraction),
    }
    token_bytes = tokenizer.token_bytes if tokenizer else common_token_bytes(shards)
    known = tokenizer or StandIn("unknown", cfg.eos_id)
    made_with = tokenizer.fingerprint if tokenizer else trained[0].header["tokenizer"]["fingerprint"]
    return Corpus(
        train_rows=plan.train,
        valid_rows=plan.valid,
        cfg=cfg,
        seq_len=seq_len,
        seed=seed,
        source_names=names,
        tokenizer=tokenizer,
        token_bytes=token_bytes,
        fingerprint=wanted.fingerprint,
        summary=f"data.{cfg.name}: " + "; ".join(facts_of(cfg, parts, plan, shards, tokenizer)),
        shards=tuple(trained),
        ids=find_ids(cfg.objective, known, token_bytes, vocab_size, seq_len),
        parts=data_parts(trained, held, made_with, settings),
        published=published,
        chat=load_template(tokenizer, cfg.chat).note if cfg.name == "chat" and tokenizer else None,
        tokens_of_sources=dict(zip(names, plan.facts["tokens"]["train"])),
    )


def source_names(shards: Sequence[Shard]) -> tuple[str, ...]:
    """The sources of the shards, in the order of the first mention."""
    return tuple(dict.fromkeys(name for shard in shards for name in shard.header["sources"]))


def check_facts(cfg: DataConfig, names: Sequence[str], seq_len: int, facts: Facts) -> None:
    """Raises BadInput for documents that no run can train on."""
    check_lengths(cfg, facts, seq_len)
    if cfg.mixture:
        for _, weights in stages_of(cfg.mixture):
            check_sources("mixture", weights, dict(zip(names, facts["tokens"]["train"])))


def rules_of(cfg: DataConfig) -> list[str]:
    """What the rules of packing are known by: the last word of a corpus's fingerprint."""
    return [json.dumps(plan_settings(), sort_keys=True) if cfg.packing == "best_fit" else cfg.packing]


def plan_of(cfg: DataConfig, parts: Division, *, seq_len: int, seed: int) -> PlanSettings:
    """How the rows of a corpus are planned. Validation rows are `concat` unless they are conversations: of a small set
    it wastes nothing, and they stay comparable between runs."""
    content = [*parts.content, f"order {ORDER}", cfg.packing, *(rules_of(cfg) if cfg.packing == "best_fit" else [])]
    return PlanSettings(
        fingerprint=hashlib.sha256("|".join(content).encode(errors="surrogateescape")).hexdigest(),
        packing=cfg.packing,
        validation="best_fit" if cfg.name == "chat" else "concat",
        seq_len=seq_len,
        seed=seed,
        num_groups=len(parts.names) if cfg.mixture else 1,
    )


def publish_plan(folder: Path, cfg: DataConfig, shards: Sequence[Shard], *, seq_len: int, seed: int) -> Path:
    """Plans the rows of a prepared set for runs of these settings in its folder, unless it is there, and returns where.

    Raises: BadInput as open_data does for a set that no run can train on.
    """
    parts = divide(cfg, shards, (), source_names(shards), seq_len)
    check = functools.partial(check_lengths, cfg, seq_len=seq_len)
    return make_plan(folder, parts, plan_of(cfg, parts, seq_len=seq_len, seed=seed), check)


def data_parts(
    trained: Sequence[Shard], held: Sequence[Shard], tokenizer: str, settings: dict[str, str]
) -> dict[str, str]:
    """{readable name: hash or value} of everything that the fingerprint of a corpus is made of.

    Args: tokenizer: its fingerprint, '' where it is not known. settings: those that decide which rows there are.
    """
    pieces = [*pieces_of(trained, ""), *pieces_of(held, "validation ")]
    if len(pieces) > MOST_PARTS:
        pieces = [(f"source {source}", source, mark) for _, source, mark in pieces]
    sums: dict[str, list[str]] = {}
    for name, _, mark in pieces:
        sums.setdefault(name, []).append(mark)
    found = {name: marks[0][:DIGITS] if len(marks) == 1 else digest(marks) for name, marks in sums.items()}
    return {"the tokenizer": tokenizer[:DIGITS], **found, **settings}


def pieces_of(shards: Sequence[Shard], prefix: str) -> Iterator[tuple[str, str, str]]:
    """(name, source, hash) of each text file, or of each shard that does not know of which files it is made."""
    for shard in shards:
        files = shard.header["files"]
        if files and all("sha256" in file for file in files):
            for file in files:
                yield f"{prefix}file {file['name']}", file["source"], file["sha256"]
        else:
            name = PurePath(shard.header["bin"]).stem
            yield f"{prefix}shard {name}", ", ".join(shard.header["sources"]), shard.fingerprint


def digest(marks: Sequence[str]) -> str:
    """One hash for several, in their order."""
    return hashlib.sha256("|".join(marks).encode()).hexdigest()[:DIGITS]


def synthetic_corpus(cfg: DataConfig, *, seq_len: int, vocab_size: int, seed: int) -> Corpus:
    """Uniform random tokens; there is nothing to read."""
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
        ids=find_ids(cfg.objective, stand_in_ids(vocab_size), None, vocab_size, seq_len),
        summary=f"data.synthetic: uniform ids below {vocab_size:,}; its loss cannot fall below log(vocabulary)",
    )
