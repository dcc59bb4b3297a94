"""Command line: a table of verbs. Each verb is a module with main(argv), which is imported on use.

`python -m jaxscale.cli VERB` is equivalent (also `python -m jaxscale.main` for train). This module does not import jax.
"""

import difflib
import importlib
import sys
from typing import Any

import jaxscale
from jaxscale.system import process
from jaxscale.system.exits import BadInput, codes_help, put, run_and_exit

GROUPS = {  # {stage of a run: {verb: line of help}}
    "before a run": {
        "plan": "estimate size, memory, time, cost and data of a run; or propose a model for a budget",
        "prepare": "turn raw text into token shards whose documents can be traced",
        "convert": "import a Hugging Face model, or export a checkpoint as one",
        "preflight": "compile a config's step for chips you do not have: memory, time, communication",
        "verify": "check that a config resumes exactly and that its results do not depend on the mesh",
        "qualify": "test new chips against their datasheet: matmuls, memory, links, kernels, step, saves",
        "bench": "measure the step and the loop, alone or compared with other programs",
        "lab": "answer a question about a recipe with small runs: learning rate, batch, optimizer, precision, ...",
        "rehearse": "try a config for a few minutes: train, evaluate, save, kill, resume, compare; prints GO or NO-GO",
    },
    "the run": {
        "train": "train a language model, or resume a run",
        "supervise": "restart a training run after failures that a restart can fix",
        "watch": "show a run in a terminal while it trains",
    },
    "during or after a run": {
        "sample": "generate text with a model: from prompts, in a terminal, or on a chat page",
        "evaluate": "evaluate checkpoints: text, multiple choice and cloze by likelihood, and lm-eval's tasks",
        "report": "write one HTML page about a run, or several: curves, cost, data, incidents",
        "ckpt": "list, verify, copy, prune and average checkpoints, without a device",
        "trace": "list the documents that a step trained on, or the steps that saw a document",
    },
    "the shell": {"completion": "print the completion script for bash or zsh"},
}
VERBS = {verb: summary for verbs in GROUPS.values() for verb, summary in verbs.items()}
# the other verbs start other processes, compare on the CPU (rehearse), or do not import jax
USES_DEVICES = ("verify", "qualify", "bench", "train", "sample", "evaluate")
NO_DEVICES = ("plan", "convert", "preflight", "ckpt", "trace")  # verbs that import jax without using devices


def main(*words: str) -> None:
    """Runs the verb on the command line and exits with its code. `words` are inserted before the arguments."""
    argv = [*words, *sys.argv[1:]]
    process.open_standard_streams()
    is_verb = bool(argv) and argv[0] in VERBS

    def set_up_and_dispatch(_: list[str]) -> int:
        process.use_utf8()
        if is_verb and argv[0] in USES_DEVICES:
            process.prepare()
        elif is_verb and argv[0] in NO_DEVICES:
            process.prepare_ahead()
        return dispatch(argv)

    run_and_exit(set_up_and_dispatch, is_verb=is_verb)


def dispatch(argv: list[str]) -> int:
    """Runs the verb that is the first word of argv. Returns its exit code. Raises BadInput for an unknown verb."""
    verb, *arguments = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        put(verbs_help())
        return 0
    if verb == "--version":
        put(f"jaxscale {jaxscale.__version__}")
        return 0
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"verbs: {', '.join(VERBS)}"
        raise BadInput(f"jaxscale has no verb {verb!r}; {hint}")
    return command_of(verb)(arguments)


def module_of(verb: str) -> str:
    """Returns the name of the module whose main(argv) runs a verb."""
    return "jaxscale.main" if verb == "train" else f"jaxscale.cli.{verb}"


def command_of(verb: str) -> Any:
    """Imports and returns the Command of a verb."""
    return importlib.import_module(module_of(verb)).main


def verbs_help() -> str:
    """Returns the text of `jaxscale --help`: an example, one line per verb, and the exit codes."""
    width = max(map(len, VERBS))
    lines = ["jaxscale VERB ...", "", "  jaxscale train --config=configs/quickstart.py", ""]
    for group, verbs in GROUPS.items():
        lines += [f"{group}:", *(f"  {verb.ljust(width)}  {summary}" for verb, summary in verbs.items()), ""]
    lines += ["jaxscale VERB --help has an example and all flags.", "", "exit codes:", codes_help()]
    return "\n".join(lines)
