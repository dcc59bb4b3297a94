"""Client for objects in gs:// buckets over the JSON API: range reads, resumable uploads, conditional writes, retries.

storage.py opens it with this machine's credentials. docs/decisions.md compares this client with libraries.
API: cloud.google.com/storage/docs/json_api/v1/objects and .../docs/retry-strategy.
"""

import base64
import contextlib
import dataclasses
import datetime
import email.utils
import hashlib
import http.client
import json
import random
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxscale.system.bucket_errors import Transient, Unreachable, refusal
from jaxscale.system.exits import BadInput

T = TypeVar("T")
GOOGLE = "https://storage.googleapis.com"
ATTEMPTS = 9  # consecutive failures without progress before giving up, about two minutes of waiting
FIRST_WAIT, MAX_WAIT, MAX_RETRY_AFTER = 0.5, 32.0, 300.0  # seconds
SILENCE = 60.0  # seconds without data after which a connection is considered dead
READ_BYTES = 1 << 20  # bytes per read
UPLOAD_CHUNK = 32 << 20  # bytes per request; the API requires a multiple of 256 KiB


class Clock(NamedTuple):
    """Time and random numbers, replaceable in tests."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random


SYSTEM_CLOCK = Clock()


class Look(NamedTuple):
    """Content of an object. `age` is the number of seconds since it was written, by the service's clock."""

    content: bytes
    generation: int
    age: float


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Client for any bucket. `authorise` adds credentials to headers. `attempts` limits consecutive failures."""

    endpoint: str
    authorise: Callable[[dict[str, str]], None]
    clock: Clock = SYSTEM_CLOCK
    silence: float = SILENCE
    attempts: int = ATTEMPTS

    def metadata(self, url: str) -> dict[str, Any] | None:
        """Returns the metadata of an object, such as size and md5Hash, or None if it does not exist."""
        try:
            return self.patiently(lambda: self.ask("GET", self.object_url(url), url, "read"), url)
        except FileNotFoundError:
            return None

    def content(self, url: str) -> bytes:
        """Returns the content of a small object. Raises FileNotFoundError."""
        where = self.object_url(url, alt="media")
        return self.patiently(lambda: self.ask("GET", where, url, "read", parse=lambda response: response.read()), url)

    def read(self, url: str) -> bytes:
        """Returns the content of a small object. Raises BadInput if the object does not exist or cannot be read."""
        try:
            return self.content(url)
        except FileNotFoundError as error:
            raise BadInput(str(error)) from None

    def look(self, url: str) -> Look | None:
        """Returns the content of a small object with its generation and age, or None if it does not exist."""

        def ask() -> Look | None:
            try:
                with self.request("GET", self.object_url(url), url, "read") as response:
                    about, now = json.load(response), response.headers.get("Date", "")
            except FileNotFoundError:
                return None
            where = self.object_url(url, alt="media", generation=about["generation"])
            try:
                with self.request("GET", where, url, "read") as response:
                    return Look(response.read(), int(about["generation"]), age(about["updated"], now))
            except FileNotFoundError:  # this generation was replaced or deleted
                raise Transient("the object was replaced between two requests") from None

        return self.patiently(ask, url)

    def put(self, url: str, content: bytes, generation: int | None = None) -> int:
        """Writes a small object in one attempt. Returns its generation.

        `generation` is the generation to replace: 0 if the object must not exist, None for any. Raises Changed if the
        object has a different generation, Transient, Forbidden, or FileNotFoundError if the bucket does not exist.
        """
        query = {"uploadType": "media"} | ({} if generation is None else {"ifGenerationMatch": str(generation)})
        headers = {"Content-Type": "application/octet-stream"}
        stored = self.ask("POST", self.upload_url(url, query), url, "written", headers, content)
        if stored.get("md5Hash") != base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode():
            raise Transient("the stored content differs from the content that was sent")
        return int(stored["generation"])

    def delete(self, url: str, generation: int) -> None:
        """Deletes an object in one attempt. Raises the errors of put, and FileNotFoundError if it does not exist."""
        where = self.object_url(url, ifGenerationMatch=str(generation))
        self.ask("DELETE", where, url, "deleted", parse=lambda response: None)

    def remove(self, url: str) -> bool:
        """Deletes any generation of an object. Returns False if the object does not exist."""
        where = self.object_url(url)
        try:
            self.patiently(lambda: self.ask("DELETE", where, url, "deleted", parse=lambda response: None), url)
        except FileNotFoundError:
            return False
        return True

    def copy(self, url: str, target: str) -> None:
        """Copies an object within the service, in one or more requests."""
        bucket, name = (urllib.parse.quote(part, safe="") for part in split(target))
        token: str | None = ""

        def ask() -> str | None:
            where = self.object_url(url).rstrip("?") + f"/rewriteTo/b/{bucket}/o/{name}"
            where += f"?rewriteToken={urllib.parse.quote(token)}" if token else ""
            headers = {"Content-Type": "application/json"}
            return self.ask("POST", where, target, "written", headers, b"{}").get("rewriteToken")

        while token is not None:
            token = self.patiently(ask, url)

    def pieces(
        self, url: str, start: int, size: int, *, stop: int | None = None, generation: str | None = None
    ) -> Iterator[bytes]:
        """Yields the bytes [start, stop) of an object that has `size` bytes. Resumes after a broken connection.

        `stop` is the end of the object by default. `generation`, if given, is the generation to read.
        Raises Unreachable after too many consecutive failures, FileNotFoundError, or BadInput if the object has a
        different size or cannot be read.
        """
        stop, failures = size if stop is None else stop, 0
        where = self.object_url(url, alt="media", **({} if generation is None else {"generation": generation}))
        while start < stop:
            last = str(stop - 1) if stop < size else ""
            headers = {"Range": f"bytes={start}-{last}"} if start or last else {}
            try:
                with self.request("GET", where, url, "read", headers) as response:
                    check_size(response.headers, url, size)
                    skipped = start if response.status == 200 else 0  # a server without range support sends everything
                    while start < stop:
                        piece = response.read1(READ_BYTES)
                        if not piece:
                            raise Transient("the connection was closed before the end")
                        skip = min(skipped, len(piece))
                        skipped, piece = skipped - skip, piece[skip : skip + stop - start]
                        if piece:
                            start, failures = start + len(piece), 0
                            yield piece
            except Transient as fault:
                failures += 1
                self.wait(fault, failures, url)

    def upload(self, path: Path, url: str) -> None:
        """Copies a local file to an object, which becomes visible when complete. Raises the errors of Upload."""
        md5, left = hashlib.md5(usedforsecurity=False), path.stat().st_size
        with open(path, "rb") as file:
            upload = Upload(self, url, left)
            while piece := file.read(min(READ_BYTES, left)):
                md5.update(piece)
                left -= len(piece)
                upload.write(piece)
        upload.finish(md5.digest(), str(path))

    def upload_url(self, url: str, query: dict[str, str]) -> str:
        """Returns the API URL for writing an object."""
        bucket, name = split(url)
        query = query | {"name": name}
        return f"{self.endpoint}/upload/storage/v1/b/{urllib.parse.quote(bucket)}/o?{urllib.parse.urlencode(query)}"

    def object_url(self, url: str, **query: str) -> str:
        """Returns the API URL of an object."""
        bucket, name = (urllib.parse.quote(part, safe="") for part in split(url))
        return f"{self.endpoint}/storage/v1/b/{bucket}/o/{name}?{urllib.parse.urlencode(query)}".rstrip("?")

    def ask(self, *request: Any, parse: Callable[[Any], Any] = json.load) -> Any:
        """Sends one request and returns parse(response). Takes the arguments of `request` and raises its errors."""
        with self.request(*request) as response:
            return parse(response)

    @contextlib.contextmanager
    def request(
        self,
        method: str,
        where: str,
        url: str,
        what: str,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> Iterator[Any]:
        """Yields an open response. Raises FileNotFoundError, BadInput, or, even for errors in the block, Transient."""
        headers = {"Accept-Encoding": "identity", **(headers or {})}
        try:
            self.authorise(headers)
            request = urllib.request.Request(where, body, headers, method=method)
            with OPENER.open(request, timeout=self.silence) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                wait = self.retry_after(error.headers.get("Retry-After", ""))
                raise refusal(error, url, what, wait) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise BadInput(f"{url}: the server's certificate is not valid: {error.reason}") from None
            raise Transient(str(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise Transient(str(error) or type(error).__name__) from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise Transient("the response is not JSON; check for a proxy") from None

    def retry_after(self, header: str) -> float:
        """Returns the delay in a Retry-After header, in seconds. It is a number or a date (RFC 9110, 10.2.3)."""
        if header.isdigit():
            return min(float(header), MAX_RETRY_AFTER)
        try:
            date = email.utils.parsedate_to_datetime(header).timestamp()
        except ValueError:
            return 0.0
        return min(max(date - self.clock.now(), 0.0), MAX_RETRY_AFTER)

    def patiently(self, ask: Callable[[], T], url: str) -> T:
        """Returns ask(). Retries after transient faults."""
        failures = 0
        while True:
            try:
                return ask()
            except Transient as fault:
                failures += 1
                self.wait(fault, failures, url)

    def wait(self, fault: Transient, failures: int, url: str) -> None:
        """Sleeps before the next attempt. Raises Unreachable after too many consecutive failures."""
        if failures >= self.attempts:
            tries = f"{failures} consecutive attempts failed, the last" if failures > 1 else "the attempt failed"
            raise Unreachable(f"{url}: {tries} with: {fault}; try again later")
        longest = min(FIRST_WAIT * 2 ** (failures - 1), MAX_WAIT)
        self.clock.sleep(max(fault.wait, longest * (0.5 + 0.5 * self.clock.chance())))


class Upload:
    """Resumable upload in chunks of 32 MiB. Raises BadInput if writing is not permitted or the MD5 differs."""

    def __init__(self, bucket: Bucket, url: str, num_bytes: int):
        self.bucket, self.url, self.total = bucket, url, num_bytes
        self.session = ""
        self.buffer, self.sent = bytearray(), 0  # bytes not yet confirmed, and the offset of the first of them
        self.answer: dict[str, Any] | None = None

    def write(self, content: Any) -> None:
        """Adds the next bytes, a buffer."""
        view = memoryview(content)
        if self.sent + len(self.buffer) + len(view) > self.total:
            raise RuntimeError(f"{self.url}: received more than {self.total} bytes")
        while len(view):
            room = UPLOAD_CHUNK - len(self.buffer)
            self.buffer += view[:room]
            view = view[room:]
            if len(self.buffer) == UPLOAD_CHUNK and self.sent + UPLOAD_CHUNK < self.total:
                self.flush()

    def flush(self) -> None:
        """Sends the buffer, with retries."""

        def start() -> str:
            where = self.bucket.upload_url(self.url, {"uploadType": "resumable"})
            headers = {"Content-Type": "application/json", "X-Upload-Content-Length": str(self.total)}
            session = lambda response: response.headers["Location"]
            return self.bucket.ask("POST", where, self.url, "written", headers, b"{}", parse=session)

        failures, end = 0, self.sent + len(self.buffer)
        try:
            self.session = self.session or self.bucket.patiently(start, self.url)
        except FileNotFoundError as error:
            raise BadInput(f"{str(error).partition(';')[0]}; check that the bucket exists") from None
        while self.answer is None and (self.sent < end or not self.total):
            part, content = f"{self.sent}-{end - 1}", bytes(self.buffer)
            if failures or not content:  # ask how many bytes have arrived
                part, content = "*", b""
            try:
                headers = {"Content-Range": f"bytes {part}/{self.total}", "Content-Type": "application/octet-stream"}
                with self.bucket.request("PUT", self.session, self.url, "written", headers, content) as response:
                    if response.status == 308:  # incomplete
                        stored = response.headers.get("Range", "")  # bytes=0-LAST, or absent
                        done = int(stored.rpartition("-")[2]) + 1 if stored else 0
                    else:
                        done, self.answer = 0, json.load(response)
            except Transient as fault:
                failures += 1
                self.bucket.wait(fault, failures, self.url)
                continue
            failures = 0
            if self.answer is None:
                if not self.sent <= done <= end:
                    raise BadInput(f"{self.url}: the service lost uploaded data; run the command again")
                del self.buffer[: done - self.sent]
                self.sent = done

    def finish(self, md5: bytes, expected: str = "the uploaded data") -> None:
        """Completes the object. Raises BadInput if its MD5 differs."""
        self.flush()
        if (self.answer or {}).get("md5Hash") != base64.b64encode(md5).decode():
            raise BadInput(f"{self.url} differs from {expected}, because the transfer failed; run the command again")


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Does not follow status 308, which in this API means that an upload is incomplete."""

    def http_error_308(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        """Returns the response unchanged."""
        return fp


OPENER = urllib.request.build_opener(NoRedirects)


def check_size(headers: Any, url: str, size: int) -> None:
    """Raises BadInput if the response does not include the size of the object, or if it differs from `size`."""
    total = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "")
    if not total.isdecimal():
        raise BadInput(
            f"{url}: the response does not include the object's size; bypass any proxy, and store the object without "
            "Content-Encoding"
        )
    if int(total) != size:
        raise BadInput(f"{url} has {total} bytes, not {size}, because it was replaced; restore the original")


def split(url: str) -> tuple[str, str]:
    """Returns (BUCKET, NAME) of gs://BUCKET/NAME. Raises BadInput for any other URL."""
    bucket, _, name = url.removeprefix("gs://").partition("/")
    if not url.startswith("gs://") or not bucket or not name:
        raise BadInput(f"{url} must be gs://BUCKET/NAME")
    return bucket, name


def age(updated: str, now: str) -> float:
    """Returns the seconds from an RFC 3339 time to the time in an HTTP Date header, or 0 if one is malformed."""
    try:
        then = datetime.datetime.fromisoformat(updated)
        return max(0.0, (email.utils.parsedate_to_datetime(now) - then).total_seconds())
    except (TypeError, ValueError):
        return 0.0
