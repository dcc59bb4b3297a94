"""Data sets of the Hugging Face hub, streamed by the `datasets` library, and those it has saved on this disk."""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.text.sources.jsonl import record_text
from jaxscale.text.sources.settings import WHOLE, Part, ReadConfig, Records, missing_package, query_of

KNOWN = ("config", "split", "revision")


def read_dataset(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each row of hf://NAME?config=C&split=S&revision=R, or of a folder that save_to_disk wrote.

    Raises: BadInput naming the data set if it cannot be reached or read, or a row that has no text field.
    """
    try:
        import datasets
    except ImportError:
        raise missing_package(f"reading {path}", "datasets") from None
    rows = iter(saved(datasets, path) if not path.startswith("hf://") else streamed(datasets, path))
    number = 0
    while True:
        try:
            row = next(rows, None)
        except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise unreachable(path, error, f" after row {number:,}") from None
        if row is None:
            return
        yield from record_text(row, number, number, b"", cfg, skipped, f"{path} row {number}")
        number += 1


def streamed(datasets: Any, path: str) -> Iterable[dict[str, Any]]:
    """The rows of a data set of the hub, or of a folder of data files."""
    name, query = query_of(path, "hf://", KNOWN)
    split = query.get("split", "train")
    try:
        return datasets.load_dataset(
            name, query.get("config"), split=split, revision=query.get("revision"), streaming=True
        )
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise unreachable(path, error) from None


def saved(datasets: Any, path: str) -> Iterable[dict[str, Any]]:
    """The rows of a saved data set; of one with splits, those for training."""
    try:
        found = datasets.load_from_disk(path)
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise unreachable(path, error) from None
    if not isinstance(found, datasets.DatasetDict):
        return found
    if "train" not in found:
        has = ", ".join(sorted(found))
        raise BadInput(f"{path} has no split 'train' but {has}; name {os.path.join(path, sorted(found)[0])}")
    return found["train"]


def unreachable(path: str, error: BaseException, place: str = "") -> ValueError:
    """The error for a data set that the library cannot give."""
    reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return BadInput(
        f"{path} cannot be read{place}: {reason}; without a network, save it elsewhere (save_to_disk), copy the folder "
        "and name that"
    )
