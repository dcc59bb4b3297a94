"""Copies a prepared set from a local folder to a bucket, the manifest last."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxscale.runtime.data.array_folder import HEADER
from jaxscale.runtime.data.manifest import NAME, check_manifest
from jaxscale.runtime.data.token_files import read_remote_manifest
from jaxscale.system.bucket import Bucket
from jaxscale.system.exits import BadInput
from jaxscale.system.storage import open_bucket
from jaxscale.tools.corpus.indexes import index_files

MAX_UPLOADS = 4  # at a time


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
            raise BadInput(f"{address} lists another set; publish to an empty address, or delete that one first")
    say(f"publishing {len(manifest.files):,} files to {url}")

    def send(name: str) -> bool:
        path = Path(folder) / name
        about = bucket.metadata(f"{url}/{name}")
        if about is not None and int(about["size"]) == path.stat().st_size and about.get("md5Hash") == md5_of(path):
            return False
        bucket.upload(path, f"{url}/{name}")
        return True

    indexes = index_files(Path(folder))
    headers = [name for name in indexes if name.endswith(HEADER)]
    with ThreadPoolExecutor(MAX_UPLOADS) as pool:
        sent = sum(pool.map(send, [*manifest.files, *extra_files, *(name for name in indexes if name not in headers)]))
    sent += sum(map(send, [*headers, NAME]))  # after the files that they list
    say(f"  {sent:,} files sent, {len(manifest.files) + len(extra_files) + len(indexes) + 1 - sent:,} were there")
    return address


def md5_of(path: Path) -> str:
    """Returns the md5 of a file in the service's format."""
    with open(path, "rb") as file:
        return base64.b64encode(hashlib.file_digest(file, "md5").digest()).decode()
