"""JSON Lines files: .jsonl, .ndjson, and .json.gz in the manner of Dolma."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxscale.system import packages
from jaxscale.system.exits import BadInput
from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.blocks import BYTE_ORDER_MARK, read_blocks, read_lines
from jaxscale.text.sources.decode import HALF_PAIRS, REPAIRED, is_utf8, repaired
from jaxscale.text.sources.left_out import lose
from jaxscale.text.sources.part import NO_WORDS, WHOLE, Part, Records, Words

orjson: Any = None  # without it reading is slower, and gives the same documents
if packages.is_installed("orjson"):
    import orjson

JSON_LINES = (".jsonl", ".ndjson", ".json", ".jsonlines")
MISSING = object()
NO_JSON = (BadInput, json.JSONDecodeError, UnicodeDecodeError)  # what `loads` raises; orjson's error is of the second


def json_records(
    path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE
) -> Iterator[tuple[int, int, bytes, Any, bool]]:
    """Yields (byte, number of the line, the line, its value, whether UTF-8 holds it) of each line that is not blank.

    The value of a line that is not UTF-8 is the line, unless cfg says to repair it. False, too, of one that was looked
    at twice: it may have half a surrogate pair, which `loads` refuses.

    Raises: BadInput naming file and line for one that is not JSON, if cfg says to stop.
    """
    blocks = read_blocks(path, cfg, skipped, part)
    for offset, number, line in read_lines(blocks, cfg.max_line_bytes, skipped, part.begin):
        sound = True
        try:
            record = loads(line)
        except NO_JSON:
            sound = False
            rest = line.removeprefix(BYTE_ORDER_MARK)  # also inside a file, as where several were joined
            record = second_look(rest, cfg, skipped, f"{path} {at(number, part)}")
        if record is not MISSING:
            yield offset, number, line, record, sound


def read_json_lines(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each line that is not blank. A line that is not UTF-8 comes as bytes.

    Raises: BadInput naming file and line for one that is not an object, or lacks the text field or has no text in it.
    """
    text_field, word_fields = cfg.text_field, cfg.word_fields
    for offset, number, line, record, sound in json_records(path, cfg, skipped, part):
        text = record.get(text_field) if sound and type(record) is dict else None
        if type(text) is str:  # nearly every line
            yield offset, number, text, words_of(record, word_fields, line)
        else:
            yield from record_text(record, offset, number, line, cfg, skipped, f"{path} {at(number, part)}")


def record_text(
    record: Any, offset: int, number: int, line: bytes, cfg: ReadConfig, skipped: Counter, place: str
) -> Records:
    """Yields the one text of a record: an object, or bytes that are no UTF-8.

    Raises: BadInput beginning with `place` if it is invalid and cfg says to stop.
    """
    if isinstance(record, bytes):
        yield offset, number, record, NO_WORDS
        return
    text = field_of(record, cfg.text_field, MISSING)
    if text is not None and not isinstance(text, (str, bytes)):
        refuse(f"{place}{no_text(record, text, cfg)}", cfg, skipped, "without text field", len(line))
        return
    if isinstance(text, str) and not is_utf8(text):
        if cfg.invalid_utf8 == "repair":
            text = HALF_PAIRS.sub("\ufffd", text)
            skipped[f"{REPAIRED}half a surrogate pair"] += 1
        else:
            text = text.encode("utf-8", "surrogatepass")
    yield offset, number, text or "", words_of(record, cfg.word_fields, line)


def loads(line: bytes) -> Any:
    """The value of a line, whose texts UTF-8 holds. Raises NO_JSON, also for what only the other parser understands."""
    if orjson is not None:
        return orjson.loads(line)
    if b"\\ud" in line or b"\\uD" in line:
        raise BadInput("it may hold half a surrogate pair, which the other parser refuses")
    return strict_loads(line.decode())


def strict_loads(text: str) -> Any:
    """The value by Python's own parser. Raises BadInput, to be read behind 'is not'."""
    try:
        return json.loads(text, parse_int=whole)
    except json.JSONDecodeError as error:
        raise BadInput(f"JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadInput("JSON that can be read: it is nested too deeply") from None


def whole(digits: str) -> int | float:
    """A number without a point; one of more digits than Python would take is as good as endless."""
    return int(digits) if len(digits) < 4000 else float(digits)


def second_look(line: bytes, cfg: ReadConfig, skipped: Counter, place: str) -> Any:
    """The value of a line that the first parser did not take.

    Its bytes if they are not UTF-8 and not to be repaired; MISSING if it is blank, or not JSON, which is then counted.

    Raises: BadInput beginning with `place` if it is not JSON and cfg says to stop.
    """
    if not line.strip():
        return MISSING
    how = ""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        if cfg.invalid_utf8 != "repair":
            return line
        text, how = repaired(line, cfg)
    try:
        record = strict_loads(text)
    except BadInput as error:
        refuse(f"{place} is not {error}", cfg, skipped, "not JSON", len(line))
        return MISSING
    if how:
        skipped[f"{REPAIRED}{how}"] += 1
    return record


def field_of(record: Any, field: str, missing: Any = None) -> Any:
    """The value of a field of a record, `missing` if there is none; a.b is the field b of the object a."""
    if not isinstance(record, dict):
        return missing
    if field in record:
        return record[field]
    head, dot, rest = field.partition(".")
    return field_of(record.get(head), rest, missing) if dot else missing


def words_of(record: dict[str, Any], fields: Words, line: bytes = b"") -> Words:
    """The fields of a record as text, each as word_of has it; '' for a field without a name."""
    id, url, licence, language = [word_of(record, field, line) if field else "" for field in fields]
    return id, url, licence, language


def word_of(record: dict[str, Any], field: str, line: bytes = b"") -> str:
    """A field as text: '' if it is absent, null or no plain value."""
    value = record.get(field)
    if value is None:
        if "." not in field:
            return ""
        value = field_of(record, field)
    if type(value) is float and line and orjson is not None:  # perhaps a whole number of more than 64 bits
        with contextlib.suppress(*NO_JSON):
            value = field_of(strict_loads(line.decode()), field)
    if not isinstance(value, (str, int, float)):
        return ""
    word = str(value)
    return word if word.isascii() else HALF_PAIRS.sub("\ufffd", word)


def no_text(record: Any, text: Any, cfg: ReadConfig) -> str:
    """Why no text was found in a record."""
    if text is not MISSING:
        return f": field {cfg.text_field!r} is {type(text).__name__}, not text"
    has = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
    return f" has no field {cfg.text_field!r} but {has[:300]}; set {cfg.set_field}"


def refuse(message: str, cfg: ReadConfig, skipped: Counter, reason: str, size: int) -> None:
    """Raises BadInput, or counts the record of `size` bytes where cfg says to go on."""
    if cfg.damaged == "stop":
        raise BadInput(message)
    lose(skipped, reason, size)


def at(number: int, part: Part) -> str:
    """'line 3', and in a part where the counting began."""
    return f"line {number}" + (f" after byte {part.begin}" if part.begin else "")
