"""Tokenizers in the tokenizer.json and vocab.txt formats, by the `tokenizers` package."""

import contextlib
import functools
import json
import re
from collections.abc import Sequence

import numpy as np
import tokenizers

from jaxscale.system import foreign
from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.added import Neighbors, add_all
from jaxscale.text.tokenizer.base import (
    LARGEST,
    Block,
    Encode,
    Tokenizer,
    block_of,
    choose_begin,
    choose_eos,
    faults_of,
    find_marks,
    fingerprint,
)
from jaxscale.text.tokenizer.config import EncodeConfig
from jaxscale.text.tokenizer.fast import make_encode
from jaxscale.text.tokenizer.split import byte_alphabet
from jaxscale.text.tokenizer.wordpiece import read_vocab_txt

JSON, VOCAB_TXT = "tokenizer.json", "vocab.txt"


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json or a vocab.txt. The name of a special token inside a text is plain text and ends no document.

    Many texts at once go through the fastest encoder that gives the same ids (see fast.py); `encoder` names it.
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
        self._tokenizer.no_truncation()  # both are saved in some files, made for a model of fixed length
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
        self.marks = find_marks(self.special_ids)
        self.special_ids |= {name: i for name, i in ids.items() if i == self.eos_id}
        self.begin_ids = choose_begin(begin_tokens, whole.ids[:first], self.special_ids)
        name, content = self.saved_file()
        kind = name if name == VOCAB_TXT else "tokenizers"
        self.fingerprint = fingerprint(kind, content, self.eos_id, self.begin_ids)
        self.prefix_after_special = self._restarts_after_special()
        self.token_bytes, self.fallback = self._count_bytes(json.loads(self._tokenizer.to_str()))

    def saved_file(self) -> tuple[str, bytes]:
        """Returns (name, content) of the one file that gives the same ids; with added tokens a tokenizer.json."""
        if self._is_changed:
            return JSON, self._tokenizer.to_str().encode()
        return VOCAB_TXT if self.name.endswith(".txt") else JSON, foreign.read_named(self.name, LARGEST)

    def _restarts_after_special(self) -> bool:
        """Returns True if a text behind a special token is encoded as at the beginning of a document."""
        name = next((name for name, i in self.special_ids.items() if i == self.eos_id), "")
        self._tokenizer.encode_special_tokens = False
        with self._works():
            ids = self._tokenizer.encode(f"{name}a", add_special_tokens=False).ids
        self._tokenizer.encode_special_tokens = True
        return ids[:1] == [self.eos_id] and ids[1:] == self.encode("a").tolist()

    @property
    def encoder(self) -> str:
        """The package that encodes many texts: 'gigatoken', 'tiktoken' or 'tokenizers'."""
        return self._fast[0]

    def encode(self, text: str) -> np.ndarray:
        """int32[tokens], no special token among them."""
        with self._works():
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_block(self, texts: Sequence[str]) -> Block:
        """encode for each text, as one array.

        Raises: BadInput if a fast encoder is found to differ, or if a text is not valid Unicode.
        """
        try:
            return self._fast[1](texts)
        except (TypeError, UnicodeEncodeError):  # all that the packages say of a text that cannot be UTF-8
            for text in texts:
                check_text(text)
            raise

    @functools.cached_property
    def _fast(self) -> tuple[str, Encode]:
        """(name, encoder), made and tried when many texts are first asked for."""
        return make_encode(self.name, json.loads(self._tokenizer.to_str()), self._encode_exactly, self._encoding)

    def _encode_exactly(self, texts: Sequence[str]) -> Block:
        """encode_block by the tokenizers package."""
        with self._works():
            return block_of(one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, special tokens left out."""
        with self._works():
            return self._tokenizer.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=True)

    def _works(self) -> contextlib.AbstractContextManager[None]:
        """Around what the package does with a text: some files are read, and encode none."""
        return faults_of(f"data.tokenizer={self.name} does not work")

    def _count_bytes(self, spec: dict) -> tuple[np.ndarray, np.ndarray]:
        """(token_bytes, fallback).

        Bytes are exact for byte-level models and those with SentencePiece's alphabet; else those of the token's name. A
        normalizer that changes the text (lower case, NFC) changes its bytes before they are counted.
        """
        byte_level = '"ByteLevel"' in json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")])
        unknown = (spec.get("model") or {}).get("unk_token")
        added = self._tokenizer.get_added_tokens_decoder()
        byte_of = byte_alphabet()
        if byte_level and unknown is None and (absent := byte_of.keys() - self._tokenizer.get_vocab().keys()):
            self.loss_reason = (
                f"its vocabulary lacks {len(absent)} of the 256 bytes and it has no unknown token: train it again with "
                "initial_alphabet=ByteLevel.alphabet(), or name another tokenizer"
            )
        counts, fallback = np.zeros(self.vocab_size, np.int32), np.zeros(self.vocab_size, bool)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in added:
                counts[i] = 0 if added[i].special else len(token.encode())
                fallback[i] = token == unknown
            elif byte_level:
                counts[i] = len(token)  # one character stands for one byte
                fallback[i] = byte_of.get(token, 0) >= 0x80
            else:
                counts[i] = piece_bytes(token)
                fallback[i] = token == unknown or is_byte_piece(token)
        return counts, fallback


def read_file(path: str, neighbors: Neighbors) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns the tokenizer of a file with the tokens of the files next to it, and whether that changed it.

    Raises: BadInput for what cannot be read, and for a file that gives other ids each time or contradicts the others.
    """
    content, settings = foreign.read_named(path, LARGEST), dict(neighbors.settings)
    if path.endswith(".model"):
        from jaxscale.text.tokenizer.sentencepiece_json import convert

        made, is_changed = convert(content, path, neighbors), True
    else:
        is_list = path.endswith(".txt")
        lowercase = settings.get("do_lower_case")
        with faults_of(f"data.tokenizer={path} cannot be read as a {f'WordPiece {VOCAB_TXT}' if is_list else JSON}"):
            made = read_vocab_txt(content, lowercase) if is_list else tokenizers.Tokenizer.from_str(content.decode())
        is_changed = is_list and lowercase is not None
    check_deterministic(path, made.model)
    check_prefix_space(path, made, settings.get("add_prefix_space"))
    with faults_of(f"data.tokenizer={path} does not work"):
        return made, add_all(made, neighbors.added, f"data.tokenizer={path}") or is_changed


def check_deterministic(path: str, model: tokenizers.models.Model) -> None:
    """Raises BadInput for a model that draws its ids: training could neither be repeated nor resumed."""
    found = {name: getattr(model, name, None) for name in ("dropout", "alpha", "nbest_size")}
    for name, value in found.items():
        if value:
            raise BadInput(
                f"data.tokenizer={path}: {name}={value} in its model gives the same text other ids each time; set "
                f'"{name}" to null in that file'
            )


def check_prefix_space(path: str, made: tokenizers.Tokenizer, declared: bool | None) -> None:
    """Raises BadInput where the two files differ on a space before a text: transformers 4 follows one, 5 the other."""
    actual = getattr(made.pre_tokenizer, "add_prefix_space", None)
    if isinstance(declared, bool) and isinstance(actual, bool) and actual != declared and path.endswith(JSON):
        raise BadInput(
            f"data.tokenizer={path}: its pre_tokenizer has add_prefix_space={actual}, and tokenizer_config.json next "
            f"to it says {declared}; make them agree"
        )


def check_text(text: str) -> None:
    """Checks that the text can be encoded as UTF-8. Raises BadInput that shows where it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[max(0, error.start - 20) : error.start + 20]
        raise BadInput(f"half a surrogate pair at character {error.start} of a text, near {shown!r}") from None


def is_byte_piece(piece: str) -> bool:
    """True for SentencePiece's name of a byte, '<0x0A>'."""
    return re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece) is not None


def piece_bytes(piece: str) -> int:
    """Bytes of text behind a piece in SentencePiece's alphabet: '▁' is a space, '<0x0A>' one byte, '##' only a mark."""
    if is_byte_piece(piece):
        return 1
    return len(piece.replace("▁", " ").removeprefix("##").encode()) or len(piece)
