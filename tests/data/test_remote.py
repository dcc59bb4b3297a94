"""Shards in a bucket: whatever the network, the disk and other processes do, the tokens are the same or it is told."""

import hashlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from gcs_emulator import BIG, Fault

from jaxscale.runtime.data.remote import ShardCache
from jaxscale.system.bucket import Clock
from jaxscale.system.storage import open_bucket


@pytest.fixture
def cache(tmp_path, gcs, clock):
    cache = ShardCache(tmp_path / "cache", 1_000_000, bucket=open_bucket(clock=clock.clock), say=lambda line: None)
    yield cache
    cache.close()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def fetch(cache, content=BIG, name="set/big.bin"):
    return cache.fetch(f"gs://b/{name}", len(content), sha256(content))


def bytes_in(folder):
    return sum(file.stat().st_size for file in (folder / "objects").rglob("*") if file.is_file())


def test_a_file_is_fetched_once_and_then_found(cache, gcs):
    path = fetch(cache)
    assert path.read_bytes() == BIG and path.name == "big.bin"
    assert fetch(cache) == path and len(gcs.requests("set/big.bin")) == 1
    other = ShardCache(cache.folder, cache.max_bytes)
    assert fetch(other) == path and len(gcs.requests("set/big.bin")) == 1
    other.close()


def instead(make):
    def damage(path):
        path.unlink()
        make(path)

    return damage


@pytest.mark.fault("F38")
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(bytes(len(BIG))),
        lambda path: os.truncate(path, 10),
        instead(lambda path: path.mkdir()),
        instead(os.mkfifo),
        instead(lambda path: path.symlink_to("nowhere")),
        instead(lambda path: (path.parent / ".part-x").touch()),
        instead(lambda path: (path.parents[1] / "stray").touch()),
    ],
)
def test_a_damaged_copy_is_fetched_again(cache, gcs, damage):
    path = fetch(cache)
    cache.close()
    damage(path)
    assert fetch(ShardCache(cache.folder, cache.max_bytes, say=lambda line: None)).read_bytes() == BIG


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_busy_service_is_asked_again_after_growing_waits(cache, gcs, clock, status):
    gcs.faults.append(Fault("status", status=status, times=7))
    assert fetch(cache).read_bytes() == BIG
    assert clock.slept == [0.5, 1, 2, 4, 8, 16, 32]


def test_a_service_that_stays_away_is_told(cache, gcs, clock):
    gcs.faults.append(Fault("status", status=503, times=100))
    with pytest.raises(ValueError, match="gs://b/set/big.bin: 9 consecutive attempts failed, the last with: 503"):
        fetch(cache)
    assert len(clock.slept) == 8


@pytest.mark.parametrize(
    ("told", "waited"),
    [("7", 7), ("0", 0.5), ("9999", 300), ("Thu, 01 Jan 1970 00:17:00 GMT", 20), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.5),
     ("soon", 0.5)],
)  # fmt: skip
def test_the_wait_that_the_service_asks_for_is_kept(cache, gcs, clock, told, waited):
    gcs.faults.append(Fault("status", status=429, retry_after=told))
    assert fetch(cache).read_bytes() == BIG
    assert clock.slept == [waited]


def test_waits_are_spread_by_chance(gcs):
    slept = []
    bucket = open_bucket(clock=Clock(sleep=slept.append, chance=random.Random(0).random))
    gcs.faults.append(Fault("status", times=5))
    bucket.read("gs://b/set/big.bin")
    assert all(longest / 2 <= wait <= longest for wait, longest in zip(slept, [0.5, 1, 2, 4, 8])) and len(slept) == 5
    assert slept != [0.5, 1, 2, 4, 8]


def test_a_broken_connection_goes_on_where_it_stopped(cache, gcs, clock):
    for after in (0, 100_000, 150_000):
        gcs.faults.append(Fault("reset", after=after))
    assert fetch(cache).read_bytes() == BIG
    ranges = gcs.requests("set/big.bin")
    starts = [int(text.removeprefix("bytes=").rstrip("-") or 0) for text in ranges]
    assert len(starts) == 4 and starts == sorted(starts) and starts[-1] == 250_000
    assert clock.slept[2] == 0.5  # progress was made in between, so that the waits begin anew


def test_a_slow_body_arrives_whole(cache, gcs):
    gcs.faults.append(Fault("slow", seconds=0.01))
    assert fetch(cache).read_bytes() == BIG


def test_a_silent_connection_is_given_up_and_made_anew(tmp_path, gcs, clock):
    import dataclasses

    bucket = dataclasses.replace(open_bucket(clock=clock.clock), silence=0.3)
    cache = ShardCache(tmp_path / "cache", 1_000_000, bucket=bucket)
    gcs.faults.append(Fault("slow", seconds=1.0))
    assert fetch(cache).read_bytes() == BIG and len(clock.slept) == 1
    cache.close()


def test_a_service_that_knows_no_ranges_is_read_from_the_start(cache, gcs):
    gcs.faults += [Fault("reset", after=100_000), Fault("ignore_range")]
    assert fetch(cache).read_bytes() == BIG
    assert gcs.requests("set/big.bin") == ["", "bytes=100000-"]


