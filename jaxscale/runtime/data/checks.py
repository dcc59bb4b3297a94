"""Checks the data settings and files before text is read or tokenized and programs are compiled."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.runtime.data.cache import cache_folder, raw_dtype
from jaxscale.runtime.data.config import DataConfig, mixture_names, mixture_stages
from jaxscale.runtime.data.fields import choose_field, read_fields
from jaxscale.runtime.data.manifest import NAME as MANIFEST
from jaxscale.runtime.data.manifest import SHOWN, is_manifest
from jaxscale.runtime.data.mixture import check_sources
from jaxscale.runtime.data.objectives.ids import find_ids
from jaxscale.runtime.data.other_formats import is_megatron, read_index
from jaxscale.runtime.data.shards import read_header
from jaxscale.runtime.data.token_files import bin_of, prepared_problems
from jaxscale.runtime.text.config import Globs, expand_source_names
from jaxscale.runtime.text.sources.data_sets import is_array_record
from jaxscale.runtime.text.sources.files import (
    STREAMS,
    SourceFile,
    file_identity,
    ignore_line,
    is_saved_dataset,
    list_files,
    size_of,
    stdlib_files,
    text_problem,
)
from jaxscale.runtime.text.tokenizer.fitting import fits
from jaxscale.runtime.text.tokenizer.load import load_tokenizer, tokenizer_problem
from jaxscale.system.exits import BadInput
from jaxscale.units import plural


def check_data(cfg: DataConfig, seq_len: int, vocab_size: int) -> list[str]:
    """Returns a message with the fix for each problem that can be found without reading text."""
    if cfg.name == "synthetic":
        return []
    (files, val_files), problems = corpus_files(cfg)
    everything = [*files, *val_files]
    if cfg.name in ("files", "chat", "hf"):
        problems += filter(None, map(text_problem, everything))
    if cfg.name != "tokens" and not problems and all(size_of(file.path) == 0 for file in files):
        problems.append(f"data.files is an empty corpus: {plural(len(files), 'file')} of 0 bytes; choose other files")
    if cfg.name == "tokens" and files and not problems:
        problems += token_file_problems(cfg, files, everything, seq_len, vocab_size)
    name = cfg.tokenizer or ("" if cfg.name == "tokens" or not problems and holds_ids(cfg, files) else "bytes")
    if name:
        problems += tokenizer_problems(cfg, name, vocab_size, seq_len)
    folder = cache_folder(cfg)
    if folder.exists() and not folder.is_dir():
        problems.append(f"data.cache_dir={folder} is a file; choose a folder")
    return problems


def holds_ids(cfg: DataConfig, files: Sequence[SourceFile]) -> bool:
    """Returns True if the schema of the first file has token ids. Hub datasets are not checked."""
    if not files or files[0].path.startswith(STREAMS):
        return False
    with contextlib.suppress(BadInput, OSError):  # reading the file later raises the error
        chat = cfg.chat if cfg.name == "chat" else None
        return choose_field(files[0].path, read_fields(files[0].path, cfg), cfg, chat).kind == "ids"
    return False


def check_facts(cfg: DataConfig, names: Sequence[str], seq_len: int, facts: Mapping[str, Any]) -> None:
    """Raises BadInput for an unusable corpus. names: names of the sources. facts: result of write_documents()."""
    tokens = {part: sum(counts) for part, counts in facts["tokens"].items()}
    if cfg.name == "chat" and not sum(facts["members"]["train"]):
        fix = "increase seq_len" + ", or set data.chat.too_long='cut'" * (cfg.chat.too_long == "drop")
        raise BadInput(f"all training documents in data.files are longer than seq_len={seq_len:,}; {fix}")
    if tokens["train"] < seq_len and cfg.name != "chat":
        raise BadInput(
            f"data.files has {tokens['train']:,} training tokens, fewer than one sequence of seq_len={seq_len:,}; "
            "add text or reduce seq_len"
        )
    if "valid" in tokens and not facts["targets"]["valid"]:
        way_out = "choose other data.val_files" if cfg.val_files else "increase data.val_fraction, or set it to 0"
        raise BadInput(
            f"the validation set is empty ({tokens['valid']} tokens, training set {tokens['train']:,}); {way_out}"
        )
    for _, weights in mixture_stages(cfg.mixture) if cfg.mixture else ():
        check_sources("mixture", weights, dict(zip(names, facts["tokens"]["train"])))


def corpus_files(
    cfg: DataConfig, say: Callable[[str], None] = ignore_line
) -> tuple[tuple[list[SourceFile], list[SourceFile]], list[str]]:
    """Returns ((training files, validation files), messages for unusable globs). say: see list_files."""
    same = bin_of if cfg.name == "tokens" else str

    def list_setting(globs: Globs, setting: str, default_source: str) -> tuple[list[SourceFile], list[str]]:
        globs, problem = expand_source_names(globs, mixture_names(cfg.mixture), setting)
        globs = add_hub_scheme(globs) if cfg.name == "hf" else globs
        return ([], [problem]) if problem else list_files(globs, setting, default_source, same, say)

    if cfg.name == "stdlib":
        files, problems = stdlib_files(), []
        if not files:
            problems = ["data.name='stdlib': this Python has no source of its standard library; set data.files"]
    elif not cfg.files:
        return ([], []), [f"data.files is empty, but data.name={cfg.name!r} reads files; set data.files='FOLDER/*.txt'"]
    else:
        files, problems = list_setting(cfg.files, "data.files", "text")
    if not cfg.val_files:
        return (files, []), problems
    val_files, more = list_setting(cfg.val_files, "data.val_files", "validation")
    trained = {file_identity(same(file.path)): same(file.path) for file in files}
    if twice := [file for file in val_files if file_identity(same(file.path)) in trained]:
        path, first = same(twice[0].path), trained[file_identity(same(twice[0].path))]
        files_of = f"data.files{'' if path == first else f', as {first}'}"
        more += [f"{path} is in {files_of} and in data.val_files; remove it from one ({len(twice)} in total)"]
    return (files, val_files), problems + more


def tokenizer_problems(cfg: DataConfig, name: str, vocab_size: int, seq_len: int) -> list[str]:
    """Returns messages for problems of the tokenizer with this model and objective."""
    if problem := tokenizer_problem(name):
        return [problem]
    try:
        tokenizer = load_tokenizer(name, cfg.eos_token, cfg.bos_token)
        if not fits(tokenizer, vocab_size):
            raise BadInput(
                f"data.tokenizer={name} has ids up to {tokenizer.vocab_size - 1}, but the model has model.vocab_size="
                f"{vocab_size}; set model.vocab_size to {tokenizer.vocab_size} or more"
            )
        find_ids(cfg.objective, tokenizer, tokenizer.token_bytes, vocab_size, seq_len)
    except BadInput as error:
        return [str(error)]
    return []


def token_file_problems(
    cfg: DataConfig, files: Sequence[SourceFile], everything: Sequence[SourceFile], seq_len: int, vocab_size: int
) -> list[str]:
    """Returns messages for problems in the names, sizes and headers of token files."""
    problems, tokens = [], 0
    for file in everything:
        number, max_id, found = inspect_token_file(file.path, cfg, seq_len, vocab_size)
        problems += found
        if max_id >= vocab_size:
            problems.append(vocabulary_problem(file.path, max_id, vocab_size))
        tokens += number if file in files else 0
    if tokens < seq_len and not problems:
        problems.append(f"data.files has {tokens:,} tokens, fewer than one sequence of seq_len={seq_len:,}; add files")
    return problems


def inspect_token_file(path: str, cfg: DataConfig, seq_len: int, vocab_size: int) -> tuple[int, int, list[str]]:
    """Returns (tokens, largest id or -1 if unknown, problems) of a token file."""
    if path.startswith(STREAMS):
        return 0, -1, [f"{path} is a dataset, not a file of tokens; set data.name='hf'"]
    if is_manifest(path):
        manifest, problems = prepared_problems(path, cfg)
        content = manifest.content if manifest is not None else {"num_tokens": 0, "max_id": -1}
        return content["num_tokens"], content["max_id"], problems[:SHOWN]
    try:
        if is_megatron(path):
            return int(read_index(Path(path).with_suffix(".idx")).offsets[-1]), -1, []
        header, size = read_header(Path(path)), Path(path).stat().st_size
    except BadInput as error:
        return 0, -1, [str(error)]
    problems = []
    if header is not None and (manifest_path := Path(path).parent / MANIFEST).exists():
        problems.append(f"{path} belongs to a prepared set; use its manifest, which has the hashes: {manifest_path}")
    if is_array_record(path):
        return seq_len, -1, problems  # the number of tokens is unknown before reading the file
    if header is not None:
        return header["num_tokens"], header["max_id"], problems
    if not path.endswith(".bin"):
        problems.append(f"{path} is not a .bin of token ids; for text or id columns, set data.name='files'")
    return size // np.dtype(raw_dtype(cfg, vocab_size)).itemsize, -1, problems


def vocabulary_problem(path: str, max_id: int, vocab_size: int) -> str:
    """Returns the message for a file with token ids outside the model's vocabulary."""
    return (
        f"{path} contains token id {max_id}, but the model has model.vocab_size={vocab_size}; "
        f"set model.vocab_size to {max_id + 1} or more, or check data.token_dtype and the tokenizer"
    )


def add_hub_scheme(globs: Any) -> Any:
    """Adds the scheme hf:// to globs, unless they have a scheme or are paths of saved datasets."""
    if isinstance(globs, dict):
        return {source: add_hub_scheme(some) for source, some in globs.items()}
    if isinstance(globs, tuple):
        return tuple(map(add_hub_scheme, globs))
    return globs if globs.startswith(STREAMS) or is_saved_dataset(globs) else f"hf://{globs}"
