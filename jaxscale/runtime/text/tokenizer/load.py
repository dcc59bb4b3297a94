"""Loads the tokenizer in `data.tokenizer` with the settings in its folder, and saves tokenizers to work folders.

The settings in the folder define special tokens, begin and end tokens, and the chat template. A training run copies the
tokenizer's files and chat template to WORKDIR/tokenizer/, so that the work folder can be moved, and lists the files in
`jaxscale.json`. The tokenizer folder of a converted model has the original files (tokenizer.json or tokenizer.model,
tokenizer_config.json, generation_config.json) without `jaxscale.json`. These files then define the begin tokens.
"""

import dataclasses
import functools
import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.text.tokenizer.added import ADDED, Neighbors, merge_settings, read_neighbors, token_text
from jaxscale.runtime.text.tokenizer.base import LARGEST, EncodedBlock, ObjectiveTokens, Tokenizer, begin_names
from jaxscale.runtime.text.tokenizer.config import EncodeConfig
from jaxscale.system import digest, foreign, paths
from jaxscale.system.exits import BadInput

NOTE, SETTINGS, GENERATION = "jaxscale.json", "tokenizer_config.json", "generation_config.json"
SPECIAL, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # folder with files NAME.jinja
TEMPLATE_JSON = "chat_template.json"  # file of processors, which older releases of transformers wrote
TOOL_USE = "tool_use"  # name of the template for conversations with tools
LARGEST_TEMPLATE = 4 << 20  # bytes; templates of published models have up to 30 kB
NO_BOS = "none"  # value of data.bos_token for no begin token
COMPANIONS = (NOTE, SETTINGS, GENERATION, TEMPLATE, TEMPLATE_JSON, SPECIAL, ADDED)  # files next to a tokenizer
EXACT_OR_FAST = EncodeConfig()
EOS_ID = 256  # end token of the byte tokenizer
FOLDER = "tokenizer"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt")  # in order of priority


class ByteTokenizer(Tokenizer):
    """Lossless tokenizer that needs no training: ids 0 to 255 are UTF-8 bytes, and 256 is the end token."""

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
        """Encodes texts into one concatenated array."""
        encoded = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
        return EncodedBlock(ids, np.array([len(text) for text in encoded], np.int64))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids. Incomplete characters become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < EOS_ID).decode(errors="replace")

    def saved_file(self) -> None:
        """Returns None, because the byte tokenizer has no file."""


def load_tokenizer(
    name: str, eos_token: str = "", bos_token: str = "", encoding: EncodeConfig = EXACT_OR_FAST
) -> Tokenizer:
    """Loads a tokenizer. `name` is 'bytes' or the path of a tokenizer.json, .model (SentencePiece) or vocab.txt.

    If `eos_token` is empty, the settings in the tokenizer's folder or else EOS_NAMES determine the end token. If
    `bos_token` is empty, these settings or else the tokenizer file determine the begin tokens; 'none' means that there
    is no begin token. Raises BadInput for an invalid name.
    """
    if problem := tokenizer_problem(name):
        raise BadInput(problem)
    if name == "bytes":
        if bos_token not in ("", NO_BOS):
            raise BadInput(f"data.bos_token={bos_token}: data.tokenizer=bytes has no such token; remove data.bos_token")
        return ByteTokenizer()
    path = Path(name).expanduser()
    folder = path.absolute().parent
    if folder.name == "tokenizer" and (folder.parent / "checkpoints").is_dir():  # in a work folder
        foreign.check_folder(path.parent, path.parent.parent)
        foreign.resolve_file(path)  # raises for a link to a different folder, because a work folder may be untrusted
    about = read_settings(foreign.companion_folder(path))
    recorded = about.note.get("eos_token")  # recorded by a run; else from the tokenizer
    recorded = recorded if isinstance(recorded, str) and recorded else about.token("eos_token")
    ends, begins = eos_token or recorded, begin_tokens(about, bos_token)
    neighbors = read_neighbors(about.settings, about.ids, str(about.folder), is_model=path.suffix == ".model")
    tokenizer = read_tokenizer(str(path), ends, begins, path.stat().st_mtime_ns, encoding, neighbors)
    if bos_token and begin_names(tokenizer) != begins:
        raise BadInput(
            f"data.bos_token={bos_token} is not a special token of {name}; set it to a special token, or to none"
        )
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
    """Loads a tokenizer file. Results are cached, because a large file takes 0.5 s to load."""
    if path.endswith(".model"):
        from jaxscale.runtime.text.tokenizer.sentencepiece import SentencePieceTokenizer, is_converted

        if not is_converted(path, neighbors):
            return SentencePieceTokenizer(path, eos_token, begin_tokens)
    from jaxscale.runtime.text.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer(path, eos_token, begin_tokens, encoding, neighbors)


