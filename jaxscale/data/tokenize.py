"""Reads and encodes the files of a corpus once, as a shard in the cache."""

import datetime
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxscale.data.cache import NAME, cached, count, describe_skipped, stamp
from jaxscale.data.config import DataConfig
from jaxscale.data.fields import Choice, check_tokenizer, choose_all, describe
from jaxscale.data.header import listed, tokenizer_header, untold_header
from jaxscale.data.lineage import join_lineages, lineage_table
from jaxscale.data.reading import Encoded, Item, Reading, is_conversation, make_reading
from jaxscale.data.shard_writer import ShardWriter
from jaxscale.data.shards import Shard
from jaxscale.data.token_columns import MOST_IDS, TokenIds
from jaxscale.data.token_files import of_ids
from jaxscale.data.verified import Say
from jaxscale.system.exits import BadInput
from jaxscale.text.config import read_settings
from jaxscale.text.document import Document
from jaxscale.text.sources.files import SourceFile
from jaxscale.text.sources.left_out import left_out
from jaxscale.text.tokenizer.base import Tokenizer
from jaxscale.text.tokenizer.fitting import fits, fitted, tell_beyond
from jaxscale.text.tokenizer.load import load_tokenizer
from jaxscale.text.tokenizer.loss import Loss, measure_loss

if TYPE_CHECKING:
    import pyarrow

CHUNK_BYTES = 4 << 20  # of text given to the tokenizer at once: enough for all cores, little enough for any memory
SAY_SECONDS = 10.0
DAMAGED_SHOWN = 5  # files named one by one; the sum tells the rest
END = b"\xff" * 4  # between documents: no id is that large


def open_documents(
    cfg: DataConfig, files: Sequence[SourceFile], val_files: Sequence[SourceFile], vocab_size: int, say: Say
) -> tuple[list[Shard], list[Shard], Tokenizer | None]:
    """(training shards, validation shards, tokenizer if it is known) of files of text, conversations or token ids.

    Raises: BadInput where data.name='chat' and there is no conversation; as tokenised does.
    """
    tokenizer = load_tokenizer(cfg.tokenizer or "bytes", cfg.eos_token, cfg.bos_token)
    if fits(tokenizer, vocab_size) and (line := tell_beyond(tokenizer, vocab_size)):
        say(f"{tokenizer.name} {line}")
        tokenizer = fitted(tokenizer, vocab_size)
    shards = [tokenised(files, tokenizer, cfg, say)]
    for line in unpinned(files, shards[0]):
        say(line)
    val_shards = [tokenised(val_files, tokenizer, cfg, say)] if val_files else []
    if cfg.name == "chat" and not shards[0].header["conversations"]:
        raise BadInput(
            f"data.name='chat', and {files[0].path}{' and the other files' * (len(files) > 1)} hold no conversation "
            "and no prompt with a completion; set data.name='files' to train on all of their text"
        )
    only_ids = [not shard.header["tokenizer"]["fingerprint"] for shard in [*shards, *val_shards]]
    if not any(only_ids):
        return shards, val_shards, tokenizer
    if cfg.tokenizer:
        return shards, val_shards, of_ids(cfg, tokenizer, shards, say) if all(only_ids) else tokenizer
    if not all(only_ids):
        raise BadInput(
            "data.files and data.val_files hold token ids and text; name the tokenizer that made the ids in "
            "data.tokenizer"
        )
    return shards, val_shards, None


def unpinned(files: Sequence[SourceFile], shard: Shard) -> list[str]:
    """A line for each data set of a hub that may have changed since its copy in the cache was made."""
    made = datetime.date.fromtimestamp(Path(shard.bin_path).stat().st_mtime)
    return [
        f"{file.path}: as it was on {made}, when it was tokenised; a newer one is not looked for. "
        "revision=COMMIT pins one"
        for file in files
        if file.path.startswith("hf://") and "revision=" not in file.path
    ]


