"""The tokenizer saved in WORKDIR/tokenizer/ beside a run's checkpoints, so that a moved folder still has text.

A training run puts a copy of its tokenizer's files there, the chat template that it was trained with, and says in
`jaxscale.json` what they are. The folder of a converted model has what came with it (tokenizer.json or tokenizer.model,
tokenizer_config.json, generation_config.json), and no such note: then text begins as those files say.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.system import digest, foreign, paths
from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.added import ADDED
from jaxscale.text.tokenizer.base import LARGEST, Tokenizer, begin_names
from jaxscale.text.tokenizer.load import (
    GENERATION,
    NO_BOS,
    NOTE,
    SETTINGS,
    SPECIAL,
    TEMPLATE,
    TEMPLATE_JSON,
    About,
    beside,
    end_ids,
    load_tokenizer,
    read_about,
    tokenizer_problem,
)

FOLDER = "tokenizer"
FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt")  # in this order
BESIDE = (NOTE, SETTINGS, GENERATION, TEMPLATE, TEMPLATE_JSON, SPECIAL, ADDED)


@dataclasses.dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer and the settings in its folder."""

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...] = ()  # each ends a text
    about: About = About(None)


def save_tokenizer(tokenizer: Tokenizer, workdir: Any, chat: Mapping[str, Any] | None = None) -> None:
    """Writes WORKDIR/tokenizer/: the tokenizer's files, and what open_saved reads them by; not again if it is there.

    chat: how conversations were written, if the run is trained on any: ChatTemplate.note.
    """
    folder = paths.as_path(workdir) / FOLDER
    note: dict[str, Any] = {
        "name": tokenizer.name,
        "eos_token": tokenizer.eos_token,
        "fingerprint": tokenizer.fingerprint,
    }
    note |= {"begin_tokens": list(begin_names(tokenizer))}
    if chat:
        note |= {"chat": {key: chat[key] for key in ("variables", "today", "fingerprint")}}
    copied: dict[str, bytes] = {}
    if (source := beside(tokenizer)) is not None and (file := tokenizer.saved_file()) is not None:
        found = {name: source / name for name in BESIDE if name != NOTE and foreign.is_file(source / name)}
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
    paths.write_json(folder / NOTE, note)  # last: what it names is there


def check_noted(about: About, folder: Path) -> None:
    """Raises BadInput for a file that differs from the copy that the run saved; notes of older runs list no files."""
    noted = about.note.get("files", {})
    for name, sha256 in noted.items() if isinstance(noted, dict) else ():
        path = folder / name
        if name in (*FILES, *BESIDE) and not (foreign.is_file(path) and digest.file_sha256(str(path)) == sha256):
            raise BadInput(f"{path} is not the file that the run has kept; bring that one back")


def open_saved(
    workdir: Any, data: Mapping[str, Any], *, converted: bool = False, named: str = ""
) -> SavedTokenizer | None:
    """The tokenizer of a work folder; None where neither the folder nor the settings know one.

    data: the run's settings of that name: for a folder without a tokenizer of its own, `tokenizer` names one.
    converted: the model was made elsewhere, so that settings which name no tokenizer do not mean bytes. named: by the
    person, for a folder without one.
    Raises BadInput for a file that cannot be read, or is not the one that the run was trained with.
    """
    folder = paths.as_path(workdir) / FOLDER
    foreign.check_folder(folder, workdir)
    folder = local_copy(folder)
    if folder is not None and named:
        raise BadInput(f"tokenizer={named}: {workdir} has its own in {FOLDER}/; leave it out")
    if folder is not None:
        return read_folder(folder)
    if named:
        return opened(named, "", "")
    name = data.get("tokenizer") or ("" if converted else default_tokenizer(data))
    if not name:
        return None
    if problem := tokenizer_problem(name):
        raise BadInput(f"{workdir} has no folder {FOLDER}/, and {problem}")
    # settings that do not know bos_token began documents with nothing
    return opened(name, data.get("eos_token") or "", data.get("bos_token", NO_BOS))


def default_tokenizer(data: Mapping[str, Any]) -> str:
    """The tokenizer of a run whose settings name none and whose work folder has none; '' where it is not known.

    Runs that know data.ids_field and tokenize as bytes write that into their work folder, so others have token ids.
    """
    of_ids = data.get("name") in ("tokens", "synthetic", None) or (data["name"] != "stdlib" and "ids_field" in data)
    return "" if of_ids else "bytes"


def opened(name: str, eos_token: str, bos_token: str) -> SavedTokenizer:
    """The tokenizer of this name, with what lies beside it."""
    tokenizer = load_tokenizer(name, eos_token, bos_token)
    about = read_about(beside(tokenizer))
    return SavedTokenizer(tokenizer, end_ids(tokenizer, about), about)


def read_folder(folder: Path) -> SavedTokenizer:
    """The tokenizer in a local folder. Raises BadInput as open_saved does."""
    about = read_about(folder)
    check_noted(about, folder)
    if about.note.get("name") == "bytes":
        tokenizer = load_tokenizer("bytes")
    else:
        name = next((name for name in FILES if foreign.is_file(folder / name)), None)
        if name is None:
            raise BadInput(f"{folder} holds none of {', '.join(FILES)}; copy the model's tokenizer there")
        tokenizer = load_tokenizer(str(folder / name))
        noted = about.note.get("fingerprint", tokenizer.fingerprint)  # older ones leave out what begins documents
        older = lambda: load_tokenizer(str(folder / name), bos_token=NO_BOS).fingerprint
        if noted != tokenizer.fingerprint and noted != older():
            raise BadInput(f"{folder / name} is not the tokenizer that the run was trained with; bring that one back")
    return SavedTokenizer(tokenizer, end_ids(tokenizer, about), about)


def local_copy(folder: Any) -> Path | None:
    """The folder, or a copy of one in a bucket in the user's cache; None where there is none."""
    names = [name for name in (*FILES, *BESIDE) if (folder / name).exists()]
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
