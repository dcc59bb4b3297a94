"""Reads and encodes the files of a corpus as text, conversations with a loss mask, or token ids."""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.fields import (
    CHAT_FIELDS,
    FieldChoice,
    TokenIds,
    Vocabulary,
    has_records,
    iter_records,
    read_ids,
)
from jaxscale.runtime.text.chat.chat_records import Conversation, PromptCompletion, parse_record
from jaxscale.runtime.text.chat.spans import (
    NO_TURN,
    RenderedDocument,
    encode_rendered,
    render_conversation,
    render_pair,
)
from jaxscale.runtime.text.chat.template import ChatTemplate, Guard, load_template
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.sources.columns import batch_records, is_table, open_table
from jaxscale.runtime.text.sources.decode import REPAIRED, decode_text, is_utf8, repair, repair_strings
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.jsonl import get_metadata, skip_or_raise
from jaxscale.runtime.text.sources.part import count_skipped
from jaxscale.runtime.text.sources.read import handle_damage, read_file
from jaxscale.runtime.text.tokenizer.base import Tokenizer
from jaxscale.system.exits import BadInput

VERSION = 4  # version of the encoding of conversations; increase it if the same records give different ids
PACKING_SETTINGS = ("too_long",)  # settings of data.chat for packing, which do not affect encoding

Item = str | RenderedDocument | TokenIds  # a document before it is encoded


class Encoded(NamedTuple):
    """Token ids of a document."""

    ids: np.ndarray
    loss_mask: np.ndarray | None  # bool per id and, unless is_whole, for the end token; None: all True
    is_whole: bool = False  # True: no end token is appended


class DocumentReader(NamedTuple):
    """Functions that read documents from files and encode these documents."""

    read: Callable[[SourceFile, FieldChoice, Counter], Iterator[tuple[Document, Item]]]
    encode: Callable[[Sequence[Any]], list[Encoded]]
    has_loss_masks: bool = False  # True if `encode` returns loss masks
    fingerprint: str = ""  # hash of all inputs except files, tokenizer and read settings


def make_reader(tokenizer: Tokenizer, cfg: DataConfig, say: Callable[[str], None]) -> DocumentReader:
    """Returns the reader for the value of data.name. Raises BadInput for an invalid chat template."""
    vocabulary = Vocabulary(tokenizer.vocab_size, f"data.tokenizer={tokenizer.name}") if cfg.tokenizer else Vocabulary()
    about: dict[str, Any] = {}
    if cfg.name == "chat":
        template = load_template(tokenizer, cfg.chat)
        conversations = ConversationReader(cfg, template, Guard(tokenizer.special_ids))
        say(f"chat template: {template.name}")
        settings = {key: value for key, value in dataclasses.asdict(cfg.chat).items() if key not in PACKING_SETTINGS}
        names = sorted(tokenizer.special_ids.items())
        made_from = json.dumps([VERSION, template.fingerprint, template.begin, names, settings], sort_keys=True)
        about = {"has_loss_masks": True, "fingerprint": hashlib.sha256(made_from.encode()).hexdigest()}

    def read(file: SourceFile, choice: FieldChoice, skipped: Counter) -> Iterator[tuple[Document, Item]]:
        if choice.kind == "ids":
            with handle_damage(file.path, cfg, skipped):
                for offset, ids, (id, url, licence, _) in read_ids(file.path, choice, cfg, vocabulary, skipped):
                    yield Document("", file.source, file.name, offset, id, url, licence or cfg.licence), ids
        elif cfg.name == "chat":
            yield from conversations.read(file, skipped)
        else:
            yield from ((document, document.text) for document in read_file(file, cfg, skipped))

    def encode(items: Sequence[Any]) -> list[Encoded]:
        written = [item for item in items if not isinstance(item, TokenIds)]
        if cfg.name == "chat":
            encoded = iter(encode_rendered(tokenizer, written))
        else:
            begin = np.array(tokenizer.begin_ids, np.int32)
            encoded = ((np.concatenate([begin, ids]), None) for ids in tokenizer.encode_many(written))
        return [
            Encoded(item.ids, item.loss_mask, True) if isinstance(item, TokenIds) else Encoded(*next(encoded))
            for item in items
        ]

    return DocumentReader(read, encode, **about)


def is_conversation(item: Item) -> bool:
    """Returns True for a document with a partial loss mask: a conversation, prompt-completion pair or labelled ids."""
    if isinstance(item, RenderedDocument):
        return not all(piece.in_loss for piece in item.pieces if not piece.special)
    return isinstance(item, TokenIds) and item.loss_mask is not None


