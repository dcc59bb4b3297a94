"""Token files as shards: those of a prepared set and of this program, Megatron's, array records and raw ids."""

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jaxscale.data.array_record import array_record_shard
from jaxscale.data.cache import cache_folder, raw_dtype, scanned
from jaxscale.data.config import DataConfig
from jaxscale.data.header import ENDINGS, read_header
from jaxscale.data.manifest import (
    Manifest,
    is_manifest,
    manifest_problems,
    open_set,
    parse_manifest,
    read_manifest,
    refuse,
    verify_once,
)  # fmt: skip
from jaxscale.data.megatron import is_megatron, megatron_shard
from jaxscale.data.remote import ShardCache, locator, map_ids, shard_cache
from jaxscale.data.shards import Shard, expect_whole, open_shard
from jaxscale.data.verified import Say
from jaxscale.system.bucket import Bucket
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json
from jaxscale.system.open_files import check_open_files, require_open_files
from jaxscale.system.paths import is_remote
from jaxscale.system.storage import open_bucket
from jaxscale.text.config import Globs, names_sources
from jaxscale.text.sources.array_record import is_array_record
from jaxscale.text.sources.files import SourceFile
from jaxscale.text.tokenizer.base import Tokenizer, begin_names
from jaxscale.text.tokenizer.load import NO_BOS, as_setting, load_tokenizer, tokenizer_problem

PARTS = (".json", *ENDINGS.values())  # of a shard; the .bin and the .idx are Megatron's too
SMALL_AT_ONCE = 8  # headers in a bucket: each is one round trip
LOOKED_AT = 16  # documents of each file, of which most tell; a first or last one may be cut


def bin_of(path: str) -> str:
    """The .bin of the shard, or of Megatron's pair, that a file is part of; the path of any other file."""
    stem = next((path.removesuffix(ending) for ending in PARTS if path.endswith(ending)), os.path.splitext(path)[0])
    try:
        is_part = is_megatron(path) or read_header(Path(f"{stem}.json")) is not None
    except BadInput:  # which opening the file raises again
        is_part = False
    return f"{stem}.bin" if is_part else path


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

    shards = [renamed(shard, file, cfg.files) for file in files for shard in open_one(file)]
    val_shards = [renamed(shard, file, cfg.val_files) for file in val_files for shard in open_one(file)]
    for check in (require_open_files, check_open_files):
        check(len(shards) + len(val_shards), "shards")  # a mapped file is an open one
    expect_whole(ours, cfg, cache_folder(cfg), say)  # after they were opened, so that nothing comes between
    made_with = {shard.header["tokenizer"]["fingerprint"]: shard for shard in [*shards, *val_shards]}
    made_with.pop("", None)  # of files that do not tell
    if len(made_with) > 1:
        names = sorted(shard.header["tokenizer"]["name"] for shard in made_with.values())
        raise BadInput(f"data.files mixes shards of different tokenizers: {', '.join(names)}; train on one at a time")
    for fingerprint, shard in made_with.items():
        header, end = shard.header["tokenizer"], shard.header.get("eos_id", "unknown")
        if tokenizer and tokenizer.fingerprint != fingerprint and not cfg.bos_token:
            with contextlib.suppress(BadInput):  # it has no such token: it is another one
                tokenizer = load_tokenizer(cfg.tokenizer, cfg.eos_token, as_setting(header.get("begin_tokens", ())))
        if tokenizer and tokenizer.fingerprint != fingerprint:
            raise BadInput(
                f"data.tokenizer={cfg.tokenizer} is not the one that {shard.place} was made with, which is "
                f"{header['name']} with end token {end} and data.bos_token="
                f"{as_setting(header.get('begin_tokens', ())) or 'its own'}; name that, or leave it empty"
            )
        if tokenizer is None and tokenizer_problem(header["name"]) is None:
            with contextlib.suppress(BadInput):  # another file stands there now
                found = load_tokenizer(header["name"], header["eos_token"], as_setting(header.get("begin_tokens", ())))
                tokenizer = found if found.fingerprint == fingerprint else None
    if tokenizer and not made_with:
        tokenizer = of_ids(cfg, tokenizer, shards, say)
    for shard in [*shards, *val_shards]:
        if tokenizer and shard.header["max_id"] >= tokenizer.vocab_size:
            raise BadInput(
                f"{shard.place} holds token id {shard.header['max_id']}, which data.tokenizer={tokenizer.name} does "
                f"not have (its largest is {tokenizer.vocab_size - 1}); name the one it was made with, or none"
            )
    return shards, val_shards, tokenizer