def tokenizer_problem(name: str) -> str | None:
    """Returns an error message if `name` is neither 'bytes' nor the path of a tokenizer file, or None."""
    if name == "bytes":
        return None
    if "://" in name:
        return f"data.tokenizer={name} is not a local file; copy it to this machine first"
    if not name.endswith((".json", ".model", "vocab.txt")):
        rule = "must be 'bytes', a tokenizer.json or a SentencePiece .model, or a WordPiece vocab.txt"
        return f"data.tokenizer={name!r} {rule}"
    path = Path(name).expanduser()
    if path.is_dir():
        return f"data.tokenizer={name} is a folder; use the tokenizer.json or .model in it"
    return None if path.is_file() else f"data.tokenizer={name} does not exist; give the path of the file, or 'bytes'"


class TokenizerFolder(NamedTuple):
    """Settings in a tokenizer's folder, with {} for missing files."""

    folder: Path | None
    settings: Mapping[str, Any] = {}  # tokenizer_config.json and special_tokens_map.json, see merge_settings
    generation: Mapping[str, Any] = {}  # generation_config.json
    note: Mapping[str, Any] = {}  # jaxscale.json of the run that saved the folder
    ids: Mapping[str, Any] = {}  # added_tokens.json

    def token(self, which: str) -> str:
        """Returns the name of a special token such as bos_token, or ''."""
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
    """Returns the JSON object in a file, without null values; {} if the file is missing."""
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
    """Returns the folder of a tokenizer's file, or None for bytes."""
    return None if tokenizer.name == "bytes" else foreign.companion_folder(tokenizer.name)


def begin_tokens(about: TokenizerFolder, bos_token: str) -> tuple[str, ...] | None:
    """Returns the names of the begin tokens, or None to use the begin tokens in the tokenizer file.

    `bos_token` is data.bos_token. If it is empty, uses the begin tokens that a run recorded, or else add_bos_token,
    which transformers 4 reads for Llama's tokenizers (transformers 5 reads only tokenizer.json).
    """
    if bos_token:
        return () if bos_token == NO_BOS else (bos_token,)
    if about.note:
        recorded = about.note.get("begin_tokens", [])
        if not isinstance(recorded, list) or not all(isinstance(name, str) for name in recorded):
            raise BadInput(f"{about.folder}/{NOTE}: begin_tokens={recorded!r:.80} must be a list of token names")
        return tuple(recorded)
    if (add_bos := about.settings.get("add_bos_token")) is False:
        return ()
    return (about.token("bos_token"),) if add_bos and about.token("bos_token") else None


def bos_setting(begin_tokens: Sequence[str]) -> str:
    """Returns the value of data.bos_token for these tokens, or '' for several tokens, which it cannot express."""
    return NO_BOS if not begin_tokens else begin_tokens[0] if len(begin_tokens) == 1 else ""


def end_ids(tokenizer: Tokenizer, about: TokenizerFolder) -> tuple[int, ...]:
    """Returns the ids that end generation: eos_id and the ids in generation_config.json."""
    found = about.generation.get("eos_token_id")
    more = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int and one >= 0 for one in more):
        raise BadInput(
            f"{about.folder}/{GENERATION}: eos_token_id={found!r:.80} must be a token id or a list of token ids"
        )
    return tuple(dict.fromkeys([tokenizer.eos_id, *more]))


def find_template(about: TokenizerFolder) -> tuple[str, str] | None:
    """Returns (chat template, path of its file), or None. Raises BadInput if no template is named default."""
    named, where = named_templates(about)
    if named and "default" not in named:
        raise BadInput(
            f"{where} has the chat templates {', '.join(named)}, but none is named default; copy the template to "
            f"use to {Path(about.folder or '') / TEMPLATE}, or set data.chat.template to its file"
        )
    return (named["default"], where) if named else None


def named_templates(about: TokenizerFolder) -> tuple[dict[str, str], str]:
    """Returns ({name: chat template}, path of their file or folder), found in the same order as in transformers."""
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
    """Returns the content of a template file set by the user, which may be a link. `name` is for error messages."""
    try:
        with foreign.open_regular(path) as file:
            return decode_template(foreign.read_at_most(file, path, LARGEST_TEMPLATE), name)
    except OSError as error:
        raise BadInput(f"{name} cannot be read: {error.strerror}") from None


def decode_template(content: bytes, name: str) -> str:
    """Decodes a template. Raises BadInput if the template is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} cannot be read: {error}") from None


@dataclasses.dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer and the settings in its folder."""

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...] = ()  # ids that end generation
    about: TokenizerFolder = TokenizerFolder(None)


