"""Reads added and special tokens from the files next to a tokenizer, as transformers 4 and 5 do.

Follows `PreTrainedTokenizerBase._from_pretrained` and the constructor of fast tokenizers. If tokenizer_config.json has
`added_tokens_decoder`, this entry replaces added_tokens.json and special_tokens_map.json. Otherwise
special_tokens_map.json overrides tokenizer_config.json. Special tokens with only a name are added last.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short

if TYPE_CHECKING:
    import tokenizers

ADDED = "added_tokens.json"
DECODER = "added_tokens_decoder"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED = ("additional_special_tokens", "extra_special_tokens")
MOST_DIGITS = 10  # limit for the digits of an id
FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
SETTINGS_READ = ("tokenizer_class", "legacy", "add_prefix_space", "add_bos_token", "do_lower_case")
LLAMA, GEMMA = "LlamaTokenizer", "GemmaTokenizer"
DEFAULTS = {  # special tokens of transformers' classes for SentencePiece models of decoders
    GEMMA: {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    **dict.fromkeys(
        (LLAMA, "CodeLlamaTokenizer", "Phi3Tokenizer"),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
}


class AddedToken(NamedTuple):
    """A token added to a tokenizer's vocabulary. If `id` is None, the tokenizer assigns the id."""

    content: str
    id: int | None = None
    special: bool = True
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Neighbors(NamedTuple):
    """Tokens and settings from the files next to a tokenizer. `settings` contains (name, value) pairs."""

    added: tuple[AddedToken, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


def class_of(settings: Mapping[str, Any]) -> str:
    """Returns the setting tokenizer_class without the suffix 'Fast', or '' if it is missing."""
    found = settings.get("tokenizer_class")
    return found.removesuffix("Fast") if isinstance(found, str) else ""


def read_neighbors(settings: Mapping[str, Any], ids: Mapping[str, Any], where: str, *, is_model: bool) -> Neighbors:
    """Returns the tokens and settings from the files next to a tokenizer. `is_model`: True for SentencePiece."""
    if is_model:
        settings = {**DEFAULTS.get(class_of(settings), {}), **settings}
    pairs = [(name, settings[name]) for name in SETTINGS_READ if isinstance(settings.get(name), (str, bool))]
    pairs += [(name, text) for name in NAMED if (text := token_text(settings.get(name)))]
    return Neighbors(added_tokens(settings, ids, where), tuple(pairs))


def token_text(value: Any) -> str:
    """Returns the text of a special token, which is a string or an object with flags; '' for other values."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""


def merge_settings(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, Any]:
    """Merges special_tokens_map.json into tokenizer_config.json, in the cases in which transformers does."""
    if DECODER in config:
        return dict(config)
    merged = {**config, **special_map}
    for key in LISTED:
        both = [*as_list(config.get(key)), *as_list(special_map.get(key))]
        merged |= {key: both} if both else {}
    return merged


def added_tokens(settings: Mapping[str, Any], ids: Mapping[str, Any], where: str) -> tuple[AddedToken, ...]:
    """Returns the added tokens in the order in which transformers adds them.

    settings: result of merge_settings. ids: content of added_tokens.json. where: folder, for error messages.
    Raises BadInput for an entry that is not a token or has no valid id.
    """
    listed = [value for key in LISTED for value in as_list(settings.get(key))]
    values = [settings.get(key) for key in NAMED] + listed
    read = lambda value: read_token(value, f"{where}: the special token") | {"special": True}
    named: list[dict[str, Any]] = [read(value) for value in values if value]
    names = {token["content"] for token in named}
    if (decoder := settings.get(DECODER)) is not None:
        if not isinstance(decoder, Mapping):
            raise BadInput(f"{where}: {DECODER} in tokenizer_config.json must be an object that maps ids to tokens")
        numbered = [(i, read_token(value, f"{where}: {DECODER}: {i}")) for i, value in decoder.items()]
    else:
        flags = lambda name: {"special": name in names, "normalized": name not in names}
        numbered = [(i, {"content": name, **flags(name)}) for name, i in ids.items()]
    found = {}
    for i, token in numbered:
        number = int(i) if isinstance(i, str) and i.isdecimal() and len(i) < MOST_DIGITS else i
        if type(number) is not int or number < 0:
            raise BadInput(f"{where}: token {token['content']!r:.80} has the invalid id {short(i)}; use 0 or more")
        special = token.get("special", False) or token["content"] in names
        fields: dict[str, Any] = {"normalized": not special} | token | {"special": special, "id": number}
        found[number] = AddedToken(**fields)
    first = {token["content"]: token for token in reversed(named)}  # the first entry for each name
    known = {token.content for token in found.values()}
    only_named = [name for name in dict.fromkeys(token["content"] for token in named) if name not in known]
    return (*(found[i] for i in sorted(found)), *(AddedToken(**first[name]) for name in only_named))


def as_list(value: Any) -> list[Any]:
    """Returns the tokens in a list or in a dict {name: token}; [] for other values."""
    return list(value.values()) if isinstance(value, Mapping) else list(value) if isinstance(value, list) else []


def read_token(value: Any, where: str) -> dict[str, Any]:
    """Returns the content and flags of a token. Raises BadInput for an invalid token."""
    token = {"content": value} if isinstance(value, str) else value
    content = token_text(token)
    flags = {name: token[name] for name in FLAGS if name in token} if isinstance(token, Mapping) else {}
    if not content or not all(isinstance(flag, bool) for flag in flags.values()):
        raise BadInput(f"{where} {short(value)} must be a string, or an object with a content string and boolean flags")
    return {"content": content, **flags}


def add_all(tokenizer: "tokenizers.Tokenizer", tokens: Sequence[AddedToken], where: str) -> bool:
    """Adds the tokens as transformers does. Returns True if the tokenizer has changed.

    A special token that is already in the vocabulary, such as "!" for padding, remains an ordinary token, because
    decoding drops special tokens.
    Raises BadInput if a token has different ids in the files and in the tokenizer.
    """
    import tokenizers

    snapshot = lambda: {
        i: (token.content, *(getattr(token, flag) for flag in FLAGS))
        for i, token in tokenizer.get_added_tokens_decoder().items()
    }
    before = snapshot()
    present = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    new = []
    for token in tokens:
        existing = present.get(token.content)
        if token.id is None and existing is None:
            encoded = tokenizer.encode(token.content, add_special_tokens=False).ids
            if encoded == [tokenizer.token_to_id(token.content)]:
                continue
        if token.id is None and existing is not None:
            token = AddedToken(token.content, None, True, *(getattr(existing, flag) for flag in FLAGS[1:]))
        if existing is None or any(getattr(existing, flag) != getattr(token, flag) for flag in FLAGS):
            flags = {flag: getattr(token, flag) for flag in FLAGS}
            new.append(tokenizers.AddedToken(token.content, **flags))
    tokenizer.add_tokens(new)
    for token in tokens:
        if token.id is not None and (found := tokenizer.token_to_id(token.content)) != token.id:
            raise BadInput(
                f"{where}: {token.content!r:.80} has id {token.id} in the files next to the tokenizer, but id {found} "
                f"in the tokenizer file; use the files of one tokenizer"
            )
    return snapshot() != before
