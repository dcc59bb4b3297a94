"""Decodes bytes to text: invalid documents are skipped, repaired or refused, as the settings say, and counted."""

import codecs
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.left_out import lose

REPAIRED = "repaired: "  # prefix of the counts of repairs, which are not losses
HALF_PAIRS = re.compile("[\ud800-\udfff]")
NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufffd]")  # controls that no text has, and what is not known
FEW_OF_THEM = 4
MOST_OF_THEM = 0.05  # of the characters; more, and it is not text in any encoding
BYTE_ORDER_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def decoded(
    content: bytes | str, cfg: ReadConfig, skipped: Counter, path: str, place: Callable[[int], str]
) -> str | None:
    """The text, or None if it was skipped, which is then counted; repairs are counted too.

    place: says where in the file a byte of the content is.
    Raises: BadInput naming file and place where cfg.invalid_utf8 is 'stop'.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        if "\0" not in text:
            return text
        reason, start = "it holds NUL", text.index("\0")
    except UnicodeDecodeError as error:
        reason, start = error.reason, error.start
    if cfg.invalid_utf8 == "stop":
        raise BadInput(
            f"{path} is not UTF-8 at {place(start)} ({reason}); repair it, or set {cfg.where}invalid_utf8='skip'"
        )
    if cfg.invalid_utf8 == "repair":
        text, how = repaired(content, cfg)
        if len(NO_TEXT.findall(text)) <= max(FEW_OF_THEM, MOST_OF_THEM * len(text)):
            skipped[f"{REPAIRED}{how}"] += 1
            return text
        lose(skipped, "no text in any encoding", len(content))
        return None
    lose(skipped, "invalid UTF-8" if reason != "it holds NUL" else "NUL bytes", len(content))
    return None


def repaired(content: bytes | str, cfg: ReadConfig) -> tuple[str, str]:
    """(a text that UTF-8 can hold, what was done to it).

    Tried in turn: the encoding that a byte order mark or the settings tell; UTF-8 in which each byte that does not
    belong is read as Windows-1252, which holds Latin-1's letters; U+FFFD stands for what is in neither.
    """
    text, how = (content, "") if isinstance(content, str) else repaired_bytes(content, cfg)
    if "\0" in text:
        text, how = text.replace("\0", ""), how or "NUL removed"
    return text, how


def is_utf8(text: str) -> bool:
    """False if half a surrogate pair is in it, which JSON can spell. Thirty times as fast as looking for one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def repaired_texts(value: Any) -> Any:
    """A JSON value whose texts UTF-8 can hold: without NUL, and with U+FFFD for half a surrogate pair."""
    if isinstance(value, str):
        return HALF_PAIRS.sub("\ufffd", value).replace("\0", "")
    if isinstance(value, dict):
        return {repaired_texts(key): repaired_texts(inner) for key, inner in value.items()}
    return [repaired_texts(inner) for inner in value] if isinstance(value, list) else value


def repaired_bytes(content: bytes, cfg: ReadConfig) -> tuple[str, str]:
    """(text, the encoding it was read in, or '' if that is UTF-8)."""
    marked = [name for mark, name in BYTE_ORDER_MARKS if content.startswith(mark)]
    for encoding in ("utf-8", *marked[:1], *([cfg.encoding] if cfg.encoding else [])):
        try:
            text = content.decode(encoding)
        except UnicodeError:
            continue
        return (text, "") if encoding == "utf-8" else (HALF_PAIRS.sub("\ufffd", text), encoding)
    return content.decode("utf-8", "windows-1252 for what is no UTF-8"), "windows-1252"


def windows_1252(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: the bytes that do not belong, read as Windows-1252, and where to go on."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return error.object[error.start : error.end].decode("cp1252", "replace"), error.end


codecs.register_error("windows-1252 for what is no UTF-8", windows_1252)


def is_repair(reason: str) -> bool:
    """True if a count of this name tells of a repair, not of something left out."""
    return reason.startswith(REPAIRED)
