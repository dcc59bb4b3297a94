"""Settings of the data pipeline."""

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

NGRAM = 8  # tokens per n-gram of the row filter


Weights = Mapping[str, float]
MixtureSetting = dict[str, float | dict[str, float]]
MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFilterConfig:
    """Limits of the filter that sets the weights of degenerate sequences to 0. Fractions exclude padding tokens."""

    on: bool = setting(
        False,
        "true: set the loss weights of degenerate sequences to 0. The metrics gated_rows (per step) and "
        "gated_rows_total (since the last start) count sequences whose weights are all 0",
        read_if="data.name!=synthetic",
    )
    max_top_share: float = setting(0.5, "maximum fraction of the most frequent token; English text has about 0.05")
    min_distinct_share: float = setting(0.02, "minimum ratio of distinct tokens to tokens; 0.02 is 41 of 2,048 tokens")
    max_run: int = setting(256, "maximum number of consecutive repetitions of one token")
    max_repeated_share: float = setting(0.9, f"maximum fraction of {NGRAM}-grams that occurred earlier in the sequence")
    max_damaged_share: float = setting(
        0.2, "maximum fraction of tokens for U+FFFD, which replaces invalid bytes; needs a known tokenizer"
    )
    max_depth_rows: int = setting(
        0, "maximum distance, in sequences of seq_len, from the start of a long document; 0: no limit"
    )

    def __post_init__(self):
        for name in ("max_top_share", "min_distinct_share", "max_repeated_share", "max_damaged_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.max_run < 8 or self.max_depth_rows < 0:
            raise BadInput(
                f"max_run={self.max_run} must be at least 8, and max_depth_rows={self.max_depth_rows} at least 0"
            )


# Settings of fields do not apply to the standard library, which is plain text, or to token ids.
READ_IF_TEXT = {field.name: "data.name=stdlib|files|chat|hf" for field in dataclasses.fields(DocumentsConfig)}
READ_IF_RECORDS = dict.fromkeys(
    ("text_field", "ids_field", "id_field", "url_field", "licence_field", "html_text", "record_format",
     "max_unpacked_bytes", "max_unpacked_ratio"),
    "data.name=files|chat|hf",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(DocumentsConfig):
    """Settings of training and validation data, tokenizer, packing and mixture. Extends DocumentsConfig."""

    where: ClassVar[str] = "data."
    inherited_read_if: ClassVar[dict[str, str]] = READ_IF_TEXT | READ_IF_RECORDS

    name: Literal["stdlib", "files", "chat", "hf", "tokens", "synthetic"] = setting(
        "files",
        "kind of data; stdlib: source code of this Python's standard library; files: text files, tokenized once into "
        "the cache, or columns of token ids (ids_field); hf: the same for datasets of the Hugging Face Hub, named in "
        "files; chat: .jsonl, .parquet, .arrow or datasets with conversations (messages, or ShareGPT's conversations), "
        "prompt and completion, or text, where only completions have a loss; tokens: memory-mapped .bin files of ids; "
        "synthetic: uniform random ids, for throughput measurements",
    )
    files: Globs = setting(
        "",
        "glob or list of globs; or {source: globs}, for a loss per source, which also renames the sources of prepared "
        "sets; or a glob with {name}, for each source of the mixture. Formats: .jsonl, .parquet, .arrow, "
        ".array_record, .warc, .html or any text; all except tables and records may be compressed as .gz or .zst; "
        "hf://NAME?split=train; seqio://TASK?module=MODULE. With name=tokens: the manifest.json of a prepared set, "
        "local or gs://; jaxscale shards with their .json; Megatron's .bin with its .idx; or raw ids",
        read_if="data.name=files|chat|hf|tokens",
    )
    val_files: Globs = setting(
        "",
        "validation files, in the same form as files; empty: a part of files is held out, see val_fraction",
        read_if="data.name!=synthetic",
    )
    val_fraction: float = setting(
        0.05,
        "held-out fraction of the documents if val_files is empty; documents are selected by a hash of file name and "
        "position in the file; if a source has fewer than 5 such documents, the last part of each of its documents is "
        "held out; 0: no validation",
        read_if="data.name!=synthetic and not data.val_files",
    )
    tokenizer: str = setting(
        "",
        "'bytes' (ids 0 to 255, and 256 as end token), a tokenizer.json, or a SentencePiece .model; empty: bytes for "
        "text; for token files, the tokenizer in their header, or none",
        read_if="data.name!=synthetic",
    )
    eos_token: str = setting(
        "",
        "end-of-document token; empty: eos_token in the tokenizer's tokenizer_config.json, else a common name",
        read_if="data.tokenizer and data.tokenizer!=bytes",
    )
    bos_token: str = setting(
        "",
        "beginning-of-document token; empty: from the tokenizer's files (Llama and Gemma have such a token, GPT-2 and "
        "Qwen do not); none: no token. Does not apply to conversations, which begin as in their template",
        read_if="data.tokenizer and data.tokenizer!=bytes",
    )
    eos_id: int | None = setting(
        None,
        "for name=tokens: end-of-document id in a raw .bin; none: the tokenizer's end id, or one document per file",
        read_if="data.name=tokens",
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = setting(
        "auto",
        "for name=tokens: dtype of a raw .bin; auto: uint16 if the model's largest id is at most 65535, else uint32",
        read_if="data.name=tokens",
    )
    packing: Literal["best_fit", "concat"] = setting(
        "best_fit",
        "packing of documents into sequences; best_fit: a document that fits into a sequence is never split; about 1% "
        "padding with short documents, and more if all documents are longer than a third of a sequence; concat: "
        "sequences are slices of the concatenated documents, without padding. Neither drops tokens",
        read_if="data.name!=synthetic",
    )
    mixture: MixtureSetting = setting(
        {},
        "{source: weight}, or stages {start: {source: weight}} with starts such as '0', '10e9' (tokens), '80%', '2000 "
        "steps'; sources are named in files; weights are fractions of the sequences; empty: no weights, all documents "
        "are shuffled together. Only stages that have not started may be changed",
        may_change=True,
        read_if="data.name!=synthetic",
    )
    max_epochs: dict[str, float] = setting(
        {},
        "{source: epochs}: after this number of epochs, the other sources of the mixture share the source's weight",
        may_change=True,
        read_if="data.mixture",
    )
    gate: RowFilterConfig = setting(RowFilterConfig, read_if="data.gate.on")
    chat: ChatConfig = setting(ChatConfig, read_if="data.name=chat")
    objective: ObjectiveConfig = setting(NextTokenConfig)
    verify: Literal["size", "hash", "always"] = setting(
        "hash",
        "verification of prepared sets, shards, cached tokens and row plans; hash: checksums once on each machine, and "
        "again after a change; always: checksums at each start, which also detects bit rot; size: only file sizes, at "
        "the start and during the run",
        may_change=True,
        read_if="data.name!=synthetic",
    )
    cache_bytes: int = setting(
        100_000_000_000,
        "for name=tokens: size limit in bytes of the local cache of shards from a bucket",
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
        "functions that change training batches, as MODULE:FUNCTION, applied in order: function(batch, n, rows) "
        "receives a part of batch n (a jaxscale.core.batch.Batch of numpy arrays [rows, T]) and the row indices, and "
        "returns it with the same fields, shapes and dtypes; a row may depend only on itself, n and its index",
    )
    skip_batches: tuple[tuple[int, int], ...] = setting(
        (), "batch ranges [from, to) to skip, such as ((1200, 1204),)", may_change=True
    )

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.val_fraction <= 0.5:
            raise BadInput(f"val_fraction={self.val_fraction} must be between 0 and 0.5")
        if self.eos_id is not None and self.eos_id < 0:
            raise BadInput(f"eos_id={self.eos_id} must be a token id, 0 or more")
        if self.cache_bytes <= 0:
            raise BadInput(f"cache_bytes={self.cache_bytes} must be above 0")
        if "://" in self.cache_dir:
            raise BadInput(f"cache_dir={self.cache_dir} must be a local folder")
        if bad := [name for name in self.transforms if not MODULE_FUNCTION.fullmatch(name)]:
            raise BadInput(f"transforms contains {bad[0]!r}, but must contain functions in the form MODULE:FUNCTION")
        check_skips(self.skip_batches)
        check_mixture(self.mixture, self.max_epochs)
        if self.name == "chat" and self.objective.name != "next_token":
            raise BadInput(
                f"name='chat' does not support objective.name={self.objective.name!r}; set objective.name=next_token"
            )
        if self.name != "chat" and self.chat != ChatConfig():
            raise BadInput(f"data.chat has no effect with data.name={self.name!r}; set data.name='chat'")
        if self.name == "chat" and self.packing != "best_fit":
            raise BadInput("name='chat' does not support packing='concat'; use packing='best_fit'")


def mixture_stages(mixture: MixtureSetting) -> list[tuple[str, Weights]]:
    """Returns (start, weights) of each stage of data.mixture. Raises BadInput for an invalid setting."""
    staged = [(start, value) for start, value in mixture.items() if isinstance(value, Mapping)]
    if staged and len(staged) < len(mixture):
        raise BadInput("mixture must have the form {source: weight} or {start: {source: weight}}; do not mix the two")
    weights = {name: value for name, value in mixture.items() if not isinstance(value, Mapping)}
    stages: list[tuple[str, Weights]] = [*staged] or [("0", weights)]
    for start, weights in stages:
        units.parse("data.mixture's start", start)
        if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
            raise BadInput(
                f"mixture from {start!r} has weights {dict(weights)}; all weights must be finite and at least 0, "
                "and one weight must be above 0"
            )
    return stages


def mixture_names(mixture: MixtureSetting) -> tuple[str, ...]:
    """Returns the sources named in a mixture, in the order of first occurrence."""
    return tuple(dict.fromkeys(name for _, weights in mixture_stages(mixture) for name in weights)) if mixture else ()


def check_mixture(mixture: MixtureSetting, max_epochs: Mapping[str, float]) -> None:
    """Raises BadInput for a mixture or max_epochs that is invalid regardless of the data."""
    if mixture:
        mixture_stages(mixture)
    if max_epochs and not mixture:
        raise BadInput("max_epochs requires data.mixture; set data.mixture, or remove max_epochs")
    if wrong := {name: number for name, number in max_epochs.items() if not 0 < number < math.inf}:
        raise BadInput(
            f"max_epochs={wrong} must be above 0 and finite; to exclude a source, remove it from the mixture"
        )


def check_skips(ranges: Iterable[Sequence[int]]) -> None:
    """Raises BadInput unless every range is [from, to) with 0 <= from < to."""
    for start, stop in ranges:
        if not 0 <= start < stop:
            raise BadInput(f"skip_batches contains ({start}, {stop}), but a range (from, to) must have 0 <= from < to")
