"""Settings of data."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

from jaxscale import units
from jaxscale.runtime.data.objective_config import NextTokenConfig, ObjectiveConfig
from jaxscale.runtime.text.config import ChatConfig, DocumentsConfig, Globs
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

NGRAM = 8  # tokens


Weights = Mapping[str, float]
MixtureSetting = dict[str, float | dict[str, float]]
MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFilterConfig:
    """Limits beyond which a row gets weight 0. Shares are of the row's tokens without padding, from 0 to 1."""

    on: bool = setting(
        False,
        "zero the loss weights of degenerate rows; the metrics have gated_rows, of the step, and gated_rows_total, of "
        "all steps since the run was last started: rows of text without weight, those that have no target among them",
        read_if="data.name!=synthetic",
    )
    max_top_share: float = setting(0.5, "share of the most frequent token; English text has about 0.05")
    min_distinct_share: float = setting(0.02, "distinct tokens over tokens, as 41 in a row of 2,048")
    max_run: int = setting(256, "longest run of one token")
    max_repeated_share: float = setting(0.9, f"share of {NGRAM}-grams that came before in the row")
    max_damaged_share: float = setting(
        0.2, "share of tokens that stand for U+FFFD, which replaces invalid bytes; needs a known tokenizer"
    )
    max_depth_rows: int = setting(
        0, "gates a row inside one document that is more than this many rows after its start; 0: no limit"
    )

    def __post_init__(self):
        for name in ("max_top_share", "min_distinct_share", "max_repeated_share", "max_damaged_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"{name}={getattr(self, name)} must be from 0 to 1")
        if self.max_run < 8 or self.max_depth_rows < 0:
            raise BadInput(
                f"max_run={self.max_run} must be at least 8 and max_depth_rows={self.max_depth_rows} at least 0"
            )


# Fields do not apply to the standard library, which is plain text, nor to token ids.
READ_IF_TEXT = {field.name: "data.name=stdlib|files|chat|hf" for field in dataclasses.fields(DocumentsConfig)}
READ_IF_RECORDS = dict.fromkeys(
    ("text_field", "ids_field", "id_field", "url_field", "licence_field", "html_text", "record_format",
     "max_unpacked_bytes", "max_unpacked_ratio"),
    "data.name=files|chat|hf",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(DocumentsConfig):
    """Training text or tokens, tokenizer, packing, mixture and validation, in addition to DocumentsConfig."""

    where: ClassVar[str] = "data."
    inherited_read_if: ClassVar[dict[str, str]] = READ_IF_TEXT | READ_IF_RECORDS

    name: Literal["stdlib", "files", "chat", "hf", "tokens", "synthetic"] = setting(
        "files",
        "stdlib: source of this Python's standard library; files: text, tokenized once into the cache, or columns of "
        "token ids (ids_field); hf: the same "
        "of data sets of the Hugging Face hub, files being their names; chat: .jsonl, .parquet, .arrow or data sets of "
        "conversations (messages, or ShareGPT's conversations), of prompt and completion, or of text, of which "
        "completions alone are learned; "
        "tokens: .bin files of ids, memory-mapped; synthetic: uniform random ids, for throughput",
    )
    files: Globs = setting(
        "",
        "glob or list of globs; or {source: globs}, for a loss per source, whatever a prepared set calls its own; or a "
        "glob with {name}, for each source of the mixture. files: .jsonl, .parquet, .arrow, "
        ".array_record, .warc, .html, any text, each also .gz or .zst but tables and records; hf://NAME?split=train; "
        "seqio://TASK?module=MODULE; tokens: the manifest.json of a prepared set, here or under gs://; shards of this "
        "program (with their .json), Megatron's .bin with its .idx, or raw ids",
        read_if="data.name=files|chat|hf|tokens",
    )
    val_files: Globs = setting(
        "",
        "the same, for validation; empty: a part of files is held out, see val_fraction",
        read_if="data.name!=synthetic",
    )
    val_fraction: float = setting(
        0.05,
        "part held out where val_files is empty: documents chosen by a hash of file name and place in the file; of a "
        "source where that would be fewer than 5, the last part of each document; 0: no validation",
        read_if="data.name!=synthetic and not data.val_files",
    )
    tokenizer: str = setting(
        "",
        "'bytes' (ids 0 to 255 and 256 for the end of a document), a tokenizer.json, or a SentencePiece .model; "
        "empty: bytes for text, and for token files the one that their header names, or none",
        read_if="data.name!=synthetic",
    )
    eos_token: str = setting(
        "",
        "the token that ends a document; empty: eos_token of the tokenizer's tokenizer_config.json, else a common name",
        read_if="data.tokenizer and data.tokenizer!=bytes",
    )
    bos_token: str = setting(
        "",
        "the token that begins a document; empty: as the tokenizer's own files say (Llama's and Gemma's have one, "
        "GPT-2's and Qwen's none); none: nothing. Conversations begin as their template says",
        read_if="data.tokenizer and data.tokenizer!=bytes",
    )
    eos_id: int | None = setting(
        None,
        "tokens: the id that ends a document in a raw .bin; none: the tokenizer's, or one document per file",
        read_if="data.name=tokens",
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = setting(
        "auto",
        "tokens: type of a raw .bin; auto: uint16 if the model's largest id is at most 65535, else uint32",
        read_if="data.name=tokens",
    )
    packing: Literal["best_fit", "concat"] = setting(
        "best_fit",
        "how documents are packed into rows. best_fit: one that fits into a row is never split; padding is 1% if there "
        "are short documents to fill rows, more if all are longer than a third of a row; concat: rows are cut from "
        "concatenated documents, without padding. Neither drops a token",
        read_if="data.name!=synthetic",
    )
    mixture: MixtureSetting = setting(
        {},
        "{source: weight}, or {start: {source: weight}} with starts such as '0', '10e9' (tokens), '80%', '2000 steps'; "
        "sources are the names in files, weights are shares of rows. Empty: all documents together. Only what lies "
        "ahead of a run may change",
        may_change=True,
        read_if="data.name!=synthetic",
    )
    max_epochs: dict[str, float] = setting(
        {},
        "{source: epochs} after which a source of the mixture leaves its share to the others",
        may_change=True,
        read_if="data.mixture",
    )
    gate: RowFilterConfig = setting(RowFilterConfig, read_if="data.gate.on")
    chat: ChatConfig = setting(ChatConfig, read_if="data.name=chat")
    objective: ObjectiveConfig = setting(NextTokenConfig)
    verify: Literal["size", "hash", "always"] = setting(
        "hash",
        "what is compared with the sums of prepared sets, shards, tokens in the cache and row plans; hash: everything "
        "is read once on each machine, and again where it changed; always: at each start, which also finds what rots "
        "on a disk; size: only the sizes of the files, while they are read too",
        may_change=True,
        read_if="data.name!=synthetic",
    )
    cache_bytes: int = setting(
        100_000_000_000,
        "tokens: size limit of the local cache of shards from a bucket",
        may_change=True,
        read_if="data.name=tokens",
    )
    cache_dir: str = setting(
        "",
        "folder for tokenized text and row plans; empty: $XDG_CACHE_HOME/jaxscale, or ~/.cache/jaxscale",
        may_change=True,
        read_if="data.name!=synthetic",
    )
    transforms: tuple[str, ...] = setting(
        (),
        "functions that change training batches, as MODULE:FUNCTION, in order: function(batch, n, rows) "
        "gets rows of batch n (a jaxscale.core.batch.Batch of numpy arrays [rows, T]) with their numbers in it, and "
        "returns them with the same fields, shapes and dtypes, each row made from itself, n and its number alone",
    )
    skip_batches: tuple[tuple[int, int], ...] = setting(
        (), "batch ranges [from, to) that are never trained on, such as ((1200, 1204),)", may_change=True
    )

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.val_fraction <= 0.5:
            raise BadInput(f"val_fraction={self.val_fraction} must be from 0 to 0.5")
        if self.eos_id is not None and self.eos_id < 0:
            raise BadInput(f"eos_id={self.eos_id} must be a token id, 0 or more")
        if self.cache_bytes <= 0:
            raise BadInput(f"cache_bytes={self.cache_bytes} must be more than 0")
        if "://" in self.cache_dir:
            raise BadInput(f"cache_dir={self.cache_dir} must be a local folder")
        if bad := [name for name in self.transforms if not MODULE_FUNCTION.fullmatch(name)]:
            raise BadInput(f"transforms has {bad[0]!r}; a function is named as MODULE:FUNCTION")
        check_skips(self.skip_batches)
        check_mixture(self.mixture, self.max_epochs)
        if self.name == "chat" and self.objective.name != "next_token":
            raise BadInput(
                f"name='chat' defines the loss mask; set objective.name=next_token, not {self.objective.name!r}"
            )
        if self.name != "chat" and self.chat != ChatConfig():
            raise BadInput(f"data.chat is read only with data.name='chat', not {self.name!r}")
        if self.name == "chat" and self.packing != "best_fit":
            raise BadInput("packing='concat' splits conversations; data.name='chat' needs packing='best_fit'")


def mixture_stages(mixture: MixtureSetting) -> list[tuple[str, Weights]]:
    """Returns (start, weights) of each stage. Raises BadInput for a setting of neither form."""
    staged = [(start, value) for start, value in mixture.items() if isinstance(value, Mapping)]
    if staged and len(staged) < len(mixture):
        raise BadInput("mixture must be {source: weight}, or {start: {source: weight}}, not both in one")
    weights = {name: value for name, value in mixture.items() if not isinstance(value, Mapping)}
    stages: list[tuple[str, Weights]] = [*staged] or [("0", weights)]
    for start, weights in stages:
        units.parse("data.mixture's start", start)
        if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
            raise BadInput(
                f"mixture from {start!r} has weights {dict(weights)}; they must be at least 0, finite, and one above 0"
            )
    return stages


def mixture_names(mixture: MixtureSetting) -> tuple[str, ...]:
    """Returns the sources of a mixture by first occurrence; losses are reported for these."""
    return tuple(dict.fromkeys(name for _, weights in mixture_stages(mixture) for name in weights)) if mixture else ()


def check_mixture(mixture: MixtureSetting, max_epochs: Mapping[str, float]) -> None:
    """Raises BadInput for settings that are invalid for any data."""
    if mixture:
        mixture_stages(mixture)
    if max_epochs and not mixture:
        raise BadInput("max_epochs limits the sources of a mixture, and there is none; set data.mixture too")
    if wrong := {name: number for name, number in max_epochs.items() if not 0 < number < math.inf}:
        raise BadInput(f"max_epochs={wrong} must be above 0 and finite; leave a source out of the mixture instead")


def check_skips(ranges: Iterable[Sequence[int]]) -> None:
    """Raises BadInput unless every range is [from, to) with 0 <= from < to."""
    for start, stop in ranges:
        if not 0 <= start < stop:
            raise BadInput(f"skip_batches has ({start}, {stop}); a range is (from, to) with 0 <= from < to")
