"""A repository of the Hub comes in by its name: asked of a server of this machine that answers as the Hub does."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from hf_folders import FLOAT32, make_folder
from no_packages import no_distribution

from jaxscale.cli import convert
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import hub

SHA = "a1" * 20
TOKEN = "hf_" + "abcdefgh" * 4  # of the form that a real one has


class Repository(http.server.BaseHTTPRequestHandler):
    """org/name with the files of a folder, as snapshot_download asks for them."""

    protocol_version = "HTTP/1.1"

    def send(self, status, content, kind="application/json", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        state, path = self.server.state, self.path.partition("?")[0]
        state["asked"].append((path, self.headers.get("Authorization")))
        names = sorted(file.name for file in state["folder"].iterdir())
        api, _, rest = path.partition("/revision/")
        if "private" in path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.send(401, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if path.startswith("/api/models/org/") and "/tree/" in path:
            sized = lambda name: {"type": "file", "path": name, "oid": "b" * 40, "size": self.content(name)[0]}
            return self.send(200, json.dumps([sized(name) for name in names]).encode())
        if path.startswith("/api/models/org/"):
            if rest not in ("", "main", "v1", SHA):
                told = dict(X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
                return self.send(404, b"{}", **told)
            told = {"id": api.removeprefix("/api/models/"), "sha": SHA, "siblings": [{"rfilename": n} for n in names]}
            return self.send(200, json.dumps(told).encode())
        name = path.rpartition("/")[2]
        if f"/resolve/{SHA}/" not in path or name not in names:
            return self.send(404, b"{}", X_Error_Code="EntryNotFound")
        size, content = self.content(name)
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self.send(200, content, "application/octet-stream", ETag=etag, X_Repo_Commit=SHA, X_Linked_Size=str(size))

    def content(self, name):
        content = (self.server.state["folder"] / name).read_bytes()
        return len(content), content

    do_HEAD = do_GET

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(tmp_path):
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Repository)
    make_folder(tmp_path / "repo", dtype=FLOAT32, files=2)
    (tmp_path / "repo" / "pytorch_model.bin").write_bytes(b"pickled")
    (tmp_path / "repo" / "consolidated.safetensors").write_bytes(b"the same again")
    index = tmp_path / "repo" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of-00002", "part.1"))  # any name that an index has
    (tmp_path / "repo" / "model-00001-of-00002.safetensors").rename(tmp_path / "repo" / "part.1.safetensors")
    (tmp_path / "repo" / "modeling_mine.py").write_text("raise SystemExit")
    found.state = {"asked": [], "folder": tmp_path / "repo"}
    found.url = f"http://127.0.0.1:{found.server_address[1]}"
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def bring_in(server, tmp_path, *flags, **more):
    """The process that fetches and converts: the package reads its address once, when it is imported."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_ENDPOINT": server.url}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"} | more
    command = [sys.executable, "-m", "jaxscale.cli", "convert", f"--workdir={tmp_path / 'run'}", *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)


@pytest.mark.slow
def test_a_repository_comes_in_by_its_name_or_address_and_only_what_is_read_is_fetched(server, tmp_path):
    done = bring_in(server, tmp_path, "--from=https://huggingface.co/org/name", "--revision=v1")
    assert done.returncode == 0, done.stderr
    asked = {path.rpartition("/")[2] for path, _ in server.state["asked"] if "/resolve/" in path}
    weights = {"part.1.safetensors", "model-00002-of-00002.safetensors"}
    assert asked == {"config.json", "model.safetensors.index.json", *weights}
    assert not any(token for _, token in server.state["asked"])
    made = json.loads((tmp_path / "run" / "config.json").read_text())["converted"]
    assert (made["from"], made["revision"], made["model_type"]) == ("org/name", SHA, "llama")


@pytest.mark.soak
def test_what_the_hub_does_not_give_is_told_in_a_line_without_the_token(server, tmp_path):
    done = bring_in(server, tmp_path, "--from=org/private")
    assert (
        done.returncode == 2
        and "--from=org/private does not exist on the Hub, or HF_TOKEN grants no access" in done.stderr
    )
    done = bring_in(server, tmp_path, "--from=org/name", "--revision=none", HF_TOKEN=TOKEN)
    assert done.returncode == 2 and "org/name at none does not exist on the Hub" in done.stderr
    assert TOKEN not in done.stderr and "Traceback" not in done.stderr
    done = bring_in(server, tmp_path, "--from=hf://org/private", HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    server.shutdown()
    server.server_close()
    done = bring_in(server, tmp_path, "--from=org/other", HF_TOKEN=TOKEN)
    assert (
        done.returncode == 14 and "--from=org/other: download failed" in done.stderr and "Traceback" not in done.stderr
    )


def test_what_names_a_repository_and_what_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    named = {
        "org/name": None,
        "https://huggingface.co/org/name": None,
        "hf://org/name": None,
        "https://hf.co/org/name/": None,
    }
    named |= {"https://huggingface.co/org/name/tree/v1": "v1"}
    for name, revision in named.items():
        assert hub.repository(name) == ("org/name", revision)
    for path in ("runs/name", "name", "./org/name", "/org/name", "org/name/more", "gs://org/name", "s3://org/name"):
        assert hub.repository(path) is None
    with pytest.raises(BadInput, match="--revision=v1 applies to the Hub, but --from=runs/name is a path"):
        convert.main(["--from=runs/name", "--workdir=run", "--revision=v1"])


def test_without_the_package_and_with_an_open_line_it_is_refused(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://198.51.100.7")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(BadInput, match="would send the token unencrypted"):
        hub.fetch("org/name", None, "--from")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr("importlib.metadata.distribution", no_distribution)
    with pytest.raises(BadInput, match=r"--from=org/name: huggingface_hub .* pip install 'jaxscale\[hub\]'"):
        hub.fetch("org/name", None, "--from")
