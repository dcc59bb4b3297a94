"""A file is the old one or the new one, and a run's folder is its owner's."""

import os
import pathlib
import stat
import subprocess
import sys

import pytest
from no_packages import no_distribution

from jaxscale.system import paths
from jaxscale.system.exits import BadInput


def test_json_comes_back_as_it_was(tmp_path):
    paths.write_json(tmp_path / "a.json", {"x": [1, 2.5, None, "é"]})
    assert paths.read_json(tmp_path / "a.json") == {"x": [1, 2.5, None, "é"]}


def test_damaged_json_is_named(tmp_path):
    for content in (b"{", b"\xff\xfe"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(ValueError, match="a.json is not valid JSON"):
            paths.read_json(tmp_path / "a.json")


def test_a_write_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "a.txt"
    paths.write_text_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        paths.write_text_atomic(path, "new " * 100_000 + "\ud800")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_nan_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError):
        paths.write_json(tmp_path / "a.json", float("nan"))
    assert os.listdir(tmp_path) == []


@pytest.mark.fault("H7")
def test_a_run_folder_is_private_and_may_exist(tmp_path):
    for _ in range(2):
        folder = paths.make_run_dir(tmp_path / "runs" / "a")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_was_there_keeps_the_mode_that_its_owner_gave_it(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    folder = paths.make_run_dir(tmp_path / "shared")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775


@pytest.mark.parametrize("path", ["", "  "])
def test_an_empty_run_folder_is_not_the_current_one(path):
    with pytest.raises(ValueError, match="workdir=.* is empty; set a folder"):
        paths.make_run_dir(path)


def test_a_run_folder_that_may_not_be_made_says_so(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    with pytest.raises(ValueError, match="cannot be created .Permission denied.; use a different workdir"):
        paths.make_run_dir(tmp_path / "run")


def test_a_file_in_the_way_of_a_run_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="workdir="):
            paths.make_run_dir(path)


def test_the_cache_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / "jaxscale" and not paths.cache_dir().exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / ".cache" / "jaxscale"


def test_importing_paths_is_light():
    code = (
        "import sys; from jaxscale.system import paths; paths.cache_dir(); "
        "sys.exit(bool({'etils', 'jax'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


def test_json_that_cannot_be_read_is_named_in_one_line(tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "folder.json", tmp_path / "file" / "a.json"):
        with pytest.raises(ValueError, match=f"{path} cannot be read: .*") as error:
            paths.read_json(path)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError):
        paths.read_json(tmp_path / "nothing.json")


def test_a_bucket_without_gcsfs_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.metadata.distribution", no_distribution)
    with pytest.raises(ValueError, match=r"gs://bucket/run needs gcsfs: pip install 'jaxscale\[gcs\]'"):
        paths.as_path("gs://bucket/run")


@pytest.mark.parametrize("name", ["run[1]", "a*", "why?", "a\\b"])
def test_a_run_folder_whose_name_is_a_pattern_is_refused_before_anything_is_computed(tmp_path, name):
    with pytest.raises(BadInput, match="Orbax interprets .* as a pattern; use a different workdir"):
        paths.make_run_dir(tmp_path / name / "run")
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    "address, way_out",
    [
        ("https://huggingface.co/org/name", "jaxscale convert --from=org/name --workdir=FOLDER"),
        ("hf://org/name", "jaxscale convert --from=org/name --workdir=FOLDER"),
        ("file:///tmp/x", "use the path /tmp/x"),
        ("s3://bucket/x", "copy it to a disk or to gs:// first"),
    ],
)
def test_an_address_that_is_not_read_is_one_line_with_the_way_out(address, way_out):
    with pytest.raises(BadInput, match="use a local path or gs:// .*" + way_out):
        paths.as_path(address)


@pytest.mark.parametrize("address", ["gs:///run", "gs://./run", "gs://"])
def test_an_address_without_a_bucket_is_refused(address):
    with pytest.raises(BadInput, match="must be gs://BUCKET/NAME"):
        paths.as_path(address)
