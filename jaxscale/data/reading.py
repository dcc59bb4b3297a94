"""From files to what a tokeniser encodes: texts, or conversations of which a part is learned."""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.config import DataConfig
from jaxscale.system.exits import BadInput
from jaxscale.text.chat.guard import Guard
from jaxscale.text.chat.records import Chat, Pair, parse_record
from jaxscale.text.chat.spans import NO_TURN, Written, encode_written, write_chat, write_pair
from jaxscale.text.chat.template import ChatTemplate, load_template
from jaxscale.text.document import Document
from jaxscale.text.sources.decode import REPAIRED, decoded, is_utf8, repaired_texts
from jaxscale.text.sources.files import SourceFile, unpacked_name
from jaxscale.text.sources.jsonl import json_records, refuse, words_of
from jaxscale.text.sources.left_out import lose
from jaxscale.text.sources.read import JSON_LINES, read_file, readable
from jaxscale.text.tokenizer.base import Tokenizer

VERSION = 3  # of how conversations become ids: another number where the same records would give others
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
        lambda file, skipped: read_samples(file, cfg, template, guard, skipped),
        lambda items: encode_written(tokenizer, items),
        marks=True,
        fingerprint=hashlib.sha256(made_from.encode()).hexdigest(),
    )


def read_samples(
    file: SourceFile, cfg: DataConfig, template: ChatTemplate, guard: Guard, skipped: Counter
) -> Iterator[tuple[Document, Written]]:
    """Yields the documents of a file in order; what is left out is counted. Files that are not JSON lines are text.

    Raises: BadInput naming file and line for a malformed record, where cfg says to stop; for an unreadable file.
    """
    if not unpacked_name(file.path).endswith(JSON_LINES):
        for document in read_file(file, cfg, skipped):
            yield document, write_pair(Pair("", document.text), template.begin)
        return
    with readable(file.path, cfg, skipped):
        for offset, number, line, record, _ in json_records(file.path, cfg, skipped):
            written = write_sound(record, file.path, number, cfg, template, guard, skipped)
            if written is None:
                continue
            id, url, own, _ = words_of(record, cfg.word_fields, line)
            document = Document(written.text, file.source, file.name, offset, id, url, own or cfg.licence)
            if document.size > cfg.max_document_bytes:
                lose(skipped, "longer than max_document_bytes", document.size)
                continue
            yield document, written


def write_sound(
    record: Any, path: str, number: int, cfg: DataConfig, template: ChatTemplate, guard: Guard, skipped: Counter
) -> Written | None:
    """What write_record makes of a line; what is not UTF-8 or holds NUL is treated as cfg.invalid_utf8 says."""
    place, content = f"line {number}", record
    if not isinstance(record, bytes):
        make = functools.partial(write_record, f"{path} {place}", cfg, template, guard, skipped)
        written = make(record)
        if written is None or is_utf8(written.text) and "\0" not in written.text:
            return written
        if cfg.invalid_utf8 == "repair":
            how = "half a surrogate pair" if "\0" not in written.text else "NUL removed"
            skipped[f"{REPAIRED}{how}"] += 1
            return make(repaired_texts(record))
        content = written.text.encode(errors="surrogatepass")
    decoded(content, cfg, skipped, path, lambda start: place)  # counts it, or stops
    return None


def write_record(
    place: str, cfg: DataConfig, template: ChatTemplate, guard: Guard, skipped: Counter, record: object
) -> Written | None:
    """The record as a document, or None if it was left out and counted. Raises BadInput beginning with place."""
    try:
        found = parse_record(record, cfg.chat, cfg.text_field)
        if isinstance(found, Chat):
            if not any(found.learned):
                skipped[NO_TURN] += 1
                return None
            written = write_chat(found, template, guard)
        else:
            if not found.completion:
                skipped["empty completion"] += 1
                return None
            written = write_pair(found, template.begin)
    except BadInput as error:
        refuse(f"{place} {error}", cfg, skipped, "not as told", 0)
        return None
    if not written.end_learned and not any(piece.learned for piece in written.pieces):
        skipped[NO_TURN] += 1
        return None
    return written
