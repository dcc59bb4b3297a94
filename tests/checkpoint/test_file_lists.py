"""The lists of a step's files: each file is looked at by one process, and requests do not grow as their product."""

import pytest
from gcs_emulator import Emulator
from twins import twins

from jaxscale.runtime.checkpoint import folders, verify
from jaxscale.system import paths

pytest.importorskip("gcsfs", reason="gcsfs is not installed")

WRITERS, FILES = 4, 3


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """(the emulator, a step in it that four processes have written)."""
    (tmp_path / "run").mkdir()
    for process in range(WRITERS):
        data = tmp_path / verify.DATA_FOLDER.format(process)
        data.mkdir(parents=True)
        for number in range(FILES):
            (data / f"{number:032x}").write_bytes(bytes([process, number]) * 50)
        verify.write_data_list(tmp_path, process)
    (tmp_path / "run" / "metadata").write_text("{}")
    verify.write_main_list(tmp_path, WRITERS)
    folders.mark_committed(tmp_path)
    with Emulator() as gcs:
        for name, value in gcs.environment().items():
            monkeypatch.setenv(name, value)
        for name in folders.files_under(tmp_path):
            gcs.put("bucket", f"10/{name}", (tmp_path / name).read_bytes())
        yield gcs, paths.as_path("gs://bucket/10")


def looked(folder, shares, **how):
    """What each of the processes finds."""
    return [list(verify.changed_files(folder, share, shares, **how)) for share in range(shares)]


def test_requests_do_not_grow_as_processes_times_files(listed):
    gcs, folder = listed
    files, counted = len(gcs.names("bucket")) - 1, {}  # all but the first list, which every process reads
    for shares in (1, 2, 4, 16):
        del gcs.log[:]
        assert looked(folder, shares) == [[]] * shares
        counted[shares] = len(gcs.log)
    for shares, requests in counted.items():
        assert requests == files + max(WRITERS, shares) + shares
    del gcs.log[:]
    looked(folder, 16, small=True)
    assert len(gcs.log) == files - WRITERS * FILES + 16


@pytest.mark.slow
@pytest.mark.fault("F33")
@pytest.mark.parametrize("shares", twins([1, 3, 16], 3))
def test_each_damaged_or_missing_file_is_named_by_one_process(listed, shares):
    gcs, folder = listed
    rest = verify.MAIN_LIST
    for name in gcs.names("bucket"):
        original = gcs.get("bucket", name)
        gcs.put("bucket", name, original[:-2] + b"!" + original[-1:])
        found = [file for process in looked(folder, shares) for file, _ in process]
        assert name.removeprefix("10/") in found
        assert len(found) == 1 or found.count(name.removeprefix("10/")) == len(found)  # of a list: by who reads it too
        del gcs.objects["bucket", name]
        found = [file for process in looked(folder, shares) for file, _ in process]
        assert name.removeprefix("10/") in found and (name.endswith(rest) or set(found) == {name.removeprefix("10/")})
        gcs.put("bucket", name, original)
    assert looked(folder, shares) == [[]] * shares
