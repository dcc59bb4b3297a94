"""Reads and encodes the files of a corpus once, and stores the result as a shard in the cache."""

import datetime
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.runtime.data.cache import NAME, cached_shard, describe_skipped, size_and_mtime
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.fields import (
    MOST_IDS,
    FieldChoice,
    TokenIds,
    check_tokenizer,
    choose_fields,
    describe_choices,
)
from jaxscale.runtime.data.reading import DocumentReader, Encoded, Item, is_conversation, make_reader
from jaxscale.runtime.data.shard_writer import ShardWriter, join_lineages, lineage_table
from jaxscale.runtime.data.shards import Shard, file_entry, tokenizer_header, unknown_tokenizer_header
from jaxscale.runtime.data.token_files import match_begin_tokens
from jaxscale.runtime.data.verified import Say
from jaxscale.runtime.text.config import read_settings
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.part import summarize_losses
from jaxscale.runtime.text.tokenizer.base import Tokenizer
from jaxscale.runtime.text.tokenizer.fitting import describe_unused, fits, limit_vocabulary
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.runtime.text.tokenizer.loss import TextLoss, measure_loss
from jaxscale.system.exits import BadInput
from jaxscale.units import plural

CHUNK_BYTES = 4 << 20  # bytes of text per call of the tokenizer, enough to use all cores with little memory
SAY_SECONDS = 10.0
DAMAGED_SHOWN = 5  # largest number of files that are logged individually
ReadItem = tuple[SourceFile, Document, Item]
END = b"\xff" * 4  # separator of documents in hashes; larger than any id


def open_documents(
    cfg: DataConfig, files: Sequence[SourceFile], val_files: Sequence[SourceFile], vocab_size: int, say: Say
) -> tuple[list[Shard], list[Shard], Tokenizer | None]:
    """Returns (training shards, validation shards, tokenizer or None) for files of text, conversations or token ids."""
    tokenizer = load_tokenizer(cfg.tokenizer or "bytes", cfg.eos_token, cfg.bos_token)
    if fits(tokenizer, vocab_size) and (line := describe_unused(tokenizer, vocab_size)):
        say(f"{tokenizer.name} {line}")
        tokenizer = limit_vocabulary(tokenizer, vocab_size)
    shards = [open_tokenized(files, tokenizer, cfg, say)]
    made = datetime.date.fromtimestamp(Path(shards[0].bin_path).stat().st_mtime)
    for file in files:
        if file.path.startswith("hf://") and "revision=" not in file.path:
            say(
                f"{file.path}: using the version that was tokenized on {made}, without a check for newer versions; "
                "revision=COMMIT selects a version"
            )
    val_shards = [open_tokenized(val_files, tokenizer, cfg, say)] if val_files else []
    if cfg.name == "chat" and not shards[0].header["conversations"]:
        raise BadInput(
            "data.name='chat', but no conversations or prompts with completions were found in "
            f"{files[0].path}{' and the other files' * (len(files) > 1)}; set data.name='files' to train on all text"
        )
    only_ids = [not shard.header["tokenizer"]["fingerprint"] for shard in [*shards, *val_shards]]
    if not any(only_ids):
        return shards, val_shards, tokenizer
    if cfg.tokenizer:
        return shards, val_shards, match_begin_tokens(cfg, tokenizer, shards, say) if all(only_ids) else tokenizer
    if not all(only_ids):
        raise BadInput(
            "data.files and data.val_files mix token ids and text; set data.tokenizer to the tokenizer of the ids"
        )
    return shards, val_shards, None


def open_tokenized(files: Sequence[SourceFile], tokenizer: Tokenizer, cfg: DataConfig, say: Say) -> Shard:
    """Returns the documents of all files as one shard, from the cache if the same files were tokenized before."""
    cache_key: dict[str, Any] = {
        "files": [[*file, *size_and_mtime(file.path)] for file in files],
        "tokenizer": tokenizer.fingerprint,
        "read": read_settings(cfg),
    }
    if cfg.ids_field:
        cache_key["ids"] = cfg.ids_field
    reader = make_reader(tokenizer, cfg, say)
    if reader.fingerprint:
        cache_key["chat"] = reader.fingerprint
    shard = cached_shard(cfg, cache_key, lambda folder: tokenize(folder, files, tokenizer, cfg, say, reader), say)
    for line in shard.header.get("read", ()):
        say(line)
    return shard