class ConversationReader(NamedTuple):
    """Reads records as conversations, prompt-completion pairs or texts, and renders them with a chat template."""

    cfg: DataConfig
    template: ChatTemplate
    guard: Guard

    def read(self, file: SourceFile, skipped: Counter) -> Iterator[tuple[Document, RenderedDocument]]:
        """Yields the documents of a file in order, and counts skipped records."""
        if not is_table(file.path) and not has_records(file.path, self.cfg):
            for document in read_file(file, self.cfg, skipped):
                yield document, render_pair(PromptCompletion("", document.text), self.template.begin)
            return
        with handle_damage(file.path, self.cfg, skipped):
            for offset, place, line, record in self.records(file.path, skipped):
                written = self.render(record, file.path, place, skipped)
                if written is None:
                    continue
                id, url, licence, _ = get_metadata(record, self.cfg.metadata_fields, line)
                document = Document(written.text, file.source, file.name, offset, id, url, licence or self.cfg.licence)
                if document.size > self.cfg.max_document_bytes:
                    count_skipped(skipped, "longer than max_document_bytes", document.size)
                    continue
                yield document, written

    def records(self, path: str, skipped: Counter) -> Iterator[tuple[int, str, bytes, Any]]:
        """Yields (offset, 'line 3' or 'row 3', raw bytes or b'', value) of each record. value: bytes if not UTF-8."""
        cfg, pair = self.cfg, (self.cfg.chat.prompt_field, self.cfg.chat.completion_field)
        if not is_table(path):
            for offset, place, line, record in iter_records(path, cfg, skipped, raw=pair):
                yield offset, place, line, decoded_record(record, cfg, skipped)
            return
        used = {*CHAT_FIELDS, "system", "tools", *pair, cfg.text_field}
        used |= {field.partition(".")[0] for field in (cfg.text_field, *cfg.metadata_fields)}
        with open_table(path, cfg) as table:
            names = table.schema.names
            for row, batch in table.batches([name for name in names if name in used] or names[:1]):
                for number, record in enumerate(batch_records(batch), row):
                    yield number, f"row {number}", b"", decoded_record(record, cfg, skipped)

    def render(self, record: Any, path: str, place: str, skipped: Counter) -> RenderedDocument | None:
        """Returns the result of render_valid(). Treats NUL and invalid UTF-8 according to data.invalid_utf8."""
        content = record
        if not isinstance(record, bytes):
            write = functools.partial(self.render_valid, f"{path} {place}", skipped)
            written = write(record)
            if written is None or is_utf8(written.text) and "\0" not in written.text:
                return written
            if self.cfg.invalid_utf8 == "repair":
                how = "half a surrogate pair" if "\0" not in written.text else "NUL removed"
                skipped[f"{REPAIRED}{how}"] += 1
                return write(repair_strings(record))
            content = written.text.encode(errors="surrogatepass")
        decode_text(content, self.cfg, skipped, path, lambda start: place)  # counts the record or raises
        return None

    def render_valid(self, place: str, skipped: Counter, record: object) -> RenderedDocument | None:
        """Returns the rendered record, or None if the record is skipped and counted. Raises BadInput if invalid."""
        try:
            found = parse_record(record, self.cfg.chat, self.cfg.text_field)
            if isinstance(found, Conversation):
                written = render_conversation(found, self.template, self.guard) if any(found.in_loss) else None
            elif found.completion:
                written = render_pair(found, self.template.begin)
            else:
                skipped["empty completion"] += 1
                return None
        except BadInput as error:
            skip_or_raise(f"{place} {error}", self.cfg, skipped, "not a valid record", 0)
            return None
        if written is None or not written.end_in_loss and not any(piece.in_loss for piece in written.pieces):
            skipped[NO_TURN] += 1
            return None
        return written


def decoded_record(record: Any, cfg: DataConfig, skipped: Counter) -> Any:
    """Returns a record with decoded strings, or its first invalid bytes unless data.invalid_utf8='repair'."""
    if not isinstance(record, dict):
        return record
    try:
        return decode_strings(record, bytes.decode)
    except UnicodeDecodeError as error:
        if cfg.invalid_utf8 != "repair":
            return error.object
        skipped[f"{REPAIRED}{repair(error.object, cfg)[1]}"] += 1
    return decode_strings(record, lambda content: repair(content, cfg)[0])


def decode_strings(value: Any, decode: Callable[[bytes], str]) -> Any:
    """Decodes all bytes in a record or in a value of a record."""
    if isinstance(value, bytes):
        return decode(value)
    if isinstance(value, dict):
        return {key: decode_strings(inner, decode) for key, inner in value.items()}
    return [decode_strings(inner, decode) for inner in value] if isinstance(value, list) else value