def tokenised(files: Sequence[SourceFile], tokenizer: Tokenizer, cfg: DataConfig, say: Say) -> Shard:
    """The documents of all files as one shard, from the cache if these very files were tokenised before.

    Raises: BadInput if no document is left, or as read_file and read_ids do.
    """
    made_from: dict[str, Any] = {
        "files": [[*file, *stamp(file.path)] for file in files],
        "tokenizer": tokenizer.fingerprint,
        "read": read_settings(cfg),
    }
    if cfg.ids_field:
        made_from["ids"] = cfg.ids_field
    reading = make_reading(tokenizer, cfg, say)
    if reading.fingerprint:
        made_from["chat"] = reading.fingerprint
    shard = cached(cfg, made_from, lambda folder: tokenise(folder, files, tokenizer, cfg, say, reading), say)
    for line in shard.header.get("read", ()):
        say(line)
    return shard


def tokenise(
    folder: Path, files: Sequence[SourceFile], tokenizer: Tokenizer, cfg: DataConfig, say: Say, reading: Reading
) -> None:
    """Writes the shard of `files` into `folder`. Several documents are encoded at a time."""
    chat = cfg.chat if cfg.name == "chat" else None
    choices = choose_all(files, cfg, chat)
    check_tokenizer(choices, is_named=bool(cfg.tokenizer), needed=chat is not None)
    only_ids = all(choice.kind == "ids" for choice in choices.values())
    known = None if only_ids and not cfg.tokenizer else tokenizer
    writer = ShardWriter(
        folder,
        NAME,
        vocab_size=known.vocab_size if known else MOST_IDS,
        eos_id=None if only_ids else tokenizer.eos_id,
        sources=list(dict.fromkeys(file.source for file in files)),
        trained=reading.marks,
    )
    skipped, tally, started, some = Counter(), Tally(files, known), time.monotonic(), count(len(files), "file")
    what = f"reading token ids of {some}" if only_ids else f"tokenising {some} with {tokenizer.name}"
    say(f"{what} (once; then kept in the cache)")
    try:
        lineage = write_documents(writer, tally, read_documents(choices, reading, skipped, say), reading, say)
        if not writer.num_documents:
            some = f"{files[0].path}{' and the other files' * (len(files) > 1)}"
            lost = left_out(skipped, 0, 0, cfg.where)
            why = lost.line if lost else describe_skipped(skipped)
            raise BadInput(f"{some} hold no document{f' ({why})' if why else ''}")
    except BaseException:
        writer.abandon()
        raise
    header = {**tally.header(only_ids=only_ids), "skipped": dict(skipped)}
    header["read"] = [*describe(choices, cfg), *tally.lines()]
    writer.finish(known.token_bytes if known else None, header, lineage)
    progress = rates(writer.num_documents, tally.text_bytes, time.monotonic() - started)
    say(f"  {progress}; skipped: {describe_skipped(skipped) or 'none'}")
    if (lost := left_out(skipped, writer.num_documents, tally.text_bytes, cfg.where)) and lost.is_much:
        say(f"WARNING: {lost.line}")
    if (loss := tally.loss).lost:
        say(f"{'WARNING: ' * loss.is_much}{loss.line(f'data.tokenizer={tokenizer.name}', tokenizer.loss_reason)}")


def write_documents(
    writer: ShardWriter,
    tally: "Tally",
    documents: Iterable[tuple[SourceFile, Document, Item]],
    reading: Reading,
    say: Say,
) -> "pyarrow.Table":
    """Encodes and writes the documents, and returns their lineage."""
    started = said = time.monotonic()
    lineage: list[Any] = []
    waiting: list[tuple[SourceFile, Document, Item]] = []
    waiting_bytes = 0

    def write_waiting() -> None:
        texts = [document.text for _, document, item in waiting if not isinstance(item, TokenIds)]
        if tally.tokenizer is not None and texts:
            tally.loss.add(measure_loss(tally.tokenizer, texts))
        encoded = reading.encode([item for *_, item in waiting])
        for (file, _, item), one in zip(waiting, encoded):
            writer.add(one.ids, file.source, one.learned, is_whole=one.is_whole)
            tally.add(file, item, one)
        lineage.append(lineage_table([document for _, document, _ in waiting]))
        waiting.clear()

    for file, document, item in documents:
        waiting.append((file, document, item))
        tally.text_bytes += document.size
        waiting_bytes += item.ids.nbytes if isinstance(item, TokenIds) else document.size
        if waiting_bytes >= CHUNK_BYTES:
            write_waiting()
            waiting_bytes = 0
            if (now := time.monotonic()) - said > SAY_SECONDS:
                said = now
                say(f"  {rates(writer.num_documents, tally.text_bytes, now - started)}, in {file.name}")
    write_waiting()
    return join_lineages(lineage)