def tokenize(
    folder: Path, files: Sequence[SourceFile], tokenizer: Tokenizer, cfg: DataConfig, say: Say, reader: DocumentReader
) -> None:
    """Encodes the documents of `files` in batches, and writes the shard into `folder`."""
    chat = cfg.chat if cfg.name == "chat" else None
    choices = choose_fields(files, cfg, chat)
    check_tokenizer(choices, is_named=bool(cfg.tokenizer), needed=chat is not None)
    only_ids = all(choice.kind == "ids" for choice in choices.values())
    known = None if only_ids and not cfg.tokenizer else tokenizer
    writer = ShardWriter(
        folder,
        NAME,
        vocab_size=known.vocab_size if known else MOST_IDS,
        eos_id=None if only_ids else tokenizer.eos_id,
        sources=list(dict.fromkeys(file.source for file in files)),
        trained=reader.has_loss_masks,
    )
    skipped, counts, started = Counter(), ReadCounts(files, known), time.monotonic()
    num_files = plural(len(files), "file")
    what = f"reading token ids of {num_files}" if only_ids else f"tokenizing {num_files} with {tokenizer.name}"
    say(f"{what} (once; then cached)")
    try:
        lineage = write_documents(writer, counts, read_documents(choices, reader, skipped, say), reader, say)
        if not writer.num_documents:
            lost = summarize_losses(skipped, 0, 0, cfg.where)
            reason = lost.line if lost else describe_skipped(skipped)
            names = f"{files[0].path}{' and the other files' * (len(files) > 1)}"
            raise BadInput(f"no documents found in {names}{f' ({reason})' if reason else ''}")
    except BaseException:
        writer.abandon()
        raise
    header = {**counts.header(only_ids=only_ids), "skipped": dict(skipped)}
    header["read"] = [*describe_choices(choices, cfg), *counts.lines()]
    writer.finish(known.token_bytes if known else None, header, lineage)
    progress = describe_rate(writer.num_documents, counts.text_bytes, time.monotonic() - started)
    say(f"  {progress}; skipped: {describe_skipped(skipped) or 'none'}")
    if (lost := summarize_losses(skipped, writer.num_documents, counts.text_bytes, cfg.where)) and lost.is_much:
        say(f"WARNING: {lost.line}")
    if (loss := counts.loss).lost:
        say(f"{'WARNING: ' * loss.is_much}{loss.line(f'data.tokenizer={tokenizer.name}', tokenizer.loss_reason)}")


def write_documents(
    writer: ShardWriter, counts: "ReadCounts", documents: Iterable[ReadItem], reader: DocumentReader, say: Say
) -> Any:
    """Encodes and writes the documents; returns their lineage as a pyarrow.Table."""
    started = logged = time.monotonic()
    lineage: list[Any] = []
    pending: list[ReadItem] = []
    pending_bytes = 0

    def write_pending() -> None:
        texts = [document.text for _, document, item in pending if not isinstance(item, TokenIds)]
        if counts.tokenizer is not None and texts:
            counts.loss.add(measure_loss(counts.tokenizer, texts))
        encoded = reader.encode([item for *_, item in pending])
        for (file, _, item), one in zip(pending, encoded):
            writer.add(one.ids, file.source, one.loss_mask, is_whole=one.is_whole)
            counts.add(file, item, one)
        lineage.append(lineage_table([document for _, document, _ in pending]))
        pending.clear()

    for file, document, item in documents:
        pending.append((file, document, item))
        counts.text_bytes += document.size
        pending_bytes += item.ids.nbytes if isinstance(item, TokenIds) else document.size
        if pending_bytes >= CHUNK_BYTES:
            write_pending()
            pending_bytes = 0
            if (now := time.monotonic()) - logged > SAY_SECONDS:
                logged = now
                say(f"  {describe_rate(writer.num_documents, counts.text_bytes, now - started)}, in {file.name}")
    write_pending()
    return join_lineages(lineage)


