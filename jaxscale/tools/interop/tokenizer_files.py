"""Import of tokenizer files without changes, and export of tokenizer files that transformers can load.

A work folder has its tokenizer files in WORKDIR/tokenizer. A tokenizer trained by jaxscale is exported as
tokenizer.json and tokenizer_config.json for AutoTokenizer, after a comparison of both tokenizers on probe texts.
"""

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.runtime.text.tokenizer import load
from jaxscale.runtime.text.tokenizer.added import ADDED, add_all, added_tokens, merge_settings, token_text
from jaxscale.runtime.text.tokenizer.base import LARGEST, Tokenizer, begin_names, library_errors
from jaxscale.runtime.text.tokenizer.bpe import byte_alphabet
from jaxscale.runtime.text.tokenizer.fast import probes
from jaxscale.runtime.text.tokenizer.fitting import describe_unused, fits
from jaxscale.runtime.text.tokenizer.load import FOLDER, GENERATION, MORE_TEMPLATES, default_tokenizer, load_tokenizer
from jaxscale.runtime.text.tokenizer.load import SETTINGS as CONFIG
from jaxscale.system import foreign, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.interop.hf_checkpoint import check_end_ids
from jaxscale.tools.interop.post_processor import begin_with
from jaxscale.tools.interop.safetensors import list_files

FAST, MODELS, WORDPIECE = "tokenizer.json", ("tokenizer.model", "spiece.model"), "vocab.txt"
FILES = (
    FAST, *MODELS, WORDPIECE, "vocab.json", "merges.txt", ADDED, load.SPECIAL, CONFIG, load.TEMPLATE,
    load.TEMPLATE_JSON, GENERATION,
)  # fmt: skip
DEFAULT = "default.jinja"  # file in the folder MORE_TEMPLATES
END_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
PROBE = "A tokenizer's file, tried: naïve façade, 1234.5 → 日本語 🙂\n\tdef f(x):\n"
EOS_NAME = "<|endoftext|>"  # the byte tokenizer's special token


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer files of a model, and lines to print about them."""

    files: dict[str, bytes]
    notes: tuple[str, ...] = ()
    end_ids: dict[str, Any] = dataclasses.field(default_factory=dict)  # bos_token_id, eos_token_id


def read_files(folder: Any, names: Mapping[str, int]) -> dict[str, bytes]:
    """Returns {name: content} of the FILES in a folder. Raises BadInput for large files, or links out of it."""
    found = {}
    for name in FILES:
        if name in names:
            if names[name] > LARGEST:
                raise BadInput(f"{folder / name} is {names[name]} bytes, too large for a tokenizer file; remove it")
            found[name] = foreign.read_bytes(folder / name, LARGEST)
    return found | default_template(folder, found) if main_file(found) else found


def default_template(folder: Any, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns {chat_template.jinja: content} of the default template in additional_chat_templates, or {}.

    transformers prefers this template. Raises BadInput if the folder has templates but no default template, because
    transformers then ignores the templates in other files.
    """
    more = folder / MORE_TEMPLATES
    names = [name for name in list_files(more) if name.endswith(".jinja")]
    if DEFAULT in names:
        foreign.check_folder(more, folder)
        return {load.TEMPLATE: foreign.read_bytes(more / DEFAULT, load.LARGEST_TEMPLATE, folder)}
    ignored = [name for name in (CONFIG, load.TEMPLATE_JSON) if "chat_template" in read_object(files.get(name, b""))]
    if names and ignored and load.TEMPLATE not in files:
        raise BadInput(
            f"{more} has {', '.join(names)} but no {DEFAULT}, so transformers ignores the chat_template of "
            f"{ignored[0]}; save the required template as {folder / load.TEMPLATE}"
        )
    return {}


def save_to_workdir(files: Mapping[str, bytes], workdir: Any) -> None:
    """Writes the files to WORKDIR/tokenizer if they contain a supported tokenizer."""
    if main_file(files) is None:
        return
    paths.make_run_dir(workdir / FOLDER)
    renamed = {workdir_name(name): files[name] for name in reversed(list(files))}  # tokenizer.model before spiece.model
    for name, content in renamed.items():
        paths.write_bytes_atomic(workdir / FOLDER / name, content)


