"""Objects that take each other's place only in a known generation, refusals that name a right, and no way abroad."""

import dataclasses
import email.message
import http.server
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from gcs_emulator import Emulator, Fault
from gcs_weather import Weather

from jaxscale.system import paths
from jaxscale.system.bucket import age, check_size
from jaxscale.system.bucket_errors import Changed, Forbidden, Transient, missing_permission
from jaxscale.system.exits import BadInput
from jaxscale.system.storage import CLIENT_VARIABLES, check_environment, open_bucket

URL = "gs://bucket/run/lock"


@pytest.fixture
def gcs(monkeypatch):
    with Emulator() as emulator:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.endpoint)
        yield emulator


def test_an_object_is_replaced_and_deleted_only_in_the_generation_that_was_seen(gcs):
    door = open_bucket(writing=True)
    assert door.look(URL) is None
    first = door.put(URL, b"one", 0)
    with pytest.raises(Changed):
        door.put(URL, b"two", 0)
    second = door.put(URL, b"two", first)
    assert door.look(URL)[:2] == (b"two", second)
    for change in (lambda: door.put(URL, b"three", first), lambda: door.delete(URL, first)):
        with pytest.raises(Changed):
            change()
    door.delete(URL, second)
    assert door.look(URL) is None
    with pytest.raises(FileNotFoundError):
        door.delete(URL, second)


def test_the_age_of_an_object_is_what_the_service_says_it_is(monkeypatch):
    now = [1e9]
    with Emulator(clock=lambda: now[0]) as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        gcs.put("bucket", "run/lock", b"")
        now[0] += 77
        assert open_bucket().look(URL).age == pytest.approx(77, abs=1)
    assert age("nonsense", "") == 0.0 and age("2026-01-01T00:00:00Z", "Thu, 01 Jan 2025 00:00:00 GMT") == 0.0


@pytest.mark.fault("F17")
def test_a_bit_that_flips_on_its_way_to_the_service_is_noticed_and_the_object_written_again(gcs, monkeypatch):
    monkeypatch.setattr("jaxscale.system.bucket.FIRST_WAIT", 0.001)
    door = open_bucket(writing=True)
    gcs.faults.append(Fault("flip", method="POST"))
    with pytest.raises(Transient, match="differs from the content that was sent"):
        door.put(URL, b"content")
    gcs.faults.append(Fault("flip", method="POST"))
    door.patiently(lambda: door.put(URL, b"content"), URL)
    assert door.read(URL) == b"content"


@pytest.mark.parametrize(("name", "fault"), [
    ("look", Fault("reset", media=True, after=3)), ("read", Fault("reset", media=True, after=3)),
    ("look", Fault("status", media=True, status=404)),  # replaced between the two questions of a look
])  # fmt: skip
def test_an_answer_that_breaks_off_or_comes_too_late_is_asked_for_again(gcs, monkeypatch, name, fault):
    monkeypatch.setattr("jaxscale.system.bucket.FIRST_WAIT", 0.001)
    stored, door = gcs.put("bucket", "run/lock", b"content"), open_bucket()
    gcs.faults.append(dataclasses.replace(fault))
    found = getattr(door, name)(URL)
    assert found == b"content" if name == "read" else found[:2] == (b"content", stored.generation)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_one_try_says_that_the_next_may_do_better(gcs, status):
    gcs.faults.append(Fault("status", method="POST", status=status, retry_after="7"))
    with pytest.raises(Transient, match=str(status)) as fault:
        open_bucket(writing=True).put(URL, b"")
    assert fault.value.wait == 7
    gcs.weather = Weather(down=True)
    with pytest.raises(Transient):
        open_bucket(writing=True).put(URL, b"")


