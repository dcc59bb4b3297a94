"""What starts a run again, wherever it runs, follows the same exit codes as `jaxscale supervise`."""

import re

import pytest
from scripts import LAUNCH, manifest, shell

from jaxscale.system.exits import STARTED_AGAIN, Exit, may_start_again

LOOP = 'for code in $(seq 0 255); do may_start_again "$code" && echo "$code"; done; true\n'
COMMON = ("--name=seven", "--image=registry/jaxscale:1", "--", "--config=c")


@pytest.mark.parametrize("script", ["slurm/train.sbatch", "tpu_vm/worker.sh", "tpu_vm/tpu_vm.sh"])
def test_a_script_starts_again_what_the_supervisor_does(script, tmp_path):
    text = (LAUNCH / script).read_text()
    (function,) = re.findall(r"^may_start_again\(\) \{\n.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    assert text.count("may_start_again") >= 2  # and it is asked
    (tmp_path / "loop.sh").write_text(function + LOOP)
    found = shell(tmp_path / "loop.sh").stdout.split()
    assert found == [str(code) for code in range(256) if may_start_again(code)]


@pytest.mark.parametrize("topology", ["v6e:4x4", "h100:4x8"])
def test_a_jobset_fails_at_all_other_codes_of_ours(topology):
    jobset = manifest(f"--topology={topology}", *COMMON)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    (rule,) = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    ends = {int(code) for code in Exit if code and not may_start_again(code)}
    assert rule["action"] == "FailJob" and set(rule["onExitCodes"]["values"]) == ends


def test_xpk_starts_again_at_the_same_codes():
    (codes,) = re.findall(r"--restart-on-exit-codes=([\d,]+)", (LAUNCH / "gke" / "xpk.sh").read_text())
    assert [int(code) for code in codes.split(",")] == list(STARTED_AGAIN)  # death by signal by itself
