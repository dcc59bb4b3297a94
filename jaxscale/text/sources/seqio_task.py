"""Examples of seqio tasks (Roberts et al. 2022), TensorFlow Datasets among them, read once and in order."""

import importlib
import os
from collections import Counter
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.jsonl import record_text
from jaxscale.text.sources.part import WHOLE, Part, Records, needs, query_of

KNOWN = ("split", "module", "field")
SEQIO = "pip install 'jaxscale[seqio]'"


def read_seqio(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each example of seqio://TASK?split=train&module=MODULE&field=targets, unshuffled.

    module: the Python module that adds the task to seqio's registry. field: the feature to read; without it the text
    field of the settings, then targets_pretokenized, then targets, decoded with the task's own vocabulary.
    Raises: BadInput naming the task if it is not there or has no such feature.
    """
    name, query = query_of(path, "seqio://", KNOWN)
    seqio = imported()
    if module := query.get("module"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise BadInput(f"{path}: the module {module} cannot be imported ({error}); set PYTHONPATH") from None
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
