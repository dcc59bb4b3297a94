"""Trains a language model, or goes on with one.

  jaxscale train --config=configs/quickstart.py --workdir=runs/first      python -m jaxscale.main is the same

A run that has begun goes on from its newest checkpoint. On a Linux CPU the process starts itself again once, with
huge pages for its memory; JAXSCALE_HUGE_PAGES=0 leaves that out.
"""

import dataclasses

from jaxscale import config_file
from jaxscale.cli import run_verb
from jaxscale.command_line import Arguments, flag
from jaxscale.config import RunConfig
from jaxscale.config_file import config_name
from jaxscale.help_text import command
from jaxscale.hosts.place import HostFlags
from jaxscale.run.options import RunOptions


@dataclasses.dataclass(frozen=True)
class TrainFlags(RunOptions, HostFlags):
    """The flags of `jaxscale train`."""

    config: str = flag("", "a file with get_config(); FILE.py:TEXT hands TEXT to it", "FILE")
    settings: dict[str, str] = flag(
        dict, "sets any setting by its dotted name, named in the file or not", "VALUE", name="config.NAME"
    )
    skip_data: str | None = flag(
        None,
        "batches [A, B) and [C, D) are never trained on; the same as --config.data.skip_batches",
        "A:B,C:D",
        name="skip-data",
    )
    init_from: str | None = flag(None, "begins with another run's weights; the same as --config.init.from_path", "RUN")
    workdir: str | None = flag(
        None, "where checkpoints and metrics go, and from where a run goes on; default runs/<config>", "FOLDER"
    )


@command(TrainFlags, __doc__, settings=RunConfig)
def main(arguments: Arguments) -> None:
    """Trains to the end."""
    workdir = arguments.flags.workdir or f"runs/{config_name(arguments.config)}"
    from jaxscale.api.training import (
        train_file,  # imports JAX, which reads its environment then: run_verb sets it first
    )

    train_file(arguments.config, config_file.with_flags(arguments), workdir, arguments.flags, arguments.options)


if __name__ == "__main__":
    run_verb("train")
