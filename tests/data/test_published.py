"""Whole sets copied into a bucket and read from there, through faults and kills."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from gcs_emulator import BIG, Fault
from lineages import read_lineage

from jaxscale.runtime.data.manifest import read_manifest, write_manifest
from jaxscale.runtime.data.remote import ShardCache, locator, map_ids, shard_cache
from jaxscale.runtime.data.shard_writer import ShardWriter
from jaxscale.runtime.data.split import read_indexes
from jaxscale.runtime.data.token_files import open_remote_set
from jaxscale.system.storage import open_bucket
from jaxscale.tools.corpus.publish import publish

PARTS = ["part-0", "part-1", "0/part-2"]  # as in a set of more shards than one folder should hold


def write_set(folder, shards=3, tokens=20_000):
    (folder / "0").mkdir(parents=True)
    for number, part in enumerate(PARTS[:shards]):
        writer = ShardWriter((folder / part).parent, f"part-{number}", vocab_size=60_000, eos_id=0, sources=["web"])
        ids = np.random.default_rng(number).integers(1, 60_000, tokens)
        for document in np.split(ids, 4):
            writer.add(document, "web")
        tokenizer = {"name": "gone", "eos_token": "", "vocab_size": 60_000, "fingerprint": "f"}
        files = [{"name": f"part-{number}", "source": "web", "documents": 4}]
        header = {"tokenizer": tokenizer, "eos_id": 0, "text_bytes": 9, "skipped": {}, "files": files}
        writer.finish(np.ones(60_000, np.int32), header, lineage())
    return write_manifest(folder, PARTS[:shards], recipe={}, tokenizer_file=("tokenizer.json", b"{}"))


def lineage():
    import pyarrow

    texts = {name: [""] * 4 for name in ("id", "url", "licence", "language")}
    return pyarrow.table({"file": ["f"] * 4, "offset": range(4), **texts})


@pytest.fixture
def published(tmp_path, gcs):
    manifest = write_set(tmp_path / "set")
    url = publish(tmp_path / "set", "gs://b/out/", say=lambda line: None)
    assert url == "gs://b/out/manifest.json"
    return manifest


def test_a_published_set_is_the_local_one_and_nothing_else(gcs, published, tmp_path):
    (tmp_path / "set" / "note.txt").write_text("not listed")
    names = [name.removeprefix("out/") for name in gcs.names("b") if name.startswith("out/")]
    assert sorted(names) == sorted([*published.files, "manifest.json"])
    assert all(gcs.get("b", f"out/{name}") == (tmp_path / "set" / name).read_bytes() for name in names)
    uploads = [path for method, path, _ in gcs.log if method == "PUT"]
    assert len(uploads) >= len(names)


def test_publishing_again_sends_only_what_is_missing(gcs, published, tmp_path):
    del gcs.objects["b", "out/part-1.idx"], gcs.objects["b", "out/manifest.json"]
    gcs.put("b", "out/part-0.src", b"torn")
    gcs.put("b", "out/0/part-2.src", b"\1" * 8)  # as long as the right one
    said = []
    publish(tmp_path / "set", "gs://b/out", say=said.append)
    assert said[-1] == "  4 files uploaded, 16 unchanged"
    assert gcs.get("b", "out/0/part-2.src") == (tmp_path / "set" / "0/part-2.src").read_bytes()
    assert gcs.get("b", "out/part-0.src") == (tmp_path / "set" / "part-0.src").read_bytes()


def test_publishing_survives_faults(gcs, tmp_path, clock):
    write_set(tmp_path / "set", shards=1)
    gcs.faults += [Fault("status", method=method, status=503, times=3) for method in ("GET", "POST", "PUT")]
    gcs.faults += [Fault("reset", method="PUT", times=2)]
    publish(tmp_path / "set", "gs://b/out", bucket=open_bucket(clock=clock.clock), say=lambda line: None)
    assert len(gcs.names("b")) == 9


def test_an_upload_that_was_damaged_on_its_way_is_told(gcs, tmp_path):
    write_set(tmp_path / "set", shards=1)
    gcs.faults.append(Fault("flip", path="part-0.idx", method="PUT", times=2))
    with pytest.raises(ValueError, match="gs://b/out/part-0.idx differs from .*part-0.idx, because the transfer"):
        publish(tmp_path / "set", "gs://b/out", say=lambda line: None)
    assert "out/manifest.json" not in gcs.names("b")


def test_another_set_at_the_address_is_not_overwritten(gcs, published, tmp_path):
    write_set(tmp_path / "other", shards=2)
    with pytest.raises(ValueError, match="gs://b/out/manifest.json belongs to a different dataset"):
        publish(tmp_path / "other", "gs://b/out", say=lambda line: None)


def test_a_set_that_was_changed_is_not_published(gcs, published, tmp_path):
    (tmp_path / "set" / "part-0.src").write_bytes(b"\1" * 8)
    with pytest.raises(ValueError, match="part-0.src was changed after the manifest"):
        publish(tmp_path / "set", "gs://b/elsewhere", say=lambda line: None)
    assert not [name for name in gcs.names("b") if name.startswith("elsewhere")]


def test_a_bucket_that_may_not_be_written_is_told(gcs, tmp_path):
    write_set(tmp_path / "set", shards=1)
    gcs.faults.append(Fault("status", method="POST", status=403, times=9))
    with pytest.raises(
        ValueError, match=r"cannot be written: this machine has no permission \(403\).*Storage Object User"
    ):
        publish(tmp_path / "set", "gs://b/out", say=lambda line: None)


def ids_of(shards):
    return [map_ids(shard.bin_path, shard.header["dtype"])[0 : 1 << 30].tolist() for shard in shards]


def test_a_remote_set_gives_the_same_tokens_and_fetches_them_when_they_are_read(gcs, published, tmp_path, clock):
    cache = shard_cache(str(tmp_path / "cache"), 400_000)
    shards = open_remote_set("gs://b/out/manifest.json", cache)
    assert not [name for name in gcs.names("b") if name.endswith((".bin", ".parquet")) and gcs.requests(name)]
    local = [np.fromfile(tmp_path / "set" / f"{PARTS[i]}.bin", "<u2").tolist() for i in range(3)]
    assert ids_of(shards[1:2]) == local[1:2]
    assert [bool(gcs.requests(f"out/{PARTS[i]}.bin")) for i in range(3)] == [False, True, False]
    assert ids_of(shards) == local
    assert [shard.fingerprint for shard in shards] == [shard["fingerprint"] for shard in published.shards]
    assert Path(shards[0].header["tokenizer"]["name"]).read_text() == "{}"
    assert shards[0].token_bytes is shards[2].token_bytes and len(shards[0].token_bytes) == 60_000
    assert read_lineage(shards[2])["offset"].to_pylist() == [0, 1, 2, 3]
    cache.close()


def test_a_remote_set_is_read_through_faults_to_the_same_tokens(gcs, published, tmp_path, clock):
    cache = ShardCache(tmp_path / "cache", 1_000_000, bucket=open_bucket(clock=clock.clock), say=lambda line: None)
    kinds = [Fault("status", times=3), Fault("reset", after=9_000, times=3), Fault("flip", after=5, times=1)]
    gcs.faults += [Fault("status", path="manifest", status=429), *kinds]
    shards = open_remote_set("gs://b/out/manifest.json", cache)
    tokens = [cache.ids(*parse(shard.bin_path), shard.header["dtype"])[0 : 1 << 30].tolist() for shard in shards]
    assert tokens == [np.fromfile(tmp_path / "set" / f"{PARTS[i]}.bin", "<u2").tolist() for i in range(3)]
    cache.close()


def parse(path):
    url, _, fields = path.rpartition("#")
    about = dict(pair.split("=") for pair in fields.split("&"))
    return url, int(about["bytes"]), about["sha256"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["part-1.json", "part-1.idx", "part-1.bin", "manifest.json"])
def test_a_part_of_a_remote_set_that_is_missing_is_named(gcs, published, tmp_path, name):
    del gcs.objects["b", f"out/{name}"]
    cache = shard_cache(str(tmp_path / "cache"), 1_000_000)
    with pytest.raises(ValueError, match=rf"gs://b/out/{name} does not exist"):
        shards = open_remote_set("gs://b/out/manifest.json", cache)
        next(read_indexes(shards, ("web",)))  # fetches those of all shards
        ids_of(shards)
    cache.close()


@pytest.mark.fault("H10")
def test_a_remote_shard_edited_after_the_manifest_is_refused_and_named(gcs, published, tmp_path):
    content = bytearray(gcs.get("b", "out/0/part-2.bin"))
    content[5] ^= 1
    gcs.put("b", "out/0/part-2.bin", content)
    cache = shard_cache(str(tmp_path / "cache"), 1_000_000)
    with pytest.raises(
        ValueError, match="gs://b/out/0/part-2.bin does not match the sha256 in its manifest after 3 downloads"
    ):
        ids_of(open_remote_set("gs://b/out/manifest.json", cache))
    cache.close()


def test_a_manifest_that_is_torn_in_the_bucket_is_named(gcs, published, tmp_path):
    gcs.put("b", "out/manifest.json", gcs.get("b", "out/manifest.json")[:-9])
    with pytest.raises(ValueError, match="gs://b/out/manifest.json is not valid JSON"):
        open_remote_set("gs://b/out/manifest.json", shard_cache(str(tmp_path / "cache"), 1_000_000))


def test_the_address_of_a_shard_tells_all_that_is_needed(tmp_path, gcs):
    cache = shard_cache(str(tmp_path / "a cache#1"), 1_000_000)
    path = locator("gs://b/set/big.bin", len(BIG), hashlib.sha256(BIG).hexdigest(), cache)
    assert map_ids(path, "|u1")[5:8].tobytes() == BIG[5:8]
    assert map_ids(path, "|u1") is map_ids(path, "|u1")
    cache.close()


def test_the_local_manifest_of_a_set_stays_readable_beside_the_published_one(published, tmp_path):
    assert read_manifest(tmp_path / "set" / "manifest.json").fingerprint == published.fingerprint
