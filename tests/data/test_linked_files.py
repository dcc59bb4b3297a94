"""Links to files and folders make no document count twice: in training, preparation, examples, lists and items."""

import pytest

from jaxscale import schema
from jaxscale.runtime.data.checks import check_data
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate import contamination
from jaxscale.tools.corpus.curate.config import UrlConfig
from jaxscale.tools.corpus.curate.origin import list_paths
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.engine import make_plan
from jaxscale.tools.corpus.prepare.examples import example_files


@pytest.fixture
def corpus(tmp_path):
    """A folder with two files, a link to it in itself, and a link to one of the files beside it."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("one text of a corpus\n" * 40)
    (folder / "b.txt").write_text("another text of it\n" * 40)
    (folder / "latest").symlink_to(".")
    (tmp_path / "held.txt").symlink_to(folder / "b.txt")
    return folder


def test_training_reads_each_file_once_and_says_what_it_left_out(corpus, tmp_path):
    said = []
    cfg = DataConfig(name="files", files=str(corpus / "**/*.txt"), cache_dir=str(tmp_path / "cache"))
    opened = open_data(cfg, seq_len=32, vocab_size=300, seed=0, say=said.append)
    assert [line for line in said if "skipped 1 link to files that are already included" in line] == said[:1]
    assert sum(len(shard.offsets) - 1 for shard in opened.shards) == 2


def test_a_validation_file_that_is_a_link_to_a_training_file_is_named(corpus, tmp_path):
    cfg = DataConfig(name="files", files=str(corpus / "*.txt"), val_files=str(tmp_path / "held.txt"))
    (problem,) = check_data(cfg, 32, 300)
    assert f"{tmp_path}/held.txt is in data.files, as {corpus}/b.txt and in data.val_files" in problem


def test_preparation_reads_each_file_once_and_says_so(corpus, tmp_path):
    (tmp_path / "items.txt").write_text("a question of an evaluation that is long enough to be looked for\n")
    (tmp_path / "more.txt").symlink_to("items.txt")
    recipe = {
        "sources": {"web": {"files": str(corpus / "**/*.txt")}},
        "stages": ("decontaminate",),
        "decontaminate": {"files": (str(tmp_path / "items.txt"), str(tmp_path / "more.txt"))},
        "tokenizer": {"name": "bytes"},
    }
    plan = make_plan(schema.from_dict(PrepareConfig, recipe))
    assert [file.name for file in plan.files] == ["a.txt", "b.txt"]
    assert [line.partition(": skipped 1 link ")[0] for line in plan.notes] == ["sources", "decontaminate.files"]


def test_examples_and_lists_are_read_once(corpus, tmp_path):
    learned = {"good": (str(corpus / "**/a.txt"),), "bad": (str(tmp_path / "held.txt"),)}
    recipe = {"sources": {"web": {"files": "x"}}, "stages": ("classifier",), "classifier": learned}
    said = []
    assert len(example_files(schema.from_dict(PrepareConfig, recipe), said.append)) == 2 and len(said) == 1
    recipe["classifier"] = learned | {"good": (str(corpus / "*.txt"),)}
    with pytest.raises(BadInput, match=r"held.txt is in classifier.bad and in classifier.good \(as \S*b.txt\)"):
        example_files(schema.from_dict(PrepareConfig, recipe))
    assert len(list_paths(UrlConfig(lists=(str(corpus / "**/*.txt"),)))) == 2
    assert len(contamination.list_evaluation_files([str(corpus / "a.txt"), str(corpus / "latest" / "a.txt")])) == 1