class ReadCounts:
    """Counts and hashes of the documents read, for the header of a shard."""

    def __init__(self, files: Sequence[SourceFile], tokenizer: Tokenizer | None):
        """tokenizer: None for token ids of an unknown tokenizer."""
        self.files, self.tokenizer = files, tokenizer
        self.text_bytes = self.conversations = self.ids_documents = self.ids_ended = 0
        self.documents: Counter[SourceFile] = Counter()
        self.loss = TextLoss()
        self.largest, self.largest_place = -1, ""  # largest token id, and its file and row
        self.hashes = {file: hashlib.sha256() for file in files}  # one per file, so that errors can name changed files

    def add(self, file: SourceFile, item: Item, encoded: Encoded) -> None:
        """Adds a document to the counts and hashes."""
        self.documents[file] += 1
        self.conversations += is_conversation(item)
        self.hashes[file].update(np.asarray(encoded.ids, "<u4").tobytes() + END)
        if encoded.loss_mask is not None:
            self.hashes[file].update(np.packbits(encoded.loss_mask).tobytes())
        if isinstance(item, TokenIds):
            self.ids_documents += 1
            if (largest := int(item.ids.max())) > self.largest:
                self.largest, self.largest_place = largest, item.place
            if self.tokenizer is not None:
                self.text_bytes += int(self.tokenizer.token_bytes[item.ids].sum())
                self.ids_ended += int(item.ids[-1]) == self.tokenizer.eos_id

    def lines(self) -> list[str]:
        """Returns log lines about token ids."""
        if not self.ids_documents or self.tokenizer is None:
            return []
        name, number = self.tokenizer.eos_token, self.tokenizer.eos_id
        return [
            f"token ids are unchanged: {self.ids_ended:,} of {plural(self.ids_documents, 'document')} end with "
            f"{name or 'the end token'} ({number})"
        ]

    def header(self, *, only_ids: bool) -> dict[str, Any]:
        """Returns header entries with the counts and hashes. only_ids: True if the tokenizer of the ids is unknown."""
        sums = {file: {"sha256": found.hexdigest()} for file, found in self.hashes.items()}
        entries = [file_entry(file, self.documents[file]) | sums[file] for file in self.files]
        found: dict[str, Any] = unknown_tokenizer_header({}, None)
        if not only_ids and (tokenizer := self.tokenizer) is not None:
            found = {"tokenizer": tokenizer_header(tokenizer, tokenizer.name), "eos_id": tokenizer.eos_id}
        found |= {"text_bytes": self.text_bytes, "files": entries, "conversations": self.conversations}
        return found | {"ids_documents": self.ids_documents, "largest_place": self.largest_place}


def read_documents(
    choices: Mapping[SourceFile, FieldChoice], reader: DocumentReader, skipped: Counter, say: Say
) -> Iterator[ReadItem]:
    """Yields (file, document, item to encode) for all files. Logs files with invalid UTF-8."""
    counted = damaged = 0
    for file, choice in choices.items():
        for document, item in reader.read(file, choice, skipped):
            yield file, document, item
        if (invalid := skipped["invalid UTF-8"] - counted) and (damaged := damaged + 1) <= DAMAGED_SHOWN:
            say(f"  {file.path}: {plural(invalid, 'document')} skipped, not UTF-8 (see data.invalid_utf8)")
        counted += invalid


def describe_rate(documents: int, text_bytes: int, seconds: float) -> str:
    """Returns a text with the number of documents, MB, seconds and MB/s."""
    speed = text_bytes / 1e6 / max(seconds, 1e-9)
    return f"{plural(documents, 'document')}, {text_bytes / 1e6:,.1f} MB in {seconds:,.1f} s ({speed:,.1f} MB/s)"
