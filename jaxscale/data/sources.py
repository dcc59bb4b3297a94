"""Raw documents out of text, JSON lines and Parquet files, one at a time, in an order that never changes."""

import glob
import gzip
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxscale.data.config import Globs

# A longer text file is cut into documents of this size, each at a line end, so that memory stays bounded and a single
# file can be divided into training and validation. The model sees an end of document there, once in a million bytes.
DOCUMENT_BYTES = 1 << 20
NOT_TEXT = (".bin", ".npy", ".npz", ".zip", ".tar", ".tgz", ".zst", ".xz", ".bz2", ".arrow", ".pdf", ".model", ".idx")
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class SourceFile(NamedTuple):
    """A file of a corpus. `name` does not change when the corpus moves: it is relative to where its glob begins."""

    path: str
    name: str
    source: str


def list_files(globs: Globs, setting: str, default_source: str) -> tuple[list[SourceFile], list[str]]:
    """The files that the globs match, sorted within each source, and one line for each glob that cannot be used.

    A file that two globs of one source match is there once. setting: the name for the messages, such as data.files.
    """
    sources = globs if isinstance(globs, dict) else {default_source: globs}
    files: dict[tuple[str, str], SourceFile] = {}
    problems = []
    for source, patterns in sources.items():
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            found, problem = match(pattern, f"{setting}.{source}" if isinstance(globs, dict) else setting)
            problems += [problem] if problem else []
            base = fixed_folder(pattern)
            for path in found:
                files.setdefault((source, path), SourceFile(path, os.path.relpath(path, base), source))
    order = {source: i for i, source in enumerate(sources)}
    return sorted(files.values(), key=lambda file: (order[file.source], file.name, file.path)), problems


def match(pattern: str, setting: str) -> tuple[list[str], str | None]:
    """(absolute paths, None), or ([], the reason and the way out)."""
    if "://" in pattern:
        return [], f"{setting}={pattern}: only local files can be read so far; copy or mount them on this machine"
    full = os.path.abspath(os.path.expanduser(pattern))
    if os.path.isdir(full):
        return [], f"{setting}={pattern} is a folder; name its files, such as {os.path.join(pattern, '**', '*.txt')}"
    if os.path.isfile(full):
        return [full], None  # before globbing: a name may hold brackets
    found = sorted(path for path in glob.glob(full, recursive=True) if os.path.isfile(path))
    if not found:
        wild = glob.has_magic(pattern)
        return [], f"{setting}={pattern} {'matches no file' if wild else 'does not exist'}; seen from {os.getcwd()}"
    return found, None


def fixed_folder(pattern: str) -> str:
    """The folder before the first wildcard."""
    parts = Path(os.path.abspath(os.path.expanduser(pattern))).parts[:-1]
    wild = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return str(Path(*parts[:wild]))


def text_problem(file: SourceFile) -> str | None:
    """One line if the file's ending says that it is no text, else None."""
    if file.path.removesuffix(".gz").endswith(".json"):
        return f"{file.path} may be one JSON value or many; name it .jsonl if each line is one, or .txt if it is text"
    if file.path.endswith(NOT_TEXT):
        return (
            f"{file.path} is not text by its name; data.files reads .jsonl, .parquet and text, plain or .gz "
            "(for ids in a .bin set data.name='tokens')"
        )
    return None


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


def read_documents(
    file: SourceFile, *, text_field: str, invalid_utf8: str, skipped: Counter
) -> Iterator[tuple[str, int]]:
    """Yields (text, bytes of it in UTF-8) for each document; empty and unreadable ones are counted in `skipped`.

    Raises: ValueError naming file and place, for JSON or a column that is not as told, and for text that is not UTF-8
    where invalid_utf8 is 'stop'.
    """
    name = file.path.removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        raw = read_json_lines(file.path, text_field)
    elif name.endswith(".parquet"):
        raw = read_parquet(file.path, text_field)
    else:
        raw = read_text(file.path)
    for place, content in raw:
        try:
            text = content if isinstance(content, str) else content.decode("utf-8")
            size = len(content.encode()) if isinstance(content, str) else len(content)
        except UnicodeError as error:  # UnicodeEncodeError: half a surrogate pair, which JSON can spell
            if invalid_utf8 == "stop":
                raise ValueError(
                    f"{file.path} is not UTF-8 at {place + error.start if isinstance(place, int) else place} "
                    f"({error.reason}); repair it, or set data.invalid_utf8='skip'"
                ) from None
            skipped["invalid UTF-8"] += 1
            skipped["bytes in it"] += len(content)
            continue
        if not text:
            skipped["empty"] += 1
            continue
        yield text, size


def open_file(path: str) -> BinaryIO:
    """The file's bytes, unpacked if it ends in .gz."""
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def read_text(path: str) -> Iterator[tuple[int, bytes]]:
    """(byte offset, document) for each part of a text file; see DOCUMENT_BYTES."""
    offset = 0
    with open_file(path) as stream:
        while (part := stream.read(DOCUMENT_BYTES)) or offset == 0:
            if len(part) == DOCUMENT_BYTES:
                part += stream.readline(DOCUMENT_BYTES)  # to the end of the line, within reason
                while not part.endswith(b"\n") and (more := stream.peek(1)[:1]) and more[0] & 0xC0 == 0x80:
                    part += stream.read(1)  # a line without end: at least not inside a character
            yield offset, part
            offset += len(part)
            if not part:
                return  # an empty file is one empty document, to be counted


def read_json_lines(path: str, field: str) -> Iterator[tuple[str, bytes | str]]:
    """(line, text) for each line that is not blank. A line that is not UTF-8 comes as bytes."""
    with open_file(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                yield f"line {number}", line
                continue
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {number} is not JSON: {error.msg} at column {error.colno}") from None
            text = record.get(field) if isinstance(record, dict) else None
            if text is None and not (isinstance(record, dict) and field in record):
                has = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
                raise ValueError(f"{path} line {number} has no field {field!r} but {has}; set data.text_field")
            if not isinstance(text, str | None):
                raise ValueError(f"{path} line {number}: field {field!r} is {type(text).__name__}, not text")
            yield f"line {number}", text or ""


def read_parquet(path: str, field: str) -> Iterator[tuple[str, bytes]]:
    """(row, text as bytes) for each row, a batch of rows in memory at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None
    with table:
        if field not in table.schema_arrow.names:
            has = ", ".join(table.schema_arrow.names)
            raise ValueError(f"{path} has no column {field!r} but {has}; set data.text_field")
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            try:
                column = batch.column(0).cast(pyarrow.large_binary())  # as bytes, so that bad UTF-8 is ours to judge
            except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
                raise ValueError(f"{path}: column {field!r} is {batch.column(0).type}, not text") from None
            for value in column:
                yield f"row {row}", value.as_py() or b""
                row += 1
