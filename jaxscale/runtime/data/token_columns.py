"""Columns of token ids, with labels and attention masks in the format of transformers."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.data.fields import ATTENTION_MASK, LABELS, FieldChoice, iter_records, label_and_mask_fields
from jaxscale.runtime.text.config import DocumentsConfig
from jaxscale.runtime.text.sources.columns import column_of, column_strings, is_table, open_table, type_of
from jaxscale.runtime.text.sources.decode import decode_text
from jaxscale.runtime.text.sources.jsonl import MISSING, get_field, get_metadata, skip_or_raise
from jaxscale.runtime.text.sources.part import NO_METADATA, WHOLE, Metadata, Part
from jaxscale.system.exits import BadInput

NOT_LEARNED = -100  # label that PyTorch's CrossEntropyLoss ignores
NO_LABEL = "no label to learn"
MOST_IDS = 1 << 31  # of an unknown vocabulary


class Vocabulary(NamedTuple):
    """The range of valid ids."""

    size: int = MOST_IDS
    tokenizer: str = ""  # setting and name, '' if unknown


class TokenIds(NamedTuple):
    """The ids of a whole document."""

    ids: np.ndarray  # uint32[n]
    loss_mask: np.ndarray | None  # bool[n]; None: all 1
    place: str  # file and row, for messages


Row = tuple[int, TokenIds, Metadata]  # offset in the file, ids, words


def read_ids(
    path: str, choice: FieldChoice, cfg: DocumentsConfig, vocabulary: Vocabulary, skipped: Counter, part: Part = WHOLE
) -> Iterator[Row]:
    """Yields the rows with token ids; skipped ones are counted. Raises BadInput naming a row that is malformed."""
    for offset, place, fields, words in raw_rows(path, choice, cfg, skipped, part):
        try:
            found = check_row(*fields, place, choice.field)
        except BadInput as error:
            skip_or_raise(str(error), cfg, skipped, "without token ids", 0)
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
    """Yields (offset, place, (ids, labels, mask), words) of each raw row; None for null."""
    if not is_table(path):
        names = (choice.field, *label_and_mask_fields(choice.field))  # even if the first record lacks them
        for offset, place, line, record in iter_records(path, cfg, skipped, part):
            if isinstance(record, bytes):
                decode_text(record, cfg, skipped, path, lambda start, place=place: place)  # counts it or raises
                continue
            fields = tuple(get_field(record, name) for name in names)
            if get_field(record, choice.field, MISSING) is MISSING:
                fields = (MISSING, None, None)
            words = get_metadata(record, cfg.metadata_fields, line) if isinstance(record, dict) else NO_METADATA
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
    """Returns an array for each list of a column, of dtype object if it contains null; None for null."""
    import pyarrow
    import pyarrow.compute

    compute: Any = pyarrow.compute  # its functions are created at import
    if type_of(batch.schema, name) is None:
        raise BadInput(f"{path} has no column {name!r} in some of its rows; write it again with one schema")
    column = column_of(batch, name)
    if isinstance(column, pyarrow.ExtensionArray):
        column = column.storage
    column.validate(full=True)  # the offsets are untrusted
    inner = getattr(column.type, "value_type", None)  # of the values of a list
    is_number = inner is not None and (pyarrow.types.is_integer(inner) or pyarrow.types.is_boolean(inner))
    if not is_number or pyarrow.types.is_dictionary(column.type):
        raise BadInput(f"{path}: column {name!r} is {column.type}, not lists of integers")
    lengths = compute.list_value_length(column)
    flat = column.flatten()
    nulls = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))
    values = (flat.fill_null(0) if len(nulls) else flat).to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths.fill_null(0).to_numpy(zero_copy_only=False))
    rows = [values[begin:end] for begin, end in zip([0, *ends.tolist()], ends.tolist())]
    for row in np.unique(ends.searchsorted(nulls, side="right")).tolist():
        rows[row] = rows[row].astype(object)  # rejected by `integers`
    return [row if is_valid else None for row, is_valid in zip(rows, lengths.is_valid().to_pylist())]


def check_row(ids: Any, labels: Any, mask: Any, place: str, field: str) -> TokenIds:
    """Returns the ids of a row without padding. Raises BadInput for a malformed row."""
    if ids is MISSING:
        raise BadInput(f"{place} has no field {field!r}")
    ids = integers(ids, repr(field), place)
    labels = None if labels is None else integers(labels, LABELS, place)
    mask = None if mask is None else integers(mask, ATTENTION_MASK, place)
    for name, values in ((LABELS, labels), (ATTENTION_MASK, mask)):
        if values is not None and len(values) != len(ids):
            raise BadInput(f"{place} has {len(values):,} {name} for {len(ids):,} token ids; there must be one for each")
    loss_mask = None if labels is None else labels != NOT_LEARNED
    if labels is not None and (wrong := np.flatnonzero(loss_mask & (labels != ids))).size:
        i = int(wrong[0])
        raise BadInput(
            f"{place} has labels[{i}]={labels[i]} where the token id is {ids[i]}; a label must be its own token id, or "
            "-100 for one without loss (labels must be neither shifted nor of other text)"
        )
    if mask is not None:
        tokens = token_slice(mask, place)
        ids, loss_mask = ids[tokens], None if loss_mask is None else loss_mask[tokens]
    if loss_mask is not None and loss_mask.all():
        loss_mask = None
    return TokenIds(ids, loss_mask, place)


def integers(values: Any, what: str, place: str) -> np.ndarray:
    """Converts values to an array of integers; null is an empty list. Raises BadInput for other values."""
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
    """Returns the slice of tokens that are not padding. Raises BadInput unless the mask is 0..0 1..1 0..0."""
    if ((mask != 0) & (mask != 1)).any():
        value = int(mask[(mask != 0) & (mask != 1)][0])
        raise BadInput(
            f"{place} has {value} in its attention_mask, which must be 1 for a token and 0 for padding; give each "
            "document its own row"
        )
    (tokens,) = np.nonzero(mask)
    if not len(tokens):
        return slice(0, 0)
    begin, end = int(tokens[0]), int(tokens[-1]) + 1
    if end - begin != len(tokens):
        raise BadInput(f"{place} has padding between tokens by its attention_mask; only padding at the ends is read")
    return slice(begin, end)


def check_vocabulary(found: TokenIds, vocabulary: Vocabulary, setting: str) -> None:
    """Raises BadInput naming file and row for an id outside the vocabulary. setting: with the field's name."""
    bad = (found.ids < 0) | (found.ids >= vocabulary.size)
    if bad.any():
        raise BadInput(
            f"{found.place} has the token id {found.ids[bad][0]}, but {vocabulary.tokenizer or 'a vocabulary'} has ids "
            f"from 0 to {vocabulary.size - 1}; name the tokenizer that made the ids, and their field in {setting}"
        )
