"""launch/slurm/train.sbatch under a real slurmctld and slurmd: what goes back into the queue, and what ends."""

import getpass
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pytest
from scripts import LAUNCH, ROOT

TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # where Debian puts the two daemons

# One node that has eight GPUs on paper, so that the script's own #SBATCH lines are granted as they stand.
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=1,bf_interval=1
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=500 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def command(*arguments, env):
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def wait_for(what, seconds, condition):
    """The first true value of condition(), or a failure that shows `what` after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    pytest.fail(f"after {seconds} s: {what()}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which sbatch, scontrol and scancel speak to a cluster of our own."""
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: apt-get install slurmctld slurmd slurm-client)")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    values = dict(host=socket.gethostname().partition(".")[0], user=getpass.getuser(), folder=folder,
                  cpus=os.cpu_count(), controller_port=free_port(), node_port=free_port())  # fmt: skip
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(**values))
    (folder / "gres.conf").write_text(f"NodeName=localhost Name=gpu File={folder}/gpu[0-7]\n")
    for n in range(8):
        (folder / f"gpu{n}").touch()
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    env |= {"SLURM_CONF": str(conf), "PATH": PATH, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    daemons = []
    with open(folder / "daemons.log", "w") as log:
        for daemon in (["slurmctld", "-D", "-f", conf], ["slurmd", "-D", "-N", "localhost", "-f", conf]):
            daemons.append(subprocess.Popen(daemon, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
    try:
        idle = lambda: "idle" in command("sinfo", "--noheader", "--format=%T", env=env)
        answers = lambda: subprocess.run(["scontrol", "ping"], env=env, capture_output=True).returncode == 0
        wait_for((folder / "daemons.log").read_text, 60, lambda: answers() and idle())
        yield env
    finally:
        subprocess.run(["scancel", f"--user={values['user']}"], env=env, capture_output=True, timeout=20)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


class Job:
    """A job that was given to sbatch as a person would."""

    def __init__(self, slurm, folder, *arguments, options=(), **variables):
        self.env = slurm | {"JAXSCALE_PYTHON": sys.executable} | variables
        self.log = folder / "job.log"
        script = LAUNCH / "slurm" / "train.sbatch"
        given = ["sbatch", "--parsable", f"--output={self.log}", *options, script, *arguments]
        self.number = command(*given, env=self.env).strip()

    def state(self):
        """{'JobState': 'RUNNING', 'Restarts': '0', 'ExitCode': '0:0', ...}"""
        shown = command("scontrol", "show", "job", self.number, env=self.env)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def text(self):
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, seconds, condition):
        return wait_for(lambda: (self.state(), self.text()), seconds, condition)

    def wait_until_ended(self, seconds=120):
        ended = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        return self.wait_for(seconds, lambda: (state := self.state())["JobState"] in ended and state)


def stand_in(folder, *lines):
    """A program in the place of Python, so that the script meets each exit code without a training."""
    program = folder / "python"
    program.write_text("\n".join(["#!/usr/bin/env bash", *lines]) + "\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("code", [10, 15, 137])
@pytest.mark.soak
def test_a_code_that_another_try_may_mend_goes_back_into_the_queue(slurm, tmp_path, code):
    program = stand_in(tmp_path, f"echo tried >>{tmp_path}/tries", f"[[ $SLURM_RESTART_COUNT == 1 ]] || exit {code}")
    job = Job(slurm, tmp_path, "--config=c", JAXSCALE_PYTHON=program, JAXSCALE_MIN_SECONDS="0")
    state = job.wait_until_ended()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1")
    assert (tmp_path / "tries").read_text() == "tried\ntried\n"
    assert f"exit {code} after" in job.text()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "min_seconds"), [(1, "0"), (2, "0"), (13, "120"), (137, "120")])
def test_any_other_code_and_an_early_death_end_the_job(slurm, tmp_path, code, min_seconds):
    program = stand_in(tmp_path, f"exit {code}")
    job = Job(slurm, tmp_path, "--config=c", JAXSCALE_PYTHON=program, JAXSCALE_MIN_SECONDS=min_seconds)
    state = job.wait_until_ended()
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", f"{code}:0", "0")


def cancel(slurm, folder):
    """Cancels a job when its process has started; returns the job, its last state, and the file written on SIGTERM."""
    saved = folder / "saved"  # a file: srun is signalled too, and may exit before it has passed a line on
    program = stand_in(folder, f"trap ': >{saved}; exit 10' TERM", "echo begun", "sleep 60 &", "wait")
    job = Job(slurm, folder, "--config=c", JAXSCALE_PYTHON=program)
    job.wait_for(60, lambda: "begun" in job.text())
    command("scancel", job.number, env=job.env)
    return job, job.wait_until_ended(), saved


def test_a_cancelled_job_is_not_requeued(slurm, tmp_path):
    _, state, _ = cancel(slurm, tmp_path)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0")


@pytest.mark.soak
def test_the_processes_of_a_cancelled_job_are_told_to_save(slurm, tmp_path):
    for number in range(4):  # on busy cores, Slurm's SIGKILL has come before its SIGTERM
        folder = tmp_path / str(number)
        folder.mkdir()
        _, _, saved = cancel(slurm, folder)
        for _ in range(50):
            if saved.exists():
                return
            time.sleep(0.2)
    pytest.fail("no process of four cancelled jobs was told to save")


def test_arguments_with_spaces_and_the_gpus_of_the_node_reach_the_training(slurm, tmp_path):
    program = stand_in(tmp_path, "printf '<%s>' \"$@\"", "echo $SLURM_GPUS_ON_NODE tasks=$SLURM_NTASKS")
    job = Job(slurm, tmp_path, "--config=c", "--config.data.files=a b/*.txt", JAXSCALE_PYTHON=program)
    assert job.wait_until_ended()["JobState"] == "COMPLETED"
    assert "<-m><jaxscale.main><--config=c><--config.data.files=a b/*.txt>8 tasks=1" in job.text()


@pytest.mark.soak
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_training_that_is_stopped_goes_on_where_it_was(slurm, tmp_path, tasks):
    steps = 3000 if tasks == 1 else 1000
    tiny = dict(num_layers=1, embed_dim=32, mlp_dim=64, num_heads=2, num_kv_heads=2, head_dim=16)
    workdir = tmp_path / "run"
    arguments = [
        "--config=configs/quickstart.py", f"--workdir={workdir}", "--config.data.name=synthetic",
        "--config.eval.num_rows=0", "--config.seq_len=64", "--config.batch_tokens=512",
        f"--config.train_tokens={512 * steps}", *(f"--config.model.{name}={value}" for name, value in tiny.items()),
    ]  # fmt: skip
    mesh = f'--config.mesh={{"data": {tasks}}}'
    job = Job(slurm, tmp_path, *arguments, mesh, options=[f"--ntasks-per-node={tasks}"])
    metrics = pathlib.Path(workdir, "metrics.jsonl")
    job.wait_for(240, lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5)
    command("scancel", "--signal=TERM", job.number, env=job.env)  # to the processes, as the time limit does
    state = job.wait_until_ended(240)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), job.text()
    assert "exit 10 after" in job.text() and "resuming from step" in job.text()
    assert f"done: {steps} steps" in job.text()
