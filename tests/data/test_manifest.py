"""A prepared set is exactly what its manifest lists, and nothing of it was changed since."""

import json
import os
import shutil

import numpy as np
import pytest

from jaxscale.runtime.data.manifest import (
    check_manifest,
    is_manifest,
    manifest_problems,
    open_set,
    read_manifest,
    verify_once,
    write_manifest,
)
from jaxscale.runtime.data.shard_writer import ShardWriter

TOKENIZER = {"name": "old.json", "eos_token": "", "vocab_size": 257, "fingerprint": "f"}
SOME_FILE = {"bytes": 1, "sha256": "0" * 64}
ENDINGS = [".bin", ".idx", ".src", ".token_bytes.npy", ".json"]


def write_shard(folder, name, documents, sources=("web", "code"), **changes):
    writer = ShardWriter(folder, name, vocab_size=257, eos_id=256, sources=list(sources))
    for i, ids in enumerate(documents):
        writer.add(np.array(ids, np.int32), sources[i % len(sources)])
    files = [{"name": name, "source": sources[0], "documents": len(documents)}]
    header = {"tokenizer": TOKENIZER, "eos_id": 256, "text_bytes": 10, "skipped": {}, "files": files}
    writer.finish(np.ones(257, np.int32), {**header, **changes})


def write_set(folder):
    """A set of two shards, with a third that is not in the manifest."""
    folder.mkdir(parents=True)
    write_shard(folder, "part-0", [[1, 2], [3], [4]])
    write_shard(folder, "part-1", [[5], []])
    write_shard(folder, "left-over", [[9]])
    tokenizer = ("tokenizer.model", b"a model")
    names, bytes_of = ["part-0", "part-1"], {"web": 12, "code": 8}
    return write_manifest(folder, names, recipe={"seed": 1}, tokenizer_file=tokenizer, source_bytes=bytes_of)


@pytest.fixture
def folder(tmp_path):
    write_set(tmp_path / "set")
    return tmp_path / "set"


def test_the_manifest_tells_what_the_set_holds(folder):
    manifest = check_manifest(folder / "manifest.json", deep=True)
    content = manifest.content
    assert (content["num_documents"], content["num_tokens"], content["text_bytes"]) == (5, 10, 20)
    assert content["sources"] == {
        "web": {"documents": 3, "tokens": 7, "text_bytes": 12},
        "code": {"documents": 2, "tokens": 3, "text_bytes": 8},
    }
    assert content["recipe"] == {"seed": 1} and content["tokenizer"]["file"] == "tokenizer.model"
    assert set(manifest.files) == {f"part-{i}{ending}" for i in (0, 1) for ending in ENDINGS} | {"tokenizer.model"}
    assert all((folder / name).stat().st_size == size for name, (size, _) in manifest.files.items())


def test_only_the_listed_shards_are_opened_in_their_order(folder):
    manifest = read_manifest(folder / "manifest.json")
    (folder / "part-0.docs.parquet").write_bytes(b"no one listed me")
    shards = open_set(manifest)
    assert [shard.header["num_documents"] for shard in shards] == [3, 2]
    assert {shard.header["tokenizer"]["name"] for shard in shards} == {str(folder / "tokenizer.model")}
    assert shards[0].token_bytes is shards[1].token_bytes is not None


def test_a_set_has_one_fingerprint_wherever_and_whenever_it_is_made(folder, tmp_path):
    (tmp_path / "other").mkdir()
    other = write_set(tmp_path / "other" / "place")
    for file in (tmp_path / "other" / "place").iterdir():
        os.utime(file, (1, 1))
    assert other.fingerprint == read_manifest(folder / "manifest.json").fingerprint
    swapped = write_manifest(folder, ["part-1", "part-0"], recipe={})
    assert swapped.fingerprint != other.fingerprint


def test_a_set_can_be_moved(folder, tmp_path):
    shutil.move(folder, tmp_path / "moved")
    assert len(open_set(check_manifest(tmp_path / "moved" / "manifest.json", deep=True))) == 2