def check_tokenizer(files: Mapping[str, bytes], vocab_size: int, folder: Any) -> list[str]:
    """Returns messages about the tokenizer. Raises BadInput if a model with vocab_size ids cannot use it."""
    check_end_ids(read_object(files.get(GENERATION, b"")), vocab_size, str(folder / GENERATION))
    if (main := main_file(files)) is None:
        return []
    settings = settings_of(files)
    if settings.get("fast_tokenizer_files", [FAST]) != [FAST]:
        raise BadInput(
            f"{folder / CONFIG}: fast_tokenizer_files={short(settings['fast_tokenizer_files'])} selects "
            f"files other than {FAST} for some versions of transformers; rename one of them to {FAST} and remove "
            "this setting"
        )
    with tempfile.TemporaryDirectory() as scratch:
        try:
            tokenizer = load_files(files, main, scratch)
            tokenizer.decode(tokenizer.encode(PROBE))
        except BadInput as error:
            message = str(error).replace("data.tokenizer=", "").replace(scratch, str(folder))
            raise BadInput(f"{message}; repair the tokenizer, or remove {main} to convert only the weights") from None
    if not fits(tokenizer, vocab_size):
        raise BadInput(
            f"{folder / main} has {tokenizer.vocab_size} ids, but the model in config.json has only {vocab_size}; use "
            f"the tokenizer of this model, or remove {main} to convert only the weights"
        )
    notes = [f"{main} {line}"] if (line := describe_unused(tokenizer, vocab_size)) else []
    if tokenizer.loss_reason:
        notes.append(f"{main} does not preserve all text: {tokenizer.loss_reason}")
    code = settings.get("auto_map")
    if isinstance(code, list) or isinstance(code, Mapping) and any(name.endswith("Tokenizer") for name in code):
        notes.append(f"{CONFIG} has custom tokenizer code (auto_map), which is not run; {main} is used")
    if more := [name for name in list_files(folder / MORE_TEMPLATES) if name != DEFAULT]:
        notes.append(
            f"{MORE_TEMPLATES}/ is not copied ({', '.join(more)}): to use a chat template other than the default, set "
            "data.chat.template to its file"
        )
    return notes


def load_files(files: Mapping[str, bytes], main: str, scratch: str, eos_token: str = "") -> Tokenizer:
    """Writes the files to the empty folder `scratch` and loads the tokenizer. Raises BadInput if loading fails."""
    for name, content in files.items():
        (pathlib.Path(scratch) / name).write_bytes(content)
    return load_tokenizer(str(pathlib.Path(scratch) / main), eos_token)


