"""Makes earlier_version.tar.xz: a work folder with a checkpoint, and shards with their manifest, as an earlier version
left them; and continued.json: what that version wrote when it went on with them.

    python tests/golden/make_earlier_version.py CHECKOUT   # made of 02ec64a, with this environment's libraries
"""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable

from compare_versions import write_text

HERE = pathlib.Path(__file__).parent
ARCHIVE, CONTINUED = HERE / "earlier_version.tar.xz", HERE / "continued.json"
KEPT = ("step", "loss", "grad_norm", "lr", "tokens_hash", "tokens_seen")  # of a line of metrics.jsonl
CONFIG = '''"""A tiny run on files, or on shards; every path is relative, so that the folder can be moved."""

import ml_collections


def get_config(source="text"):
    c = dict(seq_len=32, batch_tokens=8 * 32, train_tokens="4 steps", seed=3)
    c["model"] = dict(name="llama", vocab_size=272, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8,
                      mlp_dim=32, compute_dtype="float32", attention="xla")
    c["optim"] = dict(peak_lr=1e-2, warmup_tokens="2 steps")
    text = dict(name="files", files=dict(one="text/one*.txt", two="text/two*.txt"), mixture=dict(one=0.7, two=0.3))
    shards = dict(name="tokens", files="shards/manifest.json")
    c["data"] = dict(tokenizer="bytes", cache_dir="cache") | (text if source == "text" else shards)
    c["monitor"] = dict(log_every_steps=1, tensorboard=False, progress="off", statistics_every_steps=0)
    c["eval"] = dict(every_steps=0)
    c["checkpoint"] = dict(save_every_steps=4)
    return ml_collections.ConfigDict(c)
'''


ONE_DEVICE = "--xla_force_host_platform_device_count=1"


def jaxscale(folder: pathlib.Path, tree: pathlib.Path, *command: str) -> None:
    """Runs a command of the version in `tree`, in the folder. Raises RuntimeError with what it printed if it fails."""
    env = dict(PYTHONPATH=str(tree), JAX_PLATFORMS="cpu", XLA_FLAGS=ONE_DEVICE)
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=os.environ | env, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command}: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def go_on(folder: pathlib.Path, train: Callable[..., object]) -> dict[str, list[dict]]:
    """{source: what is measured of each step} of a run that is continued and of one that reads the shards.

    train(*flags) is the training command, run in the folder.
    """
    steps = "--config.train_tokens=8 steps"
    train("--config=config.py", "--workdir=run", steps)
    train("--config=config.py:shards", "--workdir=from_shards")
    found = {}
    for name in ("run", "from_shards"):
        lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
        found[name] = [{key: line[key] for key in KEPT if key in line} for line in lines if "loss" in line]
    return found


def make(tree: pathlib.Path) -> None:
    """Writes the archive and what followed."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch, "earlier")
        (folder / "text").mkdir(parents=True)
        write_text(folder / "text")
        (folder / "config.py").write_text(CONFIG)
        jaxscale(folder, tree, "jaxscale.main", "--config=config.py", "--workdir=run")
        recipe = ("--config.tokenizer.name=bytes", "--config.stages=()", "--input=text/*.txt", "--output=shards")
        jaxscale(folder, tree, "jaxscale.cli", "prepare", "--workers=1", *recipe)
        shutil.rmtree(folder / "cache")
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(folder, "earlier")
        CONTINUED.write_text(
            json.dumps(go_on(folder, functools.partial(jaxscale, folder, tree, "jaxscale.main")), indent=1) + "\n"
        )


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]).resolve())
