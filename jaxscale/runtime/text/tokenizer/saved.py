"""The tokenizer saved in WORKDIR/tokenizer/ with a run's checkpoints, so that a work folder can be moved.

A training run copies its tokenizer's files and chat template there, and describes them in `jaxscale.json`. A converted
model has its original files (tokenizer.json or tokenizer.model, tokenizer_config.json, generation_config.json) without
`jaxscale.json`; these files then define the begin tokens.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.runtime.text.tokenizer.base import LARGEST, Tokenizer, begin_names
from jaxscale.runtime.text.tokenizer.load import (
    COMPANIONS,
    NO_BOS,
    NOTE,
    TEMPLATE,
    TokenizerFolder,
    end_ids,
    load_tokenizer,
    read_settings,
    tokenizer_folder,
    tokenizer_problem,
)
from jaxscale.system import digest, foreign, paths
from jaxscale.system.exits import BadInput

FOLDER = "tokenizer"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt")  # by priority


@dataclasses.dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer and the settings in its folder."""

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...] = ()  # each ends a text
    about: TokenizerFolder = TokenizerFolder(None)


def save_tokenizer(tokenizer: Tokenizer, workdir: Any, chat: Mapping[str, Any] | None = None) -> None:
    """Writes WORKDIR/tokenizer/ for open_saved, if missing. chat: ChatTemplate.note of a chat run."""
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
    paths.write_json(folder / NOTE, note)  # last, so that the files that it lists exist


def open_saved(
    workdir: Any, data: Mapping[str, Any], *, converted: bool = False, named: str = ""
) -> SavedTokenizer | None:
    """Returns the tokenizer of a work folder; None if neither the folder nor the settings have one.

    data: the run's data settings, used if the folder has no tokenizer. converted: the model was imported, so that
    settings without a tokenizer do not mean bytes. named: the user's choice, for a folder without one.
    Raises: BadInput for a file that cannot be read, or is not the one that the run was trained with.
    """
    folder = paths.as_path(workdir) / FOLDER
    foreign.check_folder(folder, workdir)
    folder = local_copy(folder)
    if folder is not None and named:
        raise BadInput(f"tokenizer={named}: {workdir} has a tokenizer in {FOLDER}/; leave it out")
    if folder is not None:
        return read_folder(folder)
    if named:
        return open_named(named, "", "")
    name = data.get("tokenizer") or ("" if converted else default_tokenizer(data))
    if not name:
        return None
    if problem := tokenizer_problem(name):
        raise BadInput(f"{workdir} has no folder {FOLDER}/, and {problem}")
    # older settings without bos_token added no begin token
    return open_named(name, data.get("eos_token") or "", data.get("bos_token", NO_BOS))


def default_tokenizer(data: Mapping[str, Any]) -> str:
    """Returns the tokenizer of a run whose settings and work folder have none; '' if unknown, or token ids."""
    is_known = data.get("name") not in ("tokens", "synthetic", None)
    return "bytes" if is_known and (data["name"] == "stdlib" or "ids_field" not in data) else ""


def open_named(name: str, eos_token: str, bos_token: str) -> SavedTokenizer:
    """Opens the tokenizer of this name with the settings in its folder."""
    tokenizer = load_tokenizer(name, eos_token, bos_token)
    about = read_settings(tokenizer_folder(tokenizer))
    return SavedTokenizer(tokenizer, end_ids(tokenizer, about), about)


def read_folder(folder: Path) -> SavedTokenizer:
    """Opens the tokenizer in a local folder. Raises BadInput as open_saved."""
    about = read_settings(folder)
    recorded = about.note.get("files", {})  # older runs recorded none
    for name, sha256 in recorded.items() if isinstance(recorded, dict) else ():
        path = folder / name
        if name in (*FILES, *COMPANIONS) and not (foreign.is_file(path) and digest.file_sha256(str(path)) == sha256):
            raise BadInput(f"{path} is not the file that the run saved; restore that one")
    if about.note.get("name") == "bytes":
        tokenizer = load_tokenizer("bytes")
    else:
        name = next((name for name in FILES if foreign.is_file(folder / name)), None)
        if name is None:
            raise BadInput(f"{folder} contains none of {', '.join(FILES)}; copy the model's tokenizer there")
        tokenizer = load_tokenizer(str(folder / name))
        recorded = about.note.get("fingerprint", tokenizer.fingerprint)  # older fingerprints exclude begin tokens
        older = lambda: load_tokenizer(str(folder / name), bos_token=NO_BOS).fingerprint
        if recorded != tokenizer.fingerprint and recorded != older():
            raise BadInput(f"{folder / name} is not the tokenizer that the run was trained with; restore that one")
    return SavedTokenizer(tokenizer, end_ids(tokenizer, about), about)


def local_copy(folder: Any) -> Path | None:
    """Returns the folder, or a copy of a bucket's folder in the cache; None if there is none."""
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
