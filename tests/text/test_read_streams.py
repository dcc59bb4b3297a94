"""Data sets that other libraries read: one clear line where the library, the network or the task is missing."""

import os
import pathlib
import subprocess
import sys
from collections import Counter

import pytest

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.sources.read import read_file, split_file

ROOT = pathlib.Path(__file__).parents[2]
SEQIO = os.environ.get("JAXSCALE_SEQIO_PYTHON", "")


def read(path, **changes):
    """(documents, what was skipped)."""
    skipped = Counter()
    return list(read_file(SourceFile(str(path), str(path), "s"), ReadConfig(**changes), skipped)), dict(skipped)


def hide(monkeypatch, *names):
    for name in list(sys.modules):
        if name.split(".")[0] in names:
            monkeypatch.delitem(sys.modules, name)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("name", "package", "told"),
    [
        ("hf://name", "datasets", r"reading hf://name needs the package datasets.*'jaxscale\[prepare\]'"),
        ("seqio://task", "seqio", r"reading seqio tasks needs the package seqio.*'jaxscale\[seqio\]'"),
        ("a.html", "resiliparse", r"reading web pages needs the package resiliparse.*'jaxscale\[prepare\]'"),
        ("a.array_record", "array_record", r"ArrayRecord files needs the package array_record.*'jaxscale\[prepare\]'"),
    ],
)
def test_a_missing_package_is_one_line_with_the_way_out(tmp_path, monkeypatch, name, package, told):
    hide(monkeypatch, package)
    path = name if "://" in name else tmp_path / name
    if path != name:
        path.write_text("<p>text")
    with pytest.raises(ValueError, match=told):
        read(path)


def test_a_missing_trafilatura_is_named_with_the_setting(tmp_path, monkeypatch):
    pytest.importorskip("resiliparse", reason="resiliparse is not installed")
    hide(monkeypatch, "trafilatura")
    (tmp_path / "a.html").write_text("<p>text")
    with pytest.raises(ValueError, match="html_text='trafilatura' needs the package trafilatura"):
        read(tmp_path / "a.html", html_text="trafilatura")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hf://", "hf:// has no dataset name; use hf://NAME"),
        ("hf://name?spilt=train", r"has the unknown setting spilt; use hf://NAME\?config=...&split=...&revision=..."),
    ],
)
def test_a_name_that_cannot_be_is_told(name, told):
    pytest.importorskip("datasets", reason="datasets is not installed")
    with pytest.raises(ValueError, match=told):
        read(name)


def test_data_sets_on_this_disk_are_read_row_by_row(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = {"text": ["a", "b é", None, "d"], "id": [1, 2, 3, 4]}
    saved = datasets.Dataset.from_dict(rows)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "two")
    datasets.DatasetDict({"test": saved}).save_to_disk(tmp_path / "three")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.jsonl").write_text('{"text": "a", "id": 1}\n{"text": "b é", "id": 2}\n')
    for path in (tmp_path / "one", tmp_path / "two", tmp_path / "two" / "test"):
        documents, skipped = read(path)
        found = [(document.offset, document.id, document.text) for document in documents]
        assert found == [(0, "1", "a"), (1, "2", "b é"), (3, "4", "d")] and skipped == {"empty": 1}
        assert len(split_file(SourceFile(str(path), "x", "s"), ReadConfig(), 1)) == 1
    assert [document.text for document in read(f"hf://{tmp_path}/files")[0]] == ["a", "b é"]
    with pytest.raises(ValueError, match="three has no split 'train'; its splits are test; use .*three/test"):
        read(tmp_path / "three")
    with pytest.raises(ValueError, match="one has no column 'body'; its columns are text, id; set text_field"):
        read(tmp_path / "one", text_field="body")
    with pytest.raises(ValueError, match="hf://.*split=no cannot be read.*without a network, save the dataset"):
        read(f"hf://{tmp_path}/files?split=no")


TASK = """
import functools, seqio
import tensorflow as tf

def texts(split, shuffle_files, seed=None):
    texts, ids = [f"text {i} \\u00e9" for i in range(5)], [str(i) for i in range(5)]
    return tf.data.Dataset.from_tensor_slices({"text": texts, "id": ids})

seqio.TaskRegistry.add(
    "raw", seqio.FunctionDataSource(texts, splits=["train"]), preprocessors=[], output_features={}, metric_fns=[])
seqio.TaskRegistry.add(
    "ids", seqio.FunctionDataSource(texts, splits=["train"]),
    preprocessors=[
        functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}), seqio.preprocessors.tokenize],
    output_features={"targets": seqio.Feature(seqio.ByteVocabulary())}, metric_fns=[])
"""
READ_TASKS = """
from collections import Counter
from jaxscale.runtime.text.sources.read import read_file
from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.config import ReadConfig
wanted = [f"text {i} \\u00e9" for i in range(5)]
for name in ("seqio://raw?module=a_task", "seqio://ids?module=a_task", "seqio://ids?module=a_task&field=targets"):
    found = list(read_file(SourceFile(name, name, "s"), ReadConfig(), Counter()))
    assert [(d.offset, d.text) for d in found] == list(enumerate(wanted)), (name, found)
    assert name != "seqio://raw?module=a_task" or found[3].id == "3"
for name, told in (
    ("seqio://none?module=a_task", "knows no task none"), ("seqio://raw?module=a_task&split=test", "no split 'test'"),
    ("seqio://raw?module=not_there", "module not_there cannot be imported"),
    ("seqio://raw?module=a_task&field=x", "no feature x but id, text"),
):
    try:
        list(read_file(SourceFile(name, name, "s"), ReadConfig(), Counter()))
    except ValueError as error:
        assert told in str(error), error
    else:
        raise AssertionError(name)
print("all as told")
"""


@pytest.mark.peer
def test_tasks_of_seqio_are_read_in_their_order(tmp_path):
    if not SEQIO:
        pytest.skip("JAXSCALE_SEQIO_PYTHON names no Python with seqio")
    (tmp_path / "a_task.py").write_text(TASK)
    done = subprocess.run(
        [SEQIO, "-c", READ_TASKS],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("all as told\n"), done.stderr[-3000:]
