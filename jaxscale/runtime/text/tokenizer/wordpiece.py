"""WordPiece (arXiv:1810.04805): loads BERT's vocab.txt files and trains such vocabularies."""

from collections import Counter
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxscale.runtime.text.tokenizer.config import BERT_NAMES, TrainTokenizerConfig, special_names
from jaxscale.system.exits import BadInput

PREFIX = "##"  # prefix of pieces inside a word


def read_vocab_txt(content: bytes, lowercase: bool | None = None) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a vocab.txt. lowercase: None: decided by the pieces."""
    pieces = content.decode().removesuffix("\n").split("\n")
    ids = {piece.removesuffix("\r"): i for i, piece in enumerate(pieces)}
    if "[UNK]" not in ids:
        raise BadInput("it has no [UNK]")
    if len(ids) != len(pieces):
        raise BadInput(f"{len(pieces) - len(ids)} of its {len(pieces)} lines are duplicates")
    words = [piece for piece in ids if not (piece.startswith("[") and piece.endswith("]"))]
    uncased = not any("A" <= character <= "Z" for piece in words for character in piece)
    uncased = uncased if lowercase is None else lowercase
    return build_wordpiece(ids, [name for name in BERT_NAMES if name in ids], lowercase=uncased, strip_accents=uncased)


def build_wordpiece(
    ids: dict[str, int], special: Sequence[str], *, lowercase: bool, strip_accents: bool
) -> tokenizers.Tokenizer:
    """Builds a tokenizer with the pieces `ids`; text is never encoded as a `special` one.

    BERT's normalizer removes control characters and puts spaces around Chinese characters; published models are uncased
    (lower case, accents stripped) or cased (neither).
    """
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]", continuing_subword_prefix=PREFIX))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=PREFIX)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def train_wordpiece(texts: Sequence[str], cfg: TrainTokenizerConfig) -> tokenizers.Tokenizer:
    """Trains a WordPiece tokenizer with at most cfg.vocab_size pieces, independent of the order of `texts`.

    The trainer numbers characters inside words in the order of a hash table that differs between runs, and breaks ties
    by these numbers. So both forms of each character are passed first, as special tokens.
    """
    special, normaliser = special_names(cfg), dict(lowercase=cfg.lowercase, strip_accents=cfg.strip_accents)
    tokenizer = build_wordpiece({"[UNK]": 0}, (), **normaliser)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    for character in [character for character in counts if character.isspace()]:
        del counts[character]
    alphabet = sorted(sorted(counts, key=lambda character: (-counts[character], character))[: cfg.max_alphabet])
    first = [*special, *alphabet, *(PREFIX + character for character in alphabet)]
    if len(first) > cfg.vocab_size:
        raise BadInput(
            f"vocab_size={cfg.vocab_size} has no room for {len(special)} special tokens and {len(alphabet)} characters "
            "in two forms each; raise it, or lower max_alphabet"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=cfg.vocab_size, special_tokens=first, initial_alphabet=alphabet, limit_alphabet=len(alphabet),
        continuing_subword_prefix=PREFIX, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return build_wordpiece(tokenizer.get_vocab(with_added_tokens=True), special, **normaliser)
