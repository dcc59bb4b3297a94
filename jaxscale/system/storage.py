"""Access to gs:// through the JSON API in bucket.py: paths, objects and credentials.

All access of this package to buckets uses this file, with the same retries, errors and credentials, except for
checkpoints: Orbax writes arrays through TensorStore's client, which transfers gigabytes in parallel from C++, and small
files through epath and gcsfs. Both read the environment, which `check_environment` checks before they are imported.
"""

import concurrent.futures
import datetime
import fnmatch
import functools
import io
import ipaddress
import logging
import os
import pathlib
import types
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from jaxscale.system import packages
from jaxscale.system.bucket import ATTEMPTS, GOOGLE, SILENCE, SYSTEM_CLOCK, Bucket, Clock
from jaxscale.system.bucket_errors import Forbidden, Transient
from jaxscale.system.exits import BadInput

ENDPOINT = "STORAGE_EMULATOR_HOST"  # read by gcsfs and Google's clients
# TensorStore, gcsfs and Google's client send this machine's credentials to the URLs in these variables.
OVERRIDES = ("TENSORSTORE_GCS_HTTP_URL", ENDPOINT)
# With TensorFlow installed, epath would take 6 s to import TensorFlow and use its client. gcsfs would query the kind of
# bucket from a second service over gRPC, which requires additional permissions.
CLIENT_VARIABLES = {"EPATH_USE_TF": "false", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
PATH_ATTEMPTS = 7  # attempts per request for a path: about 25 s, since a step or the user may wait for it
READ_BYTES = 4 << 20  # bytes per read
MAX_CONCURRENT = 16  # concurrent requests when many objects are deleted


class ObjectPath(pathlib.PurePosixPath):
    """Path under gs://, with the methods of pathlib.Path that this package uses.

    A folder exists if it contains an object. Methods that access the service raise FileNotFoundError, Forbidden or
    Unreachable, which are OSErrors. The inherited methods relative_to, joinpath, match and parents do not support
    buckets; use `/`, `parent` and `glob`.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"gs://{'/'.join(self.parts[1:])}"  # the first part is "gs:"

    __fspath__ = __str__
    url = property(__str__)

    def __truediv__(self, name: Any) -> "ObjectPath":
        return ObjectPath(f"{self.url}/{os.fspath(name)}")  # also appends a name that begins with "/"

    @property
    def key(self) -> str:
        """Name of the object in its bucket, or '' for a bucket."""
        return "/".join(self.parts[2:])

    @property
    def parent(self) -> "ObjectPath":
        """Parent path. A bucket is its own parent."""
        return super().parent if self.key else self

    def absolute(self) -> "ObjectPath":
        """Returns itself, since buckets have no relative paths or links."""
        return self

    resolve = expanduser = absolute

    # Existence and metadata.

    def exists(self) -> bool:
        """Returns True for an object or a folder."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Returns True for an object."""
        return bool(self.key) and path_bucket().metadata(self.url) is not None

    def is_dir(self) -> bool:
        """Returns True if there is an object below the path."""
        return any(True for _ in list_objects(path_bucket(), self.url, maxResults="1"))

    def stat(self) -> types.SimpleNamespace:
        """Returns the fields of os.stat_result that an object has."""
        about = self.metadata()
        return types.SimpleNamespace(st_size=int(about["size"]), st_mtime=about["updated"])

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata of an object, with `updated` in Unix seconds."""
        about = path_bucket().metadata(self.url) if self.key else None
        if about is None:
            raise FileNotFoundError(2, "no such object", self.url)
        return about | {"updated": datetime.datetime.fromisoformat(about["updated"]).timestamp()}

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Yields the direct children, sorted."""
        found = sorted(
            {name.partition("/")[0] for name, _ in list_objects(path_bucket(), self.url, delimiter="/") if name}
        )
        if not found and not self.is_dir():
            raise FileNotFoundError(2, "no such folder", self.url)
        yield from (self / name for name in found)

    def glob(self, pattern: str) -> Iterator["ObjectPath"]:
        """Yields paths that match the pattern, level by level."""
        first, _, deeper = pattern.partition("/")
        try:
            found = [child for child in self.iterdir() if fnmatch.fnmatchcase(child.name, first)]
        except FileNotFoundError:
            return
        for child in found:
            yield from child.glob(deeper) if deeper else (child,)

    # Contents.

    def read_bytes(self) -> bytes:
        """Returns the content of an object."""
        return path_bucket().content(self.url)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Returns the content as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: Any) -> int:
        """Replaces the object."""
        bucket = path_bucket()
        bucket.patiently(lambda: bucket.put(self.url, bytes(content)), self.url)
        return len(content)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        """Replaces the object."""
        return self.write_bytes(text.encode(encoding))

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Opens the current generation of the object for reading."""
        assert mode == "rb", f"an object can only be opened for reading, not with mode {mode!r}"
        about = self.metadata()
        return io.BufferedReader(Reader(self.url, int(about["size"]), str(about["generation"])), READ_BYTES)

    # Changes.

    def mkdir(self, mode: int = 0, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing, since buckets have no folders."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes an object."""
        if not path_bucket().remove(self.url) and not missing_ok:
            raise FileNotFoundError(2, "no such object", self.url)

    def rmtree(self) -> None:
        """Deletes all objects below the path. Objects that are created during the call may remain."""
        bucket = path_bucket()
        names = [f"{self.url}/{name}" for name, _ in list_objects(bucket, self.url)]
        with concurrent.futures.ThreadPoolExecutor(MAX_CONCURRENT) as pool:
            list(pool.map(bucket.remove, names))  # raises the first error
        bucket.remove(self.url)

    def copy(self, target: "ObjectPath") -> None:
        """Copies the object within the service, replacing the target."""
        path_bucket().copy(self.url, target.url)


