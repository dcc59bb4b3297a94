"""Loads a tokenizer.json or vocab.txt with the `tokenizers` package, and trains WordPiece (arXiv:1810.04805)."""

import contextlib
import functools
import json
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxscale.runtime.text.tokenizer.added import Neighbors, add_all
from jaxscale.runtime.text.tokenizer.base import (
    LARGEST,
    Encode,
    EncodedBlock,
    Tokenizer,
    choose_begin,
    choose_eos,
    concat_block,
    find_objective_tokens,
    fingerprint,
    library_errors,
)
from jaxscale.runtime.text.tokenizer.bpe import byte_alphabet
from jaxscale.runtime.text.tokenizer.config import BERT_NAMES, EncodeConfig, TrainTokenizerConfig, special_names
from jaxscale.runtime.text.tokenizer.fast import make_encode
from jaxscale.system import foreign
from jaxscale.system.exits import BadInput

JSON, VOCAB_TXT = "tokenizer.json", "vocab.txt"
PREFIX = "##"  # prefix of WordPiece pieces that do not begin a word


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json or vocab.txt. Names of special tokens in text are encoded as plain text.

    Batches of texts are encoded by the fastest package that gives the same ids (see fast.py).
    """

    def __init__(
        self,
        path: str,
        eos_token: str = "",
        begin_tokens: Sequence[str] | None = None,
        encoding: EncodeConfig = EncodeConfig(),  # noqa: B008 - frozen
        neighbors: Neighbors = Neighbors(),  # noqa: B008 - a tuple
    ):
        self._tokenizer, self._is_changed = read_file(path, neighbors)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()  # truncation and padding are saved in some files
        self._tokenizer.no_padding()
        self._encoding = encoding
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = path
        self.vocab_size = max(ids.values()) + 1
        self.eos_id = choose_eos(path, eos_token, ids)
        self.eos_token = self._tokenizer.id_to_token(self.eos_id) or ""
        with self._works():
            whole = self._tokenizer.encode("a", add_special_tokens=True)
        first = next((place for place, word in enumerate(whole.word_ids) if word is not None), 0)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {name: i for name, i in ids.items() if i in added and added[i].special}
        self.marks = find_objective_tokens(self.special_ids)
        self.special_ids |= {name: i for name, i in ids.items() if i == self.eos_id}
        self.begin_ids = choose_begin(begin_tokens, whole.ids[:first], self.special_ids)
        name, content = self.saved_file()
        kind = name if name == VOCAB_TXT else "tokenizers"
        self.fingerprint = fingerprint(kind, content, self.eos_id, self.begin_ids)
        self.prefix_after_special = self._restarts_after_special()
        self.token_bytes, self.fallback = self._count_bytes(json.loads(self._tokenizer.to_str()))

    def saved_file(self) -> tuple[str, bytes]:
        """Returns (name, content) of a tokenizer file that gives the same ids and includes added tokens."""
        if self._is_changed:
            return JSON, self._tokenizer.to_str().encode()
        return VOCAB_TXT if self.name.endswith(".txt") else JSON, foreign.read_named(self.name, LARGEST)

    def _restarts_after_special(self) -> bool:
        """Returns True if text after a special token is encoded like text at the start of a document."""
        name = next((name for name, i in self.special_ids.items() if i == self.eos_id), "")
        self._tokenizer.encode_special_tokens = False
        with self._works():
            ids = self._tokenizer.encode(f"{name}a", add_special_tokens=False).ids
        self._tokenizer.encode_special_tokens = True
        return ids[:1] == [self.eos_id] and ids[1:] == self.encode("a").tolist()

    @property
    def encoder(self) -> str:
        """Returns the package that encodes batches: 'gigatoken', 'tiktoken' or 'tokenizers'."""
        return self._fast[0]

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text as int32[tokens], without special tokens."""
        with self._works():
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_block(self, texts: Sequence[str]) -> EncodedBlock:
        """Encodes texts into one array. Raises BadInput for invalid Unicode, or if encoders give different ids."""
        try:
            return self._fast[1](texts)
        except (TypeError, UnicodeEncodeError):  # raised by the packages for invalid Unicode
            for text in texts:
                check_text(text)
            raise

    @functools.cached_property
    def _fast(self) -> tuple[str, Encode]:
        """Returns (package, encode) of the fast encoder, which is created and checked at its first use."""
        return make_encode(self.name, json.loads(self._tokenizer.to_str()), self._encode_exactly, self._encoding)

    def _encode_exactly(self, texts: Sequence[str]) -> EncodedBlock:
        """Encodes texts with the tokenizers package."""
        with self._works():
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return concat_block(one.ids for one in encoded)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids, and drops special tokens."""
        with self._works():
            return self._tokenizer.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=True)

    def _works(self) -> contextlib.AbstractContextManager[None]:
        """Converts errors of the tokenizers package to BadInput. Some files can be loaded but fail to encode."""
        return library_errors(f"data.tokenizer={self.name} cannot be used")

    def _count_bytes(self, spec: dict) -> tuple[np.ndarray, np.ndarray]:
        """Returns the arrays token_bytes and fallback of Tokenizer.

        The counts are exact for byte-level models and SentencePiece's alphabet. For other models, the bytes of the
        token's name are counted. Text is counted after normalization (lower case, NFC).
        """
        byte_level = '"ByteLevel"' in json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")])
        unknown = (spec.get("model") or {}).get("unk_token")
        added = self._tokenizer.get_added_tokens_decoder()
        byte_of = byte_alphabet()
        if byte_level and unknown is None and (absent := byte_of.keys() - self._tokenizer.get_vocab().keys()):
            self.loss_reason = (
                f"its vocabulary lacks {len(absent)} of the 256 bytes, and it has no unknown token; retrain it with "
                "initial_alphabet=ByteLevel.alphabet(), or use a different tokenizer"
            )
        counts, fallback = np.zeros(self.vocab_size, np.int32), np.zeros(self.vocab_size, bool)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in added:
                counts[i] = 0 if added[i].special else len(token.encode())
                fallback[i] = token == unknown
            elif byte_level:
                counts[i] = len(token)  # one character per byte
                fallback[i] = byte_of.get(token, 0) >= 0x80
            elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):  # SentencePiece's name for a byte
                counts[i], fallback[i] = 1, True
            else:  # '▁' represents a space, '##' represents no text
                counts[i] = len(token.replace("▁", " ").removeprefix("##").encode()) or len(token)
                fallback[i] = token == unknown
        return counts, fallback


def read_file(path: str, neighbors: Neighbors) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns (tokenizer with the added tokens of `neighbors`, True if it differs from the file)."""
    content, settings = foreign.read_named(path, LARGEST), dict(neighbors.settings)
    if path.endswith(".model"):
        from jaxscale.runtime.text.tokenizer.sentencepiece import convert

        made, is_changed = convert(content, path, neighbors), True
    else:
        is_list = path.endswith(".txt")
        lowercase = settings.get("do_lower_case")
        kind = f"WordPiece {VOCAB_TXT}" if is_list else JSON
        with library_errors(f"data.tokenizer={path} cannot be read as a {kind}"):
            made = read_vocab_txt(content, lowercase) if is_list else tokenizers.Tokenizer.from_str(content.decode())
        is_changed = is_list and lowercase is not None
    for name in ("dropout", "alpha", "nbest_size"):  # with random ids, training would not be reproducible
        if value := getattr(made.model, name, None):
            raise BadInput(
                f"data.tokenizer={path} has the model setting {name}={value}, which makes token ids random; set "
                f'"{name}" to null in the file'
            )
    declared, actual = settings.get("add_prefix_space"), getattr(made.pre_tokenizer, "add_prefix_space", None)
    is_known = isinstance(declared, bool) and isinstance(actual, bool) and path.endswith(JSON)
    if is_known and actual != declared:  # transformers 4 and 5 use different values
        raise BadInput(
            f"data.tokenizer={path}: its pre_tokenizer has add_prefix_space={actual}, but tokenizer_config.json in the "
            f"same folder has {declared}; set both to the same value"
        )
    with library_errors(f"data.tokenizer={path} cannot be used"):
        return made, add_all(made, neighbors.added, f"data.tokenizer={path}") or is_changed


