"""Reads files and datasets with other libraries.

Supports ArrayRecord files with records of text, JSON objects or tf.train.Example (as written by TensorFlow Datasets),
Hugging Face datasets, and seqio tasks (Roberts et al. 2022) including TFDS.
"""

import contextlib
import importlib
import os
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.jsonl import MISSING, record_text, reparse, skip_or_raise
from jaxscale.runtime.text.sources.part import (
    NO_METADATA,
    WHOLE,
    Damaged,
    Part,
    Records,
    count_skipped,
    damage_fix,
    importing,
)
from jaxscale.system.exits import BadInput

OPTIONS = "readahead_buffer_size:4M,max_parallelism:0"  # options of ArrayRecordReader
HF_SETTINGS = ("config", "split", "revision")
SEQIO_SETTINGS = ("split", "module", "field")
TABLE_ROWS = 256  # rows per table when reading a Hugging Face dataset
SEQIO = "pip install 'jaxscale[seqio]'"


def read_array_record(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of the records in a part, decoded as set by cfg.record_format. Raises BadInput."""
    for number, record, value in array_records(path, cfg, skipped, part):
        if cfg.record_format == "text":
            yield number, number, record, NO_METADATA
        else:
            yield from record_text(value, number, number, record, cfg, skipped, f"{path} record {number}")


def array_records(
    path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE, raw: Sequence[str] = ()
) -> Iterator[tuple[int, bytes, Any]]:
    """Yields (number, record, value) for records [part.begin, part.end). The value depends on cfg.record_format.

    raw: features of a tf.train.Example to return as bytes, like the text field, so that invalid UTF-8 can be detected.
    Raises: BadInput naming the file and record for an invalid record.
    """
    with opened(path, cfg) as reader:
        if part.begin:
            reader.seek(part.begin)
        for number in range(part.begin, min(part.end, reader.num_records())):
            try:
                record = reader.read()
            except (IndexError, RuntimeError, ValueError) as error:
                raise Damaged(f"{path} is corrupt at record {number:,}: {error}; download it again") from None
            if len(record) > cfg.max_line_bytes:
                count_skipped(skipped, "longer than max_line_bytes", len(record))
            else:
                value, place = record, f"{path} record {number}"
                if cfg.record_format == "json":
                    value = reparse(record, cfg, skipped, place)
                elif cfg.record_format == "example":
                    value = example(record, cfg, skipped, place, raw)
                if value is not MISSING:
                    yield number, record, value


def is_array_record(path: str) -> bool:
    """Returns True for the name of an ArrayRecord file."""
    return ".array_record" in os.path.basename(path) or path.endswith(".arrayrecord")


def load_package() -> Any:
    """Imports the package array_record. Raises BadInput if it is not installed."""
    with importing("reading and writing ArrayRecord files", "array_record"):
        return importlib.import_module("array_record.python.array_record_module")


@contextlib.contextmanager
def opened(path: str, cfg: ReadConfig) -> Iterator[Any]:
    """Opens an ArrayRecord file. Raises Damaged if the file has a different format."""
    package = load_package()
    os.stat(path)  # raises FileNotFoundError if the file is missing
    try:
        reader = package.ArrayRecordReader(path, OPTIONS)
        if not reader.ok():
            reader.close()  # raises the reason
    except (ValueError, RuntimeError, IndexError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise Damaged(f"{path} cannot be read as ArrayRecord: {reason}; {damage_fix(cfg)}") from None
    try:
        yield reader
    finally:
        with contextlib.suppress(RuntimeError):  # raises the same error again
            reader.close()


def array_record_parts(path: str, cfg: ReadConfig, part_bytes: int) -> list[Part]:
    """Splits the records of a file into parts of about part_bytes."""
    with opened(path, cfg) as reader:
        total = reader.num_records()
    step = max(1, total * part_bytes // max(os.path.getsize(path), 1))
    return [Part(begin, min(begin + step, total)) for begin in range(0, total, step)] or [WHOLE]


def example(record: bytes, cfg: ReadConfig, skipped: Counter, place: str, raw: Sequence[str] = ()) -> Any:
    """Returns {name: first value} of byte features of a tf.train.Example; MISSING if invalid. raw: kept as bytes."""
    from google.protobuf.message import DecodeError

    found = {}
    try:
        for _, features in length_delimited(record, 1):
            for _, entry in length_delimited(features, 1):
                parts = dict(length_delimited(entry))
                for _, values in length_delimited(parts.get(2, b""), 1):
                    name = parts.get(1, b"").decode("utf-8", "replace")
                    value = next((v for _, v in length_delimited(values, 1)), b"")
                    found[name] = value if name in (cfg.text_field, *raw) else value.decode("utf-8", "replace")
    except DecodeError:
        skip_or_raise(f"{place} is not a tf.train.Example", cfg, skipped, "not tf.train.Example", len(record))
        return MISSING
    return found


def length_delimited(message: bytes, wanted: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields (number, content) of length-delimited protobuf fields. wanted: field number, or 0 for all fields."""
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    for field in UnknownFieldSet(Empty.FromString(message)):
        if field.wire_type == 2 and wanted in (0, field.field_number):  # 2: bytes, text, or a message
            yield field.field_number, field.data


def parse_query(path: str, scheme: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Parses SCHEME://NAME?setting=value&... into (name, settings). Raises BadInput for an unknown setting."""
    name, _, query = path.removeprefix(scheme).partition("?")
    found = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    if wrong := sorted(set(found) - set(known)):
        raise BadInput(f"{path} has the unknown setting {wrong[0]}; use {scheme}NAME?{'=...&'.join(known)}=...")
    if not name:
        raise BadInput(f"{path} has no dataset name; use {scheme}NAME")
    return name, found


def dataset_tables(path: str) -> Iterator[Any]:
    """Yields the rows of hf://NAME?config=C&split=S&revision=R, or of a folder of save_to_disk, as pyarrow tables.

    If a saved dataset has splits, reads the train split. Raises BadInput, also for errors of the datasets library.
    """
    with importing(f"reading {path}", "datasets"):
        import datasets
    row = 0
    with dataset_errors(datasets, path):
        tables = iter(open_rows(path, datasets).with_format("arrow").iter(batch_size=TABLE_ROWS))
    while True:
        with dataset_errors(datasets, path, f" after row {row:,}" if row else ""):
            table = next(tables, None)
        if table is None:
            return
        yield table
        row += table.num_rows


@contextlib.contextmanager
def dataset_errors(datasets: Any, path: str, place: str = "") -> Iterator[None]:
    """Converts errors of the datasets library to BadInput. place: location in the dataset, for the message."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise BadInput(
            f"{path} cannot be read{place}: {reason}; without a network, save the dataset on another machine "
            "(save_to_disk), copy the folder to this machine, and use its path"
        ) from None


def open_rows(path: str, datasets: Any) -> Any:
    """Opens a dataset of the Hugging Face Hub or a folder of data files for streaming, or loads a saved dataset."""
    if path.startswith("hf://"):
        name, query = parse_query(path, "hf://", HF_SETTINGS)
        options = dict(split=query.get("split", "train"), revision=query.get("revision"), streaming=True)
        return datasets.load_dataset(name, query.get("config"), **options)
    found = datasets.load_from_disk(path)
    if not isinstance(found, datasets.DatasetDict):
        return found
    if "train" not in found:
        has = ", ".join(sorted(found))
        raise BadInput(f"{path} has no split 'train'; its splits are {has}; use {os.path.join(path, sorted(found)[0])}")
    return found["train"]


def read_seqio(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each example of seqio://TASK?split=train&module=MODULE&field=targets, without shuffling.

    module: Python module that registers the task with seqio. field: feature to read; by default the first existing one
    of the text field in the settings, targets_pretokenized, and targets (decoded with the task's vocabulary).
    Raises: BadInput for a task that does not exist or lacks the feature.
    """
    name, query = parse_query(path, "seqio://", SEQIO_SETTINGS)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with importing("reading seqio tasks", "seqio", SEQIO):
        import seqio
        import tensorflow
    for device in ("GPU", "TPU"):  # reserves the devices for training
        tensorflow.config.set_visible_devices([], device)
    if module := query.get("module"):
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # importing a module may raise anything
            what = f"{type(error).__name__}: {error}"
            raise BadInput(f"{path}: module {module} cannot be imported ({what}); fix it or set PYTHONPATH") from None
    try:
        task = seqio.get_mixture_or_task(name)
    except ValueError:
        raise BadInput(f"{path}: seqio has no task {name}; add ?module=MODULE, the module that registers it") from None
    split = query.get("split", "train")
    if split not in task.splits:
        raise BadInput(f"{path}: the task has no split {split!r}; use one of {', '.join(sorted(task.splits))}")
    # a single epoch without shuffling, so that example numbers do not change
    dataset = task.get_dataset(sequence_length=None, split=split, shuffle=False, num_epochs=1)
    candidates = [query["field"]] if query.get("field") else [cfg.text_field, "targets_pretokenized", "targets"]
    decode = lambda value: value.decode("utf-8", "replace") if isinstance(value, bytes) else value  # ids and URLs
    for number, example in enumerate(dataset.as_numpy_iterator()):
        field = next((name for name in candidates if name in example), None)
        if field is None:
            has = ", ".join(sorted(example))
            raise BadInput(f"{path} has no feature {' or '.join(candidates)}; its features are {has}; add ?field=NAME")
        text = example[field]
        if field in task.output_features and getattr(text, "ndim", 0) == 1:
            text = task.output_features[field].vocabulary.decode([int(i) for i in text])
        record = {**{key: decode(value) for key, value in example.items()}, cfg.text_field: text}
        yield from record_text(record, number, number, b"", cfg, skipped, f"{path} example {number}")
