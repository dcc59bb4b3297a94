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


WORKERS = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")
# The command, that also writes how many bytes the graph of each pipeline has.
COUNTED = """
import pathlib, sys
import apache_beam as beam
from jaxscale.cli import prepare
sizes, end = [], beam.Pipeline.__exit__
def measured(pipeline, *how):
    sizes.append(len(pipeline.to_runner_api().SerializeToString()))
    return end(pipeline, *how)
beam.Pipeline.__exit__ = measured
code = prepare.main(sys.argv[2:])
pathlib.Path(sys.argv[1]).write_text(" ".join(map(str, sizes)))
sys.exit(code)
"""


def prepared(folder, name, *runner, copies=1):
    """({file: hash} of what was made, the bytes of each pipeline's graph)."""
    file, output = folder / f"{copies}.jsonl", folder / name
    if not file.exists():
        texts = [made_text.text(i) for i in range(60 * copies)]
        made_text.write_jsonl(file, [*texts, *texts[:9], *(f"{each} One more." for each in texts[20:26])])
    flags = [f"--input={file}", f"--output={output}", "--config.block_bytes=4096"]
    flags += ["--config.stages=('exact_dedup','near_dedup')", "--config.tokenizer.name=bytes"]
    flags += [f"--config.write.shard_tokens={8000 * copies}"]
    done = subprocess.run(
        [PYTHON, "-c", COUNTED, folder / "sizes", *flags, *runner],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [path for path in sorted(output.rglob("*")) if path.is_file()]
    hashes = {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return hashes, [int(size) for size in (folder / "sizes").read_text().split()]


@pytest.mark.parametrize("flags", [(), WORKERS], ids=["one process", "two worker processes"])
def test_shards_made_on_a_beam_runner_are_those_made_here(tmp_path, flags):
    here, none = prepared(tmp_path, "here")
    there, graphs = prepared(tmp_path, "there", "--runner=DirectRunner", "--", *flags)
    assert here == there and graphs and not none
    assert sum(name.endswith(".bin") for name in here) > 2


def test_the_graph_does_not_grow_with_the_corpus(tmp_path):
    small = prepared(tmp_path, "small", "--runner=DirectRunner")[1]
    large = prepared(tmp_path, "large", "--runner=DirectRunner", copies=4)[1]  # more blocks would need one level more
    assert len(small) == len(large)
    assert max(b - a for a, b in zip(small, large, strict=True)) < 256  # names differ from run to run
