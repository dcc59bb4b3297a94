"""Trains the quick start's model on raw text and on the same text prepared, and prints both validation losses.

    python docs/clean_against_raw.py --corpora=FOLDER --work=/tmp/clean [--seeds=3] [--tokens=1000000]

FOLDER/train/*.jsonl is the raw text, FOLDER/valid/*.jsonl text that neither model has seen; a byte is a token, so that
losses compare. The recipe is configs/data/web.py with its rules, without a trained tokenizer.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

BYTES = "--config.tokenizer.name=bytes"


def run(*arguments: str) -> None:
    """One command of jaxscale."""
    print("$ python -m", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", *arguments], check=True)


def prepare(files: pathlib.Path, output: pathlib.Path, *flags: str) -> str:
    """The manifest of the files prepared."""
    if not (output / "manifest.json").exists():
        run("jaxscale.cli", "prepare", f"--input={files}", f"--output={output}", BYTES, *flags)
    return str(output / "manifest.json")


def train(name: str, seed: int, shards: str, valid: str, work: pathlib.Path, tokens: int) -> float:
    """The last validation loss, in bits per byte, of a run on these shards."""
    workdir = work / f"{name}-{seed}"
    run(
        "jaxscale.main", "--config=configs/quickstart.py", f"--workdir={workdir}", f"--config.seed={seed}",
        "--config.data.name=tokens", f"--config.data.files={shards}", f"--config.data.val_files={valid}",
        f"--config.train_tokens={tokens}", "--config.eval.every_steps=0", "--config.eval.num_rows=512",
        "--config.checkpoint.save_every_steps=100000",
    )  # fmt: skip
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line["validation/bits_per_byte"] for line in lines if "validation/bits_per_byte" in line][-1]


def main() -> None:
    """Prints a row for each seed and the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    options = parser.parse_args()
    texts, work = options.corpora / "train" / "*.jsonl", options.work
    raw = prepare(texts, work / "raw", "--config.stages=()")
    clean = prepare(texts, work / "clean", "--config=configs/data/web.py")
    valid = prepare(options.corpora / "valid" / "*.jsonl", work / "valid", "--config.stages=()")
    found: dict[str, list[float]] = {"raw": [], "clean": []}
    for seed in range(options.seeds):
        for name, shards in (("raw", raw), ("clean", clean)):
            found[name].append(train(name, seed, shards, valid, work, options.tokens))
    print("seed  raw     clean   [bits per byte]")
    for seed, (a, b) in enumerate(zip(found["raw"], found["clean"])):
        print(f"{seed:<5} {a:.4f}  {b:.4f}")
    print(f"mean  {statistics.mean(found['raw']):.4f}  {statistics.mean(found['clean']):.4f}")


if __name__ == "__main__":
    main()
