"""Loads and trains SentencePiece models (arXiv:1808.06226): BPE (arXiv:1508.07909) and Unigram (arXiv:1804.10959).

Models of Llama and Gemma are converted to the `tokenizers` package as in transformers (convert_slow_tokenizer.py in
transformers 4), because fine-tuned models may have added tokens in files next to the tokenizer.model. The conversion
determines how added tokens are matched in text, and whether text after an added token begins with a space.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxscale.runtime.text.tokenizer.added import DEFAULTS, GEMMA, LLAMA, Neighbors, class_of
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
from jaxscale.system import foreign
from jaxscale.system.exits import BadInput

SENTENCE_BYTES = 4000  # the trainer skips sentences of more than 4,192 bytes
THREADS = 8  # training threads; constant, because float sums, and so the pieces, depend on the number of threads
UNIGRAM = 1  # TrainerSpec.ModelType
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # ModelProto.SentencePiece.Type
GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
# Classes with ids that are shifted from the ids of the model's pieces, or that are from a different file.
RENUMBERED = (
    "XLMRobertaTokenizer", "CamembertTokenizer", "MBartTokenizer", "MBart50Tokenizer", "NllbTokenizer",
    "BarthezTokenizer", "BartphoTokenizer", "PegasusTokenizer", "XGLMTokenizer", "MarianTokenizer", "M2M100Tokenizer",
    "Speech2TextTokenizer", "SeamlessM4TTokenizer", "PLBartTokenizer", "ErnieMTokenizer", "MLukeTokenizer",
    "XLMProphetNetTokenizer",
)  # fmt: skip


def check_model(content: bytes, path: str) -> sentencepiece.SentencePieceProcessor:
    """Returns a processor for the content of a model file. Raises BadInput for an invalid model."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"data.tokenizer={path} cannot be read as a SentencePiece model: {reason}") from None


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a .model file. The normalizers of most models replace line ends with spaces."""

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
        default_begin = [i for i in (processor.bos_id(),) if i >= 0]  # as in Llama and Gemma
        self.begin_ids = choose_begin(begin_tokens, default_begin, self.special_ids)
        self.fingerprint = fingerprint("sentencepiece", content, self.eos_id, self.begin_ids)
        self.prefix_after_special = False
        self.marks = find_objective_tokens({piece: i for i, piece in enumerate(pieces) if processor.is_control(i)})

    def encode_block(self, texts: Sequence[str]) -> EncodedBlock:
        """Encodes texts into one concatenated array."""
        return concat_block(self._processor.encode(list(texts)))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids, and drops control tokens."""
        return self._processor.decode([int(i) for i in ids])

    def saved_file(self) -> tuple[str, bytes]:
        """Returns the name and the content of the model."""
        return "tokenizer.model", foreign.read_named(self.name, LARGEST)

    def _count_bytes(self, i: int, piece: str) -> int:
        """Returns the bytes of a piece. An unknown character counts as 1 byte, and a prepended space is counted."""
        if self._processor.is_control(i):
            return 0
        if self._processor.is_byte(i) or self._processor.is_unknown(i):
            return 1
        return len(piece.replace("▁", " ").encode())


