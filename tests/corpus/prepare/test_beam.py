"""On Apache Beam the same recipe gives the same bytes. Beam wants an older pyarrow, so it lives in its own environment:

python -m venv E && E/bin/pip install ".[beam]"
JAXSCALE_BEAM_PYTHON=E/bin/python pytest -m peer tests/corpus/prepare
"""

import hashlib
import os
import pathlib
import subprocess

import made_text
import pytest

from jaxscale.cli import prepare as command

PYTHON = os.environ.get("JAXSCALE_BEAM_PYTHON", "")
ROOT = pathlib.Path(command.__file__).parents[2]

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON, reason="JAXSCALE_BEAM_PYTHON names no Python with Apache Beam"),
]


def test_shards_made_on_a_beam_runner_are_those_made_here(tmp_path):
    texts = [made_text.text(i) for i in range(60)]
    made_text.write_jsonl(tmp_path / "a.jsonl", [*texts, *texts[:9], *(f"{each} One more." for each in texts[20:26])])
    contents = {}
    for runner in ("local", "DirectRunner"):
        output = tmp_path / runner
        flags = [f"--input={tmp_path}/a.jsonl", f"--output={output}", f"--runner={runner}", "--config.block_bytes=4096"]
        flags += ["--config.stages=('exact_dedup','near_dedup')", "--config.tokenizer.name=bytes"]
        flags += ["--config.write.shard_tokens=8000"]
        done = subprocess.run(
            [PYTHON, "-m", "jaxscale.cli.prepare", *flags],
            env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        files = [path for path in sorted(output.rglob("*")) if path.is_file()]
        contents[runner] = {
            str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
        }
    assert contents["local"] == contents["DirectRunner"]
    assert sum(name.endswith(".bin") for name in contents["local"]) > 2
