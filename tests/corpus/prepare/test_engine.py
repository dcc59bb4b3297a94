"""A preparation gives the same shards for the same recipe, whoever does the work."""

import contextlib
import gzip
import json
import os
import pathlib
import random
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter

import made_text
import numpy as np
import pytest
from prepared import contents, documents_in, recipe, run

from jaxscale import schema
from jaxscale.cli import prepare as command
from jaxscale.runtime.data.manifest import check_manifest
from jaxscale.runtime.text.sources.read import read_file
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import locked
from jaxscale.tools.corpus.prepare import engine, lookup, tokens, work
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.engine import LOCK, make_plan
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.progress import read_running

ROOT = pathlib.Path(command.__file__).parents[2]


def test_without_stages_every_token_of_every_document_is_written_once(corpus, texts, tmp_path):
    found = documents_in(run(recipe(corpus, write={"shard_tokens": 9000}), tmp_path / "out"))
    assert Counter(bytes(ids[:-1]).decode() for *_, ids in found) == Counter(texts)
    assert {ids[-1] for *_, ids in found} == {256}
    assert all(max(ids[:-1]) < 256 for *_, ids in found)


@pytest.mark.slow
def test_many_shards_lie_in_folders_of_bounded_size_and_hold_the_same(corpus, tmp_path, monkeypatch):
    cfg = recipe(corpus, write={"shard_tokens": 9000}, rows={"seq_len": 64})
    flat = run(cfg, tmp_path / "flat")
    monkeypatch.setattr(tokens, "SHARDS_IN_FOLDER", 2)
    made = run(cfg, tmp_path / "made", keep_work=True)
    (work,) = made.glob("work-*")
    (made / "manifest.json").unlink()  # as if it had been killed while shards were moved out
    for path in made.glob("00001/shard-00003*"):
        path.rename(work / "shards" / "00001" / path.name.partition(".")[0] / path.name)
    run(cfg, made)
    assert documents_in(made) == documents_in(flat)
    names = [shard["name"] for shard in check_manifest(made / "manifest.json", deep=True).shards]
    count = len(names)
    assert count > 4 and names == [f"{i // 2:05d}/shard-{i:05d}-of-{count:05d}" for i in range(count)]
    assert {path.parent.name for path in made.rglob("shard-*")} == {name[:5] for name in names}
    moved = {re.sub(r"\d{5}/", "", name): sha256 for name, sha256 in contents(made).items()}
    same = moved.keys() - {"manifest.json"}
    assert {name: moved[name] for name in same} == {name: contents(flat)[name] for name in same}


def test_each_document_leads_back_to_its_place_in_its_file(corpus, tmp_path):
    for _, file, offset, id, ids in documents_in(run(recipe(corpus), tmp_path / "out")):
        with open(corpus.parent / file, "rb") as stream:
            stream.seek(offset)
            record = json.loads(stream.readline())
        assert record == {"id": id, "text": bytes(ids[:-1]).decode()}


def test_the_shuffle_depends_on_the_seed_and_leaves_no_order_of_the_input(tmp_path):
    made_text.write_jsonl(tmp_path / "sorted.jsonl", [f"{i:05d}" for i in range(1000)])
    order = {}
    for seed in (0, 1):
        cfg = recipe(tmp_path / "sorted.jsonl", write={"seed": seed, "shard_tokens": 1250})
        order[seed] = [int(id) for _, _, _, id, _ in documents_in(run(cfg, tmp_path / f"out{seed}"))]
        assert sorted(order[seed]) == list(range(1000))
        assert abs(np.corrcoef(order[seed], np.arange(1000))[0, 1]) < 0.13  # 4 standard errors of no correlation
    assert abs(np.corrcoef(order[0], order[1])[0, 1]) < 0.13


@pytest.mark.soak  # the run that is killed is compared with one of one process too
def test_shards_are_the_same_for_any_number_of_processes(corpus, tmp_path):
    cfg = recipe(corpus, stages=("language", "exact_dedup", "near_dedup", "pii"), write={"shard_tokens": 9000})
    assert contents(run(cfg, tmp_path / "one", workers=1)) == contents(run(cfg, tmp_path / "two", workers=2))


