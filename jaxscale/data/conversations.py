"""Files of conversations, pairs and texts, one JSON object a line, as written documents with where they came from."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jaxscale.data.config import DataConfig
from jaxscale.system.exits import BadInput
from jaxscale.text.chat.guard import Guard
from jaxscale.text.chat.records import Chat, Pair, parse_record
from jaxscale.text.chat.spans import NO_TURN, Written, write_chat, write_pair
from jaxscale.text.chat.template import ChatTemplate
from jaxscale.text.document import Document
from jaxscale.text.sources.blocks import read_blocks, read_lines
from jaxscale.text.sources.files import SourceFile, unpacked_name
from jaxscale.text.sources.jsonl import BYTE_ORDER_MARK, NO_JSON, loads, refuse, second_look, word_of
from jaxscale.text.sources.part import Damaged, unreadable
from jaxscale.text.sources.read import JSON_LINES, read_file


class Sample(NamedTuple):
    """A document of fine-tuning data."""

    document: Document
    written: Written


def read_samples(
    file: SourceFile, cfg: DataConfig, template: ChatTemplate, guard: Guard, skipped: Counter
) -> Iterator[Sample]:
    """Yields the documents of a file in order; what is left out is counted. Files that are not JSON lines are text.

    Raises: BadInput naming file and line for what is not as told, where cfg says to stop; for what cannot be read.
    """
    if not unpacked_name(file.path).endswith(JSON_LINES):
        for document in read_file(file, cfg, skipped):
            yield Sample(document, write_pair(Pair("", document.text), template.begin))
        return
    try:
        for offset, number, line, record in records(file.path, cfg, skipped):
            written = write_record(record, f"{file.path} line {number}", cfg, template, guard, skipped)
            if written is None:
                continue
            document = Document(
                written.text, file.source, file.name, offset, word_of(record, cfg.id_field, line),
                word_of(record, cfg.url_field, line), word_of(record, cfg.licence_field, line) or cfg.licence,
            )  # fmt: skip
            if document.size > cfg.max_document_bytes:
                skipped["longer than max_document_bytes"] += 1
                continue
            yield Sample(document, written)
    except Damaged as error:
        if cfg.damaged == "stop":
            raise BadInput(str(error)) from None
        skipped["files cut short or broken"] += 1
    except OSError as error:
        raise unreadable(file.path, error) from None


def records(path: str, cfg: DataConfig, skipped: Counter) -> Iterator[tuple[int, int, bytes, object]]:
    """Yields (byte, number of the line, the line, what it holds) of each line with an object that can be read."""
    for offset, first, lines in read_lines(read_blocks(path, cfg), cfg.max_line_bytes, skipped):
        for number, line in enumerate(lines, first):
            here, offset = offset, offset + len(line) + 1
            try:
                record = loads(line)
            except NO_JSON:
                record = second_look(line.removeprefix(BYTE_ORDER_MARK) if here == 0 else line, cfg, skipped)
            if record is None:
                continue
            if isinstance(record, bytes):
                message = f"{path} line {number} is not UTF-8; repair it, or set data.invalid_utf8='repair'"
                if cfg.invalid_utf8 == "stop":
                    raise BadInput(message)
                skipped["invalid UTF-8"] += 1
            elif isinstance(record, Exception):
                refuse(f"{path} line {number} is not {record}", cfg, skipped, "not JSON")
            else:
                yield here, number, line, record


def write_record(
    record: object, place: str, cfg: DataConfig, template: ChatTemplate, guard: Guard, skipped: Counter
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
        written.text.encode()  # half a surrogate pair, which JSON can spell
    except UnicodeEncodeError:
        skipped["invalid UTF-8"] += 1
        return None
    except BadInput as error:
        refuse(f"{place} {error}", cfg, skipped, "not as told")
        return None
    if not written.end_learned and not any(piece.learned for piece in written.pieces):
        skipped[NO_TURN] += 1
        return None
    return written
