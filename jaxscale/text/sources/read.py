"""Reads documents from a file of any supported format, whole or in parts."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxscale.system.exits import BadInput
from jaxscale.text.config import ReadConfig
from jaxscale.text.document import Document
from jaxscale.text.sources.array_record import array_record_parts, is_array_record, read_array_record
from jaxscale.text.sources.blocks import check_unpacked, cut_parts, is_packed, next_line, packed_problem
from jaxscale.text.sources.columns import parquet_parts, read_arrow, read_parquet
from jaxscale.text.sources.data_sets import read_dataset, read_seqio
from jaxscale.text.sources.decode import decoded
from jaxscale.text.sources.files import SourceFile, is_saved_dataset, unpacked_name
from jaxscale.text.sources.jsonl import JSON_LINES, at, read_json_lines
from jaxscale.text.sources.left_out import BROKEN, lose
from jaxscale.text.sources.part import WHOLE, Damaged, Part, Records, unreadable
from jaxscale.text.sources.text import read_text, text_parts
from jaxscale.text.sources.warc import read_page, read_warc


class Reader(NamedTuple):
    """How files of a kind are read."""

    unit: str  # what a record is called; '' for plain text, which has only bytes
    read: Callable[[str, ReadConfig, Counter, Part], Records]
    cut: Callable[[str, ReadConfig, int], list[Part]] | None = None  # (path, settings, bytes of a part); None: whole


KINDS: dict[tuple[str, ...], Reader] = {  # by the endings of their names
    JSON_LINES: Reader("line", read_json_lines, lambda path, cfg, part_bytes: cut_parts(path, part_bytes, next_line)),
    (".parquet",): Reader("row", read_parquet, parquet_parts),
    (".arrow", ".feather"): Reader("row", read_arrow),
    (".warc", ".wet"): Reader("record at byte", read_warc),
    (".html", ".htm", ".xhtml"): Reader("page", read_page),
}


def reader(path: str) -> Reader:
    """How a file is read, by its name."""
    name = unpacked_name(path)
    if path.startswith("hf://") or is_saved_dataset(path):
        return Reader("row", read_dataset)
    if path.startswith("seqio://"):
        return Reader("example", read_seqio)
    if is_array_record(name):
        return Reader("record", read_array_record, array_record_parts)
    return next((kind for endings, kind in KINDS.items() if name.endswith(endings)), Reader("", read_text, text_parts))


@contextlib.contextmanager
def readable(path: str, cfg: ReadConfig, skipped: Counter) -> Iterator[None]:
    """Around the reading of a file: what is damaged is counted, or stops it, as cfg says. Raises BadInput."""
    try:
        yield
    except Damaged as error:
        if cfg.damaged == "stop":
            raise BadInput(str(error)) from None
        skipped[BROKEN] += 1
    except BadInput as error:
        if cfg.damaged == "stop" and is_packed(path) and (cause := packed_problem(path, cfg)):
            raise BadInput(cause) from None  # what was unpacked before the break was noticed is no text
        raise error
    except OSError as error:
        raise unreadable(path, error) from None


def read_file(file: SourceFile, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Iterator[Document]:
    """Yields the documents of a file, or of one of its `parts`, in their order; what is left out is counted.

    skipped: gets {reason: how many}; repairs are counted there too, see decode.is_repair.
    Raises: BadInput naming file and place for what cfg tells to stop at; or where the file cannot be read.
    """
    path, name, source = file
    unit, read, _ = reader(path)
    longest, licence = cfg.max_document_bytes, cfg.licence
    with readable(path, cfg, skipped):
        for offset, number, content, (id, url, own, language) in read(path, cfg, skipped, part):
            if not content:
                skipped["empty"] += 1
                continue
            if isinstance(content, bytes) or "\0" in content:
                place = lambda start, offset=offset, number=number: place_of(unit, part, offset, number, start)
                content = decoded(content, cfg, skipped, path, place)
                if content is None:
                    continue
            if 4 * len(content) > longest and len(content.encode()) > longest:
                lose(skipped, "longer than max_document_bytes", len(content.encode()))
                continue
            yield Document(content, source, name, offset, id, url, own or licence, language)


def place_of(unit: str, part: Part, offset: int, number: int, start: int) -> str:
    """Where a byte of a document is: 'line 3', 'row 7', or its number in a file that has only bytes."""
    if not unit:
        return str(offset + start)
    if unit == "line":
        return at(number, part)
    return f"{unit} {number}"


def parts(file: SourceFile, cfg: ReadConfig, part_bytes: int) -> list[Part]:
    """Splits the file into parts of about part_bytes; read_file of each in turn gives all of its documents.

    Plain text and JSON lines are cut where a document begins, Parquet between row groups, ArrayRecord between records;
    whatever else, and what is packed, is one part.
    """
    if part_bytes < 1:
        raise BadInput(f"part_bytes={part_bytes} must be 1 or more")
    cut = reader(file.path).cut
    with readable(file.path, cfg, Counter()):
        if cut and not is_packed(file.path):
            check_unpacked(file.path, cfg)
        return cut(file.path, cfg, part_bytes) if cut else [WHOLE]
    return [WHOLE]
