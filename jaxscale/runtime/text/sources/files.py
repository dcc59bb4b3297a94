"""Lists the files that match globs, with names that do not change if a corpus is moved."""

import collections
import contextlib
import glob
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from jaxscale.runtime.text.config import Globs
from jaxscale.units import plural

STREAMS = ("hf://", "seqio://")  # schemes of datasets that other libraries read
PACKED = (".gz", ".zst")
NOT_TEXT = (".bin", ".npy", ".npz", ".zip", ".tar", ".tgz", ".xz", ".bz2", ".pdf", ".model", ".idx")
TABLES = (".csv", ".tsv")
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
Identity: TypeAlias = tuple[int, int] | str  # device and inode, or a path


def ignore_line(line: str) -> None:
    """Ignores a log line."""


class SourceFile(NamedTuple):
    """A file of a corpus. `name` is relative to the fixed part of the glob, so that the corpus can be moved."""

    path: str
    name: str
    source: str


def list_files(
    globs: Globs,
    setting: str,
    default_source: str,
    same: Callable[[str], str] = str,
    say: Callable[[str], None] = ignore_line,
) -> tuple[list[SourceFile], list[str]]:
    """Returns (matching files, sorted within each source; one message per unusable glob).

    Lists a file once per source, even if several globs or links match it. setting: name of the setting, for messages.
    same: maps a path to a path that identifies the file, such as the .bin of a shard. say: receives a log line about
    skipped links.
    """
    sources = globs if isinstance(globs, dict) else {default_source: globs}
    files: dict[tuple[str, Identity], SourceFile] = {}
    problems: list[str] = []
    links: dict[str, str] = {}  # skipped link -> path that is read
    for source, patterns in sources.items():
        if not patterns:
            problems.append(f"{setting}.{source} is empty; set its files, or remove the source")
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            is_remote_set = pattern.startswith("gs://") and pattern.endswith(".json") and not glob.has_magic(pattern)
            if pattern.startswith(STREAMS) or is_remote_set:
                files.setdefault((source, pattern), SourceFile(pattern, pattern, source))
                continue
            found, problem = match(pattern, f"{setting}.{source}" if isinstance(globs, dict) else setting, links)
            problems += [problem] if problem else []
            base = fixed_folder(pattern)
            for path in found:
                file, key = SourceFile(path, os.path.relpath(path, base), source), (source, file_identity(same(path)))
                first = files.setdefault(key, file)
                if same(first.path) != same(path):
                    files[key], link = (first, file) if link_rank(first.path) < link_rank(path) else (file, first)
                    links[link.path] = files[key].path
    if links:
        link, path = next(iter(links.items()))
        say(
            f"{setting}: skipped {plural(len(links), 'link')} to files that are already included, such as {link} -> "
            f"{path}"
        )
    order = {source: i for i, source in enumerate(sources)}
    return sorted(files.values(), key=lambda file: (order[file.source], file.name, file.path)), problems


def file_identity(path: str) -> Identity:
    """Returns (device, inode) of a file or folder, which is the same for all its links; for other names, the name."""
    if path.startswith(STREAMS):
        return path
    try:
        status = os.stat(path)
    except OSError:
        return path
    return (status.st_dev, status.st_ino) if status.st_ino else path


def link_rank(path: str) -> tuple[bool, int, str]:
    """Returns a sort key for paths of one file: paths that are not links first, then by depth, then by name."""
    return os.path.realpath(path) != path, path.count(os.sep), path


