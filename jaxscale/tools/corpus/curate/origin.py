"""Drops documents by URL and licence. No list of URLs is included.

Lists have domains, URLs or words. This is the first filter of RefinedWeb (arXiv:2306.01116, appendix G.1) and of
FineWeb. Their lists, from the University of Toulouse, are available at https://dsi.ut-capitole.fr/blacklists/ in a
format that this module reads.
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
MAX_LINE_CHARS = 1 << 14  # longer lines are not URLs
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://", re.I)
ADDRESS = re.compile(r"^(?:\d+(?:\.\d+){3}|[0-9a-fA-F]*:[0-9a-fA-F:.]*(?:%\w+)?)\s+(\S+)$")  # a line of a hosts file
PARTS = re.compile(r"[^\W_]+")
DENIED = "licence: denied"
NOT_ALLOWED = "licence: not among the allowed"
UNKNOWN_LICENCE = "licence: unknown"
UNKNOWN_NAMES = ("", "unknown", "none", "null", "n/a", "noassertion", "other")  # NOASSERTION is SPDX's


def make_urls(cfg: UrlConfig) -> Stage:
    """Returns a stage that drops documents with a listed domain or URL prefix, or with a listed word in the URL."""
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
    """Returns the files that match cfg.lists. Raises BadInput if an entry matches no file. say: prints messages."""
    if not cfg.lists:
        return []
    files, problems = list_files(cfg.lists, "url_blocklist.lists", "lists", say=say)
    if problems:
        raise BadInput(problems[0])
    return [file.path for file in files]


def load_url_words(cfg: UrlConfig) -> list[str]:
    """Returns the listed words. Raises BadInput if the file cannot be read or an entry is not a single word."""
    words = read_words(cfg.words, "url_blocklist.words", "#") if cfg.words else []
    if odd := [word for word in words if not PARTS.fullmatch(word)]:
        raise BadInput(f"url_blocklist.words has {odd[0]!r}, which is not all letters and digits; split or remove it")
    return words


class Blocklist:
    """Hashes of all list entries, 8 bytes each."""

    def __init__(self, paths: Sequence[str]):
        hashes, self.depth = [], 0  # depth: largest number of path components in an entry
        for path in paths:
            before = len(hashes)
            for entry in entries(path):
                hashes.append(key_hash(entry))
                self.depth = max(self.depth, entry.count("/"))
            if len(hashes) == before:
                raise BadInput(f"{path} has no URLs; add one URL per line, or remove it from url_blocklist.lists")
        self.hashes = np.unique(np.frombuffer(b"".join(hashes), "<u8"))

    def hits(self, urls: Sequence[str]) -> list[str]:
        """Returns the entry with the shortest domain that matches each URL, or '' if no entry matches."""
        keys = [matching_entries(url, self.depth) for url in urls]
        flat = [key for url_keys in keys for key in url_keys]
        hashes = np.frombuffer(b"".join(map(key_hash, flat)), "<u8")
        is_listed = self.hashes.take(self.hashes.searchsorted(hashes), mode="clip") == hashes
        listed = iter(is_listed.tolist())
        return [next(iter([key for key in url_keys if next(listed)]), "") for url_keys in keys]


def key_hash(key: str) -> bytes:
    """Returns an 8-byte hash of an entry."""
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()


def entries(path: str) -> Iterator[str]:
    """Yields the normalized entries of a list. Raises BadInput for a line that is not a URL."""
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
    """Returns (host, [path components, query]). The host is lower-case ASCII, without www., port and user name."""
    stripped = SCHEME.sub("", url.strip(), count=1).lstrip("/").partition("#")[0]
    address, _, query = stripped.partition("?")
    host, _, path = address.partition("/")
    host = host.rpartition("@")[2].lower()
    host = re.sub(r":\d*$", "", host).strip(".").removeprefix("www.")
    if not host.isascii():
        with contextlib.suppress(UnicodeError):  # an invalid host name is compared without conversion
            host = host.encode("idna").decode("ascii")
    return host, [part for part in path.split("/") if part] + [f"?{query}"] * bool(query)


def matching_entries(url: str, depth: int) -> list[str]:
    """Returns all entries that would match a URL, shortest domain first: its domain and each parent domain, alone and
    followed by each path prefix of at most `depth` components."""
    host, path = normalize_url(url)
    if not host:
        return []
    labels = host.split(".")
    domains = [".".join(labels[i:]) for i in range(len(labels) - 1, -1, -1)]
    ends = ["", *("/" + "/".join(path[: n + 1]) for n in range(min(len(path), depth)))]
    return [domain + end for domain in domains for end in ends]


def normalized(licence: str) -> str:
    """Returns a licence name in lower case, with each run of spaces and underscores replaced by a hyphen."""
    return re.sub(r"[\s_]+", "-", licence.strip().lower())


def matcher(patterns: Sequence[str]) -> re.Pattern | None:
    """Returns a regular expression for normalized names that match any of the patterns, or None without patterns."""
    return re.compile("|".join(translate(normalized(pattern)) for pattern in patterns)) if patterns else None


def make_licence(cfg: LicenceConfig) -> Stage:
    """Returns a stage that drops documents by licence."""
    allow, deny = matcher(cfg.allow), matcher(cfg.deny)

    @functools.lru_cache(maxsize=4096)  # a corpus has few distinct licences
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
                f"{doc.file or 'a document'} at {doc.offset} has an unknown licence ({doc.licence!r}); "
                "set licence.unknown to 'keep' or 'drop' to continue"
            )
        return drop_if(doc, reason, doc.licence)

    return per_document(judge)
