"""What becomes of each command of README and docs: a table that is read from the top, the first line that fits counts.

A command that no line fits fails the suite: add a line that says whether it can run here.
"""

import re
from typing import NamedTuple

CHEAP, SOAK, DRY, PARSED, INSTALL, OTHERS = "cheap", "soak", "dry run", "parsed", "install", "others"


class Kind(NamedTuple):
    """A line of the table."""

    name: str
    pattern: str  # of the command's words
    why: str
    code: int = 0  # that it ends with
    swap: tuple[tuple[str, str], ...] = ()  # in the words, where a page names what only a long run has
    more: tuple[str, ...] = ()  # flags behind those of the page: a smaller model, fewer steps


SMALL = (
    "--config.model.num_layers=1",
    "--config.model.embed_dim=32",
    "--config.model.num_heads=2",
    "--config.model.num_kv_heads=2",
    "--config.model.head_dim=16",
    "--config.model.mlp_dim=64",
    "--config.seq_len=64",
    "--config.batch_tokens=512",
    "--config.eval.num_rows=8",
    "--config.sample.num_tokens=5",
    "--config.train_tokens=6 steps",
)
FEWER = (
    "--config.train_tokens=4 steps",
    "--config.model.num_layers=1",
    "--config.batch_tokens=8 rows",
    "--config.eval.num_rows=8",
    "--config.sample.num_tokens=5",
)
NEWEST = (("--steps=4000", "--steps=20"), ("--last=5", "--last=2"))

