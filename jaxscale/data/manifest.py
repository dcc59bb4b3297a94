"""The manifest of a prepared set of shards: what belongs to it, and what each file held when it was made.

It is written last, so that a set with a manifest is whole. Whoever trains on a set names its manifest.json; files
beside it that it does not list are never looked at, but for indexes, whose folders are named by what they were made
from and sealed by their own sums.
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

from jaxscale.data.header import ENDINGS, SHA256, is_good
from jaxscale.data.shard_writer import write_synced
from jaxscale.data.shards import Shard, expect_size, open_shard, read_token_bytes, shard_files
from jaxscale.data.verified import damaged, hashed
from jaxscale.system.digest import file_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import read_json, write_json

FORMAT, VERSION, NAME = "jaxscale-manifest", 1, "manifest.json"
COUNTS = {"max_id": int, "text_bytes": int, "fingerprint": str}
CONTENT = {
    "shards": list, "tokenizer": dict, "recipe": dict, "sources": dict, "versions": dict, "num_tokens": int,
    "num_documents": int, **COUNTS,
}  # fmt: skip
SHARD = {"name": str, "tokens": int, "documents": int, "files": dict, **COUNTS}
# Of a shard, with a numbered folder where there are many. No other path: a manifest may come from anywhere.
SHARD_NAME = re.compile(r"(?:[0-9]+/)?[A-Za-z0-9_][A-Za-z0-9._-]*")
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
WAY_OUT = "prepare the set again, or bring the file back"
SHOWN = 3  # problems listed one by one


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest that was read, and where from."""

    path: str  # or its gs:// address
    content: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Of all tokens in their order; neither of folder, names and dates, nor of the recipe that led to them."""
        return self.content["fingerprint"]

    @property
    def shards(self) -> list[dict[str, Any]]:
        """name, tokens, documents and files of each shard, in order."""
        return self.content["shards"]

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """{path below the set's folder: (bytes, sha256)} of everything but the manifest, the shards' files first."""
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
    """Lists the shards NAME.* of a folder, in this order, in its manifest.json, which appears whole and last.

    Args: tokenizer_file: (name, content), written next to them, so that the set is whole in itself. source_bytes:
    text of each source, where that is known. versions: of what made it.
    Raises: BadInput for a shard that is missing or damaged in a way that can be seen without reading it whole, and
    for shards that do not belong together.
    """
    folder = Path(folder)
    if not names or len(set(names)) != len(names):
        raise BadInput(f"{folder}: a manifest lists each shard once and at least one, not {list(names)[:5]}")
    entries, tokenizers = [], {}
    sources: dict[str, dict[str, Any]] = {}
    for name in names:
        shard = open_shard(folder / f"{name}.json", with_token_bytes=False)
        made_with = {**shard.header["tokenizer"], "eos_id": shard.header.get("eos_id")}
        tokenizers[json.dumps(made_with, sort_keys=True)] = made_with
        entries.append(listed(folder, name, shard))
        for source, counts in counts_by_source(shard).items():
            total = sources.setdefault(source, {"documents": 0, "tokens": 0, "text_bytes": None})
            for what, number in counts.items():
                total[what] += number
    if len(tokenizers) > 1:
        raise BadInput(f"{folder} holds shards of {len(tokenizers)} tokenizers; a set has one")
    for source, size in (source_bytes or {}).items():
        sources.setdefault(source, {"documents": 0, "tokens": 0})["text_bytes"] = int(size)
    (made_with,) = tokenizers.values()
    content = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": set_fingerprint(entries),
        **totals(entries),
        "sources": sources,
        "tokenizer": {**made_with, **keep_tokenizer(folder, tokenizer_file)},
        "recipe": dict(recipe),
        "versions": dict(versions or {}),
        "shards": entries,
    }
    try:
        json.dumps([content["recipe"], content["versions"]], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(f"the recipe cannot be kept in {folder / NAME}: {error}") from None
    write_json(folder / NAME, content)
    shutil.copymode(folder / f"{names[0]}.json", folder / NAME)  # as readable as the shards are
    return read_manifest(folder / NAME)


def counts_by_source(shard: Shard) -> dict[str, dict[str, int]]:
    """{source: {documents, tokens}}, exact."""
    documents = np.bincount(shard.source_ids, minlength=len(shard.header["sources"]))
    tokens = np.zeros(len(documents), np.int64)
    np.add.at(tokens, shard.source_ids, np.diff(shard.offsets))
    pairs = zip(shard.header["sources"], documents.tolist(), tokens.tolist())
    return {source: {"documents": number, "tokens": size} for source, number, size in pairs}


def set_fingerprint(entries: Sequence[Mapping[str, Any]]) -> str:
    """Of ids, documents, sources and tokenizer of the listed shards in their order."""
    return hashlib.sha256("|".join(entry["fingerprint"] for entry in entries).encode()).hexdigest()


def listed(folder: Path, name: str, shard: Shard) -> dict[str, Any]:
    """The entry of one shard."""
    base = folder / name
    if not SHARD_NAME.fullmatch(name) or shard.header["bin"] != f"{base.name}.bin":
        raise BadInput(
            f"{base}.json: a shard of a set has a plain name, in a numbered folder at most, and its .bin beside it"
        )
    if sum(file["documents"] for file in shard.header["files"]) != shard.header["num_documents"]:
        raise BadInput(f"{base}.json: its 'files' do not account for its {shard.header['num_documents']:,} documents")
    place = lambda path: str(Path(path).relative_to(folder))
    files = {place(path): (os.path.getsize(path), sha256) for _, path, sha256 in shard_files(Path(f"{base}.json"))}
    for ending in (".json", *ENDINGS.values()):  # of an older header that does not know the hash of each
        path = f"{base}{ending}"
        if place(path) not in files and os.path.exists(path):
            files[place(path)] = (os.path.getsize(path), file_sha256(path))
    return {
        "name": name,
        "tokens": shard.header["num_tokens"],
        "documents": shard.header["num_documents"],
        "max_id": shard.header["max_id"],
        "text_bytes": shard.header["text_bytes"],
        "fingerprint": shard.fingerprint,
        "files": {file: {"bytes": size, "sha256": sha256} for file, (size, sha256) in sorted(files.items())},
    }


def keep_tokenizer(folder: Path, file: tuple[str, bytes] | None) -> dict[str, Any]:
    """Writes (name, content) of the tokenizer's file next to the shards and returns the manifest's entry for it."""
    if file is None:
        return {"file": None}
    name, content = file
    if name not in TOKENIZERS:
        raise BadInput(f"{name} is no tokenizer.json and no .model")
    write_synced(folder / name, content)
    return {"file": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def is_manifest(path: str) -> bool:
    """True for the manifest of a set: by its content on a local disk, by its name in a bucket."""
    if "://" in path:
        return path.endswith(".json")
    if not path.endswith(".json"):
        return False
    try:
        content = read_json(path)
    except (OSError, BadInput):
        return Path(path).name == NAME  # torn or gone: reading it raises
    return isinstance(content, dict) and content.get("format") == FORMAT


def read_manifest(path: Path | str) -> Manifest:
    """The manifest at a local path; nothing but itself is read. Raises BadInput naming it if it is not good."""
    try:
        return parse_manifest(str(path), read_json(path))
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; a set without its manifest is not whole: {WAY_OUT}") from None


def parse_manifest(path: str, content: Any) -> Manifest:
    """The manifest with this content, checked. Raises BadInput naming `path` and what is wrong in it."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadInput(f"{path} is not the manifest of a prepared set")
    if content.get("version") != VERSION:
        raise BadInput(f"{path} has version {content.get('version')} of the format, this program reads {VERSION}")
    for key, kind in CONTENT.items():
        if not is_good(content.get(key), kind):
            raise BadInput(f"{path} has no good {key!r}; {WAY_OUT}")
    for i, shard in enumerate(content["shards"]):
        if not isinstance(shard, dict) or not all(is_good(shard.get(key), kind) for key, kind in SHARD.items()):
            raise BadInput(f"{path} has no good 'shards[{i}]'; {WAY_OUT}")
        needed = [f"{shard['name']}{ending}" for ending in (".json", ".bin", ".idx", ".src")]
        allowed = {f"{shard['name']}{ending}" for ending in (".json", *ENDINGS.values())}
        good = SHARD_NAME.fullmatch(shard["name"]) and set(needed) <= shard["files"].keys() <= allowed
        if not good or not all(map(is_listed_file, shard["files"].values())):
            raise BadInput(f"{path} has no good 'files' of shard {shard['name']!r}; {WAY_OUT}")
    if not content["shards"] or len({shard["name"] for shard in content["shards"]}) != len(content["shards"]):
        raise BadInput(f"{path} lists no shard, or one of them twice; {WAY_OUT}")
    tokenizer = content["tokenizer"]
    if tokenizer.get("file") not in (None, *TOKENIZERS) or (tokenizer.get("file") and not is_listed_file(tokenizer)):
        raise BadInput(f"{path} has no good 'tokenizer'; {WAY_OUT}")
    if set_fingerprint(content["shards"]) != content["fingerprint"]:
        raise BadInput(f"{path} has a fingerprint that its shards do not give: it was edited by hand; {WAY_OUT}")
    if wrong := [key for key, total in totals(content["shards"]).items() if content[key] != total]:
        raise BadInput(f"{path} has a {wrong[0]!r} that its shards do not give: it was edited by hand; {WAY_OUT}")
    return Manifest(path, {**content, "tokenizer": {"file": None, **tokenizer}})


def totals(entries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What a set holds, of what each of its shards does."""
    return {
        "num_tokens": sum(entry["tokens"] for entry in entries),
        "num_documents": sum(entry["documents"] for entry in entries),
        "max_id": max(entry["max_id"] for entry in entries),
        "text_bytes": sum(entry["text_bytes"] for entry in entries),
    }


def is_listed_file(entry: Any) -> bool:
    """True for {"bytes": a size, "sha256": 64 hexadecimal digits}."""
    if not isinstance(entry, dict) or not is_good(entry.get("bytes"), int):
        return False
    return isinstance(entry.get("sha256"), str) and bool(SHA256.fullmatch(entry["sha256"]))


def manifest_problems(manifest: Manifest, *, deep: bool) -> list[str]:
    """One line for each file that is missing, cut or, if `deep`, holds something else than when the set was made."""
    folder = Path(manifest.path).parent
    found = {name: file_problem(folder / name, size) for name, (size, _) in manifest.files.items()}
    if deep:
        whole = [name for name, problem in found.items() if problem is None]
        other = hashed({str(folder / name): manifest.files[name][1] for name in whole})
        found |= {path: changed(path, problem) for path, problem in other.items()}
    return [problem for problem in found.values() if problem]


def changed(path: str, problem: str) -> str:
    """The line for a file whose content is another, or cannot be read, which `problem` tells."""
    return problem or f"{path} was changed after the manifest was written; {WAY_OUT}"


def file_problem(path: Path, size: int) -> str | None:
    """What the file's size tells."""
    try:
        expect_size(str(path), size, "the manifest", WAY_OUT)
    except BadInput as error:
        return str(error)
    return None


def check_manifest(path: Path | str, deep: bool) -> Manifest:
    """The manifest of a set that is whole. deep: every file is read and hashed, not only measured.

    Raises: BadInput naming the files that are missing, cut or were edited after the manifest.
    """
    manifest = read_manifest(path)
    refuse(manifest_problems(manifest, deep=deep))
    return manifest


def refuse(problems: Sequence[str]) -> None:
    """Raises BadInput telling the first problems and how many there are; nothing if there are none."""
    if problems:
        more = f"; and {len(problems) - SHOWN:,} more such files" if len(problems) > SHOWN else ""
        raise BadInput("; ".join(problems[:SHOWN]) + more)


def verify_once(manifest: Manifest, cache: Path, say: Callable[[str], None] = print, *, remember: bool = True) -> None:
    """Hashes the files of a set if this machine has not done so since they last changed, as `damaged` has it.

    Raises: BadInput as check_manifest does.
    """
    refuse(manifest_problems(manifest, deep=False))
    folder = Path(manifest.path).absolute().parent
    files = {str(folder / name): sha256 for name, (_, sha256) in manifest.files.items()}
    found = damaged(files, cache, str(folder), say, remember=remember)
    refuse([changed(path, problem) for path, problem in found.items()])


def open_set(manifest: Manifest, place: Callable[[str], str] | None = None) -> list[Shard]:
    """The shards that the manifest lists, and no other, in its order.

    Args: place: where a file of the set is, by its name; without it, beside the manifest. Where it answers with an
    address for a .bin, that one is not looked at.
    Raises: BadInput naming a shard that is not the one that was listed.
    """
    folder = Path(manifest.path).parent
    place = place or (lambda name: str(folder / name))
    tokenizer = manifest.content["tokenizer"]["file"]
    name_of_tokenizer = {"name": place(tokenizer)} if tokenizer else {}
    shards: list[Shard] = []
    tables: dict[str, np.ndarray | None] = {}  # of a thousand shards with one tokenizer one is kept
    for entry in manifest.shards:
        name, files = entry["name"], entry["files"]
        header_path = place(f"{name}.json")
        parts: dict[str, Any] = {"bin": place(f"{name}{ENDINGS['bin']}")}
        parts |= {part: functools.partial(place, f"{name}{ENDINGS[part]}") for part in ("idx", "src")}
        if (docs := f"{name}{ENDINGS['docs']}") in files:
            parts["docs"] = functools.partial(place, docs)
        shard = open_shard(Path(header_path), with_token_bytes=False, parts=parts)
        found = [shard.header[key] for key in ("num_tokens", "num_documents", "max_id", "text_bytes")]
        listed = [entry[key] for key in ("tokens", "documents", "max_id", "text_bytes")]
        is_other = shard.fingerprint != entry["fingerprint"] or shard.header["bin"] != f"{Path(name).name}.bin"
        if is_other or found != listed:
            raise BadInput(f"{header_path} is not the shard that {manifest.path} lists; {WAY_OUT}")
        if listed_table := files.get(table := f"{name}{ENDINGS['token_bytes']}"):
            if listed_table["sha256"] not in tables:
                tables[listed_table["sha256"]] = read_token_bytes(place(table))
            shard = shard._replace(token_bytes=tables[listed_table["sha256"]])
        shard.header["tokenizer"] = {**shard.header["tokenizer"], **name_of_tokenizer}
        shards.append(shard)
    return shards
