"""Loads the tokenizer of `data.tokenizer` and the settings in its folder.

The settings define special tokens, begin and end tokens, and the chat template.
"""

import functools
import hashlib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.text.tokenizer.added import ADDED, Neighbors, merge_settings, read_neighbors, token_text
from jaxscale.runtime.text.tokenizer.base import EncodedBlock, ObjectiveTokens, Tokenizer, begin_names
from jaxscale.runtime.text.tokenizer.config import EncodeConfig
from jaxscale.system import foreign
from jaxscale.system.exits import BadInput

NOTE, SETTINGS, GENERATION = "jaxscale.json", "tokenizer_config.json", "generation_config.json"
SPECIAL, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
TEMPLATE_JSON = "chat_template.json"  # of processors, which older releases of transformers wrote
TOOL_USE = "tool_use"  # the name of the template for conversations with tools
LARGEST_TEMPLATE = 4 << 20  # bytes; those of published models have up to 30 kB
NO_BOS = "none"  # bos_token for no begin token
COMPANIONS = (NOTE, SETTINGS, GENERATION, TEMPLATE, TEMPLATE_JSON, SPECIAL, ADDED)  # files next to a tokenizer
EXACT_OR_FAST = EncodeConfig()
EOS_ID = 256  # of the byte tokenizer


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are UTF-8 bytes, 256 ends a document; untrained and lossless."""

    name = "bytes"
    vocab_size = 257
    eos_id = EOS_ID
    eos_token = ""
    begin_ids = ()
    fingerprint = hashlib.sha256(b"jaxscale byte tokenizer, end 256").hexdigest()
    token_bytes = np.array([1] * 256 + [0], np.int32)
    fallback = np.arange(257) // 128 == 1  # bytes of multi-byte characters
    marks = ObjectiveTokens()
    special_ids = types.MappingProxyType({"<|endoftext|>": EOS_ID})
    prefix_after_special = False

    def encode_block(self, texts: Sequence[str]) -> EncodedBlock:
        """Encodes each text into one array."""
        encoded = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
        return EncodedBlock(ids, np.array([len(text) for text in encoded], np.int64))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids; a truncated character becomes U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < EOS_ID).decode(errors="replace")

    def saved_file(self) -> None:
        """Returns None: bytes need no file."""


def load_tokenizer(
    name: str, eos_token: str = "", bos_token: str = "", encoding: EncodeConfig = EXACT_OR_FAST
) -> Tokenizer:
    """Loads 'bytes', or the path of a tokenizer.json, a SentencePiece .model or a WordPiece vocab.txt.

    eos_token: ends a document; empty: from the settings in its folder, else one of EOS_NAMES. bos_token: begins a
    document; empty: from the settings in its folder, else from its file; 'none': no begin token. encoding: encoder of a
    tokenizer.json, with equal ids. Raises: BadInput for an invalid `name`.
    """
    if problem := tokenizer_problem(name):
        raise BadInput(problem)
    if name == "bytes":
        if bos_token not in ("", NO_BOS):
            raise BadInput(f"data.bos_token={bos_token}: data.tokenizer=bytes has no such token; leave it out")
        return ByteTokenizer()
    path = Path(name).expanduser()
    folder = path.absolute().parent
    if folder.name == "tokenizer" and (folder.parent / "checkpoints").is_dir():  # in a work folder
        foreign.check_folder(path.parent, path.parent.parent)
        foreign.resolve_file(path)  # raises for a link out of a folder, which may be untrusted
    about = read_settings(foreign.companion_folder(path))
    recorded = about.note.get("eos_token")  # by a run; else the tokenizer's, as in TRL's SFTTrainer and levanter
    recorded = recorded if isinstance(recorded, str) and recorded else about.token("eos_token")
    ends, begins = eos_token or recorded, begin_tokens(about, bos_token)
    neighbors = read_neighbors(about.settings, about.ids, str(about.folder), is_model=path.suffix == ".model")
    tokenizer = read_tokenizer(str(path), ends, begins, path.stat().st_mtime_ns, encoding, neighbors)
    if bos_token and begin_names(tokenizer) != begins:
        raise BadInput(f"data.bos_token={bos_token} is not a special token of {name}; name another, or none")
    return tokenizer


@functools.lru_cache(maxsize=2)
def read_tokenizer(
    path: str,
    eos_token: str,
    begin_tokens: tuple[str, ...] | None,
    modified: int,
    encoding: EncodeConfig,
    neighbors: Neighbors,
) -> Tokenizer:
    """Loads a tokenizer file; cached, since a large one takes 0.5 s and is loaded repeatedly."""
    if path.endswith(".model"):
        from jaxscale.runtime.text.tokenizer.sentencepiece import SentencePieceTokenizer  # optional dependency
        from jaxscale.runtime.text.tokenizer.sentencepiece_json import is_converted

        if not is_converted(path, neighbors):
            return SentencePieceTokenizer(path, eos_token, begin_tokens)
    from jaxscale.runtime.text.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path, eos_token, begin_tokens, encoding, neighbors)


def tokenizer_problem(name: str) -> str | None:
    """Returns why the setting does not name a tokenizer, without opening the file; None if it does."""
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


class TokenizerFolder(NamedTuple):
    """Settings in a tokenizer's folder; {} for each missing file."""

    folder: Path | None
    settings: Mapping[str, Any] = {}  # tokenizer_config.json and special_tokens_map.json, see merge_settings
    generation: Mapping[str, Any] = {}
    note: Mapping[str, Any] = {}  # jaxscale.json of the run that saved it
    ids: Mapping[str, Any] = {}  # added_tokens.json

    def token(self, which: str) -> str:
        """Returns the name of bos_token etc., '' for none."""
        return token_text(self.settings.get(which))


