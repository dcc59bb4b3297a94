"""Damaged data are found before a token of them is trained on, or are made again and give the same batches."""

import json
import shutil

import numpy as np
import pytest
from damage import DAMAGES, OPENED, in_time, seen, text

from jaxscale.cli.trace import line_of
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.ledger import Ledger
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.shard_writer import ShardWriter, lineage_table
from jaxscale.runtime.data.shards import encode_header
from jaxscale.runtime.run.resume_checks import open_same_data
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer
from jaxscale.system.exits import BadInput, Exit, Stop

pytestmark = pytest.mark.fault("F38")
ANOTHER = "another fingerprint"


def outcome(one, was, resume):
    """'' if all is the same, or the line that says what was found. Anything else is an error of the test."""
    recorded = {"data": {"fingerprint": was[0]}} if resume else None
    try:
        with in_time():
            corpus = open_same_data(one.cfg, recorded, lambda line: None, **OPENED)
            if resume and corpus.fingerprint != was[0]:
                return ANOTHER  # which check_same_data refuses
            now = seen(corpus)
    except BadInput as error:
        return str(error)
    except Stop as error:
        assert error.code in (Exit.DATA_MISMATCH, Exit.STORAGE)
        return str(error)
    for old, new in zip(was[1], now[1], strict=True):
        np.testing.assert_array_equal(old, new)
    return ""


SHARD = [".bin", ".idx", ".src", ".json", ".token_bytes.npy", ".docs.parquet"]
INDEX = [f"cache/tokens-*/tokens{ending}" for ending in (".idx", ".src", ".json")]
PLAN = [f"cache/rows-*/{name}" for name in ("small", "plan.json")]
FILES = {
    "set": [*(f"data/part-1{ending}" for ending in SHARD), "data/manifest.json", "cache/verified-*.json"],
    "shards": [f"data/part-1{ending}" for ending in SHARD],
    "raw": ["data/ids.bin", *INDEX, *PLAN],
    "megatron": ["data/pair.bin", "data/pair.idx", *INDEX],
    "text": ["data/text.jsonl", *(f"cache/tokens-*/tokens{ending}" for ending in SHARD)],
    "chat": ["data/chat.jsonl", *(f"cache/tokens-*/tokens{ending}" for ending in (*SHARD, ".trained"))],
}
OWN = ("ids", "pair", "text.jsonl", "chat.jsonl")  # before a run has begun with these, what they hold is right


def is_known(file, damage, resume):
    """False where nobody can tell the damaged data from good ones."""
    if not resume and file.partition("/")[2].startswith(OWN):
        return False
    return resume or (file, damage) not in {("data/part-1.bin", "deleted"), ("data/part-1.bin", "a folder")}


def cases():
    """Every file of every corpus with a third of the damages, and the rest for the long run; begun with and gone on."""
    files = [(world, file) for world, files in FILES.items() for file in files]
    for i, (world, file) in enumerate(files):
        for j, damage in enumerate(DAMAGES):
            for resume in (True, False):
                if is_known(file, damage, resume):
                    soak = [] if (i + j) % 6 == 3 * resume else [pytest.mark.soak]
                    name = f"{world} {file.rpartition('/')[2]} {damage}{', going on' * resume}"
                    yield pytest.param(world, file, DAMAGES[damage], resume, id=name, marks=soak)


def check(one, was, damage, resume, *names):
    """What is told of the damage, in one line that names the file; or '' where the batches are the same."""
    if resume:
        open_data(one.cfg, say=lambda line: None, **OPENED)  # so that this machine remembers it as good
    damage(one.folder)
    told = outcome(one, was, resume)
    assert "\n" not in told
    assert not told or any(name in told for name in names), told
    return told


@pytest.mark.cases(40)
@pytest.mark.parametrize(("world", "file", "damage", "resume"), list(cases()))
def test_a_damaged_file_is_found_before_a_token_is_trained_on(worlds, world, file, damage, resume):
    one, was = worlds(world)
    path = min(one.folder.glob(file))
    told = check(one, was, lambda _: damage(path), resume, path.stem, path.parent.name, ANOTHER)
    if world in ("set", "shards") and path.suffix == ".bin":
        assert told
    if path.is_relative_to(one.folder / "cache"):
        assert not told  # it is made again


