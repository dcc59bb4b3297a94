"""Every launch script is sound bash, explains itself, and shows under --dry-run the exact commands it would run."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest
from scripts import LAUNCH, SCRIPTS, printed, shell

ON_TPU_VM = ("--name=seven", "--zone=z")
TRAINING = ("--config=configs/7b.py", "--config.data.files=a b/*.txt", "--config.sample.prompt=it's $HOME")
ON_XPK = ("--cluster=c", "--project=p", "--zone=z")


@pytest.mark.cases(3)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script):
    beside_python = pathlib.Path(sys.executable).parent  # where the extra test puts it
    tool = shutil.which("shellcheck", path=f"{beside_python}:{os.environ.get('PATH', '')}")
    if tool is None:
        pytest.skip("shellcheck is not installed: pip install -e '.[test]'")
    done = subprocess.run([tool, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_each_script_stops_at_errors_and_can_be_run(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    assert script.stat().st_mode & 0o100, f"{script} is not executable"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_names_the_script_and_each_verb_or_option_it_takes(script):
    text = printed(script.relative_to(LAUNCH), "--help")
    assert script.name in text
    code = script.read_text().split("TEXT\n")[-1]
    options = {word.rstrip("=*)") for word in code.split() if word.startswith("--") and word.endswith(("=*)", "=*"))}
    assert all(option in text for option in options), options


def commands(text):
    """The printed commands as argument lists, as a shell would read them; comment lines are left out."""
    return [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]


def test_a_slice_is_asked_for_as_a_queued_resource():
    text = printed("tpu_vm/tpu_vm.sh", "create", *ON_TPU_VM, "--accelerator=v5litepod-16", "--spot", "--dry-run")
    assert commands(text) == [
        ["gcloud", "compute", "tpus", "queued-resources", "create", "seven", "--zone=z",
         "--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", "--node-id=seven", "--spot"]
    ]  # fmt: skip


def test_several_slices_are_one_request_and_each_is_spoken_to():
    options = (*ON_TPU_VM, "--slices=2", "--project=p", "--dry-run")
    (create,) = commands(printed("tpu_vm/tpu_vm.sh", "create", *options, "--accelerator=v6e-64"))
    assert create[-2:] == ["--node-count=2", "--node-prefix=seven"]
    stop = commands(printed("tpu_vm/tpu_vm.sh", "stop", *options))
    assert [command[5] for command in stop] == ["seven-0", "seven-1"]
    assert all(command[6:9] == ["--zone=z", "--project=p", "--worker=all"] for command in stop)


def test_arguments_of_a_training_reach_the_worker_as_they_were_typed():
    (command,) = commands(printed("tpu_vm/tpu_vm.sh", "run", *ON_TPU_VM, "--dry-run", "--", *TRAINING))
    on_the_worker = command[-1].removeprefix("--command=")
    assert shlex.split(on_the_worker) == ["bash", "jaxscale-worker.sh", "start", *TRAINING]


def test_resume_shows_what_follows_a_preemption():
    text = printed("tpu_vm/tpu_vm.sh", "resume", *ON_TPU_VM, "--accelerator=v5p-32", "--repo=https://host/x.git",
                   "--ref=v1", "--dry-run", "--", *TRAINING)  # fmt: skip
    after = commands(text.split("# if it was preempted or failed:\n")[1])
    assert [command[3:5] for command in after] == [
        ["queued-resources", "delete"], ["queued-resources", "create"], ["queued-resources", "list"],
        ["tpu-vm", "scp"], ["tpu-vm", "ssh"], ["tpu-vm", "ssh"],
    ]  # fmt: skip
    assert after[4][-1].endswith("jaxscale-worker.sh install https://host/x.git v1 tpu\\,gcs")


def test_a_slurm_job_is_one_srun():
    first, second = commands(printed("slurm/train.sbatch", "--dry-run", *TRAINING))
    assert first == ["srun", "--kill-on-bad-exit=0", "--wait=600", "python3", "-m", "jaxscale.main", *TRAINING]
    assert second == ["scontrol", "requeue", "$SLURM_JOB_ID"]


def test_an_image_is_built_from_the_root_and_pushed_if_asked():
    build, push = commands(printed("docker/build.sh", "cuda", "--tag=r/j:c", "--cuda=cuda13", "--push", "--dry-run"))
    assert build[:2] == ["docker", "build"] and build[-2:] == ["--build-arg=CUDA=cuda13", str(LAUNCH.parent)]
    assert build[2] == f"--file={LAUNCH}/docker/Dockerfile.cuda" and push == ["docker", "push", "r/j:c"]


def test_xpk_starts_the_run_again_on_the_codes_that_are_worth_it():
    options = ("--tpu-type=v6e-256", "--slices=2", "--name=seven", "--image=r/j:t", "--dry-run")
    (command,) = commands(printed("gke/xpk.sh", "run", *ON_XPK, *options, "--", *TRAINING))
    assert command[:4] == ["xpk", "workload", "create", "--cluster=c"]
    assert "--restart-on-exit-codes=10,13,14,15" in command and "--num-slices=2" in command
    on_the_host = command[-1].removeprefix("--command=")
    assert shlex.split(on_the_host) == ["python", "-m", "jaxscale.main", *TRAINING]


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("tpu_vm/tpu_vm.sh", ["crate", *ON_TPU_VM], "unknown verb crate"),
        ("tpu_vm/tpu_vm.sh", ["create", "--zone=z"], "--name=NAME is missing"),
        ("tpu_vm/tpu_vm.sh", ["create", *ON_TPU_VM], "--accelerator=TYPE is missing"),
        ("tpu_vm/tpu_vm.sh", ["create", *ON_TPU_VM, "--accelerator=v5e-16"], "use gcloud's name, v5litepod-16"),
        ("tpu_vm/tpu_vm.sh", ["create", *ON_TPU_VM, "--accelerator=v9-8"], "set --runtime=VERSION"),
        ("tpu_vm/tpu_vm.sh", ["run", *ON_TPU_VM, "--config=c"], "put training flags after --"),
        ("tpu_vm/tpu_vm.sh", ["run", *ON_TPU_VM], "no training flags"),
        ("tpu_vm/tpu_vm.sh", ["run", *ON_TPU_VM, "--slices=0", "--", "a"], "--slices=0 must be a positive integer"),
        ("tpu_vm/tpu_vm.sh", ["install", *ON_TPU_VM, "--ref=v1"], "--ref=v1 needs --repo"),
        ("tpu_vm/worker.sh", ["begin"], "unknown verb begin"),
        ("slurm/train.sbatch", [], "no training flags"),
        ("slurm/train.sbatch", ["--config=c"], "this script must run under Slurm: sbatch"),
        ("docker/build.sh", ["rocm", "--tag=x"], "unknown image rocm"),
        ("docker/build.sh", ["tpu"], "--tag=NAME:TAG is missing"),
        ("docker/build.sh", ["tpu", "--tag=x", "--cuda=cuda12"], "applies only to the cuda image"),
        ("gke/xpk.sh", ["run", "--cluster=c", "--project=p"], "--zone is missing"),
        ("gke/xpk.sh", ["cluster", *ON_XPK, "--tpu-type=v6e-16"], "needs one of --spot"),
        ("gke/jobset.sh", ["render", "--name=Seven"], "--name=Seven must be"),
        ("gke/jobset.sh", ["render", "--name=s", "--topology=v6e-16"], "must be like v6e:4x4"),
        ("gke/jobset.sh", ["apply", "--name=s", "--topology=v9:4x4", "--image=i", "--", "a"], "unknown chip v9"),
        ("gke/jobset.sh", ["apply", "--name=s", "--topology=v6e:3x3", "--image=i", "--", "a"], "9 chips, not"),
        ("gke/jobset.sh", ["render", "--name=s", "--topology=h100:2x8", "--slices=2", "--image=i", "--", "a"], ":4x8"),
        ("gke/jobset.sh", ["render", "--name=s", "--topology=v6e:4x4", "--", "a"], "--image=IMAGE is missing"),
    ],
)  # fmt: skip
def test_what_a_person_got_wrong_is_one_line_and_exit_2(script, arguments, told, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    done = shell(script, *arguments)
    assert done.returncode == 2, (done.returncode, done.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and told in line
