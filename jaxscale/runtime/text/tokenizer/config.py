"""Settings of tokenizer training and encoding."""

import dataclasses
from typing import Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

BERT_NAMES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # in the order of BERT's vocabulary files
SENTINEL_NAMES = ("<extra_id_{}>", "<|reserved_special_token_{}|>")  # T5; Llama 3
Split = Literal["gpt2", "cl100k", "o200k"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """Settings of encoders for a tokenizer.json. All encoders give the same ids."""

    encoder: Literal["auto", "gigatoken", "tiktoken", "exact"] = setting(
        "auto",
        "encoder of byte-level BPE; auto: gigatoken if it is installed and supports the file's split pattern, else "
        "tiktoken, else the tokenizers package; exact: the tokenizers package, without checks",
    )
    check_every: int = setting(
        1000, "compare one of this number of documents with the ids of the tokenizers package; 0: no comparison"
    )

    def __post_init__(self):
        if self.check_every < 0:
            raise BadInput(f"check_every={self.check_every} must be at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig:
    """Settings of tokenizer training."""

    kind: Literal["bpe", "sentencepiece_bpe", "unigram", "wordpiece"] = setting(
        "bpe",
        "algorithm and file format; bpe: byte-level BPE as in GPT-2 and Llama 3 (tokenizer.json); sentencepiece_bpe: "
        "as in Llama 2 and Gemma (.model); unigram: SentencePiece as in T5 (.model); wordpiece: as in BERT, for masked "
        "language models (tokenizer.json)",
    )
    vocab_size: int = setting(32_768, "number of ids including special tokens, usually 32K to 100K; up to 65,536, "
                              "shards use two bytes per id")  # fmt: skip
    trainer: Literal["rustbpe", "tokenizers"] = setting(
        "rustbpe", "for kind=bpe: training package; rustbpe is twice as fast; the results differ"
    )
    split: Split = setting(
        "gpt2", "for kind=bpe: pattern that splits text into words, from GPT-2 or tiktoken (cl100k, as Llama 3; o200k)"
    )
    byte_fallback: bool = setting(
        True,
        "for SentencePiece; true: encode characters outside the vocabulary as bytes, which makes decoding lossless",
    )
    character_coverage: float = setting(0.9995, "for SentencePiece: fraction of characters that get a token")
    lowercase: bool = setting(True, "for kind=wordpiece; true: convert to lower case, as in uncased BERT")
    strip_accents: bool = setting(True, "for kind=wordpiece; true: remove accents, as in uncased BERT")
    max_alphabet: int = setting(
        1000, "for kind=wordpiece: largest number of distinct characters; words with other characters are [UNK]"
    )
    eos_token: str = setting("<|endoftext|>", "end-of-document token; not used for kind=wordpiece, which uses [SEP]")
    special_tokens: tuple[str, ...] = setting(
        (), "additional special tokens, with ids after the end token; text is never encoded as a special token"
    )
    reserved: int = setting(0, "number of sentinels <extra_id_0>, <extra_id_1>, ... for span corruption or future use")
    sample_bytes: int = setting(
        1 << 30, "size in bytes of the training sample, which is in memory and selected by a hash of each document"
    )
    seed: int = setting(0, "seed of the selection of the sample")

    def __post_init__(self):
        names = special_names(self)
        has_bytes = self.kind == "bpe" or self.is_sentencepiece and self.byte_fallback
        smallest = len(names) + (256 if has_bytes else 1)
        if self.vocab_size <= smallest:
            pieces = "256 bytes" if has_bytes else "one token"
            raise BadInput(
                f"vocab_size={self.vocab_size} must exceed {smallest}, to fit {pieces} and {len(names)} special tokens"
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadInput(f"duplicates in special_tokens, eos_token and reserved tokens: {twice}")
        if "" in names:
            raise BadInput("eos_token and special_tokens must not be empty")
        if self.sample_bytes < 1 or self.reserved < 0 or self.max_alphabet < 1:
            raise BadInput(
                f"sample_bytes={self.sample_bytes} and max_alphabet={self.max_alphabet} must be above 0, and "
                f"reserved={self.reserved} must be at least 0"
            )
        if not 0 < self.character_coverage <= 1:
            raise BadInput(f"character_coverage={self.character_coverage} must be above 0 and at most 1")

    @property
    def is_sentencepiece(self) -> bool:
        """Returns True if the tokenizer is a SentencePiece .model."""
        return self.kind in ("sentencepiece_bpe", "unigram")

    @property
    def ending(self) -> str:
        """Returns the suffix of the tokenizer file."""
        return ".model" if self.is_sentencepiece else ".json"


def special_names(cfg: TrainTokenizerConfig) -> list[str]:
    """Returns all special tokens in the order of their ids."""
    first = BERT_NAMES if cfg.kind == "wordpiece" else (cfg.eos_token,)
    return [*first, *cfg.special_tokens, *(SENTINEL_NAMES[0].format(n) for n in range(cfg.reserved))]