class Tally:
    """Counts and hashes of what was read, for the header of a shard."""

    def __init__(self, files: Sequence[SourceFile], tokenizer: Tokenizer | None):
        """tokenizer: None if it is not known."""
        self.files, self.tokenizer = files, tokenizer
        self.text_bytes = self.conversations = self.ids_documents = self.ids_ended = 0
        self.documents: Counter[SourceFile] = Counter()
        self.loss = Loss()
        self.largest, self.largest_place = -1, ""  # of the token ids that were read
        self.hashes = {file: hashlib.sha256() for file in files}  # so that a change of a file can be named

    def add(self, file: SourceFile, item: Item, encoded: Encoded) -> None:
        """Counts a document."""
        self.documents[file] += 1
        self.conversations += is_conversation(item)
        self.hashes[file].update(np.asarray(encoded.ids, "<u4").tobytes() + END)
        if encoded.learned is not None:
            self.hashes[file].update(np.packbits(encoded.learned).tobytes())
        if isinstance(item, TokenIds):
            self.ids_documents += 1
            if (largest := int(item.ids.max())) > self.largest:
                self.largest, self.largest_place = largest, item.place
            if self.tokenizer is not None:
                self.text_bytes += int(self.tokenizer.token_bytes[item.ids].sum())
                self.ids_ended += int(item.ids[-1]) == self.tokenizer.eos_id

    def lines(self) -> list[str]:
        """What a person may want to know of token ids."""
        if not self.ids_documents or self.tokenizer is None:
            return []
        name, number = self.tokenizer.eos_token, self.tokenizer.eos_id
        return [
            f"token ids are not changed: {self.ids_ended:,} of {count(self.ids_documents, 'document')} end with "
            f"{name or 'the end token'} ({number})"
        ]

    def header(self, *, only_ids: bool) -> dict[str, Any]:
        """The part of the header that tells what was read. only_ids: the ids may be of any tokenizer."""
        sums = {file: {"sha256": found.hexdigest()} for file, found in self.hashes.items()}
        entries = [listed(file, self.documents[file]) | sums[file] for file in self.files]
        found: dict[str, Any] = untold_header({}, None)
        if not only_ids and (tokenizer := self.tokenizer) is not None:
            found = {"tokenizer": tokenizer_header(tokenizer, tokenizer.name), "eos_id": tokenizer.eos_id}
        found |= {"text_bytes": self.text_bytes, "files": entries, "conversations": self.conversations}
        return found | {"ids_documents": self.ids_documents, "largest_place": self.largest_place}


def read_documents(
    choices: Mapping[SourceFile, Choice], reading: Reading, skipped: Counter, say: Say
) -> Iterator[tuple[SourceFile, Document, Item]]:
    """Yields (file, document, what encode takes) of all files, and names those with documents that are not UTF-8."""
    counted = damaged = 0
    for file, choice in choices.items():
        for document, item in reading.read(file, choice, skipped):
            yield file, document, item
        if (invalid := skipped["invalid UTF-8"] - counted) and (damaged := damaged + 1) <= DAMAGED_SHOWN:
            say(f"  {file.path}: {count(invalid, 'document')} skipped, not UTF-8 (see data.invalid_utf8)")
        counted += invalid


def rates(documents: int, text_bytes: int, seconds: float) -> str:
    """Progress in one phrase."""
    speed = text_bytes / 1e6 / max(seconds, 1e-9)
    return f"{count(documents, 'document')}, {text_bytes / 1e6:,.1f} MB in {seconds:,.1f} s ({speed:,.1f} MB/s)"
