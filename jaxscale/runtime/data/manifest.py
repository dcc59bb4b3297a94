"""Writes, reads and verifies the manifest of a prepared set of shards, which lists all files with their hashes.

The manifest is written last, so a set with a manifest is complete. Training reads a set by its manifest and ignores
unlisted files, except for indexes, whose folders are named by a hash of their inputs and contain their own hashes.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.runtime.data.shard_writer import write_synced
from jaxscale.runtime.data.shards import (
    SHA256,
    SUFFIXES,
    Shard,
    expect_size,
    has_type,
    open_shard,
    read_token_bytes,
    shard_files,
)
from jaxscale.runtime.data.verified import find_damaged, hash_mismatches
from jaxscale.system.digest import file_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import read_json, write_json

FORMAT, VERSION, NAME = "jaxscale-manifest", 1, "manifest.json"
COUNT_TYPES = {"max_id": int, "text_bytes": int, "fingerprint": str}
CONTENT_TYPES = {
    "shards": list, "tokenizer": dict, "recipe": dict, "sources": dict, "versions": dict, "num_tokens": int,
    "num_documents": int, **COUNT_TYPES,
}  # fmt: skip
SHARD_TYPES = {"name": str, "tokens": int, "documents": int, "files": dict, **COUNT_TYPES}
# Allows a plain name in at most one numbered folder, because a manifest may be from an untrusted source.
SHARD_NAME = re.compile(r"(?:[0-9]+/)?[A-Za-z0-9_][A-Za-z0-9._-]*")
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
FIX = "prepare the set again, or restore the file"
SHOWN = 3  # largest number of problems in an error message


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content and location of a manifest."""

    path: str  # path or gs:// URL
    content: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Returns the hash of all tokens in order, which does not depend on folder, names, dates or recipe."""
        return self.content["fingerprint"]

    @property
    def shards(self) -> list[dict[str, Any]]:
        """Returns the manifest entries of the shards, in order."""
        return self.content["shards"]

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """Returns {path relative to the manifest: (bytes, sha256)} for all files except the manifest, shards first."""
        found = {name: file for shard in self.shards for name, file in shard["files"].items()}
        if self.content["tokenizer"]["file"]:
            found[self.content["tokenizer"]["file"]] = self.content["tokenizer"]
        return {name: (file["bytes"], file["sha256"]) for name, file in found.items()}


def write_manifest(
    folder: Path,
    names: Sequence[str],
    *,
    recipe: Mapping[str, Any],
    tokenizer_file: tuple[str, bytes] | None = None,
    source_bytes: Mapping[str, int] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Manifest:
    """Writes manifest.json atomically for the named shards of a folder, in the given order.

    tokenizer_file: (name, content), written next to the shards. source_bytes: {source: bytes of text}, if known.
    Raises BadInput for shards that are missing, have wrong sizes or headers, or have different tokenizers.
    """
    folder = Path(folder)
    if not names or len(set(names)) != len(names):
        raise BadInput(f"{folder}: the shard list {list(names)[:5]} is empty or has duplicates; list each shard once")
    entries, tokenizers = [], {}
    sources: dict[str, dict[str, Any]] = {}
    for name in names:
        shard = open_shard(folder / f"{name}.json", with_token_bytes=False)
        made_with = {**shard.header["tokenizer"], "eos_id": shard.header.get("eos_id")}
        tokenizers[json.dumps(made_with, sort_keys=True)] = made_with
        entries.append(shard_entry(folder, name, shard))
        documents = np.bincount(shard.source_ids, minlength=len(shard.header["sources"]))
        tokens = np.zeros(len(documents), np.int64)
        np.add.at(tokens, shard.source_ids, np.diff(shard.offsets))
        for source, number, size in zip(shard.header["sources"], documents.tolist(), tokens.tolist()):
            total = sources.setdefault(source, {"documents": 0, "tokens": 0, "text_bytes": None})
            total["documents"] += number
            total["tokens"] += size
    if len(tokenizers) > 1:
        raise BadInput(f"{folder} has shards from {len(tokenizers)} tokenizers; use one tokenizer for all shards")
    for source, size in (source_bytes or {}).items():
        sources.setdefault(source, {"documents": 0, "tokens": 0})["text_bytes"] = int(size)
    (made_with,) = tokenizers.values()
    tokenizer = {"file": None} if tokenizer_file is None else write_tokenizer(folder, *tokenizer_file)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": set_fingerprint(entries),
        **totals(entries),
        "sources": sources,
        "tokenizer": {**made_with, **tokenizer},
        "recipe": dict(recipe),
        "versions": dict(versions or {}),
        "shards": entries,
    }
    try:
        json.dumps([content["recipe"], content["versions"]], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(f"the recipe and versions in {folder / NAME} must be valid JSON: {error}") from None
    write_json(folder / NAME, content)
    shutil.copymode(folder / f"{names[0]}.json", folder / NAME)  # same permissions as the shards
    return read_manifest(folder / NAME)


def write_tokenizer(folder: Path, name: str, content: bytes) -> dict[str, Any]:
    """Writes a tokenizer file next to the shards and returns its manifest entry."""
    if name not in TOKENIZERS:
        raise BadInput(f"{name} is not a supported tokenizer file; use tokenizer.json or tokenizer.model")
    write_synced(folder / name, content)
    return {"file": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def set_fingerprint(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the hash of the token ids, documents, sources and tokenizer of the shards, in order."""
    return hashlib.sha256("|".join(entry["fingerprint"] for entry in entries).encode()).hexdigest()


