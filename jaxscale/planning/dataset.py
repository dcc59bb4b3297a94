"""How many tokens the data of a config have, where headers and sizes tell it without reading them."""

from pathlib import Path

import numpy as np

from jaxscale.data.checks import corpus_files, raw_dtype
from jaxscale.data.config import DataConfig
from jaxscale.data.header import read_header
from jaxscale.data.manifest import is_manifest, read_manifest
from jaxscale.data.megatron import is_megatron, read_index
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import is_remote
from jaxscale.text.sources.files import SourceFile

PLAIN_TEXT = (".txt", ".py", ".md")


def count_tokens(cfg: DataConfig, vocab_size: int) -> tuple[int | None, str]:
    """(tokens of one pass over the training data, how it is known), or (None, why it is not known)."""
    if cfg.name == "synthetic":
        return None, "synthetic data never end"
    if cfg.name == "hf":
        return None, "unknown: data sets of the hub are counted when they are prepared"
    (files, _), problems = corpus_files(cfg)
    if problems:
        return None, f"unknown: {problems[0]}"
    if any(is_remote(file.path) for file in files):
        return None, "unknown: data in a bucket are not asked for here"
    if cfg.name == "tokens":
        try:
            return sum(tokens_of(file, cfg, vocab_size) for file in files), "by the files' headers and sizes"
        except (BadInput, OSError) as error:
            return None, f"unknown: {error}"
    if cfg.tokenizer not in ("", "bytes"):
        return None, "unknown before the text is tokenised: jaxscale prepare counts it"
    if not all(file.path.endswith(PLAIN_TEXT) for file in files):
        return None, "unknown before the files are unpacked: jaxscale prepare counts it"
    held = 1 - cfg.val_fraction if not cfg.val_files else 1.0
    tokens = sum(Path(file.path).stat().st_size + 1 for file in files) * held
    return round(tokens), "by the sizes of the files, a byte being a token, without what is held out"


def tokens_of(file: SourceFile, cfg: DataConfig, vocab_size: int) -> int:
    """Tokens of one token file. Raises BadInput where it does not say."""
    if is_manifest(file.path):
        return read_manifest(file.path).content["num_tokens"]
    if is_megatron(file.path):
        return int(read_index(Path(file.path).with_suffix(".idx")).offsets[-1])
    header = read_header(Path(file.path))
    if header is not None:
        return header["num_tokens"]
    if not file.path.endswith(".bin"):
        raise BadInput(f"{file.path} has no header that tells its tokens")
    return Path(file.path).stat().st_size // np.dtype(raw_dtype(cfg, vocab_size)).itemsize
