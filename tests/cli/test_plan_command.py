"""`jaxscale plan`: exit codes, files, and one clear line for a wrong command line."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxscale import cli
from jaxscale.cli import bench, plan
from jaxscale.settings.config_file import load_config
from jaxscale.system.exits import BadInput, Exit
from jaxscale.tools.planning import measured

ROOT = pathlib.Path(__file__).parent.parent.parent
SEVEN = f"--config={ROOT / 'configs' / '7b.py'}"


def test_the_verb_uses_no_device():
    assert "plan" in cli.NO_DEVICES


@pytest.mark.slow
def test_a_plan_is_printed_and_written(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert plan.main([SEVEN, "--topology=v5p-256", "--price=4.20", "--budget=1e6", f"--json={file}"]) is Exit.DONE
    out = capsys.readouterr().out
    assert out.startswith("7b on v5p:4x4x8: 128 x TPU v5p on 32 hosts; mesh fsdp=128\n")
    found = json.loads(file.read_text())
    assert found["params"] == 6_744_707_072 and found["price"]["dollars_per_hour"] == 4.20
    assert found["dollars"][0] < found["dollars"][1]


def test_what_does_not_fit_is_a_no_go(capsys):
    assert plan.main([SEVEN, "--topology=h100:1x8"]) is Exit.NO_GO
    assert "does not fit by estimate" in capsys.readouterr().out.splitlines()[-1]


def test_money_becomes_a_config_that_fits(tmp_path, capsys):
    file = tmp_path / "proposed.py"
    assert plan.main(["--budget=50000", "--topology=h100:8x8", f"--write={file}"]) is Exit.DONE
    out = capsys.readouterr().out
    assert "$50,000 at $3.99 buys 12,531 chip hours of H100 SXM" in out and f"written to {file}" in out
    cfg = load_config(str(file))
    assert len(file.read_text().splitlines()) <= 40
    assert (
        plan.main([f"--config={file}", "--topology=h100:8x8", "--budget=50000", f"--json={tmp_path / 'p'}"])
        is Exit.DONE
    )
    assert "sufficient over the whole range" in capsys.readouterr().out
    told = json.loads((tmp_path / "p").read_text())
    assert 0.99 * 50_000 < told["dollars"][1] <= 50_000  # by the model's own operations, at the lower MFU
    assert told["params"] == found_params(out) and cfg.train.num_microbatches >= 1


def found_params(out):
    """Parameters of a printed proposal."""
    return int(re.search(r"parameters +\S+ +([\d,]+):", out)[1].replace(",", ""))


def test_a_proposal_names_the_rule_beside_the_shape_that_comes_nearest(capsys):
    plan.main(["--flops=6e23"])
    out = " ".join(capsys.readouterr().out.split())
    assert "optimal 73.8B on 1.36T tokens" in out
    assert int(out.split(": nearest shape")[0].split()[-1].replace(",", "")) == pytest.approx(73.8e9, rel=0.02)


def test_operations_or_a_size_need_no_machine(tmp_path, capsys):
    file = tmp_path / "proposal.json"
    assert plan.main(["--flops=6e23", f"--json={file}"]) is Exit.DONE
    assert json.loads(file.read_text())["model"]["name"] == "llama"
    assert plan.main(["--model_size=7b"]) is Exit.DONE
    assert "20.7 per parameter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "use --config=FILE to plan, or one of --budget"),
        ([SEVEN], "--topology must be given"),
        ([SEVEN, "--topology=v99:8"], "unknown chip 'v99'"),
        ([SEVEN, "--topology=v5p-256", "--price=free"], "--price=free must be a number above 0"),
        ([SEVEN, "--topology=v5p-256", "--deadline=soon"], "--deadline=soon must be a time such as 30d"),
        ([SEVEN, "--topology=v5p-256", "--mfu=40"], "--mfu=40 must be a fraction"),
        ([SEVEN, "--topology=v5p-256", "--pue=0.9"], "--pue=0.9 must be at least 1"),
        ([SEVEN, "--flops=1e20"], "--flops proposes a model and cannot be combined with --config"),
        (
            [SEVEN, "--topology=v5p-256", "--json=/nowhere/x.json"],
            "--json=/nowhere/x.json must be a file in an existing folder",
        ),
        (
            ["--model_size=7b", "--config.model.remat=none"],
            "--config.model.remat requires a config; write the prop",
        ),
        (["--model_size=big"], "--model_size=big must be a number of parameters"),
        (["--budget=1000", "--topology=tpu7x:2x2x1"], "TPU7x has no list price; set --price"),
        (["--budget=1000", "--flops=1e20"], "one of --budget=DOLLARS, --flops=NUMBER, --model_size"),
        ([SEVEN, "--topology=here"], "run: jaxscale bench step --save"),
        ([SEVEN, "--topology=v5p-256", "--config.mesh.tensor=3"], "needs a multiple of 3 devices"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(argv, said, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError) as error:
        plan.main(argv)
    assert said in str(error.value) and "\n" not in str(error.value) and isinstance(error.value, BadInput)


def test_saving_is_of_the_step_alone():
    with pytest.raises(ValueError, match="--save applies only to `jaxscale bench step`"):
        bench.main(["loop", "--save"])


@pytest.mark.soak
def test_a_measured_step_is_kept_for_plans(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = ["--config.model.num_layers=1", "--config.model.vocab_size=64", "--config.batch_tokens=2048"]
    bench.main(["step", "--save", "--spec=T", "--steps=1", "--warmup=0", *small])
    assert f"saved in {tmp_path / 'jaxscale' / 'measured.json'}" in capsys.readouterr().out
    (found,) = measured.read_measured()
    assert found.spec == "T" and found.platform == "cpu" and found.flops_per_second > 0 and found.versions["jax"]
    assert plan.main(
        [f"--config={ROOT / 'configs' / 'quickstart.py'}", "--topology=here", "--config.train.num_microbatches=1"]
    ) is (Exit.DONE)
    assert "measured on this machine by jaxscale bench step --save: T" in " ".join(capsys.readouterr().out.split())


@pytest.mark.soak
def test_it_answers_within_seconds_where_no_compiler_is_installed(tmp_path):
    """As a process: what it imports counts too."""
    code = (
        "import sys; sys.modules['libtpu'] = None; sys.argv = ['jaxscale', *sys.argv[1:]]; "
        "from jaxscale.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "plan", SEVEN, "--topology=4*v6e:16x16", "--config.mesh.data=4"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "1024 x TPU v6e" in done.stdout
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["model.compute_dtype=auto"]