def read_settings(folder: Path | None) -> TokenizerFolder:
    """Reads the settings in a local folder. Raises BadInput for a file that is not a JSON object."""
    settings = merge_settings(read_object(folder, SETTINGS), read_object(folder, SPECIAL))
    generation, note = read_object(folder, GENERATION), read_object(folder, NOTE)
    return TokenizerFolder(folder, settings, generation, note, read_object(folder, ADDED))


def naming_files(tokenizer_file: Path) -> list[Path]:
    """Returns the existing files next to a tokenizer that define its special tokens."""
    paths = (foreign.companion_folder(tokenizer_file) / name for name in (NOTE, SETTINGS, SPECIAL, ADDED))
    return [path for path in paths if foreign.is_file(path)]


def read_object(folder: Path | None, name: str) -> dict[str, Any]:
    """Reads the JSON object in a file without null values; {} if it is missing."""
    path = folder / name if folder else None
    if path is None or not foreign.is_file(path):
        return {}
    content = foreign.read_bytes(path)
    try:
        content = foreign.parse_json(content)
    except BadInput as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise BadInput(f"{path} is not a JSON object")
    return {key: value for key, value in content.items() if value is not None}


def tokenizer_folder(tokenizer: Tokenizer) -> Path | None:
    """Returns the folder of a tokenizer's file; None for bytes."""
    return None if tokenizer.name == "bytes" else foreign.companion_folder(tokenizer.name)


def begin_tokens(about: TokenizerFolder, bos_token: str) -> tuple[str, ...] | None:
    """Returns the names of the special tokens that begin a document; None: those that the tokenizer file adds.

    bos_token: the setting. If empty, the begin tokens recorded by a run, else add_bos_token, which Llama's tokenizers
    use in transformers 4 (transformers 5 uses only tokenizer.json).
    """
    if bos_token:
        return () if bos_token == NO_BOS else (bos_token,)
    if about.note:
        recorded = about.note.get("begin_tokens", [])
        if not isinstance(recorded, list) or not all(isinstance(name, str) for name in recorded):
            raise BadInput(f"{about.folder}/{NOTE}: begin_tokens={recorded!r:.80} must be a list of names; fix it")
        return tuple(recorded)
    if (add_bos := about.settings.get("add_bos_token")) is False:
        return ()
    return (about.token("bos_token"),) if add_bos and about.token("bos_token") else None


def bos_setting(begin_tokens: Sequence[str]) -> str:
    """Returns the setting bos_token for these tokens; empty for several, which only the tokenizer file can define."""
    return NO_BOS if not begin_tokens else begin_tokens[0] if len(begin_tokens) == 1 else ""


def end_ids(tokenizer: Tokenizer, about: TokenizerFolder) -> tuple[int, ...]:
    """Returns the ids that end generation: eos_id and those of generation_config.json."""
    found = about.generation.get("eos_token_id")
    more = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int and one >= 0 for one in more):
        raise BadInput(
            f"{about.folder}/{GENERATION}: eos_token_id={found!r:.80} must be an id, or a list of ids; fix it"
        )
    return tuple(dict.fromkeys([tokenizer.eos_id, *more]))


def find_template(about: TokenizerFolder) -> tuple[str, str] | None:
    """Returns (the folder's chat template in Jinja, its file), or None; BadInput for several without a default."""
    named, where = named_templates(about)
    if named and "default" not in named:
        raise BadInput(
            f"{where} has the chat templates {', '.join(named)} but none called default; write the intended "
            f"one into {Path(about.folder or '') / TEMPLATE}, or name its file in data.chat.template"
        )
    return (named["default"], where) if named else None


def named_templates(about: TokenizerFolder) -> tuple[dict[str, str], str]:
    """Returns ({name: chat template}, location), as transformers: files, settings, chat_template.json."""
    if about.folder is None:
        return {}, ""
    found, where = {}, about.folder / TEMPLATE
    if foreign.is_file(where):
        found["default"] = decode_template(foreign.read_bytes(where, LARGEST_TEMPLATE), str(where))
    if (more := about.folder / MORE_TEMPLATES).is_dir():
        foreign.check_folder(more, about.folder)
        for path in sorted(more.glob("*.jinja")):
            found[path.stem] = decode_template(foreign.read_bytes(path, LARGEST_TEMPLATE, about.folder), str(path))
            where = path if path.stem == "default" else where
    if found:
        return found, str(where if "default" in found else more)
    for name, settings in ((SETTINGS, about.settings), (TEMPLATE_JSON, read_object(about.folder, TEMPLATE_JSON))):
        value = settings.get("chat_template")
        if isinstance(value, list):
            value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        if isinstance(value, str) or value and isinstance(value, dict):
            named = value if isinstance(value, dict) else {"default": value}
            return {str(key): one for key, one in named.items() if isinstance(one, str)}, str(about.folder / name)
    return {}, ""


def read_source(path: Path, name: str) -> str:
    """Reads a template file named by the user, which may be a link. name: for errors."""
    try:
        with foreign.open_regular(path) as file:
            return decode_template(foreign.read_at_most(file, path, LARGEST_TEMPLATE), name)
    except OSError as error:
        raise BadInput(f"{name} cannot be read: {error.strerror}") from None


def decode_template(content: bytes, name: str) -> str:
    """Decodes a template."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} cannot be read: {error}") from None