def glob_unique(pattern: str, links: dict[str, str]) -> set[str]:
    """Returns the matching paths. Visits each folder once, because links may form cycles. links: gets skipped links."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return set(glob.glob(pattern))
    place = parts.index("**")
    tail = parts[place + 1 :] or ["*"]
    roots = sorted(glob.glob(os.sep.join(parts[:place]) or os.sep))
    found = (glob_unique(os.path.join(glob.escape(folder), *tail), links) for folder in folders_below(roots, links))
    return set().union(*found)


def folders_below(roots: Sequence[str], links: dict[str, str]) -> Iterator[str]:
    """Yields the roots and all folders below them, except hidden ones. Yields each once, and links last."""
    visited: dict[Identity, str] = {}
    folders, linked = collections.deque(roots), collections.deque[str]()
    while folders or linked:
        folder = (folders or linked).popleft()
        first = visited.setdefault(file_identity(folder), folder)
        if first != folder:
            links[folder] = first
            continue
        yield folder
        with contextlib.suppress(OSError), os.scandir(folder) as entries:  # skips unreadable folders, as glob does
            for entry in sorted(entries, key=lambda entry: entry.name):
                if not entry.name.startswith(".") and os.path.isdir(entry.path):
                    (linked if entry.is_symlink() else folders).append(entry.path)


def match(pattern: str, setting: str, links: dict[str, str]) -> tuple[list[str], str | None]:
    """Returns (absolute paths, None), or ([], message with the fix). links: see glob_unique."""
    if "://" in pattern:
        return [], (
            f"{setting}={pattern}: in a bucket, only the manifest.json of a prepared set can be read; copy or mount "
            "other files on this machine"
        )
    full = os.path.abspath(os.path.expanduser(pattern))
    if is_saved_dataset(full):
        return [full], None
    if os.path.isdir(full):
        return (
            [],
            f"{setting}={pattern} is a folder; use a glob of its files, such as {os.path.join(pattern, '**', '*.txt')}",
        )
    if os.path.isfile(full):
        return [full], None  # before globbing, because file names may contain brackets
    matched = sorted(glob_unique(full, links))
    found = [path for path in matched if os.path.isfile(path)]
    if unreadable := [path for path in matched if not os.path.isfile(path) and not os.path.isdir(path)]:
        what = "a broken link" if os.path.islink(unreadable[0]) else "a pipe or device, not a file"
        return [], f"{setting}={pattern}: {unreadable[0]} is {what}; remove it, or restore its file"
    if not found:
        what = "matches no file" if glob.has_magic(pattern) else "does not exist"
        return [], f"{setting}={pattern} {what} (working directory: {os.getcwd()})"
    return found, None


def fixed_folder(pattern: str) -> str:
    """Returns the folder before the first wildcard of a pattern."""
    parts = Path(os.path.abspath(os.path.expanduser(pattern))).parts[:-1]
    has_wildcard = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return str(Path(*parts[:has_wildcard]))


def is_saved_dataset(path: str) -> bool:
    """Returns True for a folder written by save_to_disk of Hugging Face datasets."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def unpacked_name(path: str) -> str:
    """Returns the path in lower case without .gz or .zst."""
    name = path.lower()
    for ending in PACKED:
        name = name.removesuffix(ending)
    return name


def text_problem(file: SourceFile) -> str | None:
    """Returns a message if the file's suffix is not the suffix of a text format, else None."""
    if file.path.lower().endswith(".json"):
        return (
            f"{file.path} may be one JSON value or several; rename it to .jsonl if each line is a JSON value, or to "
            ".txt if the file is text"
        )
    return not_documents_problem(file)


def not_documents_problem(file: SourceFile) -> str | None:
    """Returns a message if the file's suffix is not the suffix of a supported format, else None."""
    name = "" if file.path.startswith(STREAMS) else unpacked_name(file.path)
    if name.endswith(TABLES):
        return (
            f"{file.path} is a table by its suffix; convert the text column to .jsonl or .parquet, or rename the file "
            "to .txt if it is plain text"
        )
    if name.endswith(NOT_TEXT):
        return (
            f"{file.path} is not text by its suffix; data.files reads .jsonl, .parquet, .arrow, .array_record, .warc, "
            ".html and text, also as .gz or .zst (for ids in a .bin set data.name='tokens')"
        )
    return None


def size_of(path: str) -> int | None:
    """Returns the size in bytes of a file or saved dataset, or None for a stream, whose size is unknown."""
    return None if path.startswith(STREAMS) else file_stamp(path)[0]


def file_stamp(path: str) -> tuple[int, int]:
    """Returns (bytes, mtime in nanoseconds) of a file or saved dataset, for cache keys; (0, 0) for a stream."""
    if path.startswith(STREAMS):
        return 0, 0
    stats = [os.stat(inner) for inner in (folder_files(path) if os.path.isdir(path) else [path])]
    return sum(status.st_size for status in stats), max((status.st_mtime_ns for status in stats), default=0)


def folder_files(path: str) -> list[str]:
    """Returns all files below a folder, sorted."""
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)


def stdlib_files() -> list[SourceFile]:
    """Returns the standard library's source files (12 MB), with the sources 'modules' (top level) and 'packages'."""
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                source = "modules" if folder == root else "packages"
                files.append(SourceFile(path, os.path.relpath(path, root), source))
    return sorted(files, key=lambda file: (file.source, file.name))
