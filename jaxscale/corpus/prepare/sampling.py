"""The tokenizer of a set, trained on a sample of its documents that depends on nothing but the documents."""

import pathlib
from collections.abc import Iterator, Sequence

from jaxscale.corpus.prepare.blocks import read_table
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.corpus.prepare.done import mark_done, read_done
from jaxscale.text.tokenizer.train import train_tokenizer


def train_on_blocks(cfg: PrepareConfig, blocks: Sequence[str], path: str) -> None:
    """Writes the tokenizer to `path`, unless it is there from before."""
    file = pathlib.Path(path)
    done = file.with_suffix(".done.json")
    if read_done(done) is None:
        train_tokenizer(texts_of(blocks), cfg.tokenizer.train, file)
        mark_done(done, {}, [file])


def texts_of(blocks: Sequence[str]) -> Iterator[str]:
    """The texts of all documents, a block in memory at a time."""
    for base in blocks:
        yield from read_table(pathlib.Path(f"{base}.arrow")).column("text").to_pylist()
