"""Old names of renamed settings are accepted in files, on command lines and in records, with a notice."""

import pytest
import tiny

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.runtime.run.resume_checks import check_same_run
from jaxscale.settings import renamed
from jaxscale.settings.config_file import load_config


@pytest.fixture(autouse=True)
def forget_notices():
    renamed.log_renamed.cache_clear()


def old_record(cfg):
    """The settings as an older version recorded them."""
    values = schema.to_dict(cfg)
    group = values["train"].pop("recovery")
    values["train"]["ladder"] = {"rungs": group.pop("steps"), **group}
    return values


CUT = {"train.recovery.steps": ["cut_lr"], "train.recovery.cut_steps": 7, "train.recovery.max_cuts": 3}


def test_a_file_and_a_command_line_may_use_old_names(tmp_path, capsys):
    file, cfg = tmp_path / "old.py", tiny.config(CUT)
    file.write_text(f"def get_config():\n    return {old_record(cfg)!r}\n")
    assert load_config(str(file)) == cfg
    notice = "renamed settings: train.ladder.rungs is now train.recovery.steps, train.ladder is now train.recovery\n"
    assert capsys.readouterr().err == notice
    assert load_config(str(file), {"train.ladder.cut_steps": "9"}) == tiny.config(CUT | {"train.recovery.cut_steps": 9})
    assert capsys.readouterr().err == "renamed settings: train.ladder is now train.recovery\n"
    assert load_config(str(file), {"train.recovery.max_cuts": "5"}) == tiny.config(CUT | {"train.recovery.max_cuts": 5})
    assert load_config(str(file), {"train.ladder.rungs": "()"}).train.recovery.steps == ()


def test_the_record_of_an_older_run_is_of_the_same_run(tmp_path):
    cfg = tiny.config(CUT)
    assert schema.from_dict(RunConfig, old_record(cfg)) == cfg
    assert check_same_run(cfg, tmp_path, {"config": old_record(cfg)}) == []


def test_of_an_old_and_a_current_name_the_current_one_counts():
    both = {"train": {"ladder": {"rungs": ["rewind"], "max_cuts": 1}, "recovery": {"steps": []}}}
    found = renamed.with_current_names(both, RunConfig.renamed)
    assert found == {"train": {"recovery": {"steps": [], "max_cuts": 1}}}
    assert renamed.with_current_names({"train": {}}, RunConfig.renamed) == {"train": {}}
