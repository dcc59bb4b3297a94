"""launch/tpu_vm with a stand-in for gcloud: real worker.sh processes, and each state a queued resource can have."""

import os
import shlex
import shutil
import signal
import subprocess
import time

import pytest
from scripts import LAUNCH, ROOT, shell

SLICE = ("--name=seven", "--zone=z", "--accelerator=v5p-16")
TRAINING = ("--", "--config=configs/7b.py", "--config.data.files=a b")

soak = lambda *case: pytest.param(*case, marks=pytest.mark.soak)
IN_A_CHECKOUT = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="what is copied is a commit: needs a git checkout"
)

# Keeps the state of the request in a file, moves it on as create and delete do, and runs what ssh is told to run here.
GCLOUD = """#!/usr/bin/env bash
set -euo pipefail
echo "$*" >>"$CLOUD/calls"
case "$3 $4" in
  "queued-resources list")
    [[ ! -e $CLOUD/state ]] || printf 'other ACTIVE\\nseven %s\\n' "$(cat "$CLOUD/state")" ;;
  "queued-resources create") [[ ! -e $CLOUD/state ]] && echo PROVISIONING >"$CLOUD/state"
    (sleep 0.3; echo "${BECOMES:-ACTIVE}" >"$CLOUD/state") >/dev/null 2>&1 & ;;
  "queued-resources delete") rm "$CLOUD/state"; rm -rf "$CLOUD/home" ;;
  "tpu-vm scp") mkdir -p "$CLOUD/home"; cp "$5" "$CLOUD/home/${6#*:}" ;;
  "tpu-vm ssh")
    [[ ! -e $CLOUD/unreachable ]] || { echo "no route to host" >&2; exit 255; }
    [[ "$*" =~ --command=(.*)$ ]] && cd "$CLOUD/home" && HOME="$CLOUD/home" bash -c "${BASH_REMATCH[1]}" ;;
  *) exit 64 ;;
esac
"""
# In the place of a worker's Python: keeps what it was told, and leaves with the next of the codes in a file.
PYTHON = """#!/usr/bin/env bash
[[ $2 == pip ]] && { printf '%s\\n' "$*" >>"$CLOUD/installs"; exit 0; }
printf '<%s>' "$@" >>"$CLOUD/trainings"; echo >>"$CLOUD/trainings"
trap 'sleep 0.2; echo saved; exit 10' TERM
code=$(head -n 1 "$CLOUD/codes"); sed -i 1d "$CLOUD/codes"
[[ $code == forever ]] && { sleep 60 & wait; }
exit "$code"
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A folder that stands for the cloud: state, calls, codes, and home/ of the only worker."""
    for name, text in (
        ("gcloud", GCLOUD),
        ("python3", PYTHON),
        ("sleep", '#!/bin/sh\ncase $1 in 1 | 10) set 0.05 ;; esac\nexec /bin/sleep "$1"\n'),
    ):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CLOUD", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "bin"))
    monkeypatch.setenv("JAXSCALE_POLL_SECONDS", "0.2")
    monkeypatch.delenv("JAXSCALE_HOME", raising=False)
    yield tmp_path
    pid = tmp_path / "home" / "jaxscale" / "pid"
    if pid.exists():
        try:
            os.killpg(int(pid.read_text()), signal.SIGKILL)  # the supervisor leads a group of its own
        except ProcessLookupError:
            pass


def prepare_worker(cloud, *codes):
    """A slice that is there and whose worker has a Python, with the codes that trainings on it will end with."""
    venv = cloud / "home" / "jaxscale" / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv.parent.parent / "code").mkdir()
    (venv / "python").symlink_to(cloud / "bin" / "python3")
    (cloud / "home" / "jaxscale-worker.sh").write_text((LAUNCH / "tpu_vm" / "worker.sh").read_text())
    (cloud / "codes").write_text("".join(f"{code}\n" for code in codes))
    (cloud / "state").write_text("ACTIVE\n")


def tpu_vm(*arguments):
    done = shell("tpu_vm/tpu_vm.sh", *arguments)
    return done.returncode, done.stdout, done.stderr


def worker(cloud, *arguments):
    """What worker.sh says on the worker."""
    done = subprocess.run(["bash", cloud / "home" / "jaxscale-worker.sh", *arguments], capture_output=True, text=True,
                          env=os.environ | {"HOME": str(cloud / "home")}, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for_status(cloud, status):
    end = time.monotonic() + 60
    while (found := worker(cloud, "status")) != status:
        assert time.monotonic() < end, (found, (cloud / "home" / "jaxscale" / "log").read_text())
        time.sleep(0.05)


def trainings(cloud):
    return (cloud / "trainings").read_text().splitlines()


def verbs(cloud):
    """What gcloud was asked for, without the questions after the state."""
    calls = [line.split()[2:4] for line in (cloud / "calls").read_text().splitlines()]
    return [call[1] for call in calls if call[1] != "list"]


@pytest.mark.slow
def test_a_training_runs_in_the_background_with_the_arguments_as_typed(cloud):
    prepare_worker(cloud, "forever")
    assert tpu_vm("run", *SLICE, *TRAINING)[0] == 0
    wait_for_status(cloud, "running")
    assert "already running" in tpu_vm("run", *SLICE, *TRAINING)[1]
    assert "exit 10" in tpu_vm("stop", *SLICE)[1]  # which waits until it has saved
    assert "saved" in (cloud / "home" / "jaxscale" / "log").read_text()
    assert trainings(cloud) == ["<-m><jaxscale.main><--config=configs/7b.py><--config.data.files=a b>"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "end"),
    [(["13", "137", "0"], 0), soak(["14", "15", "13", "13", "0"], 13), (["2", "0"], 2), soak(["10", "0"], 10)],
)
def test_a_worker_tries_again_what_may_be_mended_three_times(cloud, codes, end):
    prepare_worker(cloud, *codes)
    worker(cloud, "start", "--config=c")
    wait_for_status(cloud, f"exit {end}")
    assert len(trainings(cloud)) == {0: 3, 13: 4, 2: 1, 10: 1}[end]


