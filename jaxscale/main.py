"""Trains a language model, or resumes training.

  jaxscale train --config=configs/quickstart.py --workdir=runs/first      or python -m jaxscale.main

A run that has begun resumes from its newest checkpoint. On a Linux CPU the process restarts itself once to use huge
pages, unless JAXSCALE_HUGE_PAGES=0.
"""

import dataclasses

from jaxscale import cli
from jaxscale.config import RunConfig
from jaxscale.runtime.hosts.discovery import HostFlags
from jaxscale.runtime.run.options import RunOptions
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class TrainFlags(RunOptions, HostFlags):
    """Flags of `jaxscale train`."""

    config: str = flag("", "name or Python file of a config; NAME:TEXT calls its get_config(TEXT)", "CONFIG")
    settings: dict[str, str] = flag(
        dict, "overrides any setting by its dotted name, also if the file does not set it", "VALUE", name="config.NAME"
    )
    skip_data: str | None = flag(
        None,
        "skips batches [A, B) and [C, D) in training; same as --config.data.skip_batches",
        "A:B,C:D",
        name="skip-data",
    )
    init_from: str | None = flag(None, "starts from the weights of another run; same as --config.init.from_path", "RUN")
    branch_from: str | None = flag(
        None,
        "starts a branch of another run, with its whole state and data position, at the newest step or at "
        "WORKDIR/checkpoints/STEP",
        "RUN",
    )
    decay_tokens: str | None = flag(
        None,
        "for a branch: decays the learning rate over this number of tokens, or '2000 steps', then ends; optim.* sets "
        "the shape and the final learning rate",
        "TOKENS",
    )
    budget_dollars: str | None = flag(None, "", "DOLLARS")
    deadline: str | None = flag(
        None,
        "reports if the run will cost more or take longer, estimated from its speed; same as "
        "--config.limit.dollars and limit.deadline; limit.on_overrun=decay ends the run in time",
        "12h",
    )
    workdir: str | None = flag(
        None, "folder of checkpoints and metrics, from which a run resumes; default: runs/<config>", "FOLDER"
    )


@command(TrainFlags, settings=RunConfig)
def main(arguments: Arguments) -> None:
    """Trains a model to the end of its run."""
    from jaxscale.api.training import load_train_config, train_in  # imports JAX, whose environment cli.main() has set

    flags = arguments.flags
    workdir = flags.workdir or f"runs/{config_file.config_name(arguments.config)}"
    if flags.decay_tokens and not flags.branch_from:
        raise BadInput(f"--decay_tokens={flags.decay_tokens} requires --branch_from; add --branch_from=RUN")
    branch = (flags.branch_from, flags.decay_tokens) if flags.branch_from else None
    cfg = load_train_config(arguments.config, config_file.with_flags(arguments), workdir, branch)
    train_in(workdir, cfg, flags, arguments.options)


if __name__ == "__main__":
    cli.main("train")