def of_ids(cfg: DataConfig, tokenizer: Tokenizer, shards: Sequence[Shard], say: Say) -> Tokenizer:
    """data.tokenizer for ids that do not tell theirs: it begins documents only if most of the first ones begin so."""
    if not tokenizer.begin_ids or cfg.bos_token or most_begin_with(tokenizer.begin_ids, shards):
        return tokenizer
    name = "".join(begin_names(tokenizer))
    say(f"data.files: documents do not begin with {name}, as those of {cfg.tokenizer} do; see data.bos_token")
    return load_tokenizer(cfg.tokenizer, cfg.eos_token, NO_BOS)


def renamed(shard: Shard, file: SourceFile, globs: Globs) -> Shard:
    """The shard, of the source that the person has named its file by; with its own sources where nobody did."""
    header = shard.header
    if not names_sources(globs) or header["sources"] == [file.source]:
        return shard
    files = [{**one, "source": file.source} for one in header["files"]]
    return shard._replace(
        header={**header, "sources": [file.source], "files": files}, doc_index=shard.doc_index.of_one_source()
    )


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


def open_prepared(path: str, cfg: DataConfig, say: Say) -> list[Shard]:
    """The shards that the manifest at a local path or gs:// address lists, in its order.

    Local files are hashed once on this machine if data.verify is 'hash'; those of a bucket in each process.
    Raises: BadInput naming what is missing, was changed since, or may not be read.
    """
    if is_remote(path):
        return open_remote_set(path, shard_cache(str(cache_folder(cfg) / "bucket"), cfg.cache_bytes))
    manifest = read_manifest(path)
    refuse(manifest_problems(manifest, deep=False))
    shards = open_set(manifest)
    if cfg.verify != "size":  # after they were opened, so that nothing comes between
        verify_once(manifest, cache_folder(cfg), say, remember=cfg.verify == "hash")
    return shards


def set_of(cfg: DataConfig, files: Sequence[SourceFile]) -> str:
    """The folder or gs:// address of the one prepared set that is trained on; '' for anything else."""
    if cfg.name != "tokens" or len(files) != 1 or not is_manifest(files[0].path):
        return ""
    path = files[0].path
    return path.rpartition("/")[0] if is_remote(path) else str(Path(path).absolute().parent)


def prepared_problems(path: str, cfg: DataConfig) -> tuple[Manifest | None, list[str]]:
    """(the manifest if it can be read, one line for each thing that names and sizes tell to be wrong)."""
    try:
        if not is_remote(path):
            manifest = read_manifest(path)
            return manifest, manifest_problems(manifest, deep=False)
        manifest = read_remote_manifest(path, open_bucket())
    except BadInput as error:
        return None, [str(error)]
    largest = max(size for size, _ in manifest.files.values())
    return manifest, [too_small(path, largest)] if largest > cfg.cache_bytes else []


def too_small(url: str, largest: int) -> str:
    """The line for a cache that cannot hold a single shard."""
    return f"{url} has a file of {largest:,} bytes; raise data.cache_bytes to a few times that"


def read_remote_manifest(url: str, bucket: Bucket) -> Manifest:
    """The manifest at a gs:// address. Raises BadInput naming it if it is missing or not good."""
    content = bucket.read(url)
    try:
        value = parse_json(content)
    except BadInput as error:
        raise BadInput(f"{url} is not valid JSON ({error}); publish the set again") from None
    return parse_manifest(url, value)


def open_remote_set(url: str, cache: ShardCache) -> list[Shard]:
    """The shards of the set whose manifest is at this gs:// address. Headers are fetched now, indexes and ids later.

    Raises: BadInput naming what is missing, may not be read, or is not what the manifest lists.
    """
    manifest = read_remote_manifest(url, cache.bucket)
    base = url.rpartition("/")[0]
    if (largest := max(size for size, _ in manifest.files.values())) > cache.max_bytes:
        raise BadInput(too_small(url, largest))

    def place(name: str) -> str:
        size, sha256 = manifest.files[name]
        if name.endswith(".bin"):
            return locator(f"{base}/{name}", size, sha256, cache)
        return str(cache.local(f"{base}/{name}", size, sha256))

    needed = [name for name in manifest.files if name.endswith(".json")]
    with ThreadPoolExecutor(SMALL_AT_ONCE) as pool:
        list(pool.map(place, needed))
    return open_set(manifest, place)
