"""Paths under gs:// do what those of a disk do, and say of a refusal or a service that is away what it is."""

import pytest
from gcs_emulator import Emulator, Fault
from gcs_weather import Weather

from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, short_reason
from jaxscale.system import bucket, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.storage import ObjectPath

pytest.importorskip("gcsfs", reason="gcsfs is not installed")


@pytest.fixture
def gcs(monkeypatch):
    with Emulator() as emulator:
        for name, value in emulator.environment().items():
            monkeypatch.setenv(name, value)
        yield emulator


@pytest.fixture(params=["disk", "bucket"])
def folder(request, gcs, tmp_path):
    return paths.as_path(tmp_path / "run" if request.param == "disk" else "gs://bucket/some/run")


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_a_folder_is_what_lies_in_it(folder):
    assert not folder.exists() and not folder.is_dir() and not list(folder.glob("*"))
    with pytest.raises(FileNotFoundError):
        list(folder.iterdir())
    for name in ("a.json", "deep/x", "deep/er/y", "deep.txt"):
        put(folder / name, name.encode())
    assert folder.is_dir() and not folder.is_file() and (folder / "deep").exists() and (folder / "deep/x").is_file()
    assert sorted(child.name for child in folder.iterdir()) == ["a.json", "deep", "deep.txt"]
    assert [path.name for path in folder.glob("*/?")] == ["x"] and [p.name for p in folder.glob("*.json")] == ["a.json"]
    assert (folder / "a.json").suffix == ".json" and (folder / "a.json").with_name("b").name == "b"
    assert (folder / "deep" / "x").parent.parent == folder and folder / "deep" < folder / "e"


def test_what_is_written_is_read_whole_and_in_parts_and_goes_away(folder):
    content = bytes(range(256)) * 4000
    put(folder / "big", content)
    paths.write_text_atomic(folder / "small", "text")
    assert (folder / "small").read_text() == "text" and (folder / "small").stat().st_size == 4
    with (folder / "big").open("rb") as file:
        file.seek(-10, 2)
        assert file.read() == content[-10:] and file.seek(300) == 300 and file.read(3) == content[300:303]
    (folder / "small").unlink()
    (folder / "small").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (folder / "small").unlink()
    for missing in (lambda: (folder / "small").read_bytes(), lambda: (folder / "small").stat()):
        with pytest.raises(FileNotFoundError):
            missing()


@pytest.mark.soak
def test_a_tree_of_many_objects_is_copied_and_removed(gcs):
    folder = paths.as_path("gs://bucket/run")
    for number in range(1200):
        gcs.put("bucket", f"run/d/{number:04}", b"")
    gcs.put("bucket", "running", b"another")
    assert len(list((folder / "d").iterdir())) == 1200
    (folder / "d" / "0007").copy(folder / "e" / "7")
    assert gcs.get("bucket", "run/e/7") == b""
    folder.rmtree()
    assert gcs.names("bucket") == ["running"]


def test_faults_that_pass_are_waited_for_and_a_lost_answer_is_no_error(gcs, monkeypatch):
    monkeypatch.setattr(bucket, "FIRST_WAIT", 0.001)
    path = paths.as_path("gs://bucket/name")
    gcs.faults = [Fault("status", method="POST", times=2), Fault("lost", method="POST")]
    path.write_bytes(b"content")
    gcs.faults = [Fault("reset", media=True, after=3), Fault("status", status=429)]
    assert path.read_bytes() == b"content"
    gcs.faults = [Fault("lost", method="DELETE")]
    path.unlink(missing_ok=True)
    assert not path.exists()


def test_a_refusal_and_an_outage_are_both_of_the_storage_and_of_a_person(gcs, monkeypatch):
    monkeypatch.setattr(bucket, "FIRST_WAIT", 0.0001)
    folder = ObjectPath("gs://bucket/run")
    gcs.weather = Weather(lacks={"storage.objects.list"})
    with pytest.raises(OSError, match="cannot be listed") as refused:
        list(folder.iterdir())
    assert isinstance(refused.value, BadInput) and is_storage_error(refused.value)
    assert short_reason(refused.value) == "this machine's account lacks the permission storage.objects.list (403)"
    gcs.weather = Weather(down=True)
    with pytest.raises(OSError, match="7 consecutive attempts failed") as away:
        folder.is_dir()
    assert is_storage_error(away.value) and short_reason(away.value).startswith("gs://bucket/run: 7 consecutive")
