"""Reads the files of a corpus: texts, conversations of which a part is learned, or token ids; and encodes them."""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.config import DataConfig
from jaxscale.data.fields import CHAT_FIELDS, Choice, has_records, records_of
from jaxscale.data.token_columns import TokenIds, Vocabulary, read_ids
from jaxscale.system.exits import BadInput
from jaxscale.text.chat.guard import Guard
from jaxscale.text.chat.records import Chat, Pair, parse_record
from jaxscale.text.chat.spans import NO_TURN, Written, encode_written, write_chat, write_pair
from jaxscale.text.chat.template import ChatTemplate, load_template
from jaxscale.text.document import Document
from jaxscale.text.sources.decode import REPAIRED, decoded, is_utf8, repaired, repaired_texts
from jaxscale.text.sources.files import SourceFile
from jaxscale.text.sources.jsonl import refuse, words_of
from jaxscale.text.sources.left_out import lose
from jaxscale.text.sources.read import read_file, readable
from jaxscale.text.sources.tables import batch_records, is_table, open_table
from jaxscale.text.tokenizer.base import Tokenizer

VERSION = 4  # of how conversations become ids: another number where the same records would give others
LATER = ("too_long",)  # settings of data.chat that are read when rows are made of the ids

Item = str | Written | TokenIds  # a document before it is encoded


class Encoded(NamedTuple):
    """The ids of a document."""

    ids: np.ndarray
    learned: np.ndarray | None  # bool, for each id and, unless is_whole, for the end of the document; None: all are
    is_whole: bool = False  # the end of the document is among the ids, or there is none


class Reading(NamedTuple):
    """How files become documents, and documents ids."""

    read: Callable[[SourceFile, Choice, Counter], Iterator[tuple[Document, Item]]]
    encode: Callable[[Sequence[Any]], list[Encoded]]
    marks: bool = False  # whether it tells which ids are learned
    fingerprint: str = ""  # of what decides the ids beside the files, the tokenizer and the settings of reading


def make_reading(tokenizer: Tokenizer, cfg: DataConfig, say: Callable[[str], None]) -> Reading:
    """The reading of data.name. Raises BadInput for a chat template that is none."""
    vocabulary = Vocabulary(tokenizer.vocab_size, f"data.tokenizer={tokenizer.name}") if cfg.tokenizer else Vocabulary()

    def read_any(
        read: Callable[[SourceFile, Counter], Iterator[tuple[Document, Item]]],
        file: SourceFile,
        choice: Choice,
        skipped: Counter,
    ) -> Iterator[tuple[Document, Item]]:
        if choice.kind == "ids":
            return read_token_ids(file, choice, cfg, vocabulary, skipped)
        return read(file, skipped)

    if cfg.name != "chat":
        return Reading(
            functools.partial(read_any, functools.partial(read_texts, cfg)),
            functools.partial(encode_items, functools.partial(encode_texts, tokenizer)),
        )
    template, guard = load_template(tokenizer, cfg.chat), Guard(tokenizer.special_ids)
    say(f"chat template: {template.name}")
    settings = {key: value for key, value in dataclasses.asdict(cfg.chat).items() if key not in LATER}
    names = sorted(tokenizer.special_ids.items())
    made_from = json.dumps([VERSION, template.fingerprint, template.begin, names, settings], sort_keys=True)
    return Reading(
        functools.partial(read_any, functools.partial(read_samples, cfg, template, guard)),
        functools.partial(encode_items, functools.partial(encode_written, tokenizer)),
        marks=True,
        fingerprint=hashlib.sha256(made_from.encode()).hexdigest(),
    )


def read_texts(cfg: DataConfig, file: SourceFile, skipped: Counter) -> Iterator[tuple[Document, Item]]:
    """Yields the documents of a file with their texts."""
    return ((document, document.text) for document in read_file(file, cfg, skipped))


def read_token_ids(
    file: SourceFile, choice: Choice, cfg: DataConfig, vocabulary: Vocabulary, skipped: Counter
) -> Iterator[tuple[Document, Item]]:
    """Yields the documents of a file with their token ids; they have no text. Raises BadInput as read_ids does."""
    with readable(file.path, cfg, skipped):
        for offset, ids, (id, url, licence, _) in read_ids(file.path, choice, cfg, vocabulary, skipped):
            yield Document("", file.source, file.name, offset, id, url, licence or cfg.licence), ids


