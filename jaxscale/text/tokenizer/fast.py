"""The fastest encoder with identical ids for a byte-level BPE: gigatoken, else tiktoken, each verified before use.

The slow one is the `tokenizers` package, which reads every tokenizer.json. A fast one takes its place only for files of
a known split pattern, after it gave the same ids for the texts of probe.py; some of the documents are compared too.
"""

import concurrent.futures
import importlib.util
import json
import multiprocessing
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.base import Block, Encode, block_of
from jaxscale.text.tokenizer.config import EncodeConfig, Split
from jaxscale.text.tokenizer.newer import with_newer
from jaxscale.text.tokenizer.probe import compare, compared_sometimes, probes
from jaxscale.text.tokenizer.split import PATTERNS, byte_alphabet, split_of

# gigatoken keeps every word it ever saw (about 110 bytes each, measured 2026-11): it is created again, in about 0.3 s,
# when the process has grown by so much, or where its size is not known, after so much text.
CACHE_BYTES = 512 << 20
CACHE_TEXT_BYTES = 4 << 30
CACHE_CHECK_BYTES = 64 << 20  # of text between two looks
PIECES = 512  # of a vocabulary, encoded on their own before an encoder is used


def make_encode(path: str, spec: Mapping[str, Any], exact: Encode, cfg: EncodeConfig) -> tuple[str, Encode]:
    """(name of the encoder, encode) for the tokenizer.json `path` with the parsed content `spec`.

    Raises: BadInput if cfg names an encoder that is not installed or cannot read this file, or if it gives other ids
    than `exact` for a probe; while encoding, if it does so for a document that is compared.
    """
    if cfg.encoder == "exact":
        return "tokenizers", exact
    split = split_of(spec)
    named = [entry["content"] for entry in spec.get("added_tokens") or []]
    plain = [entry["content"] for entry in spec.get("added_tokens") or [] if not entry.get("special")]
    for name, make in (("gigatoken", make_gigatoken), ("tiktoken", make_tiktoken)):
        if cfg.encoder not in ("auto", name):
            continue
        if not importlib.util.find_spec(name):
            problem, encode = f"{name} is not installed: pip install 'jaxscale[prepare]'", None
        elif split is None:
            problem, encode = "it is no byte-level BPE with the split pattern of GPT-2, cl100k or o200k", None
        else:
            problem, encode = make(spec, split, exact)
        if encode is None:
            if cfg.encoder == "auto":
                continue
            raise BadInput(f"{path} cannot be encoded by encoder={name}: {problem}; or set encoder=auto or exact")
        encode = around(encode, exact, plain)
        compare(path, name, probes(named, pieces_of(spec)), encode, exact)
        return name, compared_sometimes(path, name, encode, exact, cfg.check_every) if cfg.check_every else encode
    return "tokenizers", exact


def without_added(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer.json without its added tokens, so that their names in a text are plain text."""
    added = {entry["content"] for entry in spec.get("added_tokens") or []}
    merged = {left + right for left, right in pairs_of(spec)} | byte_alphabet().keys()
    vocab = {piece: i for piece, i in spec["model"]["vocab"].items() if piece not in added or piece in merged}
    return {**spec, "added_tokens": [], "post_processor": None, "model": {**spec["model"], "vocab": vocab}}


def pairs_of(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges in order; older files hold them as one string with a space."""
    return [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in spec["model"]["merges"]]


def make_gigatoken(spec: Mapping[str, Any], split: Split, exact: Encode) -> tuple[str, Encode | None]:
    """(why not, None), or ("", encode) by gigatoken, on all cores unless this process is itself one of several."""
    import gigatoken

    text = json.dumps(without_added(spec))
    try:
        tokenizer = gigatoken.Tokenizer.from_json(text)
    except (ValueError, TypeError, RuntimeError) as error:  # a regex or a model that it does not know
        return f"gigatoken says: {error}", None
    size, looked, text_bytes = resident_bytes(), 0, 0

    def encode(texts: Sequence[str]) -> Block:
        nonlocal tokenizer, size, looked, text_bytes
        layout = tokenizer.encode_batch(list(texts)).layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        text_bytes += sum(map(len, texts))
        if text_bytes - looked > CACHE_CHECK_BYTES:
            looked, now = text_bytes, resident_bytes()
            if text_bytes > CACHE_TEXT_BYTES or now - size > CACHE_BYTES:
                tokenizer = gigatoken.Tokenizer.from_json(text)
                size, looked, text_bytes = resident_bytes(), 0, 0
        return Block(ids.astype(np.uint32, copy=False), np.diff(offsets))

    return "", encode


def resident_bytes() -> int:
    """Of this process's memory, what is in RAM; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def make_tiktoken(spec: Mapping[str, Any], split: Split, exact: Encode) -> tuple[str, Encode | None]:
    """(why not, None), or ("", encode) by tiktoken, on all cores unless this process is itself one of several.

    tiktoken has no list of merges: it joins two neighbours if the joined piece has an id, the smallest first. That is
    the same if ids rise with the merges and every longer piece is made by one merge.
    """
    import tiktoken

    byte_of, vocab = byte_alphabet(), without_added(spec)["model"]["vocab"]
    made = [vocab.get(left + right, -1) for left, right in pairs_of(spec)]
    if any(later <= earlier for earlier, later in zip(made, made[1:])) or len(made) + 256 != len(vocab):
        return "its ids do not rise with its merges, as tiktoken needs", None
    ranks = {bytes(byte_of[character] for character in piece): i for piece, i in vocab.items()}
    if max(ranks[bytes([byte])] for byte in range(256)) > min(made, default=256):
        return "some of its bytes come after its merges", None
    encoding = tiktoken.Encoding("jaxscale", pat_str=PATTERNS[split], mergeable_ranks=ranks, special_tokens={})
    threads = 1 if multiprocessing.parent_process() else os.cpu_count() or 1

    def encode_one(text: str) -> np.ndarray:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:
            if isinstance(error, UnicodeError):
                raise
            return exact([text]).ids  # a run of some hundred thousand spaces exhausts the stack of its regex engine

    def encode(texts: Sequence[str]) -> Block:
        if threads == 1 or len(texts) < 2 * threads:
            return block_of([encode_one(text) for text in texts])
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:  # it lets go of the interpreter's lock
            return block_of(list(pool.map(encode_one, texts)))

    return "", encode


def around(encode: Encode, exact: Encode, names: Sequence[str]) -> Encode:
    """`encode`, but `exact` for texts that hold one of `names`, added tokens that are text, or too new a character."""
    found = re.compile("|".join(map(re.escape, names))).search if names else None

    def encode_around(texts: Sequence[str]) -> Block:
        named = set(with_newer(texts))
        if found:
            named.update(i for i, text in enumerate(texts) if found(text))
        if not named:
            return encode(texts)
        chosen, rest = sorted(named), [i for i in range(len(texts)) if i not in named]
        encoded = [*encode([texts[i] for i in rest]).split(), *exact([texts[i] for i in chosen]).split()]
        return block_of([encoded[i] for i in np.argsort(rest + chosen)])

    return encode_around


def pieces_of(spec: Mapping[str, Any]) -> list[str]:
    """The texts of some pieces, evenly spread over the vocabulary; those that are no whole characters are left out."""
    byte_of, vocab = byte_alphabet(), without_added(spec)["model"]["vocab"]
    ordered = sorted(vocab, key=vocab.get)
    chosen = ordered[:: max(1, len(ordered) // PIECES)]
    texts = [bytes(byte_of[character] for character in piece).decode(errors="replace") for piece in chosen]
    return [text for text in texts if "\ufffd" not in text]
