"""The files that globs match, under names that stay the same when a corpus moves."""

import glob
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxscale.text.config import Globs

STREAMS = ("hf://", "seqio://")  # names of data sets that are no files of ours
PACKED = (".gz", ".zst")
NOT_TEXT = (".bin", ".npy", ".npz", ".zip", ".tar", ".tgz", ".xz", ".bz2", ".pdf", ".model", ".idx")
TABLES = (".csv", ".tsv")
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class SourceFile(NamedTuple):
    """A file of a corpus. `name` does not change when the corpus moves: it is relative to where its glob begins."""

    path: str
    name: str
    source: str


def list_files(
    globs: Globs, setting: str, default_source: str, same: Callable[[str], str] = str
) -> tuple[list[SourceFile], list[str]]:
    """The files that the globs match, sorted within each source, and one line for each glob that cannot be used.

    A file that two globs of one source match is there once. setting: the name for the messages, such as data.files.
    same: equal for files that are one, of which the first is there.
    """
    sources = globs if isinstance(globs, dict) else {default_source: globs}
    files: dict[tuple[str, str], SourceFile] = {}
    problems = []
    for source, patterns in sources.items():
        if not patterns:
            problems.append(f"{setting}.{source} is empty; name its files, or take the source out")
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            if pattern.startswith(STREAMS) or is_remote_manifest(pattern):
                files.setdefault((source, pattern), SourceFile(pattern, pattern, source))
                continue
            found, problem = match(pattern, f"{setting}.{source}" if isinstance(globs, dict) else setting)
            problems += [problem] if problem else []
            base = fixed_folder(pattern)
            for path in found:
                files.setdefault((source, same(path)), SourceFile(path, os.path.relpath(path, base), source))
    order = {source: i for i, source in enumerate(sources)}
    return sorted(files.values(), key=lambda file: (order[file.source], file.name, file.path)), problems


def match(pattern: str, setting: str) -> tuple[list[str], str | None]:
    """(absolute paths, None), or ([], the reason and the way out)."""
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
    matched = sorted(glob.glob(full, recursive=True))
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
