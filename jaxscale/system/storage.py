"""The one way to gs://: paths under it, whole objects, and the credentials, by the JSON API of bucket.py.

Everything that this package reads or writes in a bucket comes through here, with the same conditions, retries, errors
and credentials, but for the arrays of a checkpoint: Orbax writes them through TensorStore's own client, which moves
gigabytes in parallel from C++, and the few small files beside them through epath and gcsfs. Both follow the
environment, which `check_environment` looks through before either is imported.
"""

import concurrent.futures
import datetime
import fnmatch
import functools
import io
import ipaddress
import json
import logging
import os
import pathlib
import posixpath
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxscale.system import packages
from jaxscale.system.bucket import GOOGLE, REAL, SILENCE, Bucket, Clock
from jaxscale.system.bucket_errors import Forbidden, Transient
from jaxscale.system.exits import BadInput

ENDPOINT = "STORAGE_EMULATOR_HOST"  # the name that gcsfs and Google's own clients read
# TensorStore, gcsfs and Google's own client send this machine's credentials to the address that these hold.
OVERRIDES = ("TENSORSTORE_GCS_HTTP_URL", ENDPOINT)
# Where TensorFlow is installed, epath would take 6 s to import it and go to the bucket its way; and gcsfs would ask a
# second service, over gRPC, what kind of bucket it is, with rights that a run does not need otherwise.
OWN_CLIENT = {"EPATH_USE_TF": "false", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
PATH_ATTEMPTS = 7  # of a request for a path: about 25 s of waiting, as a step or a person may be waiting for it
READ_BYTES = 4 << 20  # that a file asks for at once
AT_ONCE = 16  # requests, where many objects are removed


class Stat(NamedTuple):
    """Of os.stat_result, what a bucket knows."""

    st_size: int
    st_mtime: float


class ObjectPath:
    """A path under gs://, with those methods of pathlib.Path that this package uses.

    A folder is there as long as an object lies below it. Raises, in all methods that ask the service:
    FileNotFoundError; Forbidden and Unreachable, which are OSErrors too.
    """

    __slots__ = ("url",)

    def __init__(self, url: Any):
        bucket, _, name = os.fspath(url).removeprefix("gs://").partition("/")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        self.url = "/".join([f"gs://{bucket}", *parts])

    def __str__(self) -> str:
        return self.url

    __fspath__ = __str__

    def __repr__(self) -> str:
        return f"ObjectPath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __lt__(self, other: "ObjectPath") -> bool:
        return self.url < other.url

    def __truediv__(self, name: Any) -> "ObjectPath":
        return ObjectPath(f"{self.url}/{os.fspath(name)}")

    @property
    def key(self) -> str:
        """The object's name in its bucket; '' for the bucket itself."""
        return self.url.removeprefix("gs://").partition("/")[2]

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self.key)

    @property
    def suffix(self) -> str:
        """'.json' of 'a.json'."""
        return pathlib.PurePosixPath(self.key).suffix

    @property
    def parent(self) -> "ObjectPath":
        """The path above; of a bucket, itself."""
        return ObjectPath(self.url.rpartition("/")[0]) if self.key else self

    def with_name(self, name: str) -> "ObjectPath":
        """The path beside it with another last part."""
        return self.parent / name

    def absolute(self) -> "ObjectPath":
        """Itself; it has no links either."""
        return self

    resolve = expanduser = absolute

    # What is there.

    def exists(self) -> bool:
        """True for an object, and for what has one below it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """True for an object."""
        return bool(self.key) and door().metadata(self.url) is not None

    def is_dir(self) -> bool:
        """True for what has an object below it."""
        return any(True for _ in list_objects(door(), self.url, maxResults="1"))

    def is_symlink(self) -> bool:
        """False: a bucket has no links."""
        return False

    def stat(self) -> Stat:
        """Size, and Unix time of the last write, of an object."""
        about = self.metadata()
        return Stat(int(about["size"]), about["updated"])

    def metadata(self) -> dict[str, Any]:
        """What the service says of an object, `updated` in Unix seconds."""
        about = door().metadata(self.url) if self.key else None
        if about is None:
            raise FileNotFoundError(2, "no such object", self.url)
        return about | {"updated": unix_time(about["updated"])}

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Yields what lies directly below, in order."""
        found = sorted({name.partition("/")[0] for name, _ in list_objects(door(), self.url, delimiter="/") if name})
        if not found and not self.is_dir():
            raise FileNotFoundError(2, "no such folder", self.url)
        yield from (self / name for name in found)

    def glob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Yields what matches the pattern, a part of it for each level."""
        first, _, rest = pattern.partition("/")
        try:
            found = [child for child in self.iterdir() if fnmatch.fnmatchcase(child.name, first)]
        except FileNotFoundError:
            return
        for child in found:
            yield from child.glob(rest) if rest else (child,)

    # What it holds.

    def read_bytes(self) -> bytes:
        """The content of an object."""
        return door().content(self.url)

    def read_text(self, encoding: str = "utf-8") -> str:
        """The content as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: Any) -> int:
        """Replaces the object whole."""
        bucket = door()
        bucket.patiently(lambda: bucket.put(self.url, bytes(content)), self.url)
        return len(content)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        """Replaces the object whole."""
        return self.write_bytes(text.encode(encoding))

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """The object as a file to read from, as it is now."""
        assert mode == "rb", f"an object is opened to be read, not as {mode!r}"
        about = self.metadata()
        return io.BufferedReader(Reader(self.url, int(about["size"]), str(about["generation"])), READ_BYTES)

    # What changes it.

    def mkdir(self, mode: int = 0, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a bucket has no folders."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes an object."""
        if not door().remove(self.url) and not missing_ok:
            raise FileNotFoundError(2, "no such object", self.url)

    def rmtree(self) -> None:
        """Removes all objects below, and what else lies there by the time they are gone is somebody else's."""
        bucket = door()
        names = [f"{self.url}/{name}" for name, _ in list_objects(bucket, self.url)]
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(bucket.remove, names))  # raises what the first of them raised that failed
        bucket.remove(self.url)

    def copy(self, target: "ObjectPath", overwrite: bool = False) -> "ObjectPath":
        """Copies the object inside the service; it is replaced where one is there."""
        door().copy(self.url, target.url)
        return target


