"""Loads and trains SentencePiece models (arXiv:1808.06226): BPE (arXiv:1508.07909) and Unigram (arXiv:1804.10959)."""

import io
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import sentencepiece

from jaxscale.runtime.text.tokenizer.base import (
    LARGEST,
    EncodedBlock,
    Tokenizer,
    choose_begin,
    choose_eos,
    concat_block,
    find_objective_tokens,
    fingerprint,
)
from jaxscale.runtime.text.tokenizer.config import TrainTokenizerConfig, special_names
from jaxscale.runtime.text.tokenizer.sentencepiece_json import check_model
from jaxscale.system import foreign
from jaxscale.system.exits import BadInput

SENTENCE_BYTES = 4000  # the trainer skips sentences of more than 4,192
THREADS = 8  # of training; fixed, since float sums and so the pieces depend on it


class SentencePieceTokenizer(Tokenizer):
    """A .model file, including its normalizer (most replace line ends by spaces)."""

    def __init__(self, path: str, eos_token: str = "", begin_tokens: Sequence[str] | None = None):
        content = foreign.read_named(path, LARGEST)
        processor = self._processor = check_model(content, path)
        self.name = path
        self.vocab_size = processor.get_piece_size()
        pieces = [processor.id_to_piece(i) for i in range(self.vocab_size)]
        if processor.eos_id() >= 0 and not eos_token:
            self.eos_id = processor.eos_id()
        else:
            self.eos_id = choose_eos(path, eos_token, {piece: i for i, piece in enumerate(pieces)})
        self.eos_token = pieces[self.eos_id]
        self.token_bytes = np.array([self._count_bytes(i, piece) for i, piece in enumerate(pieces)], np.int32)
        self.fallback = np.array(
            [processor.is_byte(i) or processor.is_unknown(i) for i in range(self.vocab_size)], bool
        )
        self.special_ids = {piece: i for i, piece in enumerate(pieces) if processor.is_control(i) or i == self.eos_id}
        default_begin = [i for i in (processor.bos_id(),) if i >= 0]  # as Llama and Gemma
        self.begin_ids = choose_begin(begin_tokens, default_begin, self.special_ids)
        self.fingerprint = fingerprint("sentencepiece", content, self.eos_id, self.begin_ids)
        self.prefix_after_special = False
        self.marks = find_objective_tokens({piece: i for i, piece in enumerate(pieces) if processor.is_control(i)})

    def encode_block(self, texts: Sequence[str]) -> EncodedBlock:
        """Encodes each text into one array."""
        return concat_block(self._processor.encode(list(texts)))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids without control tokens."""
        return self._processor.decode([int(i) for i in ids])

    def saved_file(self) -> tuple[str, bytes]:
        """Returns the name and the content of the model."""
        return "tokenizer.model", foreign.read_named(self.name, LARGEST)

    def _count_bytes(self, i: int, piece: str) -> int:
        """Exact, but for the space most models prepend, and unknown characters, which count as 1."""
        if self._processor.is_control(i):
            return 0
        if self._processor.is_byte(i) or self._processor.is_unknown(i):
            return 1
        return len(piece.replace("▁", " ").encode())


def train_sentencepiece(texts: Iterable[str], cfg: TrainTokenizerConfig) -> tuple[bytes, int]:
    """Returns (.model of cfg.kind without normalization, number of ids). Line ends are bytes, as in Llama."""
    file, special = io.BytesIO(), special_names(cfg)
    kind = "bpe" if cfg.kind == "sentencepiece_bpe" else "unigram"
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(texts), model_writer=file, model_type=kind, vocab_size=cfg.vocab_size,
            hard_vocab_limit=False, byte_fallback=cfg.byte_fallback, character_coverage=cfg.character_coverage,
            unk_id=0, bos_id=-1, pad_id=-1, eos_id=1, eos_piece=special[0], control_symbols=list(special[1:]),
            normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
            allow_whitespace_only_pieces=True, max_sentence_length=SENTENCE_BYTES, num_threads=THREADS, minloglevel=2,
            split_digits=kind == "bpe",
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(
            f"a tokenizer of kind={cfg.kind} with vocab_size={cfg.vocab_size} cannot be trained: {reason}"
        ) from None
    content = file.getvalue()
    return content, sentencepiece.SentencePieceProcessor(model_proto=content).get_piece_size()


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yields the lines of the texts, without NUL, cut into SENTENCE_BYTES before a space in the second half if any."""
    limit = SENTENCE_BYTES // 4  # characters of at most four bytes
    for text in texts:
        for line in text.replace("\x00", "").split("\n"):
            while len(line.encode()) > SENTENCE_BYTES:
                cut = line.rfind(" ", limit // 2, limit)
                cut = cut if cut > 0 else limit
                yield line[:cut]
                line = line[cut:]
            if line:
                yield line
