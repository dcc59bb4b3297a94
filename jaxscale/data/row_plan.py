"""The rows of a corpus, planned once into a folder that holds everything the loader needs of its documents.

The folder is named by what it was made from (shards, row length, seed, rules) and looked for beside the manifest of a
prepared set, where `jaxscale prepare` publishes it, and then in the cache, where it is made if it is nowhere. It is
mapped: opening it takes as long for 10**8 documents as for ten.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.array_folder import Arrays, ArrayWriter, find_arrays, open_arrays
from jaxscale.data.best_fit import BestFitRows, plan_settings, write_best_fit
from jaxscale.data.cache import folder_name, made_folder, open_cached
from jaxscale.data.documents import TRAIN, VALID, Documents, TokenSet, TooFar, token_set, write_documents
from jaxscale.data.packing import DocumentRows, PackedRows, write_concat
from jaxscale.data.shards import Shard
from jaxscale.data.split import Division
from jaxscale.data.verified import Say, remove

LAYOUT = 2  # of the folder: another number where it holds other arrays, or a BLOCK or SAMPLED is another
TOLD_DOCUMENTS = 10_000_000  # a plan of so many takes longer than a person expects
VALIDATION_SEED = 0  # not the run's: losses of two runs are compared over the same rows
KINDS = {"best_fit": (write_best_fit, BestFitRows), "concat": (write_concat, PackedRows)}
Facts = Mapping[str, Any]  # what write_documents returned


class PlanSettings(NamedTuple):
    """What decides how the rows of divided documents are planned."""

    fingerprint: str  # of the documents and their division
    packing: str
    validation: str  # its packing
    seq_len: int
    seed: int
    num_groups: int  # 1, or as many as there are sources

    @property
    def made_from(self) -> dict[str, Any]:
        """What the folder is found by."""
        return plan_settings(layout=LAYOUT, **self._asdict())


class OpenPlan(NamedTuple):
    """A plan, and the rows of both parts."""

    facts: Facts
    words: str  # what validation is
    train: DocumentRows
    valid: DocumentRows | None


def write_plan(folder: Path, division: Division, settings: PlanSettings, check: Callable[[Facts], None]) -> None:
    """Plans the rows of a corpus into `folder`. check(facts): raises what makes it useless, before rows are planned."""
    rule, words = division.rule()
    groups = {TRAIN: settings.num_groups, **({VALID: 1} if division.has_validation else {})}
    keep_empty = division.keeps_empty and settings.packing == "best_fit" and settings.num_groups == 1
    chunks = functools.partial(division.chunks, rule, keep_empty=keep_empty)
    for wide in (False, True):
        with ArrayWriter(folder) as out:
            try:
                facts = write_documents(out, chunks(), rule, len(division.names), groups, wide=wide)
            except TooFar:
                for path in folder.iterdir():
                    remove(path)
                continue
            check(facts)
            parts = write_rows(out, facts, settings)
            out.finish({"documents": facts, "words": words, "parts": parts})
            return


def write_rows(out: ArrayWriter, facts: Facts, settings: PlanSettings) -> dict[str, Any]:
    """Plans the rows of both parts of the documents that were written, and returns what is known of each."""
    documents, parts = Documents(out.written(), facts), {}
    wanted = {TRAIN: (settings.packing, settings.seed), VALID: (settings.validation, VALIDATION_SEED)}
    for part in facts["members"]:
        packing, seed = wanted[part]
        parts[part] = KINDS[packing][0](out, documents, part, seq_len=settings.seq_len, seed=seed)
    return parts


def tokens_of(shards: Sequence[Shard]) -> TokenSet:
    """The files of the shards, in their order."""
    little = lambda shard: np.dtype(shard.header["dtype"]).newbyteorder("<").str
    return token_set(
        [
            (
                shard.bin_path, little(shard), shard.trained_path, shard.header["num_documents"],
                shard.header["num_tokens"], shard.expected,
            )
            for shard in shards
        ]
    )  # fmt: skip


def rows_of(arrays: Arrays, files: TokenSet) -> OpenPlan:
    """The rows that are planned in these arrays."""
    header = arrays.header
    documents = Documents(arrays, header["documents"], files)
    rows = {part: KINDS[plan["packing"]][1](documents, arrays, part) for part, plan in header["parts"].items()}
    return OpenPlan(header["documents"], header["words"], rows[TRAIN], rows.get(VALID))


def open_plan(
    division: Division,
    settings: PlanSettings,
    check: Callable[[Facts], None],
    cache: Path,
    *,
    verify: str,
    say: Say,
    published: str,
    cache_bytes: int,
) -> OpenPlan:
    """The plan of a corpus, made in the cache if it is neither there nor published.

    Args: published: the folder or gs:// address of a prepared set, or ''. cache_bytes: bound of the cache of what lies
    in buckets.
    """
    files = tokens_of([*division.trained, *division.held])
    name = folder_name("rows", settings.made_from)
    place = f"{published}/{name}"
    if published and (found := find_arrays(place, cache, cache_bytes, verify, say)) is not None:
        return rows_of(found, files)
    make = functools.partial(announced, division, settings, check, say)
    return open_cached(
        cache,
        "rows",
        settings.made_from,
        make,
        lambda folder: rows_of(open_arrays(folder, cache, verify, say), files),
        say,
    )


def make_plan(folder: Path, division: Division, settings: PlanSettings, check: Callable[[Facts], None]) -> Path:
    """The plan's folder in that of a set, made if it is not there."""
    make = functools.partial(write_plan, division=division, settings=settings, check=check)
    return made_folder(folder, "rows", settings.made_from, make, is_cache=False)


def announced(
    division: Division, settings: PlanSettings, check: Callable[[Facts], None], say: Say, folder: Path
) -> None:
    """write_plan, and a line before a long one."""
    number = sum(shard.header["num_documents"] for shard in [*division.trained, *division.held])
    if number >= TOLD_DOCUMENTS:
        say(
            f"planning the rows of {number:,} documents (once; then kept in the cache). `jaxscale prepare` publishes "
            "the plan with the set: see rows.seq_len"
        )
    write_plan(folder, division, settings, check)