def test_an_answer_that_is_none_of_the_services_is_told(gcs):
    class Page(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>sign in first")

        def log_message(self, *message):
            """Is quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as proxy:
        threading.Thread(target=proxy.handle_request, daemon=True).start()
        door = dataclasses.replace(open_bucket(writing=True), endpoint=f"http://127.0.0.1:{proxy.server_port}")
        with pytest.raises(Transient, match="the response is not JSON; check for a proxy"):
            door.put(URL, b"")


@pytest.mark.parametrize("told", [{}, {"Content-Range": "bytes 0-4/*"}])
def test_an_answer_without_a_size_is_not_called_another_size(told):
    headers = email.message.Message()
    for name, value in told.items():
        headers[name] = value
    with pytest.raises(BadInput, match="does not include the object's size; bypass any proxy"):
        check_size(headers, URL, 5)


def test_of_a_file_that_grows_so_much_is_sent_as_was_announced(gcs, tmp_path):
    class Older(type(tmp_path)):
        def stat(self, **how):
            return os.stat(tmp_path / "short")

    (tmp_path / "short").write_bytes(b"12345")
    (tmp_path / "events").write_bytes(b"12345678")
    open_bucket(writing=True).upload(Older(tmp_path / "events"), URL)
    assert open_bucket().read(URL) == b"12345"


@pytest.mark.fault("F18")
def test_a_refusal_names_the_right_that_the_service_names(gcs):
    gcs.weather = Weather(lacks={"storage.objects.delete"})
    assert open_bucket(writing=True).put(URL, b"", 0)
    with pytest.raises(
        Forbidden, match=r"cannot be written: this machine has no permission \(403\).* needs storage.objects.delete, "
    ):
        open_bucket(writing=True).put(URL, b"")
    assert missing_permission("PERMISSION_DENIED: at https://storage.googleapis.com/storage/v1") is None
    assert missing_permission("'storage.objects.list' denied on storage.googleapis.com") == "storage.objects.list"


@pytest.mark.fault("H11")
@pytest.mark.parametrize("variable", ["TENSORSTORE_GCS_HTTP_URL", "STORAGE_EMULATOR_HOST"])
@pytest.mark.parametrize(
    "value",
    ["http://203.0.113.5:9023", "https://storage.example", "attacker:80", "http://127.0.0.1.example", "http://[2001:db8::1]",
     "http://user@127.0.0.1@203.0.113.5/", "//x", "http://"],
)  # fmt: skip
def test_an_environment_that_would_send_credentials_to_another_machine_is_refused(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    for use in (lambda: paths.as_path("gs://bucket/run"), open_bucket, lambda: paths.make_run_dir("gs://bucket/run")):
        with pytest.raises(
            ValueError, match=rf"{variable}=.* would send this machine's credentials .*is allowed; unset"
        ):
            use()


@pytest.mark.fault("H11")
@pytest.mark.parametrize(
    "value", ["http://127.0.0.1:1", "localhost:9023", "http://[::1]:80", "https://storage.googleapis.com"]
)
def test_an_emulator_on_this_machine_and_google_itself_are_fine(value, monkeypatch):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", value)
    check_environment()


@pytest.mark.fault("H11")
def test_training_refuses_before_anything_is_sent(tmp_path):
    env = os.environ | {"TENSORSTORE_GCS_HTTP_URL": "http://203.0.113.5:9023"}
    program = (
        "from jaxscale.runtime.checkpoint.lock import RunLock\nfrom jaxscale.system.exits import run_and_exit\n"
        "run_and_exit(lambda argv: RunLock('gs://bucket/run').__enter__())"
    )
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "203.0.113.5" in done.stderr


def test_what_our_clients_read_from_the_environment_is_set_for_the_user_and_not_over_him(monkeypatch):
    for name in CLIENT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EPATH_USE_TF", "true")
    check_environment()
    assert os.environ["EPATH_USE_TF"] == "true" and os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] == "false"


def test_a_path_from_the_root_stays_in_its_bucket(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert os.fspath(paths.absolute("gs://bucket/run")) == "gs://bucket/run"
    assert paths.absolute("run") == pathlib.Path(tmp_path / "run")
