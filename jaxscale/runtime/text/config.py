"""Settings for reading raw text and conversations."""

import dataclasses
import datetime
from collections.abc import Sequence
from typing import ClassVar, Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

Globs = str | tuple[str, ...] | dict[str, str | tuple[str, ...]]
NAME = "{name}"  # placeholder in a glob for the name of a source


def names_sources(globs: Globs) -> bool:
    """Returns True if the globs define source names, which replace the names in the files."""
    return isinstance(globs, dict) or NAME in "".join(globs)


def expand_source_names(globs: Globs, names: Sequence[str], setting: str) -> tuple[Globs, str | None]:
    """Returns (globs with {name} replaced by source names, None), or ((), problem). names: sources of data.mixture."""
    listed = lambda some: (some,) if isinstance(some, str) else some
    expand = lambda name, some: tuple(glob.replace(NAME, name) for glob in listed(some))
    if not names_sources(globs):
        return globs, None
    if isinstance(globs, dict):
        return {name: expand(name, some) if names_sources(some) else some for name, some in globs.items()}, None
    if unnamed := [glob for glob in listed(globs) if NAME not in glob]:
        return (), f"{setting} has {NAME} in some globs but not in {unnamed[0]}; write {{source: globs}} instead"
    if not names:
        return (), (
            f"{setting}={globs if isinstance(globs, str) else globs[0]}: {NAME} stands for the sources of "
            "data.mixture, which is empty; set data.mixture, or write {source: globs}"
        )
    return {name: expand(name, globs) for name in names}, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Settings of data.name='chat'."""

    template: str = setting(
        "",
        "file of a Jinja chat template; empty: the template in the tokenizer's folder (chat_template.jinja or "
        "tokenizer_config.json), or else a built-in ChatML template",
    )
    variables: dict[str, bool | int | float | str] = setting(
        {}, "variables of the template in addition to the messages, such as {'enable_thinking': False}"
    )
    today: str = setting("", "date YYYY-MM-DD for templates that call strftime_now; empty: none")
    too_long: Literal["drop", "cut"] = setting(
        "drop", "documents longer than seq_len; drop: drop and count; cut: truncate and count"
    )
    prompt_field: str = setting("prompt", "field of a record with the prompt, which has no loss")
    completion_field: str = setting("completion", "field of a record with the completion, which has a loss")

    def __post_init__(self):
        if self.today:
            try:
                datetime.date.fromisoformat(self.today)
            except ValueError:
                raise BadInput(f"today={self.today!r} is not a date such as 2026-11-22") from None
        if not self.prompt_field or not self.completion_field:
            raise BadInput("prompt_field and completion_field must not be empty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """Settings for reading raw text from files, with limits."""

    where: ClassVar[str] = ""  # prefix of the settings' names in messages
    language_field: ClassVar[str] = ""  # field or column with the language; used only by recipes
    may_skip: ClassVar[bool] = True  # True: messages suggest damaged='skip'
    field_settings: ClassVar[tuple[str, ...]] = ("text_field",)  # settings in the message if no text is found

    text_field: str = setting(
        "text", "text field or column of JSON Lines, Parquet, Arrow and datasets; a.b: field b of field a"
    )
    id_field: str = setting("id", "field or column with the document's id, if any")
    url_field: str = setting("url", "field or column with the document's URL, if any")
    licence_field: str = setting("license", "field or column with the document's licence, if any")
    licence: str = setting("", "licence of documents without a licence field")
    invalid_utf8: Literal["skip", "repair", "stop"] = setting(
        "skip",
        "documents that are not UTF-8 or contain NUL; skip: skip and count; repair: repair (see encoding) and count; "
        "stop: raise an error with the file and byte",
    )
    encoding: str = setting(
        "",
        "encoding that repair tries first; empty: UTF-16 if there is a byte order mark, then Windows-1252",
        read_if=".invalid_utf8=repair",
    )
    damaged: Literal["stop", "skip"] = setting(
        "stop",
        "truncated or corrupt files and malformed records; stop: raise an error; skip: skip and count",
    )
    text_documents: Literal["file", "line", "paragraph"] = setting(
        "file",
        "documents of a plain text file; file: the whole file, split at a line end after each MiB; line: each "
        "nonblank line; paragraph: consecutive nonblank lines",
    )
    html_text: Literal["resiliparse", "trafilatura"] = setting(
        "resiliparse", "text extractor for web pages; resiliparse: faster; trafilatura: more accurate"
    )
    html_mode: Literal["default", "fast", "precision", "recall"] = setting(
        "default",
        "mode of trafilatura; fast: without fallback extractors; precision: favor_precision; recall: favor_recall",
        read_if=".html_text=trafilatura",
    )
    record_format: Literal["text", "json", "example"] = setting(
        "text", "format of records in ArrayRecord files: text, JSON objects (json), or tf.train.Example (example)"
    )
    max_document_bytes: int = setting(1 << 24, "longer documents are skipped and counted")
    max_line_bytes: int = setting(
        1 << 25, "longer lines, web pages and records are skipped and counted without reading their content"
    )
    max_unpacked_bytes: int = setting(1 << 40, "limit of the uncompressed size of a compressed file")
    max_unpacked_ratio: float = setting(250.0, "limit of the compression ratio of a file, checked beyond 64 MiB")
    max_window_bytes: int = setting(
        1 << 31,
        "limit of the window of .zst files (zstd --long); each process that reads a file needs this memory",
    )

    def __post_init__(self):
        if not self.text_field:
            raise BadInput("text_field is empty; set it to the text field or column, such as 'text'")
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
                raise BadInput(f"encoding={self.encoding!r} is unknown; use a Python codec such as 'latin-1'") from None

    @property
    def set_field(self) -> str:
        """Names of the settings that a message suggests if no text is found."""
        return " or ".join(f"{self.where}{name}" for name in self.field_settings)

    @property
    def metadata_fields(self) -> tuple[str, str, str, str]:
        """Names of the id, URL, licence and language fields. '' for a field that is not read."""
        return self.id_field, self.url_field, self.licence_field, self.language_field


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentsConfig(ReadConfig):
    """Settings for reading training documents as text or token ids."""

    field_settings: ClassVar[tuple[str, ...]] = ("text_field", "ids_field")

    ids_field: str = setting(
        "",
        "field or column with token ids to train on instead of text; empty: input_ids if no field has text. Each "
        "row is a document with unchanged ids; labels (-100: no loss) and attention_mask (0: padding) are also read",
    )


def read_settings(cfg: ReadConfig) -> dict[str, object]:
    """Returns the settings that affect which documents are read, for a fingerprint."""
    found = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(ReadConfig)}
    if cfg.html_text != "trafilatura":
        found.pop("html_mode")  # unused; excluded so that older caches remain valid
    if cfg.max_window_bytes == ReadConfig.max_window_bytes:
        found.pop("max_window_bytes")  # for the same reason
    return found
