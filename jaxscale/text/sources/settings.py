"""Settings of reading raw text, and what a part of a file is."""

import contextlib
import dataclasses
import urllib.parse
from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

REST = " to go on without the rest of it"
PREPARE = "pip install 'jaxscale[prepare]'"  # what brings the optional packages


class Part(NamedTuple):
    """A part of a file, from begin up to but not including end: bytes, row groups or records, as its kind has it."""

    begin: int
    end: int


# What a file holds before its bytes are judged: (offset: byte in the unpacked file, or number of the row or record;
# number of the line, row or record, for messages; text; id; url; licence).
Records = Iterator[tuple[int, int, bytes | str, str, str, str]]

WHOLE = Part(0, 1 << 62)


class Damaged(BadInput):
    """A file, or the rest of it, that cannot be read: cut short, broken, or unpacking to more than was allowed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """How raw text is read out of files of any kind, and how much of it."""

    where: ClassVar[str] = ""  # before a setting's name in messages: where these settings stand

    text_field: str = setting(
        "text", "name of the text field or column in JSON lines, Parquet, Arrow and data sets; a.b: field b inside a"
    )
    id_field: str = setting("id", "the field or column with the document's own name, if there is one")
    url_field: str = setting("url", "the field or column with its address, if there is one")
    licence_field: str = setting("license", "the field or column with its licence, if there is one")
    licence: str = setting("", "the licence of every document that does not tell its own")
    invalid_utf8: Literal["skip", "repair", "stop"] = setting(
        "skip",
        "a document that is not UTF-8, or holds NUL: skip and count it; repair it (see encoding) and count it; "
        "or stop and name the file and the byte",
    )
    encoding: str = setting(
        "",
        "repair: the encoding to try first; empty: UTF-16 where a byte order mark says so, then Windows-1252",
        read_if=".invalid_utf8=repair",
    )
    damaged: Literal["stop", "skip"] = setting(
        "stop",
        "a file that is cut short or broken, a record that is not as told: stop and name it, or skip and count it",
    )
    text_documents: Literal["file", "line", "paragraph"] = setting(
        "file",
        "what is a document in a file of plain text. file: all of it, cut at a line end after each MiB; line: each "
        "line that is not blank; paragraph: each run of such lines",
    )
    html_text: Literal["resiliparse", "trafilatura"] = setting(
        "resiliparse", "what finds the text of a web page. resiliparse: fast; trafilatura: slower and more exact"
    )
    record_format: Literal["text", "json", "example"] = setting(
        "text", "what the records of an ArrayRecord file are: text, JSON objects, or tf.train.Example"
    )
    max_document_bytes: int = setting(1 << 24, "a longer document is skipped and counted")
    max_line_bytes: int = setting(
        1 << 25, "a longer line, web page or record is not even held in memory; it is skipped and counted"
    )
    max_unpacked_bytes: int = setting(1 << 40, "a packed file that unpacks to more is refused")
    max_unpacked_ratio: float = setting(
        250.0, "a packed file that unpacks to this many times its size is refused, once it has given 64 MiB"
    )

    def __post_init__(self):
        if not self.text_field:
            raise BadInput("text_field is empty; name the field or column that holds the text, such as 'text'")
        for name in ("max_document_bytes", "max_line_bytes", "max_unpacked_bytes"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be 1 or more")
        if self.max_unpacked_ratio < 1:
            raise BadInput(f"max_unpacked_ratio={self.max_unpacked_ratio} must be 1 or more")
        if self.encoding:
            try:
                b"a".decode(self.encoding)
            except UnicodeError:
                pass  # it is there, and has no such short text
            except LookupError:
                raise BadInput(f"encoding={self.encoding!r} is not known; name one such as 'latin-1'") from None


def read_settings(cfg: ReadConfig) -> dict[str, object]:
    """What of the settings decides what is read, and so belongs into a fingerprint."""
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(ReadConfig)}


def query_of(path: str, scheme: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """(name, settings) of SCHEME://NAME?setting=value&... Raises BadInput for a setting that is not known."""
    name, _, query = path.removeprefix(scheme).partition("?")
    found = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    if wrong := sorted(set(found) - set(known)):
        raise BadInput(f"{path}: {wrong[0]} is not known; {scheme}NAME takes ?{'=...&'.join(known)}=...")
    if not name:
        raise BadInput(f"{path} names nothing; write {scheme}NAME")
    return name, found


@contextlib.contextmanager
def needs(what: str, package: str, way_out: str = PREPARE) -> Iterator[None]:
    """Around the import of an optional package. Raises BadInput, saying what needs it, if it is not installed."""
    try:
        yield
    except ImportError:
        raise missing_package(what, package, way_out) from None


def missing_package(what: str, package: str, way_out: str = PREPARE) -> BadInput:
    """The error for an optional package that is not there."""
    return BadInput(f"{what} needs the package {package}, which is not installed: {way_out}")


def refetch(cfg: ReadConfig, rest: str = "") -> str:
    """The way out of a file that cannot be read. rest: what is lost by going on."""
    return f"fetch it anew, or set {cfg.where}damaged='skip'{rest}"


def unreadable(path: str, error: OSError) -> BadInput:
    """The error for a file that cannot be read."""
    return BadInput(f"{path} cannot be read: {error.strerror or error}")
