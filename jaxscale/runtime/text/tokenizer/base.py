"""The tokenizer interface, special tokens, and the framing of documents with begin and end tokens."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxscale.runtime.text.tokenizer.config import SENTINEL_NAMES
from jaxscale.system.exits import BadInput

LONGEST_CAUSE = 300  # characters of a library's error message
LARGEST = 256 << 20  # bytes of a tokenizer file; the largest vocabularies have 40 MB
# Default end tokens by priority, for files without settings: GPT-2, Llama and SentencePiece, Llama 3, Gemma, ChatML
# models, BERT.
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
# Names of BERT, RoBERTa and T5, and in the style of GPT-2.
MARK_NAMES = {
    "mask_id": ("[MASK]", "<mask>", "<|mask|>"),
    "pad_id": ("[PAD]", "<pad>", "<|pad|>"),
    "cls_id": ("[CLS]", "<s>", "<|cls|>"),
    "sep_id": ("[SEP]", "</s>", "<|sep|>"),
}


class EncodedBlock(NamedTuple):
    """The concatenated ids of many texts."""

    ids: np.ndarray  # uint32[tokens]
    lengths: np.ndarray  # int64[texts]: tokens of each

    def split(self) -> list[np.ndarray]:
        """Returns the ids of each text."""
        return split_ids(self.ids, self.lengths)


def split_ids(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Splits concatenated ids; faster than np.split."""
    ends = np.cumsum(lengths).tolist()
    return [ids[begin:end] for begin, end in zip([0, *ends], ends)]


Encode = Callable[[Sequence[str]], EncodedBlock]


class ObjectiveTokens(NamedTuple):
    """Special tokens for training objectives, found by common names; None if the tokenizer lacks one."""

    mask_id: int | None = None
    pad_id: int | None = None
    cls_id: int | None = None
    sep_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()  # of span corruption, in order


class Tokenizer(Protocol):
    """Token ids are int32[tokens]. Text is never encoded as a special token, even if it contains the name of one."""

    name: str  # the value of data.tokenizer
    vocab_size: int  # the largest id + 1
    eos_id: int  # ends every document
    eos_token: str  # its name, as data.eos_token has it
    special_ids: Mapping[str, int]  # name -> id of every special token
    begin_ids: tuple[int, ...]  # begin every document and prompt; often none
    fingerprint: str  # of the file and the begin and end tokens: equal fingerprints give equal ids
    token_bytes: np.ndarray  # int32[vocab_size]: bytes of text of each id; 0 for special tokens
    fallback: np.ndarray  # bool[vocab_size]: ids of a byte of a multi-byte character, or of unknown text
    marks: ObjectiveTokens
    prefix_after_special: bool  # text after a special token is encoded as at the start of a document
    loss_reason: str = ""  # why decoding is lossy, if known from the file

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text, without begin and end tokens."""
        return self.encode_block([text]).ids.astype(np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text; faster if the library is multi-threaded."""
        return [ids.astype(np.int32) for ids in self.encode_block(texts).split()]

    def encode_block(self, texts: Sequence[str]) -> EncodedBlock:
        """Encodes each text into one array; used to prepare shards."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids without special tokens; invalid UTF-8 becomes U+FFFD."""
        ...

    def saved_file(self) -> tuple[str, bytes] | None:
        """Returns (name, content) of a single file that gives the same ids; None for bytes."""
        ...


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Converts errors of the tokenizers package to BadInput with the prefix `what`.

    The package raises a bare Exception for known faults, and PanicException, which is not an Exception, for others.
    """
    try:
        yield
    except BaseException as error:
        is_known = type(error) in (Exception, BadInput, UnicodeDecodeError) or type(error).__name__ == "PanicException"
        if not is_known:
            raise
        raise BadInput(f"{what}: {' '.join(str(error).split())[:LONGEST_CAUSE]}") from None


def choose_eos(path: str, eos_token: str, ids: dict[str, int]) -> int:
    """Returns the id of `eos_token`, or of the first of EOS_NAMES in `ids`. Raises BadInput if there is none."""
    if eos_token:
        if eos_token not in ids:
            raise BadInput(
                f"the end token {eos_token!r} of data.eos_token or the tokenizer's settings is not a token of {path}; "
                "change data.eos_token"
            )
        return ids[eos_token]
    if (name := next(filter(ids.__contains__, EOS_NAMES), None)) is None:
        raise BadInput(f"{path} has none of the common end-of-document tokens {EOS_NAMES}; set data.eos_token")
    return ids[name]


def choose_begin(names: Sequence[str] | None, added: Sequence[int], special_ids: Mapping[str, int]) -> tuple[int, ...]:
    """Returns ids of the special tokens that begin a document: `names`; None: those that the file adds to a text."""
    if names is None:
        return tuple(i for i in added if i in special_ids.values())
    return tuple(special_ids[name] for name in names if name in special_ids)


def begin_names(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the names of the tokens that begin a document."""
    names = {i: name for name, i in tokenizer.special_ids.items()}
    return tuple(names[i] for i in tokenizer.begin_ids)


def fingerprint(kind: str, content: bytes, eos_id: int, begin_ids: Sequence[int]) -> str:
    """Returns the sha256 of a file's content, its format, and the begin and end tokens."""
    begin = f"|{','.join(map(str, begin_ids))}" if begin_ids else ""
    return hashlib.sha256(content + f"|{kind}|{eos_id}{begin}".encode()).hexdigest()


def find_objective_tokens(ids: Mapping[str, int]) -> ObjectiveTokens:
    """Finds objective tokens among the special tokens `ids` (name -> id). Sentinels count from 0 without gaps."""
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
    """Concatenates the ids of each text."""
    parts = [np.asarray(ids, np.uint32) for ids in encoded]
    ids = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
    return EncodedBlock(ids, np.array([len(part) for part in parts], np.int64))


def frame_documents(block: EncodedBlock, tokenizer: Tokenizer, dtype: np.dtype) -> EncodedBlock:
    """Adds begin and end tokens to every document. Raises BadInput for an id outside the vocabulary or dtype."""
    begin, eos_id, vocab_size = list(tokenizer.begin_ids), tokenizer.eos_id, tokenizer.vocab_size
    largest = max(int(block.ids.max(initial=0)), eos_id, *begin)
    if largest >= vocab_size or largest > np.iinfo(dtype).max:
        raise BadInput(
            f"token id {largest} is not below vocab_size={vocab_size}, or does not fit in {np.dtype(dtype).name}; "
            "the shards must be written with the tokenizer in their header"
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