def test_copies_are_found_across_blocks_and_the_first_is_kept(corpus, texts, tmp_path):
    found = documents_in(run(recipe(corpus, stages=("exact_dedup",)), tmp_path / "exact"))
    assert Counter(bytes(ids[:-1]).decode() for *_, ids in found) == Counter(set(texts))
    kept = {(file, int(id)) for _, file, _, id, _ in found}
    assert {("a.jsonl", i) for i in range(len(texts) // 2)} <= kept
    near = documents_in(run(recipe(corpus, stages=("exact_dedup", "near_dedup")), tmp_path / "near"))
    assert len(near) == 120
    assert not any(bytes(ids[:-1]).decode().endswith("One more.") for *_, ids in near)


@pytest.mark.slow
def test_what_goes_in_comes_out_or_is_counted_with_its_reason(corpus, tmp_path):
    stages = ("language", "gopher_quality", "exact_dedup", "near_dedup")
    out = run(recipe(corpus, stages=stages), tmp_path / "out")
    counts = {tuple(name): n for *name, n in json.loads((out / "report.json").read_text())["tally"]["counts"]}
    before = counts["in", "read", "text", "documents"]
    for stage in stages:
        dropped = sum(n for name, n in counts.items() if name[:2] == ("dropped", stage) and name[-1] == "documents")
        assert counts["in", stage, "text", "documents"] == before
        before = counts.get(("out", stage, "text", "documents"), 0)
        assert counts["in", stage, "text", "documents"] - dropped == before
    assert before == len(documents_in(out)) == counts["written", "text", "documents"]


@pytest.mark.slow
def test_a_tokenizer_is_trained_on_what_is_left_and_lies_beside_the_shards(corpus, tmp_path, monkeypatch):
    values = {"tokenizer": {"name": "train", "train": {"vocab_size": 400, "trainer": "tokenizers"}}}
    cfg = schema.from_dict(PrepareConfig, {"sources": {"text": {"files": str(corpus)}}, "stages": (), **values})
    out = run(cfg, tmp_path / "out")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["tokenizer"]["vocab_size"] == 400 and (out / manifest["tokenizer"]["file"]).exists()
    check_manifest(out / "manifest.json", deep=True)
    monkeypatch.setenv("HOME", str(out))
    again = run(recipe(corpus, tokenizer={"name": f"~/{manifest['tokenizer']['file']}"}), tmp_path / "again")
    assert sorted(documents_in(again)) == sorted(documents_in(out)) and (again / manifest["tokenizer"]["file"]).exists()


def test_word_lists_and_items_of_a_stage_are_told_by_their_setting_and_those_of_no_stage_are_not_read(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {"c4": {"bad_words": "~/bad"}, "toxicity": {"word_list": "~/listed", "score": False}}
    values |= {"decontaminate": {"files": ("~/items.txt",)}, "url_blocklist": {"words": "~/names"}}
    make_plan(recipe(corpus, **values))
    for stage, name, told in (
        ("c4", "bad", "c4.bad_words='~/bad': .*/bad cannot be read"),
        ("toxicity", "listed", "toxicity.word_list='~/listed': .*/listed cannot be read"),
        ("url_blocklist", "names", "url_blocklist.words='~/names': .*/names cannot be read"),
        ("decontaminate", "items.txt", "decontaminate.files=~/items.txt does not exist"),
    ):
        with pytest.raises(ValueError, match=told):
            make_plan(recipe(corpus, stages=(stage,), **values))
        (tmp_path / name).write_text("word")
        key = make_plan(recipe(corpus, stages=(stage,), **values)).key
        (tmp_path / name).write_text("another")
        assert make_plan(recipe(corpus, stages=(stage,), **values)).key != key


def test_more_blocks_than_a_join_can_number_are_refused_before_anything_is_read(corpus, monkeypatch):
    monkeypatch.setattr(engine, "MAX_BLOCKS", 1)
    assert len(make_plan(recipe(corpus)).pieces) > 1
    with pytest.raises(ValueError, match="21 blocks, but deduplication supports at most 1; merge small files"):
        make_plan(recipe(corpus, stages=("near_dedup",)))


def test_a_finished_set_is_left_alone_and_another_recipe_is_refused(corpus, tmp_path):
    out = run(recipe(corpus), tmp_path / "out")
    before = contents(out)
    run(recipe(corpus), out)
    assert contents(out) == before and not list(out.glob("work-*"))
    with pytest.raises(ValueError, match="has a different dataset.*use a different --output"):
        run(recipe(corpus, stages=("exact_dedup",)), out)
    (out / "manifest.json").unlink()  # as after a kill: shards of two recipes have the same names
    with pytest.raises(ValueError, match="has part of a different dataset"):
        run(recipe(corpus, stages=("exact_dedup",)), out)


def test_a_finished_set_that_has_lost_a_shard_is_not_called_complete(corpus, tmp_path):
    out = run(recipe(corpus), tmp_path / "out")
    (out / "shard-00000-of-00001.bin").unlink()
    with pytest.raises(ValueError, match="shard-00000-of-00001.bin"):
        run(recipe(corpus), out)


def test_two_processes_do_not_work_in_one_folder(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out" / LOCK), pytest.raises(ValueError, match="another process is writing to"):
        run(recipe(corpus), tmp_path / "out")


@pytest.mark.slow
def test_a_folder_may_be_named_in_another_way_when_the_work_goes_on(corpus, tmp_path, monkeypatch):
    cfg = recipe(corpus, stages=("exact_dedup",))
    monkeypatch.chdir(tmp_path)
    run(cfg, pathlib.Path("out"), keep_work=True)
    (work,) = (tmp_path / "out").glob("work-*")
    shutil.rmtree(work / "shards")
    for path in [*(tmp_path / "out").glob("*.*"), *work.glob("pass*/*/*/000000001*")]:
        path.unlink()
    run(cfg, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(run(cfg, tmp_path / "calm"))


@pytest.mark.slow
def test_more_blocks_than_files_may_be_open_are_gathered(tmp_path):
    made_text.write_jsonl(tmp_path / "a.jsonl", [f"{i} " + "x" * 1100 for i in range(150)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, len(os.listdir("/proc/self/fd")) + 60), hard))
    try:
        out = run(recipe(tmp_path / "a.jsonl", block_bytes=1024), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(documents_in(out)) == 150


@pytest.fixture
def few_files():
    """Allows 64 open files, as `ulimit -n 64` does; the hard limit stays, since only root could raise it again."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.MonkeyPatch.context() as patch:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        patch.setattr(resource, "getrlimit", lambda which: (64, 64))  # else the soft limit is raised to the hard one
        yield
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
def test_many_blocks_need_few_open_files(tmp_path):
    made_text.write_jsonl(tmp_path / "a.jsonl", [f"{i} " + "x" * 1100 for i in range(200)])
    command = [
        sys.executable,
        "-m",
        "jaxscale.cli",
        "prepare",
        f"--input={tmp_path}/a.jsonl",
        f"--output={tmp_path}/out",
    ]
    command += ["--workers=1", "--config.tokenizer.name=bytes", "--config.block_bytes=1024"]
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *command]  # a preexec_fn forks, and JAX warns of that
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert len(documents_in(tmp_path / "out")) == 200


def test_workers_with_too_many_pipes_are_refused(few_files):
    with LocalExecutor(40) as executor, pytest.raises(BadInput, match="80 pipes to 40 --workers .*the limit is 64"):
        list(executor.run_all(str, work.Task("", 0), 2))


def test_files_that_cannot_be_opened_for_their_number_are_told_with_the_limit(tmp_path, few_files):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    plan, held = make_plan(recipe(tmp_path / "a.jsonl")), []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        with pytest.raises(BadInput, match="Too many open files; the limit is 64; raise it .*ulimit -Hn 256"):
            list(read_file(plan.files[0], plan.cfg.read, Counter()))
    finally:
        for one in held:
            os.close(one)


def test_a_line_is_kept_once_though_its_first_document_is_a_near_duplicate(tmp_path):
    line = "This sentence is long enough to be looked at by the stage that compares lines, and it stands here twice."
    near = made_text.text(1)
    texts = [f"{near} One.", f"{near} Two.\n{line}", f"{made_text.text(2)}\n{line}"]
    made_text.write_jsonl(tmp_path / "a.jsonl", texts)
    cfg = recipe(tmp_path / "a.jsonl", stages=("near_dedup", "line_dedup"), near_dedup={"threshold": 0.5})
    left = [bytes(ids[:-1]).decode() for *_, ids in documents_in(run(cfg, tmp_path / "out"))]
    assert sum(text.count(line) for text in left) == 1


def test_pieces_that_are_done_are_not_done_again(corpus, tmp_path):
    out = run(recipe(corpus), tmp_path / "out", keep_work=True)
    (work,) = out.glob("work-*")
    before = {path: path.stat().st_mtime_ns for path in work.glob("pass0/*/*/*")}
    (out / "manifest.json").unlink()
    (work / "shards").rename(tmp_path / "shards")
    run(recipe(corpus), out, keep_work=True)
    assert {path: path.stat().st_mtime_ns for path in work.glob("pass0/*/*/*")} == before
    check_manifest(out / "manifest.json", deep=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", pytest.param("warc", marks=pytest.mark.soak)])
def test_a_piece_that_was_ended_keeps_its_finished_blocks_and_tells_how_far_it_is(texts, tmp_path, kind):
    path, head = tmp_path / f"a.{kind}.gz", "WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: "
    record = {
        "jsonl": lambda text: json.dumps({"text": text}) + "\n",
        "warc": lambda text: f"{head}{len(text.encode())}\r\n\r\n{text}\r\n\r\n",
    }
    rng = random.Random(0)
    many = [*texts, *("".join(rng.choices("abcdefgh ", k=4000)) for _ in range(200))]
    whole = gzip.compress("".join(map(record[kind], many)).encode())
    cfg = recipe(path, block_bytes=64 << 10)

    def piece(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        plan = engine.make_plan(cfg)
        lookup.write_input(tmp_path / folder, cfg, plan.files, plan.pieces)
        lookup.input_of.cache_clear()
        return work.run_task(work.Task(str(tmp_path / folder), 0))

    path.write_bytes(whole)
    calm = piece("calm")
    path.write_bytes(whole[: len(whole) * 4 // 5])
    with pytest.raises(ValueError, match="is truncated"):  # as good as killed there
        piece("ended")
    pass0 = tmp_path / "ended" / "pass0"
    kept = {file: file.stat().st_mtime_ns for file in pass0.rglob("*.arrow")}
    (running,) = read_running(tmp_path / "ended")
    assert len(kept) >= 4 and len(list(pass0.rglob("*.kept.json"))) == len(kept) - 1
    assert 0.5 < running.share <= 1 and running.resumed == 0 and running.documents > 100 and running.bytes > 200_000
    path.write_bytes(whole)
    again = piece("ended")
    assert again.pop("earlier")["documents"] >= running.documents and not calm.pop("earlier")
    assert json.dumps(again) == json.dumps(calm)
    assert kept.items() - {max(kept): kept[max(kept)]}.items() <= {
        (file, file.stat().st_mtime_ns) for file in pass0.rglob("*")
    }
    assert contents(pass0) == contents(tmp_path / "calm" / "pass0") and not read_running(tmp_path / "ended")


def test_where_nothing_is_left_it_says_why(corpus, tmp_path):
    with pytest.raises(ValueError, match="no documents are left after .*language: not wanted"):
        run(recipe(corpus, stages=("language",), language={"keep": ("zh",)}), tmp_path / "out")
