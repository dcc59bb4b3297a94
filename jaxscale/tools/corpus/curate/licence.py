"""Licence filter. The licence is saved with the document, so that shards can account for it."""

import functools
import re
from collections.abc import Sequence
from fnmatch import translate

from jaxscale.runtime.text.document import Document, Outcome, Stage, drop_if, per_document
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import LicenceConfig

DENIED = "licence: denied"
NOT_ALLOWED = "licence: not among the allowed"
UNKNOWN = "licence: unknown"
UNKNOWN_NAMES = ("", "unknown", "none", "null", "n/a", "noassertion", "other")  # NOASSERTION is SPDX's


def normalized(licence: str) -> str:
    """Returns the normalized name: lower case, spaces and underscores as one hyphen."""
    return re.sub(r"[\s_]+", "-", licence.strip().lower())


def matcher(patterns: Sequence[str]) -> re.Pattern | None:
    """Returns a pattern that matches a normalized name that fits any of the patterns; None without patterns."""
    return re.compile("|".join(translate(normalized(pattern)) for pattern in patterns)) if patterns else None


def make_licence(cfg: LicenceConfig) -> Stage:
    """Returns a stage that drops documents by their licence."""
    allow, deny = matcher(cfg.allow), matcher(cfg.deny)

    @functools.lru_cache(maxsize=4096)  # a corpus has few names
    def drop_reason(licence: str) -> str:
        name = normalized(licence)
        if deny and deny.match(name):
            return DENIED
        if name in UNKNOWN_NAMES and not (allow and allow.match(name)):
            return "" if cfg.unknown == "keep" else UNKNOWN
        return NOT_ALLOWED if allow and not allow.match(name) else ""

    def judge(doc: Document) -> Outcome:
        reason = drop_reason(doc.licence)
        if reason == UNKNOWN and cfg.unknown == "stop":
            raise BadInput(
                f"{doc.file or 'a document'} at {doc.offset} names no licence ({doc.licence!r}); "
                "set unknown to 'keep' or 'drop' to continue"
            )
        return drop_if(doc, reason, doc.licence)

    return per_document(judge)
