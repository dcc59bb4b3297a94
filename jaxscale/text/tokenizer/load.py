"""Loads the tokenizer that `data.tokenizer` names, and what the files beside it say.

Those name special tokens, what begins and ends a text, and the chat template.
"""

import functools
import hashlib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.system import foreign
from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.added import ADDED, Neighbors, merge_settings, read_neighbors, token_text
from jaxscale.text.tokenizer.base import Block, Marks, Tokenizer, begin_names
from jaxscale.text.tokenizer.config import EncodeConfig

NOTE, SETTINGS, GENERATION = "jaxscale.json", "tokenizer_config.json", "generation_config.json"
SPECIAL, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
TEMPLATE_JSON = "chat_template.json"  # of processors, which older releases of transformers wrote
TOOL_USE = "tool_use"  # the name of the template for conversations with tools
LARGEST_TEMPLATE = 4 << 20  # bytes; those of published models have up to 30 kB
NO_BOS = "none"  # as bos_token: nothing begins a document
EXACT_OR_FAST = EncodeConfig()
EOS_ID = 256  # of the byte tokenizer


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8, 256 ends a document; nothing is trained, and every text comes back."""

    name = "bytes"
    vocab_size = 257
    eos_id = EOS_ID
    eos_token = ""
    begin_ids = ()
    fingerprint = hashlib.sha256(b"jaxscale byte tokenizer, end 256").hexdigest()
    token_bytes = np.array([1] * 256 + [0], np.int32)
    fallback = np.arange(257) // 128 == 1  # bytes of longer characters
    marks = Marks()
    special_ids = types.MappingProxyType({"<|endoftext|>": EOS_ID})
    prefix_after_special = False

    def encode_block(self, texts: Sequence[str]) -> Block:
        """encode for each text, as one array."""
        encoded = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
        return Block(ids, np.array([len(text) for text in encoded], np.int64))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; a cut character shows as U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < EOS_ID).decode(errors="replace")

    def saved_file(self) -> None:
        """Returns None: there is no file."""


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
        foreign.resolve_file(path)  # BadInput for a link out of a folder that may have come from elsewhere
    about = read_about(foreign.companion_folder(path))
    ends, begins = eos_token or end_token(about), begin_tokens(about, bos_token)
    neighbors = read_neighbors(about.settings, about.ids, str(about.folder), is_model=path.suffix == ".model")
    tokenizer = read_tokenizer(str(path), ends, begins, path.stat().st_mtime_ns, encoding, neighbors)
    if bos_token and begin_names(tokenizer) != begins:
        raise BadInput(f"data.bos_token={bos_token} is no special token of {name}; name another, or none")
    return tokenizer


def is_kept(path: Path) -> bool:
    """Returns True for a file in WORKDIR/tokenizer."""
    return path.absolute().parent.name == "tokenizer" and (path.absolute().parent.parent / "checkpoints").is_dir()


@functools.lru_cache(maxsize=2)
def read_tokenizer(
    path: str,
    eos_token: str,
    begin_tokens: tuple[str, ...] | None,
    modified: int,
    encoding: EncodeConfig,
    neighbors: Neighbors,
) -> Tokenizer:
    """Returns the tokenizer in the file; cached, since a large one takes half a second and is loaded more than once."""
    if path.endswith(".model"):
        from jaxscale.text.tokenizer.sentencepiece import SentencePieceTokenizer  # the package only where it is used
        from jaxscale.text.tokenizer.sentencepiece_json import is_converted

        if not is_converted(path, neighbors):
            return SentencePieceTokenizer(path, eos_token, begin_tokens)
    from jaxscale.text.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path, eos_token, begin_tokens, encoding, neighbors)


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


class About(NamedTuple):
    """Contents of a tokenizer's folder; each part is {} where its file is missing."""

    folder: Path | None
    settings: Mapping[str, Any] = {}  # tokenizer_config.json and special_tokens_map.json, see merge_settings
    generation: Mapping[str, Any] = {}
    note: Mapping[str, Any] = {}  # of the run that was trained with it
    ids: Mapping[str, Any] = {}  # added_tokens.json

    def token(self, which: str) -> str:
        """The name of bos_token or the like, '' for none."""
        return token_text(self.settings.get(which))


def read_about(folder: Path | None) -> About:
    """The contents of a local folder. Raises BadInput for a file that is not JSON, or no object."""
    settings = merge_settings(read_object(folder, SETTINGS), read_object(folder, SPECIAL))
    generation, note = read_object(folder, GENERATION), read_object(folder, NOTE)
    return About(folder, settings, generation, note, read_object(folder, ADDED))