def check_text(text: str) -> None:
    """Raises BadInput if the text has an unpaired surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 20) : error.start + 20]
        raise BadInput(f"a text has an unpaired surrogate at character {error.start}, near {shown!r}") from None


def read_vocab_txt(content: bytes, lowercase: bool | None = None) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a vocab.txt. If `lowercase` is None, it is inferred from the pieces."""
    pieces = content.decode().removesuffix("\n").split("\n")
    ids = {piece.removesuffix("\r"): i for i, piece in enumerate(pieces)}
    if "[UNK]" not in ids:
        raise BadInput("the file has no [UNK] token")
    if len(ids) != len(pieces):
        raise BadInput(f"{len(pieces) - len(ids)} of the {len(pieces)} lines are duplicates")
    words = [piece for piece in ids if not (piece.startswith("[") and piece.endswith("]"))]
    uncased = not any("A" <= character <= "Z" for piece in words for character in piece)
    uncased = uncased if lowercase is None else lowercase
    return build_wordpiece(ids, [name for name in BERT_NAMES if name in ids], lowercase=uncased, strip_accents=uncased)


def build_wordpiece(
    ids: dict[str, int], special: Sequence[str], *, lowercase: bool, strip_accents: bool
) -> tokenizers.Tokenizer:
    """Builds a WordPiece tokenizer. ids: {piece: id}. special: names of special tokens.

    BERT's normalizer removes control characters and adds spaces around Chinese characters. For uncased models, it also
    converts text to lower case and removes accents.
    """
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]", continuing_subword_prefix=PREFIX))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=PREFIX)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def train_wordpiece(texts: Sequence[str], cfg: TrainTokenizerConfig) -> tokenizers.Tokenizer:
    """Trains a WordPiece tokenizer with at most cfg.vocab_size pieces. The order of `texts` has no effect.

    The trainer numbers the characters inside words in a random order, which affects ties. For a fixed order, every
    character is passed as a special token, with and without the prefix.
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
            f"vocab_size={cfg.vocab_size} is too small for {len(special)} special tokens plus two ids for each of "
            f"{len(alphabet)} characters; increase vocab_size, or reduce max_alphabet"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=cfg.vocab_size, special_tokens=first, initial_alphabet=alphabet, limit_alphabet=len(alphabet),
        continuing_subword_prefix=PREFIX, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return build_wordpiece(tokenizer.get_vocab(with_added_tokens=True), special, **normaliser)
