"""From files to what a tokeniser encodes: texts, or conversations of which a part is learned."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.config import DataConfig
from jaxscale.data.conversations import read_samples
from jaxscale.text.chat.encode import encode_written
from jaxscale.text.chat.guard import Guard
from jaxscale.text.chat.template import load_template
from jaxscale.text.document import Document
from jaxscale.text.sources.files import SourceFile
from jaxscale.text.sources.read import read_file
from jaxscale.text.tokenizer.base import Tokenizer

VERSION = 2  # of how conversations become ids: another number where the same records would give others
LATER = ("too_long",)  # settings of data.chat that are read when rows are made of the ids

Encoded = tuple[np.ndarray, np.ndarray | None]  # ids up to the end of the document; learned or not, for that end too


class Reading(NamedTuple):
    """How files become documents, and documents ids."""

    read: Callable[[SourceFile, Counter], Iterator[tuple[Document, Any]]]  # each document with what encode takes
    encode: Callable[[Sequence[Any]], list[Encoded]]
    marks: bool = False  # whether it tells which ids are learned
    fingerprint: str = ""  # of what decides the ids beside the files, the tokenizer and the settings of reading


def make_reading(tokenizer: Tokenizer, cfg: DataConfig, say: Callable[[str], None]) -> Reading:
    """The reading of data.name. Raises BadInput for a chat template that is none."""
    if cfg.name != "chat":
        texts = lambda file, skipped: ((document, document.text) for document in read_file(file, cfg, skipped))
        begin = np.array(tokenizer.begin_ids, np.int32)
        return Reading(
            texts, lambda items: [(np.concatenate([begin, ids]), None) for ids in tokenizer.encode_many(items)]
        )
    template, guard = load_template(tokenizer, cfg.chat), Guard(tokenizer.special_ids)
    say(f"chat template: {template.name}")
    settings = {key: value for key, value in dataclasses.asdict(cfg.chat).items() if key not in LATER}
    names = sorted(tokenizer.special_ids.items())
    made_from = json.dumps([VERSION, template.fingerprint, template.begin, names, settings], sort_keys=True)
    return Reading(
        lambda file, skipped: iter(read_samples(file, cfg, template, guard, skipped)),
        lambda items: encode_written(tokenizer, items),
        marks=True,
        fingerprint=hashlib.sha256(made_from.encode()).hexdigest(),
    )
