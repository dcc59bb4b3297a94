"""The files beside a tokenizer: special tokens, what begins and ends a text, and the chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.system import foreign
from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.base import Tokenizer

NOTE, SETTINGS, GENERATION = "jaxscale.json", "tokenizer_config.json", "generation_config.json"
SPECIAL, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
LARGEST_TEMPLATE = 4 << 20  # bytes; those of published models have up to 30 kB
NO_BOS = "none"  # as bos_token: nothing begins a document


class About(NamedTuple):
    """Contents of a tokenizer's folder; each part is {} where its file is missing."""

    folder: Path | None
    settings: Mapping[str, Any] = {}  # tokenizer_config.json, over special_tokens_map.json
    generation: Mapping[str, Any] = {}
    note: Mapping[str, Any] = {}  # of the run that was trained with it

    def token(self, which: str) -> str:
        """The name of bos_token or the like, '' for none."""
        return token_text(self.settings.get(which))


def read_about(folder: Path | None) -> About:
    """The contents of a local folder. Raises BadInput for a file that is not JSON, or no object."""
    settings = {**read_object(folder, SPECIAL), **read_object(folder, SETTINGS)}
    return About(folder, settings, read_object(folder, GENERATION), read_object(folder, NOTE))


def naming_files(tokenizer_file: Path) -> list[Path]:
    """The files beside a tokenizer's that name its special tokens, as far as they are there."""
    beside = (foreign.own_folder(tokenizer_file) / name for name in (NOTE, SETTINGS, SPECIAL))
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
    return None if tokenizer.name == "bytes" else foreign.own_folder(tokenizer.name)


def token_text(value: Any) -> str:
    """The name of a special token, which files give as text or as an object with flags; '' for none."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


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
            f"{about.folder / GENERATION}: eos_token_id={found!r:.80} must be an id, or a list of ids; mend it"
        )
    return tuple(dict.fromkeys([tokenizer.eos_id, *more]))


def find_template(about: About) -> tuple[str, str] | None:
    """(the folder's chat template in Jinja, its file). Raises BadInput where it has several and none is `default`."""
    if about.folder is None:
        return None
    if foreign.is_file(path := about.folder / TEMPLATE):
        return as_source(foreign.read_bytes(path, LARGEST_TEMPLATE), str(path)), str(path)
    where, found = str(about.folder / SETTINGS), about.settings.get("chat_template")
    if isinstance(found, list):  # several with names
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        if not isinstance(found := named.get("default"), str):
            raise BadInput(
                f"{where} has the chat templates {', '.join(map(str, named))} and none called default; write the one "
                f"that is meant into {about.folder / TEMPLATE}, or name its file in data.chat.template"
            )
    return (found, where) if isinstance(found, str) else None


def read_source(path: Path, told: str) -> str:
    """The content of a template's file, which a person named; it may be a link. told: what named it."""
    try:
        with foreign.open_regular(path) as file:
            return as_source(foreign.read_at_most(file, path, LARGEST_TEMPLATE), told)
    except OSError as error:
        raise BadInput(f"{told} cannot be read: {error.strerror}") from None


def as_source(content: bytes, told: str) -> str:
    """The text of a template."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{told} cannot be read: {error}") from None
