"""A run that names a manifest trains on exactly the shards in it, from a folder or a bucket, and on nothing damaged."""

import dataclasses
import functools

import numpy as np
import pytest
from gcs_emulator import Emulator

from jaxscale.runtime.data import verified
from jaxscale.runtime.data.checks import check_data
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.manifest import write_manifest
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.shard_writer import ShardWriter, lineage_table
from jaxscale.runtime.data.shards import open_shard
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer
from jaxscale.tools.corpus.publish import publish

SEQ_LEN = 64


def write_shard(folder, name, texts, sources):
    tokenizer = ByteTokenizer()
    writer = ShardWriter(folder, name, vocab_size=257, eos_id=256, sources=["web", "code"])
    for ids, source in zip(tokenizer.encode_many(texts), sources):
        writer.add(ids, source)
    about = {"name": "bytes", "eos_token": "", "vocab_size": 257, "fingerprint": tokenizer.fingerprint}
    files = [{"name": name, "source": "", "documents": len(texts)}]
    header = {"tokenizer": about, "eos_id": 256, "text_bytes": sum(map(len, texts)), "skipped": {}, "files": files}
    writer.finish(tokenizer.token_bytes, header)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(3):
        texts = [f"document {number} {i} " * (10 + i % 7) for i in range(40)]
        write_shard(folder, f"part-{number}", texts, [("web", "code")[i % 2] for i in range(40)])
    write_manifest(folder, ["part-0", "part-1"], recipe={})  # part-2 is not listed
    return folder


def config(path, tmp_path, **changes):
    return DataConfig(name="tokens", files=str(path), cache_dir=str(tmp_path / "cache"), **changes)


def open_corpus(cfg):
    said = []
    assert check_data(cfg, SEQ_LEN, 257) == []
    return open_data(cfg, seq_len=SEQ_LEN, vocab_size=257, seed=0, say=said.append), said


def tokens_of(corpus):
    return np.stack([corpus.train_rows[row].tokens for row in range(len(corpus.train_rows))])


