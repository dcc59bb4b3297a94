"""Datasets streamed from the Hugging Face Hub, and datasets saved with save_to_disk."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.jsonl import record_text
from jaxscale.text.sources.part import WHOLE, Part, Records, needs, query_of

KNOWN = ("config", "split", "revision")


def read_dataset(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each row of hf://NAME?config=C&split=S&revision=R, or of a folder that save_to_disk wrote.

    Raises: BadInput naming the data set if it cannot be reached or read, or a row that has no text field.
    """
    with needs(f"reading {path}", "datasets"):
        import datasets
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


def streamed(datasets: Any, path: str) -> Iterable[dict[str, Any]]:
    """The rows of a data set of the hub, or of a folder of data files."""
    name, query = query_of(path, "hf://", KNOWN)
    split = query.get("split", "train")
    return datasets.load_dataset(name, query.get("config"), split=split, revision=query.get("revision"), streaming=True)


def saved(datasets: Any, path: str) -> Iterable[dict[str, Any]]:
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
