"""A SentencePiece model of Llama or Gemma as a tokenizer of the `tokenizers` package, as transformers converts it.

Fine-tunes were published as a tokenizer.model with more tokens next to it. Where those are matched in a text, and
whether a text after one begins with a space, follows from the conversion (transformers 4: convert_slow_tokenizer.py).
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxscale.runtime.text.tokenizer.added import DEFAULTS, GEMMA, LLAMA, Neighbors, class_of
from jaxscale.runtime.text.tokenizer.base import LARGEST
from jaxscale.system import foreign
from jaxscale.system.exits import BadInput

UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
CONTROL, USER_DEFINED = 3, 4  # ModelProto.SentencePiece.Type
GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
# Their ids are shifted from those of the model's pieces, or come from another file.
RENUMBERED = (
    "XLMRobertaTokenizer", "CamembertTokenizer", "MBartTokenizer", "MBart50Tokenizer", "NllbTokenizer",
    "BarthezTokenizer", "BartphoTokenizer", "PegasusTokenizer", "XGLMTokenizer", "MarianTokenizer", "M2M100Tokenizer",
    "Speech2TextTokenizer", "SeamlessM4TTokenizer", "PLBartTokenizer", "ErnieMTokenizer", "MLukeTokenizer",
    "XLMProphetNetTokenizer",
)  # fmt: skip


class ModelPiece(NamedTuple):
    """A piece of a SentencePiece model. kind: its Type in sentencepiece_model.proto."""

    text: str
    score: float
    kind: int


def is_converted(path: str, neighbors: Neighbors) -> bool:
    """Returns True if transformers' conversion determines the ids of a model. BadInput for an unknown conversion."""
    settings = dict(neighbors.settings)
    kind = class_of(settings)
    fix = "save it with transformers' AutoTokenizer as a tokenizer.json"
    if kind in RENUMBERED:
        raise BadInput(
            f"data.tokenizer={path}: tokenizer_class={kind} in tokenizer_config.json does not number tokens as the "
            f"model does; {fix}"
        )
    if kind in DEFAULTS or not neighbors.added:
        return kind in DEFAULTS
    content = foreign.read_named(path, LARGEST)
    check_model(content, path)
    pieces = {piece.text for piece in read_model(content)[0]}
    missing = [token.content for token in neighbors.added if token.content not in pieces]
    if missing and kind not in ("", "PreTrainedTokenizer", "TokenizersBackend"):
        raise BadInput(
            f"data.tokenizer={path}: {missing[0]!r:.80} is added to the model by the files next to it, which is not "
            f"supported for tokenizer_class={kind}; {fix}"
        )
    return bool(missing)


def convert(content: bytes, path: str, neighbors: Neighbors) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a model, without the tokens that are only in the files next to it."""
    check_model(content, path)
    pieces, model_type = read_model(content)
    settings = dict(neighbors.settings)
    kind = class_of(settings)
    if kind == GEMMA:
        first = {i: settings[token_name] for i, token_name in enumerate(("pad_token", "eos_token", "bos_token"))}
    else:
        first = {token.id: token.content for token in neighbors.added if token.id is not None and token.id < 3}
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    vocab = [(first.get(i, piece.text), 0.0 if i < 3 else piece.score) for i, piece in enumerate(pieces)]
    if kind == GEMMA and "\t" not in ids and "<0x09>" in ids:  # the first Gemma lacks the tab
        vocab[ids["<0x09>"]] = ("\t", 0.0)
        ids["\t"] = ids["<0x09>"]
    if model_type == UNIGRAM:
        model = models.Unigram(vocab, unk_id=0, byte_fallback=True)
    else:
        unknown = next((piece.text for piece in pieces if piece.kind == 2), "<unk>")
        table = {text: i for i, (text, _) in enumerate(vocab)}
        model = models.BPE(table, merges_of(vocab, ids), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    turns = GEMMA_TURNS if kind == GEMMA else ()
    special = lambda piece: piece.kind == CONTROL or piece.text in turns
    tokens = [(piece.text, special(piece)) for piece in pieces if piece.kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([tokenizers.AddedToken(text, normalized=False, special=flag) for text, flag in tokens])
    set_spaces(tokenizer, settings, prefix=kind != GEMMA and settings.get("add_prefix_space") is not False)
    bos = settings.get("bos_token", DEFAULTS[LLAMA]["bos_token"])
    if settings.get("add_bos_token") is not False and (first_id := tokenizer.token_to_id(bos)) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, first_id)])
    return tokenizer


def set_spaces(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], *, prefix: bool) -> None:
    """Sets how spaces are encoded and decoded. `legacy` (the default): each text between tokens begins with one."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1)] if prefix else [])])
    if settings.get("legacy") is False:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    else:
        begin = [normalizers.Prepend(prepend="▁")] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(pattern=" ", content="▁")])


def merges_of(vocab: Sequence[tuple[str, float]], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE model, best first. ids: of its pieces."""
    found = []
    for text, score in dict(vocab).items():
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        known = [(left, right, score) for left, right in halves if left in ids and right in ids]
        found += sorted(known, key=lambda merge: (ids[merge[0]], ids[merge[1]]))
    found.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


def read_model(content: bytes) -> tuple[list[ModelPiece], int]:
    """Returns the pieces and model type of a valid model. The package offers user-defined pieces only by protobuf."""
    pieces, model_type = [], UNIGRAM
    for number, value in fields(content):
        if number == 1:
            piece = dict(fields(value))
            score = struct.unpack("<f", piece.get(2, bytes(4)))[0]
            pieces.append(ModelPiece(piece.get(1, b"").decode(), score, piece.get(3, 1)))
        elif number == 2:
            model_type = dict(fields(value)).get(3, UNIGRAM)
    return pieces, model_type


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of a protobuf message's fields: int for a varint, else bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        yield key >> 3, message[place : place + size]
        place += size


def check_model(content: bytes, path: str) -> sentencepiece.SentencePieceProcessor:
    """Returns the processor of a model. Raises BadInput for an invalid model."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"data.tokenizer={path} cannot be read as a SentencePiece model: {reason}") from None
