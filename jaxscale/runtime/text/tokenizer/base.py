"""Interface of tokenizers, and functions for special tokens and for begin and end tokens of documents."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxscale.runtime.text.tokenizer.config import SENTINEL_NAMES
from jaxscale.system.exits import BadInput

LONGEST_CAUSE = 300  # characters of a library's error message to show
LARGEST = 256 << 20  # limit for the bytes of a tokenizer file; the largest vocabularies have 40 MB
# Default end tokens in order of priority: GPT-2, Llama and SentencePiece, Llama 3, Gemma, ChatML models, BERT.
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
# Names in BERT, names in RoBERTa and T5, and names in the style of GPT-2.
MARK_NAMES = {
    "mask_id": ("[MASK]", "<mask>", "<|mask|>"),
    "pad_id": ("[PAD]", "<pad>", "<|pad|>"),
    "cls_id": ("[CLS]", "<s>", "<|cls|>"),
    "sep_id": ("[SEP]", "</s>", "<|sep|>"),
}


class EncodedBlock(NamedTuple):
    """The concatenated ids of many texts."""

    ids: np.ndarray  # uint32[tokens]
    lengths: np.ndarray  # int64[texts]: number of tokens of each text

    def split(self) -> list[np.ndarray]:
        """Returns the ids of each text."""
        return split_ids(self.ids, self.lengths)


def split_ids(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Splits concatenated ids into arrays of the given lengths, faster than np.split."""
    ends = np.cumsum(lengths).tolist()
    return [ids[begin:end] for begin, end in zip([0, *ends], ends)]


Encode = Callable[[Sequence[str]], EncodedBlock]


class ObjectiveTokens(NamedTuple):
    """Special tokens for training objectives, found by their usual names. Missing tokens are None."""

    mask_id: int | None = None
    pad_id: int | None = None
    cls_id: int | None = None
    sep_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()  # sentinels of span corruption, in order


class Tokenizer(Protocol):
    """Interface of tokenizers. Names of special tokens in text are encoded as ordinary text."""

    name: str  # value of data.tokenizer
    vocab_size: int  # largest id + 1
    eos_id: int  # id of the end token, at the end of each document
    eos_token: str  # name of the end token
    special_ids: Mapping[str, int]  # {name: id} of all special tokens
    begin_ids: tuple[int, ...]  # ids at the start of each document and prompt; often empty
    fingerprint: str  # hash of the file, begin tokens and end token; equal fingerprints give equal ids
    token_bytes: np.ndarray  # int32[vocab_size]: number of text bytes of each id; 0 for special tokens
    fallback: np.ndarray  # bool[vocab_size]: True for bytes of multi-byte characters and for unknown text
    marks: ObjectiveTokens
    prefix_after_special: bool  # True if text after a special token is encoded as at the start of a document
    loss_reason: str = ""  # reason why decoding is lossy, if known from the file

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text as int32[tokens], without begin and end tokens."""
        return self.encode_block([text]).ids.astype(np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text as int32[tokens]. Faster than `encode` if the library is multi-threaded."""
        return [ids.astype(np.int32) for ids in self.encode_block(texts).split()]

    def encode_block(self, texts: Sequence[str]) -> EncodedBlock:
        """Encodes texts into one concatenated array, for writing shards."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids, and drops special tokens. Invalid UTF-8 becomes U+FFFD."""
        ...

    def saved_file(self) -> tuple[str, bytes] | None:
        """Returns (name, content) of a tokenizer file that gives the same ids, or None for the byte tokenizer."""
        ...


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Converts errors of the tokenizers package to BadInput with the prefix `what`.

    The package raises Exception for known errors. For other errors it raises PanicException, which is not an Exception.
    """
    try:
        yield
    except BaseException as error:
        is_known = type(error) in (Exception, BadInput, UnicodeDecodeError) or type(error).__name__ == "PanicException"
        if not is_known:
            raise
        raise BadInput(f"{what}: {' '.join(str(error).split())[:LONGEST_CAUSE]}") from None


def choose_eos(path: str, eos_token: str, ids: dict[str, int]) -> int:
    """Returns the id of `eos_token` or, if it is empty, of the first name in EOS_NAMES that `ids` contains."""
    if eos_token:
        if eos_token not in ids:
            raise BadInput(
                f"{eos_token!r}, the end token in data.eos_token or in the tokenizer's settings, is not a token of "
                f"{path}; set data.eos_token to a token of this file"
            )
        return ids[eos_token]
    if (name := next(filter(ids.__contains__, EOS_NAMES), None)) is None:
        raise BadInput(f"{path} has none of the common end-of-document tokens {EOS_NAMES}; set data.eos_token")
    return ids[name]


def choose_begin(names: Sequence[str] | None, added: Sequence[int], special_ids: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ids of the begin tokens. If `names` is None, they are the special tokens in `added`."""
    if names is None:
        return tuple(i for i in added if i in special_ids.values())
    return tuple(special_ids[name] for name in names if name in special_ids)