def encode_items(
    encode: Callable[[Sequence[Any]], Sequence[tuple[np.ndarray, np.ndarray | None]]], items: Sequence[Item]
) -> list[Encoded]:
    """Encodes texts or conversations, and returns token ids unchanged."""
    encoded = iter(encode([item for item in items if not isinstance(item, TokenIds)]))
    return [
        Encoded(item.ids, item.learned, True) if isinstance(item, TokenIds) else Encoded(*next(encoded))
        for item in items
    ]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[np.ndarray, None]]:
    """The ids of each text behind those that begin a document."""
    begin = np.array(tokenizer.begin_ids, np.int32)
    return [(np.concatenate([begin, ids]), None) for ids in tokenizer.encode_many(texts)]


def is_conversation(item: Item) -> bool:
    """True where a part is given and not learned: a conversation, a prompt and its completion, ids with labels."""
    if isinstance(item, Written):
        return not all(piece.learned for piece in item.pieces if not piece.special)
    return isinstance(item, TokenIds) and item.learned is not None


def read_samples(
    cfg: DataConfig, template: ChatTemplate, guard: Guard, file: SourceFile, skipped: Counter
) -> Iterator[tuple[Document, Written]]:
    """Yields the conversations, pairs and texts of a file in order; what is left out is counted.

    Raises: BadInput naming file and row for a malformed record, where cfg says to stop; for an unreadable file.
    """
    if not is_table(file.path) and not has_records(file.path, cfg):
        for document in read_file(file, cfg, skipped):
            yield document, write_pair(Pair("", document.text), template.begin)
        return
    with readable(file.path, cfg, skipped):
        for offset, place, line, record in sample_records(file.path, cfg, skipped):
            written = write_sound(record, file.path, place, cfg, template, guard, skipped)
            if written is None:
                continue
            id, url, licence, _ = words_of(record, cfg.word_fields, line)
            document = Document(written.text, file.source, file.name, offset, id, url, licence or cfg.licence)
            if document.size > cfg.max_document_bytes:
                lose(skipped, "longer than max_document_bytes", document.size)
                continue
            yield document, written


def sample_records(path: str, cfg: DataConfig, skipped: Counter) -> Iterator[tuple[int, str, bytes, Any]]:
    """Yields (offset, 'line 3' or 'row 3', its bytes if it has any, its value) of each record of a file.

    The value of a record that is not UTF-8 is bytes, unless cfg says to repair it.
    """
    if not is_table(path):
        raw = (cfg.chat.prompt_field, cfg.chat.completion_field)
        for offset, place, line, record in records_of(path, cfg, skipped, raw=raw):
            yield offset, place, line, decoded_record(record, cfg, skipped)
        return
    with open_table(path, cfg) as table:
        for row, batch in table.batches(sample_columns(table.schema.names, cfg)):
            for number, record in enumerate(batch_records(batch), row):
                yield number, f"row {number}", b"", decoded_record(record, cfg, skipped)


def decoded_record(record: Any, cfg: DataConfig, skipped: Counter) -> Any:
    """The record, bytes in it as text; or the first bytes in it that are not UTF-8, unless cfg says to repair them."""
    if not isinstance(record, dict):
        return record
    try:
        return with_texts(record, bytes.decode)
    except UnicodeDecodeError as error:
        if cfg.invalid_utf8 != "repair":
            return error.object
        skipped[f"{REPAIRED}{repaired(error.object, cfg)[1]}"] += 1
    return with_texts(record, lambda content: repaired(content, cfg)[0])


def with_texts(value: Any, decode: Callable[[bytes], str]) -> Any:
    """The value of a record with its bytes decoded."""
    if isinstance(value, bytes):
        return decode(value)
    if isinstance(value, dict):
        return {key: with_texts(inner, decode) for key, inner in value.items()}
    return [with_texts(inner, decode) for inner in value] if isinstance(value, list) else value


def sample_columns(names: Sequence[str], cfg: DataConfig) -> list[str]:
    """The columns of a table that a sample and its words may be in, at least one."""
    fields = {*CHAT_FIELDS, "system", "tools", cfg.chat.prompt_field, cfg.chat.completion_field}
    fields |= {field.partition(".")[0] for field in (cfg.text_field, *cfg.word_fields)} | {cfg.text_field}
    return [name for name in names if name in fields] or list(names[:1])


def write_sound(
    record: Any, path: str, place: str, cfg: DataConfig, template: ChatTemplate, guard: Guard, skipped: Counter
) -> Written | None:
    """write_record for a record that may hold NUL, or be bytes that are not UTF-8: cfg.invalid_utf8 decides."""
    content = record
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