def settings_of(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Merges tokenizer_config.json and special_tokens_map.json as transformers does."""
    return merge_settings(*(read_object(files.get(name, b"")) for name in (CONFIG, load.SPECIAL)))


def main_file(files: Sequence[str] | Mapping[str, bytes]) -> str | None:
    """Returns the first file that is supported as data.tokenizer, or None."""
    return next((name for name in (FAST, *MODELS, WORDPIECE) if name in files), None)


def workdir_name(name: str) -> str:
    """Returns the name of a file in WORKDIR/tokenizer."""
    return MODELS[0] if name in MODELS else name


def read_object(content: bytes) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} for other contents."""
    try:
        found = foreign.parse_json(content)
    except BadInput:
        return {}
    return found if isinstance(found, dict) else {}


def with_generation(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, bytes]:
    """Adds generation_config.json with the token ids in config.json if the file is missing, as transformers does."""
    ends = {name: config[name] for name in END_IDS if config.get(name) is not None}
    if GENERATION in files or "eos_token_id" not in ends:
        return dict(files)
    return {**files, GENERATION: as_json(ends)}


def end_ids(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns the ids of END_IDS from generation_config.json. If eos_token_id is missing, reads the tokenizer."""
    generation = read_object(files.get(GENERATION, b""))
    found = {name: generation[name] for name in END_IDS if name in generation}
    if "eos_token_id" not in found and FAST in files:
        made, settings = as_fast(files)[0], settings_of(files)
        for which in ("bos_token", "eos_token"):
            found[f"{which}_id"] = made.token_to_id(token_text(settings.get(which)))
    return found


def as_fast(files: Mapping[str, bytes]) -> tuple[Any, str]:
    """Returns (tokenizer, its JSON text) from tokenizer.json and the added tokens. Raises BadInput if it is invalid."""
    import tokenizers

    text = files[FAST].decode(errors="replace")
    with library_errors(f"{FAST} cannot be read"):
        made = tokenizers.Tokenizer.from_str(text)
    added = added_tokens(settings_of(files), read_object(files.get(ADDED, b"")), CONFIG)
    return made, made.to_str() if add_all(made, added, FAST) else text


def missing_tokenizer(files: Mapping[str, bytes], folder: Any) -> str:
    """Returns the reason why these files contain no supported tokenizer, with a fix."""
    if "vocab.json" in files:
        command = f"m.from_pretrained('{folder}').save_pretrained('{folder}')"
        return (
            "it has vocab.json but no tokenizer.json, which is required; create it with transformers: "
            f'python -c "from transformers import AutoTokenizer as m; {command}"'
        )
    return "it has no tokenizer.json and no tokenizer.model; give --tokenizer=FILE to sample and evaluate"


def export_files(workdir: Any, run: Mapping[str, Any]) -> TokenizerFiles:
    """Returns the tokenizer files of an export. run: the "run" entry of the step's metadata."""
    config, folder = run.get("config") or {}, workdir / FOLDER
    data, seq_len = config.get("data") or {}, config.get("seq_len")
    foreign.check_folder(folder, workdir)
    sizes = {path.name: 0 for path in folder.iterdir()} if folder.exists() else {}
    files = read_files(folder, sizes)
    note = read_object(foreign.read_bytes(folder / load.NOTE)) if load.NOTE in sizes else {}
    if generation := (run.get("converted") or {}).get("generation"):
        files.setdefault(GENERATION, as_json(generation))
    noted = note.get("begin_tokens", ()) if note else None  # older notes have no begin tokens
    if CONFIG in files and FAST in files:
        return with_begin_tokens(with_trained_eos(files, str(note.get("eos_token") or "")), noted)
    name = str(note.get("name") or data.get("tokenizer") or "")
    eos_token = str(note.get("eos_token") or data.get("eos_token") or "")
    if main := main_file(files):
        return with_begin_tokens(convert_tokenizer(files, main, eos_token, seq_len), noted)
    if name == "" and (run.get("converted") or (data.get("name") and not default_tokenizer(data))):
        return TokenizerFiles(files, ("no tokenizer is exported: the work folder has none, and its config sets none",))
    if name in ("", "bytes"):
        return with_tokenizer_json(load_tokenizer("bytes"), byte_level(), EOS_NAME, seq_len, files)
    path = pathlib.Path(name).expanduser()
    if not path.is_file():
        return TokenizerFiles(files, (f"no tokenizer is exported: neither {name} nor {folder} exists",))
    main = {".model": MODELS[0], ".txt": WORDPIECE}.get(path.suffix, FAST)
    tokenizer = load_tokenizer(name, eos_token, data.get("bos_token", load.NO_BOS))
    texts = convert_tokenizer(files | {main: foreign.read_named(path, LARGEST)}, main, tokenizer.eos_token, seq_len)
    return with_begin_tokens(texts, begin_names(tokenizer))


def with_trained_eos(files: dict[str, bytes], eos_token: str) -> TokenizerFiles:
    """Adds the run's end-of-document token to eos_token_id, which may have only a chat model's end-of-turn token."""
    ends = end_ids(files)
    stops = ends.get("eos_token_id")
    known = stops if isinstance(stops, list) else [] if stops is None else [stops]
    learned = as_fast(files)[0].token_to_id(eos_token) if eos_token else None
    if learned is None or learned in known:
        return TokenizerFiles(files, (), ends)
    ends |= {"eos_token_id": [*known, learned]}
    generation = read_object(files.get(GENERATION, b"")) | {"eos_token_id": ends["eos_token_id"]}
    note = f"{GENERATION} also stops at {eos_token}, which ends this run's documents"
    return TokenizerFiles(files | {GENERATION: as_json(generation)}, (note,), ends)


def with_begin_tokens(texts: TokenizerFiles, begin: Sequence[str] | None) -> TokenizerFiles:
    """Edits the files so that texts start with the tokens `begin`, as in training. If `begin` is None, does nothing."""
    main = main_file(texts.files)
    if begin is None or main is None:
        return texts
    files, ends = dict(texts.files), dict(texts.end_ids)
    content = None
    if main == FAST:
        with library_errors(f"{FAST} does not work"):
            content = begin_with(begin, as_fast(files)[1])
    is_right = content is None
    if main in MODELS:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=files[main])
        is_right = (model.id_to_piece(model.bos_id()),) == tuple(begin) if model.bos_id() >= 0 else not begin
    about = read_object(files.get(CONFIG, b""))
    declared = load.begin_tokens(load.TokenizerFolder(None, settings_of(files)), "")
    if begin and main == FAST:
        ends["bos_token_id"] = as_fast(files)[0].token_to_id(begin[0])
    if is_right and declared in (None, tuple(begin)):
        return TokenizerFiles(files, texts.notes, ends)
    if content is not None:
        files[FAST] = content.encode()
    changed = {"add_bos_token": bool(begin)} | ({"bos_token": begin[0]} if begin else {})
    files[CONFIG] = as_json(about | changed)
    if begin and load.SPECIAL in files:  # transformers prefers this file to CONFIG
        files[load.SPECIAL] = as_json(read_object(files[load.SPECIAL]) | {"bos_token": begin[0]})
    if begin and GENERATION in files and "bos_token_id" in ends:
        files[GENERATION] = as_json(read_object(files[GENERATION]) | {"bos_token_id": ends["bos_token_id"]})
    note = f"the tokenizer starts texts with {''.join(begin) or 'nothing'}, as in this run's documents"
    return TokenizerFiles(files, (*texts.notes, note), ends)


def as_json(value: Mapping[str, Any]) -> bytes:
    """Encodes a settings file as JSON."""
    return (json.dumps(value, indent=2) + "\n").encode()


def convert_tokenizer(files: dict[str, bytes], main: str, eos_token: str, seq_len: int | None) -> TokenizerFiles:
    """Adds the tokenizer files that transformers needs."""
    eos_token = eos_token or token_text(settings_of(files).get("eos_token"))
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = load_files({name: files[name] for name in files if name != load.NOTE}, main, scratch, eos_token)
        name, content = tokenizer.saved_file() or (main, files[main])
        if name == WORDPIECE:
            from jaxscale.runtime.text.tokenizer.huggingface import read_vocab_txt

            text = read_vocab_txt(content).to_str()
        else:
            text = content.decode() if name == FAST else unigram(str(pathlib.Path(scratch) / main))
        return with_tokenizer_json(tokenizer, text, eos_token, seq_len, files)


def with_tokenizer_json(
    tokenizer: Tokenizer, text: str | None, eos_token: str, seq_len: int | None, files: dict
) -> TokenizerFiles:
    """Adds `text` as tokenizer.json, and tokenizer_config.json, if `text` gives the same ids as the tokenizer."""
    ends = {"bos_token_id": None, "eos_token_id": int(tokenizer.eos_id)}
    import tokenizers

    if text is None or not same_ids(tokenizer, made := tokenizers.Tokenizer.from_str(text)):
        note = "tokenizer.json cannot represent this SentencePiece model; its .model file is exported instead"
        return TokenizerFiles(files, (note,), ends)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    about |= {"eos_token": eos_token or made.id_to_token(int(tokenizer.eos_id))}
    about |= {"model_max_length": seq_len} if seq_len else {}
    made_files = {FAST: text.encode(), CONFIG: as_json(about)}
    return TokenizerFiles(made_files | files, (), ends)


def same_ids(tokenizer: Tokenizer, made: Any) -> bool:
    """Returns True if `made` (a tokenizers.Tokenizer) encodes and decodes all probe texts as `tokenizer` does."""
    made.encode_special_tokens = True
    made.no_truncation()
    made.no_padding()
    texts = probes((), ())
    for one, mine in zip(texts, tokenizer.encode_many(texts), strict=True):
        theirs = made.encode(one, add_special_tokens=False).ids
        if theirs != mine.tolist() or made.decode(theirs, skip_special_tokens=True) != tokenizer.decode(mine):
            return False
    return True


def byte_level() -> str:
    """Returns a tokenizer.json of the byte tokenizer, with 256 bytes, EOS and no merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    made = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([EOS_NAME])
    if made.token_to_id(EOS_NAME) != load.EOS_ID:
        raise RuntimeError(f"the tokenizers package gave {EOS_NAME} an id other than {load.EOS_ID}")
    return made.to_str()


def unigram(path: str) -> str | None:
    """Returns a tokenizer.json for a Unigram .model trained by jaxscale, or None for other model types."""
    import sentencepiece
    import tokenizers
    from tokenizers import decoders, models, normalizers

    processor = sentencepiece.SentencePieceProcessor(model_file=path)
    ids = range(processor.get_piece_size())
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in ids]
    has_bytes = any(processor.is_byte(i) for i in ids)
    try:
        made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=processor.unk_id(), byte_fallback=has_bytes))
    except Exception:  # the package raises bare Exception
        return None
    made.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), *([decoders.ByteFallback()] if has_bytes else []), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([processor.id_to_piece(i) for i in ids if processor.is_control(i)])
    return made.to_str()
