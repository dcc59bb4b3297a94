"""`jaxscale bench data` measures a recipe's stages, its shards and the reading of them, on text that it is given."""

import json
import shlex
import sys

import made_text
import pytest

from jaxscale import schema
from jaxscale.cli import bench
from jaxscale.cli.bench_data import compare_program, data_lines
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.prepare.config import PrepareConfig


@pytest.mark.slow
def test_every_stage_and_path_is_measured(tmp_path, capsys):
    made_text.write_jsonl(tmp_path / "a.jsonl", [made_text.text(i) for i in range(120)])
    (tmp_path / "recipe.py").write_text(
        "def get_config():\n    return dict(stages=('language', 'near_dedup', 'pii'), tokenizer=dict(name='bytes'))\n"
    )
    (tmp_path / "other.py").write_text(
        "import json, sys\ntexts = [json.loads(line)['text'] for line in open(sys.argv[1])]\n"
        "print(json.dumps({'seconds': len(texts) / 4, 'stages': ['language', 'pii']}))\n"
    )
    other = shlex.join([sys.executable, f"{tmp_path}/other.py"])
    flags = [f"--input={tmp_path}/a.jsonl", f"--recipe={tmp_path}/recipe.py", "--seq_len=256", "--batch_rows=4"]
    assert bench.main(["data", *flags, "--rounds=1", "--json", "--against", other]) == 0
    record = json.loads(capsys.readouterr().out)
    (beside,) = record["others"]
    assert beside["seconds"] == 30 and beside["stages"] == ["language", "pii"] and 0 < beside["ours"] < 30
    assert (
        f"language, pii, alternating: {120 / beside['ours']:,.0f} documents/s in jaxscale, 4 in {other}"
        in "\n".join(data_lines(record))
    )
    assert set(record["stages"]) == {"language", "pii"} and record["documents"] == 120
    assert all(record[name] > 0 for name in ("near_dedup", "curation", "shards"))
    assert record["reading"]["tokens_per_second"] > 0 and 0.9 < record["reading"]["fill"] <= 1


def test_another_program_says_what_it_did(tmp_path):
    made_text.write_jsonl(tmp_path / "a.jsonl", [made_text.text(1)])
    cfg = schema.from_dict(PrepareConfig, {"sources": {"text": {"files": f"{tmp_path}/a.jsonl"}}})
    silent = shlex.join([sys.executable, "-c", 'print(\'{"seconds": 1, "stages": ["sorting"]}\')'])
    with pytest.raises(BadInput, match=r'"stages" is \["sorting"\], but must be a non-empty list of .*, c4, '):
        compare_program(silent, shlex.split(silent), cfg, [], str(tmp_path), 1)


def test_a_batch_of_no_rows_is_one_line():
    with pytest.raises(ValueError, match="--batch_rows=1 must be a whole number, 2 or more"):
        bench.main(["data", "--batch_rows=1"])