class Reader(io.RawIOBase):
    """The bytes of one generation of an object, from wherever they are asked for."""

    def __init__(self, url: str, size: int, generation: str):
        super().__init__()
        self.url, self.size, self.generation, self.position = url, size, generation, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self.position + len(view), self.size)
        begun = self.position
        for piece in door().pieces(self.url, begun, self.size, stop=stop, generation=self.generation):
            view[self.position - begun : self.position - begun + len(piece)] = piece
            self.position += len(piece)
        return self.position - begun


def list_objects(bucket: Bucket, url: str, **query: str) -> Iterator[tuple[str, int]]:
    """Yields (name below a folder, bytes) of its objects, a thousand for each request; of prefixes too, with size 0.

    query: more of what the API takes: delimiter='/' for one level alone, maxResults of a page.
    """
    name, _, prefix = url.removeprefix("gs://").rstrip("/").partition("/")
    prefix = f"{prefix}/" if prefix else ""
    query = {"prefix": prefix, "fields": "items(name,size),prefixes,nextPageToken"} | query

    def ask() -> dict[str, Any]:
        where = f"{bucket.endpoint}/storage/v1/b/{urllib.parse.quote(name)}/o?{urllib.parse.urlencode(query)}"
        with bucket.request("GET", where, url, "listed") as response:
            return json.load(response)

    while True:
        page = bucket.patiently(ask, url)
        for item in page.get("items", ()):
            if not item["name"].endswith("/") or "maxResults" in query:  # a folder, as some tools write it
                yield item["name"][len(prefix) :], int(item["size"])
        yield from ((folder[len(prefix) :], 0) for folder in page.get("prefixes", ()))
        if "nextPageToken" not in page:
            return
        query["pageToken"] = page["nextPageToken"]


def objects_under(url: str) -> Iterator[tuple[str, int]]:
    """Yields (name below `url`, bytes) of the objects of a bucket. Raises BadInput for a bucket that is not there."""
    try:
        yield from list_objects(open_bucket(), url)
    except FileNotFoundError as error:
        raise BadInput(f"{str(error).partition(';')[0]}; does the bucket exist?") from None


def unix_time(text: str) -> float:
    """Seconds since 1970 of a time as the service writes it."""
    return datetime.datetime.fromisoformat(text).timestamp()


def door() -> Bucket:
    """The bucket as paths use it."""
    return open_bucket(writing=True, attempts=PATH_ATTEMPTS)


def open_bucket(
    *, writing: bool = False, clock: Clock = REAL, silence: float = SILENCE, attempts: int | None = None
) -> Bucket:
    """Google's service with this machine's credentials, or the emulator that the environment names.

    Raises: BadInput if the package that finds credentials is not installed, or the environment names another machine.
    """
    check_environment()
    more = {} if attempts is None else {"attempts": attempts}
    if endpoint := os.environ.get(ENDPOINT, ""):
        endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
        return Bucket(endpoint, lambda headers: None, clock, silence, **more)
    require_gcsfs("gs://")
    return Bucket(GOOGLE, authorisation("read_write" if writing else "read_only"), clock, silence, **more)


@functools.lru_cache(maxsize=2)  # to look for credentials can take seconds; a token is good for an hour and renewed
def authorisation(access: str) -> Callable[[dict[str, str]], None]:
    """What adds the header that says who asks. access: read_only or read_write."""
    import gcsfs.credentials
    import google.auth.exceptions

    credentials = gcsfs.credentials.GoogleCredentials(project=None, access=access, token=None)

    def authorise(headers: dict[str, str]) -> None:
        try:
            credentials.apply(headers)
        except google.auth.exceptions.TransportError as error:
            raise Transient(f"no new access token: {error}") from None
        except (gcsfs.credentials.HttpError, google.auth.exceptions.GoogleAuthError) as error:
            raise Forbidden(f"this machine's credentials for gs:// are of no use: {error}") from None

    return authorise


def require_gcsfs(name: str) -> None:
    """Raises BadInput where the package is not installed that finds credentials, and that Orbax reads buckets by."""
    if not packages.is_installed("gcsfs"):
        raise BadInput(f"{name} needs gcsfs: pip install 'jaxscale[gcs]'")


def check_environment() -> None:
    """Sets what packages that read object stores take from the environment; to be called before they are imported.

    Raises BadInput if the environment would send what is meant for Google, credentials included, to another machine.
    """
    for name, value in OWN_CLIENT.items():
        os.environ.setdefault(name, value)
    for name in ("gcsfs", "google.auth._default"):  # a traceback for each refusal, which the caller puts into one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for variable in OVERRIDES:
        value = os.environ.get(variable, "")
        if not value or value.rstrip("/") == GOOGLE:
            continue
        host = urllib.parse.urlsplit(value if "://" in value else f"http://{value}").hostname or ""
        if not is_loopback(host):
            raise BadInput(
                f"{variable}={value} would send this machine's credentials for Google Cloud to {host or 'nowhere'}; "
                "only an emulator on this machine (http://127.0.0.1:PORT) may be named: unset it"
            )


def is_loopback(host: str) -> bool:
    """True for an address that no packet leaves this machine for."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
