"""Data sets that other libraries read: Hugging Face's, and seqio's tasks (Roberts et al. 2022), TFDS among them."""

import contextlib
import importlib
import os
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.jsonl import record_text
from jaxscale.text.sources.part import WHOLE, Part, Records, needs

HF_SETTINGS = ("config", "split", "revision")
SEQIO_SETTINGS = ("split", "module", "field")
SEQIO = "pip install 'jaxscale[seqio]'"


def query_of(path: str, scheme: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """(name, settings) of SCHEME://NAME?setting=value&... Raises BadInput for a setting that is not known."""
    name, _, query = path.removeprefix(scheme).partition("?")
    found = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    if wrong := sorted(set(found) - set(known)):
        raise BadInput(f"{path}: {wrong[0]} is not known; {scheme}NAME takes ?{'=...&'.join(known)}=...")
    if not name:
        raise BadInput(f"{path} names nothing; write {scheme}NAME")
    return name, found


def read_dataset(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each row of hf://NAME?config=C&split=S&revision=R, or of a folder that save_to_disk wrote.

    Raises: BadInput naming the data set if it cannot be reached or read, or a row that has no text field.
    """
    datasets = load_datasets(path)
    number = 0
    with reachable(datasets, path):
        rows = iter(streamed(datasets, path) if path.startswith("hf://") else saved(datasets, path))
    while True:
        with reachable(datasets, path, f" after row {number:,}"):
            row = next(rows, None)
        if row is None:
            return
        yield from record_text(row, number, number, b"", cfg, skipped, f"{path} row {number}")
        number += 1


def load_datasets(path: str) -> Any:
    """The library of Hugging Face. Raises BadInput if it is not installed."""
    with needs(f"reading {path}", "datasets"):
        import datasets
    return datasets


def streamed(datasets: Any, path: str) -> Any:
    """The rows of a data set of the hub, or of a folder of data files."""
    name, query = query_of(path, "hf://", HF_SETTINGS)
    split = query.get("split", "train")
    return datasets.load_dataset(name, query.get("config"), split=split, revision=query.get("revision"), streaming=True)


def saved(datasets: Any, path: str) -> Any:
    """The rows of a saved data set; of one with splits, those for training."""
    found = datasets.load_from_disk(path)
    if not isinstance(found, datasets.DatasetDict):
        return found
    if "train" not in found:
        has = ", ".join(sorted(found))
        raise BadInput(f"{path} has no split 'train' but {has}; name {os.path.join(path, sorted(found)[0])}")
    return found["train"]


@contextlib.contextmanager
def reachable(datasets: Any, path: str, place: str = "") -> Iterator[None]:
    """Around what the library does. Raises BadInput for a data set that it cannot give."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise BadInput(
            f"{path} cannot be read{place}: {reason}; without a network, save it elsewhere (save_to_disk), copy the "
            "folder and name that"
        ) from None


def read_seqio(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each example of seqio://TASK?split=train&module=MODULE&field=targets, unshuffled.

    module: the Python module that adds the task to seqio's registry. field: the feature to read; without it the text
    field of the settings, then targets_pretokenized, then targets, decoded with the task's own vocabulary.
    Raises: BadInput naming the task if it is not there or has no such feature.
    """
    name, query = query_of(path, "seqio://", SEQIO_SETTINGS)
    seqio = imported()
    if module := query.get("module"):
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
            what = f"{type(error).__name__}: {error}"
            raise BadInput(
                f"{path}: the module {module} cannot be imported ({what}); mend it, or set PYTHONPATH"
            ) from None
    try:
        task = seqio.get_mixture_or_task(name)
    except ValueError:
        raise BadInput(f"{path}: seqio knows no task {name}; name the module that adds it: ?module=MODULE") from None
    split = query.get("split", "train")
    if split not in task.splits:
        raise BadInput(f"{path}: the task has no split {split!r} but {', '.join(sorted(task.splits))}")
    # one after the other and never shuffled, so that a row's number is always the same row
    dataset = task.get_dataset(sequence_length=None, split=split, shuffle=False, num_epochs=1)
    for number, example in enumerate(dataset.as_numpy_iterator()):
        field = chosen(example, query.get("field", ""), cfg, path)
        text = as_text(example[field], field, task)
        record = {**{key: plain(value) for key, value in example.items()}, cfg.text_field: text}
        yield from record_text(record, number, number, b"", cfg, skipped, f"{path} example {number}")


def imported() -> Any:
    """seqio, with TensorFlow kept off the accelerator, which belongs to the training."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with needs("reading seqio tasks", "seqio", SEQIO):
        import seqio
        import tensorflow
    tensorflow.config.set_visible_devices([], "GPU")
    tensorflow.config.set_visible_devices([], "TPU")
    return seqio


def chosen(example: dict[str, Any], field: str, cfg: ReadConfig, path: str) -> str:
    """The name of the feature to read."""
    wanted = (field,) if field else (cfg.text_field, "targets_pretokenized", "targets")
    for name in wanted:
        if name in example:
            return name
    raise BadInput(f"{path} has no feature {' or '.join(wanted)} but {', '.join(sorted(example))}; add ?field=NAME")


def as_text(value: Any, field: str, task: Any) -> Any:
    """A feature as text; ids are decoded with the vocabulary that the task names for it."""
    if isinstance(value, bytes):
        return value
    if field in task.output_features and getattr(value, "ndim", 0) == 1:
        return task.output_features[field].vocabulary.decode([int(i) for i in value])
    return value


def plain(value: Any) -> Any:
    """Bytes as text, so that they can be an id or a URL."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
