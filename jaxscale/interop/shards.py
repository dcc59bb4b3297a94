"""The safetensors files of an export, written front to back and published atomically, on disk or in a bucket."""

import base64
import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxscale.interop.families import TensorPair
from jaxscale.interop.reading import WEIGHTS
from jaxscale.interop.safetensors import encode_header
from jaxscale.system import paths
from jaxscale.system.bucket import UPLOAD_CHUNK, Bucket
from jaxscale.system.bucket_errors import Transient
from jaxscale.system.exits import BadInput
from jaxscale.system.storage import open_bucket

MANY = "model-{:05d}-of-{:05d}.safetensors"  # as transformers names them


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of the export."""

    name: str
    pairs: tuple[TensorPair, ...]
    header: bytes
    num_bytes: int  # of the whole file


def plan_shards(pairs: Sequence[TensorPair], dtype: np.dtype, shard_bytes: int, single: str = WEIGHTS) -> list[Shard]:
    """The files: tensors in order, up to shard_bytes in each; a larger tensor has a file of its own.

    Args: single: the name of a file that holds all.
    """
    groups: list[list[TensorPair]] = [[]]
    filled = 0
    for pair in pairs:
        size = tensor_bytes(pair, dtype)
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(pair)
        filled += size
    shards = []
    for number, group in enumerate(groups, 1):
        name = single if len(groups) == 1 else MANY.format(number, len(groups))
        header = encode_header({pair.theirs: (dtype, pair.their_shape) for pair in group})
        shards.append(Shard(name, tuple(group), header, len(header) + sum(tensor_bytes(pair, dtype) for pair in group)))
    return shards


def tensor_bytes(pair: TensorPair, dtype: np.dtype) -> int:
    """Of one tensor of theirs."""
    return math.prod(pair.their_shape) * dtype.itemsize


def index_of(shards: Sequence[Shard]) -> dict[str, Any]:
    """What model.safetensors.index.json says."""
    total = sum(shard.num_bytes - len(shard.header) for shard in shards)
    places = {pair.theirs: shard.name for shard in shards for pair in shard.pairs}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


class Growing:
    """What a shard is written into: takes the next bytes and keeps their number and md5."""

    def __init__(self, send: Any):
        self.send, self.num_bytes = send, 0
        self.md5 = hashlib.md5(usedforsecurity=False)  # the one hash that object stores tell as well

    def write(self, content: Any) -> None:
        """Takes the next bytes, a buffer."""
        view = memoryview(content).cast("B")
        self.md5.update(view)
        self.num_bytes += len(view)
        self.send(view)


@contextlib.contextmanager
def growing_file(path: Any, num_bytes: int) -> Iterator[Growing]:
    """A file of this size to write into, which is there, whole, when the block has ended.

    Raises: OSError, or BadInput where a bucket refuses or holds something else at the end.
    """
    if not paths.is_remote(path):
        with paths.replacing(path) as file:
            growing = Growing(file.write)
            yield growing
            assert growing.num_bytes == num_bytes, f"{path} should have {num_bytes} bytes, not {growing.num_bytes}"
        return
    upload = Upload(open_bucket(writing=True), os.fspath(path), num_bytes)
    growing = Growing(upload.write)
    yield growing
    assert growing.num_bytes == num_bytes, f"{path} should have {num_bytes} bytes, not {growing.num_bytes}"
    upload.finish(growing.md5.digest())


class Upload:
    """An object that comes in chunks of 32 MiB, each of which is kept until the service has it."""

    def __init__(self, bucket: Bucket, url: str, num_bytes: int):
        self.bucket, self.url, self.total = bucket, url, num_bytes
        self.session = ""
        self.buffer, self.sent = bytearray(), 0  # what the service may not have, and where it begins
        self.answer: dict[str, Any] | None = None

    def write(self, view: memoryview) -> None:
        """Takes the next bytes."""
        while len(view):
            room = UPLOAD_CHUNK - len(self.buffer)
            self.buffer += view[:room]
            view = view[room:]
            if len(self.buffer) == UPLOAD_CHUNK and self.sent + UPLOAD_CHUNK < self.total:
                self.flush()

    def flush(self) -> None:
        """Sends what is in the buffer, again where the connection broke."""
        failures, end = 0, self.sent + len(self.buffer)
        try:
            self.session = self.session or self.bucket.patiently(self.start, self.url)
        except FileNotFoundError as error:
            raise BadInput(f"{str(error).partition(';')[0]}; does the bucket exist?") from None
        while self.answer is None and self.sent < end:
            try:
                headers, content = self.next_request(end, asking=failures > 0)
                done, self.answer = self.bucket.ask_upload(self.session, self.url, headers, content)
            except Transient as fault:
                failures += 1
                self.bucket.wait(fault, failures, self.url)
                continue
            failures = 0
            if self.answer is None:
                if not self.sent <= done <= end:
                    raise BadInput(f"{self.url}: the service lost what it had been sent; run it again")
                del self.buffer[: done - self.sent]
                self.sent = done

    def start(self) -> str:
        """Begins the upload."""
        return self.bucket.start_upload(self.url, self.total)

    def next_request(self, end: int, asking: bool) -> tuple[dict[str, str], bytes]:
        """Headers and content: the buffer; or, after a failure, the question how much has arrived."""
        if asking or not self.buffer:
            return {"Content-Range": f"bytes */{self.total}"}, b""
        return {"Content-Range": f"bytes {self.sent}-{end - 1}/{self.total}"}, bytes(self.buffer)

    def finish(self, md5: bytes) -> None:
        """Returns when the object is there. Raises BadInput if it is not what was sent."""
        self.flush()
        told = (self.answer or {}).get("md5Hash")
        if told != base64.b64encode(md5).decode():
            raise BadInput(f"{self.url} does not hold what was sent: it was damaged on its way; run it again")