def edit(file, change):
    """The JSON file with something else in it; the header of a shard with its own sum, as if it were right."""

    def damage(folder):
        path = folder / "data" / file
        content = json.loads(path.read_text())
        if file == "manifest.json":
            change(content)
            path.write_text(json.dumps(content))
            return
        del content["sha256"]["json"]
        change(content)
        path.write_bytes(encode_header(content))

    return damage


def put(*place):
    """A change of what lies at the end of `place`."""
    *keys, last, value = place

    def change(content):
        for key in keys:
            content = content[key]
        content[last] = value

    return change


def drop(*place):
    *keys, last = place

    def change(content):
        for key in keys:
            content = content[key]
        del content[last]

    return change


FIRST = ("shards", 0)
MANIFEST = {
    "tokens of a shard": put(*FIRST, "tokens", 7),
    "documents of a shard": put(*FIRST, "documents", 7),
    "tokens of all": put("num_tokens", 10**30),
    "documents of all": put("num_documents", 1),
    "less than nothing": put("num_tokens", -1),
    "a truth for a number": put("num_documents", True),
    "largest id": put("max_id", 1),
    "text": put(*FIRST, "text_bytes", 2),
    "version": put("version", 99),
    "a size": put(*FIRST, "files", "part-0.bin", "bytes", 1),
    "a huge size": put(*FIRST, "files", "part-0.bin", "bytes", 10**30),
    "no sha256": drop(*FIRST, "files", "part-0.bin", "sha256"),
    "short sha256": put(*FIRST, "files", "part-0.bin", "sha256", "ab"),
    "another sha256": put(*FIRST, "files", "part-0.bin", "sha256", "0" * 64),
    "no .idx": drop(*FIRST, "files", "part-0.idx"),
    "no fingerprint": drop("fingerprint"),
    "another fingerprint": put("fingerprint", "0" * 64),
    "a name above": put(*FIRST, "name", "../part-0"),
    "a name from the root": put(*FIRST, "name", "/etc/passwd"),
    "a name with NUL": put(*FIRST, "name", "part-0\0"),
    "a name with a line end": put(*FIRST, "name", "part-0\n\x1b[2J"),
    "a name that is no text": put(*FIRST, "name", ["part-0"]),
    "a file above": put(*FIRST, "files", "../x.bin", {"bytes": 1, "sha256": "0" * 64}),
    "a shard twice": lambda content: content["shards"].append(content["shards"][0]),
    "a shard less": lambda content: content["shards"].pop(),
    "another order": lambda content: content["shards"].reverse(),
    "no shard": put("shards", []),
    "shards of text": put("shards", "part-0"),
    "tokenizer above": put("tokenizer", "file", "../tokenizer.json"),
    "another format": put("format", "x"),
}
HEADER = {
    "bin above": put("bin", "../part-0.bin"),
    "bin from the root": put("bin", "/etc/passwd"),
    "bin with NUL": put("bin", "a\0"),
    "bin of another": put("bin", "part-0.bin"),
    "tokens": put("num_tokens", 7),
    "documents": put("num_documents", 1),
    "less than nothing": put("num_documents", -1),
    "more than there is": put("num_documents", 10**18),
    "a truth": put("num_documents", True),
    "type": put("dtype", "uint32"),
    "a type of objects": put("dtype", "O"),
    "no sources": put("sources", []),
    "sources of numbers": put("sources", [1, 2]),
    "no sha256 of the ids": drop("sha256", "bin"),
    "another sha256": put("sha256", "bin", "0" * 64),
    "sha256 of what is no part": put("sha256", "../x", "0" * 64),
    "version": put("version", 1),
    "files of text": put("files", ["a"]),
    "tokenizer": put("tokenizer", "fingerprint", None),
    "format": put("format", "x"),
}


