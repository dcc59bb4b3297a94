"""The index of a checkpoint's arrays (TensorStore's OCDBT, a B-tree with checksums): which bytes lie in which file."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorstore

from jaxscale.checkpoint.cause import is_trouble, short_cause
from jaxscale.checkpoint.files import files_under
from jaxscale.checkpoint.stored import STATE, kvstore, stored_name

MANIFEST = "manifest.ocdbt"
DATA_FILE = re.compile(r"(?:ocdbt\.process_\d+/)?(?:d/[0-9a-f]{16,}|manifest\.ocdbt)")
DESCRIPTIONS = (".zarray", "zarr.json")  # of an array; what else lies below it are its pieces


class Locations:
    """In which files the bytes of a leaf lie, looked up when the first one is asked for."""

    def __init__(self, folder: Any):
        self.folder, self.found = folder, None

    def files(self, leaf: str) -> tuple[str, ...]:
        """The files, below the step's folder; none where the index itself cannot be read."""
        if self.found is None:
            self.found = {}
            with contextlib.suppress(Exception):  # the index may be what is damaged
                base = open_base(self.folder / STATE)
                newest = tensorstore.ocdbt.dump(base).result()["versions"][-1]
                for key, location in entries(base, newest["root"].get("location")):
                    name, _, piece = key.decode().rpartition("/")
                    if piece not in DESCRIPTIONS:
                        self.found.setdefault(name, set()).add(location_file(location))
        return tuple(sorted(self.found.get(stored_name(leaf), ())))


def index_damages(folder: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields (file, cause, files it names) of each index below a step's folder of which any version cannot be read.

    A process keeps an index of its own, and every version of it as it grew. A restore uses the last version of the
    common one; but a disk that lost a bit of the others may lose more.
    """
    for name in files_under(folder / STATE):
        if name.rpartition("/")[2] == MANIFEST:
            inner = name.removesuffix(MANIFEST).rstrip("/")
            try:
                base = open_base(folder / STATE / inner if inner else folder / STATE)
                manifest = tensorstore.ocdbt.dump(base).result()
                seen: set[str] = set()
                for root in roots(base, manifest):
                    for _ in entries(base, root, seen=seen):
                        pass
            except Exception as error:  # whatever TensorStore makes of spoilt bytes
                if is_trouble(error):
                    raise
                yield f"{STATE}/{name}", short_cause(error), named_files(str(error))


def open_base(folder: Any) -> tensorstore.KvStore:
    """The folder that an index lies in."""
    return tensorstore.KvStore.open(kvstore(folder)).result()


def roots(base: Any, node: dict[str, Any]) -> Iterator[str | None]:
    """Yields the location of the tree of every version that a manifest, or a node of its own tree, tells of."""
    for version in node["versions"] if "versions" in node else node["entries"]:
        if "root" in version:
            yield version["root"].get("location")
        else:
            yield from roots(base, tensorstore.ocdbt.dump(base, version["location"]).result())
    for older in node.get("version_tree_nodes", ()):
        yield from roots(base, tensorstore.ocdbt.dump(base, older["location"]).result())


def entries(
    base: Any, location: str | None, prefix: bytes = b"", seen: set[str] | None = None
) -> Iterator[tuple[bytes, str]]:
    """Yields (key, where its bytes lie) below a node, whose keys all begin with `prefix`. Each node has a checksum.

    Args: seen: nodes that are left out, to which those that are visited are added.
    """
    if location is None or seen is not None and location in seen:
        return
    if seen is not None:
        seen.add(location)
    for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
        if "location" in entry:
            yield from entries(base, entry["location"], prefix + entry["subtree_common_prefix"], seen)
        else:
            yield prefix + entry["key"], entry.get("indirect_value", location)


def location_file(location: str) -> str:
    """'value:ocdbt.process_0/:d/12ab:0:64' -> 'state/ocdbt.process_0/d/12ab'."""
    _, *file, _, _ = location.split(":")
    return f"{STATE}/{''.join(file)}"


def named_files(text: str) -> tuple[str, ...]:
    """The data files that an error of TensorStore names."""
    return tuple(sorted({f"{STATE}/{name}" for name in DATA_FILE.findall(text)}))