def naming_files(tokenizer_file: Path) -> list[Path]:
    """The files beside a tokenizer's that name its special tokens, as far as they are there."""
    beside = (foreign.companion_folder(tokenizer_file) / name for name in (NOTE, SETTINGS, SPECIAL, ADDED))
    return [path for path in beside if foreign.is_file(path)]


def read_object(folder: Path | None, name: str) -> dict[str, Any]:
    """The object in a file, without what is null."""
    path = folder / name if folder else None
    if path is None or not foreign.is_file(path):
        return {}
    content = foreign.read_bytes(path)
    try:
        content = foreign.parse_json(content)
    except BadInput as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise BadInput(f"{path} holds no JSON object")
    return {key: value for key, value in content.items() if value is not None}


def beside(tokenizer: Tokenizer) -> Path | None:
    """The folder of a tokenizer's file; None for bytes, which have none."""
    return None if tokenizer.name == "bytes" else foreign.companion_folder(tokenizer.name)


def begin_tokens(about: About, bos_token: str) -> tuple[str, ...] | None:
    """The names of the special tokens that begin a document; None: whatever the tokenizer's own file puts before one.

    bos_token: the setting. Empty: a run has noted what its documents began with; else add_bos_token says, as it does
    for Llama's tokenizers in transformers 4; transformers 5 asks tokenizer.json alone.
    """
    if bos_token:
        return () if bos_token == NO_BOS else (bos_token,)
    if about.note:
        noted = about.note.get("begin_tokens", [])
        if not isinstance(noted, list) or not all(isinstance(name, str) for name in noted):
            raise BadInput(f"{about.folder}/{NOTE}: begin_tokens={noted!r:.80} must be a list of names; mend it")
        return tuple(noted)
    if (wanted := about.settings.get("add_bos_token")) is False:
        return ()
    return (about.token("bos_token"),) if wanted and about.token("bos_token") else None


def as_setting(begin_tokens: Sequence[str]) -> str:
    """The setting bos_token for these; empty for several, which only the tokenizer's own file can ask for."""
    return NO_BOS if not begin_tokens else begin_tokens[0] if len(begin_tokens) == 1 else ""


def end_token(about: About) -> str:
    """The name of the token that ends a document, '' where the folder names none.

    A run notes by what it has ended its documents. Else it is the tokenizer's eos_token, which also ends the documents
    of other trainers: of TRL's SFTTrainer those without a template, of levanter all.
    """
    noted = about.note.get("eos_token")
    return noted if isinstance(noted, str) and noted else about.token("eos_token")


def end_ids(tokenizer: Tokenizer, about: About) -> tuple[int, ...]:
    """The ids that end a text: that of a document's end, and those of generation_config.json."""
    found = about.generation.get("eos_token_id")
    more = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int and one >= 0 for one in more):
        raise BadInput(
            f"{about.folder}/{GENERATION}: eos_token_id={found!r:.80} must be an id, or a list of ids; mend it"
        )
    return tuple(dict.fromkeys([tokenizer.eos_id, *more]))


def find_template(about: About) -> tuple[str, str] | None:
    """Returns (the folder's chat template in Jinja, its file); None where it has none.

    Raises: BadInput where it has several and none is `default`.
    """
    named, where = named_templates(about)
    if named and "default" not in named:
        raise BadInput(
            f"{where} has the chat templates {', '.join(named)} and none called default; write the one "
            f"that is meant into {Path(about.folder or '') / TEMPLATE}, or name its file in data.chat.template"
        )
    return (named["default"], where) if named else None


def named_templates(about: About) -> tuple[dict[str, str], str]:
    """Returns ({name: chat template}, where they are), by the rules of transformers.

    Files replace what tokenizer_config.json has, all of it. Only processors read chat_template.json; it is used where
    there is nothing else.
    """
    if about.folder is None:
        return {}, ""
    found, where = {}, about.folder / TEMPLATE
    if foreign.is_file(where):
        found["default"] = as_source(foreign.read_bytes(where, LARGEST_TEMPLATE), str(where))
    if (more := about.folder / MORE_TEMPLATES).is_dir():
        foreign.check_folder(more, about.folder)
        for path in sorted(more.glob("*.jinja")):
            found[path.stem] = as_source(foreign.read_bytes(path, LARGEST_TEMPLATE, about.folder), str(path))
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
    """The content of a template's file, which a person named; it may be a link. name: for errors."""
    try:
        with foreign.open_regular(path) as file:
            return as_source(foreign.read_at_most(file, path, LARGEST_TEMPLATE), name)
    except OSError as error:
        raise BadInput(f"{name} cannot be read: {error.strerror}") from None


def as_source(content: bytes, name: str) -> str:
    """The text of a template."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} cannot be read: {error}") from None
