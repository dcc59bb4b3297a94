"""Token files as shards: those of a prepared set and of this program, Megatron's, array records and raw ids."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxscale.data.array_record import array_record_shard, is_array_record
from jaxscale.data.cache import Say, cache_folder, scanned
from jaxscale.data.checks import raw_dtype
from jaxscale.data.config import DataConfig
from jaxscale.data.header import read_header
from jaxscale.data.manifest import is_manifest
from jaxscale.data.megatron import is_megatron, megatron_shard
from jaxscale.data.prepared import open_prepared
from jaxscale.data.remote import map_ids
from jaxscale.data.shards import Shard, expect_whole, open_shard
from jaxscale.system.exits import BadInput
from jaxscale.text.sources.files import SourceFile
from jaxscale.text.tokenizer.about import NO_BOS, as_setting
from jaxscale.text.tokenizer.base import Tokenizer, begin_names
from jaxscale.text.tokenizer.load import load_tokenizer, tokenizer_problem

LOOKED_AT = 16  # documents of each file, of which most tell; a first or last one may be cut


def open_tokens(
    cfg: DataConfig, files: Sequence[SourceFile], val_files: Sequence[SourceFile], vocab_size: int, say: Say
) -> tuple[list[Shard], list[Shard], Tokenizer | None]:
    """(training shards, validation shards, tokenizer if it is known) of token files, with or without a header."""
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.eos_token, cfg.bos_token) if cfg.tokenizer else None
    eos_id = cfg.eos_id if cfg.eos_id is not None or tokenizer is None else tokenizer.eos_id

    ours: list[Path] = []

    def open_one(file: SourceFile) -> list[Shard]:
        if is_manifest(file.path):
            return open_prepared(file.path, cfg, say)
        if is_megatron(file.path):
            return [megatron_shard(file, cfg, say)]
        if is_array_record(file.path):
            return [array_record_shard(file, raw_dtype(cfg, vocab_size), eos_id, vocab_size, cfg, say)]
        if read_header(Path(file.path)) is None:
            return [scanned(file, raw_dtype(cfg, vocab_size), eos_id, cfg, say)]
        ours.append(Path(file.path))
        return [open_shard(ours[-1])]

    shards = [shard for file in files for shard in open_one(file)]
    val_shards = [shard for file in val_files for shard in open_one(file)]
    expect_whole(ours, cfg, cache_folder(cfg), say)  # after they were opened, so that nothing comes between
    headers = [shard.header["tokenizer"] for shard in [*shards, *val_shards]]
    made_with = {header["fingerprint"]: header for header in headers if header["fingerprint"]}
    if len(made_with) > 1:
        names = sorted(header["name"] for header in made_with.values())
        raise BadInput(f"data.files mixes shards of different tokenizers: {', '.join(names)}; train on one at a time")
    for fingerprint, header in made_with.items():
        if tokenizer and tokenizer.fingerprint != fingerprint and not cfg.bos_token:
            with contextlib.suppress(BadInput):  # it has no such token: it is another one
                tokenizer = load_tokenizer(cfg.tokenizer, cfg.eos_token, as_setting(header.get("begin_tokens", ())))
        if tokenizer and tokenizer.fingerprint != fingerprint:
            raise BadInput(
                f"data.tokenizer={cfg.tokenizer} is not the one that {shards[0].place} was made with, which is "
                f"{header['name']} with end token {shards[0].header['eos_id']} and data.bos_token="
                f"{as_setting(header.get('begin_tokens', ())) or 'its own'}; name that, or leave it empty"
            )
        if tokenizer is None and tokenizer_problem(header["name"]) is None:
            with contextlib.suppress(BadInput):  # another file stands there now
                found = load_tokenizer(header["name"], header["eos_token"], as_setting(header.get("begin_tokens", ())))
                tokenizer = found if found.fingerprint == fingerprint else None
    asked = tokenizer and tokenizer.begin_ids and not made_with and not cfg.bos_token
    if asked and not most_begin_with(tokenizer.begin_ids, shards):
        name = "".join(begin_names(tokenizer))
        say(f"data.files: documents do not begin with {name}, as those of {cfg.tokenizer} do; see data.bos_token")
        tokenizer = load_tokenizer(cfg.tokenizer, cfg.eos_token, NO_BOS)
    for shard in [*shards, *val_shards]:
        if tokenizer and shard.header["max_id"] >= tokenizer.vocab_size:
            raise BadInput(
                f"{shard.place} holds token id {shard.header['max_id']}, which data.tokenizer={tokenizer.name} does "
                f"not have (its largest is {tokenizer.vocab_size - 1}); name the one it was made with, or none"
            )
    return shards, val_shards, tokenizer


def most_begin_with(begin_ids: Sequence[int], shards: Sequence[Shard]) -> bool:
    """Whether most of the first documents of shards that tell no tokenizer begin with these ids."""
    found = []
    for shard in shards:
        ids = map_ids(shard.bin_path, shard.header["dtype"])
        starts = shard.offsets[:-1][:LOOKED_AT]
        found += [ids[start : start + len(begin_ids)].tolist() == list(begin_ids) for start in starts]
    return 2 * sum(found) > len(found)


def common_token_bytes(shards: Sequence[Shard]) -> np.ndarray | None:
    """The table that the shards carry, if every one does; they were checked to be of one tokenizer."""
    tables = [shard.token_bytes for shard in shards]
    return tables[0] if all(table is not None for table in tables) else None