def train_sentencepiece(texts: Iterable[str], cfg: TrainTokenizerConfig) -> tuple[bytes, int]:
    """Returns (content of a .model without normalization, number of ids). Line ends are byte tokens, as in Llama."""
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
    """Yields the lines of the texts without NUL characters. Splits long lines, before a space if possible."""
    limit = SENTENCE_BYTES // 4  # characters, with at most four bytes per character
    for text in texts:
        for line in text.replace("\x00", "").split("\n"):
            while len(line.encode()) > SENTENCE_BYTES:
                cut = line.rfind(" ", limit // 2, limit)
                cut = cut if cut > 0 else limit
                yield line[:cut]
                line = line[cut:]
            if line:
                yield line


def is_converted(path: str, neighbors: Neighbors) -> bool:
    """Returns True if the model must be converted to the `tokenizers` package. Raises BadInput if this fails."""
    settings = dict(neighbors.settings)
    kind = class_of(settings)
    fix = "load the tokenizer with transformers' AutoTokenizer, and save it as a tokenizer.json"
    if kind in RENUMBERED:
        raise BadInput(
            f"data.tokenizer={path}: tokenizer_class={kind} in tokenizer_config.json uses different token ids from "
            f"the model; {fix}"
        )
    if kind in DEFAULTS or not neighbors.added:
        return kind in DEFAULTS
    processor = check_model(foreign.read_named(path, LARGEST), path)
    pieces = {processor.id_to_piece(i) for i in range(processor.get_piece_size())}
    missing = [token.content for token in neighbors.added if token.content not in pieces]
    if missing and kind not in ("", "PreTrainedTokenizer", "TokenizersBackend"):
        raise BadInput(
            f"data.tokenizer={path}: files next to the model add the token {missing[0]!r:.80}, but added tokens are "
            f"not supported for tokenizer_class={kind}; {fix}"
        )
    return bool(missing)


def convert(content: bytes, path: str, neighbors: Neighbors) -> tokenizers.Tokenizer:
    """Converts a model to a tokenizer of the `tokenizers` package, without the added tokens of `neighbors`."""
    check_model(content, path)
    parsed: Any = sentencepiece_model_pb2  # generated by protoc, without type stubs
    proto = parsed.ModelProto.FromString(content)  # the processor does not show which pieces are user-defined
    pieces = proto.pieces
    settings = dict(neighbors.settings)
    kind = class_of(settings)
    if kind == GEMMA:
        first = {i: settings[token_name] for i, token_name in enumerate(("pad_token", "eos_token", "bos_token"))}
    else:
        first = {token.id: token.content for token in neighbors.added if token.id is not None and token.id < 3}
    ids = {piece.piece: i for i, piece in enumerate(pieces)}
    vocab = [(str(first.get(i, piece.piece)), 0.0 if i < 3 else piece.score) for i, piece in enumerate(pieces)]
    if kind == GEMMA and "\t" not in ids and "<0x09>" in ids:  # Gemma 1 has no tab
        vocab[ids["<0x09>"]] = ("\t", 0.0)
        ids["\t"] = ids["<0x09>"]
    if proto.trainer_spec.model_type == UNIGRAM:
        model = models.Unigram(vocab, unk_id=0, byte_fallback=True)
    else:
        unknown = next((piece.piece for piece in pieces if piece.type == UNKNOWN), "<unk>")
        table = {text: i for i, (text, _) in enumerate(vocab)}
        model = models.BPE(table, merges_of(vocab, ids), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    turns = GEMMA_TURNS if kind == GEMMA else ()
    special = lambda piece: piece.type == CONTROL or piece.piece in turns
    tokens = [(piece.piece, special(piece)) for piece in pieces if piece.type in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False, special=flag) for text, flag in tokens])
    set_spaces(tokenizer, settings, prefix=kind != GEMMA and settings.get("add_prefix_space") is not False)
    bos = settings.get("bos_token", DEFAULTS[LLAMA]["bos_token"])
    if settings.get("add_bos_token") is not False and (first_id := tokenizer.token_to_id(bos)) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, first_id)])
    return tokenizer


def set_spaces(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], *, prefix: bool) -> None:
    """Sets how spaces are encoded and decoded. By default (`legacy`), text after an added token starts with a space."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1)] if prefix else [])])
    if settings.get("legacy") is False:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    else:
        begin = [normalizers.Prepend(prepend="▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(pattern=" ", content="▁")])


def merges_of(vocab: Sequence[tuple[str, float]], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE model in order of decreasing score. ids: {piece: id}."""
    found = []
    for text, score in dict(vocab).items():
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        known = [(left, right, score) for left, right in halves if left in ids and right in ids]
        found += sorted(known, key=lambda merge: (ids[merge[0]], ids[merge[1]]))
    found.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in found]
