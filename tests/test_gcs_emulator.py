"""The emulator speaks the protocol well enough for gcsfs, which was written against the real service."""

import os

import pytest
from gcs_emulator import CHUNK, Emulator, Fault

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


def test_gcsfs_gets_through_a_busy_service(gcs, files):
    files.pipe("b/name", b"content")
    gcs.faults.append(Fault("status", status=503, times=2))
    assert files.cat("b/name") == b"content"


def test_a_long_listing_comes_in_pages(gcs, files):
    for number in range(2500):
        gcs.put("b", f"many/{number:04}", b"")
    assert len(files.find("b/many")) == 2500
    assert len([path for method, path, _ in gcs.log if method == "GET"]) >= 3