def save_tokenizer(tokenizer: Tokenizer, workdir: Any, chat: Mapping[str, Any] | None = None) -> None:
    """Writes WORKDIR/tokenizer/ for open_saved, unless it is up to date. `chat`: ChatTemplate.note of a chat run."""
    folder = paths.as_path(workdir) / FOLDER
    note: dict[str, Any] = {name: getattr(tokenizer, name) for name in ("name", "eos_token", "fingerprint")}
    note |= {"begin_tokens": list(begin_names(tokenizer))}
    if chat:
        note |= {"chat": {key: chat[key] for key in ("variables", "today", "fingerprint")}}
    copied: dict[str, bytes] = {}
    if (source := tokenizer_folder(tokenizer)) is not None and (file := tokenizer.saved_file()) is not None:
        found = {name: source / name for name in COMPANIONS if name != NOTE and foreign.is_file(source / name)}
        note["file"] = file[0]
        copied = dict([file])
        copied |= {name: foreign.read_bytes(path, LARGEST) for name, path in found.items()}
    if chat:
        copied[TEMPLATE] = chat["template"].encode()
    note["files"] = {name: hashlib.sha256(content).hexdigest() for name, content in copied.items()}
    if (folder / NOTE).exists() and paths.read_json(folder / NOTE) == note:
        if all((folder / name).exists() and paths.read_bytes(folder / name) == copied[name] for name in copied):
            return
    if not paths.is_remote(folder):
        paths.make_private(folder)
    for name, content in copied.items():
        paths.write_bytes_atomic(folder / name, content)
    paths.write_json(folder / NOTE, note)  # last, so that the listed files exist


def open_saved(
    workdir: Any, data: Mapping[str, Any], *, converted: bool = False, named: str = ""
) -> SavedTokenizer | None:
    """Returns the tokenizer of a work folder, or None if neither the folder nor the settings have a tokenizer.

    data: the run's data settings, used if the folder has no tokenizer. converted: True for an imported model, which
    does not use bytes by default. named: tokenizer to use if the folder has none.
    Raises BadInput if a file cannot be read or differs from the run's tokenizer.
    """
    folder = paths.as_path(workdir) / FOLDER
    foreign.check_folder(folder, workdir)
    folder = local_copy(folder)
    if folder is not None and named:
        raise BadInput(f"tokenizer={named} is not needed: {workdir} has a tokenizer in {FOLDER}/; omit tokenizer=")
    if folder is not None:
        return read_folder(folder)
    if named:
        return open_named(named, "", "")
    name = data.get("tokenizer") or ("" if converted else default_tokenizer(data))
    if not name:
        return None
    if problem := tokenizer_problem(name):
        raise BadInput(f"{workdir} has no folder {FOLDER}/, and {problem}")
    # older runs, whose settings have no bos_token, did not add begin tokens
    return open_named(name, data.get("eos_token") or "", data.get("bos_token", NO_BOS))


def default_tokenizer(data: Mapping[str, Any]) -> str:
    """Returns 'bytes', the tokenizer of a run whose settings name none, or '' if the run used token ids."""
    is_known = data.get("name") not in ("tokens", "synthetic", None)
    return "bytes" if is_known and (data["name"] == "stdlib" or "ids_field" not in data) else ""


def open_named(name: str, eos_token: str, bos_token: str) -> SavedTokenizer:
    """Opens a tokenizer by name, with the settings in its folder."""
    tokenizer = load_tokenizer(name, eos_token, bos_token)
    about = read_settings(tokenizer_folder(tokenizer))
    return SavedTokenizer(tokenizer, end_ids(tokenizer, about), about)


def read_folder(folder: Path) -> SavedTokenizer:
    """Opens the tokenizer in a local folder. Raises BadInput as open_saved() does."""
    about = read_settings(folder)
    recorded = about.note.get("files", {})  # older runs did not record files
    for name, sha256 in recorded.items() if isinstance(recorded, dict) else ():
        path = folder / name
        if name in (*FILES, *COMPANIONS) and not (foreign.is_file(path) and digest.file_sha256(str(path)) == sha256):
            raise BadInput(f"{path} is not the file that the run saved; restore the original")
    if about.note.get("name") == "bytes":
        tokenizer = load_tokenizer("bytes")
    else:
        name = next((name for name in FILES if foreign.is_file(folder / name)), None)
        if name is None:
            raise BadInput(f"{folder} contains none of {', '.join(FILES)}; copy the model's tokenizer to it")
        tokenizer = load_tokenizer(str(folder / name))
        recorded = about.note.get("fingerprint", tokenizer.fingerprint)  # older fingerprints exclude begin tokens
        older = lambda: load_tokenizer(str(folder / name), bos_token=NO_BOS).fingerprint
        if recorded != tokenizer.fingerprint and recorded != older():
            raise BadInput(f"{folder / name} is not the tokenizer that the run used; restore the original")
    return SavedTokenizer(tokenizer, end_ids(tokenizer, about), about)


def local_copy(folder: Any) -> Path | None:
    """Returns the folder, or a copy in the local cache if it is in a bucket; None if it has no tokenizer."""
    names = [name for name in (*FILES, *COMPANIONS) if (folder / name).exists()]
    if not names or not paths.is_remote(folder):
        return Path(folder) if names else None
    contents = {name: (folder / name).read_bytes() for name in names}
    digest = hashlib.sha256(json.dumps({n: hashlib.sha256(c).hexdigest() for n, c in contents.items()}).encode())
    place = paths.cache_dir() / "tokenizers" / digest.hexdigest()[:32]
    paths.make_private(place)
    for name, content in contents.items():
        if not (place / name).is_file():
            paths.write_bytes_atomic(place / name, content)
    return place
