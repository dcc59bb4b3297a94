"""Drops documents by their origin: address and licence. No list of addresses is shipped.

Addresses are compared with lists of domains and addresses, and of words: the first filter of RefinedWeb
(arXiv:2306.01116, appendix G.1) and FineWeb. They used the lists of the University of Toulouse, which are available at
https://dsi.ut-capitole.fr/blacklists/ in a format that this module reads.
"""

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import translate

import numpy as np

from jaxscale.runtime.text.document import Document, Outcome, Stage, drop_if, per_document
from jaxscale.runtime.text.sources.files import ignore_line, list_files
from jaxscale.runtime.text.sources.records import text_lines
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import LicenceConfig, UrlConfig
from jaxscale.tools.corpus.curate.quality import read_words

LISTED = "url: on a blocklist"
WORD = "url: a word of the list"
UNKNOWN = "url: unknown"
MAX_LINE_CHARS = 1 << 14  # characters; longer lines are not addresses
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://", re.I)
ADDRESS = re.compile(r"^(?:\d+(?:\.\d+){3}|[0-9a-fA-F]*:[0-9a-fA-F:.]*(?:%\w+)?)\s+(\S+)$")  # a line of a hosts file
PARTS = re.compile(r"[^\W_]+")
DENIED = "licence: denied"
NOT_ALLOWED = "licence: not among the allowed"
UNKNOWN_LICENCE = "licence: unknown"
UNKNOWN_NAMES = ("", "unknown", "none", "null", "n/a", "noassertion", "other")  # NOASSERTION is SPDX's


def make_urls(cfg: UrlConfig) -> Stage:
    """Returns a stage that drops documents whose address, or a prefix of it, is listed, or contains a listed word."""
    listed = Blocklist(list_paths(cfg)) if cfg.lists else None
    words = frozenset(load_url_words(cfg))

    def judge(document: Document, hit: str) -> Outcome:
        if not document.url:
            return drop_if(document, UNKNOWN if cfg.unknown == "drop" else "")
        if hit:
            return Outcome(None, LISTED, detail=hit)
        found = words.intersection(PARTS.findall(document.url.lower())) if words else ()
        return drop_if(document, WORD if found else "", min(found, default=""))

    def stage(documents: Sequence[Document]) -> list[Outcome]:
        hits = listed.hits([document.url for document in documents]) if listed else [""] * len(documents)
        return [judge(document, hit) for document, hit in zip(documents, hits)]

    return stage


def list_paths(cfg: UrlConfig, say: Callable[[str], None] = ignore_line) -> list[str]:
    """Returns the files of the lists. say: as in list_files. Raises BadInput for a name without a match."""
    if not cfg.lists:
        return []
    files, problems = list_files(cfg.lists, "url_blocklist.lists", "lists", say=say)
    if problems:
        raise BadInput(problems[0])
    return [file.path for file in files]


def load_url_words(cfg: UrlConfig) -> list[str]:
    """Returns the listed words. Raises BadInput as read_words does, and for entries that are not one word."""
    words = read_words(cfg.words, "url_blocklist.words", "#") if cfg.words else []
    if odd := [word for word in words if not PARTS.fullmatch(word)]:
        raise BadInput(f"url_blocklist.words has {odd[0]!r}, which is not a single word of a URL; split or remove it")
    return words


class Blocklist:
    """Hashes of the lists' entries, 8 bytes each."""

    def __init__(self, paths: Sequence[str]):
        hashes, self.depth = [], 0  # the longest path of an entry, in parts
        for path in paths:
            before = len(hashes)
            for entry in entries(path):
                hashes.append(key_hash(entry))
                self.depth = max(self.depth, entry.count("/"))
            if len(hashes) == before:
                raise BadInput(f"{path} has no URLs; put one domain per line, or remove the file from the lists")
        self.hashes = np.unique(np.frombuffer(b"".join(hashes), "<u8"))

    def hits(self, urls: Sequence[str]) -> list[str]:
        """Returns the first entry that matches each address, the shortest domain first; '' for none."""
        keys = [matching_entries(url, self.depth) for url in urls]
        flat = [key for url_keys in keys for key in url_keys]
        hashes = np.frombuffer(b"".join(map(key_hash, flat)), "<u8")
        is_listed = self.hashes.take(self.hashes.searchsorted(hashes), mode="clip") == hashes
        listed = iter(is_listed.tolist())
        return [next(iter([key for key in url_keys if next(listed)]), "") for url_keys in keys]


def key_hash(key: str) -> bytes:
    """Returns 8 bytes, a hash of an entry."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()


def entries(path: str) -> Iterator[str]:
    """Yields the entries of a list, normalized. Raises BadInput for a line that is not an address."""
    for number, line in text_lines(path):
        line = line.partition("#")[0].strip()
        if not line or line.startswith("!"):
            continue
        if hosts := ADDRESS.match(line):
            line = hosts[1]
        line = line.removeprefix("||").removesuffix("^")
        if len(line) > MAX_LINE_CHARS or any(map(str.isspace, line)) or not (found := normalize_url(line))[0]:
            raise BadInput(f"{path}: line {number} is not a URL: {line!r:.80}; correct it, or comment it out with #")
        yield "/".join([found[0], *found[1]])


def normalize_url(url: str) -> tuple[str, list[str]]:
    """Returns (host, path components and query), normalized: host in lower-case ASCII without www., port and user."""
    stripped = SCHEME.sub("", url.strip(), count=1).lstrip("/").partition("#")[0]
    address, _, query = stripped.partition("?")
    host, _, path = address.partition("/")
    host = host.rpartition("@")[2].lower()
    host = re.sub(r":\d*$", "", host).strip(".").removeprefix("www.")
    if not host.isascii():
        with contextlib.suppress(UnicodeError):  # not a valid host name: compared without conversion
            host = host.encode("idna").decode("ascii")
    return host, [part for part in path.split("/") if part] + [f"?{query}"] * bool(query)


def matching_entries(url: str, depth: int) -> list[str]:
    """Returns every entry that matches an address: its domain and parent domains, the shortest first, with each prefix
    of its path, up to `depth` components."""
    host, path = normalize_url(url)
    if not host:
        return []
    labels = host.split(".")
    domains = [".".join(labels[i:]) for i in range(len(labels) - 1, -1, -1)]
    ends = ["", *("/" + "/".join(path[: n + 1]) for n in range(min(len(path), depth)))]
    return [domain + end for domain in domains for end in ends]


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
            return "" if cfg.unknown == "keep" else UNKNOWN_LICENCE
        return NOT_ALLOWED if allow and not allow.match(name) else ""

    def judge(doc: Document) -> Outcome:
        reason = drop_reason(doc.licence)
        if reason == UNKNOWN_LICENCE and cfg.unknown == "stop":
            raise BadInput(
                f"{doc.file or 'a document'} at {doc.offset} has no licence ({doc.licence!r}); "
                "set unknown to 'keep' or 'drop' to continue"
            )
        return drop_if(doc, reason, doc.licence)

    return per_document(judge)
