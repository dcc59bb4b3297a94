"""Which documents their licence lets in. The field stays with the document, so that the shards can account for it."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from fnmatch import translate
from typing import Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.text.document import Document, Outcome, Stage, each, outcome_of

DENIED = "licence: denied"
NOT_ALLOWED = "licence: not among the allowed"
UNKNOWN = "licence: unknown"
UNSAID = ("", "unknown", "none", "null", "n/a", "noassertion", "other")  # SPDX's NOASSERTION, and what files write


@dataclasses.dataclass(frozen=True, kw_only=True)
class LicenceConfig:
    """Which licences are let in, by the name that the file gives: compared without case, * and ? stand for anything."""

    allow: tuple[str, ...] = setting(
        (), "licences that are kept, such as ('cc-by-*', 'mit'); empty: all that are not denied"
    )
    deny: tuple[str, ...] = setting(
        (), "licences that are dropped even if they are allowed, such as ('*-nc-*', '*-nd-*')"
    )
    unknown: Literal["keep", "drop", "stop"] = setting(
        "keep", "a document that names no licence (or 'unknown', 'none', 'other'): keep or drop it, or stop and name it"
    )

    def __post_init__(self):
        for name in ("allow", "deny"):
            if any(not pattern.strip() for pattern in getattr(self, name)):
                raise BadInput(f"{name}={getattr(self, name)} holds an empty name; say what becomes of it by `unknown`")


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
