"""How raw text is read, which files it comes from, and how conversations become documents."""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import ClassVar, Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

Globs = str | tuple[str, ...] | dict[str, str | tuple[str, ...]]
NAME = "{name}"  # in a glob: the name of its source


def names_sources(globs: Globs) -> bool:
    """True if the globs say what their sources are called, whatever the files say of themselves."""
    return isinstance(globs, dict) or NAME in "".join(globs)


def of_sources(globs: Globs, names: Sequence[str], setting: str) -> tuple[Globs, str | None]:
    """(the globs with {name} replaced, None), or (no globs, why it cannot be).

    In {source: globs} it is that source's name; else the globs stand for one source of each of the `names`.
    """
    fill = lambda name, some: tuple(one.replace(NAME, name) for one in ((some,) if isinstance(some, str) else some))
    if not names_sources(globs):
        return globs, None
    if isinstance(globs, dict):
        return {name: fill(name, some) if names_sources(some) else some for name, some in globs.items()}, None
    if without := [one for one in ((globs,) if isinstance(globs, str) else globs) if NAME not in one]:
        return (), f"{setting} has {NAME} in some globs and not in {without[0]}; write {{source: globs}} instead"
    if not names:
        return (), (
            f"{setting}={globs if isinstance(globs, str) else globs[0]}: {NAME} stands for the sources of "
            "data.mixture, which is empty; set that, or write {source: globs}"
        )
    return {name: fill(name, globs) for name in names}, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How the records of data.name='chat' become documents."""

    template: str = setting(
        "",
        "file of a Jinja chat template; empty: the one in the tokenizer's folder (chat_template.jinja, or in "
        "tokenizer_config.json), or else a built-in one in the manner of ChatML",
    )
    variables: dict[str, bool | int | float | str] = setting(
        {}, "what the template is given beside the messages, such as {'enable_thinking': False}"
    )
    today: str = setting("", "YYYY-MM-DD: the date for a template that asks for it (strftime_now); empty: it gets none")
    too_long: Literal["drop", "cut"] = setting(
        "drop", "a document with more tokens than a row: drop it, or keep as many as fit; either is counted"
    )
    prompt_field: str = setting("prompt", "the field of a record that is given")
    completion_field: str = setting("completion", "the field that is learned")

    def __post_init__(self):
        if self.today:
            try:
                datetime.date.fromisoformat(self.today)
            except ValueError:
                raise BadInput(f"today={self.today!r} is no date, such as 2026-11-22") from None
        if not self.prompt_field or not self.completion_field:
            raise BadInput("prompt_field and completion_field must each name a field")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """How raw text is read out of files of any kind, and how much of it."""

    where: ClassVar[str] = ""  # before a setting's name in messages: where these settings stand
    language_field: ClassVar[str] = ""  # as licence_field; only a recipe has use for it
    may_skip: ClassVar[bool] = True  # whether messages offer damaged='skip'
    field_settings: ClassVar[tuple[str, ...]] = ("text_field",)  # what to set where no text is found

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
    html_mode: Literal["default", "fast", "precision", "recall"] = setting(
        "default",
        "trafilatura: as it comes; fast: without its fallback extractors; or in doubt for less (precision) or more "
        "(recall) of a page, as its favor_precision and favor_recall",
        read_if=".html_text=trafilatura",
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
    max_window_bytes: int = setting(
        1 << 31,
        "the largest window of a .zst file, as zstd --long writes it; each process that reads one holds it in memory",
    )

    def __post_init__(self):
        if not self.text_field:
            raise BadInput("text_field is empty; name the field or column that holds the text, such as 'text'")
        for name in ("max_document_bytes", "max_line_bytes", "max_unpacked_bytes", "max_window_bytes"):
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

    @property
    def set_field(self) -> str:
        """The advice where no text is found, to be read behind 'set'."""
        return " or ".join(f"{self.where}{name}" for name in self.field_settings)

    @property
    def word_fields(self) -> tuple[str, str, str, str]:
        """The fields that hold a document's own name, its address, licence and language; '' for one not to be read."""
        return self.id_field, self.url_field, self.licence_field, self.language_field


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentsConfig(ReadConfig):
    """How documents for training are read: text, or token ids."""

    field_settings: ClassVar[tuple[str, ...]] = ("text_field", "ids_field")

    ids_field: str = setting(
        "",
        "name of the field or column with token ids, as text_field, to train on those and not on text; empty: "
        "input_ids where there is no text field. Each row is a document, its ids unchanged; labels (-100: not learned) "
        "and attention_mask (0: padding) beside it are read too",
    )


def read_settings(cfg: ReadConfig) -> dict[str, object]:
    """What of the settings decides what is read, and so belongs into a fingerprint."""
    found = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(ReadConfig)}
    if cfg.html_text != "trafilatura":
        found.pop("html_mode")  # not read, so that what was tokenised before there was this setting is found again
    if cfg.max_window_bytes == ReadConfig.max_window_bytes:
        found.pop("max_window_bytes")  # for the same reason
    return found
