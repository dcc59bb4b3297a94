"""The files that globs match, under names that stay the same when a corpus moves."""

import collections
import contextlib
import glob
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from jaxscale.text.config import Globs
from jaxscale.units import plural

STREAMS = ("hf://", "seqio://")  # names of data sets that are no files of ours
PACKED = (".gz", ".zst")
NOT_TEXT = (".bin", ".npy", ".npz", ".zip", ".tar", ".tgz", ".xz", ".bz2", ".pdf", ".model", ".idx")
TABLES = (".csv", ".tsv")
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
Identity: TypeAlias = tuple[int, int] | str  # device and inode, or a path


def ignored(line: str) -> None:
    """Says nothing."""


class SourceFile(NamedTuple):
    """A file of a corpus. `name` does not change when the corpus moves: it is relative to where its glob begins."""

    path: str
    name: str
    source: str


def list_files(
    globs: Globs,
    setting: str,
    default_source: str,
    same: Callable[[str], str] = str,
    say: Callable[[str], None] = ignored,
) -> tuple[list[SourceFile], list[str]]:
    """Returns the files that the globs match, sorted within each source, and one line for each unusable glob.

    A file of a source is there once, whatever the number of globs that match it and of links to it and its folders.

    Args: setting: the name for the messages, such as data.files. same: the path of the file that stands for a file.
    say: gets one line about the links that were left out.
    """
    sources = globs if isinstance(globs, dict) else {default_source: globs}
    files: dict[tuple[str, Identity], SourceFile] = {}
    problems: list[str] = []
    links: dict[str, str] = {}  # left out -> the name under which it is read
    for source, patterns in sources.items():
        if not patterns:
            problems.append(f"{setting}.{source} is empty; name its files, or take the source out")
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            if pattern.startswith(STREAMS) or is_remote_manifest(pattern):
                files.setdefault((source, pattern), SourceFile(pattern, pattern, source))
                continue
            found, problem = match(pattern, f"{setting}.{source}" if isinstance(globs, dict) else setting, links)
            problems += [problem] if problem else []
            base = fixed_folder(pattern)
            for path in found:
                file, key = SourceFile(path, os.path.relpath(path, base), source), (source, identity(same(path)))
                first = files.setdefault(key, file)
                if same(first.path) != same(path):
                    files[key], link = (first, file) if rank(first.path) < rank(path) else (file, first)
                    links[link.path] = files[key].path
    if links:
        link, path = next(iter(links.items()))
        say(f"{setting}: left out {plural(len(links), 'link')} to what is read already, such as {link}, that is {path}")
    order = {source: i for i, source in enumerate(sources)}
    return sorted(files.values(), key=lambda file: (order[file.source], file.name, file.path)), problems


def identity(path: str) -> Identity:
    """Returns the same for all names of one file or folder; the path of what is neither."""
    if is_stream(path):
        return path
    try:
        status = os.stat(path)
    except OSError:
        return path
    return (status.st_dev, status.st_ino) if status.st_ino else path


def rank(path: str) -> tuple[bool, int, str]:
    """Sorts the names of one file: no link first, then the shortest, then by the alphabet."""
    return os.path.realpath(path) != path, path.count(os.sep), path


def find(pattern: str, links: dict[str, str]) -> set[str]:
    """Returns what a glob matches, as glob.glob does, but enters each folder once: links may lead to one above.

    links: gets {link to a folder: the folder}, for those that are not entered.
    """
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return set(glob.glob(pattern))
    place = parts.index("**")
    rest = parts[place + 1 :] or ["*"]
    roots = sorted(glob.glob(os.sep.join(parts[:place]) or os.sep))
    found = (find(os.path.join(glob.escape(folder), *rest), links) for folder in folders_below(roots, links))
    return set().union(*found)


def folders_below(roots: Sequence[str], links: dict[str, str]) -> Iterator[str]:
    """Yields the roots and the folders below them, each once, links last; hidden ones are no part of '**'."""
    seen: dict[Identity, str] = {}
    folders, linked = collections.deque(roots), collections.deque[str]()
    while folders or linked:
        folder = (folders or linked).popleft()
        first = seen.setdefault(identity(folder), folder)
        if first != folder:
            links[folder] = first
            continue
        yield folder
        with contextlib.suppress(OSError), os.scandir(folder) as entries:  # glob.glob, too, passes by what is closed
            for entry in sorted(entries, key=lambda entry: entry.name):
                if not entry.name.startswith(".") and os.path.isdir(entry.path):
                    (linked if entry.is_symlink() else folders).append(entry.path)


