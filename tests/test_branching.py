"""A run that branches off another begins at step 0, and from then on goes on from its own checkpoints alone."""

import dataclasses
import json
import shutil

import pytest
import tiny

from jaxscale import main
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.training import loop
from jaxscale.settings.command_line import parse as parse_flags
from jaxscale.settings.config_file import with_flags
from jaxscale.system.exits import Exit, Stop

QUIET = {"monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0}


def config(steps, overrides=None):
    often = {"train_tokens": f"{steps} steps", "checkpoint.save_every_steps": 2, "checkpoint.keep_last": 9}
    return tiny.config(QUIET | often | (overrides or {}))


def run(folder, steps, stop_after=None, said=None, **init):
    """Trains in the folder and returns the last saved state; stop_after: as if killed after so many steps."""
    cfg = config(steps, {"seed": 2} | {f"init.{name}": value for name, value in init.items()})
    opened = open_run(
        cfg, str(folder), (said if said is not None else []).append, make_program=tiny.reuse(tiny.program())
    )
    if stop_after is None:
        train_to_completion(opened)
    else:
        loop.train(dataclasses.replace(opened, total_steps=stop_after, finish=lambda state: None))
    return state_of(folder)


def state_of(folder, step=None):
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    return tiny.host(checkpoints.restore(step or checkpoints.latest_step(), tiny.program().abstract_state))


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_branch_begins_at_step_0_and_goes_on_from_its_own_checkpoints_with_no_look_at_the_other(tmp_path):
    run(tmp_path / "old", 2)
    shutil.copytree(tmp_path / "old", tmp_path / "moved")
    straight, said = run(tmp_path / "straight", 4, said=(said := []), from_path=str(tmp_path / "moved")), said
    assert straight.step == 4 and f"init: params of {tmp_path}/moved/checkpoints/2" in said
    assert [(r["step"], r["batch_index"]) for r in records(tmp_path / "straight")] == [(n + 1, n) for n in range(4)]
    fresh = run(tmp_path / "fresh", 4)
    assert not (fresh.params["head"] == straight.params["head"]).all()

    run(tmp_path / "branch", 4, stop_after=2, from_path=str(tmp_path / "moved"))
    written = json.loads((tmp_path / "branch" / "config.json").read_text())["ancestry"]
    recorded = Checkpoints(tmp_path / "branch" / "checkpoints", CheckpointConfig()).read_run(2)["ancestry"]
    assert recorded == written and recorded[0]["step"] == 2
    shutil.rmtree(tmp_path / "moved")
    gone_on = run(tmp_path / "branch", 4, from_path=str(tmp_path / "moved"))
    tiny.assert_same_bits(gone_on, straight)
    checkpoints = Checkpoints(tmp_path / "branch" / "checkpoints", CheckpointConfig())
    assert checkpoints.read_run(4)["ancestry"] == recorded  # after a restart too

    with pytest.raises(Stop, match="settings differ from the run in .*: init.from_path: ") as stop:
        run(tmp_path / "branch", 4)
    assert stop.value.code is Exit.CONFIG_MISMATCH


@pytest.mark.soak
def test_stopped_before_its_first_checkpoint_it_begins_with_the_same_weights_again(tmp_path):
    run(tmp_path / "old", 2)
    of_old = {"init.from_path": str(tmp_path / "old")}
    begin(tmp_path / "branch", of_old)
    run(tmp_path / "old", 4)  # meanwhile the other has gone on
    begun = begin(tmp_path / "branch", of_old)
    tiny.assert_same_bits(begun.params, state_of(tmp_path / "old", 2).params)
    begun = begin(tmp_path / "another", of_old | {"init.what": "state"})
    tiny.assert_same_bits(begun.opt_state, state_of(tmp_path / "old", 4).opt_state)


@pytest.mark.slow
def test_a_mixture_that_begins_with_a_dense_run_records_how(tmp_path):
    run(tmp_path / "old", 2)
    mixture = {"model.experts": dict(number=4, chosen=2, mlp_dim=32), "init.experts": "copy"}
    begun = begin(tmp_path / "mixture", mixture | {"init.from_path": str(tmp_path / "old")})
    dense = state_of(tmp_path / "old", 2).params["blocks"]["mlp"]["up"]
    assert (begun.params["blocks"]["mlp"]["up"] == dense[:, None]).all()
    ancestor = json.loads((tmp_path / "mixture" / "config.json").read_text())["ancestry"][0]
    assert (ancestor["step"], ancestor["upcycled"]) == (2, "copy")


def begin(folder, overrides):
    """The state before step 0 of a run that does not come to its first step."""
    opened = open_run(config(4, overrides), str(folder), log=str)
    opened.writer.close()
    return tiny.host(opened.state)


def test_what_cannot_be_read_ends_the_run_before_anything_is_written_into_its_folder(tmp_path):
    with pytest.raises(ValueError, match="init.from_path=.*nowhere contains no checkpoint"):
        run(tmp_path / "branch", 4, from_path=str(tmp_path / "nowhere"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").touch()
    with pytest.raises(ValueError, match="Hugging Face model: jaxscale convert --from=.*hf --workdir=NEW"):
        run(tmp_path / "branch", 4, from_path=str(tmp_path / "hf"))
    assert not (tmp_path / "branch" / "config.json").exists()


def test_the_flag_is_the_setting(tmp_path):
    parse = lambda *flags: with_flags(parse_flags(["--config=x", *flags], main.TrainFlags))
    assert parse("--init_from=runs/a") == {"init.from_path": "runs/a"}
    with pytest.raises(ValueError, match="--init_from=a and --config.init.from_path set the same setting"):
        parse("--init_from=a", "--config.init.from_path=b")
