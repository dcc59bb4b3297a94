"""Token ids in columns: rows that were tokenized before, with labels and attention masks as transformers has them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.fields import ATTENTION_MASK, LABELS, Choice, beside, records_of
from jaxscale.system.exits import BadInput
from jaxscale.text.config import DocumentsConfig
from jaxscale.text.sources.columns import as_words, column_of, type_of
from jaxscale.text.sources.decode import decoded
from jaxscale.text.sources.jsonl import MISSING, field_of, refuse, words_of
from jaxscale.text.sources.part import NO_WORDS, WHOLE, Part, Words
from jaxscale.text.sources.tables import is_table, open_table

NOT_LEARNED = -100  # as a label: CrossEntropyLoss of PyTorch leaves it out
NO_LABEL = "no label to learn"
MOST_IDS = 1 << 31  # of a vocabulary that is not known


class Vocabulary(NamedTuple):
    """The ids that there may be."""

    size: int = MOST_IDS
    tokenizer: str = ""  # its setting and name, empty if it is not known


class TokenIds(NamedTuple):
    """The ids of a document, all of them."""

    ids: np.ndarray  # uint32[n]
    learned: np.ndarray | None  # bool[n], None: every id
    place: str  # file and row, for messages


Row = tuple[int, TokenIds, Words]  # offset in the file, ids, words


def read_ids(
    path: str, choice: Choice, cfg: DocumentsConfig, vocabulary: Vocabulary, skipped: Counter, part: Part = WHOLE
) -> Iterator[Row]:
    """Yields the rows of a file that have token ids; what is left out is counted.

    Raises: BadInput naming file and row for an id that the vocabulary does not have; for a row that is malformed, where
    cfg says to stop.
    """
    for offset, place, fields, words in raw_rows(path, choice, cfg, skipped, part):
        try:
            found = checked(*fields, place, choice.field)
        except BadInput as error:
            refuse(str(error), cfg, skipped, "without token ids", 0)
            continue
        if not len(found.ids):
            skipped["empty"] += 1
        elif found.learned is not None and not found.learned.any():
            skipped[NO_LABEL] += 1
        else:
            check_vocabulary(found, vocabulary, f"{cfg.where}ids_field")
            yield offset, found._replace(ids=found.ids.astype(np.uint32)), words


def raw_rows(
    path: str, choice: Choice, cfg: DocumentsConfig, skipped: Counter, part: Part
) -> Iterator[tuple[int, str, tuple[Any, Any, Any], Words]]:
    """Yields (offset, place, (ids, labels, mask), words) of each row as it is in the file; None for what is null."""
    if not is_table(path):
        names = (choice.field, *beside(choice.field))  # of each record, whatever the first one has
        for offset, place, line, record in records_of(path, cfg, skipped, part):
            if isinstance(record, bytes):
                decoded(record, cfg, skipped, path, lambda start, place=place: place)  # counts it, or stops
                continue
            fields = tuple(field_of(record, name) for name in names)
            if field_of(record, choice.field, MISSING) is MISSING:
                fields = (MISSING, None, None)
            words = words_of(record, cfg.word_fields, line) if isinstance(record, dict) else NO_WORDS
            yield offset, f"{path} {place}", fields, words
        return
    names = (choice.field, choice.labels, choice.mask)
    with open_table(path, cfg, part) as table:
        words = [name if name and type_of(table.schema, name) is not None else "" for name in cfg.word_fields]
        for row, batch in table.batches([name for name in (*names, *words) if name]):
            nothing = [None] * batch.num_rows
            fields = [lists(batch, name, path) if name else nothing for name in names]
            own = [as_words(column_of(batch, name)) if name else [""] * batch.num_rows for name in words]
            for number, found, of_row in zip(range(row, row + batch.num_rows), zip(*fields), zip(*own)):
                yield number, f"{path} row {number}", found, of_row


def lists(batch: Any, name: str, path: str) -> list[np.ndarray | None]:
    """The lists of numbers in a column, an array for each row; None for null. Where a list holds null it has objects.

    Raises: BadInput if the column is not there, or is no lists.
    """
    import pyarrow
    import pyarrow.compute

    compute: Any = pyarrow.compute  # whose functions are made while it is imported
    if type_of(batch.schema, name) is None:
        raise BadInput(f"{path} has no column {name!r} in some of its rows; write it again with one schema")
    column = column_of(batch, name)
    if isinstance(column, pyarrow.ExtensionArray):
        column = column.storage
    column.validate(full=True)  # the offsets came out of a file
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
        rows[row] = rows[row].astype(object)  # no integers, for whoever checks them
    return [row if is_there else None for row, is_there in zip(rows, lengths.is_valid().to_pylist())]


def checked(ids: Any, labels: Any, mask: Any, place: str, field: str) -> TokenIds:
    """The ids of a row without its padding. Raises BadInput naming place for a row that is malformed."""
    if ids is MISSING:
        raise BadInput(f"{place} has no field {field!r}")
    ids = integers(ids, repr(field), place)
    labels = None if labels is None else integers(labels, LABELS, place)
    mask = None if mask is None else integers(mask, ATTENTION_MASK, place)
    for name, values in ((LABELS, labels), (ATTENTION_MASK, mask)):
        if values is not None and len(values) != len(ids):
            raise BadInput(f"{place} has {len(values):,} {name} for {len(ids):,} token ids; there must be one for each")
    learned = None if labels is None else labels != NOT_LEARNED
    if labels is not None and (wrong := np.flatnonzero(learned & (labels != ids))).size:
        i = int(wrong[0])
        raise BadInput(
            f"{place} has labels[{i}]={labels[i]} where the token id is {ids[i]}; a label must be its own token id, or "
            "-100 for one that is not learned (labels are neither shifted nor of another text)"
        )
    if mask is not None:
        real = unpadded(mask, place)
        ids, learned = ids[real], None if learned is None else learned[real]
    if learned is not None and learned.all():
        learned = None
    return TokenIds(ids, learned, place)


def integers(values: Any, what: str, place: str) -> np.ndarray:
    """The values as an array of integers. Raises BadInput for anything else; null is an empty list."""
    if values is None:
        return np.zeros(0, np.int64)
    if isinstance(values, list) and not values:
        return np.zeros(0, np.int64)
    found = None
    if isinstance(values, list | np.ndarray):
        try:
            found = np.asarray(values)
        except (ValueError, OverflowError):  # lists of several lengths
            found = None
    kinds = "iub" if what == ATTENTION_MASK else "iu"
    if found is None or found.ndim != 1 or found.dtype.kind not in kinds:
        raise BadInput(f"{place}: {what} is not a list of integers")
    return found.astype(np.int8) if found.dtype.kind == "b" else found


def unpadded(mask: np.ndarray, place: str) -> slice:
    """Where the tokens are that are no padding. Raises BadInput for a mask that is not 0, 1 and 0 again."""
    if ((mask != 0) & (mask != 1)).any():
        value = int(mask[(mask != 0) & (mask != 1)][0])
        raise BadInput(
            f"{place} has {value} in its attention_mask, which must be 1 for a token and 0 for padding; give each "
            "document a row of its own"
        )
    (real,) = np.nonzero(mask)
    if not len(real):
        return slice(0, 0)
    begin, end = int(real[0]), int(real[-1]) + 1
    if end - begin != len(real):
        raise BadInput(f"{place} has padding between tokens by its attention_mask; only padding at the ends is read")
    return slice(begin, end)


def check_vocabulary(found: TokenIds, vocabulary: Vocabulary, setting: str) -> None:
    """Raises BadInput naming file and row for an id that the vocabulary does not have. setting: of the field's name."""
    bad = (found.ids < 0) | (found.ids >= vocabulary.size)
    if bad.any():
        raise BadInput(
            f"{found.place} has the token id {found.ids[bad][0]}, and {vocabulary.tokenizer or 'a vocabulary'} has ids "
            f"from 0 to {vocabulary.size - 1}; name the tokenizer that made the ids, and their field in {setting}"
        )
