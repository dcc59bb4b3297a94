"""A prepared set, in a folder or a bucket, opened by its manifest."""

from concurrent.futures import ThreadPoolExecutor

from jaxscale.data.cache import Say, cache_folder
from jaxscale.data.config import DataConfig
from jaxscale.data.manifest import (
    Manifest,
    manifest_problems,
    open_set,
    parse_manifest,
    read_manifest,
    refuse,
    verify_once,
)  # fmt: skip
from jaxscale.data.remote import ShardCache, locator, shard_cache
from jaxscale.data.shards import Shard
from jaxscale.system.bucket import Bucket
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json
from jaxscale.system.paths import is_remote
from jaxscale.system.storage import open_bucket

SMALL_AT_ONCE = 8  # headers and indices: each is one round trip


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
    """The shards of the set whose manifest is at this gs:// address. Headers and indices are fetched now, ids later.

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

    needed = [name for name in manifest.files if name.endswith((".json", ".idx", ".src"))]
    with ThreadPoolExecutor(SMALL_AT_ONCE) as pool:
        list(pool.map(place, needed))
    return open_set(manifest, place)
