"""A small server that speaks as much of the Google Cloud Storage JSON API as gcsfs, TensorStore and jaxscale need.

    with Emulator() as gcs:
        gcs.put("bucket", "name", b"content")
        gcs.faults.append(Fault("status", path="name", status=503, times=2))
        ...  # in an environment with gcs.environment()

Objects: metadata, media with ranges, upload (simple, multipart, resumable), list, delete, rewrite, copy,
move, compose, patch; reads, uploads and deletes with ifGenerationMatch, reads with ifGenerationNotMatch.
`faults` meet single requests, `weather` meets all of them.
What a request does is taken from cloud.google.com/storage/docs/json_api. It keeps everything in memory and checks no
credentials: tests against it prove the protocol, not Google's service.
"""

import base64
import dataclasses
import datetime
import hashlib
import json
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gcs_weather import Fault, Weather

from jaxscale.system.storage import check_environment

check_environment()  # before gcsfs is imported
CHUNK = 256 * 1024  # a resumable upload comes in multiples of it
BIG = random.Random(0).randbytes(300_000)  # an object of more than one piece
PIECE = 16 * 1024  # of a body that is sent slowly or cut


@dataclasses.dataclass
class Stored:
    """An object."""

    content: bytes
    metadata: dict
    generation: int
    updated: float = 0.0


