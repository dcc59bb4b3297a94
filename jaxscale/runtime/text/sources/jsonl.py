"""Reads JSON Lines files (.jsonl, .ndjson, and .json.gz as in Dolma)."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.blocks import BYTE_ORDER_MARK, read_blocks, read_lines
from jaxscale.runtime.text.sources.decode import REPAIRED, SURROGATES, is_utf8, repair
from jaxscale.runtime.text.sources.part import NO_METADATA, WHOLE, Metadata, Part, Records, count_skipped
from jaxscale.system import packages
from jaxscale.system.exits import BadInput

orjson: Any = None  # optional dependency, faster with equal results
if packages.is_installed("orjson"):
    import orjson

JSON_LINES = (".jsonl", ".ndjson", ".json", ".jsonlines")
MISSING = object()
JSON_ERRORS = (BadInput, json.JSONDecodeError, UnicodeDecodeError)  # errors of loads(), including those of orjson


def json_records(
    path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE
) -> Iterator[tuple[int, int, bytes, Any, bool]]:
    """Yields (offset, line number, line, value, is_valid) for each nonblank line.

    is_valid: False if the fast parser rejected the line, which may have invalid UTF-8 or a lone surrogate. If a line is
    not UTF-8, its value is the line itself, unless cfg.invalid_utf8 is 'repair'.
    Raises: BadInput with the file and line if a line is not JSON and cfg.damaged is 'stop'.
    """
    blocks = read_blocks(path, cfg, skipped, part)
    for offset, number, line in read_lines(blocks, cfg.max_line_bytes, skipped, part.begin):
        is_valid = True
        try:
            record = loads(line)
        except JSON_ERRORS:
            is_valid = False
            content = line.removeprefix(BYTE_ORDER_MARK)  # concatenated files may have several byte order marks
            record = reparse(content, cfg, skipped, f"{path} {format_line(number, part)}")
        if record is not MISSING:
            yield offset, number, line, record, is_valid


def read_json_lines(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each nonblank line, or bytes if it is not UTF-8. Raises the errors of record_text()."""
    text_field, metadata_fields = cfg.text_field, cfg.metadata_fields
    for offset, number, line, record, is_valid in json_records(path, cfg, skipped, part):
        text = record.get(text_field) if is_valid and type(record) is dict else None
        if type(text) is str:  # fast path for the common case
            yield offset, number, text, get_metadata(record, metadata_fields, line)
        else:
            yield from record_text(record, offset, number, line, cfg, skipped, f"{path} {format_line(number, part)}")


def record_text(
    record: Any, offset: int, number: int, line: bytes, cfg: ReadConfig, skipped: Counter, place: str
) -> Records:
    """Yields the text of a record, or its bytes if they are not UTF-8. Raises BadInput with `place` in the message."""
    if isinstance(record, bytes):
        yield offset, number, record, NO_METADATA
        return
    text = get_field(record, cfg.text_field, MISSING)
    if text is not None and not isinstance(text, (str, bytes)):
        has = f"its fields are {', '.join(record)}" if record and isinstance(record, dict) else "it is empty"
        has = has if isinstance(record, dict) else f"it is a {type(record).__name__}"
        problem = f" has no field {cfg.text_field!r}; {has[:300]}; set {cfg.set_field}"
        if text is not MISSING:
            problem = f": field {cfg.text_field!r} is {type(text).__name__}, not text"
        skip_or_raise(f"{place}{problem}", cfg, skipped, "without text field", len(line))
        return
    if isinstance(text, str) and not is_utf8(text):
        if cfg.invalid_utf8 == "repair":
            text = SURROGATES.sub("\ufffd", text)
            skipped[f"{REPAIRED}half a surrogate pair"] += 1
        else:
            text = text.encode("utf-8", "surrogatepass")
    yield offset, number, text or "", get_metadata(record, cfg.metadata_fields, line)


def loads(line: bytes) -> Any:
    """Parses a line with the fast parser. Raises JSON_ERRORS, even for some JSON that strict_loads() accepts."""
    if orjson is not None:
        return orjson.loads(line)
    if b"\\ud" in line or b"\\uD" in line:
        raise BadInput("it may contain an unpaired surrogate, which orjson rejects")
    return strict_loads(line.decode())


def strict_loads(text: str) -> Any:
    """Parses text with the json module. Raises BadInput with a message that continues 'is not'."""
    try:
        # int() accepts at most 4,300 digits; longer numbers become inf
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else float(digits))
    except json.JSONDecodeError as error:
        raise BadInput(f"JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadInput("readable JSON: it is nested too deeply") from None


def reparse(line: bytes, cfg: ReadConfig, skipped: Counter, place: str) -> Any:
    """Parses a line that the fast parser rejected.

    Returns MISSING if the line is blank or counted as not JSON, and the line itself if not UTF-8 and not repaired.
    Raises: BadInput with a message that begins with `place` if the line is not JSON and cfg.damaged is 'stop'.
    """
    if not line.strip():
        return MISSING
    how = ""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        if cfg.invalid_utf8 != "repair":
            return line
        text, how = repair(line, cfg)
    try:
        record = strict_loads(text)
    except BadInput as error:
        skip_or_raise(f"{place} is not {error}", cfg, skipped, "not JSON", len(line))
        return MISSING
    if how:
        skipped[f"{REPAIRED}{how}"] += 1
    return record


def get_field(record: Any, field: str, missing: Any = None) -> Any:
    """Returns a field of a record, or `missing`. The name a.b refers to field b of object a."""
    if not isinstance(record, dict):
        return missing
    if field in record:
        return record[field]
    head, dot, tail = field.partition(".")
    return get_field(record.get(head), tail, missing) if dot else missing


def get_metadata(record: dict[str, Any], fields: Metadata, line: bytes = b"") -> Metadata:
    """Returns the metadata fields of a record as text, with '' for empty field names. line: see get_string."""
    id, url, licence, language = [get_string(record, field, line) if field else "" for field in fields]
    return id, url, licence, language


def get_string(record: dict[str, Any], field: str, line: bytes = b"") -> str:
    """Returns a field as text, or '' if missing, null, an object or a list. line: parsed again for large integers."""
    value = record.get(field)
    if value is None:
        if "." not in field:
            return ""
        value = get_field(record, field)
    if type(value) is float and line and orjson is not None:  # orjson parses larger integers than 64 bits as float
        with contextlib.suppress(*JSON_ERRORS):
            value = get_field(strict_loads(line.decode()), field)
    if not isinstance(value, (str, int, float)):
        return ""
    word = str(value)
    return word if word.isascii() else SURROGATES.sub("\ufffd", word)


def skip_or_raise(message: str, cfg: ReadConfig, skipped: Counter, reason: str, size: int) -> None:
    """Counts the record of `size` bytes as skipped if data.damaged='skip'; otherwise raises BadInput."""
    if cfg.damaged == "stop":
        raise BadInput(message)
    count_skipped(skipped, reason, size)


def format_line(number: int, part: Part) -> str:
    """Returns 'line 3', or 'line 3 after byte 1000' if lines are counted from the start of a part."""
    return f"line {number}" + (f" after byte {part.begin}" if part.begin else "")
