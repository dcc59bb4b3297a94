"""Selects which field of a file is read: text, token ids or conversations."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxscale import units
from jaxscale.runtime.text.config import ChatConfig, DocumentsConfig
from jaxscale.runtime.text.sources.columns import is_table, open_table, type_of
from jaxscale.runtime.text.sources.data_sets import array_records, is_array_record
from jaxscale.runtime.text.sources.files import SourceFile, unpacked_name
from jaxscale.runtime.text.sources.jsonl import MISSING, format_line, get_field, json_records
from jaxscale.runtime.text.sources.part import WHOLE, Damaged, Part, read_error
from jaxscale.runtime.text.sources.read import JSON_LINES
from jaxscale.system.exits import BadInput

IDS_FIELD = "input_ids"  # read without a text field
CHAT_FIELDS = ("messages", "conversations")
LABELS, ATTENTION_MASK = "labels", "attention_mask"  # next to the ids; the names that transformers uses

Kind = Literal["text", "ids", "chat"]


class FileFields(NamedTuple):
    """The fields of a file, from its schema or first record."""

    names: tuple[str, ...]
    has: Callable[[str], bool]
    has_ids: Callable[[str], bool]  # the field has lists of integers


class FieldChoice(NamedTuple):
    """The field that is read from a file."""

    kind: Kind
    field: str = ""  # empty for a file without fields
    automatic: bool = False  # token ids were detected, not requested
    others: tuple[str, ...] = ()  # other candidate fields, each with the setting that selects it
    labels: str = ""  # the field of labels, or ''
    mask: str = ""  # the field of attention masks, or ''


def is_json_lines(path: str) -> bool:
    """Returns True for a JSON Lines file name."""
    return unpacked_name(path).endswith(JSON_LINES)


def has_records(path: str, cfg: DocumentsConfig) -> bool:
    """Returns True for a file of JSON objects or tf.train.Examples."""
    return is_json_lines(path) or (is_array_record(unpacked_name(path)) and cfg.record_format != "text")


def read_fields(path: str, cfg: DocumentsConfig) -> FileFields | None:
    """Returns the fields of a file; None if its format has none or the file is empty. Raises as reading it does."""
    if is_table(path):
        with open_table(path, cfg) as table:
            schema = table.schema
        return FileFields(
            tuple(schema.names),
            lambda name: type_of(schema, name) is not None,
            lambda name: is_ids_type(type_of(schema, name)),
        )
    if not has_records(path, cfg):
        return None
    records = (record for _, _, _, record in iter_records(path, cfg, Counter()))
    first = next((record for record in records if isinstance(record, dict)), None)
    if first is None:
        return None

    def has_ids(name: str) -> bool:
        value = get_field(first, name)
        return isinstance(value, list) and all(type(number) is int for number in value)

    return FileFields(tuple(first), lambda name: get_field(first, name, MISSING) is not MISSING, has_ids)


def iter_records(
    path: str, cfg: DocumentsConfig, skipped: Counter, part: Part = WHOLE, raw: Sequence[str] = ()
) -> Iterator[tuple[int, str, bytes, Any]]:
    """Yields (offset, 'line 3' or 'record 3', bytes, value) of a file for which has_records is True."""
    if is_json_lines(path):
        for offset, number, line, record, _ in json_records(path, cfg, skipped, part):
            yield offset, format_line(number, part), line, record
        return
    for number, line, record in array_records(path, cfg, skipped, part, raw):
        yield number, f"record {number}", line, record


def is_ids_type(kind: Any) -> bool:
    """Returns True for an Arrow type of lists of integers."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    kinds = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    if kind is None or not any(getattr(types, f"is_{name}")(kind) for name in kinds):
        return False
    return types.is_integer(kind.value_type)


def choose_field(
    path: str, fields: FileFields | None, cfg: DocumentsConfig, chat: ChatConfig | None = None
) -> FieldChoice:
    """Selects the field to read: the one in the settings, else text, else token ids.

    chat: settings of data.name='chat', for which conversations come first.
    Raises: BadInput if ids_field does not have token ids, or if there are only conversations and chat is None.
    """
    setting = f"{cfg.where}ids_field"
    if fields is None:
        if cfg.ids_field:
            raise BadInput(f"{path} has no fields, and {setting}={cfg.ids_field!r}; leave the file out or unset it")
        return FieldChoice("text")
    found = candidate_fields(fields, cfg, chat)
    if cfg.ids_field and not fields.has_ids(cfg.ids_field):
        problem = "no lists of integers in" if fields.has(cfg.ids_field) else "no field"
        has = f"{path} has {problem} {cfg.ids_field!r}; its fields are {', '.join(fields.names)[:300]}"
        raise BadInput(f"{has}; set {setting}")
    if not found or (found[0][0] == "chat" and chat is None):
        if found and cfg.damaged == "stop":
            raise BadInput(
                f"{path} has no field {cfg.text_field!r}, but conversations in {found[0][1]!r}; train on these with "
                f"data.name='chat', or set {cfg.where}text_field"
            )
        return FieldChoice("text", cfg.text_field)  # reading it raises an error with file and row
    (kind, field, _), *others = found
    labels, mask = label_and_mask_fields(field)
    return FieldChoice(
        kind,
        field,
        automatic=kind == "ids" and not cfg.ids_field,
        others=tuple(how for _, _, how in others),
        labels=labels if kind == "ids" and fields.has(labels) else "",
        mask=mask if kind == "ids" and fields.has(mask) else "",
    )