def shard_entry(folder: Path, name: str, shard: Shard) -> dict[str, Any]:
    """Returns the manifest entry of one shard."""
    base = folder / name
    if not SHARD_NAME.fullmatch(name) or shard.header["bin"] != f"{base.name}.bin":
        raise BadInput(
            f"{base}.json: name the shard NAME or NUMBER/NAME (letters, digits, '.', '_', '-'), and its .bin NAME.bin"
        )
    if sum(file["documents"] for file in shard.header["files"]) != shard.header["num_documents"]:
        raise BadInput(f"{base}.json: the counts in 'files' do not sum to {shard.header['num_documents']:,} documents")
    relative = lambda path: str(Path(path).relative_to(folder))
    files = {relative(path): (os.path.getsize(path), sha256) for _, path, sha256 in shard_files(Path(f"{base}.json"))}
    for ending in (".json", *SUFFIXES.values()):  # older headers do not have the hashes of all files
        path = f"{base}{ending}"
        if relative(path) not in files and os.path.exists(path):
            files[relative(path)] = (os.path.getsize(path), file_sha256(path))
    return {
        "name": name,
        "tokens": shard.header["num_tokens"],
        "documents": shard.header["num_documents"],
        "max_id": shard.header["max_id"],
        "text_bytes": shard.header["text_bytes"],
        "fingerprint": shard.fingerprint,
        "files": {file: {"bytes": size, "sha256": sha256} for file, (size, sha256) in sorted(files.items())},
    }


def is_manifest(path: str) -> bool:
    """Returns True for a local file with the content of a manifest, and for any URL that ends with .json."""
    if "://" in path:
        return path.endswith(".json")
    if not path.endswith(".json"):
        return False
    try:
        content = read_json(path)
    except (OSError, BadInput):
        return Path(path).name == NAME  # if damaged or missing, reading the manifest raises
    return isinstance(content, dict) and content.get("format") == FORMAT


def read_manifest(path: Path | str) -> Manifest:
    """Reads a local manifest, but not the files that it lists. Raises BadInput if the manifest is invalid."""
    try:
        return parse_manifest(str(path), read_json(path))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist, so the set is incomplete; {FIX}") from None


def parse_manifest(path: str, content: Any) -> Manifest:
    """Validates the content and returns the manifest. Raises BadInput that names `path` and the invalid entry."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadInput(f"{path} is not the manifest of a prepared set")
    if content.get("version") != VERSION:
        raise BadInput(f"{path} has format version {content.get('version')}; this jaxscale supports version {VERSION}")
    for key, kind in CONTENT_TYPES.items():
        if not has_type(content.get(key), kind):
            raise BadInput(f"{path} has an invalid {key!r}; {FIX}")
    for i, shard in enumerate(content["shards"]):
        if not isinstance(shard, dict) or not all(has_type(shard.get(key), kind) for key, kind in SHARD_TYPES.items()):
            raise BadInput(f"{path} has an invalid 'shards[{i}]'; {FIX}")
        needed = [f"{shard['name']}{ending}" for ending in (".json", ".bin", ".idx", ".src")]
        allowed = {f"{shard['name']}{ending}" for ending in (".json", *SUFFIXES.values())}
        good = SHARD_NAME.fullmatch(shard["name"]) and set(needed) <= shard["files"].keys() <= allowed
        if not good or not all(map(is_hash_entry, shard["files"].values())):
            raise BadInput(f"{path} has invalid 'files' for shard {shard['name']!r}; {FIX}")
    if not content["shards"] or len({shard["name"] for shard in content["shards"]}) != len(content["shards"]):
        raise BadInput(f"{path} lists no shards, or has duplicate shards; {FIX}")
    tokenizer = content["tokenizer"]
    if tokenizer.get("file") not in (None, *TOKENIZERS) or (tokenizer.get("file") and not is_hash_entry(tokenizer)):
        raise BadInput(f"{path} has an invalid 'tokenizer'; {FIX}")
    if set_fingerprint(content["shards"]) != content["fingerprint"]:
        raise BadInput(f"{path} was edited: its fingerprint does not match its shards; {FIX}")
    if wrong := [key for key, total in totals(content["shards"]).items() if content[key] != total]:
        raise BadInput(f"{path} was edited: its {wrong[0]!r} does not match its shards; {FIX}")
    return Manifest(path, {**content, "tokenizer": {"file": None, **tokenizer}})


def totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the total counts of the shards, from their manifest entries."""
    return {
        "num_tokens": sum(entry["tokens"] for entry in entries),
        "num_documents": sum(entry["documents"] for entry in entries),
        "max_id": max(entry["max_id"] for entry in entries),
        "text_bytes": sum(entry["text_bytes"] for entry in entries),
    }


