"""Objects of gs:// buckets over the JSON API: reads from any byte on, uploads that go on or that take the place of one
known generation only, and patience with faults. storage.py opens it with this machine's credentials.

The requests are made here, since a large object has to go on where it stopped, in this process or the next. Documented
at cloud.google.com/storage/docs/json_api/v1/objects and .../docs/retry-strategy.
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
ATTEMPTS = 9  # failures in a row without a byte of progress: about two minutes of waiting
FIRST_WAIT, LONGEST_WAIT, LONGEST_TOLD = 0.5, 32.0, 300.0  # seconds; the last: of a Retry-After that is obeyed
SILENCE = 60.0  # seconds without a byte after which a connection counts as dead
PIECE = 1 << 20  # bytes read at once
UPLOAD_CHUNK = 32 << 20  # a multiple of 256 KiB, as the API wants


class Clock(NamedTuple):
    """Time and chance, passed in so that a test needs neither."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random


REAL = Clock()


class Look(NamedTuple):
    """An object as it was at one moment. age: seconds since it was written, all by the service's own clocks."""

    content: bytes
    generation: int
    age: float


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A door to all buckets. authorise: adds the headers that say who asks. attempts: before `patiently` gives up."""

    endpoint: str
    authorise: Callable[[dict[str, str]], None]
    clock: Clock = REAL
    silence: float = SILENCE
    attempts: int = ATTEMPTS

    def metadata(self, url: str) -> dict[str, Any] | None:
        """What the service says of an object, such as its size and md5Hash; None if there is no such object."""

        def ask() -> dict[str, Any]:
            with self.request("GET", self.object_url(url), url, "read") as response:
                return json.load(response)

        try:
            return self.patiently(ask, url)
        except FileNotFoundError:
            return None

    def content(self, url: str) -> bytes:
        """A small object whole. Raises FileNotFoundError."""

        def ask() -> bytes:
            with self.request("GET", self.object_url(url, alt="media"), url, "read") as response:
                return response.read()

        return self.patiently(ask, url)

    def read(self, url: str) -> bytes:
        """A small object whole. Raises BadInput telling what is missing: the object, or the right to read it."""
        try:
            return self.content(url)
        except FileNotFoundError as error:
            raise BadInput(str(error)) from None

    def look(self, url: str) -> Look | None:
        """A small object with its generation and age, or None if there is none."""

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
            except FileNotFoundError:  # that is not to say that it is gone
                raise Transient("it was replaced while one looked") from None

        return self.patiently(ask, url)

    def put(self, url: str, content: bytes, generation: int | None = None) -> int:
        """Writes a small object whole, in one try; its new generation. generation: which it may replace; 0: none.

        Raises: Transient, Forbidden, FileNotFoundError if there is no such bucket, Changed for another generation.
        """
        bucket, name = split(url)
        query = {"uploadType": "media", "name": name}
        query |= {} if generation is None else {"ifGenerationMatch": str(generation)}
        where = f"{self.endpoint}/upload/storage/v1/b/{urllib.parse.quote(bucket)}/o?{urllib.parse.urlencode(query)}"
        headers = {"Content-Type": "application/octet-stream"}
        with self.request("POST", where, url, "written", headers, content) as response:
            return int(json.load(response)["generation"])

    def delete(self, url: str, generation: int) -> None:
        """Removes an object, in one try. Raises as put does, FileNotFoundError if it is not there."""
        where = self.object_url(url, ifGenerationMatch=str(generation))
        with self.request("DELETE", where, url, "deleted"):
            pass

    def remove(self, url: str) -> bool:
        """Removes an object, whatever its generation; False if there was none, or a try before has removed it."""

        def ask() -> None:
            with self.request("DELETE", self.object_url(url), url, "deleted"):
                pass

        try:
            self.patiently(ask, url)
        except FileNotFoundError:
            return False
        return True

    def copy(self, url: str, target: str) -> None:
        """Copies an object inside the service, in as many requests as it wants."""
        bucket, name = (urllib.parse.quote(part, safe="") for part in split(target))
        token: str | None = ""

        def ask() -> str | None:
            where = self.object_url(url).rstrip("?") + f"/rewriteTo/b/{bucket}/o/{name}"
            where += f"?rewriteToken={urllib.parse.quote(token)}" if token else ""
            with self.request("POST", where, target, "written", {"Content-Type": "application/json"}, b"{}") as answer:
                return json.load(answer).get("rewriteToken")

        while token is not None:
            token = self.patiently(ask, url)

    def pieces(
        self, url: str, start: int, size: int, *, stop: int | None = None, generation: str | None = None
    ) -> Iterator[bytes]:
        """Yields the bytes [start, stop) of an object of this size, and goes on where a connection broke.

        Args: stop: its end, unless given. generation: which must still be there.
        Raises: Unreachable after too many failures in a row, FileNotFoundError, BadInput if the object has another
        size or may not be read.
        """
        stop, failures = size if stop is None else stop, 0
        where = self.object_url(url, alt="media", **({} if generation is None else {"generation": generation}))
        while start < stop:
            last = str(stop - 1) if stop < size else ""
            headers = {"Range": f"bytes={start}-{last}"} if start or last else {}
            try:
                with self.request("GET", where, url, "read", headers) as response:
                    check_size(response.headers, url, size)
                    skipped = start if response.status == 200 else 0  # a server that knows no ranges sends everything
                    while start < stop:
                        piece = response.read1(PIECE)
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
        """Copies what a local file holds now to an object, which appears whole. Raises as Upload does."""
        md5, left = hashlib.md5(usedforsecurity=False), path.stat().st_size
        with open(path, "rb") as file:
            upload = Upload(self, url, left)
            while piece := file.read(min(PIECE, left)):
                md5.update(piece)
                left -= len(piece)
                upload.write(piece)
        upload.finish(md5.digest(), f"what {path} does")

    def start_upload(self, url: str, size: int) -> str:
        """The address to which the chunks go."""
        bucket, name = split(url)
        query = urllib.parse.urlencode({"uploadType": "resumable", "name": name})
        where = f"{self.endpoint}/upload/storage/v1/b/{urllib.parse.quote(bucket)}/o?{query}"
        headers = {"Content-Type": "application/json", "X-Upload-Content-Length": str(size)}
        with self.request("POST", where, url, "written", headers, b"{}") as response:
            return response.headers["Location"]

    def ask_upload(
        self, session: str, url: str, headers: dict[str, str], content: bytes
    ) -> tuple[int, dict[str, Any] | None]:
        """(bytes that the service has, or what it says of the object once that is whole)."""
        headers = {**headers, "Content-Type": "application/octet-stream"}
        with self.request("PUT", session, url, "written", headers, content) as response:
            if response.status == 308:
                stored = response.headers.get("Range", "")  # bytes=0-LAST, or absent
                return int(stored.rpartition("-")[2]) + 1 if stored else 0, None
            return 0, json.load(response)

    def object_url(self, url: str, **query: str) -> str:
        """The address of an object in the API."""
        bucket, name = (urllib.parse.quote(part, safe="") for part in split(url))
        return f"{self.endpoint}/storage/v1/b/{bucket}/o/{name}?{urllib.parse.urlencode(query)}".rstrip("?")

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
        """The open answer to one request, to be read in the `with` block.

        Raises: Transient, also if the connection breaks in the block; FileNotFoundError; BadInput for what no second
        try would change.
        """
        headers = {"Accept-Encoding": "identity", **(headers or {})}
        try:
            self.authorise(headers)
            request = urllib.request.Request(where, body, headers, method=method)
            with OPENER.open(request, timeout=self.silence) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                wait = self.told_wait(error.headers.get("Retry-After", ""))
                raise refusal(error, url, what, wait) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise BadInput(f"{url}: the server's certificate is not good: {error.reason}") from None
            raise Transient(str(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise Transient(str(error) or type(error).__name__) from None
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise Transient("the answer is no JSON: is a proxy between?") from None

    def told_wait(self, retry_after: str) -> float:
        """Seconds that a Retry-After header asks for: a number, or a date (RFC 9110, section 10.2.3)."""
        if retry_after.isdigit():
            return min(float(retry_after), LONGEST_TOLD)
        try:
            date = email.utils.parsedate_to_datetime(retry_after).timestamp()
        except ValueError:
            return 0.0
        return min(max(date - self.clock.now(), 0.0), LONGEST_TOLD)

    def patiently(self, ask: Callable[[], T], url: str) -> T:
        """What `ask` gives, asked again after faults that pass."""
        failures = 0
        while True:
            try:
                return ask()
            except Transient as fault:
                failures += 1
                self.wait(fault, failures, url)

    def wait(self, fault: Transient, failures: int, url: str) -> None:
        """Sleeps before the next try; Unreachable if there were too many. failures: in a row, without any progress."""
        if failures >= self.attempts:
            tries = f"{failures} tries in a row failed, the last" if failures > 1 else "the try failed"
            raise Unreachable(f"{url}: {tries} with: {fault}; try again later")
        longest = min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT)
        self.clock.sleep(max(fault.wait, longest * (0.5 + 0.5 * self.clock.chance())))


class Upload:
    """An object that comes in chunks of 32 MiB, each of which is kept until the service has it.

    After a fault it goes on where the service stopped. Raises BadInput if the object may not be written, or the
    service has another content at the end.
    """

    def __init__(self, bucket: Bucket, url: str, num_bytes: int):
        self.bucket, self.url, self.total = bucket, url, num_bytes
        self.session = ""
        self.buffer, self.sent = bytearray(), 0  # what the service may not have, and where it begins
        self.answer: dict[str, Any] | None = None

    def write(self, content: Any) -> None:
        """Takes the next bytes, a buffer."""
        view = memoryview(content)
        if self.sent + len(self.buffer) + len(view) > self.total:
            raise RuntimeError(f"{self.url}: more than {self.total} bytes came")
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
            start = lambda: self.bucket.start_upload(self.url, self.total)
            self.session = self.session or self.bucket.patiently(start, self.url)
        except FileNotFoundError as error:
            raise BadInput(f"{str(error).partition(';')[0]}; does the bucket exist?") from None
        while self.answer is None and (self.sent < end or not self.total):
            part, content = f"{self.sent}-{end - 1}", bytes(self.buffer)
            if failures or not content:  # how much has arrived?
                part, content = "*", b""
            try:
                headers = {"Content-Range": f"bytes {part}/{self.total}"}
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

    def finish(self, md5: bytes, wanted: str = "what was sent") -> None:
        """Returns when the object is there. Raises BadInput if it is not what was wanted, whose md5 this is."""
        self.flush()
        if (self.answer or {}).get("md5Hash") != base64.b64encode(md5).decode():
            raise BadInput(f"{self.url} does not hold {wanted}: it was damaged on its way; run it again")


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """308 is how the service says that it wants more of an upload, and nothing else of the API redirects."""

    def http_error_308(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        """The answer as it is."""
        return fp


OPENER = urllib.request.build_opener(NoRedirects)


def check_size(headers: Any, url: str, size: int) -> None:
    """Raises BadInput if an answer says that the object has another size, or does not say which."""
    total = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "")
    if not total.isdecimal():
        raise BadInput(
            f"{url}: the answer does not say how many bytes it has; read it without the proxy that may be between, and "
            "store it without Content-Encoding"
        )
    if int(total) != size:
        raise BadInput(f"{url} has {total} bytes where {size} are expected: it was replaced since")


def split(url: str) -> tuple[str, str]:
    """(bucket, object's name). Raises BadInput for what is no gs:// address of an object."""
    bucket, _, name = url.removeprefix("gs://").partition("/")
    if not url.startswith("gs://") or not bucket or not name:
        raise BadInput(f"{url} is no gs://BUCKET/NAME")
    return bucket, name


def age(updated: str, now: str) -> float:
    """Seconds from an RFC 3339 time to that of an HTTP Date header, which has whole seconds; 0 where either is odd."""
    try:
        then = datetime.datetime.fromisoformat(updated)
        return max(0.0, (email.utils.parsedate_to_datetime(now) - then).total_seconds())
    except (TypeError, ValueError):
        return 0.0