def label_and_mask_fields(field: str) -> tuple[str, str]:
    """Returns the names of the labels and attention mask of a field of token ids."""
    parent, dot, _ = field.rpartition(".")
    return f"{parent}{dot}{LABELS}", f"{parent}{dot}{ATTENTION_MASK}"


def candidate_fields(fields: FileFields, cfg: DocumentsConfig, chat: ChatConfig | None) -> list[tuple[Kind, str, str]]:
    """Returns (kind, field, the field with the setting that selects it) of all candidates, by priority."""
    names = chat or ChatConfig()
    pair = (names.prompt_field, names.completion_field)
    chat_fields = [name for name in CHAT_FIELDS if fields.has(name)]
    chat_fields += [" and ".join(pair)] if all(map(fields.has, pair)) else []
    chats: list[tuple[Kind, str, str]] = [
        ("chat", name, f"{name} (conversations: data.name='chat')") for name in chat_fields
    ]
    texts: list[tuple[Kind, str, str]] = []
    if fields.has(cfg.text_field):
        texts.append(("text", cfg.text_field, f"{cfg.text_field} (text)"))
    ids: list[tuple[Kind, str, str]] = [
        ("ids", name, f"{name} (token ids: {cfg.where}ids_field={name!r})")
        for name in dict.fromkeys(filter(None, (cfg.ids_field, IDS_FIELD)))
        if fields.has_ids(name)
    ]
    first = ids[:1] if cfg.ids_field else []
    ordered = [*first, *chats, *texts, *ids] if chat else [*first, *texts, *ids, *chats]
    return list(dict.fromkeys(ordered))


def choose_fields(
    files: Sequence[SourceFile], cfg: DocumentsConfig, chat: ChatConfig | None = None
) -> dict[SourceFile, FieldChoice]:
    """Returns choose_field of each file. A damaged file that is to be skipped is read as text, which counts it."""
    found = {}
    for file in files:
        try:
            found[file] = choose_field(file.path, read_fields(file.path, cfg), cfg, chat)
        except Damaged:
            if cfg.damaged == "stop":
                raise
            found[file] = FieldChoice("text")
        except OSError as error:
            raise read_error(file.path, error) from None
    return found


def check_tokenizer(found: Mapping[SourceFile, FieldChoice], *, is_named: bool, needed: bool) -> None:
    """Raises BadInput if token ids need a named tokenizer, because there is text too, and none is named."""
    ids = [file.path for file, choice in found.items() if choice.kind == "ids"]
    others = [file.path for file, choice in found.items() if choice.kind != "ids"]
    if ids and not is_named and (others or needed):
        text = f", and {others[0]} holds text" if others else ""
        raise BadInput(f"{ids[0]} holds token ids{text}; name the tokenizer that made the ids in data.tokenizer")


def describe_choices(found: Mapping[SourceFile, FieldChoice], cfg: DocumentsConfig) -> list[str]:
    """Returns log lines for files with token ids or several candidate fields."""
    groups: dict[FieldChoice, list[str]] = {}
    for file, choice in found.items():
        if choice.kind == "ids" or choice.others:
            groups.setdefault(choice, []).append(file.path)
    lines = []
    for choice, paths in groups.items():
        files = paths[0] + (f" and {units.plural(len(paths) - 1, 'other file')}" if len(paths) > 1 else "")
        what = {"ids": "token ids", "chat": "conversations", "text": "text"}[choice.kind]
        facts = [f"{what} from {choice.field!r}"]
        facts[0] += f", since {cfg.text_field!r} has no text" if choice.automatic else ""
        facts += [f"{choice.labels!r} is the loss mask"] if choice.labels else []
        facts += [f"padding in {choice.mask!r} is removed"] if choice.mask else []
        facts += [f"not read: {', '.join(choice.others)}"] if choice.others else []
        lines.append(f"{files}: {'; '.join(facts)}")
    return lines
