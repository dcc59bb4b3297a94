"""Creates and opens the row plan of a corpus, a memory-mapped folder with the document index and the packing.

The folder name is a hash of the inputs (shards, row length, seed, packing rules). The plan is read from the folder of a
prepared set if `jaxscale prepare` published it there, and otherwise from the cache, where a missing plan is created.
The time to open a plan does not depend on the number of documents.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.data.array_folder import Arrays, ArrayWriter, find_arrays, open_arrays
from jaxscale.runtime.data.best_fit import BestFitRows, plan_settings, write_best_fit
from jaxscale.runtime.data.cache import cache_folder, describe_skipped, folder_name, open_or_rebuild
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.documents import (
    TRAIN,
    VALID,
    DocumentIndex,
    NeedsInt64,
    TokenSet,
    write_documents,
)
from jaxscale.runtime.data.packing import DocumentRows, PackedRows, write_concat
from jaxscale.runtime.data.shards import Shard
from jaxscale.runtime.data.split import CorpusSplit
from jaxscale.runtime.data.verified import Say, remove
from jaxscale.runtime.text.tokenizer.base import Tokenizer, begin_names
from jaxscale.units import plural

LAYOUT_VERSION = 2  # version of the folder; increase it when the arrays, BLOCK or SAMPLE_EVERY change
REPORTED_DOCUMENTS = 10_000_000  # planning of at least this number of documents is logged
VALIDATION_SEED = 0  # constant, so that different runs use the same validation rows
KINDS = {"best_fit": (write_best_fit, BestFitRows), "concat": (write_concat, PackedRows)}
Facts = Mapping[str, Any]  # returned by write_documents
LOW_FILL, ROWS_TO_JUDGE = 0.98, 100  # a filled fraction below LOW_FILL is reported if there are enough rows


class PlanSettings(NamedTuple):
    """Inputs of a row plan."""

    fingerprint: str  # hash of the documents and their split
    packing: str
    validation: str  # packing of the validation part
    seq_len: int
    seed: int
    num_groups: int  # 1, or the number of sources

    @property
    def cache_key(self) -> dict[str, Any]:
        """Returns the cache key of the folder."""
        return plan_settings(layout=LAYOUT_VERSION, **self._asdict())


class OpenPlan(NamedTuple):
    """The training and validation rows of a plan."""

    facts: Facts
    words: str  # description of the validation part
    train: DocumentRows
    valid: DocumentRows | None


def write_plan(folder: Path, split: CorpusSplit, settings: PlanSettings, check: Callable[[Facts], None]) -> None:
    """Writes the row plan into `folder`. check: function that is called before packing; raises for unusable data."""
    rule, words = split.rule()
    groups = {TRAIN: settings.num_groups, **({VALID: 1} if split.valid_shards or split.fraction else {})}
    is_plain = not split.fraction and split.conversations is None  # no document is held out
    keep_empty = is_plain and settings.packing == "best_fit" and settings.num_groups == 1
    chunks = functools.partial(split.chunks, rule, keep_empty=keep_empty)
    for use_int64 in (False, True):
        with ArrayWriter(folder) as out:
            try:
                facts = write_documents(out, chunks(), rule, len(split.names), groups, use_int64=use_int64)
            except NeedsInt64:
                for path in folder.iterdir():
                    remove(path)
                continue
            check(facts)
            parts = write_rows(out, facts, settings)
            out.finish({"documents": facts, "words": words, "parts": parts})
            return


def write_rows(out: ArrayWriter, facts: Facts, settings: PlanSettings) -> dict[str, Any]:
    """Plans the training and validation rows; returns {part: header entry}."""
    documents, parts = DocumentIndex(out.written(), facts), {}
    packings = {TRAIN: (settings.packing, settings.seed), VALID: (settings.validation, VALIDATION_SEED)}
    for part in facts["members"]:
        packing, seed = packings[part]
        parts[part] = KINDS[packing][0](out, documents, part, seq_len=settings.seq_len, seed=seed)
    return parts


def open_rows(arrays: Arrays, files: TokenSet) -> OpenPlan:
    """Opens the training and validation rows of a plan."""
    header = arrays.header
    documents = DocumentIndex(arrays, header["documents"], files)
    rows = {part: KINDS[plan["packing"]][1](documents, arrays, part) for part, plan in header["parts"].items()}
    return OpenPlan(header["documents"], header["words"], rows[TRAIN], rows.get(VALID))


def open_plan(
    cfg: DataConfig,
    split: CorpusSplit,
    settings: PlanSettings,
    check: Callable[[Facts], None],
    published: str,
    say: Say,
) -> OpenPlan:
    """Opens the row plan of the prepared set at `published`, or else in the cache, where a missing plan is created."""
    shards, cache = [*split.train_shards, *split.valid_shards], cache_folder(cfg)
    little = lambda shard: np.dtype(shard.header["dtype"]).newbyteorder("<").str
    sizes = lambda shard: (shard.header["num_documents"], shard.header["num_tokens"])
    files = TokenSet([(s.bin_path, little(s), s.loss_mask_path, *sizes(s), s.expected) for s in shards])
    if published:
        location = f"{published}/{folder_name('rows', settings.cache_key)}"
        if (found := find_arrays(location, cache, cfg.cache_bytes, cfg.verify, say)) is not None:
            return open_rows(found, files)

    def make(folder: Path) -> None:
        if (number := int(files.first_documents[-1])) >= REPORTED_DOCUMENTS:
            say(
                f"planning the rows of {number:,} documents (once; then cached). `jaxscale prepare` can publish "
                "the plan with the set: see rows.seq_len"
            )
        write_plan(folder, split, settings, check)

    open_whole = lambda folder: open_rows(open_arrays(folder, cache, cfg.verify, say), files)
    return open_or_rebuild(cache, "rows", settings.cache_key, make, open_whole, say)


def summary_facts(
    cfg: DataConfig, parts: CorpusSplit, plan: OpenPlan, shards: Sequence[Shard], tokenizer: Tokenizer | None
) -> list[str]:
    """Returns the phrases of the log line that summarizes the corpus."""
    train, valid, num_rows, seq_len = plan.train, plan.valid, len(plan.train), plan.train.seq_len
    fill = train.num_tokens / (num_rows * seq_len)
    packing = f"packing {cfg.packing}, {fill:.2%} of positions filled"
    if cfg.packing == "best_fit" and cfg.name != "chat" and fill < LOW_FILL and num_rows >= ROWS_TO_JUDGE:
        cut = min(1.0, train.num_tokens / seq_len / train.num_documents)  # a row end splits one document
        packing += f" (data.packing=concat would fill 100%, but split up to {cut:.0%} of the documents)"
    facts = [
        f"{plural(train.num_documents, 'document')}, {train.num_tokens:,} tokens, "
        f"{plural(num_rows, 'row')} of {seq_len}",
        packing,
        "no validation"
        if valid is None
        else f"validation {plural(valid.num_documents, 'document')}, {valid.num_tokens:,} tokens ({plan.words})",
        *(parts.conversations.fitted if parts.conversations is not None else ()),
    ]
    text_bytes = sum(shard.header["text_bytes"] for shard in shards)
    facts += [f"{text_bytes:,} bytes of text"] if text_bytes else []
    facts += [f"tokenizer {tokenizer.name if tokenizer else 'unknown'}"]
    if begin := tokenizer and "".join(begin_names(tokenizer)):
        facts += [f"{'prompts and texts' if cfg.name == 'chat' else 'documents'} begin with {begin}"]
    has_ids = any(shard.header.get("ids_documents") for shard in shards)  # these have no added end token
    facts += [f"documents end with {tokenizer.eos_token}"] if tokenizer and tokenizer.eos_token and not has_ids else []
    skipped = sum((Counter(shard.header["skipped"]) for shard in shards), Counter())
    return facts + ([f"skipped {describe_skipped(skipped)}"] if skipped else [])
