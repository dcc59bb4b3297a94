"""Opens prepared sets, shards, Megatron datasets, ArrayRecord files and raw ids as shards."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxscale.runtime.data.cache import cache_folder, raw_dtype, scan_raw
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.manifest import (
    Manifest,
    check_manifest,
    is_manifest,
    manifest_problems,
    open_set,
    parse_manifest,
    read_manifest,
    verify_once,
)
from jaxscale.runtime.data.other_formats import array_record_shard, is_megatron, megatron_shard
from jaxscale.runtime.data.remote import ShardCache, locator, map_ids, shard_cache
from jaxscale.runtime.data.shards import SUFFIXES, Shard, open_shard, read_header, verify_shards
from jaxscale.runtime.data.verified import Say
from jaxscale.runtime.text.config import Globs, names_sources
from jaxscale.runtime.text.sources.data_sets import is_array_record
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.tokenizer.base import Tokenizer, begin_names
from jaxscale.runtime.text.tokenizer.load import NO_BOS, bos_setting, load_tokenizer, tokenizer_problem
from jaxscale.system.bucket import Bucket
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json
from jaxscale.system.open_files import check_open_files, require_open_files
from jaxscale.system.paths import is_remote
from jaxscale.system.storage import open_bucket

PARTS = (".json", *SUFFIXES.values())  # suffixes of shard files; Megatron also uses .bin and .idx
CONCURRENT_FETCHES = 8  # headers fetched concurrently from a bucket, with one round trip each
PROBED_DOCUMENTS = 16  # number of documents per file to read; the majority decides, because documents may be cut


def bin_of(path: str) -> str:
    """Returns the path of the .bin, given any file of a shard or Megatron dataset. Returns other paths unchanged."""
    stem = next((path.removesuffix(ending) for ending in PARTS if path.endswith(ending)), os.path.splitext(path)[0])
    try:
        is_part = is_megatron(path) or read_header(Path(f"{stem}.json")) is not None
    except BadInput:  # opening the file later raises the error
        is_part = False
    return f"{stem}.bin" if is_part else path


def open_tokens(
    cfg: DataConfig, files: Sequence[SourceFile], val_files: Sequence[SourceFile], vocab_size: int, say: Say
) -> tuple[list[Shard], list[Shard], Tokenizer | None]:
    """Returns (training shards, validation shards, tokenizer or None) for data.name='tokens'. Raises BadInput."""
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
            return [scan_raw(file, raw_dtype(cfg, vocab_size), eos_id, cfg, say)]
        ours.append(Path(file.path))
        return [open_shard(ours[-1])]

    shards = [rename_source(shard, file, cfg.files) for file in files for shard in open_one(file)]
    val_shards = [rename_source(shard, file, cfg.val_files) for file in val_files for shard in open_one(file)]
    for check in (require_open_files, check_open_files):
        check(len(shards) + len(val_shards), "shards")  # mapped files count as open
    verify_shards(ours, cfg, cache_folder(cfg), say)  # after opening, to detect changes after the hash
    made_with = {shard.header["tokenizer"]["fingerprint"]: shard for shard in [*shards, *val_shards]}
    made_with.pop("", None)  # files with an unknown tokenizer
    if len(made_with) > 1:
        names = sorted(shard.header["tokenizer"]["name"] for shard in made_with.values())
        raise BadInput(
            f"data.files mixes shards of different tokenizers: {', '.join(names)}; use one tokenizer per run"
        )
    for fingerprint, shard in made_with.items():
        header, end = shard.header["tokenizer"], shard.header.get("eos_id", "unknown")
        if tokenizer and tokenizer.fingerprint != fingerprint and not cfg.bos_token:
            with contextlib.suppress(BadInput):  # a tokenizer without this begin token is a different tokenizer
                tokenizer = load_tokenizer(cfg.tokenizer, cfg.eos_token, bos_setting(header.get("begin_tokens", ())))
        if tokenizer and tokenizer.fingerprint != fingerprint:
            raise BadInput(
                f"data.tokenizer={cfg.tokenizer} did not produce {shard.place}, which was encoded with "
                f"{header['name']} (end token {end}, data.bos_token="
                f"{bos_setting(header.get('begin_tokens', ())) or 'its own'}); use these, or unset data.tokenizer"
            )
        if tokenizer is None and tokenizer_problem(header["name"]) is None:
            with contextlib.suppress(BadInput):  # the file at this path may have changed
                found = load_tokenizer(header["name"], header["eos_token"], bos_setting(header.get("begin_tokens", ())))
                tokenizer = found if found.fingerprint == fingerprint else None
    if tokenizer and not made_with:
        tokenizer = match_begin_tokens(cfg, tokenizer, shards, say)
    for shard in [*shards, *val_shards]:
        if tokenizer and shard.header["max_id"] >= tokenizer.vocab_size:
            raise BadInput(
                f"{shard.place} contains token id {shard.header['max_id']}, but data.tokenizer={tokenizer.name} has "
                f"ids up to {tokenizer.vocab_size - 1}; use the tokenizer of the file, or unset data.tokenizer"
            )
    return shards, val_shards, tokenizer


def match_begin_tokens(cfg: DataConfig, tokenizer: Tokenizer, shards: Sequence[Shard], say: Say) -> Tokenizer:
    """Returns the tokenizer for ids of unknown origin, without begin tokens unless most documents begin with them."""
    if not tokenizer.begin_ids or cfg.bos_token:
        return tokenizer
    found = []
    for shard in shards:
        ids = map_ids(shard.bin_path, shard.header["dtype"])
        begins = (ids[start : start + len(tokenizer.begin_ids)] for start in shard.offsets[:-1][:PROBED_DOCUMENTS])
        found += [begin.tolist() == list(tokenizer.begin_ids) for begin in begins]
    if 2 * sum(found) > len(found):
        return tokenizer
    name = "".join(begin_names(tokenizer))
    say(f"data.files: documents do not begin with {name}, the begin token of {cfg.tokenizer}; see data.bos_token")
    return load_tokenizer(cfg.tokenizer, cfg.eos_token, NO_BOS)


def rename_source(shard: Shard, file: SourceFile, globs: Globs) -> Shard:
    """Replaces the sources of a shard with the source of its file, if the settings name sources."""
    header = shard.header
    if not names_sources(globs) or header["sources"] == [file.source]:
        return shard
    files = [{**one, "source": file.source} for one in header["files"]]
    header = {**header, "sources": [file.source], "files": files}
    return shard._replace(header=header, doc_index=dataclasses.replace(shard.doc_index, one_source=True))


def open_prepared(path: str, cfg: DataConfig, say: Say) -> list[Shard]:
    """Opens the shards of a prepared set. Verifies local files according to data.verify, others after download."""
    if is_remote(path):
        return open_remote_set(path, shard_cache(str(cache_folder(cfg) / "bucket"), cfg.cache_bytes))
    manifest = check_manifest(path, deep=False)
    shards = open_set(manifest)
    if cfg.verify != "size":  # after opening, to detect changes after the hash
        verify_once(manifest, cache_folder(cfg), say, remember=cfg.verify == "hash")
    return shards


def prepared_set_folder(cfg: DataConfig, files: Sequence[SourceFile]) -> str:
    """Returns the folder or gs:// URL of the prepared set if `files` is a single manifest, else ''."""
    if cfg.name != "tokens" or len(files) != 1 or not is_manifest(files[0].path):
        return ""
    path = files[0].path
    return path.rpartition("/")[0] if is_remote(path) else str(Path(path).absolute().parent)