class Emulator:
    """A server on a free port of this machine, while the `with` block runs. Any thread may look into it."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self.objects: dict[tuple[str, str], Stored] = {}
        self.faults: list[Fault] = []
        self.weather, self.clock = Weather(), clock
        self.log: list[tuple[str, str, str]] = []  # (method, object's name, "list PREFIX" or path, Range header)
        self.sent = 0  # bytes of media
        self.lock = threading.RLock()
        self.uploads: dict[str, dict] = {}
        self.generation = 1
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"gcs": self}))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self) -> dict[str, str]:
        """What leads a process of ours here, and no further: nobody needs any of it for a real bucket."""
        endpoints = {name: self.endpoint for name in ("TENSORSTORE_GCS_HTTP_URL", "STORAGE_EMULATOR_HOST")}
        return endpoints | {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "fake", "NO_GCE_CHECK": "true"}

    def __enter__(self) -> "Emulator":
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, bucket: str, name: str, content: bytes, metadata: dict | None = None) -> Stored:
        """Stores an object."""
        with self.lock:
            self.generation += 1
            made = Stored(bytes(content), dict(metadata or {}), self.generation, self.clock())
            stored = self.objects[bucket, name] = made
            return stored

    def get(self, bucket: str, name: str) -> bytes:
        """The content of an object."""
        return self.objects[bucket, name].content

    def names(self, bucket: str) -> list[str]:
        """Names of all objects in a bucket, sorted."""
        with self.lock:
            return sorted(name for where, name in self.objects if where == bucket)

    def requests(self, name: str, method: str = "GET") -> list[str]:
        """The Range header of each request so far for the content of this object."""
        return [ranged for verb, path, ranged in self.log if verb == method and path == f"media {name}"]

    def take_fault(self, method: str, path: str, media: bool) -> Fault | None:
        """The first fault that fits the request, used up by one."""
        with self.lock:
            for fault in self.faults:
                fits = fault.times > 0 and fault.method == method and fault.path in path
                if fits and fault.media in (None, media):
                    fault.times -= 1
                    return fault
        return None


class Door(Emulator):
    """Another address of an emulator, with a log, faults and weather of its own: what comes in here is told apart."""

    def __init__(self, home: Emulator):
        super().__init__(home.clock)
        self.objects, self.uploads, self.lock, self.put = home.objects, home.uploads, home.lock, home.put


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    gcs: Emulator
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or header and body wait for each other, 40 ms a request
    timeout = 20
    is_lost = False  # the answer to this request

    def log_message(self, *_) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The Date header, by the emulator's clock."""
        return super().date_time_string(self.gcs.clock() if timestamp is None else timestamp)

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            pass  # the client was killed, which is what some tests do

    def do_GET(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def do_PUT(self) -> None:
        self.answer("PUT")

    def do_PATCH(self) -> None:
        self.answer("PATCH")

    def do_DELETE(self) -> None:
        self.answer("DELETE")

    def answer(self, method: str) -> None:
        """Reads the request whole, lets a fault have it, and routes it."""
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        bad = self.gcs.weather.fault(self.path)
        if bad and bad.kind == "refuse":
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
            return self.cut()
        body = self.read_body()
        path = re.sub(r"^/(download|upload|resumable)?/?storage/v1", "", url.path)
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/")]
        media = method == "GET" and self.query.get("alt") == "media"
        name = parts[3] if len(parts) > 3 else url.path
        if method == "GET" and len(parts) == 3:
            name = f"list {self.query.get('prefix', '')}"
        elif method == "POST" and url.path.startswith("/upload/"):  # named in the address, or first in the body
            name = self.query.get("name") or re.search(rb'"name":\s*"([^"]+)"', body)[1].decode()
        with self.gcs.lock:
            self.gcs.log.append((method, f"media {name}" if media else name, self.headers.get("Range", "")))
            exists = len(parts) > 2 and (parts[1], self.query.get("name", name)) in self.gcs.objects
        weather = self.gcs.weather
        time.sleep(weather.latency)
        if met := weather.answer(method, parts, f"{url.path} {self.query.get('name', name)}", exists):
            if not met[0]:
                return self.cut()
            return self.send(met[0], {"error": {"code": met[0], "message": met[1]}})
        fault = bad or self.gcs.take_fault(method, urllib.parse.unquote(self.path), media)
        if fault and fault.kind == "status":
            headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
            return self.send(fault.status, {"error": {"code": fault.status, "message": "as told"}}, headers)
        if fault and fault.kind == "hang":
            time.sleep(fault.seconds)
        if fault and (fault.kind == "hang" or fault.kind == "reset" and not media):
            return self.cut()
        self.is_lost = bool(fault and fault.kind == "lost")
        if fault and fault.kind == "flip" and not media and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if url.path.startswith("/upload/"):
            return self.upload(method, parts, body)
        if parts[0] != "b":
            return self.missing(url.path)
        if len(parts) == 1:
            names = sorted({bucket for bucket, _ in self.gcs.objects})
            return self.send(200, {"kind": "storage#buckets", "items": [{"name": name} for name in names]})
        if len(parts) == 2:
            return self.send(200, {"kind": "storage#bucket", "name": parts[1], "location": "HERE"})
        if len(parts) == 3:
            return self.list_objects(parts[1])
        return self.on_object(method, parts, body, media, fault)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def on_object(self, method: str, parts: list[str], body: bytes, media: bool, fault: Fault | None) -> None:
        """Metadata, content, delete, patch, compose, copyTo, rewriteTo and moveTo of one object."""
        bucket, name, verb = parts[1], parts[3], parts[4] if len(parts) > 4 else ""
        with self.gcs.lock:
            stored = self.gcs.objects.get((bucket, name))
            if verb == "compose":
                pieces = [self.gcs.objects.get((bucket, part["name"])) for part in json.loads(body)["sourceObjects"]]
                if None in pieces:
                    return self.missing(name)
                made = self.gcs.put(bucket, name, b"".join(piece.content for piece in pieces))
                return self.send(200, resource(bucket, name, made))
            if stored is None or self.query.get("generation", str(stored.generation)) != str(stored.generation):
                return self.missing(f"{bucket}/{name}")
            if self.unwanted(stored):
                return None
            if verb in ("copyTo", "rewriteTo"):
                made = self.gcs.put(parts[6], parts[8], stored.content, stored.metadata)
                there = resource(parts[6], parts[8], made)
                size = str(len(stored.content))
                done = {"done": True, "totalBytesRewritten": size, "objectSize": size, "resource": there}
                return self.send(200, done if verb == "rewriteTo" else there)
            if verb == "moveTo":
                made = self.gcs.put(bucket, parts[6], stored.content, stored.metadata)
                del self.gcs.objects[bucket, name]
                return self.send(200, resource(bucket, parts[6], made))
            if verb:
                return self.missing(f"the verb {verb}")
            if method == "DELETE":
                del self.gcs.objects[bucket, name]
                return self.send(204, None)
            if method == "PATCH":
                stored.metadata |= json.loads(body)
            if not media:
                return self.send(200, resource(bucket, name, stored))
        return self.send_media(stored, fault)

    def unwanted(self, stored: Stored | None) -> bool:
        """True if the request has asked for another generation, and has been told so."""
        generation = str(stored.generation) if stored else "0"
        if self.query.get("ifGenerationMatch", generation) != generation:
            self.send(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        elif self.query.get("ifGenerationNotMatch") == generation:
            self.send(304, None)
        else:
            return False
        return True

    def send_media(self, stored: Stored, fault: Fault | None) -> None:
        """The content or the range that is asked for, and what a fault makes of it."""
        content, status, headers = stored.content, 200, {"ETag": str(stored.generation)}
        total, ranged = len(content), self.headers.get("Range")
        if ranged and not (fault and fault.kind == "ignore_range"):
            first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", ranged).groups()
            start = int(first) if first else max(0, total - int(last))
            stop = min(total, int(last) + 1) if first and last else total
            if start >= total:
                return self.send(416, {"error": {"code": 416}}, {"Content-Range": f"bytes */{total}"})
            content, status = content[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
        digest = base64.b64encode(hashlib.md5(stored.content).digest()).decode()
        headers |= {"x-goog-hash": f"md5={digest}", "x-goog-generation": str(stored.generation)}
        if self.is_lost:
            return self.cut()
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault and fault.kind == "flip":
            changed = bytearray(content)
            changed[min(fault.after, len(changed) - 1)] ^= 1
            content = bytes(changed)
        if fault and fault.kind == "reset":
            self.write(content[: fault.after])
            return self.cut()
        if fault and fault.kind == "slow":
            for start in range(0, len(content), PIECE):
                time.sleep(fault.seconds)
                self.write(content[start : start + PIECE])
            return None
        return self.write(content)

    def write(self, content: bytes) -> None:
        self.wfile.write(content)
        self.wfile.flush()
        with self.gcs.lock:
            self.gcs.sent += len(content)

    def cut(self) -> None:
        """Ends the connection in the middle."""
        self.close_connection = True
        self.connection.shutdown(2)

    def upload(self, method: str, parts: list[str], body: bytes) -> None:
        """Simple, multipart and resumable uploads."""
        if session := self.query.get("upload_id"):
            return self.resume(session, body)
        bucket, kind = parts[1], self.query.get("uploadType")
        metadata, content = {}, body
        if kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"]).group(1).encode()
            _, first, second = body.split(b"--" + boundary)[:3]
            metadata = json.loads(after_headers(first))
            content = after_headers(second).removesuffix(b"\n").removesuffix(b"\r")
        if kind == "resumable" and body:
            metadata = json.loads(body)
        name = metadata.pop("name", None) or self.query["name"]
        with self.gcs.lock:
            if self.unwanted(self.gcs.objects.get((bucket, name))):
                return None
            if kind != "resumable":
                return self.send(200, resource(bucket, name, self.gcs.put(bucket, name, content, metadata)))
            session = f"s{len(self.gcs.uploads)}"
            self.gcs.uploads[session] = {"bucket": bucket, "name": name, "metadata": metadata, "got": bytearray()}
        query = urllib.parse.urlencode({"uploadType": "resumable", "upload_id": session, "name": name})
        where = f"{self.gcs.endpoint}/upload/storage/v1/b/{urllib.parse.quote(bucket)}/o?{query}"
        return self.send(200, None, {"Location": where})

    def resume(self, session: str, body: bytes) -> None:
        """A chunk of a resumable upload, or the question how much of it is there."""
        with self.gcs.lock:
            upload = self.gcs.uploads.get(session)
            if upload is None:
                return self.missing("the upload")
            got = upload["got"]
            told = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers.get("Content-Range", ""))
            total = None if not told else None if told.group(3) == "*" else int(told.group(3))
            if told and told.group(1):
                start = int(told.group(1))
                if start > len(got):
                    return self.send(400, {"error": {"code": 400, "message": "a gap in the upload"}})
                if total != start + len(body) and len(body) % CHUNK:
                    return self.send(400, {"error": {"code": 400, "message": "not a multiple of 256 KiB"}})
                got[start:] = body
            elif not told:  # all in one request
                got[:], total = body, len(body)
            if total is None or len(got) < total:
                headers = {"Range": f"bytes=0-{len(got) - 1}"} if got else {}
                return self.send(308, None, headers)
            made = self.gcs.put(upload["bucket"], upload["name"], got, upload["metadata"])
            return self.send(200, resource(upload["bucket"], upload["name"], made))

    def list_objects(self, bucket: str) -> None:
        """A page of names under a prefix, folded at a delimiter."""
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        items, prefixes = [], []
        for name in self.gcs.names(bucket):
            before_start = name < self.query.get("startOffset", "")
            after_end = "endOffset" in self.query and name >= self.query["endOffset"]
            if not name.startswith(prefix) or before_start or after_end:
                continue
            folded, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if found and f"{prefix}{folded}{delimiter}" not in prefixes:
                prefixes.append(f"{prefix}{folded}{delimiter}")
            elif not found:
                items.append(resource(bucket, name, self.gcs.objects[bucket, name]))
        first, most = int(self.query.get("pageToken", 0)), int(self.query.get("maxResults", 1000))
        answer = {"kind": "storage#objects", "prefixes": prefixes if not first else []}
        answer["items"] = items[first : first + most]
        if first + most < len(items):
            answer["nextPageToken"] = str(first + most)
        return self.send(200, answer)

    def missing(self, what: str) -> None:
        self.send(404, {"error": {"code": 404, "message": f"{what} is not there"}})

    def send(self, status: int, value: dict | None, headers: dict | None = None) -> None:
        """An answer in JSON, or none."""
        if self.is_lost:
            return self.cut()
        content = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def after_headers(part: bytes) -> bytes:
    """The body of one part of a multipart request."""
    return re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1]


def resource(bucket: str, name: str, stored: Stored) -> dict:
    """What the API says of an object."""
    now = datetime.datetime.fromtimestamp(stored.updated, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    digest = base64.b64encode(hashlib.md5(stored.content).digest()).decode()
    return {
        "kind": "storage#object", "id": f"{bucket}/{name}/{stored.generation}", "name": name, "bucket": bucket,
        "size": str(len(stored.content)), "md5Hash": digest, "generation": str(stored.generation),
        "metageneration": "1", "timeCreated": now, "updated": now, "storageClass": "STANDARD",
        "contentType": "application/octet-stream", **stored.metadata,
    }  # fmt: skip
