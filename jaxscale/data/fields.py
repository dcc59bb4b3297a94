"""Chooses the field of a file that is read: text, token ids or conversations."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxscale import units
from jaxscale.system.exits import BadInput
from jaxscale.text.config import ChatConfig, DocumentsConfig
from jaxscale.text.sources.array_record import array_records, is_array_record
from jaxscale.text.sources.columns import type_of
from jaxscale.text.sources.files import SourceFile, unpacked_name
from jaxscale.text.sources.jsonl import MISSING, at, field_of, json_records
from jaxscale.text.sources.part import WHOLE, Damaged, Part, unreadable
from jaxscale.text.sources.read import JSON_LINES
from jaxscale.text.sources.tables import is_table, open_table

IDS_FIELD = "input_ids"  # looked for where there is no text field
CHAT_FIELDS = ("messages", "conversations")
LABELS, ATTENTION_MASK = "labels", "attention_mask"  # beside the ids, as transformers names them

Kind = Literal["text", "ids", "chat"]


class Fields(NamedTuple):
    """The fields of the rows of a file, by its schema or its first record."""

    names: tuple[str, ...]
    has: Callable[[str], bool]
    has_ids: Callable[[str], bool]  # the field holds lists of integers


class Choice(NamedTuple):
    """What is read from a file."""

    kind: Kind
    field: str = ""  # empty for a file without fields
    automatic: bool = False  # token ids were found, not asked for
    others: tuple[str, ...] = ()  # other fields that could have been meant, each with the setting that reads it
    labels: str = ""  # the field of the labels, if there is one
    mask: str = ""  # the field of the attention mask, if there is one


def is_json_lines(path: str) -> bool:
    """True for a file of JSON Lines, by its name."""
    return unpacked_name(path).endswith(JSON_LINES)


def has_records(path: str, cfg: DocumentsConfig) -> bool:
    """True for a file whose rows are JSON objects, or tf.train.Examples."""
    return is_json_lines(path) or (is_array_record(unpacked_name(path)) and cfg.record_format != "text")


def fields_of(path: str, cfg: DocumentsConfig) -> Fields | None:
    """The fields of a file; None if its kind has none, or there is no row to tell.

    Raises: BadInput as reading the file does.
    """
    if is_table(path):
        with open_table(path, cfg) as table:
            schema = table.schema
        return Fields(
            tuple(schema.names),
            lambda name: type_of(schema, name) is not None,
            lambda name: is_ids_type(type_of(schema, name)),
        )
    if not has_records(path, cfg):
        return None
    records = (record for _, _, _, record in records_of(path, cfg, Counter()))
    first = next((record for record in records if isinstance(record, dict)), None)
    if first is None:
        return None
    return Fields(
        tuple(first),
        lambda name: field_of(first, name, MISSING) is not MISSING,
        lambda name: is_ids_value(field_of(first, name)),
    )


def records_of(
    path: str, cfg: DocumentsConfig, skipped: Counter, part: Part = WHOLE, raw: Sequence[str] = ()
) -> Iterator[tuple[int, str, bytes, Any]]:
    """Yields (offset, 'line 3' or 'record 3', its bytes, its value) of a file for which has_records is True.

    raw: see array_records.
    """
    if is_json_lines(path):
        for offset, number, line, record, _ in json_records(path, cfg, skipped, part):
            yield offset, at(number, part), line, record
        return
    for number, line, record in array_records(path, cfg, skipped, part, raw):
        yield number, f"record {number}", line, record


def is_ids_type(kind: Any) -> bool:
    """True for an Arrow type of lists of integers."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    is_list = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    return kind is not None and any(check(kind) for check in is_list) and types.is_integer(kind.value_type)


def is_ids_value(value: Any) -> bool:
    """True for a list of integers in JSON; an empty one may hold them."""
    return isinstance(value, list) and all(type(number) is int for number in value)


