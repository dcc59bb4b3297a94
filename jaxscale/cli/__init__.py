"""The command `jaxscale VERB ...`: a table of verbs, each a module with main(argv), imported when it is asked for.

`python -m jaxscale.cli.VERB` is the same door (`python -m jaxscale.main` for train). Nothing here imports jax.
"""

import difflib
import importlib
import sys

from jaxscale import process
from jaxscale.exits import run_and_exit

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
    "trace": ("jaxscale.cli.trace", "list the documents that a step trained on, or the steps that saw a document"),
    "rehearse": (
        "jaxscale.cli.rehearse",
        "try a run here for minutes: step, evaluate, save, kill, go on, compare; GO or NO-GO",
    ),
    "report": (
        "jaxscale.cli.report",
        "one HTML page about a run, or several: curves, cost, data, incidents",
    ),
    "supervise": ("jaxscale.cli.supervise", "start a training again as long as that can help"),
    "watch": ("jaxscale.cli.watch", "show a run in a terminal while it trains"),
    "verify": ("jaxscale.cli.verify", "prove on your config that resuming is exact and that no mesh changes a number"),
}
AHEAD = ("plan", "preflight", "trace", "ckpt")  # verbs that use no device that is here
WITHOUT_DEVICE = ("prepare", "rehearse", "report", "supervise", "watch")  # what they start sets itself up


def main() -> None:
    """The console script. Leaves with the verb's exit code."""
    if sys.argv[1:] and sys.argv[1] in VERBS:
        set_up(sys.argv[1])
    run_and_exit(dispatch)


def set_up(verb: str) -> None:
    """Sets the process up for a verb, before it imports jax."""
    if verb in AHEAD:
        process.prepare_ahead()
    elif verb not in WITHOUT_DEVICE:
        process.prepare()


def dispatch(argv: list[str]) -> int:
    """Runs the verb that argv begins with and returns its exit code. Raises ValueError for a verb that is not there."""
    verb, *rest = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(verbs_help())
        return 0
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
        raise ValueError(f"jaxscale has no verb {verb!r}; " + (f"did you mean {close[0]!r}?" if close else verb_list()))
    return importlib.import_module(VERBS[verb][0]).main(rest)


def verbs_help() -> str:
    """What `jaxscale --help` prints: a line for each verb."""
    width = max(map(len, VERBS))
    lines = [f"  {verb.ljust(width)}  {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(["jaxscale VERB ...", "", *lines, "", "jaxscale VERB --help tells more."])


def verb_list() -> str:
    """'it has train, verify'."""
    return f"it has {', '.join(VERBS)}"