def match(pattern: str, setting: str, links: dict[str, str]) -> tuple[list[str], str | None]:
    """(absolute paths, None), or ([], the reason and the way out). links: as of find."""
    if "://" in pattern:
        return [], (
            f"{setting}={pattern}: of a bucket, only the manifest.json of a prepared set can be read; copy or mount "
            "other files on this machine"
        )
    full = os.path.abspath(os.path.expanduser(pattern))
    if is_saved_dataset(full):
        return [full], None
    if os.path.isdir(full):
        return [], f"{setting}={pattern} is a folder; name its files, such as {os.path.join(pattern, '**', '*.txt')}"
    if os.path.isfile(full):
        return [full], None  # before globbing: a name may hold brackets
    matched = sorted(find(full, links))
    found = [path for path in matched if os.path.isfile(path)]
    if odd := [path for path in matched if not os.path.isfile(path) and not os.path.isdir(path)]:
        what = "a link that leads nowhere" if os.path.islink(odd[0]) else "a pipe or a device, and no file"
        return [], f"{setting}={pattern}: {odd[0]} is {what}; take it away, or bring its file back"
    if not found:
        wild = glob.has_magic(pattern)
        return [], f"{setting}={pattern} {'matches no file' if wild else 'does not exist'}; seen from {os.getcwd()}"
    return found, None


def is_remote_manifest(pattern: str) -> bool:
    """True for the address of a prepared set's manifest in a bucket."""
    return pattern.startswith("gs://") and pattern.endswith(".json") and not glob.has_magic(pattern)


def fixed_folder(pattern: str) -> str:
    """The folder before the first wildcard."""
    parts = Path(os.path.abspath(os.path.expanduser(pattern))).parts[:-1]
    wild = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return str(Path(*parts[:wild]))


def is_saved_dataset(path: str) -> bool:
    """True for a folder that Hugging Face `datasets` has saved (save_to_disk)."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def is_stream(path: str) -> bool:
    """True for the name of a data set that another library reads."""
    return path.startswith(STREAMS)


def unpacked_name(path: str) -> str:
    """The path in small letters, without what says how it is packed."""
    name = path.lower()
    for ending in PACKED:
        name = name.removesuffix(ending)
    return name


def text_problem(file: SourceFile) -> str | None:
    """One line if the file's extension says that it is not text, else None."""
    if file.path.lower().endswith(".json"):
        return f"{file.path} may be one JSON value or many; name it .jsonl if each line is one, or .txt if it is text"
    return no_text_problem(file)


def no_text_problem(file: SourceFile) -> str | None:
    """One line if the file's extension is of something else than documents, else None."""
    if not is_stream(file.path) and unpacked_name(file.path).endswith(TABLES):
        return (
            f"{file.path} is a table by its name, and would be read as prose; write its column of text as .jsonl or "
            ".parquet, or name it .txt if it is prose"
        )
    if not is_stream(file.path) and unpacked_name(file.path).endswith(NOT_TEXT):
        return (
            f"{file.path} is not text by its name; data.files reads .jsonl, .parquet, .arrow, .array_record, .warc, "
            ".html and text, plain or .gz or .zst (for ids in a .bin set data.name='tokens')"
        )
    return None


def size_of(path: str) -> int | None:
    """Bytes of a file, or of all files of a saved data set; None for a stream, which does not tell."""
    if is_stream(path):
        return None
    if os.path.isdir(path):
        return sum(os.path.getsize(inner) for inner in folder_files(path))
    return os.path.getsize(path)


def file_stamp(path: str) -> tuple[int, int]:
    """(bytes, nanoseconds of the last change): a file with another stamp is read again. (0, 0) for a stream."""
    if is_stream(path):
        return 0, 0
    if is_saved_dataset(path):
        stats = [os.stat(inner) for inner in folder_files(path)]
        return sum(status.st_size for status in stats), max(status.st_mtime_ns for status in stats)
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def folder_files(path: str) -> list[str]:
    """Every file below a folder, sorted."""
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)


def stdlib_files() -> list[SourceFile]:
    """The source files of this interpreter's standard library without its tests, about 800 files and 12 MB.

    Two sources: 'modules' at the top and 'packages' in folders.
    """
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                source = "modules" if folder == root else "packages"
                files.append(SourceFile(path, os.path.relpath(path, root), source))
    return sorted(files, key=lambda file: (file.source, file.name))