KINDS = (
    Kind(INSTALL, r"^(pip install|python3 -m venv|\. \.venv)", "changes the environment"),
    Kind(OTHERS, r"^(gcloud|docker|hf|wandb|xprof|export|touch) ", "another program"),
    Kind(
        OTHERS,
        r"^(JAXSCALE_\w+=\S+ )?(pytest|ruff|pyright|\.ci/run|python docs/(build|scale_tables)\.py|python tests/)",
        "a tool of this repository",
    ),
    Kind(DRY, r"^(launch/\S+\.(sh|sbatch)|sbatch) ", "a cloud or a cluster"),
    Kind(PARSED, r"gs://|/shared/", "a bucket or a cluster's disk"),
    Kind(PARSED, r"FILE|FOLDER|\.\.\.|FLAGS|=RUN\b", "a pattern of a command"),
    Kind(
        PARSED,
        r"shards/code|runs/mixed",
        "needs the sets of its page; test_docs_commands_soak.py runs it word for word",
    ),
    Kind(PARSED, r"^jaxscale lab ", "makes dozens of runs; tests/lab/test_lab_runs.py makes a few"),
    Kind(PARSED, r"benchmarks\.time_to_loss ", "whole runs; tests/benchmarks/test_time_to_loss.py makes short ones"),
    Kind(PARSED, r"benchmarks\.scale ", "minutes; tests/benchmarks/test_scale.py measures a few documents"),
    Kind(PARSED, r"^jaxscale preflight ", "compiles for minutes; tests/cli/test_preflight_aot.py does"),
    Kind(
        PARSED,
        r"-hf\b|runs/(llama|qwen|base|dense|tuned|merged|longer)\b",
        "another's model; tests/interop, tests/test_finetuning.py and tests/test_long_context.py make small ones",
    ),
    Kind(
        PARSED,
        r"--branch_from=|--workdir=runs/(trunk|bounded)",
        "long runs; tests/test_run_branches.py makes short ones",
    ),
    Kind(
        PARSED,
        r"^jaxscale evaluate .*(--lm_eval|held/|lambada)",
        "files that a reader has; tests/cli and tests/eval make small ones",
    ),
    Kind(
        PARSED,
        r"--config\.classifier\.good=",
        "examples that a reader has; tests/corpus/test_classifier.py makes small ones",
    ),
    Kind(PARSED, r"runs/speedrun-1/chat", "a speedrun's model; tests/launch/test_speedrun.py makes one"),
    Kind(PARSED, r"--serve$", "does not end; tests/cli/test_report.py serves"),
    Kind(PARSED, r"^--config\.", "settings alone"),
    Kind(
        PARSED, r"configs/(1b|7b|13b|70b|175b|405b)\.py.*--(workdir|skip-data|config\.data)", "a model for accelerators"
    ),
    Kind(CHEAP, r"^jaxscale plan .*--topology=(?!here)|^jaxscale plan --(flops|model_size)=", "seconds"),
    Kind(CHEAP, r"^jaxscale (report|watch) --workdir=runs/", "seconds, on the records of a run"),
    Kind(CHEAP, r"^jaxscale ckpt \w+ --workdir=runs/", "seconds, on the checkpoints of a run", swap=NEWEST),
    Kind(CHEAP, r"^jaxscale prepare .*--plan$", "seconds"),
    Kind(CHEAP, r"^jaxscale completion ", "seconds"),
    Kind(CHEAP, r"^python -m jaxscale\.main --config=configs/7b\.py$", "the check before a run says no", code=3),
    Kind(PARSED, r"^jaxscale prepare --index ", "rows longer than the little text"),
    Kind(SOAK, r"^jaxscale prepare ", "prepares a little text"),
    Kind(SOAK, r"^jaxscale trace ", "reads the data of a run", swap=(("--step=12345", "--step=3"),)),
    Kind(SOAK, r"^jaxscale verify parity ", "many minutes", more=("--layers=1", "--small=on")),
    Kind(SOAK, r"^jaxscale verify resume ", "minutes", more=("--layers=1", "--small=on")),
    Kind(SOAK, r"^jaxscale bench loop ", "trains", more=("--steps=3", *SMALL)),
    Kind(SOAK, r"benchmarks\.(survive|layer_statistics) ", "trains", more=("--steps=2", "--rounds=1", *SMALL[:-1])),
    Kind(
        SOAK, r"^jaxscale bench step .*--against=", "times two programs", more=("--steps=1", "--rounds=1", "--warmup=0")
    ),
    Kind(SOAK, r"^jaxscale qualify ", "measures for minutes", more=("--only=devices", "--devices=2")),
    Kind(PARSED, r"^jaxscale bench step --config=configs/(olmoe|mixtral)", "a mixture of billions on a GPU"),
    Kind(SOAK, r"^jaxscale bench step --save", "times both specs", more=("--steps=1", "--warmup=0")),
    Kind(SOAK, r"benchmarks\.experts ", "times layers", more=("--rounds=1",)),
    Kind(SOAK, r"^jaxscale bench collectives", "times collectives", more=("--repeats=1", "--devices=2")),
    Kind(
        SOAK,
        r"^jaxscale bench data ",
        "times stages",
        swap=(
            ("--config.tokenizer.name=gpt2/tokenizer.json", "--config.tokenizer.name=bytes"),
            ("--against=E/bin/python docs/datatrove_rates.py", "--against=python other.py"),
        ),
        more=("--rounds=1",),
    ),
    Kind(SOAK, r"benchmarks\.sampling ", "times the writing of text", swap=(("--num_tokens=64", "--num_tokens=4"),)),
    Kind(SOAK, r"^jaxscale evaluate --workdir=runs/quickstart", "compiles"),
    Kind(SOAK, r"^jaxscale sample --workdir=runs/", "compiles", swap=(("--num_tokens=200", "--num_tokens=5"),)),
    Kind(SOAK, r"^jaxscale plan .*--topology=here", "needs bench step --save"),
    Kind(SOAK, r"^jaxscale plan --loss ", "fits a law to nine runs"),
    Kind(
        SOAK,
        r"^jaxscale train --config=configs/ladder\.py",
        "trains",
        more=("--config.batch_tokens=512", "--config.seq_len=64"),
    ),
    Kind(
        SOAK,
        r"configs/quickstart\.py.*--config\.train_tokens=",
        "goes on",
        more=(*SMALL[:-1], "--config.train_tokens=9 steps"),
    ),
    Kind(SOAK, r"^python -m jaxscale\.main --config=configs/quickstart\.py", "trains", more=SMALL),
    Kind(SOAK, r"^python -m jaxscale\.main --config=configs/(auto|small_mixture)\.py", "trains", more=FEWER),
    Kind(
        SOAK,
        r"^python -m jaxscale\.main --config=configs/(masked_lm|span_corruption)\.py",
        "trains a model that writes no samples",
        more=FEWER[:-1],
    ),
)


def kind_of(text: str) -> Kind | None:
    """The first line that fits, or None."""
    return next((kind for kind in KINDS if re.search(kind.pattern, text)), None)


# Blocks that are no commands: page and how their first line begins.
NOT_SHELL = (
    ("README.md", "step 310/316"),
    ("docs/run_folder.md", "runs/quickstart/"),
    ("docs/howto/add_model.md", "MODELS = {"),
    ("docs/convert.md", "bytes of the largest tensor"),
    ("docs/convert.md", "c.export = "),
    ("docs/evaluate.md", "docs: loss"),
    ("docs/evaluate.md", "c.evals = "),
    ("docs/gcs.md", "error: gs://"),
    ("docs/health.md", "health: step"),
    ("docs/howto/read_alert.md", "health: step"),
    ("docs/howto/upcycle.md", "init: upcycled"),
    ("docs/index.md", "step 310/316"),
    ("docs/sample.md", "runs/tiny/checkpoints/3: llama"),
    ("docs/watch.md", "jaxscale watch  runs/a  "),
    ("docs/watch.md", "[project.entry-points."),
)
