"""`jaxscale report`: one file, one line for what is wrong, and a server for this machine alone."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys

import pytest
from gcs_emulator import Emulator

from jaxscale.cli import report
from jaxscale.tools.reporting.serve import Pages

ROW = '{"step": 1, "loss": 3.0}\n'


@pytest.fixture
def run(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text(ROW)
    return tmp_path / "a"


def test_a_page_is_written_and_jax_is_not_imported(run, tmp_path):
    code = "import sys, jaxscale.cli as c; c.dispatch(sys.argv[1:]); print('jax' in sys.modules)"
    output = tmp_path / "page.html"
    command = [sys.executable, "-c", code, "report", f"--workdir={run}", f"--output={output}", "--price=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False" and done.stderr == ""
    assert output.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "--workdir must be given"),
        (["--workdir=RUN", "--workdir=RUN"], "set twice"),
        (["--workdir=RUN/nothing"], "does not exist"),
        (["--workdir="], "--workdir needs a value"),
        (["--workdir=RUN", "--price=cheap"], "dollars per chip hour"),
        (["--workdir=RUN", "--price=4,20"], "dollars per chip hour"),
        (["--workdir=RUN", "--price=nan"], "dollars per chip hour"),
        (["--workdir=RUN", "--serve=70000"], "must be a port"),
        (["--workdir=RUN", "--serve", "--output=x.html"], "--serve writes no file"),
        (["--workdir=RUN", "--output=RUN/no/x.html"], "its folder does not exist"),
        (["--workdir=RUN", "--config=x.py"], "settings of a run are read from its work folder"),
    ],
)
def test_what_is_wrong_is_one_line(run, flags, told):
    with pytest.raises(ValueError, match=told) as error:
        report.main([flag.replace("RUN", str(run)) for flag in flags])
    assert "\n" not in str(error.value)


def ask(port, path="/", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


@pytest.mark.slow
def test_the_server_shows_a_newer_page_answers_to_its_own_name_only_and_ends_with_ctrl_c(run):
    command = [sys.executable, "-m", "jaxscale.cli", "report", f"--workdir={run}", "--serve=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        port = int(process.stdout.readline().split("/")[2].split(":")[1])
        (status, page), (_, version) = ask(port), ask(port, "/version")
        assert status == 200 and f'"version":"{version}"' in page and "connect-src 'self'" in page
        assert ask(port, host="evil.example")[0] == ask(port, host=f"evil.example:{port}")[0] == 403
        assert ask(port, "/../../etc/passwd")[0] == ask(port, "/metrics.jsonl")[0] == 404
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 2, "loss": 1.25}) + "\n")
        newer = version
        for _ in range(100):
            if (newer := ask(port, "/version")[1]) != version:
                break
            signal.sigtimedwait([], 0.1)
        assert newer != version and "1.25" in ask(port)[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "evals.jsonl", "supervise-host2.jsonl"])
@pytest.mark.parametrize("remote", [False, True], ids=["disk", "bucket"])
def test_the_page_is_made_anew_when_any_of_its_files_grows(tmp_path, monkeypatch, name, remote):
    with Emulator() if remote else contextlib.nullcontext() as gcs:
        if remote:
            for variable, value in gcs.environment().items():
                monkeypatch.setenv(variable, value)
        put = lambda name, text: (
            gcs.put("bucket", f"run/{name}", text.encode()) if remote else (tmp_path / name).write_text(text)
        )
        workdir = "gs://bucket/run" if remote else str(tmp_path)
        put("metrics.jsonl", ROW)
        now = [0.0]
        pages = Pages(
            lambda version: f"{version}: {len(report.read_all([workdir])[0].rows)} rows", [workdir], lambda: now[0]
        )
        first = pages.page()
        now[0] += 1.0
        put(name, ROW + ROW.replace("1", "2"))
        assert pages.page() == first  # not looked at again so soon
        now[0] += 2.0
        assert pages.page() != first and pages.page().endswith("2 rows" if name == "metrics.jsonl" else "1 rows")


def test_the_last_line_says_where_the_page_lies(tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert report.main(["--workdir=run", "--output=a b.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path.as_uri()}/a%20b.html"
    assert report.main(["--workdir=run", "--card"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "card.md"