def is_hash_entry(entry: Any) -> bool:
    """Returns True for {"bytes": size, "sha256": 64 hexadecimal digits}."""
    if not isinstance(entry, dict) or not has_type(entry.get("bytes"), int):
        return False
    return isinstance(entry.get("sha256"), str) and bool(SHA256.fullmatch(entry["sha256"]))


def manifest_problems(manifest: Manifest, *, deep: bool) -> list[str]:
    """Returns a message for each file that is missing or has a wrong size. deep: also check the hashes."""
    folder, problems, whole = Path(manifest.path).parent, [], {}
    for name, (size, sha256) in manifest.files.items():
        try:
            expect_size(str(folder / name), size, "the manifest", FIX)
            whole[str(folder / name)] = sha256
        except BadInput as error:
            problems.append(str(error))
    changed = hash_mismatches(whole) if deep else {}
    return problems + [changed_line(path, problem) for path, problem in changed.items()]


def changed_line(path: str, problem: str) -> str:
    """Returns the message for a changed or unreadable file. problem: read error, or '' for a changed file."""
    return problem or f"{path} was changed after the manifest was written; {FIX}"


def check_manifest(path: Path | str, deep: bool) -> Manifest:
    """Returns the manifest of a complete set. Raises BadInput for missing or changed files. deep: also check hashes."""
    manifest = read_manifest(path)
    raise_problems(manifest_problems(manifest, deep=deep))
    return manifest


def raise_problems(problems: Sequence[str]) -> None:
    """Raises BadInput with the first SHOWN problems and the number of other files, if there are problems."""
    if problems:
        more = f"; and {len(problems) - SHOWN:,} more such files" if len(problems) > SHOWN else ""
        raise BadInput("; ".join(problems[:SHOWN]) + more)


def verify_once(manifest: Manifest, cache: Path, say: Callable[[str], None] = print, *, remember: bool = True) -> None:
    """Hashes the files of a set that this machine has not hashed before. Raises BadInput for changed files."""
    raise_problems(manifest_problems(manifest, deep=False))
    folder = Path(manifest.path).absolute().parent
    files = {str(folder / name): sha256 for name, (_, sha256) in manifest.files.items()}
    found = find_damaged(files, cache, str(folder), say, remember=remember)
    raise_problems([changed_line(path, problem) for path, problem in found.items()])


def open_set(manifest: Manifest, locate: Callable[[str], str] | None = None) -> list[Shard]:
    """Opens the shards of a manifest in order. locate: function from file name to path; None: the manifest's folder."""
    folder = Path(manifest.path).parent
    locate = locate or (lambda name: str(folder / name))
    tokenizer = manifest.content["tokenizer"]["file"]
    name_of_tokenizer = {"name": locate(tokenizer)} if tokenizer else {}
    shards: list[Shard] = []
    tables: dict[str, np.ndarray | None] = {}  # tables by sha256, shared by all shards
    for entry in manifest.shards:
        name, files = entry["name"], entry["files"]
        header_path = locate(f"{name}.json")
        parts: dict[str, Any] = {"bin": locate(f"{name}{SUFFIXES['bin']}")}
        parts |= {part: functools.partial(locate, f"{name}{SUFFIXES[part]}") for part in ("idx", "src")}
        if (docs := f"{name}{SUFFIXES['docs']}") in files:
            parts["docs"] = functools.partial(locate, docs)
        shard = open_shard(Path(header_path), with_token_bytes=False, parts=parts)
        found = [shard.header[key] for key in ("num_tokens", "num_documents", "max_id", "text_bytes")]
        listed = [entry[key] for key in ("tokens", "documents", "max_id", "text_bytes")]
        is_other = shard.fingerprint != entry["fingerprint"] or shard.header["bin"] != f"{Path(name).name}.bin"
        if is_other or found != listed:
            raise BadInput(f"{header_path} does not match its entry in {manifest.path}; {FIX}")
        if listed_table := files.get(table := f"{name}{SUFFIXES['token_bytes']}"):
            if listed_table["sha256"] not in tables:
                tables[listed_table["sha256"]] = read_token_bytes(locate(table))
            shard = shard._replace(token_bytes=tables[listed_table["sha256"]])
        shard.header["tokenizer"] = {**shard.header["tokenizer"], **name_of_tokenizer}
        shards.append(shard)
    return shards
