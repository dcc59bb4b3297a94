"""JSON lines of a file that another process appends to, or writes anew: what is new since the last look."""

from typing import Any

from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json

FIRST_BYTES = 32 << 20  # of a local file at the first look: some 50,000 records, and a run may have written gigabytes


class Following:
    """A file of JSON objects, one a line, local or in a bucket. Never writes, and holds no file open between looks."""

    def __init__(self, path: Any):
        self.path, self.remote = paths.as_path(path), paths.is_remote(path)
        self.key: Any = None  # of the file that was read: another one takes its place when a run goes back
        self.offset = 0  # bytes that were read, whole lines
        self.grown_at: float | None = None  # seconds since 1970
        self.damaged = 0

    def look(self) -> tuple[list[dict[str, Any]], bool]:
        """(new records, whether they replace all earlier ones). Raises OSError where the file cannot be read."""
        try:
            return self.look_into_bucket() if self.remote else self.look_at_disk()
        except FileNotFoundError:
            gone, self.key, self.offset = self.key is not None, None, 0
            return [], gone

    def look_at_disk(self) -> tuple[list[dict[str, Any]], bool]:
        """Reads from where the last look ended."""
        stat = self.path.stat()
        again = stat.st_ino != self.key or stat.st_size < self.offset
        if again:
            self.key, self.offset, self.damaged = stat.st_ino, 0, 0
        self.grown_at = stat.st_mtime
        if stat.st_size == self.offset:
            return [], again
        with paths.open_binary(self.path) as file:
            torn = self.offset == 0 and stat.st_size > FIRST_BYTES
            file.seek(stat.st_size - FIRST_BYTES if torn else self.offset)
            begun = file.tell()
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self.offset = begun + len(whole)
        return self.records(whole.split(b"\n", 1)[-1] if torn else whole), again

    def look_into_bucket(self) -> tuple[list[dict[str, Any]], bool]:
        """Reads the object whole where it has changed: nothing can be read from its middle on."""
        stat = self.path.stat()
        key = (getattr(stat, "mtime", None), getattr(stat, "length", None))
        if key == self.key and None not in key:
            return [], False
        self.key, self.damaged, self.grown_at = key, 0, float(key[0]) if key[0] else None
        content = self.path.read_bytes()
        return self.records(content[: content.rfind(b"\n") + 1]), True

    def records(self, content: bytes) -> list[dict[str, Any]]:
        """The objects in whole lines; those that are damaged are counted."""
        found = []
        for line in filter(None, content.decode("utf-8", "replace").split("\n")):
            try:
                record = parse_json(line)
            except BadInput:
                record = None
            if isinstance(record, dict):
                found.append(record)
            else:
                self.damaged += 1
        return found