@pytest.mark.cases(22)
@pytest.mark.fault("H4")
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", MANIFEST)
def test_an_edited_manifest_is_refused(worlds, name, resume):
    one, was = worlds("set")
    assert check(one, was, edit("manifest.json", MANIFEST[name]), resume, "manifest.json", "part-0", ANOTHER)


@pytest.mark.fault("H4")
@pytest.mark.parametrize("world", ["set", "shards"])
@pytest.mark.parametrize("name", HEADER)
def test_an_edited_header_is_refused(worlds, name, world):
    one, was = worlds(world)
    assert check(one, was, edit("part-1.json", HEADER[name]), False, "part-1", "part-0.bin", "manifest.json")


@pytest.mark.parametrize("file", ["manifest.json", "part-0.json"])
def test_json_nested_without_end_is_refused(worlds, file):
    one, was = worlds("set")
    nested = lambda folder: (folder / "data" / file).write_text("[" * 100_000)
    assert check(one, was, nested, False, file)


def exchange(a, b):
    def damage(folder):
        one, other = folder / "data" / a, folder / "data" / b
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)

    return damage


def shards_exchanged(folder):
    for ending in SHARD:
        exchange(f"part-0{ending}", f"part-1{ending}")(folder)


def shard_of_another_set(folder):
    for ending in SHARD:
        shutil.copy2(folder / "data" / "other" / f"part-1{ending}", folder / "data" / f"part-1{ending}")


EXCHANGES = {
    "ids of two shards": exchange("part-0.bin", "part-1.bin"),
    "ids of another set": exchange("part-0.bin", "other/part-0.bin"),
    "index of another set": exchange("part-0.idx", "other/part-0.idx"),
    "header of another set": exchange("part-0.json", "other/part-0.json"),
    "manifest of another set": exchange("manifest.json", "other/manifest.json"),
    "two shards": shards_exchanged,
    "a shard of another set": shard_of_another_set,
}


@pytest.mark.fault("F14")
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", EXCHANGES)
def test_files_that_were_exchanged_are_found(worlds, name, resume):
    one, was = worlds("set")
    told = check(one, was, EXCHANGES[name], resume, "part-0", "part-1")
    assert told or name == "index of another set"  # all documents of both sets have the same lengths


def test_a_shard_beside_those_that_are_listed_changes_nothing(worlds):
    one, was = worlds("set")

    def doubled(folder):
        for ending in SHARD:
            shutil.copy2(folder / "data" / f"part-1{ending}", folder / "data" / f"part-2{ending}")

    assert check(one, was, doubled, True) == ""


def test_a_document_of_a_file_with_a_hostile_name_is_found_as_it_is_listed(tmp_path):
    name = "evil\n\x1b[31m\u202edir/a\udce9.txt"  # the last one: a byte that is not UTF-8
    documents = [Document(text(i, 30), "web", name, i) for i in range(12)]
    writer = ShardWriter(tmp_path, "part", vocab_size=257, eos_id=256, sources=["web"])
    for document in documents:
        writer.add(ByteTokenizer().encode(document.text), "web")
    about = {"name": "bytes", "eos_token": "", "vocab_size": 257, "fingerprint": ByteTokenizer().fingerprint}
    header = {"tokenizer": about, "eos_id": 256, "text_bytes": 1, "skipped": {}, "files": []}
    writer.finish(None, header, lineage=lineage_table(documents))
    cfg = DataConfig(name="tokens", files=str(tmp_path / "part.bin"), cache_dir=str(tmp_path / "cache"), val_fraction=0)
    corpus = open_data(cfg, say=lambda line: None, **OPENED)
    ledger = Ledger(corpus, corpus.batches(4))
    listed = line_of(ledger.batch(0)[0], None)
    assert listed.isprintable() and "evil\\n\\x1b[31m\\u202edir/a\\udce9.txt:" in listed
    place = listed.partition("web, ")[2].partition(", tokens")[0]
    assert ledger.steps_of(place, 1)[0][0] == 0 and ledger.steps_of(place.replace("\\udce9", "\udce9"), 1)
