"""The emulator speaks the protocol well enough for gcsfs, TensorStore and epath, written against the real service."""

import os
import subprocess
import sys
import time

import pytest
from gcs_emulator import CHUNK, Emulator, Fault
from gcs_weather import Weather

core = pytest.importorskip("gcsfs.core", reason="gcsfs is not installed")


@pytest.fixture
def gcs():
    with Emulator() as emulator:
        yield emulator


@pytest.fixture
def files(gcs):
    system = core.GCSFileSystem(token="anon", endpoint_url=gcs.endpoint, skip_instance_cache=True)
    yield system
    if system.session is not None:
        system.close_session(system.loop, system.session)


def test_what_gcsfs_writes_it_reads_lists_copies_and_deletes(gcs, files):
    files.pipe("b/folder/small", b"small")
    files.pipe("b/folder/deep/name with #%?.bin", b"odd")
    assert gcs.get("b", "folder/deep/name with #%?.bin") == b"odd"
    assert files.cat("b/folder/small") == b"small" and files.cat_file("b/folder/small", 1, 3) == b"ma"
    assert sorted(files.ls("b/folder")) == ["b/folder/deep", "b/folder/small"]
    assert sorted(files.find("b")) == ["b/folder/deep/name with #%?.bin", "b/folder/small"]
    assert files.info("b/folder/small")["size"] == 5 and files.isdir("b/folder") and not files.exists("b/none")
    files.cp_file("b/folder/small", "b/copy")
    files.mv("b/copy", "b/moved")
    assert gcs.names("b") == ["folder/deep/name with #%?.bin", "folder/small", "moved"]
    files.rm("b/folder", recursive=True)
    assert gcs.names("b") == ["moved"]
    with pytest.raises(FileNotFoundError):
        files.cat("b/folder/small")


def test_an_upload_of_many_chunks_arrives_whole(gcs, files):
    content = os.urandom(3 * CHUNK + 5)
    with files.open("b/large", "wb", block_size=CHUNK) as file:
        file.write(content)
    assert gcs.get("b", "large") == content
    assert len([method for method, *_ in gcs.log if method in ("POST", "PUT")]) >= 3  # the start, and two parts


@pytest.mark.soak
def test_gcsfs_gets_through_a_busy_service(gcs, files):
    files.pipe("b/name", b"content")
    gcs.faults.append(Fault("status", status=503, times=2))
    assert files.cat("b/name") == b"content"


def test_a_long_listing_comes_in_pages(gcs, files):
    for number in range(2500):
        gcs.put("b", f"many/{number:04}", b"")
    assert len(files.find("b/many")) == 2500
    assert len([path for method, path, _ in gcs.log if method == "GET"]) >= 3


TENSORSTORE = """
import tensorstore

store = tensorstore.KvStore.open("gs://bucket/folder/").result()
first = store.write("a", b"one").result().generation
assert store.read("a").result().value == b"one" and store.read("none").result().state == "missing"
second = store.write("a", b"two", if_equal=first).result().generation
refused = store.write("a", b"three", if_equal=first).result().generation
assert second not in (first, refused) and store.read("a").result().value == b"two"
assert store.read("a", if_not_equal=second).result().state == "unspecified"
store.write("b/c", bytes(range(256)) * 4096).result()
assert store.read("b/c", byte_range=slice(10, 12)).result().value == bytes([10, 11])
assert sorted(store.list().result()) == [b"a", b"b/c"]
store.delete_range(tensorstore.KvStore.KeyRange("b/", "b0")).result()
assert store.list().result() == [b"a"]
"""
EPATH = """
from jaxscale.system.paths import as_path

folder = as_path("gs://bucket/run")
assert not folder.exists()
(folder / "deep" / "x").write_text("text")
assert folder.is_dir() and (folder / "deep" / "x").read_text() == "text"
assert [path.name for path in folder.iterdir()] == ["deep"]
folder.rmtree()
assert not folder.exists()
"""


@pytest.mark.parametrize("program", [TENSORSTORE, EPATH], ids=["tensorstore", "epath"])
@pytest.mark.parametrize(
    "busy", [{}, pytest.param({"burst": 3, "status": 429}, marks=pytest.mark.soak)], ids=["fair", "429"]
)
def test_the_clients_of_a_checkpoint_work_against_it_and_get_through_faults(gcs, program, busy):
    gcs.weather = Weather(**busy)
    env = os.environ | gcs.environment()
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


LOOKING = """
from jaxscale.cli.supervise import read_progress

for _ in range(3):
    print(sorted(read_progress("gs://bucket/run").saved), flush=True)
    input()
"""


def test_what_other_processes_write_is_seen_at_the_next_look(gcs):
    env = os.environ | gcs.environment()
    with subprocess.Popen(
        [sys.executable, "-c", LOOKING], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as looking:
        for step, seen in ((5, "[5]"), (10, "[5, 10]"), (15, "[5, 10, 15]")):
            gcs.put("bucket", f"run/checkpoints/{step}/commit_success.txt", b"committed")
            if step != 5:
                print(file=looking.stdin, flush=True)
            assert looking.stdout.readline().strip() == seen
        looking.kill()


def test_the_weather_is_that_of_every_request(gcs, files):
    gcs.weather = Weather(lacks={"storage.objects.list"})
    with pytest.raises(OSError, match="does not have storage.objects.list"):
        files.ls("b/folder")
    gcs.weather = Weather(down=True, only="one")
    files.pipe("b/two", b"2")
    assert files.cat("b/two") == b"2"
    gcs.weather = Weather(latency=0.2)
    began = time.monotonic()
    files.cat("b/two")
    assert time.monotonic() - began >= 0.2