def test_a_run_over_the_manifest_reads_the_listed_shards_alone(folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(verified, "REPORTED_BYTES", 10**6)
        assert open_corpus(config(folder / "manifest.json", tmp_path / "quiet"))[1] == []
    corpus, said = open_corpus(config(folder / "manifest.json", tmp_path, val_fraction=0.0))
    both = [open_shard(folder / f"part-{i}.json").header for i in (0, 1)]
    assert corpus.train_rows.num_tokens == sum(header["num_tokens"] for header in both)
    assert corpus.source_names == ("web", "code") and corpus.tokenizer.name == "bytes"
    assert "data.tokens: 80 documents" in corpus.summary
    assert len(said) == 2 and all("to verify its hashes" in line for line in said)  # the set, and the plan
    assert open_corpus(config(folder / "manifest.json", tmp_path, val_fraction=0.0))[1] == []  # once per machine


def test_a_set_in_a_bucket_gives_the_same_rows_as_the_one_in_the_folder(folder, tmp_path, monkeypatch):
    here, _ = open_corpus(config(folder / "manifest.json", tmp_path))
    with Emulator() as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        url = publish(folder, "gs://b/set", say=lambda line: None)
        there, _ = open_corpus(config(url, tmp_path))
        assert not gcs.requests("set/part-0.bin")  # its ids come when they are read
        np.testing.assert_array_equal(tokens_of(there), tokens_of(here))
        assert gcs.requests("set/part-0.bin") == [""] and not gcs.requests("set/part-2.bin")
        assert there.fingerprint == here.fingerprint


def test_sources_are_those_that_the_person_names(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_shard(other, "part-0", ["x" * 90] * 40, ["web"] * 40)
    write_manifest(other, ["part-0"], recipe={})
    mixture = {"set": 0.8, "other": 0.2}
    by_name = config(f"{tmp_path}/{{name}}/manifest.json", tmp_path, mixture=mixture)
    by_hand = dataclasses.replace(by_name, files={name: f"{tmp_path}/{name}/manifest.json" for name in mixture})
    corpus, _ = open_corpus(by_name)
    same, _ = open_corpus(by_hand)
    assert corpus.source_names == same.source_names == ("set", "other") and corpus.fingerprint == same.fingerprint
    sources, _ = corpus.plan_mixture(8, 100).locate(np.arange(800))
    assert np.bincount(sources).tolist() == [640, 160]
    per_row = {name: corpus.tokens_of_sources[name] / rows for name, rows in corpus.rows_of_sources.items()}
    share = 0.8 * per_row["set"] / (0.8 * per_row["set"] + 0.2 * per_row["other"])
    told = f"rows set 0.8, other 0.2, exact in every 1025; in tokens set {share:.4f}, other {1 - share:.4f}"
    assert share > 0.81 and corpus.plan_mixture(8, 100).lines[0] == f"mixture from token 0: {told}"
    for changes, said in (
        (dict(mixture={}), "stands for the sources of data.mixture, which is empty; set data.mixture"),
        (dict(files=(*[by_name.files], "other.json")), "in some globs but not in other.json; write {source: globs}"),
        (dict(mixture={"set": 1.0, "books": 1.0}), "books/manifest.json does not exist"),
    ):
        assert said in check_data(dataclasses.replace(by_name, **changes), SEQ_LEN, 257)[0]
    with pytest.raises(
        ValueError, match="names 'web', which is not a source of the training data; the sources are set"
    ):
        open_corpus(dataclasses.replace(by_hand, mixture={"web": 1.0}))


@pytest.mark.fault("H10")
@pytest.mark.parametrize("verify", ["hash", "size"])
def test_an_edited_shard_is_refused_by_its_hash_and_a_cut_one_by_its_size(folder, tmp_path, verify):
    cfg = config(folder / "manifest.json", tmp_path, verify=verify)
    content = bytearray((folder / "part-1.bin").read_bytes())
    content[0] ^= 1
    (folder / "part-1.bin").write_bytes(content)
    if verify == "hash":
        with pytest.raises(ValueError, match="part-1.bin was changed after the manifest was written"):
            open_corpus(cfg)
    else:
        open_corpus(cfg)
    (folder / "part-1.bin").write_bytes(content[:-2])
    (problem,) = check_data(cfg, SEQ_LEN, 257)
    assert "part-1.bin" in problem and "truncated" in problem


def test_a_shard_of_a_set_is_not_read_past_its_manifest(folder, tmp_path):
    with pytest.raises(ValueError, match="belongs to a prepared set; use its manifest, which has the hashes"):
        open_data(config(folder / "*.bin", tmp_path), seq_len=SEQ_LEN, vocab_size=257, seed=0)


def test_what_is_wrong_with_a_set_is_told_before_anything_is_read(folder, tmp_path, monkeypatch):
    cfg = config(folder / "manifest.json", tmp_path)
    (problem,) = check_data(cfg, SEQ_LEN, 100)
    assert "contains token id 256, but the model has model.vocab_size=100" in problem
    assert "fewer than one sequence" in check_data(cfg, 1_000_000, 257)[0]
    (folder / "manifest.json").write_text("{")
    assert "manifest.json is not valid JSON" in check_data(cfg, SEQ_LEN, 257)[0]
    with Emulator() as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        remote = config("gs://b/set/manifest.json", tmp_path)
        assert "gs://b/set/manifest.json does not exist (404)" in check_data(remote, SEQ_LEN, 257)[0]
        gcs.put("b", "set/manifest.json", b"{}")
        assert "is not the manifest of a prepared set" in check_data(remote, SEQ_LEN, 257)[0]
        (folder / "manifest.json").unlink()
        write_manifest(folder, ["part-0"], recipe={})
        del gcs.objects["b", "set/manifest.json"]
        publish(folder, "gs://b/set", say=lambda line: None)
        assert check_data(remote, SEQ_LEN, 257) == []
        assert "raise data.cache_bytes" in check_data(dataclasses.replace(remote, cache_bytes=10), SEQ_LEN, 257)[0]


def test_a_pair_of_megatron_is_trained_on_by_its_own_documents(folder, tmp_path):
    from jaxscale.runtime.data.other_formats import export_megatron

    ours = [open_shard(folder / f"part-{i}.json") for i in (0, 1)]
    export_megatron(ours, tmp_path / "pair")
    corpus, said = open_corpus(config(tmp_path / "pair.bin", tmp_path, val_fraction=0.0))
    set_of_ours, _ = open_corpus(config(folder / "manifest.json", tmp_path, val_fraction=0.0))
    np.testing.assert_array_equal(tokens_of(corpus), tokens_of(set_of_ours))
    (tmp_path / "pair.idx").write_bytes((tmp_path / "pair.idx").read_bytes()[:-1])
    assert "pair.idx has" in check_data(config(tmp_path / "pair.bin", tmp_path), SEQ_LEN, 257)[0]


def test_rows_that_stay_half_empty_are_told_with_the_price_of_cutting(folder, tmp_path):
    write_shard(folder, "alike", ["x" * 39] * 200, ["web"] * 200)  # no two fit into a row
    write_manifest(folder, ["alike"], recipe={})
    make = functools.partial(config, folder / "manifest.json", tmp_path, val_fraction=0.0)
    told = "packing best_fit, 62.50% of positions filled (data.packing=concat would fill 100%, but split up to 62% of"
    assert told in open_corpus(make())[0].summary
    assert "packing concat, 100.00% of positions filled;" in open_corpus(make(packing="concat"))[0].summary


def test_the_lineage_of_no_document_is_a_table_of_no_rows():
    assert lineage_table([]).num_rows == 0
