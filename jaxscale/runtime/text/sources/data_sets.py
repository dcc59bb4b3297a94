"""Datasets of other libraries: Hugging Face datasets, and seqio tasks (Roberts et al. 2022) including TFDS."""

import contextlib
import importlib
import os
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.jsonl import record_text
from jaxscale.runtime.text.sources.part import WHOLE, Part, Records, importing
from jaxscale.system.exits import BadInput

HF_SETTINGS = ("config", "split", "revision")
SEQIO_SETTINGS = ("split", "module", "field")
SEQIO = "pip install 'jaxscale[seqio]'"


def parse_query(path: str, scheme: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Parses SCHEME://NAME?setting=value&... into (name, settings). Raises BadInput for an unknown setting."""
    name, _, query = path.removeprefix(scheme).partition("?")
    found = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    if wrong := sorted(set(found) - set(known)):
        raise BadInput(f"{path}: {wrong[0]} is unknown; {scheme}NAME takes ?{'=...&'.join(known)}=...")
    if not name:
        raise BadInput(f"{path} names nothing; write {scheme}NAME")
    return name, found


def read_dataset(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each row of hf://NAME?config=C&split=S&revision=R, or of a folder of save_to_disk."""
    datasets = load_datasets(path)
    number = 0
    with dataset_errors(datasets, path):
        rows = iter(stream_dataset(datasets, path) if path.startswith("hf://") else load_saved(datasets, path))
    while True:
        with dataset_errors(datasets, path, f" after row {number:,}"):
            row = next(rows, None)
        if row is None:
            return
        yield from record_text(row, number, number, b"", cfg, skipped, f"{path} row {number}")
        number += 1


def load_datasets(path: str) -> Any:
    """Imports Hugging Face datasets. Raises BadInput if it is not installed."""
    with importing(f"reading {path}", "datasets"):
        import datasets
    return datasets


def stream_dataset(datasets: Any, path: str) -> Any:
    """Opens a dataset of the hub, or a folder of data files, for streaming."""
    name, query = parse_query(path, "hf://", HF_SETTINGS)
    split = query.get("split", "train")
    return datasets.load_dataset(name, query.get("config"), split=split, revision=query.get("revision"), streaming=True)


def load_saved(datasets: Any, path: str) -> Any:
    """Loads a saved dataset; for one with splits, the train split."""
    found = datasets.load_from_disk(path)
    if not isinstance(found, datasets.DatasetDict):
        return found
    if "train" not in found:
        has = ", ".join(sorted(found))
        raise BadInput(f"{path} has no split 'train' but {has}; name {os.path.join(path, sorted(found)[0])}")
    return found["train"]


@contextlib.contextmanager
def dataset_errors(datasets: Any, path: str, place: str = "") -> Iterator[None]:
    """Converts errors of the library to BadInput."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise BadInput(
            f"{path} cannot be read{place}: {reason}; without a network, save it elsewhere (save_to_disk), copy "
            "the folder and name it"
        ) from None


def read_seqio(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each example of seqio://TASK?split=train&module=MODULE&field=targets, unshuffled.

    module: the Python module that adds the task to seqio's registry. field: the feature to read; without it the text
    field of the settings, then targets_pretokenized, then targets, decoded with the task's own vocabulary.
    Raises: BadInput naming a task that does not exist or lacks the feature.
    """
    name, query = parse_query(path, "seqio://", SEQIO_SETTINGS)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with importing("reading seqio tasks", "seqio", SEQIO):
        import seqio
        import tensorflow
    for device in ("GPU", "TPU"):  # training uses them
        tensorflow.config.set_visible_devices([], device)
    if module := query.get("module"):
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # importing a module may raise anything
            what = f"{type(error).__name__}: {error}"
            raise BadInput(
                f"{path}: the module {module} cannot be imported ({what}); fix it, or set PYTHONPATH"
            ) from None
    try:
        task = seqio.get_mixture_or_task(name)
    except ValueError:
        raise BadInput(f"{path}: seqio knows no task {name}; name the module that adds it: ?module=MODULE") from None
    split = query.get("split", "train")
    if split not in task.splits:
        raise BadInput(f"{path}: the task has no split {split!r} but {', '.join(sorted(task.splits))}")
    # one epoch without shuffling, so that example numbers are stable
    dataset = task.get_dataset(sequence_length=None, split=split, shuffle=False, num_epochs=1)
    candidates = [query["field"]] if query.get("field") else [cfg.text_field, "targets_pretokenized", "targets"]
    decode = lambda value: value.decode("utf-8", "replace") if isinstance(value, bytes) else value  # ids and URLs
    for number, example in enumerate(dataset.as_numpy_iterator()):
        field = next((name for name in candidates if name in example), None)
        if field is None:
            has = ", ".join(sorted(example))
            raise BadInput(f"{path} has no feature {' or '.join(candidates)} but {has}; add ?field=NAME")
        text = example[field]
        if field in task.output_features and getattr(text, "ndim", 0) == 1:
            text = task.output_features[field].vocabulary.decode([int(i) for i in text])
        record = {**{key: decode(value) for key, value in example.items()}, cfg.text_field: text}
        yield from record_text(record, number, number, b"", cfg, skipped, f"{path} example {number}")
