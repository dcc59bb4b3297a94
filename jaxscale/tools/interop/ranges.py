"""Byte ranges of a file, on disk or in a bucket, read into a given buffer."""

import concurrent.futures
import dataclasses
import os
from typing import Any

from jaxscale.system import foreign, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.storage import objects_under, open_bucket

PART_BYTES = 16 << 20  # of one request to a bucket
REQUESTS = 8  # concurrent: one connection to a bucket brings at most about 100 MB/s


@dataclasses.dataclass(frozen=True)
class File:
    """Path, size and version of a file. version: changes when the file is replaced."""

    path: Any
    size: int
    version: str

    @property
    def name(self) -> str:
        """The file name."""
        return self.path.name

    def read_into(self, start: int, out: Any) -> None:
        """Fills `out`, a writable buffer, with bytes from offset `start`.

        Raises: BadInput if the file is shorter or was replaced, OSError if it cannot be read.
        """
        view = memoryview(out).cast("B")
        if start + len(view) > self.size:
            raise BadInput(f"{self.path} ends at byte {self.size}, before byte {start + len(view)} that is wanted")
        if not paths.is_remote(self.path):
            return self.read_disk(start, view)
        parts = [(begin, view[begin : begin + PART_BYTES]) for begin in range(0, len(view), PART_BYTES)]
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            for _ in pool.map(lambda part: self.read_object(start + part[0], part[1]), parts):
                pass

    def read(self, start: int, stop: int) -> bytearray:
        """Returns bytes [start, stop). Raises as read_into does."""
        content = bytearray(stop - start)
        self.read_into(start, content)
        return content

    def read_disk(self, start: int, view: memoryview) -> None:
        """read_into for a local file."""
        with foreign.open_file(self.path) as file:
            file.seek(start)
            done = 0
            while done < len(view):
                count = os.readv(file.fileno(), [view[done:]])
                if not count:
                    raise BadInput(f"{self.path} became shorter while it was read; is something still writing it?")
                done += count

    def read_object(self, start: int, view: memoryview) -> None:
        """read_into for an object; resumes after a broken connection."""
        url, bucket = os.fspath(self.path), open_bucket()
        done = 0
        try:
            for piece in bucket.pieces(url, start, self.size, stop=start + len(view), generation=self.version):
                view[done : done + len(piece)] = piece
                done += len(piece)
        except FileNotFoundError:
            raise BadInput(f"{url} was replaced or removed while it was read; run it again") from None


def stat_file(path: Any) -> File:
    """Returns the file's current state. Raises FileNotFoundError, and BadInput where access is refused."""
    if paths.is_remote(path):
        metadata = open_bucket().metadata(os.fspath(path))
        if metadata is None:
            raise FileNotFoundError(2, "no such object", os.fspath(path))
        return File(path, int(metadata["size"]), str(metadata["generation"]))
    stat = foreign.resolve_file(path).stat()
    return File(path, stat.st_size, str(stat.st_mtime_ns))


def list_files(folder: Any) -> dict[str, int]:
    """Returns {name: bytes} of the files directly in a folder, sorted; empty if it does not exist."""
    if paths.is_remote(folder):
        found = {name: size for name, size in objects_under(os.fspath(folder)) if "/" not in name}
    elif folder.is_dir():
        found = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    else:
        found = {}
    return dict(sorted(found.items()))
