"""The command `jaxscale VERB ...`: a table of verbs, each a module with main(argv), imported when it is asked for.

`python -m jaxscale.cli.VERB` is the same door (`python -m jaxscale.main` for train). Nothing here imports jax.
"""

import difflib
import importlib
import sys

from jaxscale.system import process
from jaxscale.system.exits import BadInput, codes_help, put, run_and_exit

VERBS = {
    "train": ("jaxscale.main", "train a language model, or go on with one"),
    "prepare": (
        "jaxscale.cli.prepare",
        "turn raw text into token shards, each document traceable",
    ),
    "plan": (
        "jaxscale.cli.plan",
        "what a run costs before it is paid for: size, memory, time, money, data; or a model for the money",
    ),
    "preflight": (
        "jaxscale.cli.preflight",
        "compile a config's step for chips that are not here: memory, time, traffic",
    ),
    "bench": ("jaxscale.cli.bench", "measure the step and the loop, alone and beside other programs"),
    "ckpt": ("jaxscale.cli.ckpt", "list, check, copy, thin out and average checkpoints, without a device"),
    "convert": (
        "jaxscale.cli.convert",
        "bring a Hugging Face model in, or take a checkpoint out as one",
    ),
    "trace": ("jaxscale.cli.trace", "list the documents that a step trained on, or the steps that saw a document"),
    "evaluate": (
        "jaxscale.cli.evaluate",
        "measure a model: text, multiple choice and cloze by likelihood, lm-eval's tasks, of all checkpoints",
    ),
    "rehearse": (
        "jaxscale.cli.rehearse",
        "try a run here for minutes: step, evaluate, save, kill, go on, compare; GO or NO-GO",
    ),
    "report": (
        "jaxscale.cli.report",
        "one HTML page about a run, or several: curves, cost, data, incidents",
    ),
    "sample": ("jaxscale.cli.sample", "write text with a model: from prompts, in a terminal, or as a chat page"),
    "supervise": ("jaxscale.cli.supervise", "start a training again as long as that can help"),
    "watch": ("jaxscale.cli.watch", "show a run in a terminal while it trains"),
    "completion": ("jaxscale.cli.completion", "print what completes this command in bash or zsh"),
    "verify": ("jaxscale.cli.verify", "prove on your config that resuming is exact and that no mesh changes a number"),
}
GROUPS = {  # when a person wants which verb
    "before a run": ("plan", "prepare", "convert", "preflight", "verify", "bench", "rehearse"),
    "the run": ("train", "supervise", "watch"),
    "after it, or beside it": ("sample", "evaluate", "report", "ckpt", "trace"),
    "the shell": ("completion",),
}
AHEAD = ("plan", "preflight", "trace", "ckpt", "convert")  # verbs that use no device that is here
WITHOUT_DEVICE = ("completion", "prepare", "rehearse", "report", "supervise", "watch")  # what they start sets itself up


def main() -> None:
    """The console script: runs the verb that the command line names, and leaves with its exit code."""
    run(sys.argv[1:])


def run_verb(verb: str) -> None:
    """What `python -m` with a verb's module does: the same as `jaxscale VERB`."""
    run([verb, *sys.argv[1:]])


def run(argv: list[str]) -> None:
    """Sets the process up for the verb, runs it, and leaves with its exit code."""
    verb = argv[0] if argv else ""
    if verb in AHEAD:
        process.prepare_ahead()
    elif verb in VERBS and verb not in WITHOUT_DEVICE:
        process.prepare()
    run_and_exit(lambda _: dispatch(argv), is_verb=verb in VERBS)


def dispatch(argv: list[str]) -> int:
    """Runs the verb that argv begins with and returns its exit code. Raises BadInput for a verb that is not there."""
    verb, *rest = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        put(verbs_help())
        return 0
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(VERBS)}"
        raise BadInput(f"jaxscale has no verb {verb!r}; {hint}")
    return importlib.import_module(VERBS[verb][0]).main(rest)


def help_of(verb: str) -> str:
    """The page of a verb, as it is written: --help fits it to the terminal, and has groups of settings behind it."""
    return importlib.import_module(VERBS[verb][0]).main.page


def verbs_help() -> str:
    """What `jaxscale --help` prints: an example, a line for each verb, by when it is wanted, and the exit codes."""
    width = max(map(len, VERBS))
    lines = ["jaxscale VERB ...", "", "  jaxscale train --config=configs/quickstart.py", ""]
    for group, verbs in GROUPS.items():
        lines += [f"{group}:", *(f"  {verb.ljust(width)}  {VERBS[verb][1]}" for verb in verbs), ""]
    lines += ["jaxscale VERB --help tells more, an example first.", "", "exit codes:", codes_help()]
    return "\n".join(lines)