@pytest.mark.fault("H10")
def test_a_flipped_bit_is_seen_and_the_file_fetched_anew(cache, gcs):
    gcs.faults.append(Fault("flip", after=77_777))
    assert fetch(cache).read_bytes() == BIG
    assert gcs.requests("set/big.bin") == ["", ""]


@pytest.mark.fault("H10")
def test_a_file_that_always_arrives_changed_is_refused(cache, gcs):
    gcs.put("b", "set/big.bin", BIG[:-1] + b"\0" if BIG[-1] else BIG[:-1] + b"\1")
    with pytest.raises(
        ValueError, match=r"gs://b/set/big\.bin does not match the sha256 in its manifest after 3 downloads"
    ):
        fetch(cache)
    assert not list(cache.folder.rglob("big.bin"))


@pytest.mark.parametrize(("change", "told"), [(BIG + b"x", "300001 bytes, not 300000"), (BIG[:-1], "has 299999")])
def test_a_file_of_another_size_is_told_at_once(cache, gcs, clock, change, told):
    gcs.put("b", "set/big.bin", change)
    with pytest.raises(ValueError, match=told):
        fetch(cache)
    assert not clock.slept


@pytest.mark.parametrize(
    ("status", "told"),
    [(403, "cannot be read: this machine has no permission .*Storage Object Viewer"), (401, "cannot be read"),
     (404, "not exist"), (400, "the service returned 400")],
)  # fmt: skip
def test_what_no_second_try_would_change_is_told_at_once(cache, gcs, clock, status, told):
    gcs.faults.append(Fault("status", status=status))
    with pytest.raises(ValueError, match=f"gs://b/set/big.bin .*{told}"):
        fetch(cache)
    assert not clock.slept
    assert fetch(cache).read_bytes() == BIG  # once it is put right


def test_a_name_that_needs_quoting_is_found(cache, gcs):
    gcs.put("b", "set/a b#c%2F?d.bin", b"abc")
    assert fetch(cache, b"abc", "set/a b#c%2F?d.bin").read_bytes() == b"abc"


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "gone"])
def test_a_local_copy_that_was_damaged_is_found_and_fetched_again(cache, gcs, damage):
    path = fetch(cache)
    cache.close()
    changed = {"flipped": bytes([BIG[0] ^ 1]) + BIG[1:], "cut": BIG[:-1], "longer": BIG + b"x"}
    path.unlink() if damage == "gone" else path.write_bytes(changed[damage])
    assert fetch(cache).read_bytes() == BIG
    assert len(gcs.requests("set/big.bin")) == 2


def put_many(gcs, count, size):
    contents = [bytes([i]) * size for i in range(count)]
    for i, content in enumerate(contents):
        gcs.put("b", f"set/{i}.bin", content)
    return contents


def test_the_least_recently_used_goes_first_and_the_bound_holds(cache, gcs):
    contents = put_many(gcs, 6, 300_000)
    for i in (0, 1, 2, 0, 3, 4):
        fetch(cache, contents[i], f"set/{i}.bin")
        cache.release(sha256(contents[i]))
        assert bytes_in(cache.folder) <= cache.max_bytes
        time.sleep(0.01)  # file times tell who was used last
    left = {file.name for file in (cache.folder / "objects").rglob("*.bin")}
    assert left == {"0.bin", "3.bin", "4.bin"}


def test_what_is_in_use_stays_and_a_full_cache_is_told(cache, gcs):
    contents = put_many(gcs, 4, 300_000)
    paths = [fetch(cache, content, f"set/{i}.bin") for i, content in enumerate(contents[:3])]
    other = ShardCache(cache.folder, cache.max_bytes)
    with pytest.raises(ValueError, match="no space for a file of 300,000 bytes, .* are in use; raise data.cache"):
        fetch(other, contents[3], "set/3.bin")
    assert all(path.exists() for path in paths)
    cache.release(sha256(contents[1]))
    fetch(other, contents[3], "set/3.bin")
    assert [path.exists() for path in paths] == [True, False, True]
    other.close()


def test_a_file_larger_than_the_cache_is_told(cache, gcs):
    gcs.put("b", "set/big.bin", BIG * 4)
    with pytest.raises(ValueError, match="raise data.cache_bytes by at least 200,000"):
        fetch(cache, BIG * 4)


def test_more_shards_than_fit_are_mapped_one_after_the_other(cache, gcs):
    contents = put_many(gcs, 5, 400_000)
    ids = [cache.ids(f"gs://b/set/{i}.bin", 400_000, sha256(c), "<u2") for i, c in enumerate(contents)]
    kept = []
    for i in [0, 1, 0, 2, 0, 3, 4, 0, 1]:
        kept.append(ids[i][10:12])
        assert kept[-1].tolist() == [i * 257, i * 257]
        assert bytes_in(cache.folder) <= cache.max_bytes
    assert [part[0] // 257 for part in kept] == [0, 1, 0, 2, 0, 3, 4, 0, 1]  # what was handed out stays readable
    assert len(gcs.requests("set/0.bin")) == 2 and len(ids[0]) == 200_000


def test_many_threads_that_ask_for_one_file_fetch_it_once(cache, gcs):
    gcs.faults.append(Fault("slow", seconds=0.01))
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(cache))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1 and len(paths) == 8 and len(gcs.requests("set/big.bin")) == 1


