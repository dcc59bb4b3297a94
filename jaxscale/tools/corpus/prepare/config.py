"""Settings of a preparation: sources, stages in order, and the settings of each stage."""

import dataclasses
import difflib
import os
from typing import ClassVar, Literal

from jaxscale.runtime.text.config import DocumentsConfig, Globs
from jaxscale.runtime.text.tokenizer.config import EncodeConfig, TrainTokenizerConfig
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate import config as curate
from jaxscale.tools.corpus.curate.pii import PIIConfig

STAGES = (
    "url_blocklist", "repair", "language", "gopher_repetition", "gopher_quality", "c4", "fineweb", "licence",
    "toxicity", "classifier", "substring", "decontaminate", "pii",
)  # fmt: skip
JOINS = ("exact_dedup", "line_dedup", "near_dedup")  # each compares all documents, so a pass ends before it
TRAINED = "train"  # value of tokenizer.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeReadConfig(DocumentsConfig):
    """Settings for reading the files of all sources."""

    where: ClassVar[str] = "read."

    language_field: str = setting("language", "field or column with the language, for language.known='trust'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One named part of the corpus."""

    files: str | tuple[str, ...] = setting(
        help="glob or globs: .txt .jsonl .parquet .arrow .warc .html, .gz, .zst, ..."
    )
    licence: str = setting("", "licence of documents without one in a licence field")
    synthetic: bool = setting(False, "the text was written by a model")
    text_field: str | None = setting(None, "as read.text_field, for this source only")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer of the shards."""

    name: str = setting(
        TRAINED, "train: train a new one on the remaining documents; or 'bytes', a tokenizer.json, a .model"
    )
    eos_token: str = setting(
        "",
        "token at the end of each document; empty: eos_token of the tokenizer_config.json next to the tokenizer, "
        "else a common name",
    )
    bos_token: str = setting(
        "",
        "token at the start of each document; empty: as in the tokenizer's files (Llama and Gemma have one, GPT-2 and "
        "Qwen do not); none: no token",
    )
    train: TrainTokenizerConfig = setting(TrainTokenizerConfig)
    encode: EncodeConfig = setting(EncodeConfig)

    @property
    def is_trained(self) -> bool:
        """True if the tokenizer is trained in this preparation."""
        return self.name == TRAINED

    def path(self, folder: str) -> str:
        """Returns the path for load_tokenizer. folder: the work folder, which holds a trained tokenizer."""
        return f"{folder}/tokenizer{self.train.ending}" if self.is_trained else os.path.expanduser(self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteConfig:
    """Settings of the shards."""

    shard_tokens: int = setting(100_000_000, "approximate tokens per shard; a shard is built in memory")
    seed: int = setting(0, "seed of the shuffle")

    def __post_init__(self):
        if self.shard_tokens < 1:
            raise BadInput(f"shard_tokens={self.shard_tokens} must be 1 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """Row plans that are published with the shards: a run with these settings opens one at once. Other runs, and runs
    over several sets, plan their rows at their first start, about a microsecond per document, and cache them."""

    seq_len: int | tuple[int, ...] = setting((), "seq_len of the runs; several: one plan each; empty: no plan")
    seed: int = setting(0, "seed of the runs")
    packing: Literal["best_fit", "concat"] = setting("best_fit", "data.packing of the runs")
    val_fraction: float = setting(0.05, "data.val_fraction of the runs")
    mixture: bool = setting(False, "the runs set data.mixture, with any weights")

    def __post_init__(self):
        if bad := [seq_len for seq_len in self.seq_lens if seq_len < 1]:
            raise BadInput(f"seq_len={bad[0]} must be 1 or more")

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Row lengths, in tokens, of the plans."""
        return (self.seq_len,) if isinstance(self.seq_len, int) else self.seq_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """A recipe: the same recipe, input and seed give the same shards, byte for byte, with any number of processes."""

    sources: dict[str, SourceConfig] = setting({}, "files by source name; --input=GLOB defines one source named text")
    stages: tuple[str, ...] = setting(
        ("repair", "language", "exact_dedup", "near_dedup"), f"stages in order, from {', '.join((*STAGES, *JOINS))}"
    )
    read: RecipeReadConfig = setting(RecipeReadConfig)
    url_blocklist: curate.UrlConfig = setting(curate.UrlConfig)
    repair: curate.RepairConfig = setting(curate.RepairConfig)
    language: curate.LanguageConfig = setting(curate.LanguageConfig)
    gopher_repetition: curate.RepetitionConfig = setting(curate.RepetitionConfig)
    gopher_quality: curate.GopherConfig = setting(curate.GopherConfig)
    c4: curate.C4Config = setting(curate.C4Config)
    fineweb: curate.FineWebConfig = setting(curate.FineWebConfig)
    licence: curate.LicenceConfig = setting(curate.LicenceConfig)
    toxicity: curate.ToxicityConfig = setting(curate.ToxicityConfig)
    classifier: curate.ClassifierConfig = setting(curate.ClassifierConfig)
    exact_dedup: curate.ExactConfig = setting(curate.ExactConfig)
    line_dedup: curate.LineConfig = setting(curate.LineConfig)
    near_dedup: curate.NearConfig = setting(curate.NearConfig)
    substring: curate.SubstringConfig = setting(curate.SubstringConfig)
    decontaminate: curate.ContaminationConfig = setting(curate.ContaminationConfig)
    pii: PIIConfig = setting(PIIConfig)
    tokenizer: TokenizerConfig = setting(TokenizerConfig)
    write: WriteConfig = setting(WriteConfig)
    rows: RowsConfig = setting(RowsConfig)
    block_bytes: int = setting(16 << 20, "text that a process handles at a time")

    def __post_init__(self):
        if self.block_bytes < 1 << 10:
            raise BadInput(f"block_bytes={self.block_bytes} must be 1024 or more")
        if not self.sources:
            raise BadInput("sources is empty; give --input='raw/*.jsonl.gz', or sources in the recipe")
        known = (*STAGES, *JOINS)
        for name in self.stages:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; stages: {', '.join(known)}"
                raise BadInput(f"stages has {name!r}, which is not a stage{hint}")
        if twice := sorted({name for name in self.stages if self.stages.count(name) > 1}):
            raise BadInput(f"stages has {twice[0]!r} twice; each stage runs once")
        if "decontaminate" in self.stages and not self.decontaminate.files:
            raise BadInput(
                "stages has 'decontaminate', but decontaminate.files is empty; set it to the evaluation files or "
                "('none',), or remove the stage"
            )
        if "url_blocklist" in self.stages and not (self.url_blocklist.lists or self.url_blocklist.words):
            raise BadInput(
                "stages has 'url_blocklist' without a list; set url_blocklist.lists or url_blocklist.words, or "
                "remove the stage"
            )
        classifier = self.classifier
        if "classifier" in self.stages and not (classifier.weights or classifier.good and classifier.bad):
            raise BadInput(
                "stages has 'classifier' without a model; set classifier.good and classifier.bad to train one, or "
                "classifier.weights"
            )

    @property
    def globs(self) -> Globs:
        """File patterns of each source."""
        return {name: source.files for name, source in self.sources.items()}

    def read_cfg(self, source: str) -> DocumentsConfig:
        """Returns the settings for reading the files of a source."""
        source_cfg = self.sources[source]
        overrides = {} if source_cfg.text_field is None else {"text_field": source_cfg.text_field}
        language_field = self.read.language_field if self.language.known == "trust" else ""
        licence = source_cfg.licence or self.read.licence
        return dataclasses.replace(self.read, licence=licence, language_field=language_field, **overrides)
