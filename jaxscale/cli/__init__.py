"""The command `jaxscale VERB ...`: a table of verbs, each a module with main(argv), imported when it is asked for.

`python -m jaxscale.cli.VERB` is the same door (`python -m jaxscale.main` for train). Nothing here imports jax.
"""

import difflib
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxscale.system import process
from jaxscale.system.exits import BadInput, codes_help, put, run_and_exit


class Verb(NamedTuple):
    """What a verb does, and what its process is set up with before jax is imported."""

    what: str
    set_up: Callable[[], None]
    module: str = ""  # jaxscale.cli.VERB unless given


HERE, AHEAD = process.prepare, process.prepare_ahead  # the devices of this machine; none of them
NONE: Callable[[], None] = lambda: None  # what these start sets itself up
GROUPS = {  # when a person wants which verb
    "before a run": {
        "plan": Verb(
            "what a run costs before it is paid for: size, memory, time, money, data; or a model for the money", AHEAD
        ),
        "prepare": Verb("turn raw text into token shards, each document traceable", NONE),
        "convert": Verb("bring a Hugging Face model in, or take a checkpoint out as one", AHEAD),
        "preflight": Verb("compile a config's step for chips that are not here: memory, time, traffic", AHEAD),
        "verify": Verb("prove on your config that resuming is exact and that no mesh changes a number", HERE),
        "qualify": Verb(
            "measure new chips beside their datasheet: products, memory, links, kernels, step, saves", HERE
        ),
        "bench": Verb("measure the step and the loop, alone and beside other programs", HERE),
        "lab": Verb("answer a question about a recipe by small runs: rate, batch, optimizer, precision, ...", NONE),
        "rehearse": Verb("try a run here for minutes: step, evaluate, save, kill, go on, compare; GO or NO-GO", NONE),
    },
    "the run": {
        "train": Verb("train a language model, or go on with one", HERE, "jaxscale.main"),
        "supervise": Verb("start a training again as long as that can help", NONE),
        "watch": Verb("show a run in a terminal while it trains", NONE),
    },
    "after it, or beside it": {
        "sample": Verb("write text with a model: from prompts, in a terminal, or as a chat page", HERE),
        "evaluate": Verb(
            "measure a model: text, multiple choice and cloze by likelihood, lm-eval's tasks, of all checkpoints", HERE
        ),
        "report": Verb("one HTML page about a run, or several: curves, cost, data, incidents", NONE),
        "ckpt": Verb("list, check, copy, thin out and average checkpoints, without a device", AHEAD),
        "trace": Verb("list the documents that a step trained on, or the steps that saw a document", AHEAD),
    },
    "the shell": {"completion": Verb("print what completes this command in bash or zsh", NONE)},
}
VERBS = {
    verb: about._replace(module=about.module or f"jaxscale.cli.{verb}")
    for verbs in GROUPS.values()
    for verb, about in verbs.items()
}


def main() -> None:
    """The console script: runs the verb that the command line names, and leaves with its exit code."""
    run(sys.argv[1:])


def run_verb(verb: str) -> None:
    """What `python -m` with a verb's module does: the same as `jaxscale VERB`."""
    run([verb, *sys.argv[1:]])


def run(argv: list[str]) -> None:
    """Sets the process up for the verb, runs it, and leaves with its exit code."""
    process.open_standard_streams()
    run_and_exit(lambda _: set_up_and_dispatch(argv), is_verb=bool(argv) and argv[0] in VERBS)


def set_up_and_dispatch(argv: list[str]) -> int:
    """Sets the process up for the verb, runs it and returns its exit code. Raises as `dispatch` does."""
    process.use_utf8()
    if argv and argv[0] in VERBS:
        VERBS[argv[0]].set_up()
    return dispatch(argv)


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
    return command_of(verb)(rest)


def command_of(verb: str) -> Any:
    """The Command of a verb, imported now."""
    return importlib.import_module(VERBS[verb].module).main


def help_of(verb: str) -> str:
    """The page of a verb, as it is written: --help fits it to the terminal, and has groups of settings behind it."""
    return command_of(verb).page


def verbs_help() -> str:
    """What `jaxscale --help` prints: an example, a line for each verb, by when it is wanted, and the exit codes."""
    width = max(map(len, VERBS))
    lines = ["jaxscale VERB ...", "", "  jaxscale train --config=configs/quickstart.py", ""]
    for group, verbs in GROUPS.items():
        lines += [f"{group}:", *(f"  {verb.ljust(width)}  {about.what}" for verb, about in verbs.items()), ""]
    lines += ["jaxscale VERB --help tells more, an example first.", "", "exit codes:", codes_help()]
    return "\n".join(lines)
