"""Records what a version of the program computes and prints, and says where two records differ.

    python tests/golden/compare_versions.py record OUT [--tree=CHECKOUT] [--runs=zero3,lora]
    python tests/golden/compare_versions.py compare OLD NEW

A record is a folder: of each run in small_runs.py the lowered programs (StableHLO without names and places in the
source), losses and token hashes of 20 steps; the settings with types and defaults, the flags of each verb.
Everything is seen from outside, so that it serves for versions with nothing but their command line in common.
"""

import difflib
import gzip
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from small_runs import DEVICES, RUNS

HERE = pathlib.Path(__file__).parent
ORDERED = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
SAME = ("loss", "tokens_hash", "grad_norm", "lr", "valid_loss", "skipped_total")  # of a line of metrics.jsonl
WORDS = "the of and to in that it was for on with as by from they we there have which this had not are were".split()
LEAST_LINES = 60  # of a program that is compared: the small ones are the host's business
VERBS = (
    "train prepare plan preflight bench ckpt convert trace evaluate rehearse report sample supervise watch completion "
    "verify"
).split()


def write_text(folder: pathlib.Path) -> None:
    """Two sources of made-up words, the same at each call."""
    for name, seed, documents in (("one", 1, 60), ("two", 2, 40)):
        rng = random.Random(seed)
        for number in range(documents):
            text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 200)))
            (folder / f"{name}-{number:03}.txt").write_text(f"{text}.\n")


def normalised(module: str) -> str:
    """A module's text without places in the source, and with functions numbered as they come."""
    lines = [line for line in module.splitlines() if not line.startswith("#loc")]
    text = re.sub(r"\s*loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "", "\n".join(lines))
    text = re.sub(r'jax\.result_info = "[^"]*"(, )?', "", text)
    text = re.sub(r"\{\s*\}", "{}", text)
    names: dict[str, str] = {}
    return re.sub(r"@[\w$.]+", lambda m: names.setdefault(m[0], f"@f{len(names)}"), text)


def run(tree: pathlib.Path, command: list[str], **env: str) -> str:
    """What the command prints. Raises if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "120"} | env,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def record_run(tree: pathlib.Path, name: str, data: pathlib.Path, out: pathlib.Path) -> None:
    """Trains 20 steps and keeps programs and metrics."""
    with tempfile.TemporaryDirectory() as scratch:
        work = pathlib.Path(scratch)
        env = dict(
            SMALL_RUNS_DATA=str(data), JAX_DUMP_IR_TO=str(work / "ir"), JAX_DUMP_IR_MODES="stablehlo",
            JAX_PLATFORMS="cpu",
            # scheduled for memory, as the program does now by itself: versions before it may stand still
            XLA_FLAGS=f"--xla_force_host_platform_device_count={DEVICES.get(name, 8)} {ORDERED}",
        )  # fmt: skip
        run(tree, ["jaxscale.main", f"--config={HERE / 'small_runs.py'}:{name}", f"--workdir={work / 'w'}"], **env)
        lines = [json.loads(line) for line in (work / "w" / "metrics.jsonl").read_text().splitlines()]
        kept = [{key: line[key] for key in ("step", *SAME) if key in line} for line in lines]
        (out / f"{name}.metrics.json").write_text("\n".join(map(json.dumps, kept)) + "\n")
        found = sorted({normalised(path.read_text()) for path in (work / "ir").rglob("*.mlir")}, key=len)
        large = [text for text in found if text.count("\n") >= LEAST_LINES]
        with gzip.open(out / f"{name}.programs.gz", "wt") as file:
            json.dump(large, file)


def record(out: pathlib.Path, tree: pathlib.Path, names: list[str]) -> None:
    """Writes the record of the version in `tree`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder)
        write_text(data)
        for name in names:
            print(name, flush=True)
            record_run(tree, name, data, out)
    if names != list(RUNS):
        return
    (out / "settings.txt").write_text(run(tree, ["jaxscale.main", "--help", "all"]))
    for verb in VERBS:
        (out / f"help-{verb}.txt").write_text(run(tree, ["jaxscale.cli", verb, "--help"]))


def flags(page: str) -> list[str]:
    """The flags and settings of a help page, with types and defaults, without what is said of them."""
    found = re.findall(r"(?m)^\s*(--config\.\S+?=.*|--[\w-]+(?:=\S+)?)", page)
    return sorted(flag.strip() for flag in found)


def changed(before: str, after: str) -> Iterator[str]:
    """The lines that differ."""
    return difflib.unified_diff(before.splitlines(), after.splitlines(), "old", "new", n=0, lineterm="")


def compare(old: pathlib.Path, new: pathlib.Path) -> int:
    """Prints each difference; returns how many there are."""
    differences = 0
    for path in sorted(old.iterdir()):
        other = new / path.name
        if not other.exists():
            print(f"{path.name}: not recorded")
            differences += 1
            continue
        if path.suffix == ".gz":
            before, after = (json.loads(gzip.open(one, "rt").read()) for one in (path, other))
            lost = [text for text in before if text not in after]
            if lost:
                differences += 1
                sizes = [text.count("\n") for text in lost]
                print(f"{path.name}: {len(lost)} of {len(before)} programs are others, of {sizes} lines")
                nearest = min(after, key=lambda text: abs(len(text) - len(lost[-1])))
                changes = difflib.unified_diff(
                    lost[-1].splitlines(), nearest.splitlines(), "old", "new", n=0, lineterm=""
                )
                print("\n".join(line[:160] for _, line in zip(range(20), changes)))
            continue
        before, after = (one.read_text() for one in (path, other))
        left, right = (
            (flags(before), flags(after)) if path.suffix == ".txt" else (before.splitlines(), after.splitlines())
        )
        if left != right:
            differences += 1
            print(f"{path.name}:")
            print("\n".join(line for line in difflib.unified_diff(left, right, "old", "new", n=0, lineterm="")))
    print(f"{differences} differences")
    return differences


if __name__ == "__main__":
    options = dict(arg.removeprefix("--").split("=", 1) for arg in sys.argv[1:] if arg.startswith("--"))
    verb, *paths = [pathlib.Path(arg) if i else arg for i, arg in enumerate(a for a in sys.argv[1:] if a[:2] != "--")]
    if verb == "record":
        chosen = options["runs"].split(",") if "runs" in options else list(RUNS)
        record(paths[0].resolve(), pathlib.Path(options.get("tree", HERE.parent.parent)).resolve(), chosen)
    else:
        sys.exit(bool(compare(*paths)))
