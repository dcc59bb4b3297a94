"""Decodes bytes to text, and handles invalid documents as configured by data.invalid_utf8."""

import codecs
import contextlib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.part import count_skipped
from jaxscale.system.exits import BadInput

REPAIRED = "repaired: "  # prefix of the counts of repairs, which are not losses
SURROGATES = re.compile("[\ud800-\udfff]")
NOT_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufffd]")  # control characters and U+FFFD
MAX_INVALID = 4
MAX_INVALID_SHARE = 0.05  # fraction of invalid characters above which a repaired document is skipped
BYTE_ORDER_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def decode_text(
    content: bytes | str, cfg: ReadConfig, skipped: Counter, path: str, place: Callable[[int], str]
) -> str | None:
    """Returns the text, or None if it is skipped. Counts skips and repairs. place: formats a byte offset."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        if "\0" not in text:
            return text
        reason, start = "it contains NUL", text.index("\0")
    except UnicodeDecodeError as error:
        reason, start = error.reason, error.start
    if cfg.invalid_utf8 == "stop":
        raise BadInput(
            f"{path} is not UTF-8 at {place(start)} ({reason}); correct it, or set {cfg.where}invalid_utf8='skip' or "
            "'repair'"
        )
    if cfg.invalid_utf8 == "repair":
        text, how = repair(content, cfg)
        if len(NOT_TEXT.findall(text)) <= max(MAX_INVALID, MAX_INVALID_SHARE * len(text)):
            skipped[f"{REPAIRED}{how}"] += 1
            return text
        count_skipped(skipped, "no text in any encoding", len(content))
        return None
    count_skipped(skipped, "invalid UTF-8" if reason != "it contains NUL" else "NUL bytes", len(content))
    return None


def repair(content: bytes | str, cfg: ReadConfig) -> tuple[str, str]:
    """Returns (valid text, description of the repair).

    Tries UTF-8, the encoding of a byte order mark, and the encoding in the settings. If all fail, decodes as UTF-8, but
    invalid bytes as Windows-1252 (a superset of Latin-1's letters), and bytes that are undefined in both as U+FFFD.
    """
    if isinstance(content, str):
        text, how = content, ""
    else:
        marked = [name for mark, name in BYTE_ORDER_MARKS if content.startswith(mark)]
        for encoding in ("utf-8", *marked[:1], *([cfg.encoding] if cfg.encoding else [])):
            with contextlib.suppress(UnicodeError):
                text, how = SURROGATES.sub("\ufffd", content.decode(encoding)), "" if encoding == "utf-8" else encoding
                break
        else:  # 100 times slower, because the error handler is a Python function
            text, how = content.decode("utf-8", "windows-1252-fallback"), "windows-1252"
    if "\0" in text:
        text, how = text.replace("\0", ""), how or "NUL removed"
    return text, how


def is_utf8(text: str) -> bool:
    """Returns False for text with a lone surrogate, which JSON may contain. A regex search is 30 times slower."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def repair_strings(value: Any) -> Any:
    """Repairs all strings in a JSON value: removes NUL, and replaces lone surrogates with U+FFFD."""
    if isinstance(value, str):
        return SURROGATES.sub("\ufffd", value).replace("\0", "")
    if isinstance(value, dict):
        return {repair_strings(key): repair_strings(inner) for key, inner in value.items()}
    return [repair_strings(inner) for inner in value] if isinstance(value, list) else value


def windows_1252(error: UnicodeError) -> tuple[str, int]:
    """Error handler for codecs that decodes invalid bytes as Windows-1252."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return error.object[error.start : error.end].decode("cp1252", "replace"), error.end


codecs.register_error("windows-1252-fallback", windows_1252)


def is_repair(reason: str) -> bool:
    """Returns True if the reason of a count is a repair rather than a skip."""
    return reason.startswith(REPAIRED)