def choose(path: str, fields: Fields | None, cfg: DocumentsConfig, chat: ChatConfig | None = None) -> Choice:
    """What is read from a file with these fields: what the settings name, else text, else token ids.

    chat: of data.name='chat', where conversations come first. Raises BadInput where ids_field names no field of token
    ids, or only conversations are there and not asked for.
    """
    setting = f"{cfg.where}ids_field"
    if fields is None:
        if cfg.ids_field:
            raise BadInput(f"{path} has no fields, and {setting}={cfg.ids_field!r}; leave the file out, or unset it")
        return Choice("text")
    found = candidates(fields, cfg, chat)
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
        return Choice("text", cfg.text_field)  # reading it says what is missing, and where
    (kind, field, _), *others = found
    labels, mask = beside(field)
    return Choice(
        kind,
        field,
        automatic=kind == "ids" and not cfg.ids_field,
        others=tuple(how for _, _, how in others),
        labels=labels if kind == "ids" and fields.has(labels) else "",
        mask=mask if kind == "ids" and fields.has(mask) else "",
    )


def beside(field: str) -> tuple[str, str]:
    """The names of labels and attention mask beside a field of token ids."""
    parent, dot, _ = field.rpartition(".")
    return f"{parent}{dot}{LABELS}", f"{parent}{dot}{ATTENTION_MASK}"


def candidates(fields: Fields, cfg: DocumentsConfig, chat: ChatConfig | None) -> list[tuple[Kind, str, str]]:
    """(kind, field, the field and the setting that reads it) of all that could be read, what is read first."""
    names = chat or ChatConfig()
    pair = (names.prompt_field, names.completion_field)
    of_chat = [name for name in CHAT_FIELDS if fields.has(name)]
    of_chat += [" and ".join(pair)] if all(map(fields.has, pair)) else []
    chats: list[tuple[Kind, str, str]] = [
        ("chat", name, f"{name} (conversations: data.name='chat')") for name in of_chat
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


def choose_all(
    files: Sequence[SourceFile], cfg: DocumentsConfig, chat: ChatConfig | None = None
) -> dict[SourceFile, Choice]:
    """What is read from each file. A file that is broken and to be skipped is read as text, which counts it.

    Raises: BadInput as `choose` does.
    """
    found = {}
    for file in files:
        try:
            found[file] = choose(file.path, fields_of(file.path, cfg), cfg, chat)
        except Damaged:
            if cfg.damaged == "stop":
                raise
            found[file] = Choice("text")
        except OSError as error:
            raise unreadable(file.path, error) from None
    return found


def check_tokenizer(found: Mapping[SourceFile, Choice], *, is_named: bool, needed: bool) -> None:
    """Raises BadInput for token ids where a tokenizer is needed, for text beside them too, and none is named."""
    ids = [file.path for file, choice in found.items() if choice.kind == "ids"]
    others = [file.path for file, choice in found.items() if choice.kind != "ids"]
    if ids and not is_named and (others or needed):
        text = f", and {others[0]} holds text" if others else ""
        raise BadInput(f"{ids[0]} holds token ids{text}; name the tokenizer that made the ids in data.tokenizer")


def describe(found: Mapping[SourceFile, Choice], cfg: DocumentsConfig) -> list[str]:
    """A line for each choice that a person may want to know: of token ids, and of one field out of several."""
    groups: dict[Choice, list[str]] = {}
    for file, choice in found.items():
        if choice.kind == "ids" or choice.others:
            groups.setdefault(choice, []).append(file.path)
    return [f"{some_files(paths)}: {what_is_read(choice, cfg)}" for choice, paths in groups.items()]


def some_files(paths: Sequence[str]) -> str:
    """The first path, and how many more there are."""
    return paths[0] + (f" and {units.plural(len(paths) - 1, 'other file')}" if len(paths) > 1 else "")


def what_is_read(choice: Choice, cfg: DocumentsConfig) -> str:
    """The fields that are read, and those that could have been meant."""
    what = {"ids": "token ids", "chat": "conversations", "text": "text"}[choice.kind]
    facts = [f"{what} from {choice.field!r}"]
    facts[0] += f", as there is no text in {cfg.text_field!r}" if choice.automatic else ""
    facts += [f"{choice.labels!r} tells what is learned"] if choice.labels else []
    facts += [f"padding by {choice.mask!r} is left out"] if choice.mask else []
    facts += [f"not read: {', '.join(choice.others)}"] if choice.others else []
    return "; ".join(facts)
