"""An export sent to the Hub: at a server of this machine that answers as the Hub's HTTP interface does."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from hf_folders import FLOAT32, make_folder, read_folder

from jaxscale.cli import convert
from jaxscale.runtime.checkpoint.periodic_export import is_finished
from jaxscale.system.exits import Exit, Stop
from jaxscale.tools.interop import hub

TOKEN = "hf_" + "abcdefgh" * 4  # of the form that a real one has


class Hub(http.server.BaseHTTPRequestHandler):
    """Repositories in memory: create, preupload, LFS batch, upload and commit, as huggingface_hub asks for them."""

    protocol_version = "HTTP/1.1"

    def answer(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        state, path = self.server.state, self.path.partition("?")[0]
        state["asked"].append((self.command, path, self.headers.get("Authorization")))
        if state["refuse"]:
            return self.answer({"error": f"You are not allowed, {TOKEN}"}, 403)
        if path == "/api/repos/create":
            state["created"] = json.loads(body)
            return self.answer({"url": self.server.url + "/org/name", "id": "org/name"})
        if path.endswith("/preupload/main"):
            large = lambda file: "lfs" if file["path"].endswith(".safetensors") else "regular"
            files = json.loads(body)["files"]
            told = [{"path": f["path"], "uploadMode": large(f), "shouldIgnore": False, "oid": None} for f in files]
            return self.answer({"files": told})
        if path.endswith(".git/info/lfs/objects/batch"):
            upload = lambda oid: {"upload": {"href": f"{self.server.url}/lfs/{oid}", "header": {}}}
            objects = [o | {"actions": upload(o["oid"])} for o in json.loads(body)["objects"]]
            return self.answer({"transfer": "basic", "objects": objects})
        if path.startswith("/lfs/"):
            state["lfs"][path.removeprefix("/lfs/")] = body
            return self.answer({})
        if path.endswith("/commit/main"):
            state["commit"] = [json.loads(line) for line in body.splitlines()]
            url = f"{self.server.url}/org/name/commit/{'a' * 40}"
            return self.answer({"commitUrl": url, "commitOid": "a" * 40, "pullRequestUrl": None})
        return self.answer({"id": "org/name", "sha": "a" * 40, "siblings": []})

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    found.state = {"asked": [], "lfs": {}, "commit": [], "created": None, "refuse": False}
    found.url = f"http://127.0.0.1:{found.server_address[1]}"
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def push(server, tmp_path):
    """The process that exports and pushes: the package reads its address once, when it is imported."""
    make_folder(tmp_path / "hf", dtype=FLOAT32)
    assert convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"]) == 0
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_TOKEN": TOKEN, "HF_ENDPOINT": server.url}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [
        sys.executable,
        "-m",
        "jaxscale.cli",
        "convert",
        f"--workdir={tmp_path / 'run'}",
        f"--to={tmp_path / 'out'}",
    ]
    return subprocess.run([*command, "--push=org/name"], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.soak
def test_the_whole_folder_arrives_in_one_commit_and_the_token_stays_secret(server, tmp_path):
    done = push(server, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"pushed: {server.url}/org/name/commit/" in done.stdout
    created = server.state["created"]  # the package's releases say it in two ways
    assert created.get("visibility") == "private" or created.get("private") is True
    large = {line["value"]["path"]: line["value"]["oid"] for line in server.state["commit"] if line["key"] == "lfsFile"}
    small = {line["value"]["path"] for line in server.state["commit"] if line["key"] == "file"}
    assert set(large) == {"model.safetensors"} and "config.json" in small
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert large["model.safetensors"] == hashlib.sha256(content).hexdigest()
    assert server.state["lfs"][large["model.safetensors"]] == content and read_folder(tmp_path / "out")
    assert any(authorisation == f"Bearer {TOKEN}" for _, _, authorisation in server.state["asked"])
    for file in (path for folder in ("run", "out") for path in (tmp_path / folder).rglob("*") if path.is_file()):
        assert TOKEN.encode() not in file.read_bytes()
    assert TOKEN not in done.stdout + done.stderr


def test_a_hub_that_refuses_is_told_in_a_line_without_the_token(server, tmp_path, monkeypatch):
    for name, value in {"HF_TOKEN": TOKEN, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text("{}")
    server.state["refuse"] = True
    with pytest.raises(Stop, match="is complete, but the upload to org/name failed: .*; run the same") as caught:
        hub.push_folder(tmp_path, "org/name", "message")
    assert TOKEN not in str(caught.value) and "\n" not in str(caught.value) and caught.value.code == Exit.STORAGE


@pytest.mark.slow
def test_the_same_command_after_a_hub_that_refused_goes_on_with_the_push(server, tmp_path, monkeypatch, capsys):
    make_folder(tmp_path / "hf", dtype=FLOAT32)
    assert convert.main([f"--from={tmp_path / 'hf'}", f"--workdir={tmp_path / 'run'}"]) == 0
    for name, value in {"HF_TOKEN": TOKEN, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    server.state["refuse"] = True
    command = [f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"]
    for _ in range(2):
        with pytest.raises(Stop, match="out is complete, but the upload to org/name failed: .*; run the same command"):
            convert.main([*command, "--push=org/name"])
        assert (tmp_path / "out" / "config.json").exists() and not is_finished(tmp_path / "out")
    asked = len(server.state["asked"])
    assert asked >= 2  # the second command came as far as the Hub
    assert convert.main(command) == 0 and is_finished(tmp_path / "out")  # or it stays here
    assert "already converted" in capsys.readouterr().out and len(server.state["asked"]) == asked


def test_what_can_never_be_sent_is_refused_before_anything_is_converted(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    with pytest.raises(ValueError, match="a token with write access; set the environment variable HF_TOKEN"):
        hub.check_push("org/name", tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.check_push("org/name", tmp_path)
    for name in ("name", "../x", "org/name/more", "org/..", "org/a--b", "https://x/y", "org/na me"):
        with pytest.raises(ValueError, match="must be a Hugging Face Hub repository, written as OWNER/NAME"):
            hub.check_push(name, tmp_path)
    with pytest.raises(ValueError, match="--push requires a local folder, but gs://bucket/out is remote"):
        hub.check_push("org/name", "gs://bucket/out")
    monkeypatch.setenv("HF_ENDPOINT", "http://198.51.100.7")
    with pytest.raises(ValueError, match="would send the token unencrypted"):
        hub.check_push("org/name", tmp_path)
