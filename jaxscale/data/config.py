"""Settings of the data room."""

import dataclasses
from typing import Literal

from jaxscale.data.order import check_skips
from jaxscale.schema import setting

Globs = str | tuple[str, ...] | dict[str, str | tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text or tokens a run reads, and how they become ids."""

    name: Literal["stdlib", "files", "tokens", "synthetic"] = setting(
        "files",
        "stdlib: source of this Python's standard library; files: text, tokenised once into the cache; "
        "tokens: .bin files of ids, memory-mapped; synthetic: uniform random ids, for throughput",
    )
    files: Globs = setting(
        "",
        "glob or list of globs; or {source: globs}, for a loss per source. files: .jsonl, .parquet, any text, "
        "each also .gz but parquet; tokens: raw ids, or the shards of this program (known by the .json beside)",
    )
    val_files: Globs = setting("", "the same, for validation; empty: a part of files is held out, see val_fraction")
    val_fraction: float = setting(
        0.05,
        "part held out where val_files is empty: documents chosen by a hash of file name and place in the file; of a "
        "source where that would be fewer than 5, the last part of each document; 0: no validation",
    )
    tokenizer: str = setting(
        "",
        "'bytes' (ids 0 to 255 and 256 for the end of a document), a tokenizer.json, or a SentencePiece .model; "
        "empty: bytes for text, and for token files the one that their header names, or none",
    )
    eos_token: str = setting("", "the token that ends a document; empty: found among the usual names")
    eos_id: int | None = setting(
        None, "tokens: the id that ends a document in a raw .bin; none: the tokenizer's, or one document per file"
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = setting(
        "auto", "tokens: type of a raw .bin; auto: uint16 if the model's largest id is at most 65535, else uint32"
    )
    text_field: str = setting("text", "name of the text field or column in .jsonl and .parquet")
    invalid_utf8: Literal["skip", "stop"] = setting(
        "skip", "a document that is not UTF-8: skip and count it, or stop and name the file and the byte"
    )
    cache_dir: str = setting(
        "", "folder for tokenised text; empty: $XDG_CACHE_HOME/jaxscale, or ~/.cache/jaxscale", may_change=True
    )
    skip_batches: tuple[tuple[int, int], ...] = setting(
        (), "batch ranges [from, to) that are never trained on, such as ((1200, 1204),)", may_change=True
    )

    def __post_init__(self):
        if not 0 <= self.val_fraction <= 0.5:
            raise ValueError(f"val_fraction={self.val_fraction} must lie from 0 to 0.5")
        if self.eos_id is not None and self.eos_id < 0:
            raise ValueError(f"eos_id={self.eos_id} must be a token id, 0 or more")
        check_skips(self.skip_batches)
