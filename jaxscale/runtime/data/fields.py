"""Selects the field of a file to read (text, token ids or conversations), and reads token ids.

Fields of token ids may have fields of labels and attention masks next to them, in the format of transformers.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxscale import units
from jaxscale.runtime.text.config import ChatConfig, DocumentsConfig
from jaxscale.runtime.text.sources import jsonl
from jaxscale.runtime.text.sources.columns import column_of, column_strings, is_table, open_table, type_of
from jaxscale.runtime.text.sources.data_sets import array_records, is_array_record
from jaxscale.runtime.text.sources.decode import decode_text
from jaxscale.runtime.text.sources.files import SourceFile, unpacked_name
from jaxscale.runtime.text.sources.part import NO_METADATA, WHOLE, Damaged, Metadata, Part, read_error
from jaxscale.runtime.text.sources.read import JSON_LINES
from jaxscale.system.exits import BadInput

IDS_FIELD = "input_ids"  # field that is read without a text field
CHAT_FIELDS = ("messages", "conversations")
LABELS, ATTENTION_MASK = "labels", "attention_mask"  # names of the fields in transformers
NOT_LEARNED = -100  # label that PyTorch's CrossEntropyLoss ignores
NO_LABEL = "no label to learn"
MOST_IDS = 1 << 31  # size of an unknown vocabulary

Kind = Literal["text", "ids", "chat"]


class FileFields(NamedTuple):
    """The fields of a file, from its schema or first record."""

    names: tuple[str, ...]
    has: Callable[[str], bool]
    has_ids: Callable[[str], bool]  # True if the field contains lists of integers


class FieldChoice(NamedTuple):
    """The field to read from a file."""

    kind: Kind
    field: str = ""  # empty for a file without fields
    automatic: bool = False  # True if token ids were detected and not requested in the settings
    others: tuple[str, ...] = ()  # other candidate fields, each with the setting that selects the field
    labels: str = ""  # field of labels, or ''
    mask: str = ""  # field of attention masks, or ''


def is_json_lines(path: str) -> bool:
    """Returns True for the name of a JSON Lines file."""
    return unpacked_name(path).endswith(JSON_LINES)


def has_records(path: str, cfg: DocumentsConfig) -> bool:
    """Returns True for a file of JSON objects or tf.train.Examples."""
    return is_json_lines(path) or (is_array_record(unpacked_name(path)) and cfg.record_format != "text")


def read_fields(path: str, cfg: DocumentsConfig) -> FileFields | None:
    """Returns the fields of a file, or None for an empty file or a format without fields. Raises Damaged or OSError."""
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
        value = jsonl.get_field(first, name)
        return isinstance(value, list) and all(type(number) is int for number in value)

    return FileFields(
        tuple(first), lambda name: jsonl.get_field(first, name, jsonl.MISSING) is not jsonl.MISSING, has_ids
    )


def iter_records(
    path: str, cfg: DocumentsConfig, skipped: Counter, part: Part = WHOLE, raw: Sequence[str] = ()
) -> Iterator[tuple[int, str, bytes, Any]]:
    """Yields (offset, 'line 3' or 'record 3', bytes, value) for each record of a JSON Lines or ArrayRecord file."""
    if is_json_lines(path):
        for offset, number, line, record, _ in jsonl.json_records(path, cfg, skipped, part):
            yield offset, jsonl.format_line(number, part), line, record
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
    """Selects the field to read: the field in the settings, else a text field, else a field of token ids.

    chat: settings of conversations, which then have priority; None unless data.name='chat'.
    Raises BadInput if ids_field contains no token ids, or if `chat` is None and the file has only conversations.
    """
    setting = f"{cfg.where}ids_field"
    if fields is None:
        if cfg.ids_field:
            raise BadInput(f"{setting}={cfg.ids_field!r}, but {path} has no fields; exclude it or unset ids_field")
        return FieldChoice("text")
    found = candidate_fields(fields, cfg, chat)
    if cfg.ids_field and not fields.has_ids(cfg.ids_field):
        problem = "no lists of integers in" if fields.has(cfg.ids_field) else "no field"
        has = f"{path} has {problem} {cfg.ids_field!r}; its fields are {', '.join(fields.names)[:300]}"
        raise BadInput(f"{has}; set {setting} to a field of token ids")
    if not found or (found[0][0] == "chat" and chat is None):
        if found and cfg.damaged == "stop":
            raise BadInput(
                f"{path} has no text field {cfg.text_field!r}, but has conversations in {found[0][1]!r}; set "
                f"data.name='chat' to train on conversations, or set {cfg.where}text_field to a field of text"
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
    """Returns the names of the label and attention mask fields that belong to a field of token ids."""
    parent, dot, _ = field.rpartition(".")
    return f"{parent}{dot}{LABELS}", f"{parent}{dot}{ATTENTION_MASK}"


def candidate_fields(fields: FileFields, cfg: DocumentsConfig, chat: ChatConfig | None) -> list[tuple[Kind, str, str]]:
    """Returns (kind, field, description with the setting) of each field that could be read, by priority."""
    names = chat or ChatConfig()
    pair = (names.prompt_field, names.completion_field)
    chats = [name for name in CHAT_FIELDS if fields.has(name)]
    chats += [" and ".join(pair)] if all(map(fields.has, pair)) else []
    ids = [name for name in (cfg.ids_field, IDS_FIELD) if name and fields.has_ids(name)]
    found: list[tuple[Kind, str, str]] = [("text", cfg.text_field, f"{cfg.text_field} (text)")]
    found = found if fields.has(cfg.text_field) else []
    found.extend(("ids", name, f"{name} (token ids: {cfg.where}ids_field={name!r})") for name in ids)
    found.extend(("chat", name, f"{name} (conversations: data.name='chat')") for name in chats)
    if chat:
        found.sort(key=lambda candidate: candidate[0] != "chat")
    if cfg.ids_field:
        found.sort(key=lambda candidate: candidate[1] != cfg.ids_field or candidate[0] != "ids")
    return list(dict.fromkeys(found))


def choose_fields(
    files: Sequence[SourceFile], cfg: DocumentsConfig, chat: ChatConfig | None = None
) -> dict[SourceFile, FieldChoice]:
    """Returns the field to read from each file. With data.damaged='skip', the reader later skips damaged files."""
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
    """Raises BadInput for token ids without a named tokenizer, if other files have text or `needed` is True."""
    ids = [file.path for file, choice in found.items() if choice.kind == "ids"]
    others = [file.path for file, choice in found.items() if choice.kind != "ids"]
    if ids and not is_named and (others or needed):
        text = f", and {others[0]} contains text" if others else ""
        raise BadInput(f"{ids[0]} contains token ids{text}; set data.tokenizer to the tokenizer that produced the ids")


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
        facts[0] += f", because no field {cfg.text_field!r} has text" if choice.automatic else ""
        facts += [f"{choice.labels!r} is the loss mask"] if choice.labels else []
        facts += [f"padding in {choice.mask!r} is removed"] if choice.mask else []
        facts += [f"ignored: {', '.join(choice.others)}"] if choice.others else []
        lines.append(f"{files}: {'; '.join(facts)}")
    return lines


class Vocabulary(NamedTuple):
    """Size and tokenizer of the vocabulary."""

    size: int = MOST_IDS
    tokenizer: str = ""  # setting and name of the tokenizer; '' if unknown


class TokenIds(NamedTuple):
    """Token ids of a whole document."""

    ids: np.ndarray  # uint32[n]
    loss_mask: np.ndarray | None  # bool[n]; None: all True
    place: str  # file and row, for messages


def read_ids(
    path: str, choice: FieldChoice, cfg: DocumentsConfig, vocabulary: Vocabulary, skipped: Counter, part: Part = WHOLE
) -> Iterator[tuple[int, TokenIds, Metadata]]:
    """Yields (offset, ids, metadata) of each row, and counts skipped rows. Raises BadInput for a malformed row."""
    for offset, place, fields, words in raw_rows(path, choice, cfg, skipped, part):
        try:
            found = check_row(*fields, place, choice.field)
        except BadInput as error:
            jsonl.skip_or_raise(str(error), cfg, skipped, "without token ids", 0)
            continue
        if not len(found.ids):
            skipped["empty"] += 1
        elif found.loss_mask is not None and not found.loss_mask.any():
            skipped[NO_LABEL] += 1
        else:
            check_vocabulary(found, vocabulary, f"{cfg.where}ids_field")
            yield offset, found._replace(ids=found.ids.astype(np.uint32)), words


def raw_rows(
    path: str, choice: FieldChoice, cfg: DocumentsConfig, skipped: Counter, part: Part
) -> Iterator[tuple[int, str, tuple[Any, Any, Any], Metadata]]:
    """Yields (offset, location, (ids, labels, mask), metadata) of each row before any check. Null values are None."""
    if not is_table(path):
        names = (choice.field, *label_and_mask_fields(choice.field))  # labels may be missing in the first record
        for offset, place, line, record in iter_records(path, cfg, skipped, part):
            if isinstance(record, bytes):
                decode_text(record, cfg, skipped, path, lambda start, place=place: place)  # counts the record or raises
                continue
            fields = tuple(jsonl.get_field(record, name) for name in names)
            if jsonl.get_field(record, choice.field, jsonl.MISSING) is jsonl.MISSING:
                fields = (jsonl.MISSING, None, None)
            words = jsonl.get_metadata(record, cfg.metadata_fields, line) if isinstance(record, dict) else NO_METADATA
            yield offset, f"{path} {place}", fields, words
        return
    names = (choice.field, choice.labels, choice.mask)
    with open_table(path, cfg, part) as table:
        words = [name if name and type_of(table.schema, name) is not None else "" for name in cfg.metadata_fields]
        for row, batch in table.batches([name for name in (*names, *words) if name]):
            nothing = [None] * batch.num_rows
            fields = [list_column(batch, name, path) if name else nothing for name in names]
            columns = [column_strings(column_of(batch, name)) if name else [""] * batch.num_rows for name in words]
            for number, found, row_words in zip(range(row, row + batch.num_rows), zip(*fields), zip(*columns)):
                yield number, f"{path} row {number}", found, row_words


def list_column(batch: Any, name: str, path: str) -> list[np.ndarray | None]:
    """Returns an array for each list in a column, None for a null list. Lists with null elements have dtype object."""
    import pyarrow
    import pyarrow.compute

    compute: Any = pyarrow.compute  # Any, because its functions are created at import
    if type_of(batch.schema, name) is None:
        raise BadInput(f"{path}: some rows have no column {name!r}; write the file again with a single schema")
    column = column_of(batch, name)
    if isinstance(column, pyarrow.ExtensionArray):
        column = column.storage
    column.validate(full=True)  # offsets in the file may be invalid
    inner = getattr(column.type, "value_type", None)  # type of the list elements
    is_number = inner is not None and (pyarrow.types.is_integer(inner) or pyarrow.types.is_boolean(inner))
    if not is_number or pyarrow.types.is_dictionary(column.type):
        raise BadInput(f"{path}: column {name!r} has type {column.type}, but must contain lists of integers")
    lengths = compute.list_value_length(column)
    flat = column.flatten()
    nulls = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))
    values = (flat.fill_null(0) if len(nulls) else flat).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths.fill_null(0).to_numpy(zero_copy_only=False))
    rows = [values[begin:end] for begin, end in zip([0, *ends.tolist()], ends.tolist())]
    for row in np.unique(ends.searchsorted(nulls, side="right")).tolist():
        rows[row] = rows[row].astype(object)  # integers() rejects this dtype
    return [row if is_valid else None for row, is_valid in zip(rows, lengths.is_valid().to_pylist())]


def check_row(ids: Any, labels: Any, mask: Any, place: str, field: str) -> TokenIds:
    """Returns the token ids of a row without padding. Raises BadInput for a malformed row."""
    if ids is jsonl.MISSING:
        raise BadInput(f"{place} has no field {field!r}")
    ids = integers(ids, repr(field), place)
    labels = None if labels is None else integers(labels, LABELS, place)
    mask = None if mask is None else integers(mask, ATTENTION_MASK, place)
    for name, values in ((LABELS, labels), (ATTENTION_MASK, mask)):
        if values is not None and len(values) != len(ids):
            raise BadInput(f"{place} has {len(values):,} {name} for {len(ids):,} token ids; the lengths must be equal")
    loss_mask = None if labels is None else labels != NOT_LEARNED
    if labels is not None and (wrong := np.flatnonzero(loss_mask & (labels != ids))).size:
        i = int(wrong[0])
        raise BadInput(
            f"{place} has labels[{i}]={labels[i]}, but token id {ids[i]} at the same index; a label must equal its "
            "token id (do not shift labels), or be -100 to exclude the token from the loss"
        )
    if mask is not None:
        tokens = token_slice(mask, place)
        ids, loss_mask = ids[tokens], None if loss_mask is None else loss_mask[tokens]
    if loss_mask is not None and loss_mask.all():
        loss_mask = None
    return TokenIds(ids, loss_mask, place)


def integers(values: Any, what: str, place: str) -> np.ndarray:
    """Converts a list of integers to an array (None: empty). Raises BadInput for other values. what: name in errors."""
    if values is None or (isinstance(values, list) and not values):
        return np.zeros(0, np.int64)
    found = None
    if isinstance(values, list | np.ndarray):
        try:
            found = np.asarray(values)
        except (ValueError, OverflowError):  # ragged lists
            found = None
    kinds = "iub" if what == ATTENTION_MASK else "iu"
    if found is None or found.ndim != 1 or found.dtype.kind not in kinds:
        raise BadInput(f"{place}: {what} is not a list of integers")
    return found.astype(np.int8) if found.dtype.kind == "b" else found


def token_slice(mask: np.ndarray, place: str) -> slice:
    """Returns the slice of tokens that are not padding. Raises BadInput if the ones of the mask are not contiguous."""
    if ((mask != 0) & (mask != 1)).any():
        value = int(mask[(mask != 0) & (mask != 1)][0])
        raise BadInput(
            f"{place} has {value} in its attention_mask; use 1 for tokens and 0 for padding, and store each document "
            "in a separate row"
        )
    (tokens,) = np.nonzero(mask)
    if not len(tokens):
        return slice(0, 0)
    begin, end = int(tokens[0]), int(tokens[-1]) + 1
    if end - begin != len(tokens):
        raise BadInput(
            f"{place} has padding between tokens in its attention_mask; pad only at the beginning or the end"
        )
    return slice(begin, end)


def check_vocabulary(found: TokenIds, vocabulary: Vocabulary, setting: str) -> None:
    """Raises BadInput if an id is outside the vocabulary. setting: full name of the ids_field setting."""
    bad = (found.ids < 0) | (found.ids >= vocabulary.size)
    if bad.any():
        raise BadInput(
            f"{found.place} has the token id {found.ids[bad][0]}, but {vocabulary.tokenizer or 'a vocabulary'} has ids "
            f"from 0 to {vocabulary.size - 1}; set data.tokenizer to the tokenizer that produced the ids, and "
            f"{setting} to the field that contains them"
        )
