"""`jaxscale bench data` measures a recipe's stages, its shards and the reading of them, on text that it is given."""

import json

import made_text
import pytest

from jaxscale.cli import bench


def test_every_stage_and_path_is_measured(tmp_path, capsys):
    made_text.write_jsonl(tmp_path / "a.jsonl", [made_text.text(i) for i in range(120)])
    (tmp_path / "recipe.py").write_text(
        "def get_config():\n    return dict(stages=('language', 'near_dedup', 'pii'), tokenizer=dict(name='bytes'))\n"
    )
    flags = [f"--input={tmp_path}/a.jsonl", f"--recipe={tmp_path}/recipe.py", "--seq_len=256", "--batch_rows=4"]
    assert bench.main(["data", *flags, "--rounds=1", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["stages"]) == {"language", "pii"} and record["documents"] == 120
    assert all(record[name] > 0 for name in ("near_dedup", "curation", "shards"))
    assert record["reading"]["tokens_per_second"] > 0 and 0.9 < record["reading"]["fill"] <= 1


def test_a_batch_of_no_rows_is_one_line():
    with pytest.raises(ValueError, match="--batch_rows=1 must be a whole number, 2 or more"):
        bench.main(["data", "--batch_rows=1"])
