"""The data of a run by its parts, so that what has changed can be named: files, shards, tokenizer, order."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from jaxscale.data.shards import Shard

DIGITS = 16  # of a hash: enough to tell two versions of one file apart
MOST_PARTS = 2000  # files and shards that are told apart; each checkpoint holds them. Of more, sources are


def data_parts(
    trained: Sequence[Shard], held: Sequence[Shard], tokenizer: str, settings: dict[str, str]
) -> dict[str, str]:
    """{name for people: hash or value} of everything that the fingerprint of a corpus is made of.

    Args: tokenizer: its fingerprint, '' where it is not known. settings: those that decide which rows there are.
    """
    pieces = [*pieces_of(trained, ""), *pieces_of(held, "validation ")]
    if len(pieces) > MOST_PARTS:
        pieces = [(f"source {source}", source, mark) for _, source, mark in pieces]
    sums: dict[str, list[str]] = {}
    for name, _, mark in pieces:
        sums.setdefault(name, []).append(mark)
    found = {name: marks[0][:DIGITS] if len(marks) == 1 else digest(marks) for name, marks in sums.items()}
    return {"the tokenizer": tokenizer[:DIGITS], **found, **settings}


def pieces_of(shards: Sequence[Shard], prefix: str) -> Iterator[tuple[str, str, str]]:
    """(name, source, hash) of each text file, or of each shard that does not know of which files it is made."""
    for shard in shards:
        files = shard.header["files"]
        if files and all("sha256" in file for file in files):
            for file in files:
                yield f"{prefix}file {file['name']}", file["source"], file["sha256"]
        else:
            name = PurePath(shard.header["bin"]).stem
            yield f"{prefix}shard {name}", ", ".join(shard.header["sources"]), shard.fingerprint


def digest(marks: Sequence[str]) -> str:
    """One hash for several, in their order."""
    return hashlib.sha256("|".join(marks).encode()).hexdigest()[:DIGITS]