@pytest.mark.fault("H10")
@pytest.mark.parametrize("name", [f"part-1{ending}" for ending in ENDINGS] + ["tokenizer.model"])
@pytest.mark.parametrize("damage", ["gone", "cut", "longer", "flipped"])
def test_every_change_after_the_manifest_is_refused_and_named(folder, name, damage):
    content = bytearray((folder / name).read_bytes())
    if damage == "gone":
        (folder / name).unlink()
    else:
        content[len(content) // 2] ^= 1
        changed = {"cut": content[:-1], "longer": content + b"\0", "flipped": content}
        (folder / name).write_bytes(changed[damage])
    told = {
        "gone": "is missing",
        "cut": "truncated",
        "longer": "too long",
        "flipped": "was changed after the manifest",
    }
    with pytest.raises(ValueError, match=rf"{name} .*{told[damage]}"):
        check_manifest(folder / "manifest.json", deep=True)
    if damage != "flipped":
        with pytest.raises(ValueError, match=rf"{name} .*{told[damage]}"):
            check_manifest(folder / "manifest.json", deep=False)


@pytest.mark.fault("H10")
def test_a_shard_made_anew_after_the_manifest_is_refused_when_opened(folder):
    manifest = read_manifest(folder / "manifest.json")
    write_shard(folder, "part-1", [[6], []])
    assert not manifest_problems(manifest, deep=False)  # of the same sizes
    with pytest.raises(ValueError, match="part-1.json does not match its entry in .*manifest.json"):
        open_set(manifest)


def test_many_problems_are_told_by_the_first_and_their_number(folder):
    for file in folder.glob("part-*"):
        file.unlink()
    with pytest.raises(ValueError, match="part-0.bin .* and 7 more such files"):
        check_manifest(folder / "manifest.json", deep=False)


def test_files_are_hashed_once_and_again_only_when_they_changed(folder, tmp_path):
    manifest, cache, said = read_manifest(folder / "manifest.json"), tmp_path / "cache", []
    verify_once(manifest, cache, said.append)
    assert len(said) == 1 and "11 files" in said[0]
    verify_once(manifest, cache, said.append)
    assert len(said) == 1
    os.utime(folder / "part-0.bin", (5, 5))
    verify_once(manifest, cache, said.append)
    assert len(said) == 2 and "1 files" in said[1]
    content = bytearray((folder / "part-1.bin").read_bytes())
    content[0] ^= 1
    (folder / "part-1.bin").write_bytes(content)
    for _ in range(2):  # what was found bad is not forgotten
        with pytest.raises(ValueError, match="part-1.bin was changed after the manifest was written"):
            verify_once(manifest, cache, said.append)


def rename_shard(content, old, new):
    shard = next(shard for shard in content["shards"] if shard["name"] == old)
    shard["files"] = {name.replace(old, new): file for name, file in shard["files"].items()}
    shard["name"] = new


@pytest.mark.fault("H4")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m.update(format="other"), "is not the manifest of a prepared set"),
        (lambda m: m.update(version=9), "has format version 9"),
        (lambda m: m.pop("recipe"), "invalid 'recipe'"),
        (lambda m: m.update(shards=[]), "lists no shard"),
        (lambda m: m["shards"].append(m["shards"][0]), "has duplicate shards"),
        (lambda m: m["shards"].reverse(), "was edited: its fingerprint"),
        (lambda m: m["shards"][0].pop("files"), r"invalid 'shards\[0\]'"),
        (lambda m: m["shards"][0]["files"].pop("part-0.idx"), "invalid 'files' for shard 'part-0'"),
        (lambda m: m["shards"][0]["files"].update({"/etc/passwd": SOME_FILE}), "invalid 'files'"),
        (lambda m: m["shards"][0]["files"].update({"part-0.bin": {**SOME_FILE, "bytes": -1}}), "invalid 'files'"),
        (lambda m: m["shards"][0].update(name="../part-0"), "invalid 'files'"),
        (lambda m: rename_shard(m, "part-0", "../part-0"), "invalid 'files'"),
        (lambda m: m["tokenizer"].update(file="../x.json"), "invalid 'tokenizer'"),
    ],
)
def test_a_manifest_that_is_not_good_is_named(folder, change, told):
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"manifest\.json .*{told}"):
        read_manifest(folder / "manifest.json")


def test_a_missing_or_torn_manifest_is_named(folder):
    with pytest.raises(ValueError, match="other.json does not exist"):
        read_manifest(folder / "other.json")
    whole = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(whole[:-20])
    with pytest.raises(ValueError, match="manifest.json is not valid JSON"):
        read_manifest(folder / "manifest.json")


def test_a_set_is_of_one_tokenizer_with_plain_recipe_and_good_shards(folder):
    with pytest.raises(ValueError, match="the recipe and versions in .* must be valid JSON"):
        write_manifest(folder, ["part-0"], recipe={"x": object()})
    with pytest.raises(ValueError, match="has duplicates; list each shard once"):
        write_manifest(folder, ["part-0", "part-0"], recipe={})
    with pytest.raises(ValueError, match="missing.json is not the header"):
        write_manifest(folder, ["missing"], recipe={})
    write_shard(folder, "part-2", [[1]], tokenizer={**TOKENIZER, "fingerprint": "g"})
    with pytest.raises(ValueError, match="2 tokenizers"):
        write_manifest(folder, ["part-0", "part-2"], recipe={})
    write_shard(folder, "part-3", [[1]], files=[])
    with pytest.raises(ValueError, match="do not sum to 1 documents"):
        write_manifest(folder, ["part-3"], recipe={})
    assert len(read_manifest(folder / "manifest.json").shards) == 2  # the one that was there stays


def test_a_manifest_is_known_by_its_content(folder):
    assert is_manifest(str(folder / "manifest.json")) and is_manifest("gs://bucket/set/manifest.json")
    assert not any(is_manifest(str(folder / name)) for name in ("part-0.json", "part-0.bin", "missing.json"))
    (folder / "manifest.json").write_text("torn")
    assert is_manifest(str(folder / "manifest.json"))
