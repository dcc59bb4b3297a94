"""`jaxscale preflight`: exit codes, what is printed and written, and one clear line for a wrong command line."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import pytest
import tiny

from jaxscale.cli import preflight
from jaxscale.cli.preflight import PreflightFlags, answer
from jaxscale.kernels.hardware import Chip
from jaxscale.settings.command_line import parse
from jaxscale.system.exits import BadInput, Exit
from jaxscale.tools.planning.topology import Topology
from jaxscale.tools.preflight import search
from jaxscale.tools.preflight.preflight import preflight as planner_preflight

CHIP = Chip("simulated CPU", 1e12, 2**30, 1e11, "made up for tests", ici_bandwidth=1e10)
# Rows so long that the scores of attention fill most of a device: then other settings need less.
LONG = {"seq_len": 256, "batch_tokens": "16 rows", "model.num_layers": 1}


def topology(hbm_bytes=2**30):
    chip = dataclasses.replace(CHIP, hbm_bytes=hbm_bytes)
    return Topology("simulated:8", "cpu", chip, jax.devices()[:8], 1, num_hosts=1)


@pytest.mark.soak
def test_what_does_not_fit_is_a_no_go_with_a_change_that_was_compiled_and_does(tmp_path, capsys):
    request = PreflightFlags(config="tiny.py", json=tmp_path / "report.json")
    cfg = tiny.config(LONG)
    assert answer(cfg, topology(), request) is Exit.DONE
    first = json.loads(request.json.read_text())
    assert first["report"]["fits"] and first["others"] == []
    assert "go: " in capsys.readouterr().out.splitlines()[-1]

    less = topology(first["report"]["peak_bytes"] - 1)  # XLA:CPU tells no size of code
    assert answer(cfg, less, request) is Exit.NO_GO == 3
    out = capsys.readouterr().out
    assert "cached result of" in out and "no-go: 1 B missing per device" in out
    others = json.loads(request.json.read_text())["others"]
    assert [one["report"]["fits"] for one in others if not one["changes"]] == [False]
    fits = [one for one in others if one["report"]["fits"]]
    assert 1 <= len(fits) <= 2
    for one in fits:
        assert one["report"]["peak_bytes"] < first["report"]["peak_bytes"]
        flags = " ".join(search.override_lines(one["changes"]))
        assert flags and f"  {flags}\n" in out


@pytest.mark.soak
def test_search_keeps_to_its_time_and_writes_the_winner_as_flags(tmp_path, capsys):
    request = PreflightFlags(config="tiny.py", search=True, search_seconds=1, overrides=tmp_path / "winner.flags")
    cfg = tiny.config(LONG)
    assert answer(cfg, topology(), request) is Exit.DONE
    out = capsys.readouterr().out
    assert re.search(r"searching other layouts for 1 s\n\d+ candidates estimated", out) and "time is up (1 s)" in out
    assert f"written to {request.overrides}" in out
    assert request.overrides.read_text() == ""  # the config itself is all that was compiled

    own = search.unchanged_candidate(cfg, topology())
    report = planner_preflight(cfg, topology(), config_name="tiny")  # kept
    changes = {"model.remat": "full", "mesh.tensor": 2}
    preflight.write_winner([(dataclasses.replace(own, changes=changes), report)], request.overrides)
    assert request.overrides.read_text() == "--config.model.remat=full\n--config.mesh.tensor=2\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--config=x.py"], "--topology must be given"),
        (["--config=missing.py", "--topology=v5e:2x4"], "--config=missing.py is not a file"),
        (["--config=x.py", "--topology=v5e:2x4", "--search=maybe"], "--search=maybe must be true or false"),
        (["--config=x.py", "--topology=v5e:2x4", "--search-seconds=0"], "--search_seconds=0 must be a whole number"),
        (["--config=x.py", "--topology=v5e:2x4", "--json=no/such/folder.json"], "--json=no/such/folder.json must be"),
        (["--config=x.py", "--toplogy=v5e:2x4"], "did you mean --topology?"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(arguments, told):
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        preflight.main(arguments)
    assert isinstance(error.value, BadInput) and "\n" not in str(error.value)


def test_switches_stand_alone_and_dashes_are_as_good_as_underscores():
    flags = ["--search", "--fresh=false", "--save-executable=a-b", "--config.model.remat=full", "--json", "x"]
    found = parse(flags, PreflightFlags).flags
    assert found.search and not found.fresh and found.settings == {"model.remat": "full"}
    assert (str(found.save_executable), str(found.json)) == ("a-b", "x")


@pytest.mark.slow
def test_the_command_prepares_before_jax_is_imported_and_tells_bad_input_in_one_line(tmp_path):
    file = tmp_path / "config.py"
    file.write_text(f"def get_config(): return {tiny.VALUES!r}")
    code = (
        "import atexit, sys; from jaxscale.cli import main; assert 'jax' not in sys.modules;"
        "atexit.register(lambda: print(sys.modules['jax'].config.jax_platforms)); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "preflight", f"--config={file}", "--topology=v9x:2x2"],
        capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "tpu"}, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "cpu\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: topology 'v9x:2x2'") and "did you mean" in line
