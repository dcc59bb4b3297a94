"""The command `jaxscale VERB ...`: a table of verbs, each a module with main(argv), imported on use.

`python -m jaxscale.cli.VERB` runs the same code (`python -m jaxscale.main` for train). This module does not import jax.
"""

import difflib
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxscale.system import process
from jaxscale.system.exits import BadInput, codes_help, put, run_and_exit


class Verb(NamedTuple):
    """One verb: its line of help, and what prepares its process before jax is imported."""

    summary: str
    set_up: Callable[[], None]
    module: str = ""  # jaxscale.cli.VERB unless given


USES_DEVICES, NO_DEVICES = process.prepare, process.prepare_ahead
NONE: Callable[[], None] = lambda: None  # verbs that start other processes or do not import jax
GROUPS = {  # verbs by the stage of a run
    "before a run": {
        "plan": Verb(
            "estimate size, memory, time, cost and data of a run; or propose a model for a budget", NO_DEVICES
        ),
        "prepare": Verb("turn raw text into token shards whose documents can be traced", NONE),
        "convert": Verb("import a Hugging Face model, or export a checkpoint as one", NO_DEVICES),
        "preflight": Verb("compile a config's step for chips you do not have: memory, time, traffic", NO_DEVICES),
        "verify": Verb(
            "check on your config that resuming is exact and that results do not depend on the mesh", USES_DEVICES
        ),
        "qualify": Verb(
            "compare new chips with their datasheet: matmuls, memory, links, kernels, step, saves", USES_DEVICES
        ),
        "bench": Verb("measure the step and the loop, alone or compared with other programs", USES_DEVICES),
        "lab": Verb(
            "answer a question about a recipe with small runs: learning rate, batch, optimizer, precision, ...", NONE
        ),
        "rehearse": Verb(
            "try a run for minutes: step, evaluate, save, kill, resume, compare; prints GO or NO-GO", NONE
        ),
    },
    "the run": {
        "train": Verb("train a language model, or resume a run", USES_DEVICES, "jaxscale.main"),
        "supervise": Verb("restart a training after failures that a restart can fix", NONE),
        "watch": Verb("show a run in a terminal while it trains", NONE),
    },
    "during or after a run": {
        "sample": Verb("generate text with a model: from prompts, in a terminal, or on a chat page", USES_DEVICES),
        "evaluate": Verb(
            "evaluate checkpoints: text, multiple choice and cloze by likelihood, and lm-eval's tasks", USES_DEVICES
        ),
        "report": Verb("write one HTML page about a run, or several: curves, cost, data, incidents", NONE),
        "ckpt": Verb("list, verify, copy, prune and average checkpoints, without a device", NO_DEVICES),
        "trace": Verb("list the documents that a step trained on, or the steps that saw a document", NO_DEVICES),
    },
    "the shell": {"completion": Verb("print the completion script for bash or zsh", NONE)},
}
VERBS = {
    name: verb._replace(module=verb.module or f"jaxscale.cli.{name}")
    for verbs in GROUPS.values()
    for name, verb in verbs.items()
}


def main() -> None:
    """The console script: runs the verb on the command line and exits with its code."""
    run(sys.argv[1:])


def run_verb(verb: str) -> None:
    """Runs `jaxscale VERB` from `python -m` of the verb's module."""
    run([verb, *sys.argv[1:]])


def run(argv: list[str]) -> None:
    """Sets the process up for the verb, runs it, and exits with its code."""
    process.open_standard_streams()
    run_and_exit(lambda _: set_up_and_dispatch(argv), is_verb=bool(argv) and argv[0] in VERBS)


def set_up_and_dispatch(argv: list[str]) -> int:
    """Sets the process up for the verb, runs it and returns its exit code. Raises as `dispatch` does."""
    process.use_utf8()
    if argv and argv[0] in VERBS:
        VERBS[argv[0]].set_up()
    return dispatch(argv)


def dispatch(argv: list[str]) -> int:
    """Runs the verb that argv begins with and returns its exit code. Raises BadInput for an unknown verb."""
    verb, *arguments = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        put(verbs_help())
        return 0
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(VERBS)}"
        raise BadInput(f"jaxscale has no verb {verb!r}; {hint}")
    return command_of(verb)(arguments)


def command_of(verb: str) -> Any:
    """Imports and returns the Command of a verb."""
    return importlib.import_module(VERBS[verb].module).main


def help_of(verb: str) -> str:
    """Returns a verb's help page before --help wraps it to the terminal and appends groups of settings."""
    return command_of(verb).page


def verbs_help() -> str:
    """Returns the text of `jaxscale --help`: an example, a line for each verb by group, and the exit codes."""
    width = max(map(len, VERBS))
    lines = ["jaxscale VERB ...", "", "  jaxscale train --config=configs/quickstart.py", ""]
    for group, verbs in GROUPS.items():
        lines += [f"{group}:", *(f"  {name.ljust(width)}  {verb.summary}" for name, verb in verbs.items()), ""]
    lines += ["jaxscale VERB --help has an example and all flags.", "", "exit codes:", codes_help()]
    return "\n".join(lines)
