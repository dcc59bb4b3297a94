"""The tokenizer interface, special tokens, and the framing of documents with begin and end tokens."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.config import SENTINEL_NAMES

LONGEST_CAUSE = 300  # characters of what a library says of a file
LARGEST = 256 << 20  # bytes of a tokenizer's file; the largest vocabularies have 40 MB
# Of a file with nothing beside it that names one, in the order they are looked for: GPT-2, Llama and SentencePiece,
# Llama 3, Gemma, ChatML models, BERT.
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
# BERT, RoBERTa and T5, and the manner of GPT-2's.
MARK_NAMES = {
    "mask_id": ("[MASK]", "<mask>", "<|mask|>"),
    "pad_id": ("[PAD]", "<pad>", "<|pad|>"),
    "cls_id": ("[CLS]", "<s>", "<|cls|>"),
    "sep_id": ("[SEP]", "</s>", "<|sep|>"),
}


class Block(NamedTuple):
    """The ids of many texts one after the other."""

    ids: np.ndarray  # uint32[tokens]
    lengths: np.ndarray  # int64[texts]: tokens of each

    def split(self) -> list[np.ndarray]:
        """The ids of each text."""
        return cut_at(self.ids, self.lengths)


def cut_at(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The ids of each document, of so many laid end to end. np.split does more for each slice."""
    ends = np.cumsum(lengths).tolist()
    return [ids[begin:end] for begin, end in zip([0, *ends], ends)]


Encode = Callable[[Sequence[str]], Block]


class Marks(NamedTuple):
    """Special tokens that objectives need, found by their usual names; None where a tokenizer has none."""

    mask_id: int | None = None
    pad_id: int | None = None
    cls_id: int | None = None
    sep_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()  # of span corruption, the first one first


class Tokenizer(Protocol):
    """Token ids are int32[tokens]. No special token ever comes out of a text, whatever the text says."""

    name: str  # what data.tokenizer says, to find it again
    vocab_size: int  # the largest id + 1
    eos_id: int  # ends every document
    eos_token: str  # its name, as data.eos_token has it
    special_ids: Mapping[str, int]  # name -> id of every special token
    begin_ids: tuple[int, ...]  # begin every document, and every text that a model reads; often none
    fingerprint: str  # of the file and of what begins and ends a document: equal fingerprints, equal ids
    token_bytes: np.ndarray  # int32[vocab_size]: bytes of text that each id stands for; 0 for special tokens
    fallback: np.ndarray  # bool[vocab_size]: ids of a byte out of a longer character, or of whatever is not known
    marks: Marks
    prefix_after_special: bool  # a text behind a special token begins as a document does
    loss_reason: str = ""  # why it cannot give every text back, where its file says so

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, without any that begins or ends it."""
        return self.encode_block([text]).ids.astype(np.int32)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """encode for each text, faster where the library has threads of its own."""
        return [ids.astype(np.int32) for ids in self.encode_block(texts).split()]

    def encode_block(self, texts: Sequence[str]) -> Block:
        """encode for each text, as one array: what the preparation of shards calls."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, special tokens left out; bytes that are no UTF-8 show as U+FFFD."""
        ...

    def saved_file(self) -> tuple[str, bytes] | None:
        """Returns (name, content) of the one file that gives the same ids; None for bytes, which need none."""
        ...


@contextlib.contextmanager
def faults_of(what: str) -> Iterator[None]:
    """Makes BadInput, which begins with `what`, of the tokenizers package's own errors.

    It raises a bare Exception for the faults of a file that it knows, and for others PanicException, which is none.
    """
    try:
        yield
    except BaseException as error:
        own = type(error) in (Exception, BadInput, UnicodeDecodeError) or type(error).__name__ == "PanicException"
        if not own:
            raise
        raise BadInput(f"{what}: {' '.join(str(error).split())[:LONGEST_CAUSE]}") from None


def choose_eos(path: str, eos_token: str, ids: dict[str, int]) -> int:
    """The id of `eos_token`, or of the first usual name that `ids` knows. Raises BadInput if there is none."""
    if eos_token:
        if eos_token not in ids:
            raise BadInput(
                f"{eos_token!r} should end documents, by data.eos_token or a file beside the tokenizer, and is not a "
                f"token of {path}; name another in data.eos_token"
            )
        return ids[eos_token]
    for name in EOS_NAMES:
        if name in ids:
            return ids[name]
    raise BadInput(f"{path} has none of the usual end-of-document tokens {EOS_NAMES}; name it in data.eos_token")


def choose_begin(names: Sequence[str] | None, own: Sequence[int], special_ids: Mapping[str, int]) -> tuple[int, ...]:
    """The ids that begin a document: of the tokens `names`; None: `own`, which the file itself puts before a text.

    Only special tokens begin a document: no text must be able to spell what begins one.
    """
    if names is None:
        return tuple(i for i in own if i in special_ids.values())
    return tuple(special_ids[name] for name in names if name in special_ids)


def begin_names(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The tokens that begin a document, by name."""
    names = {i: name for name, i in tokenizer.special_ids.items()}
    return tuple(names[i] for i in tokenizer.begin_ids)


def fingerprint(kind: str, content: bytes, eos_id: int, begin_ids: Sequence[int]) -> str:
    """Returns the sha256 of a file's content, of how it is read, and of what begins and ends a document."""
    begin = f"|{','.join(map(str, begin_ids))}" if begin_ids else ""
    return hashlib.sha256(content + f"|{kind}|{eos_id}{begin}".encode()).hexdigest()


def find_marks(ids: Mapping[str, int]) -> Marks:
    """The marks among the special tokens `ids` (name -> id). Sentinels are counted from 0 until a number is missing."""
    first = lambda mark: next((ids[name] for name in MARK_NAMES[mark] if name in ids), None)
    found = Marks(first("mask_id"), first("pad_id"), first("cls_id"), first("sep_id"))
    for pattern in SENTINEL_NAMES:
        sentinels = []
        while (name := pattern.format(len(sentinels))) in ids:
            sentinels.append(ids[name])
        if sentinels:
            return found._replace(sentinel_ids=tuple(sentinels))
    return found


def block_of(encoded: Iterable[np.ndarray | Sequence[int]]) -> Block:
    """One block of the ids of each text."""
    parts = [np.asarray(ids, np.uint32) for ids in encoded]
    ids = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
    return Block(ids, np.array([len(part) for part in parts], np.int64))


def frame_documents(block: Block, tokenizer: Tokenizer, dtype: np.dtype) -> Block:
    """The block with what begins and ends a document around every one, as `dtype` (of shard_writer.dtype_for).

    Raises: BadInput if an id is not in the vocabulary: the tokenizer and its file do not belong together.
    """
    begin, eos_id, vocab_size = list(tokenizer.begin_ids), tokenizer.eos_id, tokenizer.vocab_size
    largest = max(int(block.ids.max(initial=0)), eos_id, *begin)
    if largest >= vocab_size or largest > np.iinfo(dtype).max:
        raise BadInput(
            f"token id {largest} is not below vocab_size={vocab_size}, or does not fit in {np.dtype(dtype).name}; "
            "the shards must be made with the tokenizer that they name"
        )
    lengths = block.lengths + len(begin) + 1
    ends = np.cumsum(lengths)
    ids = np.empty(int(ends[-1]) if len(ends) else 0, dtype)
    is_text = np.ones(len(ids), bool)
    for places, i in [(ends - 1, eos_id), *((ends - lengths + n, i) for n, i in enumerate(begin))]:
        is_text[places] = False
        ids[places] = i
    ids[is_text] = block.ids
    return Block(ids, lengths)
