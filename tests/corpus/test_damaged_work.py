"""What a killed preparation has left is made again where it was damaged since, and the set comes out the same."""

import io
import itertools
import shutil

import made_text
import pytest
from damage import DAMAGES, in_time

from jaxscale import schema
from jaxscale.runtime.data.manifest import NAME as MANIFEST
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.engine import MADE_FROM, make_plan, prepare
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.preparation_page import FACTS
from jaxscale.tools.corpus.prepare.progress import PrepareProgress

pytestmark = pytest.mark.fault("F38")
JSON_DAMAGES = {
    "another JSON": lambda path: path.write_text("[1]"),
    "no fields": lambda path: path.write_text("{}"),
    "edited": lambda path: path.write_text(path.read_text().replace("1", "2")),
    "nested": lambda path: path.write_text("[" * 100_000),
}
FIRST = "pass0/000/000"
WORK = [
    *(
        f"{FIRST}/000000000{end}"
        for end in (".done.json", "-000000.arrow", "-000000.exact_dedup.npy", "-000000.near_dedup.npy")
    ),
    f"{FIRST}/000000000-000000.near_dedup.signatures.npy",
    *("recipe.json", "files.arrow", "pieces.npy", "pass0/blocks.npy"),
    *(f"joins/0-exact_dedup/{name}" for name in ("removed.npy", "removed.done.json")),
    *(f"joins/0-near_dedup/removed.{end}" for end in ("npy", "done.json")),
    *(f"pass1/000/000/000000000{end}" for end in (".done.json", "-000000.arrow")),
    *(f"pass2/000/000/000000000{end}" for end in (".done.json", "-000000.ids", "-000000.arrow")),
    *(f"tokenizer.{end}" for end in ("json", "done.json")),
    *(f"shards/shard-00000-of-*{end}" for end in (".done.json", "/*.bin", "/*.idx", "/*.docs.parquet")),
    "shards/shard-00000-of-*/shard-*[0-9].json",
]


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def run(cfg, output):
    with LocalExecutor(1) as executor:
        prepare(make_plan(cfg), output, executor, PrepareProgress(io.StringIO()), keep_work=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(recipe, output, a copy of its work as it is before the shards are moved out, the whole set)."""
    folder = tmp_path_factory.mktemp("killed")
    texts = [made_text.text(i, words=40) for i in range(24)]
    raw = made_text.write_jsonl(folder / "raw.jsonl", [*texts, *texts[:3], *(f"{one} One more." for one in texts[4:7])])
    values = {"tokenizer": {"train": {"vocab_size": 300, "trainer": "tokenizers"}}, "write": {"shard_tokens": 2000}}
    values |= {"stages": ("exact_dedup", "near_dedup"), "block_bytes": 4096}
    cfg = schema.from_dict(PrepareConfig, {"sources": {"text": {"files": str(raw)}}, **values})
    run(cfg, output := folder / "out")
    whole = contents(output)
    (work,) = output.glob("work-*")
    for place in (work / "shards").glob("shard-*[0-9]"):
        for path in output.glob(f"{place.name}.*"):
            path.rename(place / path.name)
    shutil.copytree(work, folder / "kept")
    return cfg, output, folder / "kept", whole


def put_back(output, kept):
    (work,) = output.glob("work-*")
    shutil.rmtree(output)
    shutil.copytree(kept, work)
    return work


def cases():
    for i, file in enumerate(WORK):
        every = {**DAMAGES, **(JSON_DAMAGES if file.endswith(".done.json") else {})}
        for j, name in enumerate(every):
            marks = [] if (i + 5 * j) % 9 == 0 else [pytest.mark.soak]
            yield pytest.param(file, every[name], id=f"{file} {name}", marks=marks)


@pytest.mark.cases(12)
@pytest.mark.parametrize(("file", "damage"), list(cases()))
def test_damaged_work_is_made_again(killed, file, damage):
    cfg, output, kept, whole = killed
    work = put_back(output, kept)
    (path,) = work.glob(file)
    damage(path)
    with in_time():
        run(cfg, output)
    (output / "elsewhere").unlink(missing_ok=True)  # of the damage itself
    assert contents(output) == whole


@pytest.mark.parametrize("moved", [1, 4, 100])
def test_shards_that_were_moved_out_by_then_are_good(killed, moved):
    cfg, output, kept, whole = killed
    work = put_back(output, kept)
    for path in sorted((work / "shards").glob("*/*"), key=lambda path: (path.parent, path.suffix == ".json"))[:moved]:
        path.rename(output / path.name)
    (output / MADE_FROM).write_bytes(whole[MADE_FROM])
    run(cfg, output)
    assert contents(output) == whole


@pytest.mark.cases(12)
@pytest.mark.parametrize(
    ("file", "name"),
    [
        *itertools.product([MADE_FROM, FACTS, MANIFEST], ["head flipped", "emptied", "a FIFO", "another JSON"]),
        (FACTS, "deleted"),
        (MADE_FROM, "a folder"),
    ],
)
def test_a_damaged_file_of_a_finished_set_is_one_line(killed, file, name):
    cfg, output, kept, whole = killed
    put_back(output, kept)
    for one, content in whole.items():
        (output / one).write_bytes(content)
    {**DAMAGES, **JSON_DAMAGES}[name](output / file)
    with in_time(), pytest.raises(BadInput) as error:
        run(cfg, output)
    assert str(output) in str(error.value) and "\n" not in str(error.value)
