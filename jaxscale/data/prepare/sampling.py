"""The tokenizer of a set, trained on a sample of its documents that depends on nothing but the documents."""

import pathlib
from collections.abc import Iterator, Sequence

from jaxscale.data.prepare.blocks import read_table
from jaxscale.data.prepare.config import PrepareConfig
from jaxscale.data.tokenizer.train import train_tokenizer


def train_on_blocks(cfg: PrepareConfig, blocks: Sequence[str], path: str) -> None:
    """Writes the tokenizer to `path`, unless it is there from before."""
    if not pathlib.Path(path).exists():
        train_tokenizer(texts_of(blocks), cfg.tokenizer.train, pathlib.Path(path))


def texts_of(blocks: Sequence[str]) -> Iterator[str]:
    """The texts of all documents, a block in memory at a time."""
    for base in blocks:
        yield from read_table(pathlib.Path(f"{base}.arrow")).column("text").to_pylist()
