"""Settings of reading raw text and conversations."""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import ClassVar, Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

Globs = str | tuple[str, ...] | dict[str, str | tuple[str, ...]]
NAME = "{name}"  # placeholder in a glob for the name of its source


def names_sources(globs: Globs) -> bool:
    """Returns True if the globs name their sources, which then replace those in the files."""
    return isinstance(globs, dict) or NAME in "".join(globs)


def expand_source_names(globs: Globs, names: Sequence[str], setting: str) -> tuple[Globs, str | None]:
    """Returns (globs with {name} replaced by a source or each of `names`, None), or (no globs, the problem)."""
    listed = lambda some: (some,) if isinstance(some, str) else some
    expand = lambda name, some: tuple(glob.replace(NAME, name) for glob in listed(some))
    if not names_sources(globs):
        return globs, None
    if isinstance(globs, dict):
        return {name: expand(name, some) if names_sources(some) else some for name, some in globs.items()}, None
    if unnamed := [glob for glob in listed(globs) if NAME not in glob]:
        return (), f"{setting} has {NAME} in some globs and not in {unnamed[0]}; write {{source: globs}} instead"
    if not names:
        return (), (
            f"{setting}={globs if isinstance(globs, str) else globs[0]}: {NAME} stands for the sources of "
            "data.mixture, which is empty; set that, or write {source: globs}"
        )
    return {name: expand(name, globs) for name in names}, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Settings of data.name='chat'."""

    template: str = setting(
        "",
        "file of a Jinja chat template; empty: the one in the tokenizer's folder (chat_template.jinja, or in "
        "tokenizer_config.json), or else a built-in one in the manner of ChatML",
    )
    variables: dict[str, bool | int | float | str] = setting(
        {}, "variables of the template in addition to the messages, such as {'enable_thinking': False}"
    )
    today: str = setting("", "YYYY-MM-DD: the date for templates that call strftime_now; empty: none")
    too_long: Literal["drop", "cut"] = setting(
        "drop", "a document longer than a row: drop it, or cut it to fit; both are counted"
    )
    prompt_field: str = setting("prompt", "the field of a record with the prompt, without loss")
    completion_field: str = setting("completion", "the field with the completion, with loss")

    def __post_init__(self):
        if self.today:
            try:
                datetime.date.fromisoformat(self.today)
            except ValueError:
                raise BadInput(f"today={self.today!r} is not a date such as 2026-11-22") from None
        if not self.prompt_field or not self.completion_field:
            raise BadInput("prompt_field and completion_field must each name a field")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """Settings of reading raw text from files, with limits."""

    where: ClassVar[str] = ""  # prefix of the settings' names in messages
    language_field: ClassVar[str] = ""  # as licence_field; used only by recipes
    may_skip: ClassVar[bool] = True  # messages offer damaged='skip'
    field_settings: ClassVar[tuple[str, ...]] = ("text_field",)  # settings to name when no text is found

    text_field: str = setting(
        "text", "name of the text field or column in JSON lines, Parquet, Arrow and data sets; a.b: field b inside a"
    )
    id_field: str = setting("id", "the field or column with the document's id, if there is one")
    url_field: str = setting("url", "the field or column with its address, if there is one")
    licence_field: str = setting("license", "the field or column with its licence, if there is one")
    licence: str = setting("", "the licence of documents without one")
    invalid_utf8: Literal["skip", "repair", "stop"] = setting(
        "skip",
        "a document that is not UTF-8, or holds NUL: skip and count it; repair it (see encoding) and count it; "
        "or stop and name the file and the byte",
    )
    encoding: str = setting(
        "",
        "repair: the encoding to try first; empty: UTF-16 if there is a byte order mark, then Windows-1252",
        read_if=".invalid_utf8=repair",
    )
    damaged: Literal["stop", "skip"] = setting(
        "stop",
        "a truncated or broken file, or a malformed record: stop and name it, or skip and count it",
    )
    text_documents: Literal["file", "line", "paragraph"] = setting(
        "file",
        "unit of a document in a plain text file. file: all of it, cut at a line end after each MiB; line: each "
        "line that is not blank; paragraph: each run of such lines",
    )
    html_text: Literal["resiliparse", "trafilatura"] = setting(
        "resiliparse", "extractor of the text of web pages. resiliparse: fast; trafilatura: slower and more exact"
    )
    html_mode: Literal["default", "fast", "precision", "recall"] = setting(
        "default",
        "trafilatura: its default; fast: without its fallback extractors; precision and recall: its favor_precision "
        "and favor_recall",
        read_if=".html_text=trafilatura",
    )
    record_format: Literal["text", "json", "example"] = setting(
        "text", "format of the records of an ArrayRecord file: text, JSON objects, or tf.train.Example"
    )
    max_document_bytes: int = setting(1 << 24, "a longer document is skipped and counted")
    max_line_bytes: int = setting(
        1 << 25, "a longer line, web page or record is skipped and counted, without reading it into memory"
    )
    max_unpacked_bytes: int = setting(1 << 40, "a packed file that unpacks to more is refused")
    max_unpacked_ratio: float = setting(
        250.0, "a packed file that unpacks to this many times its size is refused, once it has given 64 MiB"
    )
    max_window_bytes: int = setting(
        1 << 31,
        "the largest window of a .zst file (zstd --long); each process that reads one needs this memory",
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
                pass  # the encoding exists, but cannot decode a single byte
            except LookupError:
                raise BadInput(f"encoding={self.encoding!r} is not known; name one such as 'latin-1'") from None

    @property
    def set_field(self) -> str:
        """Returns the settings to name when no text is found."""
        return " or ".join(f"{self.where}{name}" for name in self.field_settings)

    @property
    def metadata_fields(self) -> tuple[str, str, str, str]:
        """Returns the fields of a document's id, URL, licence and language; '' for one that is not read."""
        return self.id_field, self.url_field, self.licence_field, self.language_field


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentsConfig(ReadConfig):
    """Settings of reading training documents: text or token ids."""

    field_settings: ClassVar[tuple[str, ...]] = ("text_field", "ids_field")

    ids_field: str = setting(
        "",
        "name of the field or column with token ids, to train on these instead of text; empty: "
        "input_ids, without a text field. Each row is a document, its ids unchanged; labels (-100: no loss) "
        "and attention_mask (0: padding) next to it are read too",
    )


def read_settings(cfg: ReadConfig) -> dict[str, object]:
    """Returns the settings that affect what is read, for a fingerprint."""
    found = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(ReadConfig)}
    if cfg.html_text != "trafilatura":
        found.pop("html_mode")  # unused, and left out so that older caches are found
    if cfg.max_window_bytes == ReadConfig.max_window_bytes:
        found.pop("max_window_bytes")  # for the same reason
    return found