# Fetches a file and prints its sha256, then waits until it is told to end.
FETCHER = """
import hashlib, pathlib, sys
from jaxscale.runtime.data.remote import ShardCache
folder, name, size, sha256 = sys.argv[1:]
print("begun", flush=True)
cache = ShardCache(pathlib.Path(folder), 1_000_000, say=lambda line: None)
path = cache.fetch(f"gs://b/{name}", int(size), sha256)
print(hashlib.sha256(path.read_bytes()).hexdigest(), flush=True)
sys.stdin.readline()
"""


def start_fetcher(folder, content=BIG, name="set/big.bin"):
    return subprocess.Popen(
        [sys.executable, "-c", FETCHER, str(folder), name, str(len(content)), sha256(content)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip


def test_two_processes_that_ask_for_one_file_fetch_it_once(tmp_path, gcs):
    gcs.faults.append(Fault("slow", seconds=0.02))
    fetchers = [start_fetcher(tmp_path / "cache") for _ in range(2)]
    outputs = [fetcher.communicate("end\n")[0].split() for fetcher in fetchers]
    assert outputs == [["begun", sha256(BIG)]] * 2
    assert len(gcs.requests("set/big.bin")) == 1


def test_what_another_process_uses_stays_until_it_is_killed(cache, gcs):
    contents = put_many(gcs, 2, 600_000)
    fetcher = start_fetcher(cache.folder, contents[0], "set/0.bin")
    assert [fetcher.stdout.readline().strip() for _ in range(2)] == ["begun", sha256(contents[0])]
    with pytest.raises(ValueError, match="no space"):
        fetch(cache, contents[1], "set/1.bin")
    fetcher.send_signal(signal.SIGKILL)
    fetcher.communicate()
    fetch(cache, contents[1], "set/1.bin")
    assert {file.name for file in (cache.folder / "objects").rglob("*.bin")} == {"1.bin"}
    assert len(list((cache.folder / "users").iterdir())) == 1


def test_what_another_process_is_fetching_has_its_room_set_aside(cache, gcs):
    contents = put_many(gcs, 2, 600_000)
    gcs.faults.append(Fault("slow", path="0.bin", seconds=0.1))
    fetcher = start_fetcher(cache.folder, contents[0], "set/0.bin")
    while not list(cache.folder.glob("objects/*/.part-600000")):
        time.sleep(0.01)
    with pytest.raises(ValueError, match="no space for a file of 600,000 bytes"):
        fetch(cache, contents[1], "set/1.bin")
    fetcher.send_signal(signal.SIGKILL)
    fetcher.communicate()
    fetch(cache, contents[1], "set/1.bin")  # what the killed one had set aside is free
    assert len(list((cache.folder / "objects").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_told(tmp_path, gcs):
    (tmp_path / "file").write_text("in the way")
    cache = ShardCache(tmp_path / "file" / "cache", 1_000_000)
    with pytest.raises(ValueError, match="the cache .*file/cache cannot be written: .*set data.cache_dir"):
        fetch(cache)


@pytest.mark.slow
def test_a_download_that_was_killed_at_any_moment_goes_on(tmp_path, gcs):
    """kill -9 in the middle, several times: the next process continues, and the content is the same."""
    chance, gcs.faults = random.Random(1), [Fault("slow", seconds=0.03, times=100)]
    for _ in range(4):
        fetcher = start_fetcher(tmp_path / "cache")
        assert fetcher.stdout.readline() == "begun\n"
        time.sleep(chance.uniform(0, 0.3))
        fetcher.send_signal(signal.SIGKILL)
        fetcher.communicate()
    gcs.faults.clear()
    fetcher = start_fetcher(tmp_path / "cache")
    assert fetcher.communicate("end\n")[0].split() == ["begun", sha256(BIG)]
    starts = [int(text.removeprefix("bytes=").rstrip("-") or 0) for text in gcs.requests("set/big.bin")]
    assert starts == sorted(starts) and starts[-1] > 0, "nothing of the killed downloads was used"
    assert [file.name for file in (tmp_path / "cache" / "objects").rglob("*") if file.is_file()] == ["big.bin"]


@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")  # jax, if another test has loaded it
def test_a_forked_process_holds_its_own_files(cache, gcs):
    contents = put_many(gcs, 2, 600_000)
    fetch(cache, contents[0], "set/0.bin")
    context = multiprocessing.get_context("fork")

    def fetch_and_release():
        fetch(cache, contents[0], "set/0.bin")
        cache.release(sha256(contents[0]))

    asked = context.Process(target=fetch_and_release)
    asked.start()
    asked.join()
    assert asked.exitcode == 0
    with pytest.raises(ValueError, match="no space"):  # the child's end has not let go of what the parent uses
        fetch(cache, contents[1], "set/1.bin")
