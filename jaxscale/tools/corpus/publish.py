"""Publishes a finished set: writes its indexes, and copies it from a local folder to a bucket, the manifest last.

An index finds documents by name, or holds the row plan of runs with known settings. It is a folder with its own
checksums, named by its inputs. The manifest does not list it, so indexes can be added to a set at any time.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxscale.runtime.data.array_folder import HEADER
from jaxscale.runtime.data.config import DataConfig, MixtureSetting
from jaxscale.runtime.data.ledger import publish_names
from jaxscale.runtime.data.manifest import NAME, check_manifest, open_set
from jaxscale.runtime.data.pipeline import publish_plan
from jaxscale.runtime.data.token_files import read_remote_manifest
from jaxscale.system.bucket import Bucket
from jaxscale.system.exits import BadInput
from jaxscale.system.storage import open_bucket
from jaxscale.tools.corpus.prepare.config import RowsConfig

MAX_UPLOADS = 4  # at a time


def publish_indexes(folder: Path, cfg: RowsConfig, say: Callable[[str], None]) -> None:
    """Writes the indexes of the finished set in `folder` that do not exist yet.

    Raises: BadInput if the set is incomplete, and for rows longer than all its tokens.
    """
    shards = open_set(check_manifest(folder / NAME, deep=False))
    publish_names(folder, shards)
    sources: MixtureSetting = {name: 1.0 for shard in shards for name in shard.header["sources"]}
    data = DataConfig(
        name="tokens",
        files=str(folder / NAME),
        val_fraction=cfg.val_fraction,
        packing=cfg.packing,
        mixture=sources if cfg.mixture else {},
    )
    for seq_len in cfg.seq_lens:
        try:
            place = publish_plan(folder, data, shards, seq_len=seq_len, seed=cfg.seed)
        except BadInput as error:
            raise BadInput(f"rows.seq_len={seq_len}: {error}") from None
        say(f"{place}: row plan for seq_len={seq_len:,}")


def publish(
    folder: Path,
    url: str,
    *,
    extra_files: Sequence[str] = (),
    bucket: Bucket | None = None,
    say: Callable[[str], None] = print,
) -> str:
    """Uploads the set in `folder` and its indexes to `url`. Returns the gs:// address of the manifest.

    extra_files: files that the manifest does not list, such as a report.

    A repeated call sends only what is missing. The manifest is sent last, and readers open a set by it, so a
    partial set is never trained on.
    Raises: BadInput if the local set is incomplete, or if the address holds another set or may not be written.
    """
    bucket, url = bucket or open_bucket(writing=True), url.rstrip("/")
    manifest = check_manifest(Path(folder) / NAME, deep=True)
    address = f"{url}/{NAME}"
    if bucket.metadata(address) is not None:
        remote = read_remote_manifest(address, bucket)
        if remote.files != manifest.files:
            raise BadInput(f"{address} is the manifest of another set; publish to an empty URL, or delete that one")
    say(f"publishing {len(manifest.files):,} files to {url}")

    def send(name: str) -> bool:
        path = Path(folder) / name
        about = bucket.metadata(f"{url}/{name}")
        if about is not None and int(about["size"]) == path.stat().st_size:
            with open(path, "rb") as file:
                md5 = base64.b64encode(hashlib.file_digest(file, "md5").digest()).decode()
            if about.get("md5Hash") == md5:
                return False
        bucket.upload(path, f"{url}/{name}")
        return True

    found = [path for kind in ("names", "rows") for path in Path(folder).glob(f"{kind}-*/*") if path.is_file()]
    indexes = sorted(str(path.relative_to(folder)) for path in found)
    headers = [name for name in indexes if name.endswith(HEADER)]
    with ThreadPoolExecutor(MAX_UPLOADS) as pool:
        sent = sum(pool.map(send, [*manifest.files, *extra_files, *(name for name in indexes if name not in headers)]))
    sent += sum(map(send, [*headers, NAME]))  # after the files that they list
    say(f"  {sent:,} files sent, {len(manifest.files) + len(extra_files) + len(indexes) + 1 - sent:,} already there")
    return address