def begin_names(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the names of the begin tokens of documents."""
    names = {i: name for name, i in tokenizer.special_ids.items()}
    return tuple(names[i] for i in tokenizer.begin_ids)


def fingerprint(kind: str, content: bytes, eos_id: int, begin_ids: Sequence[int]) -> str:
    """Returns the SHA-256 of a tokenizer's file content, file format, end token and begin tokens."""
    begin = f"|{','.join(map(str, begin_ids))}" if begin_ids else ""
    return hashlib.sha256(content + f"|{kind}|{eos_id}{begin}".encode()).hexdigest()


def find_objective_tokens(ids: Mapping[str, int]) -> ObjectiveTokens:
    """Finds the tokens for training objectives in {name: id}. Sentinels are numbered from 0 without gaps."""
    first = lambda mark: next((ids[name] for name in MARK_NAMES[mark] if name in ids), None)
    found = ObjectiveTokens(first("mask_id"), first("pad_id"), first("cls_id"), first("sep_id"))
    for pattern in SENTINEL_NAMES:
        sentinels = []
        while (name := pattern.format(len(sentinels))) in ids:
            sentinels.append(ids[name])
        if sentinels:
            return found._replace(sentinel_ids=tuple(sentinels))
    return found


def concat_block(encoded: Iterable[np.ndarray | Sequence[int]]) -> EncodedBlock:
    """Concatenates the ids of texts into an EncodedBlock."""
    parts = [np.asarray(ids, np.uint32) for ids in encoded]
    ids = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
    return EncodedBlock(ids, np.array([len(part) for part in parts], np.int64))


def frame_documents(block: EncodedBlock, tokenizer: Tokenizer, dtype: np.dtype) -> EncodedBlock:
    """Adds begin and end tokens to each document. Raises BadInput if an id is outside the vocabulary or dtype."""
    begin, eos_id, vocab_size = list(tokenizer.begin_ids), tokenizer.eos_id, tokenizer.vocab_size
    largest = max(int(block.ids.max(initial=0)), eos_id, *begin)
    if largest >= vocab_size or largest > np.iinfo(dtype).max:
        raise BadInput(
            f"token id {largest} must be below vocab_size={vocab_size} and fit in {np.dtype(dtype).name}; "
            "encode the shards with the tokenizer that their header names"
        )
    lengths = block.lengths + len(begin) + 1
    ends = np.cumsum(lengths)
    ids = np.empty(int(ends[-1]) if len(ends) else 0, dtype)
    is_text = np.ones(len(ids), bool)
    for places, i in [(ends - 1, eos_id), *((ends - lengths + n, i) for n, i in enumerate(begin))]:
        is_text[places] = False
        ids[places] = i
    ids[is_text] = block.ids
    return EncodedBlock(ids, lengths)
