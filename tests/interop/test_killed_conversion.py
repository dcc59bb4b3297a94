"""A conversion that is killed (SIGKILL) at any point goes on when the command is run again, and repeats nothing."""

import os
import re
import subprocess
import sys

import pytest
from hf_folders import FLOAT32, LLAMA, assert_same, make_folder, read_folder
from test_experts import SMALL_MIXTRAL

from jaxscale.tools.interop.journal import Journal

pytestmark = pytest.mark.slow

CONFIG = LLAMA | {"hidden_size": 64, "vocab_size": 512, "intermediate_size": 256}
EXPERTS = SMALL_MIXTRAL | {"hidden_size": 64, "vocab_size": 512, "intermediate_size": 64, "num_local_experts": 4}
IN = [
    "convert/written:2",
    "convert/noted:3",
    "convert/noted:9",
    "convert/read_back:1",
    "convert/commit:1",
    "convert/done:1",
]
WHOLE = IN[3:]  # all is written by then
OUT = ["export/shard:1", "export/shard:4", "export/config:1"]
QUICK = (IN[1:2], OUT[1:2])
CASES = [
    (QUICK, CONFIG),
    pytest.param(((IN, OUT), CONFIG), marks=pytest.mark.soak),
    pytest.param(((IN, OUT), EXPERTS), marks=pytest.mark.soak),
]
# Each crash in a process of its own, which is forked before TensorStore has threads: one start of Python for all.
SCRIPT = """
import os, sys
from jaxscale.runtime.checkpoint import array_store
from jaxscale.cli import convert
from jaxscale.tools.interop import chunking
chunking.CHUNK_BYTES = 32 << 10  # as if the model were larger
array_store.COMMIT_BYTES = 64 << 10

def start(point, argv):
    print(">", point or "-", flush=True)
    child = os.fork()
    if not child:
        os.environ["JAXSCALE_CRASH_AT"] = point
        convert.main(argv)
        sys.stdout.flush()
        os._exit(0)
    print("<", os.waitpid(child, 0)[1], flush=True)

hf, to = sys.argv[1:3]
for number, point in enumerate(sys.argv[3].split(",")):
    for crash_at in (point, ""):
        start(crash_at, [f"--from={hf}", f"--workdir={to}/run{number}", "--json"])
for number, point in enumerate(sys.argv[4].split(",")):
    for crash_at in (point, ""):
        if not crash_at:  # a killed export may leave such of any file
            open(f"{to}/out{number}/.tokenizer.json.{16 * 'a'}.tmp", "w").close()
        flags = ["--dtype=float32", "--shard_bytes=1e5", "--json"]
        start(crash_at, [f"--workdir={to}/run0", f"--to={to}/out{number}", *flags])
"""


@pytest.fixture(scope="module", params=CASES, ids=["some", "all", "experts"])
def killed(request, tmp_path_factory):
    """(folder, the original values, [(point, what the kill ended with, the start behind it)] in and out, errors)."""
    (points_in, points_out), config = request.param
    folder = tmp_path_factory.mktemp("killed")
    values = make_folder(folder / "hf", config, FLOAT32, 2)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        SCRIPT,
        folder / "hf",
        folder,
        ",".join(points_in),
        ",".join(points_out),
    ]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    starts = re.findall(r"> (\S+)\n(.*?)< (\d+)\n", done.stdout, re.DOTALL)
    found = [(point, text, int(status)) for point, text, status in starts]
    pairs = list(zip(found[0::2], found[1::2], strict=True))
    return folder, values, pairs[: len(points_in)], pairs[len(points_in) :], done.stderr


def kept(text):
    return int(re.search(r'"kept_bytes": (\d+)', text)[1])


@pytest.mark.fault("F1")
def test_an_import_goes_on_and_never_counts_half_done(killed):
    folder, values, pairs, _, errors = killed
    for (point, _, status), (again, _, ended) in pairs:
        assert (status, again, ended) == (9, "-", 0), (point, errors)
    done = {point: kept(text) for (point, _, _), (_, text, _) in pairs}
    total = sum(value.nbytes for value in values.values())
    total += sum(3 * 4 * 4 for name in values if "layers.0.block_sparse_moe.gate." in name)  # and the load of experts
    assert list(done.values()) == sorted(done.values()) and min(done.values()) > 0
    assert all(number == total if point in WHOLE else number < total for point, number in done.items())
    for number in range(len(pairs)):
        assert sorted(path.name for path in (folder / f"run{number}").iterdir()) == ["checkpoints", "config.json"]
        assert [path.name for path in (folder / f"run{number}" / "checkpoints").iterdir()] == ["0"]


@pytest.mark.fault("F1")
def test_an_export_goes_on_after_the_files_that_were_finished(killed):
    folder, values, _, pairs, errors = killed
    for (point, _, status), (_, _, ended) in pairs:
        assert (status, ended) == (9, 0), (point, errors)
    sizes = [sum(path.stat().st_size for path in (folder / f"out{n}").glob("*.safetensors")) for n in range(len(pairs))]
    done = [kept(text) for _, (_, text, _) in pairs]
    assert done == sorted(set(done)) and done[0] > 0
    assert all((kept == size) == (point == OUT[2]) for ((point, *_), _), kept, size in zip(pairs, done, sizes))
    for number in range(len(pairs)):
        assert_same(read_folder(folder / f"out{number}"), values)
        assert not list((folder / f"out{number}").glob(".*"))


def test_a_folder_of_another_conversion_is_not_gone_on_with(tmp_path):
    Journal(tmp_path / "converting.json", "one").begin()
    with pytest.raises(ValueError, match="is from a different conversion, or the source files have changed"):
        Journal(tmp_path / "converting.json", "two").begin()


def test_two_conversions_do_not_write_into_one_folder_and_a_dead_one_holds_nothing(tmp_path):
    first = Journal(tmp_path / "converting.json", "one")
    assert not first.begin()
    with pytest.raises(
        ValueError, match=f"another process is converting into {tmp_path}; wait until it ends, or choose a"
    ):
        Journal(tmp_path / "converting.json", "one").begin()
    first.close()  # as the system does where a process dies
    second = Journal(tmp_path / "converting.json", "one")
    assert second.begin()
    second.remove()
    second.close()
    assert list(tmp_path.iterdir()) == []