class Reader(io.RawIOBase):
    """Seekable reader of one generation of an object."""

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

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self.position + len(view), self.size)
        begun = self.position
        for piece in path_bucket().pieces(self.url, begun, self.size, stop=stop, generation=self.generation):
            view[self.position - begun : self.position - begun + len(piece)] = piece
            self.position += len(piece)
        return self.position - begun


def list_objects(bucket: Bucket, url: str, **query: str) -> Iterator[tuple[str, int]]:
    """Yields (name, bytes) of the objects in a folder. With delimiter='/', yields (name, 0) for its subfolders."""
    name, _, prefix = url.removeprefix("gs://").rstrip("/").partition("/")
    prefix = f"{prefix}/" if prefix else ""
    query = {"prefix": prefix, "fields": "items(name,size),prefixes,nextPageToken"} | query

    where = f"{bucket.endpoint}/storage/v1/b/{urllib.parse.quote(name)}/o?"
    while True:
        page = bucket.patiently(lambda: bucket.ask("GET", where + urllib.parse.urlencode(query), url, "listed"), url)
        for item in page.get("items", ()):
            if not item["name"].endswith("/") or "maxResults" in query:  # some tools create objects for folders
                yield item["name"][len(prefix) :], int(item["size"])
        yield from ((folder[len(prefix) :], 0) for folder in page.get("prefixes", ()))
        if "nextPageToken" not in page:
            return
        query["pageToken"] = page["nextPageToken"]


def objects_under(url: str) -> Iterator[tuple[str, int]]:
    """Yields (name relative to `url`, bytes) of the objects below `url`. Raises BadInput if no such bucket exists."""
    try:
        yield from list_objects(open_bucket(), url)
    except FileNotFoundError as error:
        raise BadInput(f"{str(error).partition(';')[0]}; check that the bucket exists") from None


def path_bucket() -> Bucket:
    """Returns the client that paths use."""
    return open_bucket(writing=True, attempts=PATH_ATTEMPTS)


def open_bucket(
    *, writing: bool = False, clock: Clock = SYSTEM_CLOCK, silence: float = SILENCE, attempts: int = ATTEMPTS
) -> Bucket:
    """Returns a client of Google Cloud Storage with this machine's credentials, or of the emulator in the environment.

    Raises BadInput if gcsfs is not installed, or if environment variables select a service on a different machine.
    """
    check_environment()
    if endpoint := os.environ.get(ENDPOINT, ""):
        endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
        return Bucket(endpoint, lambda headers: None, clock, silence, attempts)
    require_gcsfs("gs://")
    return Bucket(GOOGLE, authorisation("read_write" if writing else "read_only"), clock, silence, attempts)


@functools.lru_cache(maxsize=2)  # finding credentials can take seconds; tokens are valid for an hour and renewed
def authorisation(access: str) -> Callable[[dict[str, str]], None]:
    """Returns a function that adds the authorization header. `access` is read_only or read_write."""
    import gcsfs.credentials
    import google.auth.exceptions

    credentials = gcsfs.credentials.GoogleCredentials(project=None, access=access, token=None)

    def authorise(headers: dict[str, str]) -> None:
        try:
            credentials.apply(headers)
        except google.auth.exceptions.TransportError as error:
            raise Transient(f"cannot get an access token: {error}") from None
        except (gcsfs.credentials.HttpError, google.auth.exceptions.GoogleAuthError) as error:
            raise Forbidden(f"this machine's credentials for gs:// are not valid: {error}") from None

    return authorise


def require_gcsfs(name: str) -> None:
    """Raises BadInput if gcsfs, which finds credentials and reads buckets for Orbax, is not installed."""
    if not packages.is_installed("gcsfs"):
        raise BadInput(f"{name} needs gcsfs: pip install 'jaxscale[gcs]'")


def check_environment() -> None:
    """Sets environment variables of packages that access object stores. Call it before they are imported.

    Raises BadInput if environment variables would send requests with Google credentials to a different machine.
    """
    for name, value in CLIENT_VARIABLES.items():
        os.environ.setdefault(name, value)
    for name in ("gcsfs", "google.auth._default"):  # they log a traceback for errors that are reported in one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for variable in OVERRIDES:
        value = os.environ.get(variable, "")
        if not value or value.rstrip("/") == GOOGLE:
            continue
        host = urllib.parse.urlsplit(value if "://" in value else f"http://{value}").hostname or ""
        if not is_loopback(host):
            raise BadInput(
                f"{variable}={value} would send this machine's credentials for Google Cloud to {host or 'nowhere'}; "
                f"only an emulator on this machine (http://127.0.0.1:PORT) is allowed; unset {variable}"
            )


def is_loopback(host: str) -> bool:
    """Returns True for a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
