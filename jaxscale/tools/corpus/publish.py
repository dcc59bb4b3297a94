"""Writes the indexes of a prepared dataset and uploads the dataset to a bucket.

There are two kinds of index: one finds documents by name, the other stores the row plan of runs with known settings.
An index is a folder with its own checksums, named by a hash of its inputs. The manifest does not list indexes, so they
can be added to a dataset at any time.
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

MAX_UPLOADS = 4  # concurrent uploads


def publish_indexes(folder: Path, cfg: RowsConfig, say: Callable[[str], None]) -> None:
    """Writes the missing indexes of the complete dataset in `folder`.

    Raises BadInput if the dataset is incomplete, or if a sequence length exceeds the number of tokens in the dataset.
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
    """Uploads the dataset in `folder` and its indexes to `url`. Returns the gs:// address of the manifest.

    extra_files: files to upload that the manifest does not list, such as a report.

    A repeated call uploads only missing files. Readers open a dataset through its manifest, which is uploaded last, so
    that no run trains on a partial upload.
    Raises BadInput if the local dataset is incomplete, if `url` has a different dataset, or if it is not writable.
    """
    bucket, url = bucket or open_bucket(writing=True), url.rstrip("/")
    manifest = check_manifest(Path(folder) / NAME, deep=True)
    address = f"{url}/{NAME}"
    if bucket.metadata(address) is not None:
        remote = read_remote_manifest(address, bucket)
        if remote.files != manifest.files:
            raise BadInput(f"{address} belongs to a different dataset; publish to an empty URL, or delete that dataset")
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
    sent += sum(map(send, [*headers, NAME]))  # uploaded after the files that they list
    say(f"  {sent:,} files uploaded, {len(manifest.files) + len(extra_files) + len(indexes) + 1 - sent:,} unchanged")
    return address