@pytest.mark.slow
@IN_A_CHECKOUT
def test_the_last_commit_is_copied_and_installed_with_its_extras(cloud):
    prepare_worker(cloud)
    code, _, errors = tpu_vm("install", *SLICE)
    assert code == 0, errors
    home = cloud / "home" / "jaxscale"
    assert (home / "code" / "pyproject.toml").exists() and (home / "code" / "jaxscale" / "main.py").exists()
    assert (cloud / "installs").read_text().strip() == f"-m pip install --quiet -e {home}/code[tpu,gcs]"
    assert not list((cloud / "bin").glob("*.tar.gz"))


def test_wait_ends_when_the_slice_is_there_and_fails_when_it_cannot_come(cloud, monkeypatch):
    assert tpu_vm("create", *SLICE)[0] == 0
    code, said, _ = tpu_vm("wait", *SLICE)
    assert code == 0 and said.splitlines()[-1] == "seven: ACTIVE"
    (cloud / "state").write_text("FAILED\n")
    code, _, errors = tpu_vm("wait", *SLICE)
    assert code == 1 and "is FAILED and will not become ACTIVE" in errors


@pytest.mark.slow
@IN_A_CHECKOUT
@pytest.mark.parametrize(("state", "before"), [("SUSPENDED", ["delete"]), soak("FAILED", ["delete"]), soak("GONE", [])])
def test_after_a_preemption_the_slice_is_asked_for_again_and_the_run_goes_on(cloud, state, before):
    prepare_worker(cloud, "0")
    (cloud / "state").write_text(f"{state}\n")
    if state == "GONE":
        (cloud / "state").unlink()
        shutil.rmtree(cloud / "home")
    make_python_after_scp(cloud)
    code, said, errors = tpu_vm("resume", *SLICE, "--spot", "--watch", *TRAINING)
    assert code == 0, errors
    assert verbs(cloud)[: len(before) + 5] == [*before, "create", "scp", "scp", "ssh", "ssh"]
    assert said.splitlines()[-1] == "seven: ACTIVE, exit 0"
    assert trainings(cloud) == ["<-m><jaxscale.main><--config=configs/7b.py><--config.data.files=a b>"]
    assert "--spot" in next(line for line in (cloud / "calls").read_text().splitlines() if " create " in line)


def make_python_after_scp(cloud):
    """The worker that comes back is bare: a venv is laid out with the copy, since making one would need the network."""
    text = (cloud / "bin" / "gcloud").read_text()
    lay = 'mkdir -p "$CLOUD/home/jaxscale/venv/bin"; ln -sf "$CLOUD/bin/python3" "$CLOUD/home/jaxscale/venv/bin/python"'
    (cloud / "bin" / "gcloud").write_text(text.replace('"tpu-vm scp")', f'"tpu-vm scp") {lay};'))


def test_a_run_that_was_stopped_goes_on_without_a_new_slice(cloud):
    prepare_worker(cloud, "10", "0")
    worker(cloud, "start", "--config=c")
    wait_for_status(cloud, "exit 10")
    assert tpu_vm("resume", *SLICE, "--watch", *TRAINING)[0] == 0
    assert len(trainings(cloud)) == 2 and set(verbs(cloud)) == {"ssh"}


def test_a_run_that_another_try_does_not_mend_is_left_alone(cloud):
    prepare_worker(cloud, "2")
    worker(cloud, "start", "--config=c")
    wait_for_status(cloud, "exit 2")
    code, _, errors = tpu_vm("resume", *SLICE, "--watch", *TRAINING)
    assert code == 1 and "ended with exit 2, which a restart does not fix" in errors and len(trainings(cloud)) == 1


def test_a_worker_that_does_not_answer_is_asked_again_and_nothing_is_deleted(cloud):
    prepare_worker(cloud)
    (cloud / "unreachable").touch()
    code, said, _ = tpu_vm("resume", *SLICE, *TRAINING)
    assert code == 0 and "no response from worker 0" in said
    assert verbs(cloud) == ["ssh"]


@IN_A_CHECKOUT
def test_an_install_that_fails_on_the_workers_is_a_failure_and_leaves_no_archive(cloud):
    prepare_worker(cloud)
    (cloud / "unreachable").touch()
    code, _, errors = tpu_vm("install", *SLICE)
    assert code == 255 and "no route to host" in errors
    assert not list((cloud / "bin").glob("*.tar.gz"))


def test_a_failed_gcloud_is_never_taken_for_a_slice_that_is_gone(cloud):
    (cloud / "bin" / "gcloud").write_text("#!/bin/sh\necho \"$*\" >>$CLOUD/calls\necho 'log in first' >&2\nexit 1\n")
    code, said, errors = tpu_vm("resume", *SLICE, *TRAINING)
    assert code == 0 and "state unknown (gcloud failed)" in said and "log in first" in errors
    assert verbs(cloud) == []


def test_what_gcloud_was_given_can_be_read_back_by_a_shell(cloud):
    prepare_worker(cloud, "forever")
    tpu_vm("run", *SLICE, *TRAINING)
    told = (cloud / "calls").read_text().split("--command=")[1].splitlines()[0]
    assert shlex.split(told) == ["bash", "jaxscale-worker.sh", "start", *TRAINING[1:]]
