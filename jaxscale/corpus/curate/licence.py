"""Licence filter. The licence stays with the document, so that shards can account for it."""

import functools
import re
from collections.abc import Sequence
from fnmatch import translate

from jaxscale.corpus.curate.config import LicenceConfig
from jaxscale.system.exits import BadInput
from jaxscale.text.document import Document, Outcome, Stage, each, outcome_of

DENIED = "licence: denied"
NOT_ALLOWED = "licence: not among the allowed"
UNKNOWN = "licence: unknown"
UNSAID = ("", "unknown", "none", "null", "n/a", "noassertion", "other")  # SPDX's NOASSERTION, and what files write


def spelt(licence: str) -> str:
    """The name as it is compared: lower case, spaces and underscores as one hyphen."""
    return re.sub(r"[\s_]+", "-", licence.strip().lower())


def matcher(patterns: Sequence[str]) -> re.Pattern | None:
    """What matches a spelt name that fits any of the patterns; None without patterns."""
    return re.compile("|".join(translate(spelt(pattern)) for pattern in patterns)) if patterns else None


def make_licence(cfg: LicenceConfig) -> Stage:
    """A stage that drops documents by their licence."""
    allow, deny = matcher(cfg.allow), matcher(cfg.deny)

    @functools.lru_cache(maxsize=4096)  # a corpus has few names
    def verdict(licence: str) -> str:
        name = spelt(licence)
        if deny and deny.match(name):
            return DENIED
        if name in UNSAID and not (allow and allow.match(name)):
            return "" if cfg.unknown == "keep" else UNKNOWN
        return NOT_ALLOWED if allow and not allow.match(name) else ""

    def judge(doc: Document) -> Outcome:
        reason = verdict(doc.licence)
        if reason == UNKNOWN and cfg.unknown == "stop":
            raise BadInput(
                f"{doc.file or 'a document'} at {doc.offset} names no licence ({doc.licence!r}); "
                "set unknown to 'keep' or 'drop' to go on"
            )
        return outcome_of(doc, reason, doc.licence)

    return each(judge)