def prepared_problems(path: str, cfg: DataConfig) -> tuple[Manifest | None, list[str]]:
    """Returns (manifest or None, messages for problems in names and sizes)."""
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
    """Returns the message for a cache that is smaller than the largest file of the set."""
    return f"{url} has a file of {largest:,} bytes; raise data.cache_bytes to a few times that"


def read_remote_manifest(url: str, bucket: Bucket) -> Manifest:
    """Returns the manifest at a gs:// URL. Raises BadInput if the manifest is missing or invalid."""
    content = bucket.read(url)
    try:
        value = parse_json(content)
    except BadInput as error:
        raise BadInput(f"{url} is not valid JSON ({error}); publish the set again") from None
    return parse_manifest(url, value)


def open_remote_set(url: str, cache: ShardCache) -> list[Shard]:
    """Opens the shards of a manifest at a gs:// URL. Downloads headers immediately, and indexes and ids on demand."""
    manifest = read_remote_manifest(url, cache.bucket)
    base = url.rpartition("/")[0]
    if (largest := max(size for size, _ in manifest.files.values())) > cache.max_bytes:
        raise BadInput(too_small(url, largest))

    def locate(name: str) -> str:
        size, sha256 = manifest.files[name]
        if name.endswith(".bin"):
            return locator(f"{base}/{name}", size, sha256, cache)
        return str(cache.fetch(f"{base}/{name}", size, sha256))

    needed = [name for name in manifest.files if name.endswith(".json")]
    with ThreadPoolExecutor(CONCURRENT_FETCHES) as pool:
        list(pool.map(locate, needed))
    return open_set(manifest, locate)
