"""Loads the tokenizer that `data.tokenizer` names."""

import functools
from pathlib import Path

from jaxscale.system import foreign
from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.about import NO_BOS, begin_tokens, end_token, read_about
from jaxscale.text.tokenizer.base import Tokenizer, begin_names
from jaxscale.text.tokenizer.bytes import ByteTokenizer
from jaxscale.text.tokenizer.config import EncodeConfig

EXACT_OR_FAST = EncodeConfig()


def load_tokenizer(
    name: str, eos_token: str = "", bos_token: str = "", encoding: EncodeConfig = EXACT_OR_FAST
) -> Tokenizer:
    """The tokenizer `name`: 'bytes', or the path of a tokenizer.json, a SentencePiece .model or a WordPiece vocab.txt.

    eos_token: ends a document; empty: the one that the files beside the tokenizer name, else one of the usual names.
    bos_token: begins one; empty: what the files beside the tokenizer say, else its own file; 'none': nothing.
    encoding: how a tokenizer.json is applied; the ids are the same. Raises: BadInput if `name` is none of these.
    """
    if problem := tokenizer_problem(name):
        raise BadInput(problem)
    if name == "bytes":
        if bos_token not in ("", NO_BOS):
            raise BadInput(f"data.bos_token={bos_token}: data.tokenizer=bytes has no such token; leave it out")
        return ByteTokenizer()
    path = Path(name).expanduser()
    if is_kept(path):
        foreign.check_folder(path.parent, path.parent.parent)
        foreign.real_file(path)  # BadInput for a link out of a folder that may have come from elsewhere
    about = read_about(foreign.own_folder(path))
    ends, begins = eos_token or end_token(about), begin_tokens(about, bos_token)
    tokenizer = read_tokenizer(str(path), ends, begins, path.stat().st_mtime_ns, encoding)
    if bos_token and begin_names(tokenizer) != begins:
        raise BadInput(f"data.bos_token={bos_token} is no special token of {name}; name another, or none")
    return tokenizer


def is_kept(path: Path) -> bool:
    """Whether a file lies in WORKDIR/tokenizer."""
    return path.absolute().parent.name == "tokenizer" and (path.absolute().parent.parent / "checkpoints").is_dir()


@functools.lru_cache(maxsize=2)
def read_tokenizer(
    path: str, eos_token: str, begin_tokens: tuple[str, ...] | None, modified: int, encoding: EncodeConfig
) -> Tokenizer:
    """The tokenizer in the file; kept, since a large one takes half a second and is asked for more than once."""
    if path.endswith(".model"):
        from jaxscale.text.tokenizer.sentencepiece import SentencePieceTokenizer  # the package only where it is used

        return SentencePieceTokenizer(path, eos_token, begin_tokens)
    from jaxscale.text.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path, eos_token, begin_tokens, encoding)


def tokenizer_problem(name: str) -> str | None:
    """One line saying why the setting names no tokenizer, found without opening the file; None if it does."""
    if name == "bytes":
        return None
    if "://" in name:
        return f"data.tokenizer={name} is not a local file; copy it to this machine first"
    if not name.endswith((".json", ".model", "vocab.txt")):
        rule = "must be 'bytes', a tokenizer.json or a SentencePiece .model, or a WordPiece vocab.txt"
        return f"data.tokenizer={name!r} {rule}"
    path = Path(name).expanduser()
    if path.is_dir():
        return f"data.tokenizer={name} is a folder; name the tokenizer.json or the .model inside"
    return None if path.is_file() else f"data.tokenizer={name} does not exist; give the path of the file, or 'bytes'"
